"""Mixtures of experts without a row in the table: neurons are what a definition in float64 says, layout by layout.

Layouts differ in how tokens are routed, how the experts keep their weights, and where a shared expert, its gate or a
factor comes in. Each definition is written from the model's weights alone, beginning with the state that the
feed-forward reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from tiny_models import roughen
from torch import Tensor
from torch.nn.functional import one_hot, silu
from transformers import AutoConfig, AutoModelForCausalLM

from sinkscope.errors import InputError
from sinkscope.interventions.neurons import AblateNeurons, TransplantNeurons
from sinkscope.models.anatomy import SHARED_EXPERT, Neuron, anatomy_of
from sinkscope.tracing.layer_neurons import LayerNeurons
from sinkscope.tracing.trace import trace

BASE = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=24,
    moe_intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    pad_token_id=None,
    num_experts_per_tok=2,
    num_experts=4,
    num_local_experts=4,
)


class Neurons(NamedTuple):
    """All neurons of a layer: the experts in order, then the shared one."""

    activations: Tensor
    """[N, U] routing weight, gate and factor included."""
    vectors: Tensor
    """[U, E]"""


def routed(scores_NX: Tensor, chosen_Nk: Tensor) -> Tensor:
    """[N, X] the scores of the chosen experts; 0 for the others."""
    return scores_NX * one_hot(chosen_Nk, scores_NX.shape[1]).sum(1)


def of_experts(x: Tensor, weights_NX: Tensor, gate_up_X2FE: Tensor, down_XEF: Tensor, gated: Callable) -> Neurons:
    neurons_XNF = torch.stack([gated(x @ gate_up.T) for gate_up in gate_up_X2FE])
    activations = torch.cat([weights_NX[:, [expert]] * neurons for expert, neurons in enumerate(neurons_XNF)], dim=1)
    return Neurons(activations, torch.cat([down_EF.T for down_EF in down_XEF]))


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


def shared(x: Tensor, part: Any) -> Tensor:
    return silu(x @ part.gate_proj.weight.T) * (x @ part.up_proj.weight.T)


def joined(one: Neurons, activations: Tensor, down_EF: Tensor) -> Neurons:
    return Neurons(torch.cat([one.activations, activations], dim=1), torch.cat([one.vectors, down_EF.T]))


def qwen2_moe(x: Tensor, block: Any) -> Neurons:
    """Softmax over all experts, and the best of them as they are; the shared expert has a gate."""
    moe = block.mlp
    scores = (x @ moe.gate.weight.T).softmax(-1)
    experts = of_experts(
        x, routed(scores, scores.topk(2).indices), moe.experts.gate_up_proj, moe.experts.down_proj, swiglu
    )
    gate = (x @ moe.shared_expert_gate.weight.T).sigmoid()
    return joined(experts, gate * shared(x, moe.shared_expert), moe.shared_expert.down_proj.weight)


def granitemoeshared(x: Tensor, block: Any) -> Neurons:
    """Softmax over the best experts alone; the block adds the shared expert, and scales the sum of both."""
    moe, beside = block.block_sparse_moe, block.shared_mlp
    logits = x @ moe.router.weight.T
    chosen = logits.topk(2).indices
    left_out = one_hot(chosen, 4).sum(1) == 0
    weights = logits.masked_fill(left_out, -torch.inf).softmax(-1)
    experts = of_experts(x, weights, moe.experts.gate_up_proj, moe.experts.down_proj, swiglu)
    neurons = joined(experts, swiglu(x @ beside.input_linear.weight.T), beside.output_linear.weight)
    return neurons._replace(vectors=neurons.vectors * block.residual_multiplier)


def llama4_text(x: Tensor, block: Any) -> Neurons:
    """Each expert reads every token times the sigmoid of its score: the weight acts before the activation function."""
    moe = block.feed_forward
    logits = x @ moe.router.weight.T
    weights = routed(logits.sigmoid(), logits.topk(2).indices)
    neurons = [swiglu((weights[:, [expert]] * x) @ moe.experts.gate_up_proj[expert]) for expert in range(4)]
    experts = Neurons(torch.cat(neurons, dim=1), moe.experts.down_proj.flatten(0, 1))
    return joined(experts, shared(x, moe.shared_expert), moe.shared_expert.down_proj.weight)


def minimax_m3_vl_text(x: Tensor, block: Any) -> Neurons:
    """Sigmoid scores, chosen with a bias and weighed without; the experts' sum is multiplied before the shared one."""
    moe = block.mlp

    def clamped(gate_up: Tensor) -> Tensor:
        limit = moe.experts.swiglu_limit
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * gate * (gate * moe.experts.swiglu_alpha).sigmoid()

    scores = (x @ moe.gate.weight.T).sigmoid()
    weights = routed(scores, (scores + moe.gate.e_score_correction_bias).topk(2).indices)
    weights = moe.routed_scaling_factor * weights / weights.sum(-1, keepdim=True)
    experts = of_experts(x, weights, moe.experts.gate_up_proj, moe.experts.down_proj, clamped)
    beside = moe.shared_experts
    return joined(experts, clamped(x @ beside.gate_up_proj.weight.T), beside.down_proj.weight)


