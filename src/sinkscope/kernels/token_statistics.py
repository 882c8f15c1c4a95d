"""Per-token and per-channel statistics of activations [N tokens, C channels], on CUDA by one read of them.

Axes: N token, C channel. `sinkscope.measures.dimension_disparity` defines every number; this file says how they are
computed together. On CUDA a Triton kernel reads each token once, where the definitions would read it a dozen times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sinkscope.kernels.jit import HAS_TRITON, jit
from sinkscope.measures.dimension_disparity import dom_ratio, scaled_kurtosis_, scaled_participation

if TYPE_CHECKING or HAS_TRITON:
    import triton.language as tl

WARP_CHANNELS = 1024  # 32 values in each of a warp's threads
BLOCK_VALUES = 1 << 17  # in float32 half a megabyte: a block and what is made of it stay in the level-2 cache


class TokenStatistics(NamedTuple):
    """In float32, or float64 from float64 input; `largest_at` in int64."""

    largest: Tensor  # [N] max |x|
    largest_at: Tensor  # [N] its first channel
    energy: Tensor  # [N] sum x^2
    mean_abs: Tensor  # [N] mean |x|
    kurtosis: Tensor  # [N]
    participation_ratio: Tensor  # [N]
    channel_abs: Tensor  # [C] sum over tokens of |x|


class WeightedLargest(NamedTuple):
    """The statistics of neurons. Each is weighed by the length of its output vector."""

    largest: Tensor  # [N] max |x| * weight
    largest_at: Tensor  # [N] its first channel
    channel_energy: Tensor  # [C] sum over tokens of x^2, without the weight


def token_statistics(x_NC: Tensor) -> TokenStatistics:
    """Statistics of each token of a residual stream. A nan in a row makes all but its place nan."""
    if _has_kernel(x_NC):
        (largest_N, *others), largest_at_N, channel_C = _by_kernel(x_NC, None)
        return TokenStatistics._make([largest_N, largest_at_N, *others, channel_C])
    *of_tokens, channels = zip(*(_of_block(block_NC) for block_NC in _blocks(x_NC)), strict=True)
    return TokenStatistics._make([*map(torch.cat, of_tokens), torch.stack(channels).sum(0)])


def _of_block(x_NC: Tensor) -> TokenStatistics:
    magnitude_NC = x_NC.abs()
    largest_N, largest_at_N = _row_max(magnitude_NC)
    scaled_NC = x_NC / largest_N[:, None]
    return TokenStatistics(
        largest=largest_N,
        largest_at=largest_at_N,
        energy=torch.linalg.vector_norm(x_NC, dim=1).square(),
        mean_abs=magnitude_NC.mean(1),
        participation_ratio=scaled_participation(scaled_NC),
        kurtosis=scaled_kurtosis_(scaled_NC),
        channel_abs=magnitude_NC.sum(0),
    )


def token_dom_ratio(x_NC: Tensor) -> Tensor:
    """[N] max |x| / mean |x| of each token."""
    if _has_kernel(x_NC):
        (largest_N, _, mean_abs_N, *_), _, _ = _by_kernel(x_NC, None)
        return largest_N / mean_abs_N
    return torch.cat([dom_ratio(block_NC) for block_NC in _blocks(x_NC)])


def weighted_largest(x_NC: Tensor, weight_C: Tensor) -> WeightedLargest:
    """The largest weighted magnitude of each token, and the energy of each channel."""
    if _has_kernel(x_NC):
        stats_SN, largest_at_N, channel_C = _by_kernel(x_NC, weight_C)
        return WeightedLargest(stats_SN[0], largest_at_N, channel_C)
    largest, largest_at, energy = zip(*(_weighted_block(block_NC, weight_C) for block_NC in _blocks(x_NC)), strict=True)
    # What a few tokens have is later taken away from what all have, so sums over many tokens need the digits.
    return WeightedLargest(torch.cat(largest), torch.cat(largest_at), torch.stack(energy).double().sum(0))


def _weighted_block(x_NC: Tensor, weight_C: Tensor) -> WeightedLargest:
    weighted_NC = x_NC * weight_C
    largest_N, largest_at_N = _row_max(weighted_NC.abs_())
    square_NC = torch.mul(x_NC, x_NC, out=weighted_NC)  # on a CPU new memory costs more than the product
    return WeightedLargest(largest_N, largest_at_N, square_NC.sum(0))


def _blocks(x_NC: Tensor) -> tuple[Tensor, ...]:
    """The tokens in float32 or, from float64 input, float64; on a CPU in blocks that stay in the cache while the
    definitions read them over and over."""
    num_rows = max(1, BLOCK_VALUES // x_NC.shape[1]) if x_NC.device.type == "cpu" else max(1, len(x_NC))
    return x_NC.to(torch.promote_types(x_NC.dtype, torch.float32)).split(num_rows)


def _row_max(magnitude_NC: Tensor) -> tuple[Tensor, Tensor]:
    """([N] largest value of each row, [N] its first place)."""
    if magnitude_NC.is_cuda:
        return tuple(magnitude_NC.max(1))  # type: ignore[return-value]
    # numpy's argmax is vectorised; torch's is several times slower on a CPU.
    place_N = torch.from_numpy(magnitude_NC.numpy().argmax(1))
    return magnitude_NC.gather(1, place_N[:, None])[:, 0], place_N


def _has_kernel(x_NC: Tensor) -> bool:
    return x_NC.is_cuda and HAS_TRITON and x_NC.element_size() <= 4 and x_NC.stride(1) == 1


def _by_kernel(x_NC: Tensor, weight_C: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """([5, N] statistics or, with a weight, [1, N] largest values; [N] places; [C] sums over tokens), by one launch in
    which a program reads whole rows."""
    num_tokens, num_channels = x_NC.shape
    block_c = max(16, 1 << (num_channels - 1).bit_length())
    num_warps = min(32, max(1, block_c // WARP_CHANNELS))
    # Each program leaves 4 bytes of channel sums a channel: after 128 bytes of activations that is 3 percent more
    # traffic. Short inputs, which live in the level-2 cache, are cut finer to occupy the device.
    num_rows = 128 // x_NC.element_size()
    while num_rows > 8 and num_tokens * num_warps < 2048 * num_rows:
        num_rows //= 2
    num_programs = -(-num_tokens // num_rows)
    stats_SN = x_NC.new_empty(1 if weight_C is not None else 5, num_tokens, dtype=torch.float32)
    largest_at_N = x_NC.new_empty(num_tokens, dtype=torch.int64)
    channel_RC = x_NC.new_empty(num_programs, num_channels, dtype=torch.float32)
    if num_tokens > 0:
        with torch.cuda.device_of(x_NC):
            _statistics_kernel[(num_programs,)](
                x_NC, x_NC if weight_C is None else weight_C.contiguous(), stats_SN, largest_at_N, channel_RC,
                x_NC.stride(0), num_tokens, num_rows,
                num_channels, block_c, min(8, max(1, WARP_CHANNELS // block_c)), weight_C is not None,
                num_warps=num_warps,
            )  # fmt: skip
    return stats_SN, largest_at_N, channel_RC.sum(0, dtype=torch.float64 if weight_C is not None else None)


@jit("num_tokens", "num_rows")
def _statistics_kernel(
    x, weight, stats, places, channels, stride_n, num_tokens, num_rows,
    C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    """One program: num_rows tokens, BLOCK_N at a time, with all their channels."""
    c = tl.arange(0, BLOCK_C)
    in_row = c < C
    if WEIGHT:
        weight_C = tl.load(weight + c, mask=in_row, other=0.0).to(tl.float32)
    channel = tl.zeros([BLOCK_C], tl.float32)
    plane = tl.cast(num_tokens, tl.int64)
    first_token = tl.program_id(0) * num_rows
    for start in tl.range(first_token, tl.minimum(first_token + num_rows, num_tokens), BLOCK_N, num_stages=3):
        n = start + tl.arange(0, BLOCK_N)
        exists = n < num_tokens
        rows = x + n.to(tl.int64)[:, None] * stride_n + c[None, :]
        y = tl.load(rows, mask=exists[:, None] & in_row[None, :], other=0.0).to(tl.float32)
        channel += tl.sum(y * y if WEIGHT else tl.abs(y), 0)
        if WEIGHT:
            y *= weight_C[None, :]
        magnitude = tl.abs(y)
        largest = tl.max(magnitude, 1)
        total = tl.sum(magnitude, 1)
        first = tl.min(tl.where(magnitude < largest[:, None], C, c[None, :]), 1)
        tl.store(places + n, first.to(tl.int64), mask=exists)
        tl.store(stats + n, tl.where(total == total, largest, total), mask=exists)  # a maximum skips nan, a sum not
        if not WEIGHT:
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
            # Below this the spread is the rounding of the mean: the row is constant. A row of zeros has neither: 0 / 0.
            spread = second > 1e-13 * C
            kurtosis = tl.where(spread, C * fourth / tl.maximum(second * second, 1e-37), second * 0 * (square / square))
            participation = square * square / quartic
            tl.store(stats + plane + n, energy, mask=exists)
            tl.store(stats + 2 * plane + n, total / C, mask=exists)
            tl.store(stats + 3 * plane + n, kurtosis, mask=exists)
            tl.store(stats + 4 * plane + n, participation, mask=exists)
    tl.store(channels + tl.program_id(0).to(tl.int64) * C + c, channel, mask=in_row)
