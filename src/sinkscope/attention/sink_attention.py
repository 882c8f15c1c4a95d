"""Causal softmax attention with a sink logit per head, by torch's flash attention, forward and backward.

A sink logit z adds exp(z) to a row's total and has no value. With the row's log-sum-exp L over keys, L' = log(e^L +
e^z) is that of the whole row, and the aggregation o shrinks to o' = o exp(L - L'). Flash attention's backward pass
computes the weights again as exp(score - L) and needs rowsum(do * o): given L' and o' in place of L and o it returns
exactly the gradients with the sink. That of the sink itself is dz = -sum over rows of exp(z - L') (do' . o').
Axes: B batch, H heads, T position, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def sink_attention(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, sink_H: Tensor, scaling: float) -> Tensor:
    """[B, H, T, D] the value aggregation of causal attention whose softmax includes the sink logits."""
    return _SinkAttention.apply(q_BHTD, k_BHTD, v_BHTD, sink_H, scaling)  # type: ignore[return-value]


def can_fuse_sink(q: Tensor) -> bool:
    """Whether flash attention takes tensors like these."""
    if q.device.type == "cpu":
        return True
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink_H: Tensor, scaling: float) -> Tensor:
        seed = offset = None
        if q.is_cuda:
            # Nothing is dropped out, but the backward pass asks for the state of the generator all the same.
            outputs = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=scaling)
            o, lse, seed, offset = outputs[0], outputs[1], outputs[6], outputs[7]
        else:
            o, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scaling)
        whole_BHT = torch.logaddexp(lse, sink_H.to(lse.dtype)[:, None])
        o = (o * torch.exp(lse - whole_BHT).unsqueeze(-1)).to(q.dtype)
        ctx.save_for_backward(q, k, v, sink_H, o, whole_BHT, seed, offset)
        ctx.scaling = scaling
        return o

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink_H, o, whole_BHT, seed, offset = ctx.saved_tensors
        do = gradients[0].to(q.dtype)
        if q.is_cuda:
            sizes = (None, None, q.shape[2], k.shape[2])  # no packed sequences, and the lengths
            dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
                do, q, k, v, o, whole_BHT, *sizes, 0.0, True, seed, offset, scale=ctx.scaling
            )
        else:
            dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                do, q, k, v, o, whole_BHT, 0.0, True, scale=ctx.scaling
            )
        share_BHT = torch.exp(sink_H.to(whole_BHT.dtype)[:, None] - whole_BHT)
        dsink_H = -(share_BHT * (do * o).sum(-1, dtype=whole_BHT.dtype)).sum((0, 2))
        return dq, dk, dv, dsink_H.to(sink_H.dtype), None
