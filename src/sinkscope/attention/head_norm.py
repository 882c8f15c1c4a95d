"""HeadRMSNorm: the value aggregation of each head divided by its root mean square, before the output projection.

Axes: H heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sinkscope.kernels.head_rms_norm import EPS, Path, head_rms_norm


class HeadRMSNorm(nn.Module):
    """o / RMS(o) * lambda per head; lambda is shared across heads unless `per_head`, and an offset may be added.

    `path` forces the kernel ("triton") or plain torch ("torch"); `head_rms_norm_path` says which one "auto" takes.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        *,
        per_head: bool = False,
        offset: bool = False,
        initial_lambda: float = 1.0,
        eps: float = EPS,
        path: Path = "auto",
    ) -> None:
        super().__init__()
        self.num_heads, self.head_size = num_heads, head_size
        self.initial_lambda, self.eps = initial_lambda, eps
        self.path: Path = path
        shape = (num_heads, head_size) if per_head else (head_size,)
        self.weight = nn.Parameter(torch.full(shape, float(initial_lambda)))
        self.offset = nn.Parameter(torch.zeros(shape)) if offset else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., H * D] from heads [..., H, D]."""
        x_BTHD = x if x.dim() == 4 else x.reshape(1, -1, *x.shape[-2:])
        y_BTC = head_rms_norm(x_BTHD, self.weight, self.offset, eps=self.eps, path=self.path)
        return y_BTC.view(*x.shape[:-2], -1)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_size={self.head_size}, lambda={tuple(self.weight.shape)}"
