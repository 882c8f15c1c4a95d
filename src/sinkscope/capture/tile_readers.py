"""Turns one tile's scores into weights and reads them: by operations of torch, or by a kernel in C.

Axes: N = batch * key-value heads, G query heads per key-value head, T query position, S key position, n queries of a
tile, P chosen keys, R distances.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from sinkscope.capture.attention_request import AttentionRule, ReadingRequest, distance_tensor, sampled_queries
from sinkscope.kernels.compiled import AT_MOST_32_BITS, call, runs_in_c

FAINTEST = -80.0
"""Scores this far below a row's largest count as no attention at all."""
HIDDEN = -1e30
"""Score of a hidden key. Finite, since its weight of 0 times its score must count as 0 in the entropy."""


@dataclass(frozen=True)
class Tile:
    """Some queries, the keys that any of them may see, and the key-value heads that both belong to."""

    pairs: slice
    start: int
    stop: int
    low: int

    @property
    def rows(self) -> tuple[slice, slice, slice]:
        """The tile's part of [N, G, T]."""
        return self.pairs, slice(None), slice(self.start, self.stop)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """All rows that tiles are cut from, and what is wanted of them."""

    rule: AttentionRule
    request: ReadingRequest
    query_NGTD: Tensor
    """In the dtype and on the device of all that is computed."""
    sinks_NG: Tensor | None
    weights_NS: Tensor | None
    queries_per_tile: int

    @property
    def queries_n(self) -> Tensor:
        return sampled_queries(self.query_NGTD.shape[2], self.query_NGTD.device)

    @property
    def distances_R(self) -> Tensor:
        return distance_tensor(self.request.distances, self.query_NGTD.device)

    def received(self) -> Tensor:
        """[N, G, S] or, of chosen keys, [N, G, P] zeros."""
        *heads, num_queries, _ = self.query_NGTD.shape
        keys_P = self.request.keys
        return self.query_NGTD.new_zeros(*heads, num_queries if keys_P is None else len(keys_P))


@dataclass(frozen=True)
class TileReadings:
    """Sums over queries and numbers of rows, as AttentionReading has them."""

    received: Tensor
    by_distance: Tensor
    entropy: Tensor
    mixing: Tensor
    weighted_mixing: Tensor


class TilesInC:
    """Reads a tile by one call of kernels/c/attention_tile.c."""

    @staticmethod
    def takes(query: Tensor, rule: AttentionRule) -> bool:
        """A softmax on the CPU, of numbers that tiles hold as float32."""
        return rule.sigmoid_bias is None and runs_in_c(query, AT_MOST_32_BITS)

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        *heads, num_queries, _ = rows.query_NGTD.shape
        keys_P = rows.request.keys
        self.keys_P = None if keys_P is None else keys_P.long().contiguous()
        self.received_NGS = rows.received()
        self.by_distance_NGR = rows.query_NGTD.new_zeros(*heads, len(rows.request.distances))
        self.of_rows_3NGT = rows.query_NGTD.new_empty(3, *heads, num_queries)

    def read(self, tile: Tile, scores_NGnS: Tensor) -> tuple[Tensor, Tensor]:
        """([N, G, n, S] weights, 0 where a query does not see a key; [N, G, n] what they are to be multiplied by)."""
        rows, pairs = self.rows, tile.pairs
        num_pairs, num_groups, num_queries, num_keys = scores_NGnS.shape
        inverse_NGn = scores_NGnS.new_empty(scores_NGnS.shape[:3])
        keys_P, queries_n, distances_R = self.keys_P, rows.queries_n, rows.distances_R
        call(
            "attention_tile",
            *(scores_NGnS, inverse_NGn, num_pairs * num_groups, num_groups, num_queries, num_keys),
            *(rows.query_NGTD.shape[2], tile.start, tile.low, rows.rule.window or 0),
            *(None if values is None else values[pairs] for values in (rows.sinks_NG, rows.weights_NS)),
            *(values[pairs] for values in self.of_rows_3NGT),
            *(self.received_NGS[pairs], keys_P, -1 if keys_P is None else len(keys_P)),
            *(self.by_distance_NGR[pairs], queries_n, len(queries_n), distances_R, len(distances_R)),
        )
        return scores_NGnS, inverse_NGn

    def readings(self) -> TileReadings:
        """What all tiles gave."""
        rows = self.rows
        num_with_key_R = _num_with_key(rows.query_NGTD.shape[2], rows.request.distances)
        return TileReadings(self.received_NGS, self.by_distance_NGR / num_with_key_R, *self.of_rows_3NGT)


