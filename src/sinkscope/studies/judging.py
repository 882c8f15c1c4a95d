"""What a claim is, and how the verdict follows from its numbers by sequence.

A claim has one bar or several. A bar is a number computed from means over sequences, with a threshold. It is cleared by
the lower end of its interval where the rule is `at least` or `above`, by the upper end where it is `below`; only with
`at least` may that end equal the threshold. A claim

- holds if it clears every bar;
- does not hold if the interval of one bar lies wholly on the wrong side;
- is undecided if an interval contains the threshold;
- is not applicable if it has no number to judge.

A bar has no number if it rests on a condition that failed its manipulation check. Its claim cannot hold; the other bars
may still refute it, and if they don't, the claim is not applicable.

Intervals are bootstrap intervals over sequences. Their level comes from Holm's procedure over all applicable claims, so
that in at most about 5 % of studies the choice of sequences makes any verdict wrong.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

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
CAUSAL = "causal"
"""The link of claims about cause and effect."""

RISE = 0.05
"""A sink counts as made if its rate rises by this much, and as not made if the whole interval lies below it."""
QUARTER = 0.25
"""A sink counts as removed if less than this share of it is left."""
SPARED = 0.8
"""A matched random set must leave at least this share of the sink."""
LOCKED = 0.5
"""Heads find the sink by a direction, or a coordinate, without which this share of q . k is gone."""
EMPTY_CONTROL = 0.1
"""A random set is an empty control if it does less at the sink than this share of what it is compared with."""
ALSO_CONTROL = "its control clears the threshold too"


def some_of(neurons: Sequence[Any], most: int = 8) -> str:
    """The first neurons in words, and how many more there are."""
    more = f" and {len(neurons) - most} more" if len(neurons) > most else ""
    return ", ".join(map(str, neurons[:most])) + more


def the_mean(means: np.ndarray) -> np.ndarray:
    return means


def second_over_first(means: np.ndarray) -> np.ndarray:
    return means[..., 1] / means[..., 0]


def least_left(means: np.ndarray) -> np.ndarray:
    """The share that is left, of means [..., S, 2], on the side of the norm on the aggregation where it is smallest."""
    return second_over_first(means).min(-1)


def most_left(means: np.ndarray) -> np.ndarray:
    """Likewise on the side where it is largest."""
    return second_over_first(means).max(-1)


def most(means: np.ndarray) -> np.ndarray:
    """The largest number [..., S] of the sides of the norm on the aggregation."""
    return means.max(-1)


def gone(means: np.ndarray) -> np.ndarray:
    """The share of q . k that is gone. Means [..., 2 or more, N] hold it as it is and after a removal, for N heads.
    Heads are weighted by the size of their q . k, because the share of one near 0 is noise."""
    whole, rest = means[..., 0, :], means[..., 1, :]
    return (np.sign(whole) * (whole - rest)).sum(-1) / np.abs(whole).sum(-1)


def side_of(statistic: Callable[[np.ndarray], np.ndarray], values: np.ndarray) -> int:
    """Which side of the norm one of the statistics above takes, of numbers by sequence [B, S, ...]."""
    means = values.mean(0)
    alone = [statistic(means[[side]]) for side in range(len(means))]
    return int(np.equal(alone, statistic(means)).argmax())


@dataclass(frozen=True)
class Bar:
    """A statistic with the threshold that it must clear."""

    rule: Rule
    threshold: float
    statistic: Callable[[np.ndarray], np.ndarray] = the_mean
    """From means over sequences [..., what a sequence has] to numbers [...]."""
    centred: bool = False
    """Whether resampled values are shifted so that their median is the estimate: for a statistic that resampling, which
    repeats sequences, biases downwards."""

    def cleared_by(self, value: float) -> bool:
        return CLEARS[self.rule](value, self.threshold)


UP = Bar("at least", RISE)
UP_ON_A_SIDE = Bar("at least", RISE, most)
TAKEN_AWAY = Bar("below", QUARTER, second_over_first)


@dataclass(frozen=True)
class Empty:
    """Why a claim, or one of its bars, has no number to judge, and the verdict that it then gets."""

    note: str
    verdict: Verdict = "not applicable"


@dataclass(frozen=True, kw_only=True)
class ClaimNumbers:
    """What a claim is judged on."""

    by_bar: Sequence[np.ndarray | Empty]
    """For each bar numbers by sequence [B, ...]; its statistic takes their means. NaN is left out."""
    control: float | None = None
    note: str = ""


class Step(Enum):
    """A causal step that claims test, in the order of the page: the first and the last panel of the chain that it
    spans, and its heading."""

    ONE_KEY = (1, 5, "Attending to a single key makes a sink")
    MOMENTS = (1, 5, "Higher variance or energy makes a sink")
    LESS_VARIANCE = (1, 5, "The sink needs its variance, or only its mean value")
    BY_SUPER_NEURONS = (1, 2, "The super neurons carry the effect")
    SPARSITY = (3, 5, "The sink needs sparse output vectors")
    DIMENSIONS = (4, 5, "The massive dimensions make a sink")
    BY_DIMENSIONS = (1, 4, "The massive dimensions carry the effect")
    SUPER_NEURONS = (2, 5, "Super neurons make a sink, and the sink needs them")

    def __init__(self, first_panel: int, last_panel: int, label: str) -> None:
        self.first_panel, self.last_panel, self.label = first_panel, last_panel, label


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim, the same for every model."""

    id: str
    link: str
    """The link of the chain that it is about, or CAUSAL."""
    statement: str
    bars: tuple[Bar, ...]
    numbers: Callable[[Any], ClaimNumbers | Empty]
    """(`StudyData`) -> what its bars are judged on."""
    figures: tuple[str, ...]
    """The figures that show its evidence; the page links to the first of them that it has."""
    control_is: str | None = None
    """What was done for its control number, in words."""
    step: Step | None = None
    """The causal step that it tests."""
    needs: str = ""
    """What the sink needs if the claim holds, for the answer."""
    interval_note: str = ""
    """What must be known to read its interval."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A claim's verdict, with the estimate and the interval of one bar: the first that was not cleared, or the
    first."""

    claim: Claim
    verdict: Verdict
    n: int
    control: float | None = None
    note: str = ""
    bar: Bar | None = None
    effect: float | None = None
    low: float | None = None
    high: float | None = None
    confidence: float | None = None
    p_value: float | None = None

    @property
    def id(self) -> str:
        return self.claim.id


