"""Static scales by their definitions, and the rule that chooses between them; each with a control.

Axes: N texts, T positions.
"""

import json

import numpy as np
import pytest
import torch
from planted_models import planted_chain, random_tokens
from tiny_models import tiny_model
from torch.nn.functional import cross_entropy

import sinkscope
from sinkscope.audits import static_scales
from sinkscope.audits.damage import losses, scheme_losses
from sinkscope.audits.formats import rounded_input
from sinkscope.audits.gradients import read_gradients
from sinkscope.audits.remedy_result import card
from sinkscope.audits.schemes import linear_layers, linear_scheme
from sinkscope.audits.static_scales import (
    SHARES,
    better_ranges,
    least_damage_ranges,
    least_error_ranges,
)
from sinkscope.results.run_folder import run_folder

STATIC = linear_scheme("W8A8_STATIC")
LOUD = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def ids_NT():
    return torch.randint(97, (24, 40), generator=torch.Generator().manual_seed(0))


def with_a_loud_neuron(*, is_heard: bool):
    """Neuron 0 of layer 1 is far above all others, and nothing depends on it unless it is heard."""
    model = tiny_model("llama", scale=3.0)
    mlp = model.model.layers[1].mlp
    mlp.up_proj.weight.data[0] *= 40
    mlp.down_proj.weight.data[:, 0] *= float(is_heard)
    return model


def test_the_least_predicted_damage_by_its_definition(ids_NT):
    """Of one module, by automatic differentiation at its inputs."""
    model, name = with_a_loud_neuron(is_heard=False), LOUD
    layer, ids_NT = linear_layers(model)[name], ids_NT[:3]
    largest = dict.fromkeys(linear_layers(model), 1.0)
    kept = []
    handle = layer.register_forward_pre_hook(lambda module, args: (args[0].retain_grad(), kept.append(args[0]))[1])
    generator, found = torch.Generator().manual_seed(0), np.zeros(len(SHARES))
    for ids_T in ids_NT:
        logits_TV = model(ids_T[None]).logits[0, :-1]
        drawn_T = torch.multinomial(logits_TV.detach().softmax(-1), 1, generator=generator)[:, 0]
        cross_entropy(logits_TV, drawn_T, reduction="sum").backward()
    handle.remove()
    model.zero_grad()
    largest[name] = max(float(x.detach().abs().max()) for x in kept)
    for x in kept:
        for number, share in enumerate(SHARES):
            noise = rounded_input(STATIC.groups[0].input_activations, x.detach(), share * largest[name]) - x.detach()
            found[number] += float((x.grad * noise).sum(-1).double().square().sum())
    expected = largest[name] * SHARES[int(found.argmin())]
    assert least_damage_ranges(model, ids_NT, largest)[name] == pytest.approx(expected)
    assert found.max() > 1.1 * found.min(), "the control: a range matters"
    assert all(not layer._forward_hooks for layer in linear_layers(model).values()), "left as it was"


def test_texts_after_a_prefix_are_those_after_its_tokens():
    """What each layer reads; the targets are drawn anew, so gradients differ."""
    model, facts = planted_chain(0)
    ids_NT = random_tokens(facts, num_sequences=3, length=24)
    head = ids_NT[0, :2].tolist()
    layers = sinkscope.audits.prefix.cache_of(sinkscope.load(model), head)
    prefix = sinkscope.audits.prefix.SinkPrefix(ids=tuple(head), layers=layers, fired=(1, 0), config=model.config)
    whole_NT = torch.cat([torch.tensor(head).expand(3, -1), ids_NT], 1)
    after, whole = {}, {}
    read_gradients(model, ids_NT, lambda *read: after.update({read[1]: read[2:]}), prefix=prefix.cache)
    read_gradients(model, whole_NT, lambda *read: whole.update({read[1]: read[2:]}))
    assert after.keys() == linear_layers(model).keys()
    assert after.keys() == whole.keys()
    for place, (x_BTE, g_BTO) in after.items():
        assert x_BTE.shape[1] == g_BTO.shape[1] == ids_NT.shape[1]
        torch.testing.assert_close(x_BTE, whole[place][0][:, 2:], rtol=1e-3, atol=1e-3)
    alone = {}
    read_gradients(model, ids_NT, lambda *read: alone.update({read[1]: read[2:]}))
    differences = [float((x_BTE - alone[place][0]).detach().abs().max()) for place, (x_BTE, _) in after.items()]
    assert max(differences) > 1e-2, "the control: no prefix"


