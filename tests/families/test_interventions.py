"""Every intervention on every family against an eager pass that the test edits itself, with hooks of its own.

The formulas, the gates of the experts and the parts of each family are written down here a second time.
Axes: B sequences, T query position, S key position, H heads, C channels of the value aggregation, F neurons of a
group, E width.
"""

import contextlib
import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_models import CONFIGURATIONS, PARTS, tiny_model
from torch import Tensor

from sinkscope.interventions.aggregation import ChangeAggregation, amplify_variance
from sinkscope.interventions.base import together
from sinkscope.interventions.formulas import FORMULAS
from sinkscope.interventions.mask import edit_mask, mask_to_self
from sinkscope.interventions.neurons import ablate_neurons, densify_neurons, transplant_neurons
from sinkscope.interventions.residual import clamp, set_dimensions
from sinkscope.models.anatomy import SHARED_EXPERT, Neuron
from sinkscope.models.given_ids import given_batch
from sinkscope.tracing.replay import read_condition
from sinkscope.tracing.trace import trace

B, T = 3, 40
"""Longer than every window of the tiny models."""
TOLERANCE = 1e-4
"""Both passes are float32, sum in another order, and pass on their differences."""
CALIBRATION_LENGTH = 25
"""Odd, so that the later half has an edge to get wrong."""

every_family = pytest.mark.parametrize("family", CONFIGURATIONS)


# The eager pass


@dataclass
class EagerPass:
    """Every layer of one pass, each tensor as the edits left it."""

    attention: list[Tensor] = field(default_factory=list)
    entering_aggregation: list[Tensor] = field(default_factory=list)
    """[B, T, C] before the edit."""
    aggregation: list[Tensor] = field(default_factory=list)
    neurons: list[dict[int | None, Tensor]] = field(default_factory=list)
    """By expert, [B, T, F] as they enter the down projection, times their routing weight."""
    leaving: list[Tensor] = field(default_factory=list)
    logits: Tensor | None = None


def same(layer, values, *_):
    return values


@torch.no_grad()
def eager_pass(
    family: str,
    model,
    ids: Tensor,
    *,
    mask: Callable = same,
    aggregation: Callable = same,
    neurons: Callable = same,
    stream: Callable = same,
) -> EagerPass:
    """A pass whose mask [B, H, T, S], aggregation [B, T, C], neurons [B, T, F] and stream [B, T, E] are edited, each by
    a function of the layer, the values and, for neurons, the expert."""
    parts, seen = PARTS[family], EagerPass()

    def attend(layer):
        def hook(module, args, kwargs):
            allowed_BHTS = (kwargs["attention_mask"] == 0).expand(len(ids), model.config.num_attention_heads, -1, -1)
            allowed_BHTS = mask(layer, allowed_BHTS.clone())
            hidden = torch.zeros(allowed_BHTS.shape, dtype=model.dtype).masked_fill(
                ~allowed_BHTS, torch.finfo(model.dtype).min
            )
            return args, kwargs | {"attention_mask": hidden}

        return hook

    def project(layer):
        def hook(module, args):
            before = args[0].view(*ids.shape, -1).clone()
            seen.entering_aggregation.append(before)
            seen.aggregation.append(aggregation(layer, before.clone()))
            return (seen.aggregation[-1].to(before.dtype).view_as(args[0]),)

        return hook

    def edit_neurons(layer, values, expert):
        values = neurons(layer, values.view(*ids.shape, -1).clone(), expert)
        seen.neurons[layer][expert] = values
        return values

    def feed_forward(layer, expert):
        def hook(module, args):
            return (edit_neurons(layer, args[0], expert).to(args[0].dtype).view_as(args[0]),)

        return hook

    def route(layer):
        def hook(module, args, kwargs, output):
            hidden, index, weight = [*args, *kwargs.values()][:3]
            edit = functools.partial(edit_neurons, layer)
            return experts_again(family, module, hidden, index, weight, edit).to(output.dtype).view_as(output)

        return hook

    def leave(layer):
        def hook(module, args, output):
            hidden = output[0] if isinstance(output, tuple) else output
            seen.leaving.append(stream(layer, hidden.clone()))
            return (seen.leaving[-1], *output[1:]) if isinstance(output, tuple) else seen.leaving[-1]

        return hook

    before = model.config._attn_implementation
    with contextlib.ExitStack() as stack:
        for layer, block in enumerate(model.get_submodule(parts["blocks"])):
            seen.neurons.append({})
            hooks = [
                block.get_submodule(parts["attention"]).register_forward_pre_hook(attend(layer), with_kwargs=True),
                block.get_submodule(parts["output"]).register_forward_pre_hook(project(layer)),
                block.register_forward_hook(leave(layer)),
            ]
            if hasattr(getattr(block, "mlp", None), "experts"):
                hooks.append(block.mlp.experts.register_forward_hook(route(layer), with_kwargs=True))
                if hasattr(block.mlp, "shared_experts"):
                    shared = block.mlp.shared_experts.down_proj
                    hooks.append(shared.register_forward_pre_hook(feed_forward(layer, SHARED_EXPERT)))
            else:
                hooks.append(block.get_submodule(parts["down"]).register_forward_pre_hook(feed_forward(layer, None)))
            for hook in hooks:
                stack.callback(hook.remove)
        stack.callback(setattr, model.config, "_attn_implementation", before)
        model.config._attn_implementation = "eager"
        outputs = model(ids, use_cache=False, output_attentions=True)
    seen.attention, seen.logits = [attention.double() for attention in outputs.attentions], outputs.logits
    return seen


