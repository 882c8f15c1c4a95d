"""What a study chooses before it judges, from the model's behaviour on other sequences than those that judge."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sinkscope.measures.sink_score import LATER_QUERIES, MIN_SINK_RATE
from sinkscope.measures.thresholds import LEVEL_ELSEWHERE, MIN_HEAD_SINK_RATE
from sinkscope.models.anatomy import Layer, Neuron, as_neuron
from sinkscope.tracing.disparity import layers_with, layers_with_sink
from sinkscope.tracing.findings import Findings
from sinkscope.tracing.super_neurons import SuperNeuron

SUPER_NEURON_SHARE = 0.005
"""Super neurons are at most this share of a layer's neurons. Each writes at the sink LEVEL_ELSEWHERE times what it
writes at other positions."""
LATER_SHARE = 0.1
"""In layers after the one where disparity appears, only neurons with this share of their layer's write count."""
FIRST_TARGET = 10
"""The position that the paper intervenes at; two more follow it."""
NUM_TARGETS = 3
MAX_DIMENSIONS = 8
"""Massive dimensions that are followed."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The choices of one study."""

    sink: int
    """The position with the highest sink rate, whether it is a sink or not."""
    targets: tuple[int, ...]
    """Positions at which interventions try to make a sink; none of them is one in the baseline."""
    last_layer: int
    """Interventions on attention and the aggregation act in layers 0 to this one; see
    `sinkscope.tracing.disparity.layers_before`."""
    appears_in: tuple[int, ...]
    """The layers in which disparity that carries the sink appears."""
    layers_with_disparity: tuple[int, ...]
    """Layers after which the sink has that disparity or, if there are none, the layers with a sink."""
    dimensions: tuple[int, ...]
    """The massive dimensions at the sink, largest first."""
    super_neurons: tuple[Neuron, ...]
    """Those of the layers where disparity appears, and those of later layers with much of the layer's write; strongest
    write first."""
    candidates: tuple[Neuron, ...]
    """The neurons among which the minimal set is searched, strongest write first: all that move a massive dimension at
    the sink or, if there is no such dimension, the strongest along the direction of the sink's states."""
    writers: tuple[Neuron, ...] = ()
    """Where no minimal set was found: the neurons before the first head with the sink that write most along the
    direction of its states, strongest first."""

    sink_heads: tuple[tuple[int, int], ...] = ()
    """(layer, head) of those that have the sink."""

    @property
    def appearance_neurons(self) -> tuple[Neuron, ...]:
        """The super neurons of the layers where disparity appears, which the claims about the baseline use."""
        return tuple(neuron for neuron in self.super_neurons if neuron.layer in self.appears_in)

    @property
    def layers(self) -> range:
        """The layers that interventions act in."""
        return range(self.last_layer + 1)


def make_plan(findings: Findings) -> Plan:
    """The plan that a trace of the choosing sequences leads to."""
    sink, _ = findings.strongest
    recording = findings.recording
    head_rate_LH = recording["head_sink_rate"][:, :, sink]
    appears_in, disappears_in = findings.disparity_layers.get(sink, ([], []))
    sink_layers = layers_with_sink(findings.head_rate(sink))

    with_disparity = layers_with(appears_in, disappears_in, recording.num_layers)
    sink_head_pairs = (head_rate_LH >= MIN_HEAD_SINK_RATE).nonzero().tolist()
    return Plan(
        sink=sink,
        targets=_targets(recording.sink_rate, sink, recording.batch.length),
        last_layer=findings.layers_before(sink)[-1],
        appears_in=tuple(appears_in),
        layers_with_disparity=tuple(with_disparity or sink_layers or range(recording.num_layers)),
        dimensions=tuple(findings.massive_dimensions_at(sink)[:MAX_DIMENSIONS]),
        super_neurons=tuple(map(as_neuron, _super_neurons(findings, sink, appears_in))),
        candidates=tuple(candidate_neurons(findings, sink)),
        sink_heads=tuple((layer, head) for layer, head in sink_head_pairs),
    )


def _super_neurons(findings: Findings, sink: int, appears_in: list[int]) -> list[SuperNeuron]:
    """Of each layer the neurons with the largest share of its write at the sink, as many as can be super neurons;
    strongest write first."""
    at_sink = [neuron for neuron in findings.super_neurons if neuron.position == sink and neuron.role == "writes"]
    sharp = [neuron for neuron in at_sink if neuron.contrast >= LEVEL_ELSEWHERE]
    sharp.sort(key=lambda neuron: -neuron.write_share)
    selected: list[SuperNeuron] = []
    for layer in sorted({neuron.layer for neuron in sharp}):
        most = most_super_neurons(findings.recording.anatomy.layers[layer])
        largest = [neuron for neuron in sharp if neuron.layer == layer][:most]
        selected += [neuron for neuron in largest if layer in appears_in or neuron.write_share >= LATER_SHARE]
    return sorted(selected, key=lambda neuron: -abs(neuron.write))


def most_super_neurons(layer: Layer) -> int:
    """How many neurons of a layer can be super neurons."""
    return max(1, math.floor(SUPER_NEURON_SHARE * sum(weight.shape[1] for _, weight in layer.down_weights())))


def candidate_neurons(findings: Findings, sink: int) -> list[Neuron]:
    """Neurons that write massive dimensions at the sink, among which the minimal set is searched: those of layers where
    the dimension is massive, and those of any other layer that write much less elsewhere.

    A dimension that is not massive yet, or no longer, can still be what a head reads.
    """
    return [
        as_neuron(neuron)
        for neuron in findings.moving_neurons
        if neuron.position == sink and neuron.role == "writes" and (neuron.stands or neuron.contrast >= LEVEL_ELSEWHERE)
    ]


def _targets(rate_S: torch.Tensor, sink: int, length: int) -> tuple[int, ...]:
    """Position 10 and two more, evenly spaced among those with enough later queries; where the baseline has a sink at
    one of them, the next position without."""
    last = length - LATER_QUERIES - 1
    # One more than needed, and the last left out: it would have the fewest later queries.
    starts = torch.linspace(FIRST_TARGET, last, NUM_TARGETS + 1)[:NUM_TARGETS].round().long().tolist()
    targets: list[int] = []
    for start in starts:
        free = (p for p in range(start, last + 1) if p != sink and p not in targets and rate_S[p] < MIN_SINK_RATE)
        if (position := next(free, None)) is not None:
            targets.append(position)
    return tuple(targets)
