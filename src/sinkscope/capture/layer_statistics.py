"""Statistics of all layers over some sequences, in a form that merges exactly across chunks of a batch.

Three kinds: sums over sequences; largest values with where they stand; moments across sequences (Chan's formula), of
which the mean vector is kept only while further chunks may follow. Layers are stacked: an operation on all of them
costs one launch, not L.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sinkscope.capture.lock import LockInput

RATIO_COUNTS = {
    **dict.fromkeys(("dom_ratio", "top_energy_share", "participation_ratio", "kurtosis"), "num_residuals"),
    "dom_ratio_normed": "num_states",
}
"""By ratio, the sum that counts the sequences whose state is not all zero: of zeros there is no ratio."""


@dataclass
class Moments:
    """Mean across sequences [..., C], and squared deviations from it, summed over channels [...] and positions [C]."""

    count: int
    mean: Tensor | None
    deviation: Tensor
    channel_deviation: Tensor

    @classmethod
    def of(cls, x: Tensor, *, keep_mean: bool = True) -> Moments:
        """Moments over the first axis of [B, ..., C]; the mean is only needed to merge with another chunk's."""
        x = x.to(wide(x))
        mean = x.mean(0)
        squares = (x - mean).square_().sum(0)
        return cls(x.shape[0], mean if keep_mean else None, squares.sum(-1), squares.flatten(0, -2).sum(0))

    def merged(self, other: Moments) -> Moments:
        assert self.mean is not None
        assert other.mean is not None
        count = self.count + other.count
        apart = other.mean - self.mean
        between = apart.square() * (self.count * other.count / count)
        return Moments(
            count,
            self.mean + apart * (other.count / count),
            self.deviation + other.deviation + between.sum(-1),
            self.channel_deviation + other.channel_deviation + between.flatten(0, -2).sum(0),
        )

    @property
    def variance(self) -> Tensor:
        """Unbiased variance across sequences, averaged over channels; NaN for a single sequence."""
        if self.count < 2:
            return torch.full_like(self.deviation, float("nan"))
        return self.deviation / ((self.count - 1) * len(self.channel_deviation))


@dataclass
class Statistics:
    """What all layers gave on some sequences. The residual has a row more than the layers: the stream entering layer
    0."""

    num_sequences: int
    sums: dict[str, Tensor]
    """[L, ...] or, of the residual, [L + 1, ...]: sums over sequences."""
    largest: dict[str, tuple[Tensor, Tensor]]
    """[L, T] or [L + 1, T] largest over sequences, and where."""
    moments: dict[str, list[Moments]]
    units: list[dict[str, Tensor]]
    """By layer, since layers may differ in their number of units: sums over sequences at the candidates, and over all
    tokens."""
    candidates: Tensor
    """[L + 1, P] positions whose neurons and dimensions are kept in full."""
    sink_heads_BS: Tensor
    """[B, S] how many heads of all layers count each key as their sink."""
    lock_inputs: list[LockInput]
    rank_tokens: list[Tensor]

    def merged(self, other: Statistics) -> Statistics:
        """Statistics of both sets of sequences; the positions they look at must agree."""
        assert torch.equal(self.candidates, other.candidates)
        largest = {}
        for name, (value, index) in self.largest.items():
            other_value, other_index = other.largest[name]
            largest[name] = (torch.maximum(value, other_value), torch.where(other_value > value, other_index, index))
        return Statistics(
            num_sequences=self.num_sequences + other.num_sequences,
            sums=_added(self.sums, other.sums),
            largest=largest,
            moments={
                name: [mine.merged(theirs) for mine, theirs in zip(layers, other.moments[name], strict=True)]
                for name, layers in self.moments.items()
            },
            units=[_added(mine, theirs) for mine, theirs in zip(self.units, other.units, strict=True)],
            candidates=self.candidates,
            sink_heads_BS=torch.cat([self.sink_heads_BS, other.sink_heads_BS]),
            lock_inputs=[mine.merged(theirs) for mine, theirs in zip(self.lock_inputs, other.lock_inputs, strict=True)],
            rank_tokens=self._merged_rank_tokens(other),
        )

    def _merged_rank_tokens(self, other: Statistics) -> list[Tensor]:
        if not other.rank_tokens:  # all tokens that the effective rank wants lie in earlier chunks
            return self.rank_tokens
        return [torch.cat(both) for both in zip(self.rank_tokens, other.rank_tokens, strict=True)]

    def mean(self, name: str) -> Tensor:
        """A sum over sequences as a mean; of one sequence it is the sum itself, which may be large.

        A ratio's mean is over the sequences that have one; NaN where none has.
        """
        total = self.sums[name]
        if name in RATIO_COUNTS:
            return total / self.sums[RATIO_COUNTS[name]]
        return total if self.num_sequences == 1 and total.is_floating_point() else total / self.num_sequences


def stacked_together(by_name: dict[str, dict[int, Tensor]]) -> dict[str, Tensor]:
    """All layers in one tensor by name; those of one dtype are copied by one operation, so they must be of one
    shape."""
    groups: dict[torch.dtype, list[str]] = {}
    for name, by_layer in by_name.items():
        groups.setdefault(next(iter(by_layer.values())).dtype, []).append(name)
    together = {}
    for names in groups.values():
        whole = _stacked([values for name in names for values in by_name[name].values()])
        together |= zip(names, whole.split([len(by_name[name]) for name in names]), strict=True)
    return together


def stacked(by_layer: dict[int, Tensor]) -> Tensor:
    """All layers in one tensor, on the CPU where a model is spread over several devices."""
    return _stacked(list(by_layer.values()))


def _stacked(values: list[Tensor]) -> Tensor:
    devices = {value.device for value in values}
    return torch.stack(values if len(devices) == 1 else [value.cpu() for value in values])


def wide(values: Tensor) -> torch.dtype:
    """The dtype that sums over a tensor are held in."""
    return torch.promote_types(values.dtype, torch.float32)


def largest_over_sequences(values_lBT: Tensor, index_lBT: Tensor) -> tuple[Tensor, Tensor]:
    """([l, T] largest value of any sequence, [l, T] the index that belongs to it)."""
    largest_lT, sequence_lT = values_lBT.max(1)
    return largest_lT, index_lBT.gather(1, sequence_lT[:, None]).squeeze(1)


def joined(sums_by_layer: dict[int, dict[str, Tensor]]) -> dict[str, Tensor]:
    """All layers' sums, of which each has a first axis of one layer, in one tensor by name."""
    rows = list(sums_by_layer.values())
    return {name: stacked({number: row[name][0] for number, row in enumerate(rows)}) for name in rows[0]}


def _added(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value + theirs[name] for name, value in mine.items()}
