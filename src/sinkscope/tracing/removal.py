"""Which neurons are named for a sink, and what is left of it without them.

Named are the feed-forward neurons that write a dimension which carries the sink, at the sink, from where the dimension
was last absent to where its growth ends: the last layer, from the appearance on, that makes it a tenth larger. A layer
far behind may write more of it, but heads have the sink already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from sinkscope.models.anatomy import Neuron
from sinkscope.statistics import bootstrap_mean_interval
from sinkscope.tracing.disparity import Change

MOST_NAMED = 8
"""Most neurons that are named for a sink, strongest write first: a few, or no few."""
LEAST_WRITE = 0.01
"""A neuron is named if it writes at least this share of the value that the dimension has where its growth ends."""
LEAST_GROWTH = 1.1
"""A dimension grows while each layer makes it this many times as large."""
MOST_SEQUENCES = 8
"""Most sequences that are read once more without neurons."""
LEFT = 0.5
"""No small set carries a sink of which at least this share is left without the named neurons. These are not shown to
carry it where less than this share is left without the random ones."""


class Rate(NamedTuple):
    """A sink rate, and the ends of its 95 % bootstrap interval over sequences; NaN for one sequence."""

    rate: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Removal:
    """What is left of each sink without the neurons that are named for any of them, and without random ones."""

    neurons: tuple[Neuron, ...]
    random: tuple[Neuron, ...]
    """As many of the same layers and experts, each near in what it writes at the sink."""
    num_sequences: int
    before: dict[int, Rate]
    """By position, on the sequences that were read once more."""
    without_neurons: dict[int, Rate]
    without_random: dict[int, Rate]


@dataclass(frozen=True)
class NamedNeuron:
    """A neuron that writes, or takes away, much of a dimension that carries a sink."""

    layer: int
    expert: int | None
    neuron: int
    dimension: int
    share: float
    """What it writes over the value of the dimension where its growth ends; negative if it takes it away."""


def named_neurons(
    changes: Sequence[Change],
    carry: Sequence[Change],
    value_of: Callable[[int], Tensor],
    writes: Callable[[int, int, float], list[tuple[int | None, int, float]]],
) -> tuple[list[NamedNeuron], list[NamedNeuron]]:
    """(writers, erasers) of a sink, strongest first. `value_of` a dimension is its value [L + 1] at the sink, NaN where
    it is not known; `writes` of a layer and a dimension gives (expert, neuron, write) of each neuron that writes at
    least some amount."""
    named: dict[Neuron, NamedNeuron] = {}
    for change in carry:
        value_L = value_of(change.dimension)
        before = [c.layer for c in changes if not c.appears and c.dimension == change.dimension]
        first = max((layer for layer in before if layer < change.layer), default=-1) + 1
        end = growth_ends(value_L, change.layer)
        value = float(value_L[end + 1])
        for layer in range(first, len(value_L) - 1):
            for expert, neuron, write in writes(layer, change.dimension, LEAST_WRITE * abs(value)):
                share = write / value
                if share > 0 and layer > end:
                    continue
                key = Neuron(layer, expert, neuron)
                if key not in named or abs(share) > abs(named[key].share):
                    named[key] = NamedNeuron(layer, expert, neuron, change.dimension, share)
    strongest = sorted(named.values(), key=lambda neuron: -abs(neuron.share))
    writers = [neuron for neuron in strongest if neuron.share > 0]
    return writers[:MOST_NAMED], [neuron for neuron in strongest if neuron.share < 0][:MOST_NAMED]


def growth_ends(value_L: Tensor, layer: int) -> int:
    """The last layer, from this one on, of those in a row that make a dimension a tenth larger. `value_L` begins with
    what enters layer 0."""
    size_L = value_L.abs()
    while layer + 2 < len(size_L) and bool(size_L[layer + 2] >= LEAST_GROWTH * size_L[layer + 1]):
        layer += 1
    return layer


def rates(rate_BS: Tensor, positions: Sequence[int]) -> dict[int, Rate]:
    """By position, the mean of sink rates by sequence, one column for each position."""
    low_S, high_S = bootstrap_mean_interval(rate_BS.double().numpy())
    means = rate_BS.double().mean(0).tolist()
    return {
        position: Rate(mean, float(low), float(high))
        for position, mean, low, high in zip(positions, means, low_S, high_S, strict=True)
    }


def in_words(removal: Removal, position: int, named: Sequence[NamedNeuron], *, several: bool) -> str:
    """A sentence on what is left of a position's sink; `several`: whether several dimensions carry it."""
    half = LEFT * removal.before[position].rate
    without, random = removal.without_neurons[position], removal.without_random[position]
    names = ", ".join(str(Neuron(neuron.layer, neuron.expert, neuron.neuron)) for neuron in named[:3])
    more = f" and {len(named) - 3} more" if len(named) > 3 else ""
    what = "them" if several else "it"
    if len(named) == 1:
        neurons, others = f"the neuron that writes {what} (layer:neuron {names})", "a random one"
    else:
        neurons = f"the {len(named)} neurons that write {what} most (layer:neuron {names}{more})"
        others = "as many random ones"
    numbers = f"Without {neurons}, {without.rate:.1%} of heads have this sink; without {others}, {random.rate:.1%}"
    # Said only where the whole interval says so; of one sequence there is none.
    if half <= (without.rate if math.isnan(without.low) else without.low):
        return f"{numbers}. So no small set of neurons that write {what} carries this sink."
    if half > (random.rate if math.isnan(random.high) else random.high):
        return f"{numbers}. So these neurons are not shown to carry it: random ones do as much."
    return f"{numbers}."
