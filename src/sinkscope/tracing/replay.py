"""The few numbers by sequence that a study compares between conditions.

A trace records everything once. A study runs the same batch under dozens of interventions and needs numbers by
sequence, for intervals. The untouched pass keeps what enters each block, so that a pass under an intervention begins
at the first layer that the intervention can touch, and what feed-forwards write (`FeedForwardCache`).
Axes: L layers, B sequences, T positions, S keys, H heads, E width, M chosen dimensions, n neurons of one group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sinkscope.measures.dimension_disparity import dom_ratio
from sinkscope.measures.value_variance import squared_deviation
from sinkscope.models.anatomy import Anatomy, Group, Neuron, anatomy_of, checked_neurons, input_device
from sinkscope.models.loading import bare_model
from sinkscope.tracing.feed_forward_cache import FeedForwardCache
from sinkscope.tracing.hooks import besides, entering, leaving
from sinkscope.tracing.layer_call import LayerCall
from sinkscope.tracing.observables import HookPoint, Observable
from sinkscope.tracing.open_interventions import check_acted, suspend
from sinkscope.tracing.recorder import Recorder
from sinkscope.tracing.reducers import Reducer, Rows, SelfJoining
from sinkscope.tracing.single_reader import evaluation_mode, in_this_thread

LOSS_TOKENS = 1024
"""Tokens whose logits are held at once."""


@dataclass(frozen=True, kw_only=True)
class ConditionReading:
    """What one pass gave, by layer and sequence, on the CPU."""

    sink_heads_LBS: Tensor
    """How many heads count each key as their sink."""
    later_heads_LBS: Tensor
    """The same by later queries alone: a token that is masked to itself does not count for itself."""
    received_LBS: Tensor
    """alpha, mean over heads."""
    entropy_LBT: Tensor
    mixing_LBT: Tensor
    """sum_j a_tj^2, mean over heads."""
    aggregation_norm_LBT: Tensor
    residual_norm_LBT: Tensor
    dom_ratio_LBT: Tensor
    own_mixing_LBT: Tensor
    """The part of it that a position's own key has: a_tt^2, mean over heads."""
    squares_LBS2T: Tensor
    """Of the aggregation: squared deviation from the batch's mean, whose mean is the batch variance; and energy. As it
    enters the output projection and, where a norm comes before that, as it enters the norm. L are the first layers, as
    many as were asked for."""
    dimensions_LBTM: Tensor
    dimensions: tuple[int, ...]
    activations: dict[Group, Tensor]
    """By (layer, expert): [B, T, n] activations of the recorded neurons, in the order of `recorded`."""
    recorded: dict[Group, tuple[int, ...]]
    """By (layer, expert): which neurons were recorded."""
    num_heads: int
    loss_B: Tensor | None = None
    """Mean next-token loss of each sequence, where it was asked for."""

    @property
    def rate_BS(self) -> Tensor:
        """Share of layers and heads that count each key as their sink, by sequence."""
        return self._share(self.sink_heads_LBS)

    @property
    def later_rate_BS(self) -> Tensor:
        """The same by later queries alone."""
        return self._share(self.later_heads_LBS)

    def _share(self, heads_LBS: Tensor) -> Tensor:
        return heads_LBS.sum(0, dtype=torch.float64) / (heads_LBS.shape[0] * self.num_heads)

    def group_values(self, group: Group, neurons: Sequence[int]) -> Tensor:
        """[B, T, n] activations of some of the recorded neurons."""
        places = [self.recorded[group].index(neuron) for neuron in neurons]
        return self.activations[group][..., places]

    def neuron_values(self, neuron: Neuron) -> Tensor:
        """[B, T] activation of one neuron."""
        return self.group_values((neuron.layer, neuron.expert), [neuron.neuron])[..., 0]

    def dimension_values(self, dimensions: Sequence[int]) -> Tensor:
        """[L, B, T, M] values of some of the recorded dimensions."""
        return self.dimensions_LBTM[..., [self.dimensions.index(dimension) for dimension in dimensions]]


BY_SEQUENCE = {
    "sink_heads_LBS": (HookPoint.ATTENTION, lambda call: call.is_sink.sum(1)),
    "received_LBS": (HookPoint.ATTENTION, lambda call: call.alpha.mean(1)),
    "entropy_LBT": (HookPoint.ATTENTION, lambda call: call.attention.entropy.mean(1)),
    "mixing_LBT": (HookPoint.ATTENTION, lambda call: call.attention.mixing.mean(1)),
    "aggregation_norm_LBT": (HookPoint.AGGREGATION, lambda call: call.aggregation.float().norm(dim=-1)),
    "residual_norm_LBT": (HookPoint.RESIDUAL_OUT, lambda call: call.residual.float().norm(dim=-1)),
    "dom_ratio_LBT": (HookPoint.RESIDUAL_OUT, lambda call: dom_ratio(call.residual.float())),
}
"""Where each is recorded, and what a layer's call leaves of it."""


