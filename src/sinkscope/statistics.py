"""Intervals, p-values, rank correlations, and corrections for many tests.

Axes: N samples (sequences), C columns (every trailing axis, flattened), R resamples.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

# Resampled means alive at once: 4 million float64, 32 MiB, whatever the number of columns.
_MAX_MEANS = 4_000_000


def bootstrap_mean_interval(
    values: ArrayLike, *, confidence: float = 0.95, num_resamples: int = 2000, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """The low and high ends of the percentile bootstrap interval of the mean over the first axis.

    A resample draws N of the N samples with replacement; its mean is sum_n w_n x_n / N with w multinomial, so all
    resamples are one matrix product. Every column sees the same resamples, which keeps the dependence between columns.
    Both ends have the shape of the trailing axes. NaN is an empty sample, and its column is resampled without it. One
    sample says nothing about spread: its interval is NaN; so is that of a column that holds infinity. The weights
    take num_resamples * N * 8 bytes: N is sequences, not tokens.
    """
    values_N = np.asarray(values, dtype=np.float64)
    if values_N.ndim == 0 or values_N.shape[0] == 0:
        raise ValueError(f"expected at least one sample along the first axis, found shape {values_N.shape}")
    if not 0 < confidence < 1:
        raise ValueError(f"expected a confidence between 0 and 1, found {confidence}")
    if num_resamples < 1:
        raise ValueError(f"expected at least one resample, found {num_resamples}")
    num_samples, *trailing = values_N.shape
    if num_samples == 1:
        return np.full(trailing, np.nan), np.full(trailing, np.nan)

    columns_CN = values_N.reshape(num_samples, -1).T
    finite_C = np.asarray(np.isfinite(columns_CN).all(axis=1))
    # Resampling differences from the first sample makes equal samples give a width of exactly zero, and keeps the
    # digits of small spreads on top of large values.
    origin_C = np.where(finite_C, columns_CN[:, 0], 0.0)
    offsets_CN = np.where(finite_C[:, None], columns_CN - origin_C[:, None], 0.0)

    weights_NR = resample_weights(num_samples, num_resamples, seed).T

    tail = (1 - confidence) / 2
    interval_2C = np.empty((2, len(columns_CN)))
    step = max(1, _MAX_MEANS // num_resamples)
    for start in range(0, len(columns_CN), step):
        chunk = slice(start, start + step)
        means_CR = offsets_CN[chunk] @ weights_NR
        means_CR.sort(axis=1)  # three times as fast as the partial sort inside np.quantile
        interval_2C[0, chunk] = _quantile_of_sorted(means_CR, tail)
        interval_2C[1, chunk] = _quantile_of_sorted(means_CR, 1 - tail)
    low_C, high_C = np.where(finite_C, interval_2C + origin_C, np.nan)
    for column in np.flatnonzero(np.isnan(columns_CN).any(axis=1)):
        seen = columns_CN[column][~np.isnan(columns_CN[column])]
        if len(seen):
            low_C[column], high_C[column] = bootstrap_mean_interval(
                seen, confidence=confidence, num_resamples=num_resamples, seed=seed
            )
    return low_C.reshape(trailing), high_C.reshape(trailing)


def _quotient(totals: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Means, from weighted totals and the sums of their weights; NaN where no sample had a weight."""
    return np.divide(totals, weights, out=np.full_like(totals, np.nan), where=weights > 0)


def seen_mean(values: np.ndarray, axis: int | None = 0) -> np.ndarray:
    """The mean over an axis, NaN left out as an empty sample; NaN if all are empty."""
    seen = ~np.isnan(values)
    return _quotient(np.where(seen, values, 0.0).sum(axis), seen.sum(axis))


def weighted_means(weights_RN: np.ndarray, values_NC: np.ndarray) -> np.ndarray:
    """[R, C] weighted means over samples, empty ones (NaN) left out."""
    empty_NC = np.isnan(values_NC)
    totals_RC = weights_RN @ np.where(empty_NC, 0.0, values_NC)
    return _quotient(totals_RC, weights_RN @ ~empty_NC) if empty_NC.any() else totals_RC


def _quantile_of_sorted(sorted_CR: np.ndarray, probability: float) -> np.ndarray:
    """np.quantile's default definition: linear between the two nearest ranks."""
    rank = probability * (sorted_CR.shape[1] - 1)
    below = int(rank)
    above = min(below + 1, sorted_CR.shape[1] - 1)
    return sorted_CR[:, below] + (rank - below) * (sorted_CR[:, above] - sorted_CR[:, below])