def experts_again(family: str, experts, hidden: Tensor, index: Tensor, weight: Tensor, edit: Callable) -> Tensor:
    """[N, E] what experts add up to, in float64, their neurons edited."""
    hidden, output = hidden.double(), torch.zeros(hidden.shape, dtype=torch.float64)
    for expert in range(len(experts.down_proj)):
        gate_up_FE, down_EF = (x[expert].double() for x in (experts.gate_up_proj, experts.down_proj))
        share = (weight.double() * (index == expert)).sum(-1, keepdim=True)
        if family == "gpt_oss":  # kept transposed, with biases
            gate_up = hidden @ gate_up_FE + experts.gate_up_proj_bias[expert].double()
            gate, up = gate_up[:, ::2].clamp(max=7.0), gate_up[:, 1::2].clamp(-7.0, 7.0)
            neurons, down_EF = (up + 1) * gate * torch.sigmoid(1.702 * gate), down_EF.T
            output += share * experts.down_proj_bias[expert].double()
        else:
            gate, up = (hidden @ gate_up_FE.T).chunk(2, dim=-1)
            neurons = gate * torch.sigmoid(gate) * up
        output += edit(neurons * share, expert).flatten(0, 1) @ down_EF.T
    return output


def tokens(seed: int, shape=(B, T)) -> Tensor:
    return torch.randint(3, 97, shape, generator=torch.Generator().manual_seed(seed))


@functools.cache
def case(family: str) -> SimpleNamespace:
    """Model, tokens, calibration batch and the untouched eager passes of both; read only."""
    model, ids, calibration = tiny_model(family), tokens(0), tokens(1, (64, CALIBRATION_LENGTH))
    return SimpleNamespace(
        family=family,
        model=model,
        ids=ids,
        calibration=given_batch(calibration),
        plain=eager_pass(family, model, ids),
        calibrated=eager_pass(family, model, calibration),
        other=eager_pass(family, model, tokens(2, (64, CALIBRATION_LENGTH))),
    )


@torch.no_grad()
def own_pass(this: SimpleNamespace) -> EagerPass:
    """The model called as its owner calls it, under whatever is on."""
    seen = EagerPass()
    handles = [
        block.register_forward_hook(
            lambda _, args, output: seen.leaving.append((output[0] if isinstance(output, tuple) else output).clone())
        )
        for block in this.model.get_submodule(PARTS[this.family]["blocks"])
    ]
    try:
        seen.logits = this.model(this.ids).logits
    finally:
        for handle in handles:
            handle.remove()
    return seen


# Comparison


def assert_close(found, expected, tolerance=TOLERANCE, name="") -> None:
    """Relative, with a floor for values that are small only because larger ones cancel."""
    found, expected = (np.asarray(torch.as_tensor(x).detach(), dtype=np.float64) for x in (found, expected))
    assert found.shape == expected.shape, name
    np.testing.assert_allclose(
        found, expected, rtol=tolerance, atol=0.1 * tolerance * np.abs(expected).max(), err_msg=name
    )


