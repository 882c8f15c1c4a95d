"""A trace of every family against a plain eager forward pass with hooks of the test's own, reduced in float64.

The parts of a family, its gates and its norms are written down here a second time, so that a wrong row of the family
table shows.
Axes: B sequences, T query position, S key position, H query heads, K key-value heads, D head size, C channels, E width,
U neurons of a layer, F neurons of an expert, P candidate positions, Q lock positions.
"""

import contextlib
import copy
import functools
import sys
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_models import CONFIGURATIONS, PARTS, tiny_model
from torch import Tensor

from sinkscope.errors import InputError
from sinkscope.measures.value_variance import averaging_law
from sinkscope.models.anatomy import SHARED_EXPERT, anatomy_of
from sinkscope.tracing import attention_hook as hook_module
from sinkscope.tracing import hooks as hooks_module
from sinkscope.tracing import layer_call
from sinkscope.tracing import recorder as recorder_module
from sinkscope.tracing import tiles as tiles_module
from sinkscope.tracing import trace as trace_module
from sinkscope.tracing.recorder import Recording
from sinkscope.tracing.trace import trace

B, T = 4, 72
"""Longer than one tile of 64 queries and than every window of the tiny models."""
TOLERANCE = 1e-4
"""The attention path's own rounding: both passes are float32, sum in another order, and pass on their differences."""

VARIANTS = {
    **{family: (family, {}) for family in CONFIGURATIONS},
    "falcon with one key-value head": ("falcon", dict(new_decoder_architecture=False, multi_query=True)),
    "falcon in sequence": ("falcon", dict(new_decoder_architecture=False, multi_query=True, parallel_attn=False)),
    "gemma2 without soft-cap": ("gemma2", dict(attn_logit_softcapping=None)),
    "opt without biases": ("opt", dict(enable_bias=False)),
    "gpt_neox in sequence": ("gpt_neox", dict(use_parallel_residual=False)),
    "gpt2 scaled by layer": ("gpt2", dict(scale_attn_by_inverse_layer_idx=True)),
    "deepseek_v3 without latent queries": ("deepseek_v3", dict(q_lora_rank=None)),
}

POST_NORMS = {
    **dict.fromkeys(("gemma2", "gemma3", "olmo2", "olmo3"), "post_feedforward_layernorm"),
    "glm4": "post_mlp_layernorm",
}


@dataclass
class PlainLayer:
    """One layer of the plain pass, whole, in float64."""

    call: tuple = ()
    attention: Tensor | None = None
    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    """[B, H, S, D], key-value heads repeated."""
    state: Tensor | None = None
    aggregation: Tensor | None = None
    projected: Tensor | None = None
    entering: Tensor | None = None
    leaving: Tensor | None = None
    neurons: Tensor | None = None
    """[B, T, U] neurons as they enter the down projection, times their routing weight."""
    written: Tensor | None = None
    """The same behind the post-norm's scale."""
    output_EU: Tensor | None = None
    """Output vectors, the post-norm's gain included."""
    routed: Tensor | None = None
    raw: dict = field(default_factory=dict)


@dataclass
class Plain:
    layers: list[PlainLayer]
    logits: Tensor

    def stacked(self, compute) -> np.ndarray:
        return np.stack([np.asarray(compute(layer), dtype=np.float64) for layer in self.layers])


def tokens(seed=0) -> Tensor:
    return torch.randint(3, 97, (B, T), generator=torch.Generator().manual_seed(seed))


@functools.cache
def case(variant: str) -> SimpleNamespace:
    """Model, tokens, plain pass and trace of one variant; read only."""
    family, overrides = VARIANTS[variant]
    return traced(family, tiny_model(family, **overrides), tokens())


@functools.cache
def planted_case(family: str) -> SimpleNamespace:
    """As `case`, with one token that brings massive dimensions: in every sequence at 3, in some at 40 and 5."""
    return traced(family, *planted(family, tokens(1)))


def planted(family: str, ids: Tensor) -> tuple:
    model, ids = tiny_model(family, seed=1), ids.masked_fill(ids == 50, 51)
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding[50, 7] = -300.0
        embedding[50, 19] = 200.0
    ids[:, 3], ids[:2, 40], ids[0, 5] = 50, 50, 50
    return model, ids


def traced(family: str, model, ids: Tensor) -> SimpleNamespace:
    found = trace(model, ids)
    positive, share = found.findings.lock
    return SimpleNamespace(
        family=family,
        model=model,
        ids=ids,
        plain=plain_pass(family, model, ids),
        found=found,
        recording=found.recording,
        positive_queries=positive,
        lock_share=share,
    )


# The plain pass


def plain_pass(family: str, model, ids: Tensor) -> Plain:
    """Every activation of an eager forward pass."""
    parts = PARTS[family]
    blocks = model.get_submodule(parts["blocks"])
    layers = [PlainLayer() for _ in blocks]
    handles = []

    def keep(module, layer, name, *, output=False) -> None:
        # Copies, since some families add to a module's output in place.
        def before(_, args, kwargs):
            layer.raw[name] = [x.clone() if isinstance(x, Tensor) else x for x in (*args, *kwargs.values())]

        def after(_, args, result):
            layer.raw[name] = (result[0] if isinstance(result, tuple) else result).clone()

        handles.append(
            module.register_forward_hook(after)
            if output
            else module.register_forward_pre_hook(before, with_kwargs=True)
        )

    def keep_call(layer):
        def hook(_, args, kwargs):
            layer.call = (args, dict(kwargs))

        return hook

    for block, layer in zip(blocks, layers, strict=True):
        attention = block.get_submodule(parts["attention"])
        handles.append(attention.register_forward_pre_hook(keep_call(layer), with_kwargs=True))
        keep(block, layer, "entering")
        keep(block, layer, "leaving", output=True)
        keep(block.get_submodule(parts["output"]), layer, "aggregation")
        keep(block.get_submodule(parts["output"]), layer, "projected", output=True)
        experts = getattr(getattr(block, "mlp", None), "experts", None)
        if experts is None:
            keep(block.get_submodule(parts["down"]), layer, "neurons")
            keep(block.get_submodule(parts["down"]), layer, "feed_forward", output=True)
        else:
            keep(experts, layer, "experts")
            keep(experts, layer, "feed_forward", output=True)
            if hasattr(block.mlp, "shared_experts"):
                keep(block.mlp.shared_experts.down_proj, layer, "shared")
        if family in POST_NORMS:
            keep(block.get_submodule(POST_NORMS[family]), layer, "post_norm", output=True)
    with eager(family, model, layers), torch.no_grad():
        try:
            outputs = model(ids, use_cache=False, output_attentions=True)
        finally:
            for handle in handles:
                handle.remove()
    for block, layer, attention in zip(blocks, layers, outputs.attentions, strict=True):
        _finish(family, block, layer, attention)
    return Plain(layers, outputs.logits)


