"""Pairs of samples that are discordant or tied, counted exactly in many columns at once on a CPU.

Both samples of a column are sorted as 64-bit numbers: by (x, y), then by (y, block of the place in the first order).
With the places of each order cut into blocks, x larger and y smaller is found in one of three ways:

    in one block of the first order                     y compared pair by pair
    in two blocks of the first, one of the second       numbers of the first block compared pair by pair
    in two blocks of both                               from how many of each block of one lie in each of the other

The cost is O(n log n + n B + n^2 / B^2) a column. Numbers are sorted as float64, which numpy does faster than int64.
Axes: N samples, C columns, B places in a block, P and Q blocks of the first and second order.
"""

from __future__ import annotations

import sys

import numpy as np

FEW_SAMPLES = 12_000
"""Below it blocks are short: counting in more of them costs less than comparing long ones (0.7 against 0.8 ms a column
of 10,000; 2.5 against 1.7 ms of 20,000)."""
SIGN = np.int32(-(2**31))
ABOVE_SUBNORMAL = np.int32(1 << 20)
"""Added to the bits of a float32, it makes them the upper half of a float64 that is no subnormal, and still finite."""
LOWER, UPPER = (0, 1) if sys.byteorder == "little" else (1, 0)
"""The halves of a 64-bit number in memory."""
BLOCK_BITS = 20
"""A float64 between 1 and 2 holds a 32-bit number and the 20 bits of a block's number."""


