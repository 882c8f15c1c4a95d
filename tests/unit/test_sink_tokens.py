"""Sinks as masks: by attention against eager maps, by neurons, and step by step with a cache."""

import math
import runpy
from pathlib import Path

import pytest
import torch
from planted_models import planted_chain, random_tokens
from tiny_models import CONFIGURATIONS, tiny_model

import sinkscope
from sinkscope.audits.sink_neurons import SinkNeuron, SinkNeurons, _best_threshold, _choose, attention_share
from sinkscope.models.anatomy import Neuron, anatomy_of

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def chain():
    model, facts = planted_chain(0)
    return model, random_tokens(facts, num_sequences=8, length=48)


def test_by_attention_they_are_the_published_rate_of_each_text(chain):
    model, ids = chain
    found = sinkscope.sink_tokens(model, ids[:3])
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            maps_LBHTS = torch.stack(model(ids[:3], output_attentions=True).attentions)
    finally:
        model.set_attn_implementation("sdpa")
    alpha_LBHS = maps_LBHTS.sum(3) / torch.arange(48, 0, -1)
    rate_BS = (alpha_LBHS > 0.3).double().mean((0, 2))
    assert torch.allclose(found.rate.double(), rate_BS)
    assert torch.allclose(found.received, alpha_LBHS.mean((0, 2)), atol=1e-5)
    expected = (rate_BS >= 0.05) & (torch.arange(48) < 48 - 16)
    assert torch.equal(found.mask, expected)
    assert found.positions(0) == [0]
    assert repr(found) == "SinkTokens(sinks by attention: 3 in 3 x 48 tokens)"


def test_neurons_found_on_some_texts_tell_the_sinks_of_others(chain):
    model, ids = chain
    neurons = sinkscope.sink_neurons(model, ids[:4])
    assert (neurons.precision, neurons.recall, neurons.num_sinks) == (1, 1, 4)
    found = sinkscope.sink_tokens(model, ids[4:], neurons=neurons)
    assert torch.equal(found.mask, sinkscope.sink_tokens(model, ids[4:]).mask)
    assert found.received is None
    # Control: other neurons of the same layers at the same thresholds do not.
    others = [
        chosen._replace(neuron=chosen.neuron._replace(neuron=chosen.neuron.neuron ^ 1)) for chosen in neurons.neurons
    ]
    assert not torch.equal(sinkscope.sink_tokens(model, ids[4:], neurons=_neurons(*others)).mask, found.mask)


def test_texts_without_sinks_have_no_neurons():
    model = tiny_model("llama", scale=1.0)
    ids = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(0))
    found = sinkscope.sink_tokens(model, ids)
    assert not found.mask.any()
    assert not found.fired.any()
    assert "none" in repr(found.neurons)


def test_neurons_that_are_silent_at_the_sinks_are_not_chosen():
    """As ReLU neurons may be. Control: one that fires there alone is."""
    mask, silent, loud = torch.zeros(2, 40, dtype=torch.bool), torch.zeros(2, 40), torch.zeros(2, 40)
    mask[:, 0], loud[:, 0] = True, 5.0
    found = _choose({Neuron(0, None, 1): silent}, mask, "planted")
    assert (found.neurons, found.recall, found.num_sinks) == ((), 0.0, 2)
    assert math.isnan(found.precision)
    found = _choose({Neuron(0, None, 1): silent, Neuron(0, None, 2): loud}, mask, "planted")
    assert ([chosen.neuron for chosen in found.neurons], found.precision, found.recall) == (
        [Neuron(0, None, 2)],
        1.0,
        1.0,
    )


def test_the_threshold_of_hand_worked_values():
    values = torch.tensor([[9.0, 1.0, 6.0, 2.0, 0.5, -3.0]])
    mask = torch.tensor([[True, False, True, False, False, False]])
    fired = torch.zeros_like(mask)
    assert _best_threshold(values, mask, fired) == pytest.approx((1.0, 1 - 2 / 6, 4.0))
    assert _best_threshold(-values, mask, fired) == pytest.approx((1.0, 1 - 2 / 6, -4.0))
    # What another neuron has found already needs no threshold: the second sink alone is left.
    fired[0, 0] = True
    assert _best_threshold(values, mask, fired)[2] == 4.0


