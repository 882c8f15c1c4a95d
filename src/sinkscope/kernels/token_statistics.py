"""Per-token and per-channel statistics of activations [N tokens, C channels] from one read of them.

Axes: N token, C channel. With y = x * weight (or x), for each token:

    largest = max |y|    argmax = its first channel    energy = sum y^2    mean_abs = mean |y|
    kurtosis = mean((y - mean)^4) / var^2 (population; 0 where the row is constant)
    participation_ratio = (sum y^2)^2 / sum y^4 (0 where the row is 0)

and for each channel, of x without the weight: column_abs = sum |x| and column_energy = sum x^2 over the tokens.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sinkscope.errors import InputError

HAS_TRITON = find_spec("triton") is not None  # an extra: without it the definitions must still import
if TYPE_CHECKING or HAS_TRITON:
    import triton
    import triton.language as tl

TILE_ELEMENTS = 1 << 17  # of the torch path: activations and two buffers in float32 stay in a 2 MB cache
CHUNK_CHANNELS = 1024  # of the Triton path: 32 values in each of a warp's threads, so that row sums cross no warp


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
        path = "triton" if x_NC.is_cuda and HAS_TRITON and x_NC.element_size() <= 4 else "torch"
    if path == "torch":
        return _torch_statistics(x_NC, weight_C, columns, moments)
    interpreted = HAS_TRITON and not isinstance(_part_kernel, triton.JITFunction)
    if not HAS_TRITON or x_NC.element_size() > 4 or not (x_NC.is_cuda or interpreted):
        raise InputError(
            expected="Triton, and activations of at most 32 bits on a CUDA device (or TRITON_INTERPRET=1 at import)",
            found=f"triton {'missing' if not HAS_TRITON else 'present'}, {x_NC.dtype} on {x_NC.device}",
            next_step='Pass path="torch"',
        )
    return _triton_statistics(x_NC, weight_C, columns, moments)


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


def _torch_statistics(x_NC: Tensor, weight_C: Tensor | None, columns: bool, moments: bool) -> TokenStatistics:
    """Even row tiles that stay in the cache, buffers for all of them, and sums that write no temporary tensor."""
    num_tokens, num_channels = x_NC.shape
    dtype = torch.float64 if x_NC.dtype == torch.float64 else torch.float32
    num_tiles = max(1, round(x_NC.numel() / TILE_ELEMENTS))
    num_rows = -(-num_tokens // num_tiles)
    buffers = x_NC.new_empty(1 if weight_C is None else 2, num_rows, num_channels, dtype=dtype)
    sums_SN = x_NC.new_empty(5 if moments else 1, num_tokens, dtype=dtype)
    argmax_N = x_NC.new_empty(num_tokens, dtype=torch.int64)
    sums_SRC = x_NC.new_zeros(2, num_tiles, num_channels, dtype=dtype) if columns else None
    weight_C = None if weight_C is None else weight_C.detach().to(dtype)
    for index in range(num_tiles):
        part = slice(index * num_rows, (index + 1) * num_rows)
        tile = x_NC[part].to(dtype)
        if len(tile) > 0:
            sums_SC = None if sums_SRC is None else sums_SRC[:, index]
            _torch_tile(tile, weight_C, buffers[:, : len(tile)], sums_SN[:, part], argmax_N[part], sums_SC)
    largest_N = x_NC.gather(1, argmax_N[:, None])[:, 0].to(dtype).abs()
    if weight_C is not None:
        largest_N *= weight_C.abs()[argmax_N]
    by_moments = _from_power_sums(x_NC, weight_C, largest_N, *sums_SN) if moments else [None] * 3
    columns_SC = [None] * 2 if sums_SRC is None else sums_SRC.sum(1)
    return TokenStatistics(largest_N, argmax_N, sums_SN[0], *by_moments, *columns_SC)


def _torch_tile(x, weight, buffers, sums_SN, argmax, sums_SC) -> None:
    """Fills one tile's row sums and first largest channels and, where wanted, its column sums of |x| and x^2."""
    magnitude = torch.abs(x, out=buffers[0])
    if sums_SC is not None:
        torch.sum(magnitude, 0, out=sums_SC[0])
    if weight is not None:
        if sums_SC is not None:
            torch.sum(torch.mul(x, x, out=buffers[1]), 0, out=sums_SC[1])
        magnitude *= weight.abs()
    # numpy's argmax is vectorised; torch's is several times slower on a CPU.
    argmax.copy_(magnitude.argmax(1) if x.is_cuda else torch.from_numpy(magnitude.numpy().argmax(1)))
    if len(sums_SN) > 1:
        x = x if weight is None else torch.mul(x, weight, out=buffers[1])
        torch.sum(magnitude, 1, out=sums_SN[1])
        torch.sum(x, 1, out=sums_SN[2])
    square = magnitude.mul_(magnitude)
    torch.sum(square, 1, out=sums_SN[0])
    if sums_SC is not None and weight is None:
        torch.sum(square, 0, out=sums_SC[1])
    if len(sums_SN) > 1:
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
    if not trusted.all():
        again = trusted.logical_not().nonzero()[:, 0]
        y_NC = x_NC[again].double() if weight_C is None else x_NC[again].double() * weight_C.double()
        kurtosis[again], participation[again] = (row.to(kurtosis.dtype) for row in _peakedness_plain(y_NC))
    return sum_abs / count, kurtosis, participation