def kendall_tau(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Kendall's tau-b of two samples of equal length, along the last axis; NaN where one of them is constant."""
    from scipy.stats import kendalltau  # imported here: it takes a second, and intervals do without

    # One call for all rows, since most of its time is preparation. scipy's type stubs lack the axis.
    result: Any = kendalltau(x, y, axis=-1)  # pyright: ignore[reportCallIssue]
    return np.asarray(result.statistic)


def average_ranks(values: ArrayLike) -> np.ndarray:
    """The ranks of a sample from 0 on, equal values sharing the mean of theirs."""
    _, group, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[group]


def rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman's rho of two samples of equal length, ties sharing their mean rank; NaN where one is constant."""
    centred = [average_ranks(values) for values in (x, y)]
    centred = [ranks - ranks.mean() for ranks in centred]
    scale = np.sqrt(np.prod([np.sum(ranks**2) for ranks in centred]))
    return float(np.sum(centred[0] * centred[1]) / scale) if scale > 0 else float("nan")


def share_interval(share: float, num_samples: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of independent samples, which is right for shares of 0 and 1 too."""
    z = NormalDist().inv_cdf(0.975)
    middle = (share + z**2 / (2 * num_samples)) / (1 + z**2 / num_samples)
    half = z / (1 + z**2 / num_samples) * math.sqrt(share * (1 - share) / num_samples + (z / (2 * num_samples)) ** 2)
    return max(0.0, middle - half), min(1.0, middle + half)


@lru_cache(maxsize=2)
def resample_weights(num_samples: int, num_resamples: int = 20_000, seed: int = 0) -> np.ndarray:
    """[R, N] weights of bootstrap resamples, each adding up to 1; times the samples, they give resampled means."""
    random = np.random.default_rng(seed)
    return random.multinomial(num_samples, np.full(num_samples, 1 / num_samples), size=num_resamples) / num_samples


def mean_interval(values: ArrayLike) -> tuple[float, float]:
    """The low and high ends of the 95 % interval of a mean by Student's t, for few samples, such as training runs.

    A bootstrap of four samples has 35 different means, and its interval is half as wide as it should be. One sample
    has no interval: NaN.
    """
    samples = np.asarray(values, dtype=np.float64)
    if samples.ndim != 1 or not len(samples):
        raise ValueError(f"expected at least one sample along one axis, found shape {samples.shape}")
    if len(samples) == 1:
        return math.nan, math.nan
    z = NormalDist().inv_cdf(0.975)
    reach = _student_t(z, len(samples) - 1) * samples.std(ddof=1) / math.sqrt(len(samples))
    return float(samples.mean() - reach), float(samples.mean() + reach)


def bootstrap_tail(num_samples: int, confidence: float) -> float:
    """The tail probability at which a percentile interval of a mean has its nominal coverage (Hesterberg 2015).

    Resampled means spread too little by sqrt((n - 1) / n) and have a normal's tails where a t distribution's are due:
    Phi^-1(tail) = -sqrt(n / (n - 1)) t(n - 1).
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    return NormalDist().cdf(-_student_t(z, num_samples - 1) * math.sqrt(num_samples / (num_samples - 1)))


def bootstrap_p_value(resampled_R: np.ndarray, threshold: float, num_samples: int) -> float:
    """The smallest two-sided level at which the interval of `bootstrap_tail` excludes the threshold."""
    count = min(np.sum(resampled_R <= threshold), np.sum(resampled_R >= threshold))
    tail = (count + 1) / (len(resampled_R) + 2)
    low, high = 0.0, 1.0
    for _ in range(60):  # bisection: the tail grows with the level
        level = (low + high) / 2
        low, high = (level, high) if bootstrap_tail(num_samples, 1 - level) < tail else (low, level)
    return min(1.0, high)


def holm_levels(p_values: Sequence[float], level: float = 0.05) -> tuple[list[bool], list[float]]:
    """(which hypotheses are rejected, the level each is tested at) by Holm's step-down at a family-wise level.

    Hypotheses that are not rejected share the level at which the procedure stopped.
    """
    order = np.argsort(p_values, kind="stable")
    rejected, levels = [False] * len(p_values), [level] * len(p_values)
    stopped, current = False, level
    for rank, index in enumerate(order):
        if not stopped:
            current = level / (len(p_values) - rank)
            stopped = p_values[index] > current
        rejected[index], levels[index] = not stopped, current
    return rejected, levels


def false_discovery_rates(p_values: ArrayLike) -> np.ndarray:
    """The smallest rate of false discoveries at which each hypothesis is rejected (Benjamini and Hochberg 1995).

    q of rank r among m is the least of p m / r over its rank and all higher ones. NaN stays NaN and is not counted.
    """
    p = np.asarray(p_values, dtype=np.float64)
    rates = np.full(p.shape, np.nan)
    tested = np.flatnonzero(~np.isnan(p))
    order = tested[np.argsort(p[tested], kind="stable")]
    scaled = p[order] * len(order) / np.arange(1, len(order) + 1)
    rates[order] = np.minimum(1.0, np.minimum.accumulate(scaled[::-1])[::-1])
    return rates


def at_most(count: int, num_samples: int, share: ArrayLike) -> np.ndarray:
    """P(at most `count` of the samples have what a share of the population has), exact (binomial)."""
    from scipy.special import bdtr  # imported here, as in `kendall_tau`

    return np.asarray(bdtr(count, num_samples, share))


def student_t_tail(t: float, freedom: int) -> float:
    """P(T > t) for Student's t, exact far into the tail."""
    from scipy.special import stdtr  # imported here, as in `kendall_tau`

    return float(stdtr(freedom, -t))


def _student_t(z: float, freedom: int) -> float:
    """A quantile of Student's t from the normal's: exact at 1 and 2 degrees, above them by its expansion in
    1 / freedom, at the ends of a 95 % interval within 0.2 %. scipy's is exact, but would change intervals that were
    reported: of four samples by 0.1 %, of sixteen in the seventh digit."""
    if freedom <= 2:
        tail = NormalDist().cdf(-z)
        return 1 / math.tan(math.pi * tail) if freedom == 1 else (1 - 2 * tail) / math.sqrt(2 * tail * (1 - tail))
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom ** (power + 1) for power, term in enumerate(terms))
