"""The claims of a study, fixed before any model is looked at: for each its statistic, control, threshold and rule.

A claim is made of one part or several, all of which must pass. A part is a number computed from means over sequences,
with a threshold that its interval must clear: `at least` and `above` ask the lower end, `below` the upper end; only `at
least` is content with the threshold itself. A claim holds when every part clears its threshold, does not hold when one
part's interval lies on the wrong side, and is undecided when an interval contains the threshold. Intervals are
bootstrap intervals over sequences at the level that Holm's procedure over all applicable claims gives, so that all
verdicts together are right with 95 % confidence.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from sinkscope.statistics import (
    bootstrap_p_value,
    bootstrap_tail,
    holm_levels,
    resample_weights,
    seen_mean,
    weighted_means,
)

Verdict = Literal["holds", "does not hold", "not applicable", "undecided"]
Rule = Literal["at least", "above", "below"]
CLEARS: dict[Rule, Callable[[float, float], bool]] = {
    "at least": operator.ge,
    "above": operator.gt,
    "below": operator.lt,
}
FAMILY_LEVEL = 0.05

SINK = 0.05
VARIANCE_RATIO = 2.0
LAW_R_SQUARED = 0.8
WRITE_SHARE = 0.5
LEVEL_ELSEWHERE = 10.0
TOP_SHARE = 0.25
TOP_SHARE_OVER_MEDIAN = 5.0
DOM_RATIO = 3.0
COSINE = 0.9
COSINE_ABOVE = 0.2
RISE = 0.05
"""Five points of the sink rate: what counts as a sink made, and the margin of equivalence for what makes none."""
QUARTER = 0.25
RANDOM_SETS = 0.8
MEDIATED = 0.5

CLAIMS: dict[str, tuple[str, str]] = {
    "sink": ("sink", "The strongest position is a sink: at least 5 % of heads, layers and sequences"),
    "variance_discrepancy": (
        "variance_discrepancy",
        "Up to the birth of disparity, position 0 has more than twice the variance of later positions",
    ),
    "averaging_law": ("variance_discrepancy", "Averaging values explains how the variance falls: log R^2 at least 0.8"),
    "super_neurons": (
        "super_neurons",
        "At most 0.5 % of a birth layer's units carry half of the write into the massive dimensions, at 10x their "
        "level elsewhere",
    ),
    "channel_sparsity": (
        "channel_sparsity",
        "One dimension holds a quarter of the super neurons' output vectors, 5x the median unit's",
    ),
    "dimension_disparity": ("dimension_disparity", "DomRatio at the sink is at least 3x that elsewhere"),
    "directional_collapse": (
        "directional_collapse",
        "The sink's state is one direction: cosine across sequences at least 0.9, and 0.2 above other positions",
    ),
    "mask_to_self_creates_sink": ("causal", "A token that sees only itself becomes a sink: rate up by 5 points"),
    "amplification_creates_sink": ("causal", "Amplifying its variance 8x makes a token a sink: rate up by 5 points"),
    "dose_response": ("causal", "The more variance, the more of a sink (trend over factors 1 to 8)"),
    "norm_scaling_does_not": ("causal", "Scaling the aggregation 8x makes no sink: rise under 5 points"),
    "random_direction_does_not": ("causal", "A random direction of equal norm makes no sink: rise under 5 points"),
    "variance_beats_mean_shift": (
        "causal",
        "Amplification makes more of a sink than shifting the mean, and than another sequence's deviation",
    ),
    "equalising_removes_sink": (
        "causal",
        "Bringing the sink's variance down to that of later positions leaves under a quarter of the sink",
    ),
    "super_neurons_necessary": (
        "causal",
        "Without a minimal set of units under a quarter of the sink is left; 20 matched random sets each leave 80 %",
    ),
    "channel_sparsity_necessary": (
        "causal",
        "With that set's output vectors spread over all dimensions under a quarter of the sink is left",
    ),
    "super_neurons_sufficient": ("causal", "The super neurons' activations make another token a sink: up by 5 points"),
    "mediation_mask_super_neurons": ("causal", "At least half of the mask's effect runs through the super neurons"),
    "mediation_mask_dimensions": ("causal", "At least half of the mask's effect runs through the massive dimensions"),
    "mediation_amplification_super_neurons": (
        "causal",
        "At least half of amplification's effect runs through the super neurons",
    ),
    "mediation_amplification_dimensions": (
        "causal",
        "At least half of amplification's effect runs through the massive dimensions",
    ),
}
"""(link, statement) by id, in the order in which they are shown."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A statistic with its threshold: `statistic` maps means over sequences [..., C] to numbers [...]. A number of a
    sequence that is NaN is empty, and is left out of its column's mean."""

    columns_BC: np.ndarray
    threshold: float
    rule: Rule
    statistic: Callable[[np.ndarray], np.ndarray] = field(default=lambda means: means[..., 0])

    def passes(self, value: float) -> bool:
        return CLEARS[self.rule](value, self.threshold)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim with the numbers it is judged on; without parts it is decided by `why` alone."""

    id: str
    parts: Sequence[Part] = ()
    control: float | None = None
    control_name: str | None = None
    without_numbers: Verdict = "not applicable"
    """The verdict of a claim that has no number to judge."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A claim's verdict, with the estimate, interval and level of its leading part."""

    claim: Claim
    verdict: Verdict
    n: int
    part: Part | None = None
    effect: float | None = None
    low: float | None = None
    high: float | None = None
    confidence: float | None = None
    p_value: float | None = None

    @property
    def id(self) -> str:
        return self.claim.id


