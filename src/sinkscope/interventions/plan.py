"""What a study chooses before it judges, from the model's behaviour on other sequences than those that judge."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sinkscope.measures.sink_score import LATER_QUERIES, MIN_SINK_RATE
from sinkscope.measures.thresholds import LEVEL_ELSEWHERE, MIN_HEAD_SINK_RATE
from sinkscope.models.anatomy import Layer, Neuron, as_neuron
from sinkscope.tracing.findings import Findings
from sinkscope.tracing.super_neurons import SuperNeuron

SUPER_NEURON_SHARE = 0.005
"""Super neurons are at most this share of a layer's neurons, each with a write at the sink of LEVEL_ELSEWHERE times its
level at other positions."""
LATER_SHARE = 0.1
"""After the birth only neurons with this share of their layer's write count."""
FIRST_TARGET = 10
"""The position that the paper intervenes at; two more follow it."""
NUM_TARGETS = 3
MAX_DIMENSIONS = 8
"""Massive dimensions that are followed."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The choices of one study."""

    sink: int
    """The strongest position, sink or not."""
    targets: tuple[int, ...]
    """Positions at which interventions try to make a sink; none of them is one in the baseline."""
    last_layer: int
    """Interventions on the aggregation act in layers 0 to this one: the birth of disparity, or where none is born the
    first layer with a sink."""
    births: tuple[int, ...]
    alive: tuple[int, ...]
    """Layers after which the sink has disparity or, if there is none, the layers with a sink."""
    dimensions: tuple[int, ...]
    super_neurons: tuple[Neuron, ...]
    """Strongest write first: those of the layers of birth, and those that carry much of the write in a later one."""
    candidates: tuple[Neuron, ...]
    """Every neuron that moves a massive dimension at the sink or, where there is none, the strongest along the
    direction of its states; strongest write first: for the minimal set."""
    writers: tuple[Neuron, ...] = ()
    """Where no minimal set was found: those before the first head with the sink that write most along the direction of
    its states, as many as are searched, however many of a layer, strongest first."""

    sink_heads: tuple[tuple[int, int], ...] = ()
    """(layer, head) of those that have the sink."""

    @property
    def birth_neurons(self) -> tuple[Neuron, ...]:
        """The super neurons in layers of birth, which the claims about the baseline use."""
        return tuple(neuron for neuron in self.super_neurons if neuron.layer in self.births)

    @property
    def before_sink(self) -> range:
        """Layers whose aggregations the sink can come from: up to the birth of disparity or, where none is born, up to
        the layer before the first with a sink."""
        born = any(birth >= 0 for birth in self.births)
        return range(self.last_layer + 1) if born else range(max(1, self.last_layer))

    @property
    def mixed(self) -> range:
        """Layers up to the last birth, where the factorial changes what a token sees: where disparity is erased and
        born again, what happens before the first birth alone makes no sink."""
        return range(max(self.births) + 1) if len(self.births) > 1 else self.layers

    @property
    def layers(self) -> range:
        """Layers up to the birth of disparity."""
        return range(self.last_layer + 1)


def make_plan(findings: Findings) -> Plan:
    """The plan that a trace of the choosing sequences leads to."""
    sink, _ = findings.strongest
    recording = findings.recording
    anatomy = recording.anatomy
    births, erasures = findings.disparity_layers.get(sink, ([], []))
    sink_layers = (recording["head_sink_rate"][:, :, sink].mean(1) >= MIN_SINK_RATE).nonzero().flatten().tolist()
    first = next((layer for layer in births if layer >= 0), None)
    if first is not None and anatomy.parallel:
        first -= 1  # attention and feed-forward read the same input: the birth layer's aggregation comes too late
    last_layer = first if first is not None else next(iter(sink_layers), 0)
    alive = _alive(births, erasures, recording.num_layers)
    here = [neuron for neuron in findings.super_neurons if neuron.position == sink and neuron.role == "writes"]
    sharp = [neuron for neuron in here if neuron.contrast >= LEVEL_ELSEWHERE]
    sharp.sort(key=lambda neuron: -neuron.write_share)
    chosen: list[SuperNeuron] = []
    for layer in sorted({neuron.layer for neuron in sharp}):
        in_layer = [neuron for neuron in sharp if neuron.layer == layer][: most_super_neurons(anatomy.layers[layer])]
        chosen += [neuron for neuron in in_layer if layer in births or neuron.write_share >= LATER_SHARE]
    chosen.sort(key=lambda neuron: -abs(neuron.write))
    return Plan(
        sink=sink,
        targets=_targets(recording.sink_rate, sink, recording.batch.length),
        last_layer=max(0, last_layer),
        births=tuple(births),
        alive=tuple(alive or sink_layers or range(recording.num_layers)),
        dimensions=tuple(findings.massive_dimensions_at(sink)[:MAX_DIMENSIONS]),
        super_neurons=tuple(map(as_neuron, chosen)),
        candidates=tuple(candidate_neurons(findings, sink)),
        sink_heads=tuple(
            (layer, head)
            for layer, head in (recording["head_sink_rate"][:, :, sink] >= MIN_HEAD_SINK_RATE).nonzero().tolist()
        ),
    )


def most_super_neurons(layer: Layer) -> int:
    """How many neurons of a layer can be super neurons."""
    return max(1, math.floor(SUPER_NEURON_SHARE * sum(weight.shape[1] for _, weight in layer.down_weights())))


def candidate_neurons(findings: Findings, sink: int) -> list[Neuron]:
    """Neurons that write massive dimensions at the sink: those of layers where one stands, and sharp ones of any other.

    A dimension that is not massive yet, or no more, can still be what a head reads.
    """
    return [
        as_neuron(neuron)
        for neuron in findings.moving_neurons
        if neuron.position == sink and neuron.role == "writes" and (neuron.stands or neuron.contrast >= LEVEL_ELSEWHERE)
    ]


def _alive(births: list[int], erasures: list[int], num_layers: int) -> list[int]:
    """Layers after which there is disparity."""
    alive: list[int] = []
    for number, birth in enumerate(births):
        end = erasures[number] if number < len(erasures) else num_layers
        alive += range(max(0, birth), end)
    return alive


def _targets(rate_S: torch.Tensor, sink: int, length: int) -> tuple[int, ...]:
    """Position 10 and two more, evenly spaced among those with enough later queries, where the baseline has no sink."""
    last = length - LATER_QUERIES - 1
    wanted = torch.linspace(FIRST_TARGET, last, NUM_TARGETS + 1)[:NUM_TARGETS].round().long().tolist()
    targets: list[int] = []
    for start in wanted:
        free = (p for p in range(start, last + 1) if p != sink and p not in targets and rate_S[p] < MIN_SINK_RATE)
        if (position := next(free, None)) is not None:
            targets.append(position)
    return tuple(targets)
