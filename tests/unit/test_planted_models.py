"""What is planted in the models of planted_models.py, shown without any code of the library's interventions.

The forward pass is written out here in plain PyTorch, with a door for edits at every place that an intervention could
touch. An edit is a function (place, layer, tensor) -> tensor; places are scores, aggregation, neurons, down and stream.
Axes: B sequences, L layers, H heads, T query position, S key position, D head size, C = H D channels, F neurons.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import pytest
import torch
from planted_models import DECOYS, decoy, planted_chain, random_tokens, true_of, with_early_dimension
from torch import Tensor

import sinkscope
from sinkscope.interventions.intervene import intervene
from sinkscope.tracing.trace import trace

Edit = Callable[[str, int, Tensor], Tensor]
Change = Callable[[Tensor, Tensor, int], Tensor]
"""(aggregation at the position [B, C], its mean over calibration sequences [C], layer) -> new aggregation."""
POSITIONS = (10, 20, 30)
FACTORS = (1.0, 1.5, 2.0, 4.0, 8.0)
FACTOR = FACTORS[-1]
BORN = range(3)
"""Layers up to the birth of the disparity."""
EVERY = range(99)
"""More layers than any model here has."""


@dataclass
class Run:
    logits: Tensor
    attention_BLHTS: Tensor
    seen: dict[tuple[str, int], Tensor]
    """Every tensor after its edits, by place and layer."""

    @property
    def rate_T(self) -> Tensor:
        """Share of sequences, layers and heads whose queries i >= k give key k more than 0.3 on average."""
        length = self.attention_BLHTS.shape[-1]
        alpha = self.attention_BLHTS.sum(-2) / (length - torch.arange(length))
        return (alpha > 0.3).double().mean((0, 1, 2))


@torch.no_grad()
def plain_forward(model, ids: Tensor, *edits: Edit, num_layers: int | None = None) -> Run:
    """Llama written out: RMSNorm, rotary embeddings, causal softmax attention, SwiGLU."""
    config, length = model.config, ids.shape[1]
    heads, size = config.num_attention_heads, config.head_dim
    frequency = config.rope_parameters["rope_theta"] ** (-torch.arange(0, size, 2) / size)
    angle = torch.cat([torch.arange(length)[:, None] * frequency] * 2, dim=-1)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    seen, attention = {}, []

    def door(place: str, layer: int, value: Tensor) -> Tensor:
        for edit in edits:
            value = edit(place, layer, value)
        seen[place, layer] = value
        return value

    def norm(x: Tensor, module) -> Tensor:
        return module.weight * x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()

    def split(x: Tensor) -> Tensor:
        return x.unflatten(-1, (heads, size)).transpose(1, 2)

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * angle.cos() + torch.cat([-second, first], dim=-1) * angle.sin()

    x = model.model.embed_tokens.weight[ids]
    for layer, block in enumerate(model.model.layers[:num_layers]):
        part, state = block.self_attn, norm(x, block.input_layernorm)
        q, k, v = (split(state @ module.weight.T) for module in (part.q_proj, part.k_proj, part.v_proj))
        scores = (rotate(q) @ rotate(k).transpose(-1, -2) / size**0.5).masked_fill(future, -torch.inf)
        attention.append(door("scores", layer, scores).softmax(-1))
        aggregation = door("aggregation", layer, (attention[-1] @ v).transpose(1, 2).flatten(2))
        x = x + aggregation @ part.o_proj.weight.T
        state = norm(x, block.post_attention_layernorm)
        gate, up = state @ block.mlp.gate_proj.weight.T, state @ block.mlp.up_proj.weight.T
        neurons = door("neurons", layer, gate * gate.sigmoid() * up)
        x = door("stream", layer, x + neurons @ door("down", layer, block.mlp.down_proj.weight).T)
    return Run(norm(x, model.model.norm) @ model.lm_head.weight.T, torch.stack(attention, dim=1), seen)


def at(place: str, layers, change: Callable[[Tensor, int], Tensor]) -> Edit:
    return lambda found, layer, value: change(value, layer) if found == place and layer in layers else value


def put(value: Tensor, index, new) -> Tensor:
    value = value.clone()
    value[index] = new
    return value


def mask_to_self(position: int) -> Edit:
    def alone(scores: Tensor, layer: int) -> Tensor:
        own = scores[:, :, position, position].clone()
        return put(put(scores, (..., position, slice(None)), -torch.inf), (..., position, position), own)

    return at("scores", EVERY, alone)


@cache
def edit_aggregation(found: "Case", position: int, change: Change) -> Edit:
    """Changes the aggregation of a position in the layers up to the birth of the disparity.

    Its mean is taken over other sequences, layer by layer, with the change active below.
    """
    means: dict[int, Tensor] = {}

    def calibrated(value: Tensor, layer: int) -> Tensor:
        mean = means.setdefault(layer, value[:, position].mean(0))
        return put(value, (slice(None), position), change(value[:, position], mean, layer))

    edit = at("aggregation", BORN, calibrated)
    plain_forward(found.model, found.calibration, edit, num_layers=len(BORN))
    return edit


@cache
def amplify(factor: float = FACTOR) -> Change:
    return lambda o, mean, layer: mean + factor * (o - mean)


def ablate(layer: int, neurons: list[int]) -> Edit:
    return at("neurons", [layer], lambda value, _: put(value, (..., neurons), 0.0))


def densify(layer: int, neuron: int, seed: int = 0) -> Edit:
    def spread(down: Tensor, _: int) -> Tensor:
        signs = torch.randn(len(down), generator=torch.Generator().manual_seed(seed)).sign()
        return put(down, (slice(None), neuron), signs * down[:, neuron].norm() / len(down) ** 0.5)

    return at("down", [layer], spread)


def hold(found: "Case", position: int, place: str, layers: range, channel: int) -> Edit:
    """A neuron or a dimension kept at a position as it is in the untouched model."""
    index = (slice(None), position, channel)
    return at(place, layers, lambda value, layer: put(value, index, found.run.seen[place, layer][index]))


def transplant(found: "Case", position: int, place: str, layers: range, channel: int) -> Edit:
    """A neuron or a dimension at a position as it is at position 0 of the untouched model."""
    index = (slice(None), position, channel)
    return at(place, layers, lambda value, layer: put(value, index, found.run.seen[place, layer][:, 0, channel]))


class Case:
    """A planted model with sequences to judge by, others to calibrate on, and its untouched run."""

    def __init__(self, kind: str, seed: int):
        self.model, self.facts = planted_chain(seed) if kind == "chain" else decoy(kind, seed)
        self.ids = random_tokens(self.facts, seed=seed)
        self.calibration = random_tokens(self.facts, num_sequences=64, seed=1000 + seed)
        self.run = plain_forward(self.model, self.ids)
        self.positions = POSITIONS if kind == "chain" else POSITIONS[:1]

    def rates(self, *edits: Edit) -> Tensor:
        return plain_forward(self.model, self.ids, *edits).rate_T

    def created(self, edit_at: Callable[[int], Edit | list[Edit]]) -> list[float]:
        """By how much an edit at each position raises the sink rate there."""
        rises = []
        for position in self.positions:
            edit = edit_at(position)
            rate_T = self.rates(*(edit if isinstance(edit, list) else [edit]))
            rises.append(float(rate_T[position] - self.run.rate_T[position]))
        return rises

    @cache  # noqa: B019 - cases live as long as the tests
    def changed(self, change: Change) -> list[float]:
        return self.created(lambda position: edit_aggregation(self, position, change))

    @cached_property
    def masked(self) -> list[float]:
        return self.created(mask_to_self)

    def removed(self, *edits: Edit) -> float:
        """By how much edits lower the sink rate at position 0."""
        return float(self.run.rate_T[0] - self.rates(*edits)[0])

    @property
    def places(self) -> dict[str, tuple[str, range, int] | None]:
        """(place, layers, channel) of the super neuron and of the massive dimension, where they are planted."""
        if not self.facts.super_neurons:
            return {"super_neurons": None, "dimensions": None}
        ((layer, neuron),) = self.facts.super_neurons
        dimension = self.facts.massive_dimension
        return {
            "super_neurons": ("neurons", range(layer, layer + 1), neuron),
            "dimensions": None if dimension is None else ("stream", EVERY[layer:], dimension),
        }


case = cache(Case)
planted = cache(lambda kind, seed: trace(case(kind, seed).model, case(kind, seed).ids).findings)


def variance_discrepancy(found: Case) -> float:
    """Variance of the aggregation at position 0 over the later half, the least of the layers."""
    variances = [found.run.seen["aggregation", layer].var(0).mean(-1) for layer in BORN]
    return min(float(variance[0] / variance[32:].mean()) for variance in variances)


def dimension_disparity(found: Case) -> float:
    """DomRatio at position 0 over the mean elsewhere, the most of the layers."""
    streams = [found.run.seen["stream", layer].abs() for layer in range(len(found.model.model.layers))]
    ratios = [(stream.amax(-1) / stream.mean(-1)).mean(0) for stream in streams]
    return max(float(ratio[0] / ratio[1:].mean()) for ratio in ratios)


def necessary(found: Case) -> float:
    return found.removed(*(ablate(layer, [neuron]) for layer, neuron in found.facts.super_neurons))


def sufficient(found: Case) -> float:
    place = found.places["super_neurons"]
    return min(found.created(lambda position: transplant(found, position, *place))) if place else 0.0


def mediated(found: Case) -> float:
    """The share of the mask's effect that is gone while the super neurons are held; nothing where there is none."""
    total, place = found.masked, found.places["super_neurons"]
    if place is None or min(total) < 0.05:
        return 0.0
    direct = found.created(lambda position: [mask_to_self(position), hold(found, position, *place)])
    return min(1 - left / rise for left, rise in zip(direct, total, strict=True))