def test_a_far_value_is_clipped_where_the_loss_does_not_depend_on_it(ids_NT):
    calibration, held_out, clipped = ids_NT[:16], ids_NT[16:], {}
    for is_heard in (False, True):
        model = with_a_loud_neuron(is_heard=is_heard)
        by_error, better = better_ranges(model, calibration)
        assert by_error == least_error_ranges(model, calibration)
        plain = losses(model, held_out)
        left, left_better = (
            np.abs(scheme_losses(model, STATIC, held_out, ranges=ranges) - plain).mean()
            for ranges in (by_error, better)
        )
        assert left_better < 0.8 * left
        clipped[is_heard] = better[LOUD]
    assert clipped[False] < 0.5 * clipped[True], "the control: it is heard"


def test_ranges_that_harm_the_calibration_are_not_taken(ids_NT, monkeypatch):
    model = tiny_model("llama", scale=3.0)
    monkeypatch.setattr(
        static_scales, "least_damage_ranges", lambda model, ids, largest, **_: {name: 1e-3 for name in largest}
    )
    by_error, better = better_ranges(model, ids_NT[:4])
    assert better is by_error
    found = sinkscope.remedy(model, ids_NT, scales=True)
    assert found.scales == {}
    assert any(line.startswith("scales: nothing to do") for line in found.verdicts)


def test_scales_are_measured_beside_their_control_and_written(ids_NT, tmp_path):
    told: dict[str, list] = {}

    def work(what):
        return lambda *numbers: told.setdefault(what, []).append(numbers)

    model = with_a_loud_neuron(is_heard=False)
    found = sinkscope.remedy(model, ids_NT, scales=True, work=work)
    assert [(entry.name, entry.is_control) for entry in found.measurements] == [
        ("baseline", False),
        ("scales", False),
        ("the same changes of range in other modules", True),
    ]
    assert told["texts that set static scales"] == [(0, 16), (16, 16)]
    left, better, other = (
        np.abs(entry.losses[STATIC.name] - found.baseline.losses["16 bits"]).mean() for entry in found.measurements
    )
    assert better < 0.8 * left < other, "the control"
    with run_folder(tmp_path / "out") as folder:
        found.write(folder)
    written = json.loads((tmp_path / "out" / "static_scales.json").read_text(encoding="utf-8"))
    _, ranges = better_ranges(model, ids_NT[:16])
    assert written["scales"][LOUD] * 127.5 == pytest.approx(ranges[LOUD])
    assert written["scales"].keys() == linear_layers(model).keys()
    assert "static_scales.json" in card(found)


def test_scales_that_harm_alone_are_tried_after_the_prefix(monkeypatch, tmp_path):
    """Alone they clip the sink away; after a prefix that spares the text its sink, they are those of another model."""
    model, facts = planted_chain(0)
    ids_NT = random_tokens(facts, num_sequences=20, length=48)

    def least_damage(model, ids_NT, largest, *, prefix=None, **_):
        return {name: (1e-3 if prefix is None else 0.7) * value for name, value in largest.items()}

    monkeypatch.setattr(static_scales, "least_damage_ranges", least_damage)
    monkeypatch.setattr(static_scales, "least_error_range", lambda magnitude_M, count_M, bits: 0.5)
    found = sinkscope.remedy(model, ids_NT, prefix=True, exempt=True, scales=True)
    names = [entry.name for entry in found.measurements]
    assert "scales" not in names
    assert names[-1] == "all together"
    assert found.modules_in_16_bits
    assert found.scales.keys() == linear_layers(model).keys() - set(found.modules_in_16_bits)
    assert not any(line.startswith("scales: nothing to do") for line in found.verdicts)
    assert "for texts after the prefix" in card(found)
    assert found.summary["static_scales"] == "static_scales.json"
    # The control: without a prefix there is nothing to be done by scales, and nothing is written.
    alone = sinkscope.remedy(model, ids_NT, exempt=True, scales=True)
    assert alone.scales == {}
    assert any(line.startswith("scales: nothing to do") for line in alone.verdicts)