def _observables(
    anatomy: Anatomy,
    neurons: dict[Group, tuple[int, ...]],
    dimensions: tuple[int, ...],
    moment_layers: int | None,
) -> list[Observable]:
    layers = range(len(anatomy.layers))

    def by_sequence(
        name: str, hook_point: HookPoint, value, reducer: Reducer, layers: Collection[int] = layers, **others: Any
    ) -> Observable:
        return Observable(name=name, hook_point=hook_point, value=value, reducer=reducer, layers=layers, **others)

    return [
        *(by_sequence(name, hook_point, value, Rows()) for name, (hook_point, value) in BY_SEQUENCE.items()),
        by_sequence(
            "dimensions_LBTM", HookPoint.RESIDUAL_OUT, lambda call: call.residual.float()[..., list(dimensions)], Rows()
        ),
        by_sequence(
            "later_heads_LBS", HookPoint.ATTENTION, lambda call: call.is_sink_later.sum(1), Rows(), asks="own weights"
        ),
        by_sequence(
            "own_mixing_LBT",
            HookPoint.ATTENTION,
            lambda call: call.attention.own.square().mean(1),
            Rows(),
            asks="own weights",
        ),
        by_sequence("squares_LBS2T", HookPoint.AGGREGATION, _squares, Rows(), layers[:moment_layers]),
        _activations(neurons),
        by_sequence("last", HookPoint.RESIDUAL_OUT, lambda call: call.residual, SelfJoining(), layers[-1:]),
    ]


def _activations(neurons: dict[Group, tuple[int, ...]]) -> Observable:
    """By group [B, T, n], of the positions that the feed-forward runs at."""

    def chosen_activations(call: LayerCall) -> dict[Group, Tensor]:
        values = {
            group: call.neurons.values(group[1], torch.tensor(indices, device=call.residual.device))
            for group, indices in neurons.items()
            if group[0] == call.index
        }
        return {group: x.view(call.passing.shape[0], -1, x.shape[-1]).cpu() for group, x in values.items()}

    layers = {layer for layer, _ in neurons}
    return Observable(
        name="activations", hook_point=HookPoint.NEURONS, value=chosen_activations, reducer=SelfJoining(), layers=layers
    )


def _by_group(found: dict[str, dict[int, Any]]) -> dict[Group, Tensor]:
    """The activations of all layers."""
    return {group: x for in_layer in found.pop("activations", {}).values() for group, x in in_layer.items()}


def _squares(call: LayerCall) -> Tensor:
    """[B, S, 2, T]."""
    return torch.stack([torch.stack([squared_deviation(side), side.square().mean(-1)], 1) for side in call.sides], 1)