STATISTICS: dict[str, tuple[Callable[[Case], float], float, float]] = {
    # claim: (statistic, at least in the chain, at most in a decoy of which the claim must not be said)
    "sink": (lambda found: float(found.run.rate_T[0]), 0.35, 0.0),
    "variance_discrepancy": (variance_discrepancy, 20.0, 2.0),
    "dimension_disparity": (dimension_disparity, 6.0, 2.0),
    "unmixing_creates_sink": (lambda found: min(found.masked), 0.3, 0.01),
    "neurons_necessary": (necessary, 0.35, 0.01),
    "super_neurons_sufficient": (sufficient, 0.25, 0.01),
    "mediation_mask_super_neurons": (mediated, 0.99, 0.2),
}


def test_plain_forward_is_the_model():
    found = case("chain", 0)
    with torch.no_grad():
        logits = found.model(found.ids, use_cache=False).logits
    torch.testing.assert_close(found.run.logits, logits, rtol=1e-4, atol=1e-4)
    seeing_the_future = at("scores", EVERY, lambda scores, _: scores.nan_to_num(neginf=0.0))
    assert (plain_forward(found.model, found.ids, seeing_the_future).logits - logits).abs().max() > 0.1


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("claim", STATISTICS)
def test_the_chain_has_every_effect(claim, seed):
    statistic, at_least, _ = STATISTICS[claim]
    assert statistic(case("chain", seed)) >= at_least


