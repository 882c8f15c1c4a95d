"""Runs one batch under many interventions, and keeps a few numbers of each pass, by sequence.

A trace records everything once. A study runs the same batch under dozens of conditions and compares a few numbers,
which it needs by sequence for intervals. To save time, the baseline's pass keeps what enters some blocks, so that a
pass under an intervention begins at the last of them before the intervention acts. It may also keep what feed-forwards
write, so that they run from the first changed position on (FeedForwardCache).
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
from sinkscope.models.loaded import bare_model
from sinkscope.tracing.block_states import besides, entering, leaving
from sinkscope.tracing.feed_forward_cache import FeedForwardCache
from sinkscope.tracing.layer_call import LayerCall
from sinkscope.tracing.observables import HookPoint, Observable
from sinkscope.tracing.open_interventions import check_acted, suspend
from sinkscope.tracing.recorder import Recorder, in_each_layer
from sinkscope.tracing.reducers import Reducer, Rows, SelfJoining
from sinkscope.tracing.single_reader import evaluation_mode, in_this_thread

LOSS_TOKENS = 1024
"""Most tokens whose logits are held at once."""


@dataclass(frozen=True, kw_only=True)
class ConditionReading:
    """What one pass recorded, by layer and sequence, on the CPU."""

    sink_heads_LBS: Tensor
    """How many heads count each key as their sink."""
    later_heads_LBS: Tensor
    """The same by later queries alone, so that a token which is masked to itself does not count for itself."""
    received_LBS: Tensor
    """Attention received, mean over heads."""
    entropy_LBT: Tensor
    mixing_LBT: Tensor
    """sum_j a_tj^2, mean over heads."""
    aggregation_norm_LBT: Tensor
    residual_norm_LBT: Tensor
    dom_ratio_LBT: Tensor
    own_mixing_LBT: Tensor
    """The part of `mixing_LBT` of the query's own key: a_tt^2, mean over heads."""
    squares_LBS2T: Tensor
    """Two squares of the aggregation, mean over channels: its deviation from the batch's mean (whose mean is the
    variance across sequences), and itself (the energy). S: as it enters the output projection and, in models with a
    norm before that, as it enters the norm. L: only the first `moment_layers` layers."""
    dimensions_LBTM: Tensor
    """Values of the chosen dimensions in the residual stream."""
    dimensions: tuple[int, ...]
    activations: dict[Group, Tensor]
    """By (layer, expert): [B, T, n] activations of the recorded neurons, in the order of `recorded`."""
    recorded: dict[Group, tuple[int, ...]]
    """By (layer, expert): which neurons were recorded."""
    num_heads: int
    """Of all layers."""
    loss_B: Tensor | None = None
    """Mean next-token loss of each sequence; None unless requested."""

    @property
    def rate_BS(self) -> Tensor:
        """Share of layers and heads that count each key as their sink, by sequence."""
        return self._share(self.sink_heads_LBS)

    @property
    def later_rate_BS(self) -> Tensor:
        """The same by later queries alone."""
        return self._share(self.later_heads_LBS)

    def _share(self, heads_LBS: Tensor) -> Tensor:
        return heads_LBS.sum(0, dtype=torch.float64) / self.num_heads

    def group_values(self, group: Group, neurons: Sequence[int]) -> Tensor:
        """[B, T, n] activations of some of the recorded neurons of a group."""
        columns = [self.recorded[group].index(neuron) for neuron in neurons]
        return self.activations[group][..., columns]

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
"""Fields of ConditionReading that need nothing but a layer's call: their hook point, and their value."""


def _observables(
    anatomy: Anatomy,
    neurons: dict[Group, tuple[int, ...]],
    dimensions: tuple[int, ...],
    moment_layers: int | None,
) -> list[Observable]:
    """What a replay records: an observable for each field of ConditionReading, and what leaves the last layer."""
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
    """An observable of chosen neurons: by group [B, T, n]. T are the positions that the feed-forward runs at, which may
    be only the last ones."""

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


def _by_group(results: dict[str, dict[int, Any]]) -> dict[Group, Tensor]:
    """Takes the activations of all layers out of the results."""
    activations: dict[Group, Tensor] = {}
    for of_layer in results.pop("activations", {}).values():
        activations |= of_layer
    return activations


def _squares(call: LayerCall) -> Tensor:
    """[B, S, 2, T] of each side of the aggregation, squared deviation and energy: see `squares_LBS2T`."""
    return torch.stack([torch.stack([squared_deviation(side), side.square().mean(-1)], 1) for side in call.sides], 1)


