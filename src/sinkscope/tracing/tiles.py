"""Exact causal attention in tiles of queries, reduced while it is computed: nothing of size T x T is ever held.

A tile holds the scores of a few queries with all keys that they may see. Its weights give the value aggregation and,
before they are dropped, attention received by each key, row entropies and sums of squared weights. So output and
readings share one `q k^T`, and on a CPU reading costs a few passes over a tile that lies in the cache.

Axes: B batch, H query heads, K key-value heads, G query heads per key-value head, T query position, S key position, D
head size, N = B * K, n queries of a tile, P chosen keys, R distances.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from sinkscope.tracing.attention_rule import (
    AttentionReading,
    AttentionRule,
    ReadingRequest,
    distance_tensor,
    sampled_queries,
)

TILE_ELEMENTS = 1 << 21
"""Most scores in a tile: enough work for all threads, and still few enough for the cache."""
TILE_QUERIES = 128
"""Most queries in a tile, and never more than half of all: what a tile computes beyond its diagonal is wasted."""
FAINTEST = -80.0
"""Scores are clamped to this far below a row's largest: exp(-80) is no attention at all."""
HIDDEN = -1e30
"""Score of a hidden key. Finite, since the entropy needs weight * score = 0 where the weight is 0."""


@torch.no_grad()
def tiled_attention(
    query_BHTD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, rule: AttentionRule, request: ReadingRequest
) -> AttentionReading:
    """Attention and what is recorded of it, in float32, or in float64 for float64 inputs."""
    num_queries, num_kv_heads = query_BHTD.shape[2], key_BKSD.shape[1]
    num_groups = query_BHTD.shape[1] // num_kv_heads
    kind = {"dtype": torch.promote_types(query_BHTD.dtype, torch.float32), "device": query_BHTD.device}
    query_NGTD = query_BHTD.to(**kind).unflatten(1, (num_kv_heads, num_groups)).flatten(0, 1)
    key_NSD, value_NSD = (x.to(**kind).flatten(0, 1) for x in (key_BKSD, value_BKSD))
    num_pairs = key_NSD.shape[0]

    keys_per_tile = num_queries if rule.window is None else min(num_queries, rule.window + TILE_QUERIES)
    # Long rows leave room for fewer queries in a tile.
    fitting = max(16, min(TILE_QUERIES, num_queries // 2, TILE_ELEMENTS // (num_groups * keys_per_tile)))
    queries_per_tile = min(num_queries, 1 << (fitting.bit_length() - 1))
    size = num_groups * queries_per_tile * keys_per_tile
    buffer = torch.empty(min(num_pairs * size, max(size, TILE_ELEMENTS)), **kind)
    # Positions first in memory, the layout that the model gets for a single sequence without a copy.
    output_TNGD = value_BKSD.new_empty(num_queries, num_pairs, num_groups, value_NSD.shape[-1])
    output_NGTD = output_TNGD.permute(1, 2, 0, 3)
    reader = TileReader(rule, request, query_NGTD, num_kv_heads, queries_per_tile)
    for start in range(0, num_queries, queries_per_tile):
        stop = min(start + queries_per_tile, num_queries)
        low = 0 if rule.window is None else max(0, start - rule.window + 1)
        for pairs in _slices(num_pairs, max(1, len(buffer) // (num_groups * (stop - start) * (stop - low)))):
            tile = Tile(pairs, start, stop, low)
            queries = query_NGTD[tile.rows]
            shape = (*queries.shape[:3], stop - low)
            scores = buffer[: torch.Size(shape).numel()].view(shape)
            flat = scores.flatten(1, 2)
            keys = key_NSD[pairs, low:stop].mT
            torch.baddbmm(flat, queries.flatten(1, 2), keys, beta=0, alpha=rule.scaling, out=flat)
            if rule.softcap is not None:
                scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
            weights, inverse = reader.read(tile, scores)
            aggregation = torch.bmm(weights.flatten(1, 2), value_NSD[pairs, low:stop]).view(*shape[:3], -1)
            torch.mul(aggregation, inverse.unsqueeze(-1), out=output_NGTD[tile.rows])
    return reader.reading(output_NGTD)


def _slices(length: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


@dataclass(frozen=True)
class Tile:
    """Some queries, the keys that any of them may see, and the key-value heads that both belong to."""

    pairs: slice
    """Of N: pairs of a sequence and a key-value head."""
    start: int
    stop: int
    """Queries start to stop."""
    low: int
    """Keys low to stop."""

    @property
    def rows(self) -> tuple[slice, slice, slice]:
        """The tile's slice of [N, G, T]."""
        return self.pairs, slice(None), slice(self.start, self.stop)


class TileReader:
    """Turns the scores of tiles into weights, and reduces them. Tiles leave sums of each row, from which `reading`
    computes entropies and the like for all rows at once."""

    def __init__(
        self, rule: AttentionRule, request: ReadingRequest, query_NGTD: Tensor, num_kv_heads: int, queries_per_tile: int
    ) -> None:
        self.rule, self.request, self.queries_per_tile = rule, request, queries_per_tile
        like, (num_pairs, num_groups, num_queries, _) = query_NGTD, query_NGTD.shape
        num_batch = num_pairs // num_kv_heads
        self.shape_BH = num_batch, num_kv_heads * num_groups
        self.sinks_NG = self.weights_NS = None
        if rule.sink_logits is not None:
            self.sinks_NG = rule.sink_logits.to(like).view(num_kv_heads, num_groups).repeat(num_batch, 1)
        if request.key_weights is not None:
            self.weights_NS = request.key_weights.to(like).expand(num_kv_heads, num_queries).repeat(num_batch, 1)
        num_keys = num_queries if request.keys is None else len(request.keys)
        self.received_NGS = like.new_zeros(num_pairs, num_groups, num_keys)
        self.largest_NGT, self.total_NGT, self.dots_NGT, self.norm_NGT, self.weighted_NGT, self.own_NGT = (
            like.new_empty(6, num_pairs, num_groups, num_queries)
        )
        softmax = rule.sink_logits is None and rule.sigmoid_bias is None
        self.whole_NGT = self.total_NGT if softmax else torch.ones_like(self.total_NGT)
        self.queries_n = sampled_queries(num_queries, like.device)
        self.weights_NGnR = like.new_empty(num_pairs, num_groups, len(self.queries_n), len(request.distances))
        self.places = _places_by_distance(num_queries, queries_per_tile, rule.window, request.distances, like.device)
        self.seen_nn = like.new_ones(queries_per_tile, queries_per_tile).tril_()
        self.future_nn = like.new_full((queries_per_tile, queries_per_tile), HIDDEN).triu_(1)
        self.buffer = like.new_empty(0)

    def read(self, tile: Tile, scores_NGnS: Tensor) -> tuple[Tensor, Tensor]:
        """([N, G, n, S] weights before normalisation, 0 for hidden keys; [N, G, n] the factor that normalises them)."""
        rule, sinks_NG, keys_P = self.rule, self.sinks_NG, self.request.keys
        here, pairs, low, stop, scores = tile.rows, tile.pairs, tile.low, tile.stop, scores_NGnS
        if self.buffer.numel() < scores.numel():
            self.buffer = scores.new_empty(scores.numel())
        weights = self.buffer[: scores.numel()].view(scores.shape)
        _mask(scores, self.future_nn, tile.start, low, rule.window)
        largest = torch.amax(scores, -1, out=self.largest_NGT[here])
        if rule.sigmoid_bias is not None:
            # The logarithms of the weights themselves. A largest score of 0 then leaves them as they are below.
            scores.copy_(logsigmoid(scores.add_(rule.sigmoid_bias)))
            largest.zero_()
        if sinks_NG is not None:
            torch.maximum(largest, sinks_NG[pairs, :, None], out=largest)
        scores -= largest.unsqueeze(-1)
        # A vectorised exp is many times slower on arguments that underflow. Hidden keys, whose scores are that low, lie
        # at the two edges of the tile.
        for edge in [slice(tile.start - low, None)] + ([] if rule.window is None else [slice(stop - tile.start)]):
            scores[..., edge].clamp_(min=FAINTEST)
        torch.exp(scores, out=weights)
        _clear_hidden(weights, self.seen_nn, tile, rule.window)
        total = torch.sum(weights, -1, out=self.total_NGT[here])
        whole = self.whole_NGT[here]
        if sinks_NG is not None:
            torch.add(total, torch.exp(sinks_NG[pairs, :, None] - largest), out=whole)
        inverse = whole.reciprocal()
        self._keep_distances(tile, weights)
        if self.request.own:
            self.own_NGT[here] = weights[..., tile.start - low :].diagonal(dim1=-2, dim2=-1) * inverse
        if keys_P is not None:
            self.received_NGS[pairs] += _at_keys(weights, inverse, keys_P, low, stop)
            return weights, inverse
        self.received_NGS[pairs, :, low:stop] += torch.matmul(inverse.unsqueeze(-2), weights).squeeze(-2)
        torch.sum(scores.mul_(weights), -1, out=self.dots_NGT[here])
        torch.linalg.vector_norm(weights, dim=-1, out=self.norm_NGT[here])
        if self.weights_NS is not None:
            squares = torch.mul(weights, weights, out=scores).flatten(1, 2)
            weighted = torch.matmul(squares, self.weights_NS[pairs, low:stop, None]).view(scores.shape[:3])
            torch.mul(weighted, inverse.square(), out=self.weighted_NGT[here])
        return weights, inverse

    def _keep_distances(self, tile: Tile, weights_NGnS: Tensor) -> None:
        sampled, places_nR = self.places[tile.start // self.queries_per_tile]
        if places_nR.numel() > 0:
            # Selecting is four times faster from two dimensions.
            chosen = weights_NGnS.view(-1, weights_NGnS[0, 0].numel()).index_select(1, places_nR.flatten())
            self.weights_NGnR[tile.pairs, :, sampled] = chosen.view(*weights_NGnS.shape[:2], *places_nR.shape)

    def reading(self, output_NGTD: Tensor) -> AttentionReading:
        """The reading of all tiles, with the aggregation that was computed from their weights."""
        window, whole_NGT = self.rule.window, self.whole_NGT
        distances_R = distance_tensor(self.request.distances, whole_NGT.device)
        weights_NGnR = self.weights_NGnR.div_(whole_NGT.index_select(2, self.queries_n).unsqueeze(-1))
        has_key_nR = self.queries_n[:, None] >= distances_R
        seen_nR = has_key_nR if window is None else has_key_nR & (distances_R < window)
        every_key = self.request.keys is None

        def by_head(x_NG: Tensor) -> Tensor:
            return x_NG.view(*self.shape_BH, *x_NG.shape[2:])

        return AttentionReading(
            output=by_head(output_NGTD).transpose(1, 2),
            received=by_head(self.received_NGS),
            by_distance=by_head(torch.where(seen_nR, weights_NGnR, 0).sum(2) / has_key_nR.sum(0)),
            # -sum a log a with log a = score - largest - log whole; a row may add up to less than 1 (learned sinks).
            entropy=by_head((self.total_NGT * whole_NGT.log() - self.dots_NGT) / whole_NGT) if every_key else None,
            mixing=by_head((self.norm_NGT / whole_NGT).square()) if every_key else None,
            weighted_mixing=by_head(self.weighted_NGT) if every_key and self.weights_NS is not None else None,
            own=by_head(self.own_NGT) if self.request.own else None,
        )


def _mask(scores_NGnS: Tensor, future_nn: Tensor, start: int, low: int, window: int | None) -> None:
    """Hides the keys after each query and those before its window, in place and only at the tile's two edges."""
    num_rows, num_keys = scores_NGnS.shape[-2:]
    scores_NGnS[..., start - low :] += future_nn[:num_rows, :num_rows]
    if window is not None and num_keys > window:
        edge = min(num_rows, num_keys)
        rows = torch.arange(num_rows, device=scores_NGnS.device)[:, None] + start
        keys = torch.arange(edge, device=scores_NGnS.device)[None, :] + low
        scores_NGnS[..., :edge].masked_fill_(keys <= rows - window, HIDDEN)


def _clear_hidden(weights_NGnS: Tensor, seen_nn: Tensor, tile: Tile, window: int | None) -> None:
    """Sets hidden weights to exactly 0, in place: the aggregation of values that are all zero must be zero."""
    num_rows = weights_NGnS.shape[-2]
    weights_NGnS[..., tile.start - tile.low :] *= seen_nn[:num_rows, :num_rows]  # tril_ is several times slower
    if window is not None:
        weights_NGnS[..., : tile.stop - tile.start].triu_(tile.start - window - tile.low + 1)


@lru_cache(maxsize=64)
def _places_by_distance(
    length: int, queries_per_tile: int, window: int | None, distances: tuple[int, ...], device: torch.device
) -> list[tuple[slice, Tensor]]:
    """By tile of queries: which of the sampled queries lie in it, and [n, R] the index, in the flattened tile, of the
    weight on the key at each distance back. For keys that are not in the tile it is any index; `reading` masks them."""
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


def _at_keys(tile_NGnS: Tensor, inverse_NGn: Tensor, keys_P: Tensor, low: int, stop: int) -> Tensor:
    """[N, G, P] attention on chosen keys, summed over the tile's queries."""
    seen = ((keys_P >= low) & (keys_P < stop)).to(tile_NGnS.dtype)
    columns = tile_NGnS[..., (keys_P - low).clamp(0, stop - low - 1)]
    return torch.einsum("bgnp,bgn->bgp", columns, inverse_NGn) * seen
