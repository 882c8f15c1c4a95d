"""Reducers: how the values of an observable on several sequences become one, over chunks and over processes alike.

    of(values, joinable)  the state of one pass: a tensor, or a tuple of tensors and counts. Unless it is `joinable`,
                          what only joining needs is left out: it can be as large as an activation
    join(mine, theirs)    the state of both passes
    result(joined)        by suffix of the observable's name, the value over all passes

Like observables.py, this file imports torch only where it computes.
Axes: B sequences, C channels, E width, P positions of interest, T positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Mean:
    """The mean over sequences of [B, ...]."""

    of_ratios: bool = False
    """Whether NaN stands for 0 / 0, which is left out of the mean."""

    def of(self, values: Tensor, joinable: bool) -> Any:
        if len(values) == 1 and not joinable:  # its own mean; saves two launches a layer on a GPU
            return values[0], 1
        if not self.of_ratios:
            return values.sum(0), len(values)
        return values.nansum(0), (~values.isnan()).sum(0)

    def join(self, mine: Any, theirs: Any) -> Any:
        return mine[0] + theirs[0], mine[1] + theirs[1]

    def result(self, joined: Any) -> dict[str, Tensor]:
        total, count = joined
        return {"": total if isinstance(count, int) and count == 1 else total / count}


@dataclass(frozen=True)
class Total:
    """The sum over passes, for what is already summed over the sequences of each."""

    def of(self, values: Tensor, joinable: bool) -> Any:
        return values

    def join(self, mine: Any, theirs: Any) -> Any:
        return mine + theirs

    def result(self, joined: Any) -> dict[str, Tensor]:
        return {"": joined}


@dataclass(frozen=True)
class Largest:
    """The largest over sequences of ([B, ...] values, [B, ...] places), and as `_PLACE` where that one lies."""

    place: str
    """What the places count, such as dimension or neuron."""

    def of(self, values: tuple[Tensor, Tensor], joinable: bool) -> Any:
        if len(values[0]) == 1:
            return values[0][0], values[1][0]
        largest, sequence = values[0].max(0)
        return largest, values[1].gather(0, sequence[None])[0]

    def join(self, mine: Any, theirs: Any) -> Any:
        return mine[0].maximum(theirs[0]), theirs[1].where(theirs[0] > mine[0], mine[1])

    def result(self, joined: Any) -> dict[str, Tensor]:
        return {"": joined[0], f"_{self.place}": joined[1]}


@dataclass(frozen=True)
class Moments:
    """The unbiased variance over sequences of [B, ..., C], its mean over channels and, as `_by_channel`, over all else.
    NaN for a single sequence. Passes are joined by Chan's formula, which cancels less than sums of squares."""

    def of(self, values: Tensor, joinable: bool) -> Any:
        import torch

        values = values.to(torch.promote_types(values.dtype, torch.float32))
        mean = values.mean(0)
        squares = (values - mean).square_().sum(0)
        # The mean is as large as one sequence's values, and only joining needs it.
        return len(values), mean if joinable else None, squares.sum(-1), squares.flatten(0, -2).sum(0)

    def join(self, mine: Any, theirs: Any) -> Any:
        num_mine, mean_mine, *deviations_mine = mine
        num_theirs, mean_theirs, *deviations_theirs = theirs
        count = num_mine + num_theirs
        apart = mean_theirs - mean_mine
        between = apart.square() * (num_mine * num_theirs / count)
        parts = zip(deviations_mine, deviations_theirs, (between.sum(-1), between.flatten(0, -2).sum(0)), strict=True)
        return count, mean_mine + apart * (num_theirs / count), *(a + b + c for a, b, c in parts)

    def result(self, joined: Any) -> dict[str, Tensor]:
        count, _, deviation, channel_deviation = joined
        freedom = count - 1 if count > 1 else float("nan")
        return {
            "": deviation / (freedom * len(channel_deviation)),
            "_by_channel": channel_deviation / (freedom * deviation.numel()),
        }


@dataclass(frozen=True)
class Cosine:
    """The mean cosine over pairs of sequences of unit vectors [B, T, E]; a vector of zeros has no direction."""

    def of(self, values: Tensor, joinable: bool) -> Any:
        import torch

        total = values.sum(0)
        has_direction = torch.linalg.vector_norm(values, dim=-1) > 0
        # The sum is as large as one sequence's values, and only joining needs it.
        return total if joinable else None, total.square().sum(-1), has_direction.sum(0)

    def join(self, mine: Any, theirs: Any) -> Any:
        total = mine[0] + theirs[0]
        return total, total.square().sum(-1), mine[2] + theirs[2]

    def result(self, joined: Any) -> dict[str, Tensor]:
        from sinkscope.measures.directional_collapse import cosine_from_length

        _, squared_length, num_states = joined
        return {"": cosine_from_length(squared_length, num_states)}


@dataclass(frozen=True)
class Rows:
    """The row of each sequence, of [B, ...], in order; only the first `most` of them if that is given."""

    most: int | None = None

    def of(self, values: Tensor, joinable: bool) -> Any:
        return values[: self.most]

    def join(self, mine: Any, theirs: Any) -> Any:
        import torch

        return torch.cat([mine, theirs.to(mine.device)])[: self.most]

    def result(self, joined: Any) -> dict[str, Tensor]:
        return {"": joined}


@dataclass(frozen=True)
class SelfJoining:
    """Values that know how to join: `mine.joined(theirs)`."""

    def of(self, values: Any, joinable: bool) -> Any:
        return values

    def join(self, mine: Any, theirs: Any) -> Any:
        return mine.joined(theirs)

    def result(self, joined: Any) -> dict[str, Any]:
        return {"": joined}


@dataclass(frozen=True)
class TopDirection:
    """[T] the energy share of the top direction across the first `most` sequences; NaN at positions without rows.

    Takes rows [B, P, E], their positions [P], and the length of the text. The direction is sought across the rows of
    all sequences, so joinable states hold the rows themselves, at most `most` of them. Otherwise the Gram matrix
    [P, B, B] is enough, which is smaller.
    """

    most: int

    def of(self, values: tuple[Tensor, Tensor, int], joinable: bool) -> Any:
        rows_PBE = values[0][: self.most].transpose(0, 1)
        return rows_PBE if joinable else None, None if joinable else rows_PBE @ rows_PBE.mT, *values[1:]

    def join(self, mine: Any, theirs: Any) -> Any:
        import torch

        rows_PBE = torch.cat([mine[0], theirs[0].to(mine[0].device)], dim=1)[:, : self.most]
        return rows_PBE, None, *mine[2:]

    def result(self, joined: Any) -> dict[str, Tensor]:
        from sinkscope.measures.dimension_disparity import direction_share_of_gram

        rows_PBE, gram_PBB, positions_P, length = joined
        gram_PBB = rows_PBE @ rows_PBE.mT if gram_PBB is None else gram_PBB
        share_P = direction_share_of_gram(gram_PBB.double().cpu()).float()
        share_T = share_P.new_full((length,), float("nan")).index_copy(0, positions_P.cpu(), share_P)
        return {"": share_T}


Reducer = Mean | Total | Largest | Moments | Cosine | Rows | SelfJoining | TopDirection
