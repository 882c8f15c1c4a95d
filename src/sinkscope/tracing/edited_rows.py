"""Attention in which an intervention lets some queries see other keys than the causal mask does.

The fast attention runs as usual. The few edited rows are then computed again, with and without the edit, and the
results are corrected by the difference. So an edit costs one row, on every attention path.
Axes: B batch, H query heads, K key-value heads, G query heads per key-value head, q edited queries, S key position, D
head size, R distances.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sinkscope.errors import InputError
from sinkscope.tracing.attention_rule import (
    AttentionReading,
    AttentionRule,
    ReadingRequest,
    distance_tensor,
    sampled_queries,
)
from sinkscope.tracing.edits import RowEdit, check_indices
from sinkscope.tracing.tiles import TILE_ELEMENTS


def with_edited_rows(
    reading: AttentionReading,
    query_BHTD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    rule: AttentionRule,
    request: ReadingRequest,
) -> AttentionReading:
    """The reading as it is when the edited queries see other keys."""
    # Not under the owner's autocast: the few rows are worked out in at least float32.
    with torch.no_grad(), torch.autocast(query_BHTD.device.type, enabled=False):
        return _with_edited_rows(reading, query_BHTD, key_BKSD, value_BKSD, rule, request)


def _with_edited_rows(
    reading: AttentionReading,
    query_BHTD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    rule: AttentionRule,
    request: ReadingRequest,
) -> AttentionReading:
    num_batch, num_heads, length, _ = query_BHTD.shape
    device = query_BHTD.device
    rows = sorted({query for edit in rule.edits for query in edit.queries})
    _check(rule.edits, num_batch, num_heads, length)
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
        allowed_BHqS = _allowed(regular_qS, queries_q, rule.edits, num_batch, num_heads)
        before_BHqS = rule.weights(scores_BHqS, regular_qS)
        after_BHqS = rule.weights(scores_BHqS, allowed_BHqS)
        change_BHqS = after_BHqS - before_BHqS
        output_BHqD = _by_head(after_BHqS, value_BKSD)
        output_BTHD[:, queries_q] = output_BHqD.transpose(1, 2).to(output_BTHD.dtype)
        # alpha is a mean over the queries from a key on: what an earlier query is let see of it does not count.
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


def _check(edits: tuple[RowEdit, ...], num_batch: int, num_heads: int, length: int) -> None:
    named = (
        ("position", length, [index for edit in edits for index in (*edit.queries, *edit.keys)]),
        ("head", num_heads, [index for edit in edits for index in edit.heads or ()]),
        ("sequence", num_batch, [index for edit in edits for index in edit.sequences or ()]),
    )
    for name, count, indices in named:
        check_indices(name, indices, count)


def _by_head(rows_BHqX: Tensor, right_BKXY: Tensor) -> Tensor:
    """[B, H, q, Y] rows of each head times what its key-value head has, which is not repeated for the heads that share
    it: all their rows are multiplied at once."""
    rows_BKnX = rows_BHqX.unflatten(1, (right_BKXY.shape[1], -1)).flatten(2, 3)
    return torch.matmul(rows_BKnX, right_BKXY.to(rows_BHqX.dtype)).view(*rows_BHqX.shape[:3], -1)


def _seen(queries_q: Tensor, length: int, window: int | None) -> Tensor:
    back_qS = queries_q[:, None] - torch.arange(length, device=queries_q.device)
    return back_qS >= 0 if window is None else (back_qS >= 0) & (back_qS < window)


def _allowed(
    regular_qS: Tensor, queries_q: Tensor, edits: tuple[RowEdit, ...], num_batch: int, num_heads: int
) -> Tensor:
    allowed_BHqS = regular_qS.expand(num_batch, num_heads, -1, -1).clone()
    device = regular_qS.device
    for edit in edits:
        keys_S = torch.zeros(regular_qS.shape[1], dtype=torch.bool, device=device)
        keys_S[torch.tensor(edit.keys, dtype=torch.long, device=device)] = True
        rows = torch.isin(queries_q, torch.tensor(edit.queries, device=device)).nonzero().flatten()
        heads = torch.tensor(edit.heads if edit.heads is not None else range(num_heads), device=device)
        sequences = torch.tensor(edit.sequences if edit.sequences is not None else range(num_batch), device=device)
        index = torch.meshgrid(sequences, heads, rows, indexing="ij")
        now = allowed_BHqS[index]
        allowed_BHqS[index] = {"only": keys_S.expand_as(now), "allow": now | keys_S, "block": now & ~keys_S}[edit.mode]
    if not bool(allowed_BHqS.any(-1).all()):
        raise InputError(
            "With this mask a query may attend to no key at all. Leave it at least its own key, as mask_to_self does."
        )
    return allowed_BHqS


def _change_by_distance(change_BHqS: Tensor, queries_q: Tensor, length: int, distances: tuple[int, ...]) -> Tensor:
    """[B, H, R] what the change adds to attention by distance, a mean over sampled queries that have a key there."""
    distances_R, sampled_n = distance_tensor(distances, queries_q.device), sampled_queries(length, queries_q.device)
    num_queries_R = (sampled_n[:, None] >= distances_R).sum(0)
    back_qR = queries_q[:, None] - distances_R
    read_qR = (back_qR >= 0) & torch.isin(queries_q, sampled_n)[:, None]
    index = back_qR.clamp(min=0).expand(*change_BHqS.shape[:2], -1, -1)
    return torch.where(read_qR, change_BHqS.gather(-1, index), 0).sum(2) / num_queries_R
