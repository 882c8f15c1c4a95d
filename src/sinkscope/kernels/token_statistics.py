"""Per-token and per-channel statistics of activations [N tokens, C channels] from one read of them.

Axes: N token, C channel. With y = x * weight (or x), for each token:

    largest = max |y|    argmax = its first channel    energy = sum y^2    mean_abs = mean |y|
    kurtosis = mean((y - mean)^4) / var^2 (population; 0 where the row is constant)
    participation_ratio = (sum y^2)^2 / sum y^4 (0 where the row is 0)

and for each channel, of x without the weight: column_abs = sum |x| and column_energy = sum x^2 over the tokens.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sinkscope.errors import InputError

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:  # triton is an extra: the torch path must import without it
    triton = tl = None

TILE_ELEMENTS = 1 << 18  # of the torch path: two float32 buffers of this size stay in a core's 2 MB level-2 cache


class TokenStatistics(NamedTuple):
    """In float32 (float64 from float64 input), argmax in int64; None where it was not asked for."""

    largest: Tensor  # [N]
    argmax: Tensor  # [N]
    energy: Tensor  # [N]
    mean_abs: Tensor | None  # [N]
    kurtosis: Tensor | None  # [N]
    participation_ratio: Tensor | None  # [N]
    column_abs: Tensor | None  # [C]
    column_energy: Tensor | None  # [C]


def token_statistics(
    x_NC: Tensor,
    weight_C: Tensor | None = None,
    *,
    columns: bool = True,
    moments: bool = True,
    path: Literal["auto", "triton", "torch"] = "auto",
) -> TokenStatistics:
    """Statistics of each token and, with `columns`, of each channel. A nan in a row makes all but its argmax nan.

    "auto" takes the Triton kernel for CUDA tensors of at most 32 bits and torch for the rest.
    """
    if x_NC.dim() != 2 or not x_NC.is_floating_point() or x_NC.stride(1) != 1 or x_NC.shape[1] == 0:
        raise InputError(
            expected="activations [N tokens, C channels] in a float dtype, contiguous along C, with at least one channel",
            found=f"{x_NC.dtype} {list(x_NC.shape)} with strides {x_NC.stride()}",
            next_step="Flatten batch and position, and call .contiguous()",
        )
    if weight_C is not None and (weight_C.shape != x_NC.shape[1:] or weight_C.device != x_NC.device):
        raise InputError(
            expected=f"one weight for each of {x_NC.shape[1]} channels on {x_NC.device}",
            found=f"{list(weight_C.shape)} on {weight_C.device}",
            next_step="Pass the weight of the norm that follows, or None",
        )
    x_NC = x_NC.detach()
    if path == "auto":
        path = "triton" if x_NC.is_cuda and triton is not None and x_NC.element_size() <= 4 else "torch"
    if path == "torch":
        return _torch_statistics(x_NC, weight_C, columns, moments)
    interpreted = triton is not None and not isinstance(_part_kernel, triton.JITFunction)
    if triton is None or x_NC.element_size() > 4 or not (x_NC.is_cuda or interpreted):
        raise InputError(
            expected="Triton, and activations of at most 32 bits on a CUDA device (or TRITON_INTERPRET=1 at import)",
            found=f"triton {'missing' if triton is None else 'present'}, {x_NC.dtype} on {x_NC.device}",
            next_step='Pass path="torch"',
        )
    return _triton_statistics(x_NC, weight_C, columns, moments)


def token_statistics_plain(
    x_NC: Tensor, weight_C: Tensor | None = None, *, dtype: torch.dtype = torch.float64
) -> TokenStatistics:
    """The definition, term by term, in `dtype`. For tests."""
    x_NC = x_NC.to(dtype)
    y_NC = x_NC if weight_C is None else x_NC * weight_C.to(dtype)
    deviation_NC = y_NC - y_NC.mean(1, keepdim=True)
    constant_N = (y_NC == y_NC[:, :1]).all(1)
    kurtosis_N = deviation_NC.pow(4).mean(1) / deviation_NC.square().mean(1).square()
    quartic_N = y_NC.pow(4).sum(1)
    participation_N = (y_NC.square().sum(1).square() / quartic_N).masked_fill(quartic_N == 0, 0)
    return TokenStatistics(
        largest=y_NC.abs().amax(1),
        argmax=y_NC.abs().argmax(1),
        energy=y_NC.square().sum(1),
        mean_abs=y_NC.abs().mean(1),
        kurtosis=kurtosis_N.masked_fill(constant_N, 0),
        participation_ratio=participation_N,
        column_abs=x_NC.abs().sum(0),
        column_energy=x_NC.square().sum(0),
    )


def _torch_statistics(x_NC: Tensor, weight_C: Tensor | None, columns: bool, moments: bool) -> TokenStatistics:
    """Row tiles small enough that every pass after the first reads the cache, in two buffers that are reused."""
    num_tokens, num_channels = x_NC.shape
    dtype = torch.float64 if x_NC.dtype == torch.float64 else torch.float32
    rows = max(1, min(num_tokens, TILE_ELEMENTS // num_channels))
    if num_tokens < 2 * rows:  # one tile too large for the cache costs less than a second one that is nearly empty
        rows = max(1, num_tokens)
    buffers = torch.empty(2, rows, num_channels, dtype=dtype, device=x_NC.device)
    out_N = torch.empty(5, num_tokens, dtype=dtype, device=x_NC.device)
    argmax_N = torch.empty(num_tokens, dtype=torch.int64, device=x_NC.device)
    sums_C = torch.zeros(2, num_channels, dtype=dtype, device=x_NC.device) if columns else None
    weight = None if weight_C is None else weight_C.to(dtype)
    for start in range(0, num_tokens, rows):
        tile = x_NC[start : start + rows]
        part = slice(start, start + len(tile))
        _torch_tile(tile, weight, buffers[:, : len(tile)], out_N[:, part], argmax_N[part], sums_C, moments)
    largest, energy, *rest = out_N
    return TokenStatistics(largest, argmax_N, energy, *(rest if moments else [None] * 3), *(sums_C if columns else [None] * 2))