class TilesInTorch:
    """The same by operations of torch: every dtype, every device, and a sigmoid in place of the softmax.

    Tiles leave sums of each row; what follows from them is worked out for all rows together.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        *heads, num_queries, _ = rows.query_NGTD.shape
        rule, like = rows.rule, rows.query_NGTD
        self.received_NGS = rows.received()
        self.largest_NGT, self.total_NGT, self.dots_NGT, self.norm_NGT, self.weighted_NGT = like.new_empty(
            5, *heads, num_queries
        )
        softmax = rule.sink_logits is None and rule.sigmoid_bias is None
        self.whole_NGT = self.total_NGT if softmax else torch.ones_like(self.total_NGT)
        self.weights_NGnR = like.new_empty(*heads, len(rows.queries_n), len(rows.request.distances))
        self.places = _places_by_distance(
            num_queries, rows.queries_per_tile, rule.window, rows.request.distances, like.device
        )
        self.future_nn = like.new_full((rows.queries_per_tile, rows.queries_per_tile), HIDDEN).triu_(1)
        self.buffer = like.new_empty(0)

    def read(self, tile: Tile, scores_NGnS: Tensor) -> tuple[Tensor, Tensor]:
        """See TilesInC."""
        rule, sinks_NG, keys_P = self.rows.rule, self.rows.sinks_NG, self.rows.request.keys
        here, pairs, low, stop, scores = tile.rows, tile.pairs, tile.low, tile.stop, scores_NGnS
        if self.buffer.numel() < scores.numel():
            self.buffer = scores.new_empty(scores.numel())
        weights = self.buffer[: scores.numel()].view(scores.shape)
        _mask(scores, self.future_nn, tile.start, low, rule.window)
        largest = torch.amax(scores, -1, out=self.largest_NGT[here])
        if rule.sigmoid_bias is not None:
            # The logarithms of the weights themselves, so that what follows divides them by nothing.
            scores.copy_(logsigmoid(scores.add_(rule.sigmoid_bias)))
            largest.zero_()
        if sinks_NG is not None:
            torch.maximum(largest, sinks_NG[pairs, :, None], out=largest)
        scores -= largest.unsqueeze(-1)
        # On arguments that underflow a vectorised exp is many times slower. What is hidden stands at the tile's two
        # edges, and e^-80 of a row's largest weight is nothing.
        for edge in [slice(tile.start - low, None)] + ([] if rule.window is None else [slice(stop - tile.start)]):
            scores[..., edge].clamp_(min=FAINTEST)
        torch.exp(scores, out=weights)
        total = torch.sum(weights, -1, out=self.total_NGT[here])
        whole = self.whole_NGT[here]
        if sinks_NG is not None:
            torch.add(total, torch.exp(sinks_NG[pairs, :, None] - largest), out=whole)
        inverse = whole.reciprocal()
        self._keep_distances(tile, weights)
        if keys_P is not None:
            self.received_NGS[pairs] += _at_keys(weights, inverse, keys_P, low, stop)
            return weights, inverse
        self.received_NGS[pairs, :, low:stop] += torch.matmul(inverse.unsqueeze(-2), weights).squeeze(-2)
        torch.sum(scores.mul_(weights), -1, out=self.dots_NGT[here])
        torch.linalg.vector_norm(weights, dim=-1, out=self.norm_NGT[here])
        if self.rows.weights_NS is not None:
            squares = torch.mul(weights, weights, out=scores).flatten(1, 2)
            weighted = torch.matmul(squares, self.rows.weights_NS[pairs, low:stop, None]).view(scores.shape[:3])
            torch.mul(weighted, inverse.square(), out=self.weighted_NGT[here])
        return weights, inverse

    def _keep_distances(self, tile: Tile, weights_NGnS: Tensor) -> None:
        sampled, places_nR = self.places[tile.start // self.rows.queries_per_tile]
        if places_nR.numel() > 0:
            # Selecting is four times faster from two dimensions.
            chosen = weights_NGnS.view(-1, weights_NGnS[0, 0].numel()).index_select(1, places_nR.flatten())
            self.weights_NGnR[tile.pairs, :, sampled] = chosen.view(*weights_NGnS.shape[:2], *places_nR.shape)

    def readings(self) -> TileReadings:
        """What all tiles gave."""
        rows, whole_NGT = self.rows, self.whole_NGT
        weights_NGnR = self.weights_NGnR.div_(whole_NGT.index_select(2, rows.queries_n).unsqueeze(-1))
        has_key_nR = rows.queries_n[:, None] >= rows.distances_R
        seen_nR = has_key_nR if rows.rule.window is None else has_key_nR & (rows.distances_R < rows.rule.window)
        return TileReadings(
            received=self.received_NGS,
            by_distance=torch.where(seen_nR, weights_NGnR, 0).sum(2) / has_key_nR.sum(0),
            # -sum a log a with log a = score - largest - log whole; a row may add up to less than 1 (learned sinks).
            entropy=(self.total_NGT * whole_NGT.log() - self.dots_NGT) / whole_NGT,
            mixing=(self.norm_NGT / whole_NGT).square(),
            weighted_mixing=self.weighted_NGT,
        )


def _mask(scores_NGnS: Tensor, future_nn: Tensor, start: int, low: int, window: int | None) -> None:
    """Hides, in place, the keys after each query and those before its window; only the tile's two edges are touched."""
    num_rows, num_keys = scores_NGnS.shape[-2:]
    scores_NGnS[..., start - low :] += future_nn[:num_rows, :num_rows]
    if window is not None and num_keys > window:
        edge = min(num_rows, num_keys)
        rows = torch.arange(num_rows, device=scores_NGnS.device)[:, None] + start
        keys = torch.arange(edge, device=scores_NGnS.device)[None, :] + low
        scores_NGnS[..., :edge].masked_fill_(keys <= rows - window, HIDDEN)