Estimate = tuple[float, np.ndarray, float]
"""(value, resampled values, p-value against the threshold)."""
Estimates = list[Estimate | None]
"""By bar; None where a bar has no number."""


def judge(claims: Sequence[tuple[Claim, ClaimNumbers | Empty]], num_sequences: int) -> list[Judgement]:
    """The verdict of every claim, at a family-wise confidence of 95 % over those that can be judged."""
    weights_RB = resample_weights(num_sequences)
    estimates = {
        claim.id: [
            None if isinstance(columns, Empty) else _estimate(bar, columns, weights_RB)
            for bar, columns in zip(claim.bars, numbers.by_bar, strict=True)
        ]
        for claim, numbers in claims
        if isinstance(numbers, ClaimNumbers)
    }
    judged = [claim for claim, _ in claims if any(estimates.get(claim.id, ()))]
    p_values = [_p_value(claim, estimates[claim.id]) for claim in judged]
    decided, levels = holm_levels(p_values, FAMILY_LEVEL)
    by_id = {claim.id: decision for claim, *decision in zip(judged, p_values, decided, levels, strict=True)}
    result = []
    for claim, numbers in claims:
        by_bar = [numbers] if isinstance(numbers, Empty) else numbers.by_bar
        missing = [bar for bar in by_bar if isinstance(bar, Empty)]
        p_value, is_decided, level = by_id.get(claim.id, (None, False, 1.0))
        if isinstance(numbers, Empty) or (missing and not is_decided):
            note = "; ".join(bar.note for bar in missing)
            result.append(Judgement(claim=claim, verdict=missing[0].verdict, n=num_sequences, note=note))
            continue
        cleared = _cleared(claim, estimates[claim.id])
        leading = cleared.index(False) if False in cleared else 0
        leader = estimates[claim.id][leading]
        assert leader is not None  # where a bar has no number, the claim got here by one that is not cleared
        value, resampled_R, _ = leader
        tail = bootstrap_tail(num_sequences, 1 - level)
        low, high = (float(edge) for edge in np.quantile(resampled_R, [tail, 1 - tail]))
        verdict: Verdict = ("holds" if all(cleared) else "does not hold") if is_decided else "undecided"
        notes = [f"not counted: {bar.note}" for bar in missing]
        if verdict == "holds" and numbers.control is not None and claim.bars[0].cleared_by(numbers.control):
            notes.append(ALSO_CONTROL)
        result.append(
            Judgement(
                claim=claim,
                verdict=verdict,
                n=num_sequences,
                control=numbers.control,
                note="; ".join(filter(None, [numbers.note, *notes])),
                bar=claim.bars[leading],
                effect=value,
                low=low,
                high=high,
                confidence=1 - level,
                p_value=p_value,
            )
        )
    return result


def _estimate(bar: Bar, values: np.ndarray, weights_RB: np.ndarray) -> Estimate:
    columns_BC, shape = values.reshape(len(values), -1), values.shape[1:]
    with np.errstate(invalid="ignore", divide="ignore"):
        value = float(bar.statistic(seen_mean(columns_BC).reshape(shape)))
        means = weighted_means(weights_RB, columns_BC).reshape(-1, *shape)
        resampled_R = np.asarray(bar.statistic(means), dtype=np.float64)
    if not np.isfinite(value):
        return np.nan, np.full_like(resampled_R, np.nan), 1.0
    # A resample that gives 0 / 0 says nothing: at the threshold it counts for both sides.
    resampled_R = np.where(np.isfinite(resampled_R), resampled_R, bar.threshold)
    if bar.centred:
        resampled_R += value - np.median(resampled_R)
    seen_BC = np.where(np.isnan(columns_BC), seen_mean(columns_BC), columns_BC)
    if np.ptp(seen_BC, axis=0).max() == 0:  # the same in every sequence, such as what is read from weights
        return value, np.full_like(resampled_R, value), 0.0
    return value, resampled_R, bootstrap_p_value(resampled_R, bar.threshold, len(columns_BC))


def _cleared(claim: Claim, estimates: Estimates) -> list[bool | None]:
    """By bar: whether its estimate clears the threshold; None where it has no number."""
    pairs = zip(claim.bars, estimates, strict=True)
    return [None if estimate is None else bar.cleared_by(estimate[0]) for bar, estimate in pairs]


def _p_value(claim: Claim, estimates: Estimates) -> float:
    """The p-value of a claim. If all bars are cleared, it is that of the weakest, or 1 if one has no number. If not, it
    is that of the clearest failure, times the number of bars because the clearest was picked."""
    cleared = _cleared(claim, estimates)
    failures = [estimate[2] for ok, estimate in zip(cleared, estimates, strict=True) if estimate and not ok]
    if failures:
        return min(1.0, len(cleared) * min(failures))
    return max(1.0 if estimate is None else estimate[2] for estimate in estimates)
