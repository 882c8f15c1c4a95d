"""Modules between attention and the output projection, which change the value aggregation of each head.

HeadRMSNorm divides it by its root mean square, HeadScale only scales it, and EqualisedFirst removes the excess variance
of position 0. Axes: B sequences, T positions, H heads, D head size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from sinkscope.arguments import check_count
from sinkscope.errors import InputError
from sinkscope.kernels.head_rms_norm import EPS, Path, head_rms_norm


class HeadRMSNorm(nn.Module):
    """o / RMS(o) * lambda + offset per head, as the paper describes it: each head has its own lambda and offset.

    `per_head=False` shares both among the heads, `offset=False` leaves the offset out, and `fixed` keeps lambda at
    `initial_lambda` (1 leaves the norm alone).

    With `initial_lambda=1`, as in other norms, the heads of a model with random weights write far more than the
    embeddings hold. So the presets of `sinkscope pretrain` begin at 0.25 (docs/variants.md).
    `path` forces the kernel ("triton") or plain torch ("torch"); `head_rms_norm_path` says which one "auto" takes.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        *,
        per_head: bool = True,
        offset: bool = True,
        fixed: bool = False,
        initial_lambda: float = 1.0,
        eps: float = EPS,
        path: Path = "auto",
    ) -> None:
        super().__init__()
        check_count("num_heads", num_heads, 1)
        check_count("head_size", head_size, 1)
        if not math.isfinite(initial_lambda):
            raise InputError(
                f"`initial_lambda` must be a finite number, not {initial_lambda}. Give 0.25, or 1 as in other norms."
            )
        self.num_heads, self.head_size = num_heads, head_size
        self.initial_lambda, self.eps = initial_lambda, eps
        self.path: Path = path
        shape = (num_heads, head_size) if per_head else (head_size,)
        self.weight = nn.Parameter(torch.full(shape, float(initial_lambda)), requires_grad=not fixed)
        self.offset = nn.Parameter(torch.zeros(shape)) if offset else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., H * D] from heads [..., H, D]."""
        if x.shape[-2:] != (self.num_heads, self.head_size):
            raise InputError(
                f"The input must have the shape [..., {self.num_heads}, {self.head_size}], not {list(x.shape)}. "
                "Split its last axis into heads with .unflatten(-1, (num_heads, head_size))."
            )
        x_BTHD = x if x.dim() == 4 else x.reshape(1, -1, *x.shape[-2:])
        y_BTC = head_rms_norm(x_BTHD, self.weight, self.offset, eps=self.eps, path=self.path)
        return y_BTC.view(*x.shape[:-2], -1)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_size={self.head_size}, lambda={tuple(self.weight.shape)}"


class HeadScale(nn.Module):
    """o * lambda per head, without the division. It is the control for HeadRMSNorm: what a small lambda alone does."""

    def __init__(self, head_size: int, *, initial_lambda: float) -> None:
        super().__init__()
        self.initial_lambda = initial_lambda
        self.weight = nn.Parameter(torch.full((head_size,), float(initial_lambda)))

    def forward(self, x: Tensor) -> Tensor:
        """[..., H * D] from heads [..., H, D]."""
        return (x * self.weight.to(x.dtype)).flatten(-2)


class EqualisedFirst(nn.Module):
    """o <- mu + s (o - mu) at position 0 only, s = min(1, sqrt(variance of later positions / variance of position 0)).

    mu [H, D] is the mean of o at position 0 over sequences. A variance is taken over sequences, unbiased, and averaged
    over channels; the later one also over the later half of the positions. All three are running means over training
    batches, and constants to the gradient. Outside training they stay as they are, so that a sequence's output does not
    depend on the others in its batch.
    """

    MEMORY = 0.99
    """Weight of the past in each training batch; the first batches count equally."""

    mean: Tensor
    first_variance: Tensor
    later_variance: Tensor
    num_batches: Tensor

    def __init__(self, num_heads: int, head_size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(num_heads, head_size))
        for name, value in (("first_variance", 1.0), ("later_variance", 1.0), ("num_batches", 0.0)):
            self.register_buffer(name, torch.tensor(value))

    def forward(self, o_BTHD: Tensor, is_first_BT1: Tensor) -> Tensor:
        """[B, T, H, D]; `is_first` says which tokens are at position 0."""
        if self.training and torch.is_grad_enabled() and o_BTHD.shape[0] > 1 and o_BTHD.shape[1] > 1:
            self._follow(o_BTHD.detach())
        wide = o_BTHD.to(torch.promote_types(o_BTHD.dtype, torch.float32))
        shrink = (self.later_variance / self.first_variance.clamp(min=torch.finfo(torch.float32).tiny)).sqrt()
        equalised = self.mean + shrink.clamp(max=1.0) * (wide - self.mean)
        return torch.where(is_first_BT1.unsqueeze(-1), equalised.to(o_BTHD.dtype), o_BTHD)

    @torch.no_grad()
    def _follow(self, o_BTHD: Tensor) -> None:
        """Updates the running means with one training batch."""
        wide = o_BTHD.to(self.mean.dtype)
        self.num_batches.add_(1)
        weight = (1 / self.num_batches).clamp(min=1 - self.MEMORY)
        length = wide.shape[1]
        self.mean.lerp_(wide[:, 0].mean(0), weight)
        self.first_variance.lerp_(wide[:, 0].var(0).mean(), weight)
        self.later_variance.lerp_(wide[:, length - length // 2 :].var(0).mean(), weight)