@lru_cache(maxsize=64)
def _places_by_distance(
    length: int, queries_per_tile: int, window: int | None, distances: tuple[int, ...], device: torch.device
) -> list[tuple[slice, Tensor]]:
    """By tile of queries: which of the sampled queries lie in it, and [n, R] where in the tile, laid out flat, the
    weight on the key each distance back stands; anywhere inside for a key that the tile does not hold."""
    queries_n, distances_R = sampled_queries(length, device), distance_tensor(distances, device)
    starts = range(0, length, queries_per_tile)
    ends = torch.searchsorted(queries_n, torch.tensor([*starts, length], device=device)).tolist()
    places = []
    for start, first, last in zip(starts, ends[:-1], ends[1:], strict=True):
        low = 0 if window is None else max(0, start - window + 1)
        width = min(start + queries_per_tile, length) - low
        keys_nR = (queries_n[first:last, None] - distances_R - low).clamp(min=0)
        places.append((slice(first, last), (queries_n[first:last, None] - start) * width + keys_nR))
    return places


@lru_cache(maxsize=64)
def _num_with_key(length: int, distances: tuple[int, ...]) -> Tensor:
    """[R] sampled queries that have a key so far back."""
    cpu = torch.device("cpu")
    return (sampled_queries(length, cpu)[:, None] >= distance_tensor(distances, cpu)).sum(0)


def _at_keys(tile_NGnS: Tensor, inverse_NGn: Tensor, keys_P: Tensor, low: int, stop: int) -> Tensor:
    """[N, G, P] attention on chosen keys, summed over the tile's queries."""
    seen = ((keys_P >= low) & (keys_P < stop)).to(tile_NGnS.dtype)
    columns = tile_NGnS[..., (keys_P - low).clamp(0, stop - low - 1)]
    return torch.einsum("bgnp,bgn->bgp", columns, inverse_NGn) * seen
