"""One layer's statistics over sequences, in a form that merges exactly across chunks of a batch.

Three kinds: sums over sequences; largest values with where they stand; moments across sequences (Chan's formula), of
which the mean vector is kept only while further chunks may follow.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Moments:
    """Mean across sequences [..., C], and squared deviations from it, summed over channels [...] and over positions
    [C]."""

    count: int
    mean: Tensor | None
    deviation: Tensor
    channel_deviation: Tensor

    @classmethod
    def of(cls, x: Tensor) -> Moments:
        """Moments over the first axis of [B, ..., C]."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = x.mean(0)
        squares = (x - mean).square_().sum(0)
        return cls(x.shape[0], mean, squares.sum(-1), squares.flatten(0, -2).sum(0))

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

    @property
    def mean_cosine(self) -> Tensor:
        """Mean cosine over pairs of sequences, of moments of unit vectors: 1 - deviation / (B - 1)."""
        return (
            1 - self.deviation / (self.count - 1) if self.count > 1 else torch.full_like(self.deviation, float("nan"))
        )


@dataclass
class LayerStatistics:
    """What one layer gave on some sequences."""

    num_sequences: int
    candidates: Tensor
    """[P] positions whose neurons and dimensions are kept in full."""
    lock_positions: Tensor
    """[Q] positions that the lock of the next layer is read at."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    largest: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    moments: dict[str, Moments] = field(default_factory=dict)

    def mean(self, name: str) -> Tensor:
        return self.sums[name] / self.num_sequences

    def merged(self, other: LayerStatistics) -> LayerStatistics:
        """Statistics of both sets of sequences; the positions they look at must agree."""
        assert torch.equal(self.candidates, other.candidates)
        assert torch.equal(self.lock_positions, other.lock_positions)
        largest = {}
        for name, (value, index) in self.largest.items():
            other_value, other_index = other.largest[name]
            largest[name] = (torch.maximum(value, other_value), torch.where(other_value > value, other_index, index))
        return LayerStatistics(
            num_sequences=self.num_sequences + other.num_sequences,
            candidates=self.candidates,
            lock_positions=self.lock_positions,
            sums={name: value + other.sums[name] for name, value in self.sums.items()},
            largest=largest,
            moments={name: value.merged(other.moments[name]) for name, value in self.moments.items()},
        )

    def without_means(self) -> LayerStatistics:
        """The same without the mean vectors, once no further chunk follows."""
        for moments in self.moments.values():
            moments.mean = None
        return self
