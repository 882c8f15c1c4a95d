"""Random sets as controls of what a study acts on: as many neurons, or dimensions, that do as much at the sink.

A control must be able to fail. Neurons are alike in what they write at the sink, |activation| times the norm of the
output vector; dimensions in their magnitude there; both as means over the choosing sequences. Where a model has nothing
that comes near, the control is empty: a claim says so, shows no number for it, and does not count it as support.
Axes: B sequences, T positions, U neurons of a layer, F neurons of one group, E width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from sinkscope.interventions.neurons import matched_neurons, nearest
from sinkscope.interventions.plan import Plan, most_super_neurons
from sinkscope.models.anatomy import Anatomy, Group, Neuron
from sinkscope.studies.conditions import MAX_NEURONS, NUM_RANDOM_SETS
from sinkscope.tracing.layer_call import LayerCall, wide
from sinkscope.tracing.observables import HookPoint, Observable
from sinkscope.tracing.recorder import Recorder
from sinkscope.tracing.reducers import Mean


@dataclass(frozen=True, kw_only=True)
class Activity:
    """What each neuron and each dimension does at the sink, mean over sequences."""

    writes: dict[Group, Tensor]
    """By layer and expert [F]: |activation| times the norm of the output vector."""
    magnitude_E: Tensor
    """|h|, mean over the layers with disparity."""
    directions: dict[int, Tensor]
    """By layer [E]: the direction that the states which enter attention share most, of length 1."""
    written: dict[int, Tensor]
    """By layer [E]: that of the residual which leaves it."""

    def of(self, neurons: Sequence[Neuron]) -> float:
        """What neurons write together."""
        return sum(float(self.writes[neuron.layer, neuron.expert][neuron.neuron]) for neuron in neurons)


@dataclass(frozen=True, kw_only=True)
class Controls:
    """The random sets of one study."""

    neurons: tuple[Neuron, ...]
    """As many as super neurons."""
    neurons_level: float
    """What they write at the sink, over what the super neurons do."""
    dimensions: tuple[int, ...]
    """As many as massive ones."""
    dimensions_level: float
    """Their magnitude at the sink over that of the massive ones."""
    sets: tuple[tuple[Neuron, ...], ...]
    """Each of as many neurons as the minimal set or the writers; none where there are neither."""
    set_levels: tuple[float, ...]
    """What each writes over what those do."""

    @property
    def sets_level(self) -> float:
        """The mean over sets."""
        return sum(self.set_levels) / max(1, len(self.set_levels))


def draw_controls(activity: Activity, anatomy: Anatomy, plan: Plan, removed: Sequence[Neuron]) -> Controls:
    """The random sets that the activity at the sink leads to; `removed` are the minimal set or the writers."""
    excluded = (*plan.candidates, *plan.writers, *removed, *plan.super_neurons)

    def matched(neurons: Sequence[Neuron], seed: int) -> tuple[Neuron, ...]:
        return tuple(matched_neurons(anatomy, neurons, excluded, seed=seed, sizes=activity.writes))

    neurons = matched(plan.super_neurons, 0)
    sets = tuple(matched(removed, 1 + number) for number in range(NUM_RANDOM_SETS)) if removed else ()
    generator, dimensions = torch.Generator().manual_seed(0), []
    for dimension in plan.dimensions:
        taken = (*plan.dimensions, *dimensions)
        dimensions += nearest(activity.magnitude_E, dimension, taken, generator)
    magnitude_E = activity.magnitude_E
    return Controls(
        neurons=neurons,
        neurons_level=_level(activity.of(neurons), activity.of(plan.super_neurons)),
        dimensions=tuple(dimensions),
        dimensions_level=_level(float(magnitude_E[dimensions].sum()), float(magnitude_E[list(plan.dimensions)].sum())),
        sets=sets,
        set_levels=tuple(_level(activity.of(neurons), activity.of(removed)) for neurons in sets),
    )


def _level(control: float, treated: float) -> float:
    return control / treated if treated else 0.0


def read_activity(anatomy: Anatomy, model: Any, ids_BT: Tensor, plan: Plan) -> Activity:
    """The activity at the sink in one baseline pass of the choosing sequences."""
    recorder = Recorder(
        anatomy,
        [
            _at_sink("writes", HookPoint.NEURONS, lambda call: _writes(call, plan.sink)),
            _at_sink(
                "direction", HookPoint.ATTENTION_IN, lambda call: _top_direction(wide(call.state[:, plan.sink]))[None]
            ),
            _at_sink(
                "written", HookPoint.RESIDUAL_OUT, lambda call: _top_direction(wide(call.residual[:, plan.sink]))[None]
            ),
            _at_sink("magnitude", HookPoint.RESIDUAL_OUT, lambda call: wide(call.residual[:, plan.sink]).abs()),
        ],
    )
    recording = recorder.read(model, ids_BT)
    writes: dict[Group, Tensor] = {}
    for layer in anatomy.layers:
        experts, counts = zip(*((expert, weight.shape[1]) for expert, weight in layer.down_weights()), strict=True)
        groups = recording["writes"][layer.index].cpu().split(counts)
        writes |= {(layer.index, expert): write_F for expert, write_F in zip(experts, groups, strict=True)}
    alive = [recording["magnitude"][layer].cpu() for layer in plan.layers_with_disparity]
    return Activity(
        writes=writes,
        magnitude_E=torch.stack(alive).mean(0),
        directions=recording["direction"],
        written=recording["written"],
    )


def direction_writers(activity: Activity, anatomy: Anatomy, plan: Plan) -> tuple[Neuron, ...]:
    """The neurons before the first head with the sink by what they write along the direction that the sink's states
    have there, strongest first: of each layer at least as many as are searched."""
    first = min((layer for layer, _ in plan.sink_heads), default=0)
    strongest: list[tuple[float, Neuron]] = []
    for layer in anatomy.layers[:first]:
        direction_E = activity.written[first - 1].float().cpu()
        num_kept, ranked = max(MAX_NEURONS, most_super_neurons(layer)), []
        for expert, _ in layer.down_weights():
            along_F = torch.nn.functional.normalize(layer.written_vectors(expert).float().cpu(), dim=0).T @ direction_E
            write_F = activity.writes[layer.index, expert].float() * along_F.abs()
            values, neurons = write_F.topk(min(len(write_F), num_kept))
            ranked += [
                (value, Neuron(layer.index, expert, neuron))
                for value, neuron in zip(values.tolist(), neurons.tolist(), strict=True)
            ]
        # Not all of them: those of a hundred experts would fill the memory.
        strongest += sorted(ranked, key=itemgetter(0), reverse=True)[:num_kept]
    return tuple(neuron for _, neuron in sorted(strongest, key=itemgetter(0), reverse=True))


def few_of_each_layer(ranked: Sequence[Neuron], anatomy: Anatomy) -> tuple[Neuron, ...]:
    """The first neurons of each layer, as many as can be super neurons: for a sink without a massive dimension, whose
    writers no dimension gives away."""
    left = {layer.index: most_super_neurons(layer) for layer in anatomy.layers}
    few = []
    for neuron in ranked:
        if left[neuron.layer] > 0:
            left[neuron.layer] -= 1
            few.append(neuron)
    return tuple(few)


def _at_sink(name: str, hook_point: HookPoint, value: Any) -> Observable:
    return Observable(name=name, hook_point=hook_point, value=value, reducer=Mean())


def _top_direction(states_BE: Tensor) -> Tensor:
    """[E] their top right singular vector, turned their way: of the energy of all states, none holds more."""
    top_E = torch.linalg.svd(states_BE, full_matrices=False).Vh[0]
    return torch.where((states_BE @ top_E).sum() < 0, -top_E, top_E)


def _writes(call: LayerCall, sink: int) -> Tensor:
    """[B, U] |activation| times the norm of the output vector at the sink, post-norm included."""
    num_sequences, length = call.passing.shape
    tokens_B = torch.arange(num_sequences, device=call.residual.device) * length + sink
    write_BU = wide(call.neurons.at(tokens_B)).abs() * call.neurons.output_norms()
    scale_N = call.neurons.write_scale_N
    return write_BU if scale_N is None else write_BU * scale_N[tokens_B, None].abs()