LAYOUTS: dict[str, tuple[Callable[[Tensor, Any], Neurons], dict[str, Any]]] = {
    "qwen2_moe": (qwen2_moe, dict(shared_expert_intermediate_size=40)),
    "granitemoeshared": (granitemoeshared, dict(shared_intermediate_size=40, residual_multiplier=0.4)),
    "llama4_text": (llama4_text, dict(intermediate_size_mlp=40)),
    "minimax_m3_vl_text": (
        minimax_m3_vl_text,
        dict(shared_intermediate_size=40, routed_scaling_factor=1.7, mlp_layer_types=["sparse"] * 2),
    ),
}


def model_of(layout: str):
    config = AutoConfig.for_model(layout, **BASE | LAYOUTS[layout][1])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        roughen(model, 6)
    return model


def ids() -> Tensor:
    return torch.randint(3, 97, (2, 16), generator=torch.Generator().manual_seed(0))


def defined(layout: str, model) -> Neurons:
    """The neurons of layer 1 by definition, of the state that its feed-forward reads in a plain pass."""
    block, kept = anatomy_of(model).layers[1].block, []
    norm = block.post_attention_layernorm
    handle = norm.register_forward_hook(lambda module, args, output: kept.append(output.double().flatten(0, 1)))
    with torch.no_grad():
        model(ids())
    handle.remove()
    of_layer, _ = LAYOUTS[layout]
    with torch.no_grad():
        return of_layer(kept[0], block.double())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_neurons_are_those_of_the_definition(layout):
    model = model_of(layout)
    recording = trace(model, ids()).recording
    layer = anatomy_of(model).layers[1]
    sizes = [weight.shape[1] for _, weight in layer.down_weights()]
    assert [expert for expert, _ in layer.down_weights()][-1] == SHARED_EXPERT
    vectors = layer.output_vectors(torch.arange(sum(sizes))).double()
    expected = defined(layout, model)
    torch.testing.assert_close(vectors.T, expected.vectors, rtol=1e-5, atol=1e-6)
    energy_U = expected.activations.square().sum(0)
    torch.testing.assert_close(recording["neuron_energy"][1].double(), energy_U, rtol=1e-3, atol=1e-6)
    write_NU = expected.activations.abs() * expected.vectors.norm(dim=1)
    largest_T = write_NU.max(1).values.view(ids().shape).amax(0)
    torch.testing.assert_close(recording["largest_write"][1].double(), largest_T, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("expert", [1, SHARED_EXPERT])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_changed_neuron_changes_what_is_written_by_its_activation(layout, expert):
    """Of a zeroed neuron all that it wrote goes; one that takes another position's value writes the difference."""
    model = model_of(layout)
    layer, neuron = anatomy_of(model).layers[1], Neuron(1, expert, 5)
    vector_E = layer.written_vectors(expert)[:, 5]
    states = {name: state_after_layer(model, change) for name, change in changes(model, neuron).items()}
    zeroed_TE = states["as it is"] - states["zeroed"]
    values_BT = neuron_values(model, layer, expert)
    torch.testing.assert_close(zeroed_TE, values_BT[..., None] * vector_E, rtol=1e-3, atol=2e-5)
    moved_BE = (states["transplanted"] - states["as it is"])[:, 7]
    difference_B = values_BT[:, 3] - values_BT[:, 7]
    torch.testing.assert_close(moved_BE, difference_B[:, None] * vector_E, rtol=1e-3, atol=2e-5)
    # What is read under an intervention is what it set.
    with changes(model, neuron)["transplanted"]:
        set_BT = neuron_values(model, layer, expert)
    torch.testing.assert_close(set_BT[:, 7], values_BT[:, 3], rtol=1e-4, atol=1e-6)


def changes(model, neuron: Neuron) -> dict[str, Any]:
    return {
        "as it is": None,
        "zeroed": AblateNeurons(model, [neuron], "zero", None),
        "transplanted": TransplantNeurons(model, [neuron], 3, 7),
    }


def state_after_layer(model, change) -> Tensor:
    kept = []

    def keep(module, args, output) -> None:
        kept.append(output[0] if isinstance(output, tuple) else output)

    handle = anatomy_of(model).layers[1].block.register_forward_hook(keep)
    with torch.no_grad():
        if change is None:
            model(ids())
        else:
            with change:
                model(ids())
    handle.remove()
    return kept[-1]


def neuron_values(model, layer, expert: int) -> Tensor:
    neurons = LayerNeurons(layer)
    handles = neurons.hooks()
    with torch.no_grad():
        model(ids())
    for handle in handles:
        handle.remove()
    return neurons.values(expert, torch.tensor([5])).view(ids().shape)


def test_experts_that_do_something_else_are_refused():
    """Experts that double what their neurons write, and a shared one that is squashed."""
    model = model_of("qwen2_moe")
    experts = model.get_decoder().layers[1].mlp.experts
    experts.register_forward_hook(lambda module, args, output: 2 * output)
    with pytest.raises(InputError, match="give is not what their neurons write, times the routing weights"):
        anatomy_of(model)
    model = model_of("qwen2_moe")
    model.get_decoder().layers[1].mlp.shared_expert.register_forward_hook(lambda module, args, output: output.tanh())
    with pytest.raises(InputError, match="something else than the sum of its experts"):
        anatomy_of(model)
