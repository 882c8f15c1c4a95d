"""Head-wise RMSNorm of the value aggregation, y = x / sqrt(mean_d x^2 + eps) * weight + offset, per token and head.

Axes: B batch, T position, H heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPS = 1e-6


def head_rms_norm(x_BTHD: Tensor, weight: Tensor, offset: Tensor | None = None, *, eps: float = EPS) -> Tensor:
    """[B, T, H * D] the normalised heads side by side, as the output projection reads them."""
    return head_rms_norm_plain(x_BTHD, weight, offset, eps=eps)


def head_rms_norm_plain(x_BTHD: Tensor, weight: Tensor, offset: Tensor | None = None, *, eps: float = EPS) -> Tensor:
    """The definition, in float32, or in float64 for float64 input."""
    wide_BTHD = x_BTHD.to(torch.promote_types(x_BTHD.dtype, torch.float32))
    y_BTHD = wide_BTHD * torch.rsqrt(wide_BTHD.square().mean(-1, keepdim=True) + eps) * weight
    return (y_BTHD if offset is None else y_BTHD + offset).to(x_BTHD.dtype).flatten(-2)
