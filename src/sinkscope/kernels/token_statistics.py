"""Per-token and per-channel statistics of activations [N tokens, C channels] from one read of them.

Axes: N token, C channel. With y = x * weight (or x), for each token:

    largest = max |y|    argmax = its first channel    energy = sum y^2    mean_abs = mean |y|
    kurtosis = mean((y - mean)^4) / var^2 (population; 0 where the row is constant)
    participation_ratio = (sum y^2)^2 / sum y^4 (0 where the row is 0)

and for each channel, of x without the weight: column_abs = sum |x| and column_energy = sum x^2 over the tokens.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
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
    """Even row tiles that stay in the cache, one buffer for all of them, and sums that write no temporary tensor."""
    num_tokens, num_channels = x_NC.shape
    options = dict(dtype=torch.float64 if x_NC.dtype == torch.float64 else torch.float32, device=x_NC.device)
    num_rows = -(-num_tokens // max(1, round(x_NC.numel() / TILE_ELEMENTS)))
    buffer = torch.empty(num_rows, num_channels, **options)
    sums_SN = torch.empty(6 if moments else 2, num_tokens, **options)
    argmax_N = torch.empty(num_tokens, dtype=torch.int64, device=x_NC.device)
    sums_SC = torch.zeros(2, num_channels, **options) if columns else None
    weight_C = None if weight_C is None else weight_C.detach().to(options["dtype"])
    for start in range(0, num_tokens, max(1, num_rows)):
        part = slice(start, min(start + num_rows, num_tokens))
        tile = x_NC[part].to(options["dtype"])
        _torch_tile(tile, weight_C, buffer[: len(tile)], sums_SN[:, part], argmax_N[part], sums_SC)
    largest, energy, *power_sums = sums_SN
    by_moments = _from_power_sums(x_NC, weight_C, largest, energy, *power_sums) if moments else [None] * 3
    return TokenStatistics(largest, argmax_N, energy, *by_moments, *([None] * 2 if sums_SC is None else sums_SC))


def _torch_tile(x, weight, buffer, sums_SN, argmax, sums_SC) -> None:
    """Fills one tile's part of the row sums and adds its |x| and x^2 to the column sums."""
    magnitude = torch.abs(x, out=buffer)
    if sums_SC is not None:
        sums_SC[0] += magnitude.sum(0)
    if weight is not None:
        if sums_SC is not None:
            sums_SC[1] += x.square().sum(0)
        magnitude *= weight.abs()
        x = x * weight
    # numpy's argmax is vectorised; torch's is several times slower on a CPU.
    argmax.copy_(magnitude.argmax(1) if x.is_cuda else torch.from_numpy(magnitude.numpy().argmax(1)))
    torch.gather(magnitude, 1, argmax[:, None], out=sums_SN[0, :, None])
    if len(sums_SN) > 2:
        torch.sum(magnitude, 1, out=sums_SN[2])
        torch.sum(x, 1, out=sums_SN[3])
    square = magnitude.mul_(magnitude)
    if sums_SC is not None and weight is None:
        sums_SC[1] += square.sum(0)
    torch.sum(square, 1, out=sums_SN[1])
    if len(sums_SN) > 2:
        sums_SN[4] = _row_dots(x, square)
        sums_SN[5] = _row_dots(square, square)


def _from_power_sums(x_NC, weight_C, largest, energy, sum_abs, total, cubes, fourths) -> tuple[Tensor, Tensor, Tensor]:
    """mean_abs, kurtosis and participation ratio from sums of |y|, y, y^2, y^3 and y^4.

    Power sums take one read each, where deviations from the mean would have to be written and read again. They lose
    too many digits where the mean outweighs the spread, and fourth powers may leave the range of the numbers. Such
    rows, zero rows among them, are measured again by the definition.
    """
    count = x_NC.shape[1]
    mean, second = total / count, energy / count
    square = mean * mean
    variance = second - square
    central = (fourths - 4 * mean * cubes) / count + 3 * square * (second + variance)
    kurtosis, participation = central / (variance * variance), energy * energy / fourths
    trusted = (variance > 0.1 * second) & (largest > 1e-8) & (largest < 1e8)
    if not trusted.all():
        again = trusted.logical_not().nonzero()[:, 0]
        plain = token_statistics_plain(x_NC[again], weight_C)
        kurtosis[again] = plain.kurtosis.to(kurtosis.dtype)
        participation[again] = plain.participation_ratio.to(kurtosis.dtype)
    return sum_abs / count, kurtosis, participation


def _row_dots(a: Tensor, b: Tensor) -> Tensor:
    """sum over channels of a * b. numpy's writes no product, which halves its time on a CPU."""
    return torch.linalg.vecdot(a, b) if a.is_cuda else torch.from_numpy(np.vecdot(a.numpy(), b.numpy()))
