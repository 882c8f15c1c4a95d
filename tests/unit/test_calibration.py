"""A calibration reads no more of the text than what is on can know of, and finds what it finds in the whole text. One
that is given what feed-forwards write before the edit finds the same."""

from dataclasses import replace

import pytest
import torch
from tiny_models import tiny_model

import sinkscope
from sinkscope.interventions.aggregation import cached_batch
from sinkscope.interventions.base import together

LENGTH = 24
OTHERS = {
    "none": lambda model, batch: [],
    "a mask before": lambda model, batch: [sinkscope.mask_to_self(model, 3)],
    "a later key": lambda model, batch: [sinkscope.edit_mask(model, 3, "allow", 20)],
    "neurons at zero": lambda model, batch: [sinkscope.ablate_neurons(model, ["0:5"])],
    "neurons resampled": lambda model, batch: [sinkscope.ablate_neurons(model, ["0:5"], "resample", calibration=batch)],
    "neurons from later": lambda model, batch: [sinkscope.transplant_neurons(model, ["0:5"], 15, 4)],
    "a dimension from later": lambda model, batch: [
        sinkscope.set_dimensions(model, [2], "transplant", source=15, positions=4)
    ],
    "dimensions at their mean": lambda model, batch: [sinkscope.set_dimensions(model, [2], "mean", calibration=batch)],
    "output vectors spread": lambda model, batch: [sinkscope.densify_neurons(model, ["0:5"])],
    "another amplification": lambda model, batch: [sinkscope.amplify_variance(model, 4, 3.0, calibration=batch)],
}


@pytest.fixture(autouse=True)
def no_comparison(monkeypatch):
    """The short passes of the receipt would be counted with those that calibrate."""
    monkeypatch.setattr("sinkscope.interventions.base.check_reading", lambda *_: None)


@pytest.fixture(scope="module")
def loaded():
    return sinkscope.load(tiny_model("llama"))


@pytest.fixture(scope="module")
def batch(loaded):
    return sinkscope.token_batch(loaded, length=LENGTH, num_sequences=64)


def calibrated(loaded, batch, others):
    """([L, C] the means, how many tokens were read to find them)."""
    read = []
    hook = loaded.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    edit = sinkscope.amplify_variance(loaded, 5, 4.0, calibration=batch)
    with together([*others, edit]):
        found = torch.stack([layer.mean_C for layer in edit.calibrated.values()])
    hook.remove()
    return found, max(read)


@pytest.mark.parametrize("name", OTHERS)
def test_the_means_are_those_of_the_whole_text(loaded, batch, name):
    others = OTHERS[name](loaded, batch)
    cut, num_read = calibrated(loaded, batch, others)
    last = max((5, *(position for other in others for position in other.needs or ())))
    assert num_read == (LENGTH if any(other.needs is None for other in others) else last + 1)
    # Token 0 sees no other anyway, and no other sees the last one.
    everything = [*others, sinkscope.edit_mask(loaded, [0, LENGTH - 1], "only", 0)]
    whole, num_read = calibrated(loaded, batch, everything)
    assert num_read == LENGTH
    torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-6)  # products of other shapes round otherwise


def test_control_a_later_key_changes_the_means(loaded, batch):
    with_key, _ = calibrated(loaded, batch, OTHERS["a later key"](loaded, batch))
    without, _ = calibrated(loaded, batch, [])
    assert (with_key - without).abs().max() > 1e-4


def test_what_acts_on_later_tokens_alone_is_left_out(loaded, batch):
    later = sinkscope.mask_to_self(loaded, 20)
    alone, _ = calibrated(loaded, batch, [])
    beside, num_read = calibrated(loaded, batch, [later])
    assert num_read == 6
    torch.testing.assert_close(beside, alone)  # a mask opens another path through attention
    # Control: a mask that shows the later token to an earlier one.
    shown = sinkscope.edit_mask(loaded, 3, "allow", 20)
    assert not torch.allclose(calibrated(loaded, batch, [later, shown])[0], calibrated(loaded, batch, [shown])[0])


@pytest.mark.parametrize("name", OTHERS)
def test_the_means_are_those_of_feed_forwards_that_run_whole(loaded, batch, name):
    num_layers, run = len(loaded.model.model.layers), []
    kept, others = cached_batch(loaded.model, batch, range(num_layers)), OTHERS[name](loaded, batch)
    hook = loaded.model.model.layers[0].mlp.act_fn.register_forward_pre_hook(
        lambda module, args: run.append(args[0].shape[1])
    )
    found, num_read = calibrated(loaded, kept, others)
    hook.remove()
    torch.testing.assert_close(found, calibrated(loaded, batch, others)[0], rtol=1e-4, atol=1e-6)
    first = min((5, *(other.first_position for other in others)))
    edits_neurons = name == "neurons from later"  # those are told by their position among all
    assert min(run) == num_read - (0 if edits_neurons else first)


def test_control_what_is_kept_must_be_of_the_same_tokens(loaded, batch):
    kept = cached_batch(loaded.model, batch, range(len(loaded.model.model.layers)))
    other = replace(batch, ids=batch.ids.flip(0))
    found, _ = calibrated(loaded, replace(kept, ids=other.ids), [])
    assert (found - calibrated(loaded, other, [])[0]).abs().max() > 1e-4


def test_without_a_calibration_one_is_drawn_and_told():
    model = tiny_model("llama")
    drawn = sinkscope.token_batch(model, num_sequences=64, seed=1)
    told = "64 sequences of 64 random tokens, drawn for it"
    for make in (
        lambda **given: sinkscope.amplify_variance(model, 10, 8.0, **given),
        lambda **given: sinkscope.match_variance(model, 10, **given),
        lambda **given: sinkscope.ablate_neurons(model, ["0:5"], "mean", **given),
    ):
        own, given = make(), make(calibration=drawn)
        assert repr(own).endswith(f"\ncalibrated on {told}")
        assert given.calibrated_on == "64 sequences of 64 random tokens"
        with own:
            receipt = sinkscope.trace(model).summary["receipt"]
            logits = model(drawn.ids[:2]).logits
        assert receipt["interventions"][0]["calibrated_on"] == told
        with given:
            assert torch.equal(model(drawn.ids[:2]).logits, logits)
    assert not torch.equal(drawn.ids[:32], sinkscope.token_batch(model).ids)  # not what is judged
    far = sinkscope.equalise_variance(model, 50)
    assert far.calibrated_on.startswith("64 sequences of 102 ")  # the position is in the earlier half
    with sinkscope.mask_to_self(model, 10):
        assert "calibrated_on" not in sinkscope.trace(model).summary["receipt"]["interventions"][0]
