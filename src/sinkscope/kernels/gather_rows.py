"""The rows of tensors at some positions: what index_select gives, on CUDA up to three tensors by one launch.

Axes: R leading axis (heads, or one), T position, D channel, n chosen positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from sinkscope.kernels.launch import HAS_TRITON, launch

if TYPE_CHECKING or HAS_TRITON:
    import triton
    import triton.language as tl

MOST_AT_ONCE = 3


def gather_rows(*picks: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Of each tensor [..., T, D] the rows at the positions [n] that stand beside it, [..., n, D]."""
    if all(_has_kernel(x) for x, _ in picks):
        return triton_gather_rows(*picks)
    return [x.index_select(-2, index_n) for x, index_n in picks]


def _has_kernel(x: Tensor) -> bool:
    return x.is_cuda and HAS_TRITON and x.stride(-1) == 1 and x.shape[:-3].numel() == 1


def triton_gather_rows(*picks: tuple[Tensor, Tensor]) -> list[Tensor]:
    """The same by one launch; no axis before the third last may be longer than 1."""
    rows = [x.new_empty(*x.shape[:-2], len(index_n), x.shape[-1]) for x, index_n in picks]
    tensors, numbers, most_rows = [], [], 0
    for (x, index_n), out in zip(picks, rows, strict=True):
        tensors += [x, index_n, out]
        num_leading, stride_r = (x.shape[-3], x.stride(-3)) if x.dim() > 2 else (1, 0)
        numbers += [num_leading * len(index_n), len(index_n), stride_r, x.stride(-2), x.shape[-1]]
        most_rows = max(most_rows, num_leading * len(index_n))
    for _ in range(MOST_AT_ONCE - len(picks)):
        tensors += tensors[:3]
        numbers += [0, 1, 0, 0, 0]
    if most_rows > 0:
        launch(_gather_kernel, (most_rows, len(picks), 1), tuple(tensors), tuple(numbers), (256,), num_warps=1)
    return rows


def _jit(function: Any) -> Any:
    return triton.jit(function) if HAS_TRITON else function


@_jit
def _gather_kernel(
    x_0, index_0, out_0, x_1, index_1, out_1, x_2, index_2, out_2,
    rows_0, n_0, stride_r_0, stride_t_0, D_0,
    rows_1, n_1, stride_r_1, stride_t_1, D_1,
    rows_2, n_2, stride_r_2, stride_t_2, D_2,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: one row of one of the tensors."""
    row = tl.program_id(0)
    which = tl.program_id(1)
    if which == 0:
        _copy_row(x_0, index_0, out_0, row, rows_0, n_0, stride_r_0, stride_t_0, D_0, BLOCK_D)
    elif which == 1:
        _copy_row(x_1, index_1, out_1, row, rows_1, n_1, stride_r_1, stride_t_1, D_1, BLOCK_D)
    else:
        _copy_row(x_2, index_2, out_2, row, rows_2, n_2, stride_r_2, stride_t_2, D_2, BLOCK_D)


@_jit
def _copy_row(x, index, out, row, num_rows, n, stride_r, stride_t, D, BLOCK_D: tl.constexpr):
    if row < num_rows:
        position = tl.load(index + row % n)
        source = x + (row // n).to(tl.int64) * stride_r + position * stride_t
        for start in range(0, D, BLOCK_D):
            d = start + tl.arange(0, BLOCK_D)
            tl.store(out + row.to(tl.int64) * D + d, tl.load(source + d, mask=d < D), mask=d < D)