class PairCounter:
    """Counts pairs in so many columns, again and again in the same memory: every fresh page costs a fault."""

    def __init__(self, num_columns: int, num_samples: int) -> None:
        shape = num_columns, num_samples
        self.block_p, self.block_q = (32, 64) if num_samples < FEW_SAMPLES else (128, 256)
        num_p, num_q = -(-num_samples // self.block_p), -(-num_samples // self.block_q)
        self.x_CN, self.y_CN, self.turned_CN = (np.empty(shape, dtype=np.int32) for _ in range(3))
        self.words_CN, self.cells_CN = (np.empty(shape, dtype=np.int64) for _ in range(2))
        self.equal_CN = np.empty(shape, dtype=bool)
        self.y_BCP = np.empty((self.block_p, num_columns, num_p), dtype=np.uint32)
        # A block's number and, for padding, one more.
        number = next(t for t in (np.int8, np.int16, np.int32) if num_p <= np.iinfo(t).max)
        self.p_CN, self.p_BCQ = np.empty(shape, number), np.empty((self.block_q, num_columns, num_q), number)
        half_blocks = max(blocks.size // 2 for blocks in (self.y_BCP, self.p_BCQ))
        self.counts = np.empty(half_blocks, dtype=np.uint8)
        self.larger = np.empty(half_blocks * self.block_q // 2, dtype=bool)
        self.in_cell_PQC, self.above_PQC = (np.empty((num_p, num_q, num_columns), dtype=np.int32) for _ in range(2))
        places = np.arange(num_samples)
        self.p_of_one_N = places // self.block_p + (1023 << 52)  # in the lowest bits of the float64 1.0
        self.cell_of_q_CN = places // self.block_q * num_columns + np.arange(num_columns)[:, None]

    def count(self, x_CN: np.ndarray, y_CN: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(concordant - discordant, pairs not tied in x, pairs not tied in y), each int64 [C]."""
        num_samples = x_CN.shape[1]
        _write_bits(x_CN, self.x_CN)
        _write_bits(y_CN, self.y_CN)
        self._sort_by_x_and_y()
        tied_x = _tied_pairs(np.equal(self.x_CN[:, 1:], self.x_CN[:, :-1], out=self.equal_CN[:, 1:]))
        discordant = self._inversions(_to_blocks(self.y_CN.view(np.uint32), self.y_BCP, np.iinfo(np.uint32).max))
        self._sort_by_y_and_block()
        y_CN = self.turned_CN
        np.copyto(y_CN, np.right_shift(self.words_CN, BLOCK_BITS, out=self.cells_CN), casting="unsafe")
        tied_y = _tied_pairs(np.equal(y_CN[:, 1:], y_CN[:, :-1], out=self.equal_CN[:, 1:]))
        # Pairs tied in both can only be where there are ties in both; sorted by (x, y), they are neighbours.
        tied_both = np.zeros_like(tied_x)
        columns = np.flatnonzero((tied_x > 0) & (tied_y > 0))
        if len(columns) > 0:
            x, y = self.x_CN[columns], self.y_CN[columns]
            tied_both[columns] = _tied_pairs((x[:, 1:] == x[:, :-1]) & (y[:, 1:] == y[:, :-1]))
        np.bitwise_and(self.words_CN, (1 << BLOCK_BITS) - 1, out=self.cells_CN)
        np.copyto(self.p_CN, self.cells_CN, casting="unsafe")
        discordant += self._inversions(_to_blocks(self.p_CN, self.p_BCQ, len(self.in_cell_PQC)))
        discordant += self._inversions_across_blocks()
        num_pairs = num_samples * (num_samples - 1) // 2
        return num_pairs - tied_x - tied_y + tied_both - 2 * discordant, num_pairs - tied_x, num_pairs - tied_y

    def _sort_by_x_and_y(self) -> None:
        """Takes the bits of both; leaves x (moved, in the same order) and numbers in the order of y, sorted."""
        x_CN, y_CN, turned_CN = self.x_CN, self.y_CN, self.turned_CN
        # A negative float's bits grow with its magnitude, so they are turned round.
        np.right_shift(y_CN, 31, out=turned_CN)
        turned_CN |= SIGN
        y_CN ^= turned_CN
        halves_CN2 = self.words_CN.view(np.int32).reshape(*x_CN.shape, 2)
        # The lower half counts without a sign, and downwards where the whole is negative.
        x_CN += ABOVE_SUBNORMAL
        np.right_shift(x_CN, 31, out=turned_CN)
        y_CN ^= turned_CN
        halves_CN2[..., UPPER], halves_CN2[..., LOWER] = x_CN, y_CN
        self.words_CN.view(np.float64).sort(axis=1)
        x_CN[...], y_CN[...] = halves_CN2[..., UPPER], halves_CN2[..., LOWER]
        np.right_shift(x_CN, 31, out=turned_CN)
        y_CN ^= turned_CN

    def _sort_by_y_and_block(self) -> None:
        """Leaves words of y and the block that it has in the first order, as the bits of floats between 1 and 2."""
        self.words_CN[...] = self.y_CN.view(np.uint32)
        self.words_CN <<= BLOCK_BITS
        self.words_CN += self.p_of_one_N
        self.words_CN.view(np.float64).sort(axis=1)

    def _inversions(self, values_BCP: np.ndarray) -> np.ndarray:
        """[C] pairs i < j of one block with values[i] > values[j].

        Left and right halves of blocks are compared all with all, then those of their halves and so on: few long
        operations, of which two threads gain more than of many short ones.
        """
        block, num_columns, num_blocks = values_BCP.shape
        half, width = block // 2, num_columns * num_blocks
        counts = self.counts[: half * width].reshape(half, width)
        counts[...] = 0
        size = half
        while size:
            halves = values_BCP.reshape(half // size, 2, size, width)
            left, right = halves[:, 0].swapaxes(0, 1)[:, :, None], halves[:, 1]
            larger = self.larger[: size * half * width].reshape(size, half // size, size, width)
            np.greater(left, right, out=larger)
            # At most block - 1 over all sizes: 8 bits hold it.
            counts += np.add.reduce(larger.view(np.uint8).reshape(size, half, width), axis=0, dtype=np.uint8)
            size //= 2
        in_block = np.add.reduce(counts, axis=0, dtype=np.uint16)
        return in_block.reshape(num_columns, num_blocks).sum(axis=1, dtype=np.int64)

    def _inversions_across_blocks(self) -> np.ndarray:
        """[C] pairs in a later block of the first order and an earlier one of the second."""
        in_cell_PQC, above_PQC = self.in_cell_PQC, self.above_PQC
        num_p, num_q, num_columns = in_cell_PQC.shape
        self.cells_CN *= num_q * num_columns
        self.cells_CN += self.cell_of_q_CN
        counts = np.bincount(self.cells_CN.reshape(-1), minlength=in_cell_PQC.size)
        np.copyto(in_cell_PQC, counts.reshape(in_cell_PQC.shape), casting="unsafe")
        above_PQC[-1] = 0
        for p in range(num_p - 1, 0, -1):
            np.add(above_PQC[p], in_cell_PQC[p], out=above_PQC[p - 1])
        for q in range(1, num_q):
            above_PQC[:, q] += above_PQC[:, q - 1]
        # The pairs of one block of the second order fit 32 bits, all of them may not.
        return np.einsum("pqc,pqc->qc", above_PQC[:, :-1], in_cell_PQC[:, 1:]).sum(axis=0, dtype=np.int64)


def _write_bits(values_CN: np.ndarray, bits_CN: np.ndarray) -> None:
    """Leaves the bits of float32 numbers in the order of the values: their own, or of wider numbers the ranks."""
    if values_CN.dtype == np.float64:
        _refuse_non_finite(values_CN)
        order = values_CN.argsort(axis=1)
        ordered = np.take_along_axis(values_CN, order, axis=1)
        ranks = np.zeros(bits_CN.shape, dtype=np.int32)
        np.cumsum(ordered[:, 1:] > ordered[:, :-1], axis=1, out=ranks[:, 1:])
        np.put_along_axis(bits_CN, order, ranks, axis=1)
    else:
        floats_CN = bits_CN.view(np.float32)
        floats_CN[...] = values_CN
        floats_CN += np.float32(0)  # makes one zero of the two
        _refuse_non_finite(floats_CN)


def _refuse_non_finite(values_CN: np.ndarray) -> None:
    if not np.isfinite(values_CN).all():
        raise ValueError("expected finite samples, found NaN or infinity")


def _to_blocks(values_CN: np.ndarray, blocks_BCP: np.ndarray, padding: int) -> np.ndarray:
    """The places of a block along the first axis: what is done to all blocks is then one long loop."""
    num_columns, num_samples = values_CN.shape
    block, _, num_blocks = blocks_BCP.shape
    num_whole = num_samples // block
    start, rest = num_whole * block, num_samples - num_whole * block
    blocks_BCP[:, :, :num_whole] = values_CN[:, :start].reshape(num_columns, num_whole, block).transpose(2, 0, 1)
    if num_whole < num_blocks:
        blocks_BCP[:rest, :, -1] = values_CN[:, start:].T
        blocks_BCP[rest:, :, -1] = padding
    return blocks_BCP


def _tied_pairs(equal_to_last_CN: np.ndarray) -> np.ndarray:
    """[C] pairs within runs of equal samples, from which of sorted ones, but the first, equal the one before."""
    tied_C = np.zeros(len(equal_to_last_CN), dtype=np.int64)
    # Most columns have no ties: asking about all at once first is ten times as fast as asking by column.
    if equal_to_last_CN.any():
        columns = np.flatnonzero(equal_to_last_CN.any(axis=1))
        # One place more than samples: each column ends where a run of the next begins.
        starts = np.ones((len(columns), equal_to_last_CN.shape[1] + 2), dtype=bool)
        np.logical_not(equal_to_last_CN[columns], out=starts[:, 1:-1])
        places = np.flatnonzero(starts)
        lengths = places[1:] - places[:-1]
        lengths *= lengths - 1
        first_runs = np.searchsorted(places, np.arange(len(columns)) * starts.shape[1])
        tied_C[columns] = np.add.reduceat(lengths, first_runs) >> 1
    return tied_C
