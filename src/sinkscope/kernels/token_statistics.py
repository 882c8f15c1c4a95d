"""Per-token and per-channel statistics of activations [N tokens, C channels] from one read of them.

Axes: N token, C channel. With y = x * weight (or x), for each token:

    largest = max |y|    argmax = its first channel    energy = sum y^2    mean_abs = mean |y|
    kurtosis = mean((y - mean)^4) / var^2 (population; 0 where the row is constant)
    participation_ratio = (sum y^2)^2 / sum y^4 (0 where the row is 0)

and for each channel, of x without the weight: column_abs = sum |x| or column_energy = sum x^2 over the tokens.
Of a residual stream all but column_energy is wanted, of neurons largest, argmax and column_energy alone; what is not
wanted is not computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sinkscope.errors import InputError
from sinkscope.kernels.channel_sums import thread_sums, triton_channel_sums
from sinkscope.kernels.compiled import AT_MOST_32_BITS, call, runs_in_c
from sinkscope.kernels.launch import HAS_TRITON, is_interpreted, launch

if TYPE_CHECKING or HAS_TRITON:
    import triton
    import triton.language as tl

TILE_ELEMENTS = 3 << 16  # of the torch path: activations and a buffer in float32 stay in a 2 MB cache
WARP_CHANNELS = 1024  # of the Triton path: 32 values in each of a warp's threads


class TokenStatistics(NamedTuple):
    """In float32 (float64 from float64 input; sums over tokens by the kernel in C too), argmax in int64; None where it
    was not asked for."""

    largest: Tensor  # [N]
    argmax: Tensor  # [N]
    energy: Tensor | None  # [N]
    mean_abs: Tensor | None  # [N]
    kurtosis: Tensor | None  # [N]
    participation_ratio: Tensor | None  # [N]
    column_abs: Tensor | None  # [C]
    column_energy: Tensor | None  # [C]


def token_statistics(
    x_NC: Tensor,
    weight_C: Tensor | None = None,
    *,
    moments: bool = True,
    path: Literal["auto", "triton", "c", "torch"] = "auto",
) -> TokenStatistics:
    """Everything but column_energy or, without `moments`, largest, argmax and column_energy.

    A nan in a row makes all but its argmax nan.

    "auto" takes the Triton kernel for CUDA tensors of at most 32 bits, C for those on the CPU, torch for the rest.
    """
    if x_NC.dim() != 2 or not x_NC.is_floating_point() or x_NC.stride(1) != 1 or x_NC.shape[1] == 0:
        raise InputError(
            expected="activations [N tokens, C channels], floats, contiguous along C, with at least one channel",
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
        on_gpu = x_NC.is_cuda and HAS_TRITON and x_NC.element_size() <= 4
        path = "triton" if on_gpu else "c" if runs_in_c(x_NC, AT_MOST_32_BITS) else "torch"
    if path == "torch":
        return _torch_statistics(x_NC, weight_C, moments)
    if path == "c":
        if not runs_in_c(x_NC, AT_MOST_32_BITS):
            raise InputError(
                expected="a C compiler, and activations of at most 32 bits on the CPU",
                found=f"{x_NC.dtype} on {x_NC.device}",
                next_step='Pass path="torch"',
            )
        return _c_statistics(x_NC, weight_C, moments)
    interpreted = HAS_TRITON and is_interpreted(_statistics_kernel)
    if not HAS_TRITON or x_NC.element_size() > 4 or not (x_NC.is_cuda or interpreted):
        raise InputError(
            expected="Triton, and activations of at most 32 bits on a CUDA device (or TRITON_INTERPRET=1 at import)",
            found=f"triton {'missing' if not HAS_TRITON else 'present'}, {x_NC.dtype} on {x_NC.device}",
            next_step='Pass path="torch"',
        )
    return _triton_statistics(x_NC, weight_C, moments)


def token_statistics_plain(
    x_NC: Tensor, weight_C: Tensor | None = None, *, dtype: torch.dtype = torch.float64
) -> TokenStatistics:
    """The definition, term by term, in `dtype`. For tests."""
    x_NC = x_NC.to(dtype)
    y_NC = x_NC if weight_C is None else x_NC * weight_C.to(dtype)
    kurtosis_N, participation_N = _peakedness_plain(y_NC)
    return TokenStatistics(
        largest=y_NC.abs().amax(1),
        argmax=y_NC.abs().argmax(1),
        energy=y_NC.square().sum(1),
        mean_abs=y_NC.abs().mean(1),
        kurtosis=kurtosis_N,
        participation_ratio=participation_N,
        column_abs=x_NC.abs().sum(0),
        column_energy=x_NC.square().sum(0),
    )


def _peakedness_plain(y_NC: Tensor) -> tuple[Tensor, Tensor]:
    deviation_NC = y_NC - y_NC.mean(1, keepdim=True)
    kurtosis_N = deviation_NC.pow(4).mean(1) / deviation_NC.square().mean(1).square()
    quartic_N = y_NC.pow(4).sum(1)
    participation_N = y_NC.square().sum(1).square() / quartic_N
    constant_N = (y_NC == y_NC[:, :1]).all(1)
    return kurtosis_N.masked_fill(constant_N, 0), participation_N.masked_fill(quartic_N == 0, 0)


def _c_statistics(x_NC: Tensor, weight_C: Tensor | None, moments: bool) -> TokenStatistics:
    """One read, shared out among threads; half precision is widened a few rows at a time."""
    num_tokens, num_channels = x_NC.shape
    stats_NS = x_NC.new_empty(num_tokens, 5 if moments else 1, dtype=torch.float32)
    argmax_N = x_NC.new_empty(num_tokens, dtype=torch.int64)
    column_C = x_NC.new_zeros(num_channels, dtype=torch.float64)
    weight_C = None if weight_C is None else weight_C.detach().float().contiguous()
    num_rows = max(1, num_tokens if x_NC.dtype == torch.float32 else TILE_ELEMENTS // num_channels)
    for start in range(0, num_tokens, num_rows):
        tile, stats, argmax = (values[start : start + num_rows] for values in (x_NC, stats_NS, argmax_N))
        tile, parts_MC = tile.float(), thread_sums(tile)
        written = (stats, argmax, parts_MC, len(parts_MC))
        call("token_statistics", tile, tile.stride(0), weight_C, *tile.shape, moments, *written)
        column_C += parts_MC.sum(0)
    return _put_together(stats_NS.T.contiguous(), argmax_N, column_C)


def _put_together(stats_SN: Tensor, argmax_N: Tensor, column_C: Tensor) -> TokenStatistics:
    """What a kernel wrote: the largest values alone, or all five statistics of each token."""
    if stats_SN.shape[0] == 1:
        return TokenStatistics(stats_SN[0], argmax_N, None, None, None, None, None, column_C)
    largest_N, energy_N, mean_abs_N, kurtosis_N, participation_N = stats_SN
    return TokenStatistics(largest_N, argmax_N, energy_N, mean_abs_N, kurtosis_N, participation_N, column_C, None)


def _torch_statistics(x_NC: Tensor, weight_C: Tensor | None, moments: bool) -> TokenStatistics:
    """Even row tiles that stay in the cache, buffers for all of them, and sums that write no temporary tensor."""
    num_tokens, num_channels = x_NC.shape
    dtype = torch.float64 if x_NC.dtype == torch.float64 else torch.float32
    num_tiles = max(1, round(x_NC.numel() / TILE_ELEMENTS))
    num_rows = -(-num_tokens // num_tiles)
    buffers = x_NC.new_empty(2 if moments and weight_C is not None else 1, num_rows, num_channels, dtype=dtype)
    sums_SN = x_NC.new_empty(5 if moments else 0, num_tokens, dtype=dtype)
    argmax_N = x_NC.new_empty(num_tokens, dtype=torch.int64)
    column_RC = x_NC.new_zeros(num_tiles, num_channels, dtype=dtype)
    weight_C = None if weight_C is None else weight_C.detach().to(dtype)
    for index in range(num_tiles):
        part = slice(index * num_rows, (index + 1) * num_rows)
        tile = x_NC[part].to(dtype)
        if len(tile) > 0:
            _torch_tile(tile, weight_C, buffers[:, : len(tile)], sums_SN[:, part], argmax_N[part], column_RC[index])
    largest_N = x_NC.gather(1, argmax_N[:, None])[:, 0].to(dtype).abs()
    if weight_C is not None:
        largest_N *= weight_C.abs()[argmax_N]
    column_C = column_RC.sum(0)
    if not moments:
        return TokenStatistics(largest_N, argmax_N, None, None, None, None, None, column_C)
    # On a CPU numpy works out the many small terms of short rows in a fraction of the time that torch takes to start.
    power_sums = (largest_N, *sums_SN) if x_NC.is_cuda else (largest_N.numpy(), *sums_SN.numpy())
    with np.errstate(all="ignore"):  # such rows are measured again
        by_moments = _from_power_sums(x_NC, weight_C, *power_sums)
    return TokenStatistics(largest_N, argmax_N, sums_SN[0], *by_moments, column_C, None)


def _torch_tile(x, weight, buffers, sums_SN, argmax, column) -> None:
    """Fills one tile's first largest channels, its row sums where wanted, and its column sums of |x| or x^2."""
    moments, buffer = len(sums_SN) > 0, buffers[0]
    torch.sum(torch.abs(x, out=buffer) if moments else torch.mul(x, x, out=buffer), 0, out=column)
    if weight is not None:
        x = torch.mul(x, weight, out=buffers[-1])
    magnitude = buffer if moments and weight is None else torch.abs(x, out=buffer)
    # numpy's argmax is vectorised; torch's is several times slower on a CPU.
    argmax.copy_(magnitude.argmax(1) if x.is_cuda else torch.from_numpy(magnitude.numpy().argmax(1)))
    if moments:
        torch.sum(magnitude, 1, out=sums_SN[1])
        torch.sum(x, 1, out=sums_SN[2])
        square = magnitude.mul_(magnitude)
        torch.sum(square, 1, out=sums_SN[0])
        sums_SN[3] = _row_dots(x, square)
        sums_SN[4] = _row_dots(square, square)


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
    mean_abs, kurtosis, participation = map(torch.as_tensor, (sum_abs / count, kurtosis, participation))
    if not trusted.all():
        again = torch.as_tensor(~trusted).nonzero()[:, 0]
        y_NC = x_NC[again].double() if weight_C is None else x_NC[again].double() * weight_C.double()
        kurtosis[again], participation[again] = (row.to(kurtosis.dtype) for row in _peakedness_plain(y_NC))
    return mean_abs, kurtosis, participation


