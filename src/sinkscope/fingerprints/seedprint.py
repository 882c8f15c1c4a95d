"""The SeedPrint test, exactly as it was published.

    mean        of the last-layer states over the sequences
    identity    the k = 10 % of dimensions with the smallest mean, in each model; only those of both are used
    outputs     softmax over these dimensions at temperature 10
    tau         Kendall's, of each dimension over the sequences
    z           mean tau / (sigma / sqrt(number of dimensions)), sigma^2 = 2 (2n + 5) / (9 n (n - 1))
    p           one-sided; p < 0.01 says same origin

It is here for comparison only. It assumes that dimensions are independent, which they cannot be after a softmax over
them; and it tests for association, which unrelated models may show too.

N sequences, E dimensions, K identity dimensions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from jaxtyping import Float
from torch import Tensor

from sinkscope.statistics import kendall_tau

SHARE = 0.1
TEMPERATURE = 10.0
LEVEL = 0.01


@dataclass(frozen=True, kw_only=True)
class SeedPrint:
    """The test's numbers; NaN where fewer than two identity dimensions are shared, or all of them are constant."""

    tau: float
    z: float
    p: float
    num_dimensions: int


def identity_dimensions(states_NE: Float[Tensor, "N E"]) -> set[int]:
    """The tenth of the dimensions with the smallest mean over the sequences, at least one."""
    count = max(1, round(SHARE * states_NE.shape[1]))
    return set(states_NE.double().mean(0).argsort(stable=True)[:count].tolist())


def _mean_tau(taus: list[float]) -> float:
    """The mean tau; constant dimensions, which have no tau, are left out."""
    defined = [tau for tau in taus if not math.isnan(tau)]
    return sum(defined) / len(defined) if defined else math.nan


def seedprint(base_NE: Float[Tensor, "N E"], suspect_NE: Float[Tensor, "N E"]) -> SeedPrint:
    """The published test of two models' states on the same sequences."""
    shared = sorted(identity_dimensions(base_NE) & identity_dimensions(suspect_NE))
    if len(shared) < 2:  # a softmax over one dimension is 1 whatever the model does
        return SeedPrint(tau=math.nan, z=math.nan, p=math.nan, num_dimensions=len(shared))
    outputs = [(states[:, shared].double() / TEMPERATURE).softmax(1) for states in (base_NE, suspect_NE)]
    base_EN, suspect_EN = (values.T.cpu().numpy() for values in outputs)
    tau = _mean_tau(kendall_tau(base_EN, suspect_EN).tolist())
    n = len(base_NE)
    sigma = math.sqrt(2 * (2 * n + 5) / (9 * n * (n - 1)))
    z = tau / (sigma / math.sqrt(len(shared)))
    p = math.nan if math.isnan(z) else NormalDist().cdf(-z)
    return SeedPrint(tau=tau, z=z, p=p, num_dimensions=len(shared))