def judge(claims: Sequence[Claim], num_sequences: int) -> list[Judgement]:
    """The verdict of every claim, at a family-wise confidence of 95 % over those that can be judged."""
    weights_RB = resample_weights(num_sequences)
    judged = [claim for claim in claims if claim.parts]
    estimates = {claim.id: [_estimate(part, weights_RB) for part in claim.parts] for claim in judged}
    p_values = [_claim_p_value(claim, estimates[claim.id]) for claim in judged]
    decided, levels = holm_levels(p_values, FAMILY_LEVEL)
    by_id = {claim.id: found for claim, *found in zip(judged, p_values, decided, levels, strict=True)}
    result = []
    for claim in claims:
        if claim.id not in by_id:
            result.append(Judgement(claim=claim, verdict=claim.without_numbers, n=num_sequences))
            continue
        p_value, is_decided, level = by_id[claim.id]
        passed = [part.passes(value) for part, (value, _, _) in zip(claim.parts, estimates[claim.id], strict=True)]
        leading = _leading(passed)
        value, resampled_R, _ = estimates[claim.id][leading]
        tail = bootstrap_tail(num_sequences, 1 - level)
        low, high = (float(edge) for edge in np.quantile(resampled_R, [tail, 1 - tail]))
        verdict: Verdict = ("holds" if all(passed) else "does not hold") if is_decided else "undecided"
        result.append(
            Judgement(
                claim=claim,
                verdict=verdict,
                n=num_sequences,
                part=claim.parts[leading],
                effect=value,
                low=low,
                high=high,
                confidence=1 - level,
                p_value=p_value,
            )
        )
    return result


Estimate = tuple[float, np.ndarray, float]
"""(value, resampled values, p-value of its threshold)."""


def _estimate(part: Part, weights_RB: np.ndarray) -> Estimate:
    columns = part.columns_BC if part.columns_BC.ndim > 1 else part.columns_BC[:, None]
    with np.errstate(invalid="ignore", divide="ignore"):
        value = float(part.statistic(seen_mean(columns)))
        resampled_R = np.asarray(part.statistic(weighted_means(weights_RB, columns)), dtype=np.float64)
    # A resample without a single case (0 / 0) says nothing: it counts for both sides.
    unknown = ~np.isfinite(resampled_R)
    resampled_R = np.where(unknown, part.threshold, resampled_R)
    if not np.isfinite(value):
        return np.nan, np.full_like(resampled_R, np.nan), 1.0
    seen = np.where(np.isnan(columns), seen_mean(columns), columns)
    if np.ptp(seen, axis=0).max() == 0:  # a fact about weights, or the same in every sequence: no sampling error
        return value, np.full_like(resampled_R, value), 0.0
    return value, resampled_R, bootstrap_p_value(resampled_R, part.threshold, len(columns))


def _claim_p_value(claim: Claim, estimates: list[Estimate]) -> float:
    """All parts pass: the weakest decides. One fails: the clearest failure, corrected for having looked at several."""
    passed = [part.passes(value) for part, (value, _, _) in zip(claim.parts, estimates, strict=True)]
    if all(passed):
        return max(p for _, _, p in estimates)
    return min(1.0, len(passed) * min(p for ok, (_, _, p) in zip(passed, estimates, strict=True) if not ok))


def _leading(passed: list[bool]) -> int:
    """The part that is shown: the first, or the first that fails."""
    return passed.index(False) if False in passed else 0
