"""Kendall's tau-b of many pairs of columns at once, exact with ties.

tau-b = (concordant - discordant) / sqrt((pairs - ties in x) (pairs - ties in y)), over all pairs of samples. On a CPU
discordant pairs are counted in O(n log n + n B) a column. Both samples are sorted as 64-bit keys: by (x, y), then by
(y, place in the first order). The places in the second order are a permutation, and discordant pairs are its
inversions. With positions and values cut into blocks of B, an inversion is one of three:

    in one block of positions                       compared pair by pair
    in two blocks of positions, one of values       compared pair by pair in the inverse permutation, by block number
    in two blocks of both                           from the histogram of (block of position, block of value)

On a GPU all pairs are compared, a block of rows at a time: it does so faster than it sorts.
Axes: N samples, C columns, B places in a block, P and Q blocks of positions and of values.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

BLOCK = 64
"""Places in a block: up to 255 pairs of one distance fit the 8 bits in which they are counted."""
COLUMNS = 100
"""Columns counted together: their working memory fits the second-level cache."""
PAIRS_AT_ONCE = 1 << 27
"""Pairs compared together on a GPU."""


def kendall_tau_columns(x_NC: Float[Tensor, "N C"], y_NC: Float[Tensor, "N C"]) -> Float[Tensor, " C"]:
    """tau-b [C] in float64 of each column of `x_NC` with the same column of `y_NC`; NaN where one is constant."""
    if x_NC.shape != y_NC.shape or x_NC.ndim != 2 or len(x_NC) < 2:
        raise ValueError(f"expected two [samples, columns] of one shape, found {x_NC.shape} and {y_NC.shape}")
    if not (torch.isfinite(x_NC).all() and torch.isfinite(y_NC).all()):
        raise ValueError("expected finite samples, found NaN or infinity")
    count = _agreement_by_pairs if x_NC.is_cuda else _agreement_by_sorting
    agreement_C, untied_x_C, untied_y_C = (numbers.double() for numbers in count(x_NC, y_NC))
    # Two square roots: the product of the counts can exceed what float64 holds exactly.
    return agreement_C / untied_x_C.sqrt() / untied_y_C.sqrt()


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
    orders = [_order_preserving(values.detach().t()) for values in (x_NC, y_NC)]
    chunks = [slice(start, start + COLUMNS) for start in range(0, x_NC.shape[1], COLUMNS)]
    num_threads = min(len(chunks), torch.get_num_threads(), os.cpu_count() or 1)
    with ThreadPoolExecutor(max(1, num_threads)) as pool:
        parts = list(pool.map(lambda chunk: _agreement(*(order[chunk] for order in orders)), chunks))
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
    bits = (values_CN.float().contiguous() + 0.0).view(torch.int32)
    return bits.bitwise_xor_(bits.bitwise_right_shift(31).bitwise_and_(0x7FFFFFFF)).numpy()


def _agreement(x_CN: np.ndarray, y_CN: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    num_samples = x_CN.shape[1]
    by_x = _sorted_pairs(x_CN, y_CN)
    by_y = _sorted_pairs(by_x[0], np.arange(num_samples, dtype=np.int32))
    num_pairs = num_samples * (num_samples - 1) // 2
    tied_x, tied_y = _tied_pairs(by_x[1]), _tied_pairs(by_y[1])
    # Pairs tied in both can only be where there are ties in both; sorted by (x, y), they are neighbours.
    tied_both = _tied_pairs(*by_x) if tied_x.any() and tied_y.any() else 0
    discordant = _inversions(by_y[0])
    return num_pairs - tied_x - tied_y + tied_both - 2 * discordant, num_pairs - tied_x, num_pairs - tied_y


def _sorted_pairs(first_CN: np.ndarray, second_CN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(second, first) in the order of (first, second): one sort of 64-bit numbers, the fastest numpy has."""
    keys = first_CN.astype(np.int64)
    keys <<= 32
    # The lower half is compared without a sign.
    keys |= (second_CN ^ np.int32(-(2**31))).view(np.uint32)
    keys.sort(axis=1)
    lower = keys.astype(np.int32)
    lower ^= np.int32(-(2**31))
    return lower, (keys >> 32).astype(np.int32)


