"""The feed-forward neurons of one layer as they enter the down projection, for dense layers and mixtures of experts.

The activations of a dense layer are kept by reference until the layer ends. Experts compute theirs inside one function,
where no hook sees them. So their input and routing are kept, and neurons are computed again when they are needed: for
a few tokens, or one expert after the other.
The activation of a routed neuron includes its routing weight, and that of a shared one the gate of the shared expert,
since that is what it writes.
Axes: N tokens (sequence by sequence), U neurons of the layer (experts in order, the shared one last), F neurons of one
expert, E width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sinkscope.kernels.token_statistics import weighted_largest
from sinkscope.models.anatomy import SHARED_EXPERT, Layer
from sinkscope.models.experts import Routing, expert_neurons, routing_of
from sinkscope.tracing.open_interventions import expert_changes
from sinkscope.tracing.single_reader import in_this_thread


class NeuronWrites(NamedTuple):
    """What the neurons of a layer write, reduced over neurons or over tokens."""

    largest: Tensor
    """[N] largest |n_j| ||W_down[:, j]|| of any neuron."""
    largest_at: Tensor
    """[N] the index of that neuron in the layer."""
    energy: Tensor
    """[U] sum over tokens of n_j^2, scaled by the post-norm where there is one."""


class LayerNeurons:
    """Collects one layer's neurons while its feed-forward runs. They are read when the layer ends, then dropped."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.clear()

    def clear(self) -> None:
        """Drops the layer's activations."""
        self.dense_NF: Tensor | None = None
        self.shared_NF: Tensor | None = None
        """Of the shared expert, before its gate."""
        self.shared_gate_N1: Tensor | None = None
        self.routed: Routing | None = None
        self.write_scale_N: Tensor | None = None
        """1 / rms, by which a post-norm multiplies each token's write, beside its gain."""

    def hooks(self) -> list:
        """Registers the hooks that fill this object, and returns their handles."""
        layer, handles = self.layer, []
        if layer.down_projection is not None:
            handles.append(layer.down_projection.register_forward_pre_hook(in_this_thread(self._keep_dense)))
        if layer.shared_down_projection is not None:
            handles.append(layer.shared_down_projection.register_forward_pre_hook(in_this_thread(self._keep_shared)))
        if layer.shared_gate is not None:
            handles.append(layer.shared_gate.register_forward_hook(in_this_thread(self._keep_shared_gate)))
        if layer.experts is not None:
            handles.append(layer.experts.register_forward_pre_hook(in_this_thread(self.keep_routed), with_kwargs=True))
        if layer.post_norm is not None:
            handles.append(layer.post_norm.register_forward_hook(in_this_thread(self._keep_write_scale)))
        return handles

    def _keep_dense(self, module, args) -> None:
        self.dense_NF = args[0].flatten(0, -2)

    def _keep_shared(self, module, args) -> None:
        self.shared_NF = args[0].flatten(0, -2)

    def _keep_shared_gate(self, module, args, output) -> None:
        self.shared_gate_N1 = output.flatten(0, -2).sigmoid()

    def keep_routed(self, module, args, kwargs) -> None:
        """Keeps what experts are called with."""
        self.routed = routing_of(module, args, kwargs)

    def _keep_write_scale(self, module, args, output) -> None:
        # The norm returns gain * x / rms(x). Projecting its output on gain * x gives 1 / rms(x) without knowing its
        # epsilon. If the feed-forward's output x is zero there is nothing to scale.
        scaled = args[0].float() * self.layer.post_norm_gain()
        energy = scaled.square().sum(-1)
        self.write_scale_N = ((output.float() * scaled).sum(-1) / energy).masked_fill(energy == 0, 0).flatten()

    @property
    def complete(self) -> bool:
        """Whether the feed-forward has run."""
        return (self.dense_NF is not None) or (self.routed is not None)

    def writes(self) -> NeuronWrites:
        """The largest write of each token, and the energy of each neuron over all tokens."""
        norms = [self._output_norms(weight) for _, weight in self.layer.down_weights()]
        if self.dense_NF is not None:
            return NeuronWrites(*weighted_largest(self._written(self.dense_NF), norms[0]))
        assert self.routed is not None
        states, num_tokens = self.routed.states, self.routed.num_tokens
        dtype = torch.promote_types(states.dtype, torch.float32)
        largest = torch.zeros(num_tokens, dtype=dtype, device=states.device)
        largest_at = torch.zeros(num_tokens, dtype=torch.long, device=states.device)
        energies, first_neuron = [], 0
        for (expert, weight), norm in zip(self.layer.down_weights(), norms, strict=True):
            if expert == SHARED_EXPERT:
                tokens, neurons = torch.arange(len(largest), device=largest.device), self._gated_shared()
            else:
                tokens = self._uses(expert).nonzero().squeeze(-1)
                neurons = self._expert_neurons(expert, tokens)
            assert neurons is not None
            of_expert = weighted_largest(self._written(neurons, tokens), norm)
            larger = of_expert.largest > largest[tokens]
            largest[tokens] = torch.where(larger, of_expert.largest, largest[tokens])
            largest_at[tokens] = torch.where(larger, of_expert.largest_at + first_neuron, largest_at[tokens])
            energies.append(of_expert.channel_energy)
            first_neuron += weight.shape[1]
        return NeuronWrites(largest, largest_at, torch.cat(energies))

    def at(self, tokens_n: Tensor) -> Tensor:
        """[n, U] activations of all neurons at some tokens."""
        if self.dense_NF is not None:
            return self.dense_NF.index_select(0, tokens_n)
        assert self.routed is not None
        groups = []
        for expert, weight in self.layer.down_weights():
            if expert == SHARED_EXPERT:
                groups.append(self._gated_shared()[tokens_n].float())
                continue
            group = torch.zeros(len(tokens_n), weight.shape[1], device=weight.device)
            hit = self._uses(expert)[tokens_n].nonzero().squeeze(-1)
            group[hit] = self._expert_neurons(expert, tokens_n[hit]).float()
            groups.append(group)
        return torch.cat(groups, dim=-1)

    def _written(self, neurons_NF: Tensor, tokens: Tensor | slice = slice(None)) -> Tensor:
        """The activations scaled by the post-norm, where there is one."""
        if self.write_scale_N is None:
            return neurons_NF
        return neurons_NF * self.write_scale_N[tokens, None].to(neurons_NF.dtype)

    def output_norms(self) -> Tensor:
        """[U] norm of every neuron's output vector, times the gain of a post-norm where there is one."""
        return torch.cat([self._output_norms(weight) for _, weight in self.layer.down_weights()])

    def _output_norms(self, weight_EF: Tensor) -> Tensor:
        """[F] the same for one group of neurons, in float32."""
        if self.layer.has_write_gain:
            weight_EF = weight_EF * self.layer.write_gain().to(weight_EF)[:, None]
        # On a CPU this is several times faster than torch.linalg.vector_norm along the first axis.
        return weight_EF.square().sum(0, dtype=torch.promote_types(weight_EF.dtype, torch.float32)).sqrt()

    def values(self, expert: int | None, neurons: Tensor) -> Tensor:
        """[N, n] float32 activations of some neurons of one group at every token."""
        if expert is None:
            assert self.dense_NF is not None
            return self.dense_NF[:, neurons].float()
        if expert == SHARED_EXPERT:
            return self._gated_shared()[:, neurons].float()
        assert self.routed is not None
        values = torch.zeros(self.routed.num_tokens, len(neurons), device=self.routed.states.device)
        hit = self._uses(expert).nonzero().squeeze(-1)
        values[hit] = self._expert_neurons(expert, hit)[:, neurons].float()
        return values

    def _gated_shared(self) -> Tensor:
        """[N, F] activations of the shared expert's neurons, times its gate where it has one."""
        assert self.shared_NF is not None
        return self.shared_NF if self.shared_gate_N1 is None else self.shared_NF * self.shared_gate_N1

    def _uses(self, expert: int | None) -> Tensor:
        """[N] whether an expert's neurons may be other than 0 at a token: at those routed to it, or at all tokens if an
        intervention changes the expert."""
        assert self.routed is not None
        assert expert is not None
        is_changed = any(change.expert == expert for change in expert_changes(self.layer.experts))
        routed_N = self.routed.is_routed_to(expert)
        return torch.ones_like(routed_N) if is_changed else routed_N

    def _expert_neurons(self, expert: int | None, tokens_n: Tensor) -> Tensor:
        """[n, F] activations of one expert's neurons, with the changes of interventions."""
        assert self.routed is not None
        changes = [change for change in expert_changes(self.layer.experts) if change.expert == expert]
        if not changes:
            return self._routed_neurons(expert, tokens_n)
        # An intervention may look at all tokens, such as the one whose values it transplants.
        neurons_NF = self._routed_neurons(expert, torch.arange(self.routed.num_tokens, device=tokens_n.device))
        for change in changes:
            chosen = torch.tensor(change.neurons, device=tokens_n.device)
            neurons_NF[:, chosen] = change.new_values(neurons_NF[:, chosen])
        return neurons_NF[tokens_n]

    def _routed_neurons(self, expert: int | None, tokens_n: Tensor) -> Tensor:
        """[n, F] activations of one expert's neurons times its routing weight: 0 at tokens not routed to it."""
        assert self.routed is not None
        assert expert is not None
        neurons_nF = expert_neurons(self.layer.experts, expert, self.routed.states_of(expert, tokens_n))
        routing_n1 = self.routed.weights_of(expert, tokens_n) * self.layer.expert_scale
        return neurons_nF * routing_n1.to(neurons_nF.dtype)