def assert_same_pass(found: EagerPass, expected: EagerPass) -> None:
    for layer, (a, b) in enumerate(zip(found.leaving, expected.leaving, strict=True)):
        assert_close(a, b, name=f"behind block {layer}")
    assert_close(found.logits, expected.logits, name="logits")


def assert_another_pass(found: EagerPass, control: EagerPass) -> None:
    """The control's logits lie far outside the tolerance."""
    apart = (found.logits - control.logits).abs().max() / control.logits.abs().max()
    assert float(apart) > 10 * TOLERANCE


def assert_traced(this: SimpleNamespace, expected: EagerPass) -> None:
    """A trace under whatever is on reads what the eager pass has."""
    reading = trace(this.model, this.ids, effective_rank=False).recording

    def by_layer(measure, values):
        return np.stack([np.asarray(measure(x.double())) for x in values])

    def alpha(a_BHTS):  # mean over the queries from each key on
        return torch.stack([a_BHTS[:, :, k:, k].mean((0, 2)) for k in range(T)], dim=-1)

    assert_close(reading["received"], by_layer(alpha, expected.attention), name="received")
    for name, row in (("entropy", lambda a: torch.special.entr(a).sum(-1)), ("mixing", lambda a: (a**2).sum(-1))):
        by_position = by_layer(lambda a, row=row: row(a).mean((0, 1)), expected.attention)
        assert_close(reading[name], by_position, name=name)
        assert_close(
            reading[f"{name}_by_head"], by_layer(lambda a, row=row: row(a).mean((0, 2)), expected.attention), name=name
        )
    for index, d in enumerate(reading.distances):
        at = by_layer(lambda a, d=d: a.diagonal(-d, -2, -1).mean((0, 2)), expected.attention)
        assert_close(reading["by_distance"][..., index], at, name=f"distance {d}")
    second_moment = by_layer(lambda o: (o**2).mean((0, 2)), expected.aggregation)
    assert_close(reading["second_moment"], second_moment)
    dom_ratio = by_layer(lambda h: (h.abs().amax(-1) / h.abs().mean(-1)).mean(0), expected.leaving)
    assert_close(reading["dom_ratio"], dom_ratio)
    for layer, groups in enumerate(expected.neurons):
        neurons_BTU = torch.cat([groups[expert].double() for expert in sorted(groups, key=_as_listed)], dim=-1)
        at = reading.by_layer["positions_of_interest"][layer][0]
        found = reading.by_layer["neuron_activation"][layer]
        assert_close(found, neurons_BTU[:, at].mean(0), name=f"neurons of layer {layer}")


def _as_listed(expert: int | None) -> float:
    return float("inf") if expert == SHARED_EXPERT else expert or 0


# Masks

MASKS = {
    "to self": lambda model: mask_to_self(model, 10),
    "first averages": lambda model: edit_mask(model, 0, "allow", range(12)),
    "only": lambda model: edit_mask(model, [7, 20], "only", [3, 7], heads=[1, 3], sequences=[0, 2], layers=[1]),
    "block": lambda model: edit_mask(model, [5, 30], "block", [0, 4, 29], heads=2, layers=[0, 2]),
}


def masked(name: str, *, layer_shift: int = 0, every_head: bool = False) -> Callable:
    """The same edits of who sees whom, written as assignments."""

    def mask(layer, allowed_BHTS):
        layer -= layer_shift
        some = slice(None) if every_head else {"only": [1, 3], "block": [2]}.get(name)
        if name == "to self" and layer >= 0:
            allowed_BHTS[:, :, 10] = False
            allowed_BHTS[:, :, 10, 10] = True
        elif name == "first averages" and layer >= 0:
            allowed_BHTS[:, :, 0, :12] = True
        elif name == "only" and layer == 1:
            for sequence in (0, 2):
                for query in (7, 20):
                    allowed_BHTS[sequence, some, query] = False
                    for key in (3, 7):
                        allowed_BHTS[sequence, some, query, key] = True
        elif name == "block" and layer in (0, 2):
            for query in (5, 30):
                for key in (0, 4, 29):
                    allowed_BHTS[:, some, query, key] = False
        return allowed_BHTS

    return mask


