"""HeadRMSNorm: the value aggregation of each head divided by its root mean square, before the output projection.

Axes: H heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sinkscope.kernels.head_rms_norm import EPS, head_rms_norm


class HeadRMSNorm(nn.Module):
    """o / RMS(o) * lambda per head; lambda is shared across heads unless `per_head`, and an offset may be added."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        *,
        per_head: bool = False,
        offset: bool = False,
        initial_lambda: float = 1.0,
        eps: float = EPS,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_size = num_heads, head_size
        self.initial_lambda, self.eps = initial_lambda, eps
        shape = (num_heads, head_size) if per_head else (head_size,)
        self.weight = nn.Parameter(torch.full(shape, float(initial_lambda)))
        self.offset = nn.Parameter(torch.zeros(shape)) if offset else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., H * D] from heads [..., H, D]."""
        return head_rms_norm(x, self.weight, self.offset, eps=self.eps)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_size={self.head_size}, lambda={tuple(self.weight.shape)}"
