"""DomRatio and mean square of each token's channels, one number a token from one read.

Axes: N token, C channel. dom_ratio = max |x| / mean |x|, mean_square = mean of x^2 over the channels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sinkscope.kernels.compiled import call, runs_in_c
from sinkscope.kernels.launch import HAS_TRITON, launch

if TYPE_CHECKING or HAS_TRITON:
    import triton
    import triton.language as tl

WARP_CHANNELS = 1024  # 32 values in each of a warp's threads


def token_dom_ratio(x_NC: Tensor) -> Tensor:
    """[N] max |x| / mean |x|, in float32 or, of float64, in float64."""
    if (by_kernel_N := _by_kernel(x_NC, square=False)) is not None:
        return by_kernel_N
    magnitude_NC = x_NC.abs()  # on a CPU ten times faster than norms of order 1 and infinity
    total_N = magnitude_NC.sum(-1, dtype=torch.promote_types(x_NC.dtype, torch.float32))
    return magnitude_NC.amax(-1).to(total_N.dtype) / total_N * x_NC.shape[1]


def token_mean_square(x_NC: Tensor) -> Tensor:
    """[N] mean of x^2, in float32 or, of float64, in float64."""
    if (by_kernel_N := _by_kernel(x_NC, square=True)) is not None:
        return by_kernel_N
    norm_N = torch.linalg.vector_norm(x_NC, dim=-1, dtype=torch.promote_types(x_NC.dtype, torch.float32))
    return norm_N.square() / x_NC.shape[1]


def _by_kernel(x_NC: Tensor, *, square: bool) -> Tensor | None:
    if _has_kernel(x_NC):
        return triton_means(x_NC, square=square)
    if runs_in_c(x_NC) and x_NC.stride(1) == 1:
        means_N = x_NC.new_empty(len(x_NC))
        call("token_means", x_NC, x_NC.stride(0), *x_NC.shape, square, means_N)
        return means_N
    return None


def _has_kernel(x_NC: Tensor) -> bool:
    return x_NC.is_cuda and HAS_TRITON and x_NC.element_size() <= 4 and x_NC.stride(1) == 1


def triton_means(x_NC: Tensor, *, square: bool) -> Tensor:
    """[N] float32: the mean square or the DomRatio, by one launch."""
    num_tokens, num_channels = x_NC.shape
    block_c = 1 << (num_channels - 1).bit_length()
    means_N = x_NC.new_empty(num_tokens, dtype=torch.float32)
    if num_tokens > 0:
        launch(
            _means_kernel,
            (num_tokens, 1, 1),
            (x_NC, means_N),
            (x_NC.stride(0),),
            (num_channels, block_c, square),
            num_warps=min(16, max(1, block_c // WARP_CHANNELS)),
        )
    return means_N


def _jit(function: Any) -> Any:
    return triton.jit(function) if HAS_TRITON else function


@_jit
def _means_kernel(x, means, stride_n, C: tl.constexpr, BLOCK_C: tl.constexpr, SQUARE: tl.constexpr):
    """One program: one token."""
    n = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    x_C = tl.load(x + n * stride_n + c, mask=c < C, other=0.0).to(tl.float32)
    if SQUARE:
        mean = tl.sum(x_C * x_C, 0) / C
    else:
        magnitude = tl.abs(x_C)
        mean = tl.max(magnitude, 0) / (tl.sum(magnitude, 0) / C)
    tl.store(means + n, mean)
