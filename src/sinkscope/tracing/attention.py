"""Computes a layer's attention and what is recorded of it, by the best path there is, and names that path.

On CUDA the fused attention of torch gives the aggregation and the log-sum-exp, and a Triton kernel finds the rest in
one more pass over q k^T. Everywhere else, and for scores that the fused attention cannot make (soft-capping), tiles
of matrix products do both at once.
Axes: B batch, H query heads, K key-value heads, G query heads per key-value head, T query position, S key position, D
head size, P chosen keys, R distances, n queries at which distances are measured.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from sinkscope.kernels.attention_received import attention_received, reason_not_to_run, received_by_keys
from sinkscope.tracing.attention_rule import (
    AttentionReading,
    AttentionRule,
    ReadingRequest,
    distance_tensor,
    sampled_queries,
)
from sinkscope.tracing.edited_rows import with_edited_rows
from sinkscope.tracing.tiles import tiled_attention

FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_HEAD_SIZE = 256
DISTANCE_ELEMENTS = 1 << 26
"""Entries of keys at all distances that are held at once."""


def read_attention(
    query_BHTD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, rule: AttentionRule, request: ReadingRequest
) -> tuple[AttentionReading, str]:
    """The reading of one layer, and the name of the path that made it."""
    reason = _not_fused(query_BHTD, rule) if query_BHTD.is_cuda else ""
    if reason is None:
        path, read = "flash attention and a Triton kernel", _fused_attention
    else:
        path, read = f"tiles ({reason})" if reason else "tiles", tiled_attention
    reading = read(query_BHTD, key_BKSD, value_BKSD, rule, request)
    if rule.edits:
        reading = with_edited_rows(reading, query_BHTD, key_BKSD, value_BKSD, rule, request)
    return reading, path


def _not_fused(query_BHTD: Tensor, rule: AttentionRule) -> str | None:
    """Why the fused attention of torch and our kernel cannot be used; None if they can."""
    if rule.softcap is not None:
        return "soft-capped scores"
    if rule.sigmoid_bias is not None:
        return "sigmoid attention"
    if query_BHTD.dtype not in FLASH_DTYPES:
        return f"{str(query_BHTD.dtype).removeprefix('torch.')} on CUDA"
    if query_BHTD.shape[-1] > FLASH_HEAD_SIZE or query_BHTD.shape[-1] % 8:
        return f"head size {query_BHTD.shape[-1]}"
    return reason_not_to_run(query_BHTD)


def _fused_attention(
    query_BHTD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, rule: AttentionRule, request: ReadingRequest
) -> AttentionReading:
    output_BTHD, lse_BHT = _attention_and_log_sum_exp(query_BHTD, key_BKSD, value_BKSD, rule)
    if rule.sink_logits is not None:
        # A learned sink only adds to each row's total: the aggregation shrinks by the share that it takes.
        whole_BHT = torch.logaddexp(lse_BHT, rule.sink_logits.float()[None, :, None])
        output_BTHD = output_BTHD * torch.exp(lse_BHT - whole_BHT).transpose(1, 2).unsqueeze(-1).to(output_BTHD.dtype)
        lse_BHT = whole_BHT
    options = {"scaling": rule.scaling, "window": rule.window}
    entropy = mixing = weighted_mixing = None
    if request.keys is not None:
        received = received_by_keys(query_BHTD, key_BKSD, lse_BHT, request.keys.to(query_BHTD.device), **options)
    else:
        weights_BHS = None
        if request.key_weights is not None:
            groups = query_BHTD.shape[1] // key_BKSD.shape[1]
            weights_HS = request.key_weights.float().repeat_interleave(groups, dim=0)
            weights_BHS = weights_HS.expand(query_BHTD.shape[0], -1, -1)
        received, entropy, mixing, weighted_mixing = attention_received(
            query_BHTD, key_BKSD, lse_BHT, key_weights_BHS=weights_BHS, **options
        )
    own = None
    if request.own:
        same_key_BHTD = key_BKSD.repeat_interleave(query_BHTD.shape[1] // key_BKSD.shape[1], dim=1)
        own = torch.exp((query_BHTD.float() * same_key_BHTD.float()).sum(-1) * rule.scaling - lse_BHT)
    return AttentionReading(
        output=output_BTHD,
        received=received,
        by_distance=attention_by_distance(query_BHTD, key_BKSD, lse_BHT, rule, request.distances),
        entropy=entropy,
        mixing=mixing,
        weighted_mixing=weighted_mixing,
        own=own,
    )


def attention_by_distance(
    query_BHTD: Tensor, key_BKSD: Tensor, lse_BHT: Tensor, rule: AttentionRule, distances: tuple[int, ...]
) -> Tensor:
    """[B, H, R] mean over the sampled queries t >= d of the attention of t on t - d, from each query's log-sum-exp."""
    queries_n, back_nR, hidden_nR, count_R = _keys_by_distance(
        query_BHTD.shape[2], rule.window, distances, query_BHTD.device
    )
    num_kv_heads, head_size = key_BKSD.shape[1], key_BKSD.shape[3]
    step = max(1, DISTANCE_ELEMENTS // max(1, back_nR.numel() * num_kv_heads * head_size))
    scores = []
    for few in range(0, len(query_BHTD), step):
        query_BKGnD = query_BHTD[few : few + step, :, queries_n].float().unflatten(1, (num_kv_heads, -1))
        key_BKnRD = key_BKSD[few : few + step, :, back_nR.flatten()].float().unflatten(2, back_nR.shape)
        scores.append(torch.einsum("bkgnd,bknrd->bkgnr", query_BKGnD, key_BKnRD).flatten(1, 2))
    attention_BHnR = torch.exp(torch.cat(scores) * rule.scaling - lse_BHT[:, :, queries_n, None])
    return attention_BHnR.masked_fill(hidden_nR, 0).sum(2) / count_R


@lru_cache(maxsize=64)
def _keys_by_distance(
    length: int, window: int | None, distances: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """([n] sampled queries, [n, R] the key each distance back from them, [n, R] whether it is not there or not seen,
    [R] how many queries have one); the same for all layers."""
    queries_n, distances_R = sampled_queries(length, device), distance_tensor(distances, device)
    back_nR = queries_n[:, None] - distances_R
    has_key_nR = back_nR >= 0
    seen_nR = has_key_nR if window is None else has_key_nR & (distances_R < window)
    return queries_n, back_nR.clamp(min=0), ~seen_nR, has_key_nR.sum(0)


def _attention_and_log_sum_exp(
    query_BHTD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, rule: AttentionRule
) -> tuple[Tensor, Tensor]:
    """(aggregation [B, T, H, D], log-sum-exp [B, H, T]) by the kernel that torch would choose."""
    chosen = torch._fused_sdp_choice(  # pyright: ignore[reportPrivateImportUsage]
        query_BHTD, key_BKSD, value_BKSD, None, 0.0, True, scale=rule.scaling, enable_gqa=True
    )
    if rule.window is None and chosen == SDPBackend.CUDNN_ATTENTION.value:
        output_BHTD, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
            query_BHTD, key_BKSD, value_BKSD, None, True, 0.0, True, False, scale=rule.scaling
        )
        return output_BHTD.transpose(1, 2), lse.view(query_BHTD.shape[:3])
    length, value_size = query_BHTD.shape[2], value_BKSD.shape[-1]
    if value_size < query_BHTD.shape[-1]:  # latent attention: values are shorter than keys, and flash wants one size
        value_BKSD = torch.nn.functional.pad(value_BKSD, (0, query_BHTD.shape[-1] - value_size))
    heads_last = (x.transpose(1, 2) for x in (query_BHTD, key_BKSD, value_BKSD))
    window = {} if rule.window is None else {"window_size_left": rule.window - 1, "window_size_right": 0}
    output_BTHD, lse_BHT, *_ = torch.ops.aten._flash_attention_forward.default(
        *heads_last, None, None, length, length, 0.0, True, False, scale=rule.scaling, **window
    )
    return output_BTHD[..., :value_size], lse_BHT
