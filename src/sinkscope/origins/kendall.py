"""Kendall's tau-b of many pairs of columns at once, exact with ties.

tau-b = (concordant - discordant) / sqrt((pairs - ties in x) (pairs - ties in y)), over all pairs of samples. On a CPU
discordant pairs are counted in O(n log n + n B) a column. Both samples are sorted as 64-bit keys: by (x, y), then by
(y, place in the first order). The places in the second order are a permutation, and discordant pairs are its
inversions. With positions and values cut into blocks of B, an inversion is one of three:

    in one block of positions                       compared pair by pair
    in two blocks of positions, one of values       compared pair by pair in the inverse permutation, by block number
    in two blocks of both                           from how many values above each block every block holds

On a GPU all pairs are compared, a block of rows at a time: it does so faster than it sorts.
Axes: N samples, C columns, B places in a block, P and Q blocks of positions and of values.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

BLOCK = 64
"""Places in a block: up to 255 pairs of one distance fit the 8 bits in which they are counted."""
COLUMNS = 100
"""Columns counted together: their working memory fits the second-level cache."""
SIGN = np.int32(-(2**31))
LOWER, UPPER = (0, 1) if sys.byteorder == "little" else (1, 0)
"""The halves of a 64-bit number in memory."""
PAIRS_AT_ONCE = 1 << 27
"""Pairs compared together on a GPU."""


def kendall_tau_columns(x_NC: Float[Tensor, "N C"], y_NC: Float[Tensor, "N C"]) -> Float[Tensor, " C"]:
    """tau-b [C] in float64 of each column of `x_NC` with the same column of `y_NC`; NaN where one is constant."""
    if x_NC.shape != y_NC.shape or x_NC.ndim != 2 or len(x_NC) < 2:
        raise ValueError(f"expected two [samples, columns] of one shape, found {x_NC.shape} and {y_NC.shape}")
    # Extremes are NaN if any sample is, and need one pass and no memory.
    if x_NC.numel() and not all(torch.isfinite(torch.stack(values.aminmax())).all() for values in (x_NC, y_NC)):
        raise ValueError("expected finite samples, found NaN or infinity")
    count = _agreement_by_pairs if x_NC.is_cuda else _agreement_by_sorting
    agreement_C, untied_x_C, untied_y_C = (numbers.double() for numbers in count(x_NC, y_NC))
    # Two square roots: the product of the counts can exceed what float64 holds exactly.
    return (agreement_C / untied_x_C.sqrt() / untied_y_C.sqrt()).clamp(-1.0, 1.0)


def _agreement_by_pairs(x_NC: Tensor, y_NC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(concordant - discordant, pairs not tied in x, pairs not tied in y), each [C], from the signs of all pairs."""
    num_samples, num_columns = x_NC.shape
    sums_3C = torch.zeros(3, num_columns, dtype=torch.int64, device=x_NC.device)
    rows = max(1, PAIRS_AT_ONCE // (num_samples * num_columns))
    for start in range(0, num_samples, rows):
        # A sign of a comparison, not of a difference, which can underflow to zero.
        x, y = (
            (v[start : start + rows, None] > v).to(torch.int8) - (v[start : start + rows, None] < v).to(torch.int8)
            for v in (x_NC, y_NC)
        )
        sums_3C += torch.stack([product.sum((0, 1), dtype=torch.int64) for product in (x * y, x * x, y * y)])
    agreement_C, untied_x_C, untied_y_C = sums_3C.div(2, rounding_mode="floor")
    return agreement_C, untied_x_C, untied_y_C


def _agreement_by_sorting(x_NC: Tensor, y_NC: Tensor) -> tuple[Tensor, ...]:
    """The same numbers as from all pairs, from sorted keys, a few columns at a time on every thread."""
    chunks = [slice(start, start + COLUMNS) for start in range(0, x_NC.shape[1], COLUMNS)]
    num_threads = min(len(chunks), torch.get_num_threads(), os.cpu_count() or 1)
    with ThreadPoolExecutor(max(1, num_threads)) as pool:
        parts = list(pool.map(lambda chunk: _agreement(x_NC[:, chunk].t(), y_NC[:, chunk].t()), chunks))
    if not parts:
        return (torch.zeros(0, dtype=torch.int64),) * 3
    return tuple(torch.from_numpy(np.concatenate(numbers)) for numbers in zip(*parts, strict=True))


def _order_preserving(values_CN: Tensor) -> np.ndarray:
    """int32 [C, N] in the order of the values: the bits of float32, or the ranks of wider numbers."""
    if values_CN.dtype == torch.float64:
        ordered, order = values_CN.sort(dim=1)
        steps = torch.nn.functional.pad(ordered[:, 1:] > ordered[:, :-1], (1, 0)).cumsum(1, dtype=torch.int32)
        return torch.empty_like(steps).scatter_(1, order, steps).numpy()
    # Adding 0 makes one zero of the two. A negative float's bits grow with its magnitude, so they are turned round.
    bits = values_CN.float().clone(memory_format=torch.contiguous_format).add_(0.0).numpy().view(np.int32)
    turned = bits >> 31
    turned &= 0x7FFFFFFF
    bits ^= turned
    return bits


def _agreement(x_CN: Tensor, y_CN: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    num_samples = x_CN.shape[1]
    # Lower halves are compared without a sign, so the sign of y is turned when it becomes one and when it ceases to be.
    by_x = _sorted_pairs(_order_preserving(x_CN), _order_preserving(y_CN) ^ SIGN)
    by_y = _sorted_pairs(by_x[..., LOWER] ^ SIGN, np.arange(num_samples, dtype=np.int32))
    num_pairs = num_samples * (num_samples - 1) // 2
    tied_x, tied_y = _tied_pairs(by_x[..., UPPER]), _tied_pairs(by_y[..., UPPER])
    # Pairs tied in both can only be where there are ties in both; sorted by (x, y), they are neighbours.
    tied_both = _tied_pairs(by_x[..., UPPER], by_x[..., LOWER]) if tied_x.any() and tied_y.any() else 0
    discordant = _inversions(by_y[..., LOWER])
    return num_pairs - tied_x - tied_y + tied_both - 2 * discordant, num_pairs - tied_x, num_pairs - tied_y


def _sorted_pairs(upper_CN: np.ndarray, lower_CN: np.ndarray) -> np.ndarray:
    """[C, N, 2] the two halves of 64-bit numbers, sorted: one sort of those is faster than any sort with an order."""
    halves_CN2 = np.empty((*upper_CN.shape, 2), dtype=np.int32)
    halves_CN2[..., UPPER], halves_CN2[..., LOWER] = upper_CN, lower_CN
    halves_CN2.view(np.int64)[..., 0].sort(axis=1)
    return halves_CN2


def _tied_pairs(*sorted_CN: np.ndarray) -> np.ndarray:
    """[C] pairs that are equal in all of the sorted arrays."""
    first_CN, *others = sorted_CN
    equal_CN = first_CN[:, 1:] == first_CN[:, :-1]
    for other_CN in others:
        equal_CN &= other_CN[:, 1:] == other_CN[:, :-1]
    tied_C = np.zeros(len(equal_CN), dtype=np.int64)
    # Most columns have no ties: asking about all at once first is ten times as fast as asking by column.
    if equal_CN.any():
        with_ties = equal_CN.any(axis=1)
        places = np.arange(1, equal_CN.shape[1] + 1, dtype=np.int32)
        # A value in place i of a run of equal ones makes i pairs with those before it in the run.
        run_starts = np.maximum.accumulate(np.where(equal_CN[with_ties], np.int32(0), places), axis=1)
        tied_C[with_ties] = (places - run_starts).sum(axis=1, dtype=np.int64)
    return tied_C


def _inversions(places_CN: np.ndarray) -> np.ndarray:
    """[C] pairs i < j with places[i] > places[j], for rows that are permutations of 0 .. N - 1."""
    num_columns, num_samples = places_CN.shape
    num_blocks = -(-num_samples // BLOCK)
    # Padding continues the permutation upwards, which adds no inversion.
    padded_CN = np.empty((num_columns, num_blocks * BLOCK), dtype=np.int16 if num_samples < 1 << 15 else np.int32)
    padded_CN[:, :num_samples] = places_CN
    padded_CN[:, num_samples:] = np.arange(num_samples, num_blocks * BLOCK)
    inversions_C = _pairs_within_blocks(_blocks_first(padded_CN))

    block_N = np.repeat(np.arange(num_blocks, dtype=np.int8 if num_blocks < 1 << 7 else np.int32), BLOCK)
    inverse_CN = np.empty(padded_CN.shape, dtype=block_N.dtype)
    rows = np.arange(num_columns)[:, None] * padded_CN.shape[1]
    inverse_CN.reshape(-1)[padded_CN + rows] = block_N
    inverse_BCQ = _blocks_first(inverse_CN)
    return inversions_C + _pairs_within_blocks(inverse_BCQ) + _pairs_across_blocks(inverse_BCQ)


def _blocks_first(values_CN: np.ndarray) -> np.ndarray:
    """[B, C, P] the places of a block along the first axis: what is done to all blocks is then one long loop."""
    num_columns, num_places = values_CN.shape
    return np.ascontiguousarray(values_CN.reshape(num_columns, num_places // BLOCK, BLOCK).transpose(2, 0, 1))


def _pairs_across_blocks(values_BCQ: np.ndarray) -> np.ndarray:
    """[C] pairs of two blocks with the larger value in the first, for values 0 .. Q - 1, from counts in each block."""
    _, num_columns, num_blocks = values_BCQ.shape
    above_CVQ = np.empty((num_columns, num_blocks, num_blocks), dtype=np.float32)
    for value in range(num_blocks):
        above_CVQ[:, value] = np.add.reduce((values_BCQ > value).view(np.uint8), axis=0, dtype=np.uint8)
    equal_CVQ = -np.diff(above_CVQ, axis=1, prepend=np.float32(BLOCK))
    # Each product of two blocks counts pairs of theirs, at most BLOCK^2: exact in float32.
    pairs_CQQ = torch.bmm(torch.from_numpy(above_CVQ).mT, torch.from_numpy(equal_CVQ))
    return pairs_CQQ.triu_(1).sum((1, 2), dtype=torch.float64).numpy().astype(np.int64)


def _pairs_within_blocks(values_BCP: np.ndarray) -> np.ndarray:
    """[C] pairs i < j of one block with values[i] > values[j]."""
    larger_BCP = np.empty(values_BCP.shape, dtype=bool)
    counts_BCP = np.zeros(values_BCP.shape, dtype=np.uint8)
    for distance in range(1, BLOCK):
        larger = np.greater(values_BCP[:-distance], values_BCP[distance:], out=larger_BCP[distance:])
        counts_BCP[distance:] += larger.view(np.uint8)
    return np.add.reduce(counts_BCP, axis=0, dtype=np.uint16).sum(axis=1, dtype=np.int64)