@pytest.mark.parametrize("name", MASKS)
@every_family
def test_masks_equal_eager(family, name):
    this = case(family)
    expected = eager_pass(family, this.model, this.ids, mask=masked(name))
    with MASKS[name](this.model):
        found = own_pass(this)
        assert_traced(this, expected)
    assert_same_pass(found, expected)
    assert_another_pass(found, this.plain)
    assert_another_pass(found, eager_pass(family, this.model, this.ids, mask=masked(name, layer_shift=1)))
    if name in ("only", "block"):
        assert_another_pass(found, eager_pass(family, this.model, this.ids, mask=masked(name, every_head=True)))


@every_family
def test_masks_of_different_places_compose(family):
    this = case(family)
    expected = eager_pass(
        family,
        this.model,
        this.ids,
        mask=lambda layer, allowed: masked("only")(layer, masked("to self")(layer, allowed)),
    )
    with MASKS["to self"](this.model), MASKS["only"](this.model):
        assert_same_pass(own_pass(this), expected)


# The value aggregation


def edited_aggregation(formula: str, o_BC: Tensor, calibration_BTC: Tensor, position: int, factor: float, layer: int):
    """[B, C] in float64, the formulas of the method written out."""
    o, seen = o_BC.double(), calibration_BTC.double()
    num_seen, length, num_channels = seen.shape
    mean = seen[:, position].sum(0) / num_seen
    deviation, deviations = o - mean, seen[:, position] - mean
    later = seen[:, length - length // 2 :]
    if formula == "amplify_variance":
        return mean + factor * deviation
    if formula == "scale_norm":
        return factor * o
    if formula == "shift_mean":
        return o + (1 - factor) * mean
    if formula == "swap_deviation":
        partners = [(b + 1 + 7 * layer % (num_seen - 1)) % num_seen for b in range(len(o))]
        return o + (factor - 1) * deviations[partners]
    if formula == "random_direction":
        direction = torch.randn(o.shape, generator=torch.Generator().manual_seed(layer)).double()
        return o + (factor - 1) * deviation.norm(dim=-1, keepdim=True) * direction / direction.norm(
            dim=-1, keepdim=True
        )
    if formula == "equalise_variance":
        variance = (deviations**2).sum() / ((num_seen - 1) * num_channels)
        apart = later - later.sum(0) / num_seen
        later_variance = (apart**2).sum() / ((num_seen - 1) * num_channels * (length // 2))
        return mean + min(1.0, float(later_variance / variance) ** 0.5) * deviation
    if formula == "remove_mean":
        return deviation
    if formula == "remove_deviation":
        return mean.expand_as(o)
    if formula != "remove_energy":
        raise ValueError(f"the formula {formula} is not written out here")
    energy = (later**2).sum() / (num_seen * (length // 2))
    return o * (energy / (o**2).sum(-1, keepdim=True)) ** 0.5


def aggregation_edit(
    formula, calibration: dict[int, Tensor], position, factor, *, channels=slice(None), sequences=None
):
    """The edit of an eager pass; `calibration` holds the layers that it acts on."""

    def edit(layer, o_BTC):
        if layer in calibration:
            seen = calibration[layer][..., channels]
            new = edited_aggregation(formula, o_BTC[:, position, channels], seen, position, factor, layer)
            for sequence in range(len(o_BTC)) if sequences is None else sequences:
                o_BTC[sequence, position, channels] = new[sequence].to(o_BTC.dtype)
        return o_BTC

    return edit


def calibrate(this, formula, position, factor, layers, **where) -> dict[int, Tensor]:
    """[64, T, C] aggregation of each layer on the calibration batch, the edit active in the layers below."""
    seen: dict[int, Tensor] = {}
    for layer in layers:
        edit = aggregation_edit(formula, seen, position, factor, **where)
        run = eager_pass(this.family, this.model, this.calibration.ids, aggregation=edit) if seen else this.calibrated
        seen = seen | {layer: run.entering_aggregation[layer]}
    return seen


SCALE_FREE = ("gemma2", "gemma3", "olmo2", "olmo3", "glm4")
"""A norm behind the output projection takes a change of scale out again."""


def position_of(formula: str, this: SimpleNamespace) -> int:
    """Position 0 is what the removals are for. Equalising acts where the variance is above that of later positions: at
    0 in most models, elsewhere where learned sinks shrink the first aggregation."""
    if formula == "equalise_variance":
        return int(this.calibrated.entering_aggregation[0][:, :12].double().var(0).mean(-1).argmax())
    return 0 if formula.startswith("remove") else 5


WHOLE = ("llama", "gemma2", "gpt2", "falcon", "deepseek_v3")
"""Families that take every formula: a formula knows the aggregation alone, which all families hand over alike, so the
others take one that needs a calibration and one that does not."""


@pytest.mark.parametrize(
    ("family", "formula"),
    [
        (family, formula)
        for family in CONFIGURATIONS
        for formula in FORMULAS
        if family in WHOLE or formula in ("amplify_variance", "scale_norm")
    ],
)
def test_aggregation_edits_equal_eager(family, formula):
    this = case(family)
    position, only_scales = position_of(formula, this), formula in ("scale_norm", "remove_energy")
    seen = calibrate(this, formula, position, 3.0, (0, 1))
    edit = functools.partial(aggregation_edit, formula, position=position, factor=3.0)
    expected = eager_pass(family, this.model, this.ids, aggregation=edit(seen))
    with ChangeAggregation(this.model, formula, position, 3.0, calibration=this.calibration, layers=[0, 1]):
        found = own_pass(this)
        if only_scales or formula == "amplify_variance":
            assert_traced(this, expected)
    assert_same_pass(found, expected)
    if only_scales and family in SCALE_FREE:
        assert_close(found.logits, this.plain.logits, 0.01)  # the norm's epsilon shows
        for edited, before in zip(expected.aggregation[:2], this.plain.aggregation[:2], strict=True):
            assert float((edited - before)[:, position].abs().max()) > 0.1 * float(before.abs().max())
        return
    assert_another_pass(found, this.plain)
    # Controls: one layer later, and with what another batch says.
    later = {layer + 1: values for layer, values in seen.items() if layer + 1 < len(this.plain.leaving)}
    assert_another_pass(found, eager_pass(family, this.model, this.ids, aggregation=edit(later)))
    if not only_scales:
        other = dict(enumerate(this.other.entering_aggregation[:2]))
        assert_another_pass(found, eager_pass(family, this.model, this.ids, aggregation=edit(other)))


@every_family
def test_amplification_of_chosen_heads_and_sequences_in_every_layer(family):
    this = case(family)
    num_heads = this.model.config.num_attention_heads
    size = this.plain.aggregation[0].shape[-1] // num_heads
    where = dict(channels=[head * size + d for head in (0, 3) for d in range(size)])
    layers = range(len(this.plain.leaving))
    seen = calibrate(this, "amplify_variance", 5, 3.0, layers, **where)
    edit = functools.partial(aggregation_edit, "amplify_variance", seen, 5, 3.0)
    expected = eager_pass(family, this.model, this.ids, aggregation=edit(**where, sequences=[0, 2]))
    with amplify_variance(this.model, 5, 3.0, calibration=this.calibration, heads=[0, 3], sequences=[0, 2]) as on:
        found = own_pass(this)
    assert_same_pass(found, expected)
    assert_another_pass(found, eager_pass(family, this.model, this.ids, aggregation=edit(sequences=[0, 2])))
    assert_another_pass(found, eager_pass(family, this.model, this.ids, aggregation=edit(**where)))
    # The frozen mean is what is saved.
    for layer, (name, mean) in enumerate(on.tensors().items()):
        assert name == f"amplify_variance.position_5.factor_3.layer_{layer}"
        assert_close(mean, seen[layer][:, 5][:, where["channels"]].double().mean(0))


def test_no_sequence_is_its_own_partner_while_calibrating():
    """A deviation swapped for itself would be an amplification."""
    deviations = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
    calibration = SimpleNamespace(deviations_BC=deviations, mean_C=torch.zeros(6))
    for layer in range(130):
        added = FORMULAS["swap_deviation"](deviations, calibration, 2.0, layer) - deviations
        assert float((added - deviations).abs().amax(-1).min()) > 0.01, layer
    two = [FORMULAS["swap_deviation"](deviations[:3] * 0, calibration, 2.0, layer) for layer in (0, 1)]
    assert float((two[0] - two[1]).abs().amax(-1).min()) > 0.01


def test_random_directions_are_independent_and_of_equal_norm():
    o = torch.randn(50, 400, generator=torch.Generator().manual_seed(12345))
    calibration = SimpleNamespace(mean_C=o.mean(0))
    deviation = o - o.mean(0)
    added = [FORMULAS["random_direction"](o, calibration, 3.0, layer) - o for layer in (0, 1)]
    assert_close(added[0].norm(dim=-1), 2 * deviation.norm(dim=-1))
    for a, b in ((added[0], deviation), (added[0], added[1]), (added[0][1:], added[0][:-1])):
        # Cosines of independent directions in 400 dimensions have a standard deviation of 0.05.
        assert float(torch.cosine_similarity(a, b, dim=-1).abs().max()) < 0.25
    # Control: the deviation's own direction.
    own = FORMULAS["amplify_variance"](o, calibration, 3.0, 0) - o
    assert float(torch.cosine_similarity(own, deviation, dim=-1).min()) > 0.999


# Neurons

NEURONS = (3, 17)


@functools.cache
def some_neurons(family: str) -> tuple[Neuron, ...]:
    """Two neurons of each of two experts, of the shared expert and of the dense feed-forward, in layers 0 and 1."""
    groups = [(layer, expert) for layer in (0, 1) for expert in case(family).plain.neurons[layer]]
    return tuple(Neuron(*group, neuron) for group in groups if group[1] in (None, 1, 2, -1) for neuron in NEURONS)


def neuron_edit(family: str, new_values: Callable, *, shift: int = 0, positions=slice(None), sequences=slice(None)):
    """The edit of an eager pass: the chosen neurons' new values, where it acts."""
    chosen = {(neuron.layer, neuron.expert) for neuron in some_neurons(family)}

    def edit(layer, values_BTF, expert):
        if (layer, expert) in chosen:
            at = [neuron + shift for neuron in NEURONS]
            new_BTn = (
                new_values(layer, expert, values_BTF[..., at]).to(values_BTF.dtype).expand(*values_BTF.shape[:2], -1)
            )
            for place, neuron in enumerate(at):
                values_BTF[sequences, positions, neuron] = new_BTn[sequences, positions, place]
        return values_BTF

    return edit


def mean_of(run: EagerPass) -> Callable:
    return lambda layer, expert, _: run.neurons[layer][expert][..., list(NEURONS)].double().mean((0, 1))


def drawn_from(run: EagerPass) -> Callable:
    """One token of the calibration batch for each token, drawn by layer; its neurons belong together."""

    def values(layer, expert, current_BTn):
        seen = run.neurons[layer][expert][..., list(NEURONS)].flatten(0, 1)
        drawn = torch.randint(len(seen), current_BTn.shape[:2], generator=torch.Generator().manual_seed(layer))
        return seen[drawn]

    return values


def test_the_neurons_of_this_test_are_of_every_kind():
    kinds = {(family, neuron.expert) for family in CONFIGURATIONS for neuron in some_neurons(family)}
    assert {("llama", None), ("qwen3_moe", None), ("qwen3_moe", 1), ("deepseek_v3", None), ("deepseek_v3", -1)} <= kinds
    # Not every token goes to an expert, so that an edit where it was not routed shows.
    assert bool((case("mixtral").plain.neurons[0][1] == 0).all(-1).any())


@every_family
def test_ablation_to_zero_equals_eager(family):
    this, neurons = case(family), some_neurons(family)
    zero = functools.partial(neuron_edit, family, lambda layer, expert, values: torch.zeros_like(values))
    expected = eager_pass(family, this.model, this.ids, neurons=zero())
    with ablate_neurons(this.model, neurons):
        found = own_pass(this)
        assert_traced(this, expected)
    assert_same_pass(found, expected)
    assert_another_pass(found, this.plain)
    assert_another_pass(found, eager_pass(family, this.model, this.ids, neurons=zero(shift=1)))


@pytest.mark.parametrize("mode", ["mean", "resample"])
@every_family
def test_ablation_from_a_calibration_batch_equals_eager(family, mode):
    this, values = case(family), {"mean": mean_of, "resample": drawn_from}[mode]
    where = dict(positions=slice(4, 9), sequences=slice(1, 3))
    edit = functools.partial(neuron_edit, family, **where)
    expected = eager_pass(family, this.model, this.ids, neurons=edit(values(this.calibrated)))
    chosen = dict(positions=range(4, 9), sequences=[1, 2], calibration=this.calibration)
    with ablate_neurons(this.model, some_neurons(family), mode, **chosen):
        found = own_pass(this)
    assert_same_pass(found, expected)
    assert_another_pass(found, this.plain)
    # Controls: what another batch says; and everywhere.
    assert_another_pass(found, eager_pass(family, this.model, this.ids, neurons=edit(values(this.other))))
    everywhere = neuron_edit(family, values(this.calibrated))
    assert_another_pass(found, eager_pass(family, this.model, this.ids, neurons=everywhere))


@every_family
def test_transplant_equals_eager(family):
    """An expert's neuron is written also where its expert was not chosen, with the routing weight of the source."""
    this = case(family)

    def source(position):
        return neuron_edit(family, lambda layer, expert, values: values[:, position, None], positions=[10])

    expected = eager_pass(family, this.model, this.ids, neurons=source(0))
    with transplant_neurons(this.model, some_neurons(family), 0, 10):
        found = own_pass(this)
        assert_traced(this, expected)
    assert_same_pass(found, expected)
    assert_another_pass(found, this.plain)
    assert_another_pass(found, eager_pass(family, this.model, this.ids, neurons=source(1)))


@every_family
def test_densified_neurons_equal_eager_with_other_weights(family):
    this, neurons = case(family), some_neurons(family)
    densified, on = copy.deepcopy(this.model), densify_neurons(this.model, neurons)
    blocks = densified.get_submodule(PARTS[family]["blocks"])
    with torch.no_grad():
        for neuron in neurons:
            column = output_vector(family, blocks[neuron.layer], neuron)
            change = on.change[neuron.layer, neuron.expert][:, NEURONS.index(neuron.neuron)]
            norm = column.norm()
            column += change
            # Of equal norm, spread evenly over all dimensions, with both signs.
            assert_close(column.abs(), (norm / len(column) ** 0.5).expand_as(column), 1e-5)
            assert 0.2 < float((column > 0).float().mean()) < 0.8
    expected = eager_pass(family, densified, this.ids)
    with on:
        found = own_pass(this)
    assert_same_pass(found, expected)
    assert_another_pass(found, this.plain)
    with densify_neurons(this.model, neurons, seed=1):
        assert_another_pass(found, own_pass(this))


def output_vector(family: str, block, neuron: Neuron) -> Tensor:
    """[E] view of the weights through which one neuron writes."""
    if neuron.expert is None:
        weight = block.get_submodule(PARTS[family]["down"]).weight
        return weight[neuron.neuron] if family == "gpt2" else weight[:, neuron.neuron]
    if neuron.expert == SHARED_EXPERT:
        return block.mlp.shared_experts.down_proj.weight[:, neuron.neuron]
    weight = block.mlp.experts.down_proj[neuron.expert]
    return weight[neuron.neuron] if family == "gpt_oss" else weight[:, neuron.neuron]


# Residual dimensions

DIMENSIONS = [7, 19, 30]


def dimension_edit(new_values: Callable, *, layers=(0, 2), positions=slice(None), sequences=slice(None)) -> Callable:
    def edit(layer, hidden_BTE):
        if layer in layers:
            new_BTM = torch.as_tensor(new_values(layer, hidden_BTE)).expand(*hidden_BTE.shape[:2], len(DIMENSIONS))
            for place, dimension in enumerate(DIMENSIONS):
                hidden_BTE[sequences, positions, dimension] = new_BTM[sequences, positions, place].to(hidden_BTE.dtype)
        return hidden_BTE

    return edit


@pytest.mark.parametrize("mode", ["zero", "mean", "transplant"])
@every_family
def test_dimensions_equal_eager(family, mode):
    this = case(family)
    calibration = given_batch(tokens(3, (64, T)))
    seen = eager_pass(family, this.model, calibration.ids).leaving if mode == "mean" else []
    new_values = {
        "zero": lambda layer, hidden: torch.zeros(len(DIMENSIONS)),
        "mean": lambda layer, hidden: seen[layer][..., DIMENSIONS].double().mean(0),
        "transplant": lambda layer, hidden: hidden[:, 0, None][..., DIMENSIONS].clone(),
    }[mode]
    where = dict(positions=slice(6, 12), sequences=slice(0, 2))
    expected = eager_pass(family, this.model, this.ids, stream=dimension_edit(new_values, **where))
    needs = {"zero": {}, "mean": dict(calibration=calibration), "transplant": dict(source=0)}[mode]
    chosen = dict(layers=[0, 2], positions=range(6, 12), sequences=[0, 1])
    with set_dimensions(this.model, DIMENSIONS, mode, **needs, **chosen):
        found = own_pass(this)
        if mode == "zero":
            assert_traced(this, expected)
    assert_same_pass(found, expected)
    assert_another_pass(found, this.plain)
    elsewhere = [dict(where, layers=(0, 1)), dict(where, sequences=slice(1, 3)), dict(where, positions=slice(7, 13))]
    for wrong in elsewhere:
        control = eager_pass(family, this.model, this.ids, stream=dimension_edit(new_values, **wrong))
        assert_another_pass(found, control)


# Clamping while a mask acts


@pytest.mark.parametrize("what", ["neurons", "dimensions", "norms"])
@every_family
def test_clamping_equals_eager(family, what):
    this = case(family)
    layers = range(len(this.plain.leaving))

    def norms(layer, hidden_BTE):
        held = this.plain.leaving[layer].double().norm(dim=-1, keepdim=True)
        return (hidden_BTE.double() * held / hidden_BTE.double().norm(dim=-1, keepdim=True)).to(hidden_BTE.dtype)

    edits = {
        "neurons": dict(
            neurons=neuron_edit(family, lambda layer, expert, _: this.plain.neurons[layer][expert][..., list(NEURONS)])
        ),
        "dimensions": dict(
            stream=dimension_edit(lambda layer, _: this.plain.leaving[layer][..., DIMENSIONS], layers=layers)
        ),
        "norms": dict(stream=norms),
    }[what]
    held = {"neurons": some_neurons(family), "dimensions": DIMENSIONS, "norms": True}
    expected = eager_pass(family, this.model, this.ids, mask=masked("to self"), **edits)
    with mask_to_self(this.model, 10), clamp(this.model, this.ids, **{what: held[what]}):
        # The clamp was made while the mask was on: what it holds is untouched all the same.
        found = own_pass(this)
        if what == "neurons":
            assert_traced(this, expected)
    assert_same_pass(found, expected)
    assert_another_pass(found, eager_pass(family, this.model, this.ids, mask=masked("to self")))
    assert_another_pass(found, this.plain)


@every_family
def test_a_clamp_of_several_kinds_at_chosen_places_with_other_interventions(family):
    this, where = case(family), dict(positions=[9, 10], sequences=[0, 2])
    held = dict(positions=[9, 10], sequences=slice(0, 3, 2))
    layers = range(len(this.plain.leaving))
    edits = dict(
        neurons=neuron_edit(
            family, lambda layer, expert, _: this.plain.neurons[layer][expert][..., list(NEURONS)], **held
        ),
        stream=dimension_edit(lambda layer, _: this.plain.leaving[layer][..., DIMENSIONS], layers=layers, **held),
    )
    seen = calibrate(this, "amplify_variance", 5, 3.0, (0, 1))
    amplified = aggregation_edit("amplify_variance", seen, 5, 3.0)
    expected = eager_pass(family, this.model, this.ids, mask=masked("to self"), aggregation=amplified, **edits)
    neurons = some_neurons(family)
    reading = read_condition(None, this.model, this.ids, neurons=neurons, dimensions=tuple(DIMENSIONS))
    interventions = [
        mask_to_self(this.model, 10),
        amplify_variance(this.model, 5, 3.0, calibration=this.calibration, layers=[0, 1]),
        clamp(this.model, reading, neurons=neurons, dimensions=DIMENSIONS, **where),
    ]
    with together(interventions) as first_layer:
        assert first_layer == 0
        assert_same_pass(own_pass(this), expected)
    with together(interventions[:2]):
        assert_another_pass(own_pass(this), expected)
