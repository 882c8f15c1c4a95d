"""Moments at a level: worked out from the aggregations that a plain hook sees, with a mask on and without."""

import contextlib

import pytest
import torch
from tiny_models import tiny_model

import sinkscope
from sinkscope import (
    InputError,
    amplify_variance,
    edit_mask,
    mask_to_self,
    match_energy,
    match_moments,
    match_variance,
    shift_mean,
)
from sinkscope.interventions.intervene import Baseline, drawn_batch
from sinkscope.interventions.matching import ShiftMeanAlone
from sinkscope.interventions.specs import read_specs
from sinkscope.models.insert_head_norm import insert_head_norm

POSITION, LAYERS = 5, (0, 1)


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama").double()


@pytest.fixture(scope="module")
def batch(model):
    return sinkscope.token_batch(sinkscope.load(model), length=20, num_sequences=64, seed=3)


def moments(model, ids, *interventions):
    """By layer: (variance, energy, squared mean) of what enters the output projection, by their definitions."""
    found = []
    with contextlib.ExitStack() as stack:
        for intervention in interventions:
            stack.enter_context(intervention)
        for index in LAYERS:
            projection = model.model.layers[index].self_attn.o_proj
            keep = projection.register_forward_pre_hook(lambda module, args: found.append(args[0][:, POSITION]))
            stack.callback(keep.remove)
        with torch.no_grad():
            model(ids)
    return [(o.var(0).mean(), o.square().mean(), o.mean(0).square().mean()) for o in found]


def close(found, expected):
    torch.testing.assert_close(torch.stack(list(found)), torch.stack(list(expected)), rtol=1e-6, atol=0)


def test_variance_comes_back_under_a_mask_and_the_mean_stays(model, batch):
    mask = mask_to_self(model, POSITION)
    matched = match_variance(model, POSITION, calibration=batch, layers=LAYERS)
    baseline, masked, both = (moments(model, batch.ids, *on) for on in ((), (mask,), (mask, matched)))
    for layer in LAYERS:
        assert masked[layer][0] > 1.5 * baseline[layer][0], "the mask must raise the variance"
        close([both[layer][0]], [baseline[layer][0]])
    close([both[0][2]], [masked[0][2]])  # in layer 0 nothing below has changed


@pytest.mark.parametrize("made", ["before", "while the mask is on", "entered first"])
def test_it_does_not_matter_when_it_is_made_or_entered(model, batch, made):
    mask = mask_to_self(model, POSITION)
    baseline = moments(model, batch.ids)
    with mask if made == "while the mask is on" else contextlib.nullcontext():
        matched = match_variance(model, POSITION, calibration=batch, layers=LAYERS)
    order = (matched, mask) if made == "entered first" else (mask, matched)
    found = moments(model, batch.ids, *order)
    close([found[1][0]], [baseline[1][0]])
    alone = moments(model, batch.ids, matched)  # with nothing else on there is nothing to match
    close([x for of_layer in alone for x in of_layer], [x for of_layer in baseline for x in of_layer])


def test_what_is_left_on_is_calibrated_anew(model, batch):
    mask = mask_to_self(model, POSITION)
    matched = match_variance(model, POSITION, to=mask, calibration=batch, layers=LAYERS)
    masked = moments(model, batch.ids, mask)
    with matched:
        with mask:
            pass
        found = moments(model, batch.ids)
    for layer in LAYERS:
        close([found[layer][0]], [masked[layer][0]])


def test_the_mean_alone_is_shifted(model, batch):
    """Control: shift_mean as it is changes the variance of the next layer."""
    alone = ShiftMeanAlone(model, POSITION, 8.0, variance="baseline", calibration=batch, layers=LAYERS)
    shifted = shift_mean(model, POSITION, 8.0, calibration=batch, layers=LAYERS)
    baseline, found, free = (moments(model, batch.ids, *on) for on in ((), (alone,), (shifted,)))
    for layer in LAYERS:
        close([found[layer][0]], [baseline[layer][0]])
    close([found[0][2], free[0][2]], [36 * baseline[0][2]] * 2)  # o - 7 mu has the mean -6 mu
    assert abs(free[1][0] / baseline[1][0] - 1) > 0.01


def test_the_control_of_amplification_is_that_of_a_study(model, batch):
    """Control: that of another edit of the aggregation scales it, and the variance with it."""
    setting = Baseline(loaded=sinkscope.load(model), batch=batch, calibration=batch).setting
    asked = read_specs({"amplify": f"{POSITION}:8", "shift_mean": f"{POSITION}:8"}, layers=LAYERS)
    control, scaled = (request.make(setting, control=True) for request in asked)
    alone = ShiftMeanAlone(model, POSITION, 8.0, variance="baseline", calibration=batch, layers=LAYERS)
    baseline, found, of_study, larger = (moments(model, batch.ids, *on) for on in ((), control, (alone,), scaled))
    for layer in LAYERS:
        close(found[layer], of_study[layer])
        close([found[layer][0]], [baseline[layer][0]])
    close([larger[0][0]], [64 * baseline[0][0]])