@pytest.mark.parametrize("kind", DECOYS)
def test_decoys_lack_what_is_false_of_them(kind):
    found = case(kind, 0)
    values = {claim: STATISTICS[claim][0](found) for claim in STATISTICS.keys() - true_of(kind)}
    assert {claim: value for claim, value in values.items() if value > STATISTICS[claim][2]} == {}
    assert values, "no effect was looked at"


IDLE = ("disparity_beside_sink", "disparity_after_sink")
"""Decoys whose disparity appears where heads have the sink already."""


@pytest.mark.parametrize("kind", ["chain", *DECOYS])
def test_trace_finds_what_is_planted(kind):
    findings, facts = planted(kind, 0), case(kind, 0).facts
    assert [sink.position for sink in findings.sinks] == ([] if facts.sink is None else [facts.sink])
    sparse = facts.massive_dimension is not None
    assert (findings.massive_dimensions if findings.focus else []) == ([facts.massive_dimension] if sparse else [])
    assert [(neuron.layer, neuron.neuron) for neuron in findings.super_neurons] == (
        facts.super_neurons if sparse else []
    )
    for neuron in findings.super_neurons:
        assert [(c.layer, c.dimension) for c in findings.changes[0]] == [(neuron.layer, neuron.dimension)]
        assert findings.appears_in == ([] if kind in IDLE else [neuron.layer])
        assert neuron.write_share > 0.99
        assert neuron.contrast > 20
        assert neuron.sparsity.top_share > 0.99
        assert neuron.layer_top_share < 0.15


@pytest.mark.parametrize("seed", [0, 1])
def test_a_weak_dimension_from_the_start_does_not_hide_the_one_that_heads_read(seed):
    model, facts = with_early_dimension(seed)
    ids, ((layer, neuron),) = random_tokens(facts, seed=seed), facts.super_neurons
    findings = trace(model, ids, effective_rank=False).findings
    early, later = facts.early_dimension, facts.massive_dimension
    assert [(c.layer, c.dimension) for c in findings.changes[0] if c.appears] == [(0, early), (layer, later)]
    assert [(c.layer, c.dimension) for c in findings.carried_by[0]] == [(layer, later)]
    tested = sinkscope.trace(model, ids, effective_rank=False)
    told = f"Dimension {later} of the residual stands out there: appearing in layer {layer}. Without the"
    assert told in tested.story
    assert f"(layer:neuron {layer}:{neuron}" in tested.story
    # The truth, by the plain forward pass: no head needs the early dimension, and all need the later one.
    rates = [
        float(plain_forward(model, ids, *edits).rate_T[0])
        for edits in ([], [ablate(0, [facts.early_neuron])], [ablate(layer, [neuron])])
    ]
    assert rates[1] > 0.8 * rates[0] > 0.3
    assert rates[2] < 0.05
    # By default an amplification reaches the layer that matters; up to the early dimension it makes half of a sink.
    assert list(findings.layers_before(0)) == list(range(layer + 1))
    by_default, short = (
        intervene(model, {"amplify": "10:8"}, layers=layers, num_sequences=16, length=32).after.recording.sink_rate[10]
        for layers in (None, [0])
    )
    assert by_default > 0.35 > 0.25 > short


