"""Random sets, the controls of a study: as many neurons, or dimensions, that do as much at the sink as those acted on.

A random set that does nothing at the sink would show nothing when it is removed. So neurons are matched by what they
write there (|activation| times the norm of the output vector) and dimensions by their magnitude there, as means over
the choosing sequences. If a model has nothing comparable, the control is empty: it has no number, and the claim says
so.

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
    """By layer [E]: the direction that the sink's states share most as they enter attention, of length 1."""
    written: dict[int, Tensor]
    """By layer [E]: likewise as they leave the layer."""

    def of(self, neurons: Sequence[Neuron]) -> float:
        """The sum of what some neurons write."""
        return sum(float(self.writes[neuron.layer, neuron.expert][neuron.neuron]) for neuron in neurons)


@dataclass(frozen=True, kw_only=True)
class Controls:
    """The random sets of one study."""

    dimensions: tuple[int, ...]
    """As many as there are massive dimensions."""
    sets: tuple[tuple[Neuron, ...], ...]
    """Each as large as the minimal set or the writers; empty if there are neither."""
    set_levels: tuple[float, ...]
    """What each set writes at the sink, over what the minimal set or the writers write there."""


def draw_controls(activity: Activity, anatomy: Anatomy, plan: Plan, removed: Sequence[Neuron]) -> Controls:
    """Random sets matched by the activity at the sink; `removed` is the minimal set or the writers."""
    # A control must not hold any neuron that may take part in the sink.
    excluded = (*plan.candidates, *plan.writers, *removed, *plan.super_neurons)

    def matched(neurons: Sequence[Neuron], seed: int) -> tuple[Neuron, ...]:
        return tuple(matched_neurons(anatomy, neurons, excluded, seed=seed, sizes=activity.writes))

    sets = tuple(matched(removed, 1 + number) for number in range(NUM_RANDOM_SETS)) if removed else ()
    generator = torch.Generator().manual_seed(0)
    dimensions: list[int] = []
    for dimension in plan.dimensions:
        taken = (*plan.dimensions, *dimensions)
        dimensions += nearest(activity.magnitude_E, dimension, taken, generator)
    return Controls(
        dimensions=tuple(dimensions),
        sets=sets,
        set_levels=tuple(_level(activity.of(neurons), activity.of(removed)) for neurons in sets),
    )


def _level(control: float, acted_on: float) -> float:
    return control / acted_on if acted_on else 0.0


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
        sizes = [(expert, weight.shape[1]) for expert, weight in layer.down_weights()]
        groups = recording["writes"][layer.index].cpu().split([size for _, size in sizes])
        for (expert, _), write_F in zip(sizes, groups, strict=True):
            writes[layer.index, expert] = write_F
    magnitudes = [recording["magnitude"][layer].cpu() for layer in plan.layers_with_disparity]
    return Activity(
        writes=writes,
        magnitude_E=torch.stack(magnitudes).mean(0),
        directions=recording["direction"],
        written=recording["written"],
    )


def direction_writers(activity: Activity, anatomy: Anatomy, plan: Plan) -> tuple[Neuron, ...]:
    """The neurons in layers before the first head with the sink, ranked by what they write along the direction that the
    sink's states share there. Of each layer at least MAX_NEURONS."""
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
    """The strongest neurons of each layer, as many as can be super neurons. They are the candidates for the minimal set
    of a sink without massive dimensions, where no dimension shows which neurons write it."""
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
    """[E] the direction that holds most of the energy of some states: their top right singular vector, with its sign
    such that the states point along it on average."""
    top_E = torch.linalg.svd(states_BE, full_matrices=False).Vh[0]
    return torch.where((states_BE @ top_E).sum() < 0, -top_E, top_E)


def _writes(call: LayerCall, sink: int) -> Tensor:
    """[B, U] |activation| times the norm of the output vector at the sink, post-norm included."""
    num_sequences, length = call.passing.shape
    tokens_B = torch.arange(num_sequences, device=call.residual.device) * length + sink
    write_BU = wide(call.neurons.at(tokens_B)).abs() * call.neurons.output_norms()
    scale_N = call.neurons.write_scale_N
    return write_BU if scale_N is None else write_BU * scale_N[tokens_B, None].abs()
