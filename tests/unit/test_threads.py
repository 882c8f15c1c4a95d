"""One thread reads a model at a time; plain passes of other threads go on as if nobody did; the model is restored."""

import threading

import pytest
import torch
from tiny_models import tiny_model

from sinkscope.errors import InputError
from sinkscope.models.loading import load
from sinkscope.tracing.trace import trace

IDS = torch.randint(10, 97, (4, 40), generator=torch.Generator().manual_seed(0))


def in_a_thread(call):
    """What a call returns or raises in another thread."""
    found = []

    def run():
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(timeout=900)
    return found[0]


def logits(model):
    with torch.no_grad():
        return model(IDS[:2]).logits


@pytest.mark.parametrize(
    ("family", "implementation"),
    [
        *(("llama", "sdpa"), ("llama", "eager"), ("gemma2", "eager")),
        *(("gpt2", "sdpa"), ("falcon", "sdpa"), ("learned_sink", "sdpa")),
    ],
)
def test_a_plain_pass_while_another_thread_reads(family, implementation):
    if family == "learned_sink":
        model = load("reference:learned_sink").model
    else:
        model = tiny_model(family, attn_implementation=implementation)
    expected, before, found = logits(model), trace(model, IDS), []
    layer = model.get_decoder().layers[1] if hasattr(model.get_decoder(), "layers") else model.get_decoder().h[1]

    def meanwhile(*_):
        handle.remove()
        found.append(in_a_thread(lambda: logits(model)))

    handle = layer.register_forward_hook(meanwhile)
    reading = trace(model, IDS)
    torch.testing.assert_close(found[0], expected)
    assert torch.equal(reading.recording["received"], before.recording["received"])
    assert torch.equal(logits(model), expected)


def test_a_pass_that_began_before_the_reading_ends_as_it_would_have():
    model = tiny_model("llama")
    expected, started, go_on, found = logits(model), threading.Event(), threading.Event(), []

    def pause(*_):
        if threading.current_thread() is slow:
            started.set()
            go_on.wait(60)

    handle = model.model.layers[0].register_forward_hook(pause)
    slow = threading.Thread(target=lambda: found.append(logits(model)))
    slow.start()
    started.wait(60)

    def resume(*_):
        again.remove()
        go_on.set()
        slow.join(60)

    again = model.model.layers[1].register_forward_hook(resume)
    trace(model, IDS)
    handle.remove()
    torch.testing.assert_close(found[0], expected)


def test_a_second_reader_is_refused_and_the_model_restored():
    model = tiny_model("llama")
    loaded, expected, found = load(model), logits(model), []
    implementation = model.config._attn_implementation

    def meanwhile(*_):
        handle.remove()
        found.append(in_a_thread(lambda: trace(loaded, IDS)))

    handle = model.model.layers[1].register_forward_hook(meanwhile)
    first = trace(loaded, IDS)
    assert isinstance(found[0], InputError)
    assert "Another thread is still reading" in str(found[0])
    assert model.config._attn_implementation == implementation
    assert torch.equal(logits(model), expected)
    # The control: when the first is done, the other thread may read, and reads the same.
    again = in_a_thread(lambda: trace(loaded, IDS))
    assert torch.equal(again.recording["received"], first.recording["received"])


def test_two_models_are_read_at_once():
    model, other, found = tiny_model("llama"), tiny_model("llama", seed=1), []

    def meanwhile(*_):
        handle.remove()
        found.append(in_a_thread(lambda: trace(other, IDS)))

    handle = model.model.layers[1].register_forward_hook(meanwhile)
    trace(model, IDS)
    assert torch.equal(found[0].recording["received"], trace(other, IDS).recording["received"])
