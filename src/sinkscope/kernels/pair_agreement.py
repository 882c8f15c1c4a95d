"""How pairs of samples agree in two columns: the counts of Kendall's tau, from the comparison of all pairs.

Axes: N samples, C columns, I and J samples of a tile. Of a pair i > j, sign x = [x_i > x_j] - [x_i < x_j]:

    agreement    sum of sign x sign y: concordant - discordant pairs
    untied x     sum of (sign x)^2, likewise y

Signs are of comparisons, not of differences, which can underflow to zero. Every program counts in int32 and writes its
own sums, which are added in int64: no result depends on the order in which programs end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sinkscope.kernels.launch import HAS_TRITON, launch

if TYPE_CHECKING or HAS_TRITON:
    import triton
    import triton.language as tl

BLOCK_I, BLOCK_J = 32, 64  # three int32 counts of 16 pairs in each of 128 threads: 48 registers
PAIRS_AT_ONCE = 1 << 27


def pair_agreement(x_NC: Tensor, y_NC: Tensor) -> Tensor:
    """int64 [3, C]: agreement, pairs not tied in x, pairs not tied in y."""
    return triton_pair_agreement(x_NC, y_NC) if x_NC.is_cuda and HAS_TRITON else pair_agreement_plain(x_NC, y_NC)


def pair_agreement_plain(x_NC: Tensor, y_NC: Tensor) -> Tensor:
    """The definition, some rows of all pairs at a time; without Triton the way on a GPU."""
    num_samples, num_columns = x_NC.shape
    sums_3C = torch.zeros(3, num_columns, dtype=torch.int64, device=x_NC.device)
    rows = max(1, PAIRS_AT_ONCE // max(1, num_samples * num_columns))
    for start in range(0, num_samples, rows):
        x, y = (
            (v[start : start + rows, None] > v).to(torch.int8) - (v[start : start + rows, None] < v).to(torch.int8)
            for v in (x_NC, y_NC)
        )
        sums_3C += torch.stack([product.sum((0, 1), dtype=torch.int64) for product in (x * y, x * x, y * y)])
    return sums_3C.div(2, rounding_mode="floor")  # every pair was counted from both ends


def triton_pair_agreement(x_NC: Tensor, y_NC: Tensor) -> Tensor:
    """The same by one launch: a program compares a few samples of a column with all before them."""
    num_samples, num_columns = x_NC.shape
    num_blocks = -(-num_samples // BLOCK_I)
    # One kernel for all narrower numbers, whose order float32 keeps.
    columns = [(v if v.dtype == torch.float64 else v.float()).t().contiguous() for v in (x_NC, y_NC)]
    sums_P3C = torch.empty(num_blocks, 3, num_columns, dtype=torch.int32, device=x_NC.device)
    if sums_P3C.numel() > 0:
        launch(
            _agreement_kernel,
            (num_columns, num_blocks, 1),
            (*columns, sums_P3C),
            (num_samples, num_columns),
            (BLOCK_I, BLOCK_J),
            num_warps=4,
        )
    return sums_P3C.sum(0, dtype=torch.int64)


def _jit(function: Any) -> Any:
    """Compiles once for all numbers of samples and columns."""
    counts = ["num_samples", "num_columns"]
    return triton.jit(do_not_specialize=counts)(function) if HAS_TRITON else function


@_jit
def _agreement_kernel(x, y, sums, num_samples, num_columns, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr):
    """One program: BLOCK_I samples of one column, each with all samples before it."""
    c = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    x += c * num_samples
    y += c * num_samples
    i = block * BLOCK_I + tl.arange(0, BLOCK_I)
    x_I = tl.load(x + i, mask=i < num_samples, other=0.0)
    y_I = tl.load(y + i, mask=i < num_samples, other=0.0)
    agreement = tl.zeros([BLOCK_I, BLOCK_J], tl.int32)
    untied_x = tl.zeros([BLOCK_I, BLOCK_J], tl.int32)
    untied_y = tl.zeros([BLOCK_I, BLOCK_J], tl.int32)
    for start in tl.range(0, (block + 1) * BLOCK_I, BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)
        x_J = tl.load(x + j, mask=j < num_samples, other=0.0)
        y_J = tl.load(y + j, mask=j < num_samples, other=0.0)
        pair = (j[None, :] < i[:, None]) & (i[:, None] < num_samples)
        sign_x = (x_I[:, None] > x_J[None, :]).to(tl.int32) - (x_I[:, None] < x_J[None, :]).to(tl.int32)
        sign_y = (y_I[:, None] > y_J[None, :]).to(tl.int32) - (y_I[:, None] < y_J[None, :]).to(tl.int32)
        sign_x = tl.where(pair, sign_x, 0)
        sign_y = tl.where(pair, sign_y, 0)
        agreement += sign_x * sign_y
        untied_x += sign_x * sign_x
        untied_y += sign_y * sign_y
    sums += block.to(tl.int64) * 3 * num_columns + c
    tl.store(sums, tl.sum(tl.sum(agreement, 1), 0))
    tl.store(sums + num_columns, tl.sum(tl.sum(untied_x, 1), 0))
    tl.store(sums + 2 * num_columns, tl.sum(tl.sum(untied_y, 1), 0))
