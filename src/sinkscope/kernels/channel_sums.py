"""Sums and norms over the rows of a matrix, one number a column.

Axes: N rows, C columns.
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

NORM_ROWS = 96
"""Of the torch path: rows whose squares are added up together. Those of 1,536 columns take half a megabyte."""

ROWS_OF_A_THREAD = 16
"""Of the kernels in C: fewer rows take less time than the sums that a thread leaves."""


def channel_norms(x_NC: Tensor) -> Tensor:
    """[C] Euclidean norms of the columns, in float32 or, of float64, in float64."""
    dtype = torch.promote_types(x_NC.dtype, torch.float32)
    if x_NC.is_cuda and HAS_TRITON and x_NC.element_size() <= 4 and x_NC.stride(1) == 1:
        return triton_channel_sums(x_NC, norms=True)
    if x_NC.is_cuda:
        return torch.linalg.vector_norm(x_NC, dim=0, dtype=dtype)
    if runs_in_c(x_NC) and x_NC.stride(1) == 1:
        return _c_channel_norms(x_NC)
    # On a CPU several times faster than the norm, and squares that are added up in the cache are never written out.
    squares_nC = x_NC.new_zeros(NORM_ROWS, x_NC.shape[1], dtype=dtype)
    for rows_nC in x_NC.split(NORM_ROWS):
        squares_nC[: len(rows_nC)].addcmul_(rows_nC, rows_nC)
    return squares_nC.sum(0).sqrt()


def thread_sums(x_NC: Tensor) -> Tensor:
    """[M, C] room for the sums that M threads of a kernel in C make; few rows are not worth many."""
    num_parts = max(1, min(torch.get_num_threads(), x_NC.shape[0] // ROWS_OF_A_THREAD))
    return x_NC.new_empty(num_parts, x_NC.shape[1], dtype=torch.float64)


def _c_channel_norms(x_NC: Tensor) -> Tensor:
    parts_MC = thread_sums(x_NC)
    call("token_statistics", x_NC, x_NC.stride(0), None, *x_NC.shape, False, None, None, parts_MC, len(parts_MC))
    return parts_MC.sum(0).sqrt_().float()


def triton_channel_sums(x_NC: Tensor, *, norms: bool) -> Tensor:
    """[C] float32 sums of x over the rows, or the columns' norms, by one launch: half the host's time of torch's."""
    num_rows, num_channels = x_NC.shape
    sums_C = x_NC.new_empty(num_channels, dtype=torch.float32)
    launch(
        _channel_kernel,
        (-(-num_channels // 64), 1, 1),
        (x_NC, sums_C),
        (x_NC.stride(0), num_rows, num_channels),
        (64, 64, norms),
        num_warps=8,
    )
    return sums_C


def _jit(function: Any) -> Any:
    """Compiles once for all numbers of rows."""
    return triton.jit(do_not_specialize=["num_rows"])(function) if HAS_TRITON else function


@_jit
def _channel_kernel(
    x, sums, stride_n, num_rows, num_channels, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, NORMS: tl.constexpr
):
    """One program: all rows of BLOCK_C columns."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_row = c[None, :] < num_channels
    total = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    for start in tl.range(0, num_rows, BLOCK_N, num_stages=3):
        n = start + tl.arange(0, BLOCK_N)
        places = n.to(tl.int64)[:, None] * stride_n + c[None, :]
        values = tl.load(x + places, mask=(n < num_rows)[:, None] & in_row, other=0.0).to(tl.float32)
        total += values * values if NORMS else values
    sums_C = tl.sum(total, 0)
    tl.store(sums + c, tl.sqrt(sums_C) if NORMS else sums_C, mask=c < num_channels)
