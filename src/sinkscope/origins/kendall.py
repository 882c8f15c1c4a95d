"""Kendall's tau-b of many pairs of columns at once, exact with ties.

tau-b = (concordant - discordant) / sqrt((pairs - ties in x) (pairs - ties in y)), over all pairs of samples. A CPU
counts them by sorting, columns shared out among threads; a GPU compares all pairs, which it does faster than it sorts.
Axes: N samples, C columns.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.kernels.pair_agreement import pair_agreement
from sinkscope.origins.pair_counter import PairCounter

PLACES = 100_000
"""Samples counted together on a thread: fewer take too many calls, more no longer fit the cache."""
MOST_SAMPLES_ON_GPU = 1 << 18
"""Where n^2 / 2 comparisons meet a CPU's sorting: 28 ms a column on an H200, which compares 1.24 T pairs a second, and
some 55 ms of one thread, shared among several."""


def kendall_tau_columns(x_NC: Float[Tensor, "N C"], y_NC: Float[Tensor, "N C"]) -> Float[Tensor, " C"]:
    """tau-b [C] in float64 of each column of `x_NC` with the same column of `y_NC`; NaN where one is constant."""
    if x_NC.shape != y_NC.shape or x_NC.ndim != 2 or len(x_NC) < 2:
        raise ValueError(f"expected two [samples, columns] of one shape, found {x_NC.shape} and {y_NC.shape}")
    if x_NC.is_cuda and len(x_NC) <= MOST_SAMPLES_ON_GPU:
        # Extremes are NaN if any sample is, and need one pass and no memory.
        if x_NC.numel() and not all(torch.isfinite(torch.stack(values.aminmax())).all() for values in (x_NC, y_NC)):
            raise ValueError("expected finite samples, found NaN or infinity")
        sums_3C = pair_agreement(x_NC, y_NC)
    else:
        sums_3C = _agreement_by_sorting(x_NC.cpu(), y_NC.cpu()).to(x_NC.device)
    agreement_C, untied_x_C, untied_y_C = sums_3C.double()
    # Two square roots: the product of the counts can exceed what float64 holds exactly.
    return (agreement_C / untied_x_C.sqrt() / untied_y_C.sqrt()).clamp(-1.0, 1.0)


def _agreement_by_sorting(x_NC: Tensor, y_NC: Tensor) -> Tensor:
    """int64 [3, C] concordant - discordant, pairs not tied in x, pairs not tied in y."""
    x, y = ((values if values.dtype == torch.float64 else values.float()).numpy() for values in (x_NC, y_NC))
    num_samples, num_columns = x.shape
    at_once = max(1, min(num_columns, PLACES // num_samples))
    starts = range(0, num_columns, at_once)
    remaining = iter(starts)
    sums_3C = np.empty((3, num_columns), dtype=np.int64)

    def count(_: int) -> None:
        counter = PairCounter(at_once, num_samples)
        for start in remaining:
            # All groups are of one size: the last repeats some columns.
            last = min(start + at_once, num_columns)
            columns = slice(last - at_once, last)
            sums_3C[:, columns] = counter.count(x[:, columns].T, y[:, columns].T)

    num_threads = max(1, min(len(starts), torch.get_num_threads(), os.cpu_count() or 1))
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(count, range(num_threads)))
    return torch.from_numpy(sums_3C)
