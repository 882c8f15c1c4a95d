"""The experts of a mixture: their weights, the tokens that are routed to each, and their neurons before routing.

Transformers keeps the experts of a layer as 3-D parameters of one module, with the expert first. Most are called with
states, the chosen experts of each token and their routing weights. Those of Llama 4 are called with one input for each
expert, every token times its routing weight, which is 0 where the token is not routed to the expert.
Axes: X experts, N tokens, k chosen experts of a token, E width, F neurons of one expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.models.weights import held


@dataclass(frozen=True, eq=False)
class Routing:
    """What a layer's experts were called with."""

    states: Tensor
    """[N, E], or [X, N, E] where each expert gets an input of its own."""
    chosen_Nk: Tensor | None = None
    """The experts of each token; None where each expert gets an input of its own."""
    weights_Nk: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.states.shape[-2]

    def is_routed_to(self, expert: int) -> Tensor:
        """[N] which tokens are routed to an expert."""
        if self.chosen_Nk is None:
            return self.states[expert].any(-1)
        return (self.chosen_Nk == expert).any(-1)

    def states_of(self, expert: int, tokens_n: Tensor) -> Tensor:
        """[n, E] what an expert reads at some tokens."""
        states_NE = self.states[expert] if self.chosen_Nk is None else self.states
        return states_NE[tokens_n]

    def weights_of(self, expert: int, tokens_n: Tensor) -> Tensor:
        """[n, 1] what an expert's neurons are multiplied by at some tokens: 0 at those not routed to it."""
        if self.chosen_Nk is None or self.weights_Nk is None:
            return torch.ones(len(tokens_n), 1, device=tokens_n.device)
        return (self.weights_Nk[tokens_n] * (self.chosen_Nk[tokens_n] == expert)).sum(-1, keepdim=True)


def routing_of(experts: Any, args: tuple, kwargs: dict[str, Any]) -> Routing:
    """The routing that a call of experts was made with, by position or by name."""
    values = [*args, *kwargs.values()]
    states = values[0]
    if len(values) == 1:
        return Routing(states.reshape(len(experts.down_proj), -1, states.shape[-1]))
    return Routing(states.reshape(-1, states.shape[-1]), *values[1:3])


def added_to(output: Tensor, routing: Routing, expert: int, added_NE: Tensor) -> Tensor:
    """What experts gave, with something added to what one of them gave."""
    if routing.chosen_Nk is not None:
        return output + added_NE.view_as(output).to(output.dtype)
    outputs_XNE = output.view_as(routing.states).clone()
    outputs_XNE[expert] += added_NE.to(output.dtype)
    return outputs_XNE.view_as(output)


def is_experts(module: nn.Module) -> bool:
    """Whether a module keeps the experts of a layer as 3-D parameters whose neurons can be computed."""
    has_gate = getattr(module, "has_gate", True)
    weights = (getattr(module, name, None) for name in ("gate_up_proj" if has_gate else "up_proj", "down_proj"))
    has_activation = hasattr(module, "act_fn") or hasattr(module, "_apply_gate")
    return has_activation and all(isinstance(weight, Tensor) and weight.ndim == 3 for weight in weights)


def expert_outputs(experts: Any) -> Tensor:
    """[X, E, F] output vectors of the neurons of every expert."""
    weight = held(experts, "down_proj")
    return weight.transpose(1, 2) if is_transposed(experts) else weight


def is_transposed(experts: Any) -> bool:
    """Whether weights are kept as [X, in, out]. A module that does not say so shows it: out is twice F, or in is."""
    if hasattr(experts, "is_transposed"):
        return experts.is_transposed
    return experts.gate_up_proj.shape[2] == 2 * experts.down_proj.shape[1]


def expert_neurons(experts: Any, expert: int, states_nE: Tensor) -> Tensor:
    """[n, F] neurons of one expert for some states, before they are multiplied by routing weights."""
    has_gate = getattr(experts, "has_gate", True)
    name = "gate_up_proj" if has_gate else "up_proj"
    weight = held(experts, name)[expert]
    entering = states_nE @ (weight if is_transposed(experts) else weight.T)
    if getattr(experts, "has_bias", False):
        entering = entering + held(experts, f"{name}_bias")[expert]
    if not has_gate:
        return experts.act_fn(entering)
    if hasattr(experts, "_apply_gate"):
        return experts._apply_gate(entering)
    gate, up = entering.chunk(2, dim=-1)
    return experts.act_fn(gate) * up


def given_by_experts(output: Tensor, routing: Routing) -> Tensor:
    """[N, E] what a call of experts gave, all of them together."""
    if routing.chosen_Nk is None:
        return output.view_as(routing.states).sum(0)
    return output.reshape(-1, output.shape[-1])


def written_by_experts(experts: Any, routing: Routing) -> Tensor:
    """[N, E] float32: what the neurons of all experts write: routing weight times neurons times output vectors, and
    biases."""
    outputs = expert_outputs(experts)
    written_NE = torch.zeros(routing.num_tokens, outputs.shape[1], device=outputs.device)
    for expert, output_EF in enumerate(outputs):
        tokens_n = routing.is_routed_to(expert).nonzero().squeeze(-1)
        neurons_nF = expert_neurons(experts, expert, routing.states_of(expert, tokens_n))
        of_expert_nE = (neurons_nF @ output_EF.T).float()
        if getattr(experts, "has_bias", False):
            of_expert_nE += held(experts, "down_proj_bias")[expert]
        written_NE[tokens_n] += routing.weights_of(expert, tokens_n) * of_expert_nE
    return written_NE
