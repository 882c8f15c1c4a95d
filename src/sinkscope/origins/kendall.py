"""Kendall's tau-b of many pairs of columns at once, exact with ties.

tau-b = (concordant - discordant) / sqrt((pairs - ties in x) (pairs - ties in y)), over all pairs of samples. A CPU
counts them by sorting, columns shared out among threads (kernels/c/pair_counts.c); a GPU compares all pairs, which it
does faster than it sorts.
Axes: N samples, C columns.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.kernels.compiled import AT_MOST_32_BITS, call, runs_in_c
from sinkscope.kernels.pair_agreement import pair_agreement

MOST_SAMPLES_ON_GPU = 1 << 18
"""Where n^2 / 2 comparisons meet a CPU's sorting: 28 ms a column on an H200, which compares 1.24 T pairs a second, and
some 55 ms of one thread, shared among several."""


def kendall_tau_columns(x_NC: Float[Tensor, "N C"], y_NC: Float[Tensor, "N C"]) -> Float[Tensor, " C"]:
    """tau-b [C] in float64 of each column of `x_NC` with the same column of `y_NC`; NaN where one is constant."""
    if x_NC.shape != y_NC.shape or x_NC.ndim != 2 or len(x_NC) < 2:
        raise ValueError(f"expected two [samples, columns] of one shape, found {x_NC.shape} and {y_NC.shape}")
    # Extremes are NaN if any sample is, and need one pass and no memory.
    if x_NC.numel() and not all(torch.isfinite(torch.stack(values.aminmax())).all() for values in (x_NC, y_NC)):
        raise ValueError("expected finite samples, found NaN or infinity")
    if x_NC.is_cuda and len(x_NC) <= MOST_SAMPLES_ON_GPU:
        sums_3C = pair_agreement(x_NC, y_NC)
    else:
        sums_3C = _agreement_by_sorting(x_NC.cpu(), y_NC.cpu()).to(x_NC.device)
    agreement_C, untied_x_C, untied_y_C = sums_3C.double()
    # Two square roots: the product of the counts can exceed what float64 holds exactly.
    return (agreement_C / untied_x_C.sqrt() / untied_y_C.sqrt()).clamp(-1.0, 1.0)


def _agreement_by_sorting(x_NC: Tensor, y_NC: Tensor) -> Tensor:
    """int64 [3, C] concordant - discordant, pairs not tied in x, pairs not tied in y."""
    dtype = torch.promote_types(x_NC.dtype, y_NC.dtype)
    dtype = torch.float32 if dtype in AT_MOST_32_BITS else torch.float64
    x_NC, y_NC = (values.to(dtype).contiguous() for values in (x_NC, y_NC))
    if not runs_in_c(x_NC, (torch.float32, torch.float64)):
        columns = zip(x_NC.numpy().T, y_NC.numpy().T, strict=True)
        return torch.tensor([_agreement_in_numpy(x_N, y_N) for x_N, y_N in columns]).view(-1, 3).T
    sums_3C, failed = torch.empty(3, x_NC.shape[1], dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    call("pair_counts", x_NC, y_NC, *x_NC.shape, dtype == torch.float64, sums_3C, failed)
    if failed:
        raise MemoryError(f"sorting columns of {len(x_NC):,} samples")
    return sums_3C


def _agreement_in_numpy(x_N: np.ndarray, y_N: np.ndarray) -> tuple[int, int, int]:
    """The same of one column."""
    num_samples = len(x_N)
    num_pairs = num_samples * (num_samples - 1) // 2
    x_N, y_N = (np.unique(values, return_inverse=True)[1] for values in (x_N, y_N))
    tied_x, tied_y, tied_both = (_tied_pairs(values) for values in (x_N, y_N, x_N * num_samples + y_N))
    # In the order of x, and of y where x is equal, equal numbers get different ranks and are no inversion.
    ranks_N = np.argsort(np.argsort(y_N[np.lexsort((y_N, x_N))], kind="stable"))
    discordant = 0
    for bit in range(num_samples.bit_length()):
        # Ranks that have all higher bits in common stand together, in their order: where this bit is 1 before it is 0,
        # it decides that the larger comes first. Such a group begins at its own smallest rank.
        group_N = ranks_N >> (bit + 1)
        # numpy counts 16-bit numbers into place, and sorts wider ones.
        together_N = np.argsort(group_N.astype(np.uint16) if num_samples <= 1 << 16 else group_N, kind="stable")
        is_one_N = ranks_N[together_N] >> bit & 1
        ones_before_N = np.cumsum(is_one_N) - is_one_N
        in_group_N = ones_before_N - ones_before_N[group_N[together_N] << (bit + 1)]
        discordant += int(in_group_N[is_one_N == 0].sum())
    return num_pairs - tied_x - tied_y + tied_both - 2 * discordant, num_pairs - tied_x, num_pairs - tied_y


def _tied_pairs(values_N: np.ndarray) -> int:
    counts = np.unique(values_N, return_counts=True)[1]
    return int((counts * (counts - 1) // 2).sum())
