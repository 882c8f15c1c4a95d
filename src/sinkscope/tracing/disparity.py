"""In which layers massive dimensions appear and disappear at a position, and which of these appearances carry its sink.

The rules, the same for every model:

- A dimension appears in a layer where it becomes massive, and again where at least half of its disparity is new: where
  its ratio to the mean of all dimensions is twice that at its last appearance. Each dimension is followed by itself, so
  that a weak one that is there from the start does not hide one that begins later.
- It disappears where it falls below half of the thresholds that make it massive. A smaller fall may be noise.
- An appearance carries the sink where at least half of the sink is new behind it: in the layers that read it, up to the
  next appearance, the share of heads with the sink is what a sink needs, and twice the largest of any layer since this
  dimension, or all that carried the sink so far, disappeared. A dimension that appears behind heads which have the sink
  already is not what they read.

Nothing here is a test: whether a sink needs what carries it is decided by removing that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from torch import Tensor

from sinkscope.measures.dimension_disparity import MASSIVE_CONTRAST, MASSIVE_RATIO
from sinkscope.measures.sink_score import MIN_SINK_RATE

UNKNOWN = -1
"""Stands for the massive dimension of a position that was not recorded in full."""
HYSTERESIS = 0.5
"""A dimension disappears only below this fraction of the thresholds at which it appears. Otherwise noise around a
threshold would make it appear twice."""
GROWTH = 2.0
"""Where a quantity is this many times what it was, half of it is new."""


@dataclass(frozen=True)
class Change:
    """A massive dimension that appears or disappears in a layer; layer -1 is the stream that enters layer 0."""

    layer: int
    dimension: int
    appears: bool


@dataclass(frozen=True)
class Row:
    """What one position's state is after a layer."""

    massive: frozenset[int]
    large: dict[int, float]
    """Its ratio to the mean of all dimensions, by dimension that is above HYSTERESIS times the thresholds; that of
    UNKNOWN alone where the position was not recorded in full."""


def changes_of(rows: Iterable[Row]) -> list[Change]:
    """The changes at one position, layer by layer, from the state that enters layer 0 and those after each layer."""
    changes: list[Change] = []
    standing: dict[int, float] = {}  # by dimension, its ratio where it last appeared
    for layer, row in enumerate(rows, start=-1):
        if UNKNOWN in row.large:
            # Which dimension is large is not known, so it is compared with none.
            if row.massive and not standing:
                standing = dict(row.large)
                changes.append(Change(layer, UNKNOWN, True))
            continue
        if UNKNOWN in standing and row.large:
            # It has a name now: what is large here is what appeared there.
            named = {dimension: row.large[dimension] for dimension in row.massive or row.large}
            unnamed = changes.pop()
            changes += [replace(unnamed, dimension=dimension) for dimension in sorted(named)]
            standing = named
        for dimension in sorted(standing.keys() - row.large.keys()):
            changes.append(Change(layer, dimension, False))
            del standing[dimension]
        for dimension in sorted(row.massive):
            if dimension not in standing or row.large[dimension] >= GROWTH * standing[dimension]:
                changes.append(Change(layer, dimension, True))
                standing[dimension] = row.large[dimension]
    return changes


def carrying(changes: Sequence[Change], rate_L: Tensor) -> list[Change]:
    """The appearances that carry a sink. Without any head that has it, all of them: there is nothing to choose by.

    `rate_L` is the share of each layer's heads that have the sink; NaN in layers without attention.
    """
    appearances = [change for change in changes if change.appears]
    if not layers_with_sink(rate_L):
        return appearances
    layers = sorted({change.layer for change in appearances})
    absent: dict[int, int] = {}  # by dimension, where it last disappeared
    standing: set[int] = set()
    handed_on = -1  # where the last dimension that carried the sink disappeared
    carry = []
    for change in changes:
        if not change.appears:
            absent[change.dimension] = change.layer
            if standing == {change.dimension}:
                handed_on = change.layer
            standing.discard(change.dimension)
            continue
        after = change.layer + 1
        end = next((layer for layer in layers if layer > change.layer), len(rate_L) - 1)
        behind = without_nan(rate_L[after : end + 1])
        since = max(handed_on, absent.get(change.dimension, -1)) + 1
        before = without_nan(rate_L[since:after])
        if behind and fmean(behind) >= max(MIN_SINK_RATE, GROWTH * max(before, default=0.0)):
            carry.append(change)
            standing.add(change.dimension)
    return carry


def layers_with_sink(rate_L: Tensor) -> list[int]:
    """The layers in which as many heads as a sink needs have it."""
    return (rate_L >= MIN_SINK_RATE).nonzero().flatten().tolist()


def without_nan(values: Tensor) -> list[float]:
    """The values that are not NaN."""
    return values[~values.isnan()].tolist()


def layers_of(changes: Sequence[Change], carry: Sequence[Change]) -> tuple[list[int], list[int]]:
    """(layers in which a dimension of `carry` appears, layers after which none of them is left)."""
    standing: set[int] = set()
    disappears_in = []
    for change in changes:
        if change in carry:
            standing.add(change.dimension)
        elif not change.appears and change.dimension in standing:
            standing.remove(change.dimension)
            if not standing:
                disappears_in.append(change.layer)
    appears_in = sorted({change.layer for change in carry})
    return appears_in, [layer for layer in disappears_in if layer not in appears_in]


def layers_before(appears_in: Sequence[int], rate_L: Tensor, *, parallel: bool) -> range:
    """The layers whose aggregation can make the sink, in which interventions act unless layers are chosen: up to the
    last one where disparity that carries it appears or, without one, up to the layer before the first with a sink.

    Where attention and feed-forward read the same input, the aggregation of the layer of an appearance comes too late
    to cause it.
    """
    in_layers = [layer for layer in appears_in if layer >= 0]  # the aggregation has no part in the embeddings
    if not in_layers:
        return range(max(1, min(layers_with_sink(rate_L), default=0)))
    return range(max(1, max(in_layers) + (0 if parallel else 1)))


def layers_with(appears_in: Sequence[int], disappears_in: Sequence[int], num_layers: int) -> list[int]:
    """The layers after which disparity stands."""
    layers: set[int] = set()
    for first in appears_in:
        end = next((layer for layer in disappears_in if layer > first), num_layers)
        layers |= set(range(max(0, first), end))
    return sorted(layers)


def row_of(ratio_N: Tensor, contrast_N: Tensor, dimensions: Sequence[int]) -> Row:
    """The Row of a position, from the ratio and the contrast of some dimensions."""
    massive, large = set(), {}
    for ratio, contrast, dimension in zip(ratio_N.tolist(), contrast_N.tolist(), dimensions, strict=True):
        level = min(ratio / MASSIVE_RATIO, contrast / MASSIVE_CONTRAST)
        if level >= HYSTERESIS:
            large[dimension] = ratio
        if level >= 1:
            massive.add(dimension)
    return Row(frozenset(massive), large)