@contextlib.contextmanager
def eager(family: str, model, layers: list[PlainLayer]):
    """Eager attention, its queries, keys and values noted down in order of the calls."""
    before, calls = model.config._attn_implementation, iter(layers)
    if family == "falcon":
        # Falcon refuses the setter; under sdpa, output_attentions adds a boolean mask to its scores.
        model.config._attn_implementation = "eager"
        try:
            yield
        finally:
            model.config._attn_implementation = before
        return
    attention = model.get_submodule(PARTS[family]["blocks"])[0].get_submodule(PARTS[family]["attention"])
    modelling = sys.modules[type(attention).__module__]
    original = modelling.eager_attention_forward

    def noting(module, query, key, value, *args, **kwargs):
        layer = next(calls)
        layer.query, layer.key, layer.value = (x.double() for x in (query, key, value))
        return original(module, query, key, value, *args, **kwargs)

    model.set_attn_implementation("eager")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modelling, "eager_attention_forward", noting)
        try:
            yield
        finally:
            model.set_attn_implementation(before)


def _finish(family: str, block, layer: PlainLayer, attention: Tensor) -> None:
    raw = layer.raw
    args, kwargs = layer.call
    layer.state = (args[0] if args else kwargs["hidden_states"]).double()
    layer.attention = attention.double()
    layer.entering, layer.leaving = raw["entering"][0].double(), raw["leaving"].double()
    layer.aggregation = raw["aggregation"][0].double().view(B, T, -1)
    layer.projected = raw["projected"].double().view(B, T, -1)
    if family == "falcon":
        layer.query, layer.key, layer.value = falcon_heads(block.self_attention, layer.state)
    num_heads = attention.shape[1]
    layer.key, layer.value = (x.repeat_interleave(num_heads // x.shape[1], dim=1) for x in (layer.key, layer.value))
    if "experts" in raw:
        layer.neurons, layer.output_EU, layer.routed = expert_neurons(family, block.mlp, raw)
    else:
        down = block.get_submodule(PARTS[family]["down"])
        weight = down.weight.T if family == "gpt2" else down.weight
        layer.neurons, layer.output_EU = raw["neurons"][0].double().view(B, T, -1), weight.detach().double()
        bias = 0 if down.bias is None else down.bias.double()
        # The neurons of this test are the right ones: through the output vectors they give the feed-forward's output.
        assert_close(raw["feed_forward"].view(B, T, -1), layer.neurons @ layer.output_EU.T + bias, 1e-5)
    layer.written = layer.neurons
    if family in POST_NORMS:
        norm = block.get_submodule(POST_NORMS[family])
        gain = norm.weight.detach().double() + (1 if family in ("gemma2", "gemma3") else 0)
        epsilon = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
        before = raw["feed_forward"].double().view(B, T, -1)
        scale = (before.square().mean(-1, keepdim=True) + epsilon).rsqrt()
        layer.written, layer.output_EU = layer.neurons * scale, layer.output_EU * gain[:, None]
        assert_close(raw["post_norm"], layer.written @ layer.output_EU.T, 1e-5)


def expert_neurons(family: str, mlp, raw: dict) -> tuple[Tensor, Tensor, Tensor]:
    """([B, T, U] neurons, [E, U] output vectors, [B, T, X] routed or not) of a layer of experts, token by token."""
    hidden, index, weight = raw["experts"]
    hidden, weight, experts = hidden.double(), weight.double(), mlp.experts
    gate_up_XFE, down_XEF = experts.gate_up_proj.detach().double(), experts.down_proj.detach().double()
    if family == "gpt_oss":  # kept transposed, with biases
        gate_up_XFE, down_XEF = gate_up_XFE.transpose(1, 2), down_XEF.transpose(1, 2)
    num_experts, _, num_neurons = down_XEF.shape
    neurons = torch.zeros(B * T, num_experts, num_neurons, dtype=torch.float64)
    routed = torch.zeros(B * T, num_experts, dtype=torch.bool)
    output = torch.zeros_like(hidden)
    for token in range(B * T):
        for expert, share in zip(index[token].tolist(), weight[token], strict=True):
            gate_up = gate_up_XFE[expert] @ hidden[token]
            if family == "gpt_oss":
                gate_up = gate_up + experts.gate_up_proj_bias[expert].double()
                gate, up = gate_up[::2].clamp(max=7.0), gate_up[1::2].clamp(-7.0, 7.0)
                activation = (up + 1) * gate * torch.sigmoid(1.702 * gate)
                output[token] += share * experts.down_proj_bias[expert].double()
            else:
                gate, up = gate_up[:num_neurons], gate_up[num_neurons:]
                activation = gate * torch.sigmoid(gate) * up
            neurons[token, expert] = share * activation
            routed[token, expert] = True
    flat = neurons.flatten(1)
    vectors = torch.cat(list(down_XEF), dim=1)
    assert_close(raw["feed_forward"].reshape(B * T, -1), flat @ vectors.T + output, 1e-5)
    if "shared" in raw:
        flat = torch.cat([flat, raw["shared"][0].double().view(B * T, -1)], dim=-1)
        vectors = torch.cat([vectors, mlp.shared_experts.down_proj.weight.detach().double()], dim=1)
    return flat.view(B, T, -1), vectors, routed.view(B, T, -1)


def rotated(x_BHTD: Tensor, theta: float) -> Tensor:
    """Rotary positions: dimensions i and i + D / 2 turn by t * theta^(-2i / D)."""
    size, length = x_BHTD.shape[-1], x_BHTD.shape[-2]
    angle = torch.arange(length)[:, None].double() * theta ** (-torch.arange(size // 2).double() * 2 / size)
    first, second = x_BHTD[..., : size // 2], x_BHTD[..., size // 2 :]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def falcon_heads(attention, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of Falcon from its fused projection: for each group its queries, a key and a value."""
    fused = state @ attention.query_key_value.weight.detach().double().T
    num_groups = attention.config.num_kv_heads if attention.config.new_decoder_architecture else 1
    heads = fused.view(B, T, num_groups, -1, attention.head_dim)
    query, key, value = heads[..., :-2, :], heads[..., -2, :], heads[..., -1, :]
    query = query.flatten(2, 3).transpose(1, 2)
    return rotated(query, 10_000.0), rotated(key.transpose(1, 2), 10_000.0), value.transpose(1, 2)


# Comparison


def assert_close(found, expected, tolerance=TOLERANCE, name="") -> None:
    """Relative, with a floor for values that are small only because larger ones cancel."""
    found, expected = (np.asarray(torch.as_tensor(x).detach(), dtype=np.float64) for x in (found, expected))
    assert found.shape == expected.shape, name
    floor = tolerance * 0.1 * np.abs(expected[np.isfinite(expected)]).max(initial=0)
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=floor, err_msg=name)


def received_BHS(layer: PlainLayer) -> Tensor:
    """alpha: mean over the queries i >= k of a_ik."""
    return torch.stack([layer.attention[:, :, k:, k].mean(-1) for k in range(T)], dim=-1)


def entropy_BHT(layer: PlainLayer) -> Tensor:
    return torch.special.entr(layer.attention).sum(-1)


def variance_T(x_BTC: Tensor) -> Tensor:
    mean = x_BTC.sum(0) / B
    return ((x_BTC - mean) ** 2).sum(0).mean(-1) / (B - 1)


def cosine_T(state: Tensor) -> Tensor:
    unit = state / state.norm(dim=-1, keepdim=True)
    return torch.stack([(unit[b] * unit[c]).sum(-1) for b in range(B) for c in range(b)]).mean(0)


def kurtosis_BT(h: Tensor) -> Tensor:
    deviation = h - h.mean(-1, keepdim=True)
    return (deviation**4).mean(-1) / (deviation**2).mean(-1) ** 2


every_family = pytest.mark.parametrize("variant", VARIANTS)


@every_family
def test_attention_received_equals_eager(variant):
    plain, reading = case(variant).plain, case(variant).recording
    alpha = torch.stack([received_BHS(layer) for layer in plain.layers])
    assert_close(reading["received"], alpha.mean(1))
    # No key of these models stands on the threshold, so that counts must agree exactly.
    assert float((alpha - 0.3).abs().min()) > 1e-6
    counted = (alpha > 0.3).double()
    assert_close(reading["head_sink_rate"], counted.mean(1), 1e-6)
    assert_close(reading.sequence_sink_rate, counted.mean((0, 2)), 1e-6)
    assert reading.keys.tolist() == list(range(T))


@every_family
def test_sink_counts_at_a_threshold_that_many_heads_pass(variant, monkeypatch):
    """Random models have few sinks at 0.3; at 0.03, about what an even spread gives, every family has some to count."""
    this = case(variant)
    monkeypatch.setattr(layer_call, "RECEIVED_THRESHOLD", 0.03)
    reading = trace(this.model, this.ids, effective_rank=False).recording
    alpha = torch.stack([received_BHS(layer) for layer in this.plain.layers])
    assert float((alpha - 0.03).abs().min()) > 1e-7
    counted = (alpha > 0.03).double()
    assert 0.1 < float(counted.mean()) < 0.9
    assert_close(reading["head_sink_rate"], counted.mean(1), 1e-6)
    assert_close(reading.sequence_sink_rate, counted.mean((0, 2)), 1e-6)
    assert_close(reading.sink_rate, counted.mean((0, 1, 2)), 1e-6)
    # Control: counting heads by the mean over sequences gives other rates.
    assert float((reading["head_sink_rate"] - (alpha.mean(1) > 0.03).double()).abs().max()) > 0.2


@every_family
def test_rows_of_attention_equal_eager(variant):
    plain, reading = case(variant).plain, case(variant).recording
    assert_close(reading["entropy"], plain.stacked(lambda layer: entropy_BHT(layer).mean((0, 1))))
    assert_close(reading["entropy_by_head"], plain.stacked(lambda layer: entropy_BHT(layer).mean((0, 2))))
    assert_close(reading["mixing"], plain.stacked(lambda layer: (layer.attention**2).sum(-1).mean((0, 1))))
    assert_close(reading["mixing_by_head"], plain.stacked(lambda layer: (layer.attention**2).sum(-1).mean((0, 2))))
    assert reading.distances == (0, 1, 2, 3, 4, 8, 16, 32, 64)
    for index, d in enumerate(reading.distances):
        expected = plain.stacked(
            lambda layer, d=d: layer.attention.diagonal(offset=-d, dim1=-2, dim2=-1).mean(-1).mean(0)
        )
        assert_close(reading["by_distance"][..., index], expected, name=f"distance {d}")


@every_family
def test_value_aggregation_equals_eager(variant):
    plain, positions = case(variant).plain, case(variant).recording
    assert_close(positions["value_variance"], plain.stacked(lambda layer: variance_T(layer.aggregation)))
    assert_close(positions["projected_variance"], plain.stacked(lambda layer: variance_T(layer.projected)))
    assert_close(positions["second_moment"], plain.stacked(lambda layer: (layer.aggregation**2).mean((0, 2))))
    law = plain.stacked(lambda layer: averaging_law(layer.attention, layer.value))
    assert_close(positions["averaging_law"], law)
    assert_close(
        case(variant).recording["value_variance_by_channel"],
        plain.stacked(lambda layer: layer.aggregation.var(0).mean(0)),
    )
    # The values that were noted down are the ones that attention averages.
    for layer in plain.layers:
        assert_close(layer.aggregation, (layer.attention @ layer.value).transpose(1, 2).flatten(2), 1e-5)


@every_family
def test_residual_stream_equals_eager(variant):
    plain, reading = case(variant).plain, case(variant).recording
    positions = reading

    def by_position(measure, name="leaving"):
        return plain.stacked(lambda layer: measure(getattr(layer, name)).mean(0))

    assert_close(positions["dom_ratio"], by_position(lambda h: h.abs().amax(-1) / h.abs().mean(-1)))
    assert_close(positions["dom_ratio_normed"], by_position(lambda h: h.abs().amax(-1) / h.abs().mean(-1), "state"))
    assert_close(positions["participation_ratio"], by_position(lambda h: (h**2).sum(-1) ** 2 / (h**4).sum(-1)))
    assert_close(positions["top_energy_share"], by_position(lambda h: (h**2).amax(-1) / (h**2).sum(-1)))
    assert_close(positions["kurtosis"], by_position(kurtosis_BT))
    assert_close(positions["cosine"], plain.stacked(lambda layer: cosine_T(layer.state)))
    largest = plain.stacked(lambda layer: layer.leaving.abs().amax((0, 2)))
    assert_close(positions["largest_residual"], largest)
    places = plain.stacked(lambda layer: layer.leaving.abs().amax(0).argmax(-1))
    assert np.array_equal(positions["largest_residual_dimension"], places)


@every_family
def test_neuron_writes_equal_eager(variant):
    plain, positions = case(variant).plain, case(variant).recording
    for index, layer in enumerate(plain.layers):
        write_TU = (layer.written.abs() * layer.output_EU.norm(dim=0)).amax(0)
        assert_close(positions["largest_write"][index], write_TU.amax(-1))
        found = positions["largest_write_neuron"][index].long()
        # The same neuron, or one that is within rounding of it.
        assert_close(write_TU.gather(1, found[:, None]).squeeze(1), write_TU.amax(-1))
        assert (found == write_TU.argmax(-1)).float().mean() > 0.95
    if case(variant).family in POST_NORMS:
        # Control: the write before the post-norm is another number.
        layer = plain.layers[-1]
        bare = (layer.neurons.abs() * layer.output_EU.norm(dim=0)).amax((0, 2))
        assert float((positions["largest_write"][-1] / bare - 1).abs().max()) > 0.1


@every_family
def test_statistics_at_the_candidates_equal_eager(variant):
    plain, reading = case(variant).plain, case(variant).recording
    lock_positions = case(variant).found.findings.lock_positions
    for row in range(len(plain.layers) + 1):
        hidden = plain.layers[0].entering if row == 0 else plain.layers[row - 1].leaving
        kept = {name: by_layer[row - 1] for name, by_layer in reading.by_layer.items() if row - 1 in by_layer}
        at = kept["positions_of_interest"][0]
        dom_ratio_T = (hidden.abs().amax(-1) / hidden.abs().mean(-1)).mean(0)
        assert set(dom_ratio_T.topk(4).indices.tolist()) <= set(at.tolist())
        if row < len(plain.layers):
            assert torch.equal(lock_positions[row], dom_ratio_T.topk(4).indices)
        assert_close(kept["dimension"], hidden[:, at].mean(0))
        assert_close(kept["dimension_abs"], hidden[:, at].abs().mean(0))
        assert_close(kept["dimension_total"], hidden.abs().sum((0, 1)))
        if row == 0:
            assert "neuron_activation" not in kept
            continue
        layer = plain.layers[row - 1]
        assert_close(kept["neuron_activation"], layer.neurons[:, at].mean(0))
        assert_close(kept["neuron_written"], layer.written[:, at].mean(0))
        assert_close(kept["neuron_square"], (layer.written[:, at] ** 2).mean(0))
        assert_close(kept["neuron_energy"], (layer.written**2).sum((0, 1)))
        if case(variant).family in POST_NORMS:  # control: the norm counts
            assert not torch.allclose(kept["neuron_written"], kept["neuron_activation"], rtol=1e-2)


@every_family
def test_effective_rank_equals_eager(variant):
    plain = case(variant).plain

    def rank(tokens_NE: Tensor) -> float:
        values = np.linalg.svd(tokens_NE.numpy(), compute_uv=False)
        weights = values / values.sum()
        return float(np.exp(-(weights * np.log(weights)).sum()))

    ranks, without = case(variant).found.findings.effective_ranks_apart_from([0, 3])
    assert_close(ranks, plain.stacked(lambda layer: rank(layer.leaving.flatten(0, 1))))
    others = [t for t in range(T) if t not in (0, 3)]
    assert_close(without, plain.stacked(lambda layer: rank(layer.leaving[:, others].flatten(0, 1))))


# The lock


@pytest.mark.parametrize("family", CONFIGURATIONS)
def test_lock_equals_keys_made_again_at_full_length(family):
    """q . k with and without the massive dimensions, the keys from the attention module run again on all positions."""
    this = planted_case(family)
    num_read = 0
    for index, layer in enumerate(this.plain.layers):
        at = this.found.findings.lock_positions[index]
        assert len(set(at.tolist())) == 4
        magnitude = layer.entering.abs()
        massive = magnitude >= 10 * magnitude.mean(-1, keepdim=True)
        without = keys_again(this, index, layer.state.masked_fill(massive, 0))
        positive, share = lock_readings(layer, without, at)
        assert_close(this.positive_queries[index], positive, 1e-6)
        # Control: with the query at the key itself it is another share.
        assert not torch.equal(lock_readings(layer, without, at, first=0)[0], positive)
        share[:, ~massive[:, at].any(-1).any(0)] = float("nan")
        num_read += int(share.isfinite().any(0).sum())
        assert_close(this.lock_share[index], share, 1e-3)
        if 3 in at.tolist() and share[:, at.tolist().index(3)].isfinite().any():
            # Control: without dimension 8 in place of the massive ones the share is another.
            other = layer.state.clone()
            other[..., 8] = 0
            _, wrong = lock_readings(layer, keys_again(this, index, other), at)
            slot = at.tolist().index(3)
            assert float((wrong[:, slot] - share[:, slot]).abs().max()) > 0.05
    assert num_read > 0


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_lock_share_equals_the_massive_part_of_the_keys(family):
    """By the weights alone: a key is linear in the state, so the massive part of q . k can be written out."""
    this = planted_case(family)
    blocks = this.model.get_submodule(PARTS[family]["blocks"])
    for index, (block, layer) in enumerate(zip(blocks, this.plain.layers, strict=True)):
        magnitude = layer.entering.abs()
        massive = magnitude >= 10 * magnitude.mean(-1, keepdim=True)
        keys = functools.partial(key_by_weights, family, block.get_submodule(PARTS[family]["attention"]), index)
        whole, part = keys(layer.state), keys(layer.state * massive, bias=False)
        assert_close(layer.key, whole)
        at = this.found.findings.lock_positions[index]
        if family == "gemma3":  # the key norm makes the key not linear: take the rest, normalised anew
            _, share = lock_readings(layer, keys(layer.state * ~massive), at)
        else:
            _, kept = lock_readings(layer, whole - part, at)
            share = sum_over_queries(layer, part, at) / sum_over_queries(layer, whole, at)
            assert_close(kept, share)
        read = massive[:, at].any(-1).any(0)
        assert bool(read.any()) or index > 0
        assert_close(this.lock_share[index][:, read], share[:, read], 1e-3)
        assert this.lock_share[index][:, ~read].isnan().all()


def key_by_weights(family: str, attention, index: int, state: Tensor, *, bias: bool = True) -> Tensor:
    """[B, H, T, D] keys from the weight matrix, norm and rotation."""
    if family == "gpt2":
        width = state.shape[-1]
        weight, offset = attention.c_attn.weight.detach().double(), attention.c_attn.bias.detach().double()
        key = state @ weight[:, width : 2 * width] + (offset[width : 2 * width] if bias else 0)
        return key.view(B, T, 4, -1).transpose(1, 2)
    key = (state @ attention.k_proj.weight.detach().double().T).view(B, T, 2, -1).transpose(1, 2)
    theta = 10_000.0
    if family == "gemma3":
        norm = attention.k_norm
        scale = (key.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
        key = key * scale * (1 + norm.weight.detach().double())
        theta = 1_000_000.0 if index == 5 else 10_000.0  # every sixth layer sees the whole text
    return rotated(key, theta).repeat_interleave(2, dim=1)


def sum_over_queries(layer: PlainLayer, key: Tensor, at: Tensor) -> Tensor:
    """[H, Q] q . k summed over sequences and the queries after each position."""
    return torch.stack([product.sum((0, 2)) for product in products_with(layer, key, at)], dim=-1)


def products_with(layer: PlainLayer, key: Tensor, at: Tensor, *, first: int = 1) -> list[Tensor]:
    """[B, H, t] q . k for each position, of the queries that are at least `first` after it."""
    return [torch.einsum("bhtd,bhd->bht", layer.query[:, :, p + first :], key[:, :, p]) for p in at.tolist()]


def lock_readings(layer: PlainLayer, key_without: Tensor, at: Tensor, *, first: int = 1) -> tuple[Tensor, Tensor]:
    """([H, Q] share of later queries with q . k > 0, [H, Q] share of their q . k that is gone with the other keys)."""
    products = products_with(layer, layer.key, at, first=first)
    positive = torch.stack([(product > 0).double().mean((0, 2)) for product in products], dim=-1)
    share = 1 - sum_over_queries(layer, key_without, at) / sum_over_queries(layer, layer.key, at)
    return positive, share


def keys_again(this: SimpleNamespace, index: int, state: Tensor) -> Tensor:
    """[B, H, T, D] the keys that a layer makes of another state, every position in its place."""
    layer = this.plain.layers[index]
    if this.family == "falcon":
        attention = this.model.get_submodule(PARTS["falcon"]["blocks"])[index].self_attention
        return falcon_heads(attention, state)[1].repeat_interleave(2, dim=1)
    attention = this.model.get_submodule(PARTS[this.family]["blocks"])[index].get_submodule(
        PARTS[this.family]["attention"]
    )
    args, kwargs = layer.call
    again = PlainLayer()
    with eager(this.family, this.model, [again]), torch.no_grad():
        if args:
            attention(state.float(), *args[1:], **kwargs)
        else:
            attention(**{**kwargs, "hidden_states": state.float()})
    return again.key.repeat_interleave(layer.attention.shape[1] // again.key.shape[1], dim=1)


@pytest.mark.parametrize("family", CONFIGURATIONS)
def test_lock_of_many_sequences_is_that_of_the_first_eight(family):
    """Ten sequences in one pass, in chunks, and the first eight alone: at position 3 the same lock."""
    ids = torch.randint(3, 97, (10, T), generator=torch.Generator().manual_seed(3))
    model, ids = planted(family, ids)
    readings = []
    for found in (trace(model, ids), trace(model, ids, chunk_tokens=3 * T), trace(model, ids[:8])):
        at = found.findings.lock_positions[0].tolist()
        positive, share = found.findings.lock
        readings.append((positive[0, :, at.index(3)], share[0, :, at.index(3)]))
    for positive, share in readings[:2]:
        assert_close(positive, readings[2][0], 1e-6)
        assert_close(share, readings[2][1])


def test_the_lock_does_not_depend_on_what_happens_to_the_model_afterwards():
    model, ids = planted("llama", tokens(1))
    found = trace(model, ids)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.zero_()
    assert_close(found.findings.lock[1][0], planted_case("llama").lock_share[0])


def test_the_lock_of_a_model_in_training_mode():
    model, ids = planted("llama", tokens(1))
    model.config.attention_dropout = 0.5
    for block in model.model.layers:
        block.self_attn.attention_dropout = 0.5
    found = trace(model.train(), ids)
    assert_close(found.findings.lock[1], planted_case("llama").lock_share)


@pytest.mark.parametrize("family", CONFIGURATIONS)
def test_a_planted_massive_dimension_is_read(family):
    reading, plain = planted_case(family).recording, planted_case(family).plain
    assert int(reading["largest_residual_dimension"][0, 3]) in (7, 19)
    assert_close(reading["largest_residual"], plain.stacked(lambda x: x.leaving.abs().amax((0, 2))))
    assert_close(reading["kurtosis"], plain.stacked(lambda x: kurtosis_BT(x.leaving).mean(0)))
    assert 3 in reading.rows("positions_of_interest")[0, 0].tolist()
    assert 3 in planted_case(family).found.findings.lock_positions[0].tolist()


# The model is left alone


def snapshot(model) -> dict:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {
        "training": [module.training for module in model.modules()],
        "hooks": [[len(getattr(module, name)) for name in hooks] for module in model.modules()],
        "implementation": (model.config._attn_implementation, model.get_decoder().config._attn_implementation),
        "parameters": [(name, parameter.data_ptr()) for name, parameter in model.named_parameters()],
        "attributes": [sorted(module.__dict__) for module in model.modules()],
        "gradients": torch.is_grad_enabled(),
    }


def logits_of(model, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


@pytest.mark.parametrize("family", CONFIGURATIONS)
def test_the_model_is_as_it_was(family):
    model, ids = tiny_model(family), tokens()
    # A mixed state of modes, as a person may have left it; dropout is 0 in these configurations where it matters.
    list(model.modules())[3].train()
    before, state = logits_of(model, ids), snapshot(model)
    trace(model, ids)
    assert snapshot(model) == state
    assert torch.equal(logits_of(model, ids), before)
    assert not hook_module._hooks


class InterruptionError(Exception):
    pass


@pytest.mark.parametrize(
    ("family", "where"),
    [
        *((family, "after attention") for family in CONFIGURATIONS),
        # What is opened for Falcon and for experts differs from what all others share.
        *((family, where) for family in ("llama", "falcon", "mixtral") for where in ("block", "down", "attention")),
    ],
)
def test_the_model_is_as_it_was_after_an_exception(family, where):
    model, ids = tiny_model(family), tokens()
    before = logits_of(model, ids)
    block = model.get_submodule(PARTS[family]["blocks"])[1]
    module = {
        "block": block,
        "attention": block.get_submodule(PARTS[family]["attention"]),
        "after attention": block.get_submodule(PARTS[family]["attention"]),
        "down": block.get_submodule(PARTS[family]["output"]),
    }[where]

    def interrupt(*_):
        raise InterruptionError

    handle = (
        module.register_forward_hook(interrupt)
        if where == "after attention"
        else module.register_forward_pre_hook(interrupt)
    )
    state = snapshot(model)
    with pytest.raises(InterruptionError):
        trace(model, ids)
    assert snapshot(model) == state
    assert not hook_module._hooks
    handle.remove()
    assert torch.equal(logits_of(model, ids), before)
    assert trace(model, ids).recording["received"].isfinite().all()


@every_family
def test_hidden_states_while_tracing(variant):
    """What the model computes while it is read, within the attention path's own rounding."""
    family, model, ids = case(variant).family, case(variant).model, case(variant).ids
    last = model.get_submodule(PARTS[family]["blocks"])[-1]
    seen = []
    handle = last.register_forward_hook(lambda _, args, out: seen.append(out[0] if isinstance(out, tuple) else out))
    try:
        plain = logits_of(model, ids)
        trace(model, ids)
    finally:
        handle.remove()
    usual, traced = seen[0], seen[-1]  # between them the short passes of the receipt
    assert plain.shape[:2] == usual.shape[:2]
    assert float((traced - usual).norm() / usual.norm()) < TOLERANCE
    assert_close(traced, case(variant).plain.layers[-1].leaving)


# Controls


def mismatch(reading: Recording, plain: Plain) -> float:
    """The largest difference of attention received from the plain pass."""
    alpha = torch.stack([received_BHS(layer).mean(0) for layer in plain.layers])
    return float((reading["received"].double() - alpha).abs().max())


def assert_refused_and_wrong(this: SimpleNamespace, monkeypatch, least: float) -> None:
    """The receipt sees that another pass is read; without it the comparison of values does."""
    with pytest.raises(InputError, match="end in different states"):
        trace(copy.deepcopy(this.model), this.ids)
    monkeypatch.setattr(recorder_module, "check_reading", lambda *_: None)
    monkeypatch.setattr(trace_module, "take_receipt", lambda *_: None)
    assert mismatch(trace(this.model, this.ids, effective_rank=False).recording, this.plain) > least


@every_family
def test_control_without_the_causal_mask_the_trace_is_wrong(variant, monkeypatch):
    this = case(variant)
    assert mismatch(this.recording, this.plain) < 1e-4
    for name in ("_mask", "_clear_hidden"):
        monkeypatch.setattr(tiles_module, name, lambda *_: None)
    assert_refused_and_wrong(this, monkeypatch, 1e-2)


RULE_CONTROLS = {
    "soft-cap dropped": ("gemma2", {"softcap": None}),
    "windows dropped in gemma2": ("gemma2", {"window": None}),
    "windows dropped in gemma3": ("gemma3", {"window": None}),
    "windows dropped in mistral": ("mistral", {"window": None}),
    "windows dropped in qwen2": ("qwen2", {"window": None}),
    "windows dropped in phi3": ("phi3", {"window": None}),
    "windows dropped in olmo3": ("olmo3", {"window": None}),
    "windows dropped in gpt_oss": ("gpt_oss", {"window": None}),
    "sinks dropped": ("gpt_oss", {"sink_logits": None}),
}


@pytest.mark.parametrize("control", RULE_CONTROLS)
def test_control_with_a_part_of_the_rule_dropped_the_trace_is_wrong(control, monkeypatch):
    family, change = RULE_CONTROLS[control]
    this = case(family)
    rule = hook_module.AttentionRule
    monkeypatch.setattr(hook_module, "AttentionRule", lambda **options: replace(rule(**options), **change))
    assert_refused_and_wrong(this, monkeypatch, 1e-2)


def test_control_a_window_off_by_one_shows(monkeypatch):
    this = case("mistral")
    rule = hook_module.AttentionRule

    def longer(*, window, **options):
        return rule(window=None if window is None else window + 1, **options)

    monkeypatch.setattr(hook_module, "AttentionRule", longer)
    assert_refused_and_wrong(this, monkeypatch, 1e-3)


def with_anatomy(model, change):
    """The model with its own anatomy, layer 1 changed."""
    anatomy = anatomy_of(model)
    layers = list(anatomy.layers)
    layers[1] = change(layers[1])
    model.sinkscope_anatomy = replace(anatomy, layers=tuple(layers))
    return model


@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon", "mixtral"])
def test_control_a_silent_down_projection_is_named(family):
    """A row that points at a module which the forward pass never calls."""
    idle = torch.nn.Linear(3, 3)
    part = "experts" if family == "mixtral" else "down_projection"
    model = with_anatomy(tiny_model(family), lambda layer: replace(layer, **{part: idle}))
    with pytest.raises(RuntimeError, match=r"[Ll]ayer 1\b"):
        trace(model, tokens())


@pytest.mark.parametrize("part", ["attention", "output_projection", "block"])
@pytest.mark.parametrize("family", ["llama", "falcon"])
def test_control_a_silent_part_is_named(family, part):
    model = with_anatomy(tiny_model(family), lambda layer: replace(layer, **{part: torch.nn.Linear(3, 3)}))
    with pytest.raises(
        (RuntimeError, InputError), match=r"[Ll]ayers? \[?1\b|the order \[0, 2\]|end in different states"
    ):
        trace(model, tokens())


def test_control_a_family_row_with_a_wrong_path_is_an_error():
    model = tiny_model("llama")
    from sinkscope.models import anatomy as anatomy_module

    wrong = tuple(
        replace(family, down_projection="mlp.no_such_projection") if family.name == "llama" else family
        for family in anatomy_module.FAMILIES
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(anatomy_module, "FAMILIES", wrong)
        with pytest.raises(AttributeError, match="no_such_projection"):
            trace(model, tokens())


# Experts


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_neurons_of_experts_are_numbered_expert_by_expert(family):
    this = case(family)
    num_neurons = {"mixtral": 80, "qwen3_moe": 24, "gpt_oss": 80, "deepseek_v3": 24}[family]
    dense = {"qwen3_moe": [1], "deepseek_v3": [0]}.get(family, [])
    for index, (layer, plain) in enumerate(zip(anatomy_of(this.model).layers, this.plain.layers, strict=True)):
        top = this.recording["largest_write_neuron"][index].long()
        experts, neurons = layer.neuron_places(top)
        if index in dense:
            assert layer.locate_neuron(79) == (None, 79)
            assert bool((experts < SHARED_EXPERT).all())
            assert torch.equal(neurons, top)
            continue
        places = [layer.locate_neuron(number) for number in range(plain.neurons.shape[-1])]
        expected = [(expert, neuron) for expert in range(4) for neuron in range(num_neurons)]
        if family == "deepseek_v3":
            expected += [(SHARED_EXPERT, neuron) for neuron in range(24)]
        assert places == expected
        assert list(zip(experts.tolist(), neurons.tolist(), strict=True)) == [places[number] for number in top.tolist()]
        assert_close(layer.output_vectors(top[:9]), plain.output_EU[:, top[:9]], 1e-6)
        # The strongest neuron of a token is in an expert that the token was routed to, in the sequence it came from.
        write_BTU = plain.written.abs() * plain.output_EU.norm(dim=0)
        for t, (number, expert) in enumerate(zip(top.tolist(), experts.tolist(), strict=True)):
            b = int(write_BTU[:, t, number].argmax())
            assert expert == SHARED_EXPERT or bool(plain.routed[b, t, expert])
        # Control: not every token goes to every expert, so that a wrong expert would show.
        assert 0 < float(plain.routed.float().mean()) < 1


def test_a_shared_expert_is_among_the_strongest_somewhere():
    """Otherwise the numbering of its neurons would go unchecked."""
    this = case("deepseek_v3")
    layer = anatomy_of(this.model).layers[2]
    experts, _ = layer.neuron_places(this.recording["largest_write_neuron"][2].long())
    assert SHARED_EXPERT in experts.tolist()
    assert set(experts.tolist()) - {SHARED_EXPERT}


# Chunks, chosen keys, one sequence


def assert_same_recording(found: Recording, expected: Recording, tolerance=1e-5) -> None:
    assert found.by_layer.keys() == expected.by_layer.keys()
    for name, by_layer in expected.by_layer.items():
        for layer, values in by_layer.items() if name != "lock" else ():
            if values.is_floating_point():
                assert_close(found.by_layer[name][layer], values, tolerance, name)
            else:
                assert torch.equal(found.by_layer[name][layer], values), name


@pytest.mark.parametrize(
    ("family", "chunk_tokens"),
    [*((family, 3 * T + 5) for family in CONFIGURATIONS), *(("llama", tokens) for tokens in (1, T, 2 * T))],
)
def test_chunks_merge_exactly(family, chunk_tokens):
    this = case(family)
    passes = []
    found = trace(this.model, this.ids, chunk_tokens=chunk_tokens, progress=lambda *done: passes.append(done))
    assert passes[-1][0] == passes[-1][1] == 2 * -(-B // max(1, chunk_tokens // T))
    assert_same_recording(found.recording, this.recording)
    assert_close(found.findings.lock[0], this.positive_queries, 1e-6)
    assert_close(found.findings.lock[1], this.lock_share)


def test_chunks_with_a_massive_dimension_merge_exactly():
    this = planted_case("gemma3")
    found = trace(this.model, this.ids, chunk_tokens=T)
    assert_same_recording(found.recording, this.recording)
    assert_close(found.findings.lock[0], this.positive_queries, 1e-6)
    assert_close(found.findings.lock[1], this.lock_share)


def test_control_the_mean_of_chunks_is_not_their_merger():
    """Variance within chunks, averaged, misses what lies between them."""
    this = case("llama")
    parts = [trace(this.model, this.ids[part]).recording["value_variance"] for part in ([0, 1], [2, 3])]
    apart = torch.stack(parts).mean(0) / this.recording["value_variance"]
    assert float((apart - 1).abs().max()) > 0.1


@pytest.mark.parametrize(
    ("family", "chunk_tokens"), [*((family, 1 << 17) for family in CONFIGURATIONS), ("llama", T), ("falcon", T)]
)
def test_chosen_keys_equal_the_whole_reading(family, chunk_tokens):
    this = case(family)
    found = trace(this.model, this.ids, keys=[10, 0, 70], chunk_tokens=chunk_tokens).recording
    assert found.keys.tolist() == [0, 10, 70]
    for name in ("received", "head_sink_rate", "sink_heads"):
        assert_close(found[name], this.recording[name][..., found.keys], 1e-5, name)
    assert_close(found["by_distance"], this.recording["by_distance"], 1e-5)
    for name, values in found.by_position.items():
        assert_close(values, this.recording[name], 1e-5, name)
    # Rows of attention need every key.
    assert not {"entropy", "mixing", "averaging_law"} & found.by_position.keys()


def test_chosen_keys_give_tables_and_a_summary():
    this = case("llama")
    found = trace(this.model, this.ids, keys=[0, 10])
    assert {sink.position for sink in found.findings.sinks} <= {0, 10}
    assert found.findings.strongest[0] in (0, 10)
    assert found.tables.keys() >= {"sinks", "positions", "neurons", "dimensions", "heads"}
    assert found.summary["sink_rate"] == pytest.approx(found.findings.strongest[1])


@pytest.mark.parametrize("family", CONFIGURATIONS)
def test_one_sequence(family):
    this = case(family)
    found = trace(this.model, this.ids[:1])
    reading = found.recording
    assert not {"value_variance", "projected_variance", "cosine", "averaging_law"} & reading.by_position.keys()
    assert "value_variance_by_channel" not in reading
    assert found.findings.variance_ratio is None
    assert found.findings.averaging_law_r_squared is None
    for name in ("received", "head_sink_rate", "sink_heads", "by_distance"):
        assert reading[name].isfinite().all(), name
    for name, values in reading.by_position.items():
        assert values.isfinite().all(), name
    alpha = this.plain.stacked(lambda layer: received_BHS(layer)[0])
    assert_close(reading["received"], alpha)
    second = this.plain.stacked(lambda layer: (layer.aggregation[0] ** 2).mean(-1))
    assert_close(reading["second_moment"], second)
    assert found.summary["variance_ratio"] is None
    assert found.tables.keys() >= {"sinks", "positions", "neurons", "dimensions", "heads"}


def test_a_shared_first_token_has_no_variance_ratio():
    this = case("llama")
    ids = this.ids.clone()
    ids[:, 0] = 1
    found = trace(this.model, ids)
    assert found.findings.variance_ratio is None
    assert float(found.recording["value_variance"][0, 0]) == 0
    assert (found.recording["second_moment"][:, 0] > 0).all()
    assert found.recording.batch.bos
    # Control: with different first tokens it is there.
    assert case("llama").recording["value_variance"][0, 0] > 0


@pytest.mark.parametrize("chunk_tokens", [1, 1 << 17])
def test_a_long_text_is_sampled(chunk_tokens):
    """Effective rank from 1,024 evenly spaced tokens of one sequence, distances at 256 evenly spaced queries."""
    length = 1100
    model = tiny_model("llama", max_position_embeddings=2048, num_hidden_layers=2)
    ids = torch.randint(3, 97, (2, length), generator=torch.Generator().manual_seed(0))
    found = trace(model, ids, chunk_tokens=chunk_tokens)
    reading = found.recording
    model.set_attn_implementation("eager")
    with torch.no_grad():
        outputs = model(ids, use_cache=False, output_attentions=True, output_hidden_states=True)
    index, queries = (torch.linspace(0, length - 1, number).long() for number in (1024, 256))
    assert len(set(index.tolist())) == 1024
    assert_close(reading["rank_tokens"][0], outputs.hidden_states[1][0, index])
    assert reading.distances[-1] == 1024
    for layer, attention in enumerate(outputs.attentions):
        sampled = torch.stack([attention[:, :, t, t - 8] for t in queries.tolist() if t >= 8]).double().mean((0, 1))
        assert_close(reading["by_distance"][layer, :, reading.distances.index(8)], sampled)
    # Without the sink's tokens: only position 1,099 is dropped, and it is among the tokens taken.
    values = np.linalg.svd(outputs.hidden_states[1][0, index[:-1]].double().numpy(), compute_uv=False)
    weights = values / values.sum()
    assert_close(found.findings.effective_ranks_apart_from([1099])[1][0], np.exp(-(weights * np.log(weights)).sum()))


def test_two_traces_do_not_disturb_one_another():
    """A model that shares modules with another, traced after it: nothing is kept between calls."""
    this = case("llama")
    again = trace(copy.deepcopy(this.model), this.ids).recording
    assert torch.equal(again["received"], this.recording["received"])
    assert torch.equal(again["kurtosis"], this.recording["kurtosis"])


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "falcon"])
def test_float64_models_are_read_in_float64(family):
    """In double precision only what is kept in float32 on the way limits agreement."""
    model, ids = tiny_model(family, dtype=torch.float64), tokens()
    plain, reading = plain_pass(family, model, ids), trace(model, ids).recording
    # The softmax of eager attention is in float32 in most families.
    assert_close(reading["received"], plain.stacked(lambda layer: received_BHS(layer).mean(0)), 1e-5)
    assert_close(reading["value_variance"], plain.stacked(lambda layer: variance_T(layer.aggregation)), 1e-5)


@pytest.mark.parametrize("family", CONFIGURATIONS)
def test_bfloat16_models_are_read(family):
    """Against the same model in float32: 8 bits leave a few percent, and everything stays finite."""
    model, ids = tiny_model(family, dtype=torch.bfloat16, scale=4.0), tokens()
    reading = trace(model, ids).recording
    single = trace(tiny_model(family, scale=4.0), ids).recording
    assert reading["received"].dtype == torch.float32
    assert float((reading["received"] - single["received"]).abs().mean()) < 0.02
    for name, values in reading.by_position.items():
        assert values.isfinite().all(), name
        assert values.dtype in (torch.float32, torch.int64), name


def test_statistics_of_bfloat16_states_are_as_exact_as_float32():
    """What is rounded is the model's states, not what is made of them."""
    model, ids = tiny_model("llama", dtype=torch.bfloat16, scale=4.0), tokens()
    states, leaving = [], []
    handles = []
    for block in model.model.layers:
        handles.append(
            block.self_attn.register_forward_pre_hook(
                lambda _, args, kwargs: states.append(kwargs["hidden_states"].double()), with_kwargs=True
            )
        )
        handles.append(block.register_forward_hook(lambda _, args, out: leaving.append(out.double())))
    found = trace(model, ids).recording
    for handle in handles:
        handle.remove()
    last_pass = zip(states[-found.num_layers :], leaving[-found.num_layers :], strict=True)
    for layer, (state, hidden) in enumerate(last_pass):
        assert_close(found["dom_ratio_normed"][layer], (state.abs().amax(-1) / state.abs().mean(-1)).mean(0), 1e-5)
        assert_close(found["dom_ratio"][layer], (hidden.abs().amax(-1) / hidden.abs().mean(-1)).mean(0), 1e-5)
        assert_close(found["kurtosis"][layer], kurtosis_BT(hidden).mean(0), 1e-5)


def test_names_of_the_taps_are_those_the_controls_patch():
    """The controls above replace these names; were they renamed, the controls would prove nothing."""
    assert hook_module.AttentionRule is tiles_module.AttentionRule
    assert hooks_module.attention_hook is hook_module.attention_hook
