"""Exact causal attention in tiles of queries, read while it is computed: nothing of size T x T is ever held.

One tile holds the scores of a few queries with all keys they may see. Its softmax gives the value aggregation, and
before it is dropped the attention received by each key, the row entropies and the sums of squared weights. Output and
readings thus share one `q k^T`, so on a CPU reading costs a few passes over a tile that lies in the cache.

Axes: B batch, H query heads, K key-value heads, G query heads per key-value head, T query position, S key position, D
head size, N = B * K, n queries of a tile, P chosen keys, R distances.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from sinkscope.capture.edits import RowEdit

TILE_ELEMENTS = 1 << 21
"""Scores in one tile at most: large enough that the threads of one operation have work to share, and still in the
cache."""
TILE_QUERIES = 128
"""Queries in one tile at most, and no more than a quarter of them: what a tile computes behind its diagonal is lost."""
SAMPLED_QUERIES = 256
"""Attention by distance and the lock are read at no more queries than this, evenly spaced."""
FAINTEST = -80.0
"""Scores this far below a row's largest count as no attention at all."""
HIDDEN = -1e30
"""Score of a hidden key. Finite, since its weight of 0 times its score must count as 0 in the entropy."""


@dataclass(frozen=True, kw_only=True)
class AttentionReading:
    """What one layer's attention gave. Sums run over queries; `None` where it was not asked for."""

    output: Tensor
    """[B, T, H, D] value aggregation."""
    received: Tensor
    """[B, H, S] sum over the queries from each key on of the attention on it; [B, H, P] for chosen keys."""
    by_distance: Tensor
    """[B, H, R] attention on the key that lies each distance back, mean over the queries that `sampled_queries`
    picks."""
    entropy: Tensor | None
    """[B, H, T] -sum_s a log a of each query."""
    mixing: Tensor | None
    """[B, H, T] sum_s a^2 of each query."""
    weighted_mixing: Tensor | None
    """[B, H, T] sum_s a^2 w_s for the given key weights."""


@dataclass(frozen=True, kw_only=True)
class AttentionRule:
    """How scores are made from queries and keys in one layer."""

    scaling: float
    window: int | None = None
    """A query sees itself and window - 1 keys before it."""
    softcap: float | None = None
    sink_logits: Tensor | None = None
    """[H] learned logits that take part in the softmax and have no key."""
    edits: tuple[RowEdit, ...] = ()
    """Queries that see other keys; `read_attention` honours them."""
    sigmoid_bias: float | None = None
    """Where it is there, a weight is sigmoid(score + bias), whatever the other keys: no softmax."""


@dataclass(frozen=True, kw_only=True)
class ReadingRequest:
    """Which readings are wanted."""

    keys: Tensor | None = None
    """[P] chosen key positions; None reads every key, and then the row readings too."""
    distances: tuple[int, ...] = ()
    key_weights: Tensor | None = None
    """[K, S] weights of `weighted_mixing`."""
    beside: Callable[..., contextlib.AbstractContextManager] = contextlib.nullcontext
    """Where what is read after the attention itself may run; called with the tensors it reads."""


@lru_cache(maxsize=64)
def sampled_queries(length: int, device: torch.device) -> Tensor:
    """[n] sorted queries at which attention by distance and the lock are read; all of them in a short text.

    Kept per device: a copy from the host would make every layer wait for the one before.
    """
    return torch.linspace(0, length - 1, min(length, SAMPLED_QUERIES)).long().to(device)


def distances(length: int) -> tuple[int, ...]:
    """How far back attention by distance is read: 0 to 4, then powers of two."""
    return tuple(d for d in (0, 1, 2, 3, 4, *(2**power for power in range(3, 40))) if d < length)


@lru_cache(maxsize=64)
def distance_tensor(distances: tuple[int, ...], device: torch.device) -> Tensor:
    """[R] the distances, kept per device for the same reason."""
    return torch.tensor(distances, dtype=torch.long, device=device)