def test_named_neurons_have_been_removed():
    """What is left of the sink is what the plain forward pass says; of a neuron beside the sink nothing is said."""
    for kind, is_needed in (("chain", True), ("disparity_beside_sink", False)):
        given = case(kind, 0)
        tested = sinkscope.trace(given.model, given.ids, effective_rank=False)
        (sink,), ((layer, neuron),) = tested.summary["sinks"], given.facts.super_neurons
        if not is_needed:
            # Its disparity stands behind heads that have the sink already: no neuron is named, and nothing is blamed.
            assert (sink["writers"], tested.removal) == ([], None)
            assert "only behind heads that have the sink already" in tested.story
            continue
        assert [(named["layer"], named["neuron"]) for named in sink["writers"]] == [(layer, neuron)]
        edited = plain_forward(given.model, given.ids[:8], ablate(layer, [neuron])).rate_T[0]
        assert sink["rate_without_writers"]["rate"] == pytest.approx(float(edited), abs=1e-6)
        assert edited < 0.05
        assert sink["rate_without_random"]["rate"] > 0.8 * sink["rate"]
        assert tested.removal is not None
        assert tested.removal.random[0] != tested.removal.neurons[0]
        assert "no small set" not in tested.story
        # Inside an intervention and with test=False nothing is tested, and the story says so.
        for untested in (sinkscope.trace(given.model, given.ids, effective_rank=False, test=False), inside(given)):
            assert untested.removal is None
            assert "was not tested" in untested.story


def inside(given: Case):
    with sinkscope.mask_to_self(given.model, 40):
        return sinkscope.trace(given.model, given.ids, effective_rank=False)


def test_the_chain_reads_as_the_paper_says():
    findings = planted("chain", 0)
    variance, law = findings.variance_ratio, findings.averaging_law_r_squared
    assert variance is not None
    assert law is not None
    assert (variance[BORN] > 20).all()
    assert (law[BORN] > 0.9).all()
    cosine_LT = findings.recording["cosine"]
    assert (cosine_LT[3:, 0] > 0.95).all()
    assert (cosine_LT[3:, 1:] < 0.7).all()
    assert not (cosine_LT[BORN, 0] > 0.9).any()


@pytest.mark.parametrize("kind", ["sink_from_norm", "special_token"])
def test_no_neuron_has_a_part_in_these_sinks(kind):
    everything = at("neurons", EVERY, lambda value, _: value * 0)
    assert case(kind, 0).removed(everything) <= 0.01
    assert case("chain", 0).removed(everything) >= 0.35


def test_other_neurons_of_the_layer_have_no_part_in_the_chain():
    found = case("chain", 0)
    ((layer, neuron),) = found.facts.super_neurons
    sizes = found.model.model.layers[layer].mlp.down_proj.weight.norm(dim=0)
    assert 0.6 < sizes.min() < sizes[neuron] < sizes.max() < 1.4
    others = [other for other in range(len(sizes)) if other != neuron]
    assert found.removed(ablate(layer, others)) <= 0.02


def test_the_massive_dimension_alone_makes_a_sink():
    for kind, least, most in (("chain", 0.25, 0.5), ("disparity_beside_sink", 0.0, 0.01)):
        found = case(kind, 0)
        place = found.places["dimensions"]
        assert place is not None
        rises = found.created(lambda position, found=found, place=place: transplant(found, position, *place))
        assert all(least <= rise <= most for rise in rises)


def test_models_are_drawn_from_the_seed():
    for build in (planted_chain, lambda seed: decoy("large_neuron", seed)):
        (model, facts), (again, same), (other, different) = (build(seed) for seed in (3, 3, 4))
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
        assert facts == same != different
        assert not torch.equal(model.lm_head.weight, other.lm_head.weight)
