"""Attention on the key that lies a given distance back, at chosen queries, from q, k and each query's log-sum-exp.

Axes: B batch, H query heads, K key-value heads, T position, D head size, n chosen queries, R distances.
One launch in place of a dozen small operations: on a short text those cost as much as the attention itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sinkscope.kernels.launch import HAS_TRITON, launch

if TYPE_CHECKING or HAS_TRITON:
    import triton
    import triton.language as tl


def attention_by_distance(
    query_BHTD: Tensor,
    key_BKTD: Tensor,
    log_sum_exp_BHT: Tensor,
    queries_n: Tensor,
    distances_R: Tensor,
    *,
    scaling: float,
    window: int | None = None,
) -> Tensor:
    """[B, H, R] float32: mean over the chosen queries t >= d of the attention of t on t - d."""
    batch, num_heads, length, head_size = query_BHTD.shape
    num_distances = distances_R.shape[0]
    result_BHR = query_BHTD.new_empty(batch, num_heads, num_distances, dtype=torch.float32)
    launch(
        _by_distance_kernel,
        (batch * num_heads, num_distances, 1),
        (query_BHTD, key_BKTD, log_sum_exp_BHT.contiguous(), queries_n, distances_R, result_BHR),
        (
            *query_BHTD.stride()[:3], *key_BKTD.stride()[:3], num_heads, num_heads // key_BKTD.shape[1],
            length, queries_n.shape[0], window or length, float(scaling),
        ),
        (head_size, 1 << (head_size - 1).bit_length(), 64),
        num_warps=4,
    )  # fmt: skip
    return result_BHR


def attention_by_distance_plain(
    query_BHTD: Tensor,
    key_BKTD: Tensor,
    log_sum_exp_BHT: Tensor,
    queries_n: Tensor,
    distances_R: Tensor,
    *,
    scaling: float,
    window: int | None = None,
) -> Tensor:
    """The definition, in float64. For tests."""
    key_BHTD = key_BKTD.double().repeat_interleave(query_BHTD.shape[1] // key_BKTD.shape[1], dim=1)
    means = []
    for distance in distances_R.tolist():
        queries = queries_n[queries_n >= distance]
        scores = (query_BHTD[:, :, queries].double() * key_BHTD[:, :, queries - distance]).sum(-1) * scaling
        attention = torch.exp(scores - log_sum_exp_BHT[:, :, queries].double())
        means.append(attention.mean(-1) * (window is None or distance < window))
    return torch.stack(means, dim=-1)


def _jit(function: Any) -> Any:
    """Compiles once for all lengths and head counts."""
    counts = ["num_heads", "group_size", "length", "num_queries", "window"]
    return triton.jit(do_not_specialize=counts)(function) if HAS_TRITON else function


@_jit
def _by_distance_kernel(
    query, key, lse, queries, distances, result,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt,
    num_heads, group_size, length, num_queries, window, scaling,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: one head and one distance, over all chosen queries."""
    bh = tl.program_id(0).to(tl.int64)
    b = bh // num_heads
    h = bh % num_heads
    query += b * stride_qb + h * stride_qh
    key += b * stride_kb + h // group_size * stride_kh
    distance = tl.load(distances + tl.program_id(1))
    d = tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_N], tl.float32)
    count = tl.zeros([BLOCK_N], tl.float32)
    for start in tl.range(0, num_queries, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        t = tl.load(queries + n, mask=n < num_queries, other=-1)
        has_key = t >= distance
        inside = has_key[:, None] & (d[None, :] < D)
        query_ND = tl.load(query + t[:, None] * stride_qt + d[None, :], mask=inside, other=0.0).to(tl.float32)
        key_ND = tl.load(key + (t - distance)[:, None] * stride_kt + d[None, :], mask=inside, other=0.0).to(tl.float32)
        lse_N = tl.load(lse + bh * length + t, mask=has_key, other=0.0)
        score_N = tl.sum(query_ND * key_ND, 1) * scaling - lse_N
        count += has_key.to(tl.float32)
        total += tl.where(has_key & (distance < window), tl.exp(score_N), 0.0)
    mean = tl.sum(total, 0) / tl.sum(count, 0)
    tl.store(result + bh * tl.num_programs(1) + tl.program_id(1), mean)