def _tied_pairs(*sorted_CN: np.ndarray) -> np.ndarray:
    """[C] pairs that are equal in all of the sorted arrays."""
    num_columns, num_samples = sorted_CN[0].shape
    equal_CN = np.ones((num_columns, num_samples - 1), dtype=bool)
    for values_CN in sorted_CN:
        equal_CN &= values_CN[:, 1:] == values_CN[:, :-1]
    tied_C = np.zeros(num_columns, dtype=np.int64)
    for column in np.flatnonzero(equal_CN.any(axis=1)):
        edges = np.flatnonzero(np.concatenate([[True], ~equal_CN[column], [True]]))
        runs = np.diff(edges)
        tied_C[column] = (runs * (runs - 1) // 2).sum()
    return tied_C


def _inversions(places_CN: np.ndarray) -> np.ndarray:
    """[C] pairs i < j with places[i] > places[j], for rows that are permutations of 0 .. N - 1."""
    num_columns, num_samples = places_CN.shape
    num_blocks = -(-num_samples // BLOCK)
    padded = num_blocks * BLOCK
    # Padding continues the permutation upwards, which adds no inversion.
    places_CN = np.concatenate([places_CN, np.tile(np.arange(num_samples, padded), (num_columns, 1))], axis=1)
    places_CN = places_CN.astype(np.int16 if padded <= 1 << 15 else np.int32)
    columns = np.arange(num_columns)[:, None]
    block_N = np.repeat(np.arange(num_blocks, dtype=np.int8 if num_blocks <= 1 << 7 else np.int16), BLOCK)

    inversions_C = _pairs_within_blocks(places_CN)
    inverse_CN = np.empty((num_columns, padded), dtype=block_N.dtype)
    inverse_CN.reshape(-1)[places_CN + columns * padded] = block_N
    inversions_C += _pairs_within_blocks(inverse_CN)

    cells = places_CN // BLOCK + (columns * num_blocks + block_N) * num_blocks
    counts_CPQ = np.bincount(cells.reshape(-1), minlength=num_columns * num_blocks**2).astype(np.float32)
    # Sums of up to N ones: exact in float32 up to 2^24 samples.
    larger_CPQ = (counts_CPQ.reshape(-1, num_blocks) @ np.tri(num_blocks, k=-1, dtype=np.float32)).reshape(
        num_columns, num_blocks, num_blocks
    )
    before_CPQ = np.cumsum(larger_CPQ, axis=1)
    before_CPQ -= larger_CPQ
    before_CPQ *= counts_CPQ.reshape(before_CPQ.shape)
    return inversions_C + before_CPQ.sum(axis=(1, 2), dtype=np.float64).astype(np.int64)


def _pairs_within_blocks(values_CN: np.ndarray) -> np.ndarray:
    """[C] pairs i < j of one block with values[i] > values[j]."""
    num_columns, num_places = values_CN.shape
    # Places of a block along the first axis: every comparison is then one long loop over contiguous memory.
    values_BCP = np.ascontiguousarray(values_CN.reshape(num_columns, num_places // BLOCK, BLOCK).transpose(2, 0, 1))
    larger_BCP = np.empty(values_BCP.shape, dtype=bool)
    count_CP = np.zeros(values_BCP.shape[1:], dtype=np.int16)
    for distance in range(1, BLOCK):
        larger = np.greater(values_BCP[:-distance], values_BCP[distance:], out=larger_BCP[distance:])
        count_CP += np.add.reduce(larger.view(np.uint8), axis=0, dtype=np.uint8)
    return count_CP.sum(axis=1, dtype=np.int64)
