"""The cross entropy over a vocabulary, computed in chunks of tokens together with its gradients.

Logits are the largest tensor of a small language model. Here those of one chunk are held at a time, in the dtype of
the matrix products, and the backward pass has nothing left to recompute: what a chunk's logits are needed for is done
while they are there. Axes: N tokens, n tokens of a chunk, E width, V vocabulary, W vocabulary padded for alignment.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_TOKENS = 8192
"""Large enough for full matrix units, small enough that the logits stay under a gigabyte at 50,000 tokens."""
ALIGNMENT = 64
"""Columns of the logits are padded to a multiple of this: unaligned rows halve the speed of the matrix products."""


def vocabulary_loss(hidden_NE: Tensor, weight_VE: Tensor, targets_N: Tensor) -> Tensor:
    """The mean cross entropy of the targets under softmax(hidden weight^T), in float32."""
    return _VocabularyLoss.apply(hidden_NE, weight_VE, targets_N)  # type: ignore[return-value]


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NE: Tensor, weight_VE: Tensor, targets_N: Tensor) -> Tensor:
        device = hidden_NE.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight_VE.dtype
        vocab_size, num_tokens = weight_VE.shape[0], hidden_NE.shape[0]
        with_gradients = any(ctx.needs_input_grad[:2])
        with torch.autocast(device, enabled=False):
            padding = -vocab_size % ALIGNMENT
            weight_WE = torch.nn.functional.pad(weight_VE.to(dtype), (0, 0, 0, padding))
            hidden_NE = hidden_NE.to(dtype)
            chunk_loss = _compiled_chunk_loss if device == "cuda" else _chunk_loss
            total = torch.zeros((), dtype=torch.float32, device=hidden_NE.device)
            grad_hidden_NE = torch.empty_like(hidden_NE)
            grad_weight_VE = torch.zeros_like(weight_VE, dtype=_wide(weight_VE))
            for start in range(0, num_tokens, CHUNK_TOKENS):
                chunk = slice(start, start + CHUNK_TOKENS)
                hidden_nE = hidden_NE[chunk]
                loss, grad_nW = chunk_loss(hidden_nE @ weight_WE.T, targets_N[chunk], vocab_size, num_tokens)
                total += loss
                if with_gradients:
                    grad_hidden_NE[chunk] = grad_nW @ weight_WE
                    grad_weight_VE += (grad_nW.T @ hidden_nE)[:vocab_size]
        ctx.weight_dtype = weight_VE.dtype
        if with_gradients:
            ctx.save_for_backward(grad_hidden_NE, grad_weight_VE)
        return total

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        grad_hidden_NE, grad_weight_VE = ctx.saved_tensors
        scale = grad_outputs[0]
        return grad_hidden_NE * scale, (grad_weight_VE * scale).to(ctx.weight_dtype), None


def _chunk_loss(logits_nW: Tensor, targets_n: Tensor, vocab_size: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    """(the chunk's part of the mean loss, its gradient with respect to the logits, in the logits' dtype)."""
    column_W = torch.arange(logits_nW.shape[1], device=logits_nW.device)
    wide_nW = torch.where(column_W < vocab_size, logits_nW.to(_wide(logits_nW)), float("-inf"))
    log_sum_n = torch.logsumexp(wide_nW, dim=-1)
    is_target_nW = column_W == targets_n[:, None]
    loss = (log_sum_n - torch.where(is_target_nW, wide_nW, 0.0).sum(-1)).sum() / num_tokens
    gradient_nW = ((wide_nW - log_sum_n[:, None]).exp() - is_target_nW.to(wide_nW.dtype)) / num_tokens
    return loss, gradient_nW.to(logits_nW.dtype)


def _wide(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


_compiled_chunk_loss = torch.compile(_chunk_loss, dynamic=False)
