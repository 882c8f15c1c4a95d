"""Computes a layer's attention and what is recorded of it, by the fastest path that can, and names that path.

On CUDA, torch's fused attention gives the aggregation and the log-sum-exp, and a Triton kernel finds the rest in one
more pass over q k^T. On other devices, and for scores that the fused attention cannot compute (soft-capping), tiles of
matrix products do both at once (tiles.py).
If an intervention lets some queries see other keys than the causal mask does, attention runs as usual first. Then the
rows of those queries are computed again, with and without the change, and the results are corrected by the difference.
So such a change costs a few rows, on either path.
Axes: B batch, H query heads, K key-value heads, G query heads per key-value head, T query position, S key position, D
head size, P chosen keys, R distances, n queries at which distances are measured, q queries that see other keys.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from sinkscope.errors import InputError
from sinkscope.kernels.attention_received import attention_received, reason_not_to_run, received_by_keys
from sinkscope.tracing.attention_rule import (
    AttentionReading,
    AttentionRule,
    ReadingRequest,
    distance_tensor,
    sampled_queries,
)
from sinkscope.tracing.open_interventions import MaskChange, check_indices
from sinkscope.tracing.tiles import TILE_ELEMENTS, tiled_attention

# What torch's flash attention takes.
FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_HEAD_SIZE = 256
DISTANCE_ELEMENTS = 1 << 26
"""Most entries of the keys at all distances that are gathered at once."""


def read_attention(
    query_BHTD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, rule: AttentionRule, request: ReadingRequest
) -> tuple[AttentionReading, str]:
    """The reading of one layer's attention, and the name of the path that computed it."""
    reason = _not_fused(query_BHTD, rule) if query_BHTD.is_cuda else ""
    if reason is None:
        path, read = "flash attention and a Triton kernel", _fused_attention
    else:
        path, read = f"tiles ({reason})" if reason else "tiles", tiled_attention
    reading = read(query_BHTD, key_BKSD, value_BKSD, rule, request)
    if rule.mask_changes:
        # Without the owner's autocast: these few rows are computed in at least float32.
        with torch.no_grad(), torch.autocast(query_BHTD.device.type, enabled=False):
            reading = with_changed_masks(reading, query_BHTD, key_BKSD, value_BKSD, rule, request)
    return reading, path


def _not_fused(query_BHTD: Tensor, rule: AttentionRule) -> str | None:
    """Why torch's fused attention and our kernel cannot be used, as a part of the path's name; None if they can."""
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
        # A learned sink only adds to each row's total, so the aggregation shrinks by the share that it takes.
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
    """[B, H, R] attention of query t on key t - d, mean over the sampled queries t >= d; each query's log-sum-exp
    normalises its scores."""
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
    """([n] sampled queries, [n, R] the key at each distance back from them, [n, R] whether there is none or it is not
    seen, [R] how many queries have one). The same for all layers, so it is computed once."""
    queries_n, distances_R = sampled_queries(length, device), distance_tensor(distances, device)
    back_nR = queries_n[:, None] - distances_R
    has_key_nR = back_nR >= 0
    seen_nR = has_key_nR if window is None else has_key_nR & (distances_R < window)
    return queries_n, back_nR.clamp(min=0), ~seen_nR, has_key_nR.sum(0)


def _attention_and_log_sum_exp(
    query_BHTD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, rule: AttentionRule
) -> tuple[Tensor, Tensor]:
    """(aggregation [B, T, H, D], log-sum-exp [B, H, T]) by the kernel that torch would choose.

    scaled_dot_product_attention does not return the log-sum-exp, so the operators below it are called.
    """
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


