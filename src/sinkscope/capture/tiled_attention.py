"""Exact causal attention in tiles of queries, read while it is computed: nothing of size T x T is ever held.

One tile holds the scores of a few queries with all keys they may see. Its softmax gives the value aggregation, and
before it is dropped the attention received by each key, the row entropies and the sums of squared weights. Output and
readings thus share one `q k^T`, so on a CPU reading costs a few passes over a tile that lies in the cache.

Axes: B batch, H query heads, K key-value heads, G query heads per key-value head, T query position, S key position, D
head size, N = B * K, n queries of a tile, P chosen keys, R distances.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sinkscope.capture.attention_request import AttentionReading, AttentionRule, ReadingRequest
from sinkscope.capture.tile_readers import Rows, Tile, TilesInC, TilesInTorch

TILE_ELEMENTS = 1 << 21
"""Scores in one tile at most: large enough that the threads of one operation have work to share, and still in the
cache."""
TILE_QUERIES = 128
"""Queries in one tile at most, and no more than a quarter of them: what a tile computes behind its diagonal is lost."""


@torch.no_grad()
def tiled_attention(
    query_BHTD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, rule: AttentionRule, request: ReadingRequest
) -> AttentionReading:
    """Attention and its readings, in float32, or in float64 for float64 inputs."""
    num_batch, num_heads, num_queries, _ = query_BHTD.shape
    num_kv_heads = key_BKSD.shape[1]
    num_groups = num_heads // num_kv_heads
    kind = {"dtype": torch.promote_types(query_BHTD.dtype, torch.float32), "device": query_BHTD.device}
    query_NGTD = query_BHTD.to(**kind).unflatten(1, (num_kv_heads, num_groups)).flatten(0, 1)
    key_NSD, value_NSD = (x.to(**kind).flatten(0, 1) for x in (key_BKSD, value_BKSD))
    num_pairs = key_NSD.shape[0]
    weights_NS = None
    if request.key_weights is not None:
        weights_NS = request.key_weights.to(**kind).expand(num_kv_heads, num_queries).repeat(num_batch, 1)
    sinks_NG = None
    if rule.sink_logits is not None:
        sinks_NG = rule.sink_logits.to(**kind).view(1, num_kv_heads, num_groups).repeat(num_batch, 1, 1).flatten(0, 1)

    keys_per_tile = num_queries if rule.window is None else min(num_queries, rule.window + TILE_QUERIES)
    # Long rows: fewer queries.
    fitting = max(16, min(TILE_QUERIES, num_queries // 4, TILE_ELEMENTS // (num_groups * keys_per_tile)))
    queries_per_tile = min(num_queries, 1 << (fitting.bit_length() - 1))
    size = num_groups * queries_per_tile * keys_per_tile
    buffer = torch.empty(min(num_pairs * size, max(size, TILE_ELEMENTS)), **kind)
    # Positions first in memory, as the model wants them of a single sequence.
    output_TNGD = value_BKSD.new_empty(num_queries, num_pairs, num_groups, value_NSD.shape[-1])
    output_NGTD = output_TNGD.permute(1, 2, 0, 3)
    rows = Rows(
        rule=rule,
        request=request,
        query_NGTD=query_NGTD,
        sinks_NG=sinks_NG,
        weights_NS=weights_NS,
        queries_per_tile=queries_per_tile,
    )
    reader = (TilesInC if TilesInC.takes(query_BHTD, rule) else TilesInTorch)(rows)
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

    def by_head(x_NG: Tensor) -> Tensor:
        return x_NG.view(num_batch, num_heads, *x_NG.shape[2:])

    readings, every_key = reader.readings(), request.keys is None
    return AttentionReading(
        output=by_head(output_NGTD).transpose(1, 2),
        received=by_head(readings.received),
        by_distance=by_head(readings.by_distance),
        entropy=by_head(readings.entropy) if every_key else None,
        mixing=by_head(readings.mixing) if every_key else None,
        weighted_mixing=by_head(readings.weighted_mixing) if every_key and weights_NS is not None else None,
    )


def _slices(length: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]