def _row_dots(a: Tensor, b: Tensor) -> Tensor:
    """sum over channels of a * b. numpy's writes no product, which halves its time on a CPU."""
    if a.is_cuda:
        return torch.linalg.vecdot(a, b)
    with np.errstate(all="ignore"):  # an overflow is dealt with where the sums are used
        return torch.from_numpy(np.vecdot(a.numpy(), b.numpy()))


def _triton_statistics(x_NC: Tensor, weight_C: Tensor | None, moments: bool) -> TokenStatistics:
    """One launch in which a program reads whole rows, then a sum over its programs' column sums."""
    num_tokens, num_channels = x_NC.shape
    block_c = max(16, 1 << (num_channels - 1).bit_length())
    num_warps = min(32, max(1, block_c // WARP_CHANNELS))
    # Each program leaves 4 bytes of column sums a channel: after 128 bytes of activations that is 3 percent more
    # traffic. Short inputs, which live in the level-2 cache, are cut finer to occupy the device.
    num_rows = 128 // x_NC.element_size()
    while num_rows > 8 and num_tokens * num_warps < 2048 * num_rows:
        num_rows //= 2
    num_programs = -(-num_tokens // num_rows)
    stats_SN = x_NC.new_empty(5 if moments else 1, num_tokens, dtype=torch.float32)
    argmax_N = x_NC.new_empty(num_tokens, dtype=torch.int64)
    column_RC = x_NC.new_empty(num_programs, num_channels, dtype=torch.float32)
    if num_tokens > 0:
        launch(
            _statistics_kernel,
            (num_programs, 1, 1),
            (x_NC, x_NC if weight_C is None else weight_C.detach().contiguous(), stats_SN, argmax_N, column_RC),
            (x_NC.stride(0), num_tokens, num_rows),
            (num_channels, block_c, min(8, max(1, WARP_CHANNELS // block_c)), weight_C is not None, moments),
            num_warps=num_warps,
        )
    return _put_together(stats_SN, argmax_N, triton_channel_sums(column_RC, norms=False))


def _jit(function: Any) -> Any:
    """Compiles once for all numbers of tokens."""
    return triton.jit(do_not_specialize=["num_tokens", "num_rows"])(function) if HAS_TRITON else function


@_jit
def _statistics_kernel(
    x, weight, stats, argmax, columns, stride_n, num_tokens, num_rows,
    C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, WEIGHT: tl.constexpr, MOMENTS: tl.constexpr,
):  # fmt: skip
    """One program: num_rows tokens, BLOCK_N at a time, with all their channels."""
    c = tl.arange(0, BLOCK_C)
    in_row = c < C
    if WEIGHT:
        weight_C = tl.load(weight + c, mask=in_row, other=0.0).to(tl.float32)
    column = tl.zeros([BLOCK_C], tl.float32)
    plane = tl.cast(num_tokens, tl.int64)
    first_token = tl.program_id(0) * num_rows
    for start in tl.range(first_token, tl.minimum(first_token + num_rows, num_tokens), BLOCK_N, num_stages=3):
        n = start + tl.arange(0, BLOCK_N)
        exists = n < num_tokens
        rows = x + n.to(tl.int64)[:, None] * stride_n + c[None, :]
        y = tl.load(rows, mask=exists[:, None] & in_row[None, :], other=0.0).to(tl.float32)
        column += tl.sum(tl.abs(y) if MOMENTS else y * y, 0)
        if WEIGHT:
            y *= weight_C[None, :]
        magnitude = tl.abs(y)
        largest = tl.max(magnitude, 1)
        total = tl.sum(magnitude, 1)
        first = tl.min(tl.where(magnitude < largest[:, None], C, c[None, :]), 1)
        tl.store(argmax + n, first.to(tl.int64), mask=exists)
        tl.store(stats + n, tl.where(total == total, largest, total), mask=exists)  # a maximum skips nan, a sum not
        if MOMENTS:
            # Central sums, in units of the largest value: their fourth powers neither overflow nor vanish.
            unit = 1.0 / tl.maximum(largest, 1e-37)
            mean = tl.sum(y, 1) * unit / C
            deviation = tl.where(in_row[None, :], y * unit[:, None] - mean[:, None], 0.0)
            deviation_2 = deviation * deviation
            second = tl.sum(deviation_2, 1)
            third = tl.sum(deviation_2 * deviation, 1)
            fourth = tl.sum(deviation_2 * deviation_2, 1)
            square = second + C * mean * mean
            quartic = fourth + 4 * mean * third + 6 * mean * mean * second + C * mean * mean * mean * mean
            energy = tl.where(total == float("inf"), total, square * largest * largest)
            # Below this the spread is the rounding of the mean: the row is constant.
            kurtosis = tl.where(second > 1e-13 * C, C * fourth / tl.maximum(second * second, 1e-37), second * 0)
            participation = square * square / tl.maximum(quartic, 1e-37)  # of a zero row, 0 / 1e-37
            tl.store(stats + plane + n, energy, mask=exists)
            tl.store(stats + 2 * plane + n, total / C, mask=exists)
            tl.store(stats + 3 * plane + n, kurtosis, mask=exists)
            tl.store(stats + 4 * plane + n, participation, mask=exists)
    tl.store(columns + tl.program_id(0).to(tl.int64) * C + c, column, mask=in_row)
