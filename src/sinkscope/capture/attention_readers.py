"""Chooses how a layer's attention is computed and read, and says which way it took.

On CUDA the fused attention of torch gives the aggregation and the log-sum-exp, and a Triton kernel reads the rest in
one more pass over q k^T. Everywhere else, and for scores that the fused attention cannot make (soft-capping), tiles
of matrix products do both at once.
Axes: B batch, H query heads, K key-value heads, G query heads per key-value head, T query position, S key position, D
head size, P chosen keys, R distances, n queries at which distances are read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sinkscope.capture.tiled_attention import (
    AttentionReading,
    AttentionRule,
    ReadingRequest,
    distance_queries,
    tiled_attention,
)
from sinkscope.kernels.attention_received import attention_received, received_by_keys

FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_HEAD_SIZE = 256


def read_attention(
    query_BHTD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, rule: AttentionRule, request: ReadingRequest
) -> tuple[AttentionReading, str]:
    """The reading of one layer, and the name of the path that made it."""
    if not query_BHTD.is_cuda:
        return tiled_attention(query_BHTD, key_BKSD, value_BKSD, rule, request), "tiles"
    reason = _not_fused(query_BHTD, rule)
    if reason is not None:
        return tiled_attention(query_BHTD, key_BKSD, value_BKSD, rule, request), f"tiles ({reason})"
    return _fused_attention(query_BHTD, key_BKSD, value_BKSD, rule, request), "flash attention and a Triton kernel"


def _not_fused(query_BHTD: Tensor, rule: AttentionRule) -> str | None:
    """Why the fused attention of torch cannot be used, if so."""
    if rule.softcap is not None:
        return "soft-capped scores"
    if query_BHTD.dtype not in FLASH_DTYPES:
        return f"{str(query_BHTD.dtype).removeprefix('torch.')} on CUDA"
    if query_BHTD.shape[-1] > FLASH_HEAD_SIZE or query_BHTD.shape[-1] % 8:
        return f"head size {query_BHTD.shape[-1]}"
    return None


def _fused_attention(
    query_BHTD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, rule: AttentionRule, request: ReadingRequest
) -> AttentionReading:
    length, value_size = query_BHTD.shape[2], value_BKSD.shape[-1]
    if (
        value_size < query_BHTD.shape[-1]
    ):  # latent attention: values are shorter than keys, and the fused kernel wants one size
        value_BKSD = torch.nn.functional.pad(value_BKSD, (0, query_BHTD.shape[-1] - value_size))
    window = (-1, -1) if rule.window is None else (rule.window - 1, 0)
    output_BTHD, lse_BHT, *_ = torch.ops.aten._flash_attention_forward(
        query_BHTD.transpose(1, 2),
        key_BKSD.transpose(1, 2),
        value_BKSD.transpose(1, 2),
        None,
        None,
        length,
        length,
        0.0,
        True,
        False,
        scale=rule.scaling,
        window_size_left=window[0],
        window_size_right=window[1],
    )
    output_BTHD = output_BTHD[..., :value_size]
    if rule.sink_logits is not None:
        # A learned sink only adds to each row's total: the aggregation shrinks by the share that it takes.
        whole_BHT = torch.logaddexp(lse_BHT, rule.sink_logits.float()[None, :, None])
        output_BTHD = output_BTHD * torch.exp(lse_BHT - whole_BHT).transpose(1, 2).unsqueeze(-1).to(output_BTHD.dtype)
        lse_BHT = whole_BHT
    by_distance = _by_distance(query_BHTD, key_BKSD, lse_BHT, rule, request.distances)
    options = {"scaling": rule.scaling, "window": rule.window}
    if request.keys is not None:
        received = received_by_keys(query_BHTD, key_BKSD, lse_BHT, request.keys.to(query_BHTD.device), **options)
        return AttentionReading(
            output=output_BTHD,
            received=received,
            by_distance=by_distance,
            entropy=None,
            mixing=None,
            weighted_mixing=None,
        )
    weights_BHS = None
    if request.key_weights is not None:
        groups = query_BHTD.shape[1] // key_BKSD.shape[1]
        weights_BHS = request.key_weights.float().repeat_interleave(groups, dim=0).expand(query_BHTD.shape[0], -1, -1)
    reductions = attention_received(query_BHTD, key_BKSD, lse_BHT, key_weights_BHS=weights_BHS, **options)
    return AttentionReading(
        output=output_BTHD,
        received=reductions.received_sum,
        by_distance=by_distance,
        entropy=reductions.entropy,
        mixing=reductions.mixing,
        weighted_mixing=reductions.weighted_mixing,
    )


def _by_distance(
    query_BHTD: Tensor, key_BKSD: Tensor, lse_BHT: Tensor, rule: AttentionRule, distances: tuple[int, ...]
) -> Tensor:
    """[B, H, R] attention on the key each distance back, mean over the sampled queries that have one."""
    length, groups = query_BHTD.shape[2], query_BHTD.shape[1] // key_BKSD.shape[1]
    device = query_BHTD.device
    queries_n = distance_queries(length).to(device)
    distances_R = torch.tensor(distances, device=device)
    back_nR = queries_n[:, None] - distances_R
    seen_nR = back_nR >= 0
    if rule.window is not None:
        seen_nR = seen_nR & (distances_R < rule.window)
    keys_BKnRD = key_BKSD[:, :, back_nR.clamp(min=0)]
    queries_BKnGD = query_BHTD[:, :, queries_n].unflatten(1, (-1, groups)).transpose(2, 3)
    scores_BKnGR = torch.matmul(queries_BKnGD, keys_BKnRD.transpose(-1, -2)).float() * rule.scaling
    lse_BKnG = lse_BHT[:, :, queries_n].unflatten(1, (-1, groups)).transpose(2, 3)
    weights = torch.exp(scores_BKnGR - lse_BKnG.unsqueeze(-1)) * seen_nR[None, None, :, None, :]
    return weights.sum(2).flatten(1, 2) / (back_nR >= 0).sum(0)