def test_the_control_of_amplification_before_a_norm_acts_before_it():
    """Control: scaling there, which the norm takes away, changes nothing."""
    model = tiny_model("llama")
    insert_head_norm(model)
    base_pass = drawn_batch(sinkscope.load(model), "random", bos=None, length=20, num_sequences=4, seed=0)
    specs = read_specs({"amplify_before_norm": "5:4"}, layers=[0])
    control = base_pass.under(base_pass.make(specs, control=True))
    with sinkscope.scale_norm(model, 5, 4.0, calibration=base_pass.calibration, layers=[0], before_norm=True):
        scaled = sinkscope.trace(model, base_pass.batch)
    baseline, shifted, larger = (found.recording for found in (base_pass.trace, control, scaled))
    entering, received = "value_variance_before_norm", "received"
    torch.testing.assert_close(shifted[entering][0], baseline[entering][0])
    assert (shifted[received] - baseline[received]).abs().max() > 1e-3
    torch.testing.assert_close(larger[received], baseline[received], rtol=0, atol=1e-5)


def test_variance_and_energy_are_set_apart(model, batch):
    mask = mask_to_self(model, POSITION)
    baseline, masked = moments(model, batch.ids), moments(model, batch.ids, mask)
    kept = match_moments(model, POSITION, variance="baseline", energy=mask, calibration=batch, layers=LAYERS)
    raised = match_moments(model, POSITION, variance="baseline", energy=mask, calibration=batch, layers=LAYERS)
    for on in ((mask, kept), (raised,)):
        found = moments(model, batch.ids, *on)
        for layer in LAYERS:
            close(found[layer][:2], (baseline[layer][0], masked[layer][1]))


def test_energy_alone_leaves_the_variance_and_the_part_along_the_mean(model, batch):
    mask = mask_to_self(model, POSITION)
    baseline, masked = moments(model, batch.ids), moments(model, batch.ids, mask)
    found = moments(model, batch.ids, match_energy(model, POSITION, to=mask, calibration=batch, layers=[0]))
    close(found[0][:2], (baseline[0][0], masked[0][1]))


def test_energy_that_the_deviation_alone_exceeds_is_refused(model, batch):
    match = match_energy(model, POSITION, calibration=batch, layers=LAYERS)
    with (
        pytest.raises(InputError, match=r"energy cannot be 0\.886, since the deviation alone has"),
        mask_to_self(model, POSITION),
        match,
    ):
        pass


def test_no_variance_cannot_be_scaled(model, batch):
    ids = batch.ids.clone()
    ids[:, POSITION] = 7
    same = sinkscope.TokenBatch(**{**vars(batch), "ids": ids})
    match = match_variance(model, POSITION, calibration=same, layers=[0])
    with pytest.raises(InputError, match="no variance to scale"), mask_to_self(model, POSITION), match:
        pass


def test_a_level_that_is_none_of_them(model, batch):
    with pytest.raises(InputError, match="'baseline', an intervention"):
        match_variance(model, POSITION, to="before", calibration=batch)
    with pytest.raises(InputError, match="no level to match"):
        match_moments(model, POSITION, calibration=batch)


def test_means_are_calibrated_with_the_others_on(model, batch):
    """Control: without the mask the mean is another one."""
    only = edit_mask(model, POSITION, "only", 2)
    free = amplify_variance(model, POSITION, 4, calibration=batch, layers=LAYERS)
    before = free.tensors()
    with only, free:
        after = free.tensors()
        again = amplify_variance(model, POSITION + 1, 4, calibration=batch, layers=LAYERS)  # others may be on
    assert again.tensors().keys() != after.keys()
    expected = []
    with only:
        hook = model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda m, a: expected.append(a[0]))
        with torch.no_grad():
            model(batch.ids)
        hook.remove()
    name = f"amplify_variance.position_{POSITION}.factor_4.layer_0"
    torch.testing.assert_close(after[name], expected[0][:, POSITION].mean(0))
    assert not torch.allclose(before[name], after[name])


@pytest.mark.parametrize("share", [dict(layers=[0, 2]), dict(heads=[0, 1]), dict(position=3)])
def test_two_levels_are_met_together_in_either_order(model, batch, share):
    """Each changes what the other is calibrated on, in later layers or at later positions."""
    others = {"layers": dict(layers=[1]), "heads": dict(heads=[2, 3]), "position": {}}[next(iter(share))]
    mask = mask_to_self(model, share.get("position", POSITION))
    baseline = moments(model, batch.ids)
    for reverse in (False, True):
        wheres = ({"position": POSITION, **share}, {"position": POSITION, **others})
        both = [match_variance(model, calibration=batch, **where) for where in wheres]
        found = moments(model, batch.ids, *(reversed(both) if reverse else both), mask)
        for layer in LAYERS:
            close([found[layer][0]], [baseline[layer][0]])