@dataclass
class Replay:
    """Runs the baseline on one batch when it is made, and then one condition after another with `read`."""

    anatomy: Anatomy
    model: Any
    ids_BT: Tensor
    neurons: Collection[Neuron] = ()
    dimensions: tuple[int, ...] = ()
    restarts: Collection[int] = (0,)
    """Layers at which a pass may begin: the baseline keeps what enters them."""
    keep_writes: bool = False
    """Whether the baseline keeps what each feed-forward writes, for interventions that act from a later position on."""
    loss: bool = False
    """Whether the baseline's loss is computed."""
    moment_layers: int | None = None
    """In how many layers, from the first on, the squares of the aggregation are recorded; None for all."""
    baseline: ConditionReading = field(init=False)
    num_layer_passes: int = 0
    """How many blocks have run so far, which measures what a study costs."""

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
            self.baseline = self._read(None, loss=self.loss)

    def read(
        self,
        first_layer: int | None,
        first_position: int = 0,
        *,
        changed_neurons: Collection[int] = (),
        loss: bool = False,
    ) -> ConditionReading:
        """The reading under the interventions that are on.

        `first_layer`, `first_position`: where they begin to act; without any, None gives the baseline.
        `changed_neurons`: layers whose neurons they change. Their feed-forwards run at all positions, since such an
        intervention finds its positions by their index.
        """
        if first_layer is None:
            return self.baseline
        start = max(layer for layer in self.restarts if layer <= first_layer)
        with self._cache.used_before(first_position, but_in=changed_neurons):
            return self._read(start, loss=loss)

    def read_tokens(self, ids_BT: Tensor, **inputs: Tensor) -> ConditionReading:
        """The reading of other tokens than the baseline's, or of the same ones with other inputs of the decoder, such
        as position_ids."""
        return self._read(None, loss=False, ids_BT=ids_BT, **inputs)

    def _keep_call(self, layer: int):
        def hook(module, args, kwargs) -> None:
            self._calls[layer] = besides(args, kwargs)
            if layer in self.restarts:
                self._entering[layer] = entering(args, kwargs)

        return hook

    def _read(
        self, start: int | None, *, loss: bool, ids_BT: Tensor | None = None, **inputs: Tensor
    ) -> ConditionReading:
        recorder = Recorder(self.anatomy, _observables(self.anatomy, self._groups, self.dimensions, self.moment_layers))
        layers = self.anatomy.layers[start or 0 :]
        shape = (self.ids_BT.shape[0], self.ids_BT.shape[1])
        with torch.no_grad(), evaluation_mode(self.model), recorder.listening(shape, layers):
            if start is None:
                device, ids_BT = input_device(self.anatomy), self.ids_BT if ids_BT is None else ids_BT
                others = {name: values.to(device) for name, values in inputs.items()}
                self.anatomy.decoder(input_ids=ids_BT.to(device), use_cache=False, **others)
            else:
                hidden_BTE = self._entering[start]
                for layer in layers:
                    args, kwargs = self._calls[layer.index]
                    hidden_BTE = leaving(layer.block(hidden_BTE, *args, **kwargs))
        check_acted(self.anatomy.decoder)
        self.num_layer_passes += len(layers)
        results = recorder.results()
        (last_BTE,) = results.pop("last").values()
        activations = _by_group(results)
        stacked = {}
        for name, by_layer in results.items():
            recorded = {layer: rows for layer, rows in by_layer.items() if layer >= layers[0].index}
            rows = in_each_layer(self.anatomy, recorded, [layer.index for layer in layers])
            stacked[name] = torch.stack([row.cpu() for row in rows])
        loss_B = next_token_loss(self.anatomy, self.model, last_BTE, self.ids_BT) if loss else None
        if start is None:
            return ConditionReading(
                **stacked,
                dimensions=self.dimensions,
                activations=activations,
                recorded=self._groups,
                num_heads=self.anatomy.num_heads_of_all_layers,
                loss_B=loss_B,
            )
        # Layers and positions that did not run are as in the baseline.
        before = self.baseline
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
    """A reading of the baseline, whatever interventions are on."""
    owner = bare_model(model)
    with suspend():
        return Replay(anatomy or anatomy_of(owner), owner, ids_BT, neurons, dimensions).baseline


def read_neurons(
    anatomy: Anatomy, model: torch.nn.Module, ids_BT: Tensor, neurons: dict[Group, tuple[int, ...]]
) -> dict[Group, Tensor]:
    """By group [B, T, n], activations of some neurons in the baseline, whatever interventions are on."""
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