def test_of_thresholds_near_the_best_the_one_that_tells_as_many_sinks_as_there_are():
    values = torch.arange(200.0, 0.0, -1.0)[None]
    mask = torch.zeros(1, 200, dtype=torch.bool)
    mask[0, :99] = mask[0, 102] = True
    # Telling 99 is best, F1 198 / 199; telling 100 is less than 0.01 worse, and as many as there are.
    assert _best_threshold(values, mask, torch.zeros_like(mask))[::2] == pytest.approx((0.99, 100.5))
    mask[0, 102], mask[0, 180:] = False, True
    # As many as there are would be 119, F1 198 / 238: much worse than the best, 198 / 218. 198 / 220 is not.
    assert _best_threshold(values, mask, torch.zeros_like(mask))[::2] == pytest.approx((0.9, 99.5))


def test_tokens_that_fire_share_the_queries_that_see_them():
    values = torch.tensor([[8.0, 0.0, 4.0, 2.0]])
    claims = [16 / 17, 0, 4 / 5, 1 / 2]  # x^2 / (1 + x^2) of 4, 0, 2 and 1 times what makes the neuron fire
    parts = [1 / (0.1 + sum(claims[: place + 1])) for place in range(4)]
    expected = [claim * sum(parts[place:]) / (4 - place) for place, claim in enumerate(claims)]
    assert attention_share(values, 2.0)[0].tolist() == pytest.approx(expected)
    neuron = SinkNeuron(Neuron(0, None, 0), 2.0, 0.5)
    assert neuron.fires(values).tolist() == [[True, False, True, False]]
    assert neuron.sinks(values).tolist() == [[True, False, False, False]]
    assert neuron._replace(fires_beyond=-2.0).sinks(-values).tolist() == neuron.sinks(values).tolist()
    # Control: were it alone, the second would be a sink.
    assert neuron.sinks(values * torch.tensor([0, 1, 1, 1])).tolist() == [[False, False, True, False]]


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gemma3", "falcon", "gpt_oss", "deepseek_v3"])
def test_step_by_step_with_a_cache_the_mask_is_that_of_one_pass(family):
    assert family in CONFIGURATIONS
    model = tiny_model(family)
    ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    places = [(layer.index, expert) for layer in anatomy_of(model).layers for expert, _ in layer.down_weights()]
    masks = []
    for layer, expert in (places[0], places[-1], places[len(places) // 2]):
        neuron = SinkNeuron(Neuron(layer, expert, 5), 1e-3, 0.15)
        with torch.no_grad(), sinkscope.SinkWatch(model, _neurons(neuron)) as watch:
            model(ids, use_cache=False)
            masks.append(watch.mask)
            cache = model(ids[:, :5], use_cache=True).past_key_values
            for step in range(5, 12):
                cache = model(ids[:, step : step + 1], past_key_values=cache, use_cache=True).past_key_values
            assert torch.equal(watch.mask, masks[-1])
        model(ids[:1], use_cache=False)  # it is closed: nothing is seen any more
        assert torch.equal(watch.mask, masks[-1])
    assert 0 < torch.stack(masks).float().mean() < 1


def _neurons(*neurons):
    return SinkNeurons(neurons=neurons, precision=1, recall=1, num_sinks=1, model="planted")


def test_a_watch_that_saw_nothing_says_so(chain):
    model, ids = chain
    watch = sinkscope.SinkWatch(model, sinkscope.sink_neurons(model, ids[:2]))
    with pytest.raises(sinkscope.InputError, match="No text was read yet"):
        _ = watch.mask


@pytest.mark.parametrize("name", ["keep_sinks_in_a_cache.py", "mask_sinks_out.py"])
def test_examples_show_what_they_say_in_under_20_lines(name, capsys):
    assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) < 20
    runpy.run_path(str(EXAMPLES / name))
    with_sinks, without = (float(line.replace(",", "").split()[-1]) for line in capsys.readouterr().out.splitlines())
    if name == "keep_sinks_in_a_cache.py":
        assert with_sinks < 0.8 * without  # how far predictions are off
    else:
        assert with_sinks > 2 * without  # the spread of activations