@dataclass
class Replay:
    """Runs one batch untouched, and then under one condition after another from the first layer that differs."""

    anatomy: Anatomy
    model: Any
    ids_BT: Tensor
    neurons: Collection[Neuron] = ()
    dimensions: tuple[int, ...] = ()
    restarts: Collection[int] = (0,)
    """Layers that a pass may begin at: what enters them is kept."""
    keep_writes: bool = False
    """Whether what each feed-forward writes is kept, for passes that begin at a later position."""
    loss: bool = False
    moment_layers: int | None = None
    """How many layers, from the first one on, the moments of the aggregation are read in; None means all."""
    untouched: ConditionReading = field(init=False)
    num_layer_passes: int = 0
    """Blocks run so far, a measure of what a study costs."""

    def __post_init__(self) -> None:
        self._groups = checked_neurons(self.anatomy, self.neurons)
        self._calls: dict[int, tuple[tuple, dict]] = {}
        self._entering: dict[int, Tensor] = {}
        self._cache = FeedForwardCache(self.anatomy.layers if self.keep_writes else ())
        self.restarts = {0, *self.restarts}
        with contextlib.ExitStack() as stack:
            for layer in self.anatomy.layers:
                keep = in_this_thread(self._keep_call(layer.index))
                hook = layer.block.register_forward_pre_hook(keep, with_kwargs=True)
                stack.callback(hook.remove)
            stack.enter_context(self._cache.filling())
            self.untouched = self._read(None, loss=self.loss)

    def read(
        self,
        first_layer: int | None,
        first_position: int = 0,
        *,
        changed_neurons: Collection[int] = (),
        loss: bool = False,
    ) -> ConditionReading:
        """The reading under the active interventions, which act from `first_layer` and `first_position` on; None if
        there are none. `changed_neurons`: layers whose neurons they change, by their positions among all."""
        if first_layer is None:
            return self.untouched
        start = max(layer for layer in self.restarts if layer <= first_layer)
        with self._cache.used_before(first_position, but_in=changed_neurons):
            return self._read(start, loss=loss)

    def _keep_call(self, layer: int):
        def hook(module, args, kwargs) -> None:
            self._calls[layer] = besides(args, kwargs)
            if layer in self.restarts:
                self._entering[layer] = entering(args, kwargs)

        return hook

    def _read(self, start: int | None, *, loss: bool) -> ConditionReading:
        recorder = Recorder(self.anatomy, _observables(self.anatomy, self._groups, self.dimensions, self.moment_layers))
        layers = self.anatomy.layers[start or 0 :]
        shape = (self.ids_BT.shape[0], self.ids_BT.shape[1])
        with torch.no_grad(), evaluation_mode(self.model), recorder.listening(shape, layers):
            if start is None:
                self.anatomy.decoder(input_ids=self.ids_BT.to(input_device(self.anatomy)), use_cache=False)
            else:
                hidden_BTE = self._entering[start]
                for layer in layers:
                    args, kwargs = self._calls[layer.index]
                    hidden_BTE = leaving(layer.block(hidden_BTE, *args, **kwargs))
        check_acted(self.anatomy.decoder)
        self.num_layer_passes += len(layers)
        found = recorder.results()
        (last_BTE,) = found.pop("last").values()
        activations = _by_group(found)
        stacked = {name: torch.stack([row.cpu() for row in rows.values()]) for name, rows in found.items()}
        loss_B = next_token_loss(self.anatomy, self.model, last_BTE, self.ids_BT) if loss else None
        if start is None:
            return ConditionReading(
                **stacked,
                dimensions=self.dimensions,
                activations=activations,
                recorded=self._groups,
                num_heads=self.anatomy.num_heads,
                loss_B=loss_B,
            )
        before = self.untouched
        stacked = {name: torch.cat([getattr(before, name)[:start], rows]) for name, rows in stacked.items()}
        for group, x_BTn in activations.items():
            activations[group] = torch.cat([before.activations[group][:, : shape[1] - x_BTn.shape[1]], x_BTn], 1)
        return replace(before, **stacked, activations=before.activations | activations, loss_B=loss_B)


def read_condition(
    anatomy: Anatomy | None,
    model: Any,
    ids_BT: Tensor,
    *,
    neurons: Collection[Neuron] = (),
    dimensions: tuple[int, ...] = (),
) -> ConditionReading:
    """An untouched reading of a batch, whatever interventions are on."""
    owner = bare_model(model)
    with suspend():
        return Replay(anatomy or anatomy_of(owner), owner, ids_BT, neurons, dimensions).untouched


def read_neurons(
    anatomy: Anatomy, model: torch.nn.Module, ids_BT: Tensor, neurons: dict[Group, tuple[int, ...]]
) -> dict[Group, Tensor]:
    """By group [B, T, n], what some neurons are in an untouched pass, whatever interventions are on."""
    if not neurons:
        return {}
    with suspend():
        return _by_group(Recorder(anatomy, [_activations(neurons)]).read(model, ids_BT))


@torch.no_grad()
def next_token_loss(anatomy: Anatomy, model: Any, hidden_BTE: Tensor, ids_BT: Tensor) -> Tensor:
    """[B] mean loss of each sequence, from what leaves the last block."""
    head, softcap = model.get_output_embeddings(), getattr(model.config, "final_logit_softcapping", None)
    norm, project = (
        anatomy.decoder.get_submodule(anatomy.family.final_norm),
        getattr(anatomy.decoder, "project_out", None),
    )
    num_sequences, length = ids_BT.shape
    losses = []
    for rows in range(0, num_sequences, max(1, LOSS_TOKENS // length)):
        chunk = slice(rows, rows + max(1, LOSS_TOKENS // length))
        state = norm(hidden_BTE[chunk, :-1])
        logits = head(state if project is None else project(state)).float()
        if softcap is not None:
            logits = (logits / softcap).tanh() * softcap
        targets = ids_BT[chunk, 1:].to(logits.device)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        losses.append(loss.view_as(targets).mean(1).cpu())
    return torch.cat(losses)