def _row_dots(a: Tensor, b: Tensor) -> Tensor:
    """sum over channels of a * b. numpy's writes no product, which halves its time on a CPU."""
    if a.is_cuda:
        return torch.linalg.vecdot(a, b)
    with np.errstate(all="ignore"):  # an overflow is dealt with where the sums are used
        return torch.from_numpy(np.vecdot(a.numpy(), b.numpy()))


def _triton_statistics(x_NC: Tensor, weight_C: Tensor | None, columns: bool, moments: bool) -> TokenStatistics:
    """One warp per run of tokens and chunk of channels, then one pass over its row sums that merges the chunks."""
    num_tokens, num_channels = x_NC.shape
    block_c = min(CHUNK_CHANNELS, max(16, 1 << (num_channels - 1).bit_length()))
    num_chunks = -(-num_channels // block_c)
    # Each program leaves 8 bytes of column sums a channel: after 128 bytes of activations that is 6 percent more
    # traffic. Short inputs, which live in the level-2 cache, are cut finer to occupy the device, but no finer than the
    # 16 rows of the largest tile.
    num_rows = 128 // x_NC.element_size()
    while num_rows > 16 and num_tokens * num_chunks < 2048 * num_rows:
        num_rows //= 2
    num_row_blocks = -(-num_tokens // num_rows)
    parts_SGN = x_NC.new_empty(6 if moments else 2, num_chunks, num_tokens, dtype=torch.float32)
    first_run_GN = x_NC.new_empty(num_chunks, num_tokens, dtype=torch.int32)
    partial_SRC = x_NC.new_empty(2, num_row_blocks if columns else 0, num_channels, dtype=torch.float32)
    stats_SN = x_NC.new_empty(5 if moments else 2, num_tokens, dtype=torch.float32)
    argmax_N = x_NC.new_empty(num_tokens, dtype=torch.int64)
    weight = x_NC if weight_C is None else weight_C.detach().contiguous()
    shared = dict(C=num_channels, BLOCK_C=block_c, RUN=16 // x_NC.element_size())
    flags = dict(WEIGHT=weight_C is not None, MOMENTS=moments)
    if num_tokens > 0:
        with torch.cuda.device_of(x_NC):
            _part_kernel[(num_row_blocks, num_chunks)](
                x_NC, weight, parts_SGN, first_run_GN, partial_SRC, x_NC.stride(0), num_tokens, num_rows,
                BLOCK_N=min(16, 1024 // block_c), COLUMNS=columns, **shared, **flags, num_warps=1,
            )  # fmt: skip
            _merge_kernel[(-(-num_tokens // 128),)](
                x_NC, weight, parts_SGN, first_run_GN, stats_SN, argmax_N, x_NC.stride(0), num_tokens,
                NUM_CHUNKS=num_chunks, BLOCK_N=128, **shared, **flags, num_warps=4,
            )  # fmt: skip
    largest, energy, *rest = stats_SN
    rest = rest if moments else [None] * 3
    return TokenStatistics(largest, argmax_N, energy, *rest, *(partial_SRC.sum(1) if columns else [None] * 2))


def _jit(function: Any) -> Any:
    """Compiles once for all numbers of tokens."""
    return triton.jit(do_not_specialize=["num_tokens", "num_rows"])(function) if HAS_TRITON else function


@_jit
def _part_kernel(
    x, weight, parts, first_runs, columns, stride_n, num_tokens, num_rows,
    C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, RUN: tl.constexpr,
    WEIGHT: tl.constexpr, COLUMNS: tl.constexpr, MOMENTS: tl.constexpr,
):  # fmt: skip
    """One program: num_rows tokens, BLOCK_N at a time, of one chunk of BLOCK_C channels.

    In place of the largest value's channel it leaves the first run of RUN channels, 16 bytes, that holds it: to compare
    every value with the maximum would cost as much as all the sums, and `_merge_kernel` need only read one run again.
    """
    # Everything lies as [token, run, channel within the run]: maxima of runs then need no second arrangement.
    chunk = tl.program_id(1)
    run = chunk * (BLOCK_C // RUN) + tl.arange(0, BLOCK_C // RUN)
    c = run[:, None] * RUN + tl.arange(0, RUN)[None, :]
    in_row = c < C
    count = tl.minimum(C - chunk * BLOCK_C, BLOCK_C).to(tl.float32)
    first_token = tl.program_id(0) * num_rows
    if WEIGHT:
        weight_C = tl.load(weight + c, mask=in_row, other=0.0).to(tl.float32)
    column_abs = tl.zeros([BLOCK_C // RUN, RUN], tl.float32)
    column_energy = tl.zeros([BLOCK_C // RUN, RUN], tl.float32)
    plane = tl.cast(num_tokens, tl.int64) * tl.num_programs(1)  # one sum of every chunk and token
    for start in tl.range(first_token, tl.minimum(first_token + num_rows, num_tokens), BLOCK_N, num_stages=3):
        n = start + tl.arange(0, BLOCK_N)
        exists = n < num_tokens
        tile = x + n.to(tl.int64)[:, None, None] * stride_n + c[None, :, :]
        y = tl.load(tile, mask=exists[:, None, None] & in_row[None, :, :], other=0.0).to(tl.float32)
        if COLUMNS:
            column_abs += tl.sum(tl.abs(y), 0)
            column_energy += tl.sum(y * y, 0)
        if WEIGHT:
            y *= weight_C[None, :, :]
        magnitude = tl.abs(y)
        run_largest = tl.max(magnitude, 2)
        largest = tl.max(run_largest, 1)
        first_run = tl.min(tl.where(run_largest < largest[:, None], C, run[None, :]), 1)
        out = tl.cast(chunk, tl.int64) * num_tokens + n
        tl.store(first_runs + out, first_run, mask=exists)
        tl.store(parts + out, largest, mask=exists)
        if MOMENTS:
            # Central sums, in units of the largest value: their fourth powers neither overflow nor vanish.
            unit = 1.0 / tl.maximum(largest, 1e-37)
            mean = tl.sum(tl.sum(y, 2), 1) * unit / count
            deviation = y * unit[:, None, None] - mean[:, None, None]
            if C % BLOCK_C != 0:
                deviation = tl.where(in_row[None, :, :], deviation, 0.0)
            square = deviation * deviation
            tl.store(parts + plane + out, tl.sum(tl.sum(magnitude, 2), 1), mask=exists)
            tl.store(parts + 2 * plane + out, mean, mask=exists)
            tl.store(parts + 3 * plane + out, tl.sum(tl.sum(square, 2), 1), mask=exists)
            tl.store(parts + 4 * plane + out, tl.sum(tl.sum(square * deviation, 2), 1), mask=exists)
            tl.store(parts + 5 * plane + out, tl.sum(tl.sum(square * square, 2), 1), mask=exists)
        else:
            tl.store(parts + plane + out, tl.sum(tl.sum(y * y, 2), 1), mask=exists)
    if COLUMNS:
        sums = columns + tl.program_id(0).to(tl.int64) * C + c
        tl.store(sums, column_abs, mask=in_row)
        tl.store(sums + tl.num_programs(0).to(tl.int64) * C, column_energy, mask=in_row)


@_jit
def _merge_kernel(
    x, weight, parts, first_runs, stats, argmax, stride_n, num_tokens,
    C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, RUN: tl.constexpr, NUM_CHUNKS: tl.constexpr,
    WEIGHT: tl.constexpr, MOMENTS: tl.constexpr,
):  # fmt: skip
    """One program: the statistics of BLOCK_N tokens from the sums of their chunks."""
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    exists = n < num_tokens
    plane = tl.cast(num_tokens, tl.int64) * NUM_CHUNKS
    largest = tl.load(parts + n, mask=exists, other=0.0)
    first_run = tl.load(first_runs + n, mask=exists, other=0)
    total = tl.load(parts + plane + n, mask=exists, other=0.0)  # sum |y| of moments, else sum y^2
    for chunk in range(1, NUM_CHUNKS):
        out = chunk * tl.cast(num_tokens, tl.int64) + n
        chunk_largest = tl.load(parts + out, mask=exists, other=0.0)
        first_run = tl.where(chunk_largest > largest, tl.load(first_runs + out, mask=exists, other=0), first_run)
        largest = tl.maximum(largest, chunk_largest)
        total += tl.load(parts + plane + out, mask=exists, other=0.0)

    c = first_run[:, None] * RUN + tl.arange(0, RUN)[None, :]
    y = tl.load(x + n[:, None] * stride_n + c, mask=exists[:, None] & (c < C), other=0.0).to(tl.float32)
    if WEIGHT:
        y *= tl.load(weight + c, mask=c < C, other=0.0).to(tl.float32)
    magnitude = tl.abs(y)
    first = tl.min(tl.where(magnitude < tl.max(magnitude, 1)[:, None], C, c), 1)
    tl.store(argmax + n, first.to(tl.int64), mask=exists)
    tl.store(stats + n, tl.where(total == total, largest, total), mask=exists)  # a maximum skips nan, a sum does not

    energy = total
    if MOMENTS:
        unit = 1.0 / tl.maximum(largest, 1e-37)
        mean = tl.zeros([BLOCK_N], tl.float32)
        second = tl.zeros([BLOCK_N], tl.float32)
        third = tl.zeros([BLOCK_N], tl.float32)
        fourth = tl.zeros([BLOCK_N], tl.float32)
        for chunk in range(NUM_CHUNKS):
            out = chunk * tl.cast(num_tokens, tl.int64) + n
            share = tl.minimum(C - chunk * BLOCK_C, BLOCK_C) / C
            ratio = tl.load(parts + out, mask=exists, other=0.0) * unit
            mean += share * ratio * tl.load(parts + 2 * plane + out, mask=exists, other=0.0)
        # Moved from each chunk's mean to the row's, by the binomial theorem.
        for chunk in range(NUM_CHUNKS):
            out = chunk * tl.cast(num_tokens, tl.int64) + n
            count = tl.minimum(C - chunk * BLOCK_C, BLOCK_C)
            ratio = tl.load(parts + out, mask=exists, other=0.0) * unit
            shift = ratio * tl.load(parts + 2 * plane + out, mask=exists, other=0.0) - mean
            two = ratio * ratio * tl.load(parts + 3 * plane + out, mask=exists, other=0.0)
            three = ratio * ratio * ratio * tl.load(parts + 4 * plane + out, mask=exists, other=0.0)
            four = ratio * ratio * ratio * ratio * tl.load(parts + 5 * plane + out, mask=exists, other=0.0)
            second += two + count * shift * shift
            third += three + 3 * shift * two + count * shift * shift * shift
            fourth += four + 4 * shift * three + 6 * shift * shift * two + count * shift * shift * shift * shift
        square = second + C * mean * mean
        quartic = fourth + 4 * mean * third + 6 * mean * mean * second + C * mean * mean * mean * mean
        energy = tl.where(total == float("inf"), total, square * largest * largest)
        # Below this the spread is the rounding of the mean: the row is constant.
        kurtosis = tl.where(second > 1e-13 * C, C * fourth / tl.maximum(second * second, 1e-37), second * 0)
        tl.store(stats + 2 * tl.cast(num_tokens, tl.int64) + n, total / C, mask=exists)
        tl.store(stats + 3 * tl.cast(num_tokens, tl.int64) + n, kurtosis, mask=exists)
        participation = square * square / tl.maximum(quartic, 1e-37)  # of a zero row, 0 / 1e-37
        tl.store(stats + 4 * tl.cast(num_tokens, tl.int64) + n, participation, mask=exists)
    tl.store(stats + num_tokens + n, energy, mask=exists)