def with_changed_masks(
    reading: AttentionReading,
    query_BHTD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    rule: AttentionRule,
    request: ReadingRequest,
) -> AttentionReading:
    """The reading corrected for the queries that see other keys (`rule.mask_changes`)."""
    num_batch, num_heads, length, _ = query_BHTD.shape
    device = query_BHTD.device
    rows = sorted({query for change in rule.mask_changes for query in change.queries})
    _check_changes(rule.mask_changes, num_batch, num_heads, length)
    output_BTHD, received = reading.output.clone(), reading.received.clone()
    by_distance_BHR = reading.by_distance.clone()
    by_row = {
        name: None if (values := getattr(reading, name)) is None else values.clone()
        for name in ("entropy", "mixing", "weighted_mixing", "own")
    }
    for queries_q in torch.tensor(rows, device=device).split(max(1, TILE_ELEMENTS // (num_batch * num_heads * length))):
        query_BHqD = query_BHTD[:, :, queries_q].to(torch.promote_types(query_BHTD.dtype, torch.float32))
        scores_BHqS = _by_head(query_BHqD, key_BKSD.mT) * rule.scaling
        regular_qS = _seen(queries_q, length, rule.window)
        allowed_BHqS = _allowed(regular_qS, queries_q, rule.mask_changes, num_batch, num_heads)
        before_BHqS = rule.weights(scores_BHqS, regular_qS)
        after_BHqS = rule.weights(scores_BHqS, allowed_BHqS)
        change_BHqS = after_BHqS - before_BHqS
        output_BHqD = _by_head(after_BHqS, value_BKSD)
        output_BTHD[:, queries_q] = output_BHqD.transpose(1, 2).to(output_BTHD.dtype)
        # Attention received is a mean over the queries from a key on. Attention of earlier queries, which an
        # intervention may allow, does not count.
        summed_BHS = change_BHqS.masked_fill(~_seen(queries_q, length, None), 0).sum(2)
        received += summed_BHS if request.keys is None else summed_BHS[..., request.keys.to(device)]
        by_distance_BHR += _change_by_distance(change_BHqS, queries_q, length, request.distances)
        square = after_BHqS.square()
        if by_row["entropy"] is not None:
            by_row["entropy"][:, :, queries_q] = -torch.xlogy(after_BHqS, after_BHqS).sum(-1)
        if by_row["mixing"] is not None:
            by_row["mixing"][:, :, queries_q] = square.sum(-1)
        if by_row["own"] is not None:
            own_BHq = after_BHqS.gather(-1, queries_q.expand(*after_BHqS.shape[:2], -1)[..., None])[..., 0]
            by_row["own"][:, :, queries_q] = own_BHq
        if by_row["weighted_mixing"] is not None and request.key_weights is not None:
            weights_HS = request.key_weights.to(square).repeat_interleave(num_heads // value_BKSD.shape[1], dim=0)
            by_row["weighted_mixing"][:, :, queries_q] = torch.einsum("bhqs,hs->bhq", square, weights_HS)
    return replace(reading, output=output_BTHD, received=received, by_distance=by_distance_BHR, **by_row)


def _check_changes(changes: tuple[MaskChange, ...], num_batch: int, num_heads: int, length: int) -> None:
    """Refuses changes of positions, heads or sequences that are not there."""
    named = (
        ("position", length, [index for change in changes for index in (*change.queries, *change.keys)]),
        ("head", num_heads, [index for change in changes for index in change.heads or ()]),
        ("sequence", num_batch, [index for change in changes for index in change.sequences or ()]),
    )
    for name, count, indices in named:
        check_indices(name, indices, count)


def _by_head(rows_BHqX: Tensor, right_BKXY: Tensor) -> Tensor:
    """[B, H, q, Y] rows of each query head times a matrix of its key-value head. Query heads that share one are
    multiplied at once, so that keys and values need not be repeated."""
    rows_BKnX = rows_BHqX.unflatten(1, (right_BKXY.shape[1], -1)).flatten(2, 3)
    return torch.matmul(rows_BKnX, right_BKXY.to(rows_BHqX.dtype)).view(*rows_BHqX.shape[:3], -1)


def _seen(queries_q: Tensor, length: int, window: int | None) -> Tensor:
    """[q, S] which keys queries see under the causal mask, with or without a window."""
    back_qS = queries_q[:, None] - torch.arange(length, device=queries_q.device)
    return back_qS >= 0 if window is None else (back_qS >= 0) & (back_qS < window)


def _allowed(
    regular_qS: Tensor, queries_q: Tensor, changes: tuple[MaskChange, ...], num_batch: int, num_heads: int
) -> Tensor:
    """[B, H, q, S] which keys queries see with the changes."""
    allowed_BHqS = regular_qS.expand(num_batch, num_heads, -1, -1).clone()
    device = regular_qS.device
    for change in changes:
        keys_S = torch.zeros(regular_qS.shape[1], dtype=torch.bool, device=device)
        keys_S[torch.tensor(change.keys, dtype=torch.long, device=device)] = True
        rows = torch.isin(queries_q, torch.tensor(change.queries, device=device)).nonzero().flatten()
        heads = torch.tensor(change.heads if change.heads is not None else range(num_heads), device=device)
        sequences = torch.tensor(change.sequences if change.sequences is not None else range(num_batch), device=device)
        index = torch.meshgrid(sequences, heads, rows, indexing="ij")
        before = allowed_BHqS[index]
        after = {"only": keys_S.expand_as(before), "allow": before | keys_S, "block": before & ~keys_S}
        allowed_BHqS[index] = after[change.mode]
    if not bool(allowed_BHqS.any(-1).all()):
        raise InputError(
            "With this mask a query may attend to no key at all. Leave it at least its own key, as mask_to_self does."
        )
    return allowed_BHqS


def _change_by_distance(change_BHqS: Tensor, queries_q: Tensor, length: int, distances: tuple[int, ...]) -> Tensor:
    """[B, H, R] what the change adds to attention by distance, as a mean over the sampled queries."""
    distances_R, sampled_n = distance_tensor(distances, queries_q.device), sampled_queries(length, queries_q.device)
    num_queries_R = (sampled_n[:, None] >= distances_R).sum(0)
    back_qR = queries_q[:, None] - distances_R
    read_qR = (back_qR >= 0) & torch.isin(queries_q, sampled_n)[:, None]
    index = back_qR.clamp(min=0).expand(*change_BHqS.shape[:2], -1, -1)
    return torch.where(read_qR, change_BHqS.gather(-1, index), 0).sum(2) / num_queries_R