@torch.no_grad()
def tiled_attention(
    query_BHTD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, rule: AttentionRule, request: ReadingRequest
) -> AttentionReading:
    """Attention and its readings, in float32, or in float64 for float64 inputs."""
    num_batch, num_heads, num_queries, _ = query_BHTD.shape
    num_kv_heads = key_BKSD.shape[1]
    num_groups = num_heads // num_kv_heads
    kind = {"dtype": torch.promote_types(query_BHTD.dtype, torch.float32), "device": query_BHTD.device}
    query_NGTD = query_BHTD.to(**kind).reshape(-1, num_groups, num_queries, query_BHTD.shape[-1])
    key_NSD, value_NSD = (x.to(**kind).flatten(0, 1) for x in (key_BKSD, value_BKSD))
    num_pairs = key_NSD.shape[0]
    rows = (num_pairs, num_groups, num_queries)
    keys_P = request.keys

    output_NGTD = torch.empty(*rows, value_NSD.shape[-1], dtype=value_BKSD.dtype, device=value_BKSD.device)
    received_NGS = torch.zeros(num_pairs, num_groups, num_queries if keys_P is None else len(keys_P), **kind)
    # What each tile leaves of a row; what follows from it is worked out for all rows together, after the last tile.
    largest_NGT, total_NGT, dots_NGT, norm_NGT, weighted_NGT = torch.empty(5, *rows, **kind)
    softmax = rule.sink_logits is None and rule.sigmoid_bias is None
    whole_NGT = total_NGT if softmax else torch.ones_like(total_NGT)
    weights_NS = None if request.key_weights is None else request.key_weights.to(**kind).repeat(num_batch, 1)
    sinks_NG = None
    if rule.sink_logits is not None:
        sinks_NG = rule.sink_logits.to(**kind).view(1, num_kv_heads, num_groups).expand(num_batch, -1, -1).flatten(0, 1)

    keys_per_tile = num_queries if rule.window is None else min(num_queries, rule.window + TILE_QUERIES)
    # Long rows: fewer queries.
    fitting = max(16, min(TILE_QUERIES, num_queries // 4, TILE_ELEMENTS // (num_groups * keys_per_tile)))
    queries_per_tile = min(num_queries, 1 << (fitting.bit_length() - 1))
    size = num_groups * queries_per_tile * keys_per_tile
    buffers = torch.empty(2, min(num_pairs * size, max(size, TILE_ELEMENTS)), **kind)
    queries_n = sampled_queries(num_queries, query_BHTD.device)
    weights_NGnR = torch.empty(num_pairs, num_groups, len(queries_n), len(request.distances), **kind)
    places = _places_by_distance(num_queries, queries_per_tile, rule.window, request.distances, query_BHTD.device)
    future = torch.full((queries_per_tile, queries_per_tile), HIDDEN, **kind).triu_(1)

    for start, (sampled, places_nR) in zip(range(0, num_queries, queries_per_tile), places, strict=True):
        stop = min(start + queries_per_tile, num_queries)
        low = 0 if rule.window is None else max(0, start - rule.window + 1)
        edges = [slice(start - low, None)] if rule.window is None else [slice(start - low, None), slice(stop - start)]
        pairs_per_tile = max(1, buffers.shape[1] // (num_groups * (stop - start) * (stop - low)))
        for pairs in _slices(num_pairs, pairs_per_tile):
            here = (pairs, slice(None), slice(start, stop))
            queries = query_NGTD[here] * rule.scaling
            shape = (*queries.shape[:3], stop - low)
            scores, tile = (buffer[: torch.Size(shape).numel()].view(shape) for buffer in buffers)
            torch.bmm(queries.flatten(1, 2), key_NSD[pairs, low:stop].mT, out=scores.flatten(1, 2))
            if rule.softcap is not None:
                scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
            _mask(scores, future, start, low, rule.window)

            largest = torch.amax(scores, -1, out=largest_NGT[here])
            if rule.sigmoid_bias is not None:
                # The logarithms of the weights themselves, so that what follows divides them by nothing.
                scores.copy_(logsigmoid(scores.add_(rule.sigmoid_bias)))
                largest.zero_()
            if sinks_NG is not None:
                torch.maximum(largest, sinks_NG[pairs, :, None], out=largest)
            scores -= largest.unsqueeze(-1)
            # On arguments that underflow a vectorised exp is many times slower. What is hidden stands at the tile's two
            # edges, and e^-80 of a row's largest weight is nothing.
            for edge in edges:
                scores[..., edge].clamp_(min=FAINTEST)
            torch.exp(scores, out=tile)
            total = torch.sum(tile, -1, out=total_NGT[here])
            whole = whole_NGT[here]
            if sinks_NG is not None:
                torch.add(total, torch.exp(sinks_NG[pairs, :, None] - largest), out=whole)
            inverse = whole.reciprocal()

            aggregation = torch.bmm(tile.flatten(1, 2), value_NSD[pairs, low:stop]).view(*shape[:3], -1)
            torch.mul(aggregation, inverse.unsqueeze(-1), out=output_NGTD[here])
            if places_nR.numel() > 0:
                flat = tile.view(-1, shape[2] * shape[3])  # selecting is four times faster from two dimensions
                chosen = flat.index_select(1, places_nR.flatten())
                weights_NGnR[pairs, :, sampled] = chosen.view(*shape[:2], *places_nR.shape)
            if keys_P is not None:
                received_NGS[pairs] += _at_keys(tile, inverse, keys_P, low, stop)
                continue
            received_NGS[pairs, :, low:stop] += torch.matmul(inverse.unsqueeze(-2), tile).squeeze(-2)
            torch.sum(scores.mul_(tile), -1, out=dots_NGT[here])
            torch.linalg.vector_norm(tile, dim=-1, out=norm_NGT[here])
            if weights_NS is not None:
                squares = torch.mul(tile, tile, out=scores).flatten(1, 2)
                weighted = torch.matmul(squares, weights_NS[pairs, low:stop, None]).view(shape[:3])
                torch.mul(weighted, inverse.square(), out=weighted_NGT[here])

    def by_head(x_NG: Tensor) -> Tensor:
        return x_NG.view(num_batch, num_heads, *x_NG.shape[2:])

    every_key = keys_P is None
    log_whole_NGT = whole_NGT.log()
    weights_NGnR /= whole_NGT.index_select(2, queries_n).unsqueeze(-1)
    return AttentionReading(
        output=by_head(output_NGTD).transpose(1, 2),
        received=by_head(received_NGS),
        by_distance=by_head(_mean_by_distance(weights_NGnR, queries_n, rule.window, request.distances)),
        # -sum a log a with log a = score - largest - log whole; a row may add up to less than 1 (learned sinks).
        entropy=by_head((total_NGT * log_whole_NGT - dots_NGT) / whole_NGT) if every_key else None,
        mixing=by_head((norm_NGT / whole_NGT).square()) if every_key else None,
        weighted_mixing=by_head(weighted_NGT) if every_key and weights_NS is not None else None,
    )


def _slices(length: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


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


def _mean_by_distance(
    weights_NGnR: Tensor, queries_n: Tensor, window: int | None, distances: tuple[int, ...]
) -> Tensor:
    """[N, G, R] attention on the key each distance back, mean over the sampled queries that have one."""
    distances_R = distance_tensor(distances, queries_n.device)
    has_key_nR = queries_n[:, None] >= distances_R
    seen_nR = has_key_nR if window is None else has_key_nR & (distances_R < window)
    return torch.where(seen_nR, weights_NGnR, 0).sum(2) / has_key_nR.sum(0)


def _at_keys(tile_NGnS: Tensor, inverse_NGn: Tensor, keys_P: Tensor, low: int, stop: int) -> Tensor:
    """[N, G, P] attention on chosen keys, summed over the tile's queries."""
    seen = ((keys_P >= low) & (keys_P < stop)).to(tile_NGnS.dtype)
    columns = tile_NGnS[..., (keys_P - low).clamp(0, stop - low - 1)]
    return torch.einsum("bgnp,bgn->bgp", columns, inverse_NGn) * seen
