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

A bootstrap knows only the sequences that it has. Where all of them, or most, give the same number, such as a rate of 0,
it cannot know that a few others would give a high one. There the interval also allows for sequences that were not seen:
as large a share of all sequences as the binomial distribution cannot exclude, each with the highest or the lowest
number that one can have.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal

import numpy as np

from sinkscope.statistics import (
    at_most,
    bootstrap_p_value,
    bootstrap_tail,
    holm_levels,
    resample_weights,
    seen_mean,
    weighted_means,
)

Verdict = Literal["holds", "does not hold", "not applicable", "undecided"]
Rule = Literal["at least", "above", "below"]
CLEARS: dict[Rule, Callable[[Any, float], Any]] = {
    "at least": operator.ge,
    "above": operator.gt,
    "below": operator.lt,
}
FAMILY_LEVEL = 0.05
SHARES = np.linspace(0, 1, 2001)
"""Shares of all sequences that may be unlike those that were seen, from which intervals take theirs."""
CAUSAL = "causal"
"""The link of claims about cause and effect."""

RISE = 0.05
"""A sink counts as made if its rate rises by this much, and as not made if the whole interval lies below it."""
HALF = 0.5
"""A sink, or an effect, counts as kept if at least this share of it is left."""
QUARTER = 0.25
"""A sink counts as removed if less than this share of it is left."""
SPARED = 0.8
"""A matched random set must leave at least this share of the sink."""
LOCKED = 0.5
"""Heads find the sink by a direction, or a coordinate, without which this share of q . k is gone."""
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


def most(means: np.ndarray) -> np.ndarray:
    """The largest number [..., S] of the sides of the norm on the aggregation."""
    return means.max(-1)


def gone(means: np.ndarray) -> np.ndarray:
    """The share of q . k that is gone. Means [..., 2 or more, N] hold it as it is and after a removal, for N heads.
    Heads are weighted by the size of their q . k, because the share of one near 0 is noise."""
    whole, rest = means[..., 0, :], means[..., 1, :]
    return (np.sign(whole) * (whole - rest)).sum(-1) / np.abs(whole).sum(-1)


def mediated(means: np.ndarray) -> np.ndarray:
    """The share of a rise that is gone while the mediator is held. The last axis holds the rise in total, and the rise
    with the mediator held."""
    return 1 - second_over_first(means)


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
    at_targets: bool = False
    """Whether a sequence's number is a mean over targets: then each sequence shows as many tokens."""

    def cleared_by(self, value: float) -> bool:
        return CLEARS[self.rule](value, self.threshold)


UP = Bar("at least", RISE, at_targets=True)
UP_ON_A_SIDE = Bar("at least", RISE, most, at_targets=True)
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
    exact: bool = False
    """Whether the numbers are read from weights, and so the same in all sequences there are."""


class Step(Enum):
    """A causal step that claims test, in the order of the page: the first and the last panel of the chain that it
    spans, and its heading."""

    TOKEN = (1, 5, "The token makes a sink, wherever it stands")
    ONE_KEY = (1, 5, "Attending to a single key makes a sink")
    MOMENTS = (1, 5, "Higher variance makes a sink")
    BY_SUPER_NEURONS = (1, 2, "The super neurons carry the effect")
    SUPER_NEURONS = (2, 5, "Neurons make a sink, and the sink needs them")

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


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What is known of one bar's number."""

    value: float
    resampled_R: np.ndarray
    p_value: float
    """Against the threshold."""
    unseen: Unseen | None = None
    """None where the bootstrap sees enough of a spread."""

    def interval(self, num_sequences: int, level: float) -> tuple[float, float]:
        """(low, high) at a confidence of 1 - level."""
        tail = bootstrap_tail(num_sequences, 1 - level)
        low, high = (float(edge) for edge in np.quantile(self.resampled_R, [tail, 1 - tail]))
        return (low, high) if self.unseen is None else self.unseen.widened(low, high)


@dataclass(frozen=True, kw_only=True)
class Unseen:
    """What a number would be if some share of all sequences, one of SHARES (Q), were unlike those that were seen."""

    values_2Q: np.ndarray
    """If each of them had the lowest number that one can have, and the highest."""
    chance_Q: np.ndarray
    """How likely it is that so many were not seen."""

    # The level is that of the family, without Holm's correction: whether such sequences were seen is one event for all
    # claims of a study.

    def may_change(self, bar: Bar, value: float) -> bool:
        """Whether enough of them for the other side of the threshold can have been missed."""
        other_2Q = CLEARS[bar.rule](self.values_2Q, bar.threshold) != bar.cleared_by(value)
        return bool((other_2Q & (self.chance_Q > FAMILY_LEVEL)).any())

    def widened(self, low: float, high: float) -> tuple[float, float]:
        likely_2 = self.values_2Q[:, self.chance_Q > FAMILY_LEVEL]
        return min(low, float(np.nanmin(likely_2))), max(high, float(np.nanmax(likely_2)))


Estimates = list[Estimate | None]
"""By bar; None where a bar has no number."""


def judge(
    claims: Sequence[tuple[Claim, ClaimNumbers | Empty]],
    num_sequences: int,
    *,
    num_targets: int = 1,
    largest: float = 1.0,
) -> list[Judgement]:
    """The verdict of every claim, at a family-wise confidence of 95 % over those that can be judged.

    `largest` is the highest sink rate of a token in any one sequence of the study.
    """
    weights_RB = resample_weights(num_sequences)

    def estimated(bar: Bar, columns: np.ndarray | Empty, exact: bool) -> Estimate | None:
        if isinstance(columns, Empty):
            return None
        estimate = _estimate(bar, columns, weights_RB)
        if exact:
            return replace(estimate, p_value=0.0)
        tokens = num_sequences * (num_targets if bar.at_targets else 1)
        unseen = _unseen(bar, columns, tokens, largest)
        if unseen is None or not np.isfinite(estimate.value):
            return estimate
        p_value = 1.0 if unseen.may_change(bar, estimate.value) else estimate.p_value
        return replace(estimate, unseen=unseen, p_value=p_value)

    estimates = {
        claim.id: [
            estimated(bar, columns, numbers.exact) for bar, columns in zip(claim.bars, numbers.by_bar, strict=True)
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
        low, high = leader.interval(num_sequences, level)
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
                effect=leader.value,
                low=low,
                high=high,
                confidence=1 - level,
                p_value=p_value,
            )
        )
    return result


def _estimate(bar: Bar, values: np.ndarray, weights_RB: np.ndarray) -> Estimate:
    """What the bootstrap knows of a bar's number."""
    columns_BC, shape = values.reshape(len(values), -1), values.shape[1:]
    with np.errstate(invalid="ignore", divide="ignore"):
        value = float(bar.statistic(seen_mean(columns_BC).reshape(shape)))
        means = weighted_means(weights_RB, columns_BC).reshape(-1, *shape)
        resampled_R = np.asarray(bar.statistic(means), dtype=np.float64)
    if not np.isfinite(value):
        return Estimate(value=np.nan, resampled_R=np.full_like(resampled_R, np.nan), p_value=1.0)
    # A resample that gives 0 / 0 says nothing: at the threshold it counts for both sides.
    resampled_R = np.where(np.isfinite(resampled_R), resampled_R, bar.threshold)
    if bar.centred:
        resampled_R += value - np.median(resampled_R)
    seen_BC = np.where(np.isnan(columns_BC), seen_mean(columns_BC), columns_BC)
    if np.ptp(seen_BC, axis=0).max() == 0:  # rounding would give resampled means a spread
        resampled_R = np.full_like(resampled_R, value)
    p_value = bootstrap_p_value(resampled_R, bar.threshold, len(columns_BC))
    return Estimate(value=value, resampled_R=resampled_R, p_value=p_value)


def _unseen(bar: Bar, values: np.ndarray, num_tokens: int, largest: float) -> Unseen | None:
    """What sequences that were not seen may change, where a column has no spread or is mostly 0; None where none is."""
    columns_BC, shape = values.reshape(len(values), -1), values.shape[1:]
    alike_C = (columns_BC == columns_BC[0]).all(0) | ((columns_BC == 0).mean(0) >= 0.5)
    if bar.centred or not alike_C.any():
        return None
    mean_C = seen_mean(columns_BC)
    extremes_2C = np.stack([np.minimum(columns_BC.min(0), 0.0), np.maximum(columns_BC.max(0), largest)])
    extremes_2C = np.where(alike_C, extremes_2C, mean_C)
    means_2QC = mean_C + SHARES[:, None] * (extremes_2C - mean_C)[:, None]
    with np.errstate(invalid="ignore", divide="ignore"):
        values_2Q = np.asarray(bar.statistic(means_2QC.reshape(2, len(SHARES), *shape)))
        alone_B = bar.statistic(values)
    # Sequences whose own number speaks against the verdict were seen; not so many more can have been missed.
    cleared = bar.cleared_by(float(values_2Q[0, 0]))
    against = (CLEARS[bar.rule](alone_B, bar.threshold) != cleared) & np.isfinite(alone_B)
    return Unseen(values_2Q=values_2Q, chance_Q=at_most(int(against.sum()), num_tokens, SHARES))


def _cleared(claim: Claim, estimates: Estimates) -> list[bool | None]:
    """By bar: whether its estimate clears the threshold; None where it has no number."""
    pairs = zip(claim.bars, estimates, strict=True)
    return [None if estimate is None else bar.cleared_by(estimate.value) for bar, estimate in pairs]


def _p_value(claim: Claim, estimates: Estimates) -> float:
    """The p-value of a claim. If all bars are cleared, it is that of the weakest, or 1 if one has no number. If not, it
    is that of the clearest failure, times the number of bars because the clearest was picked."""
    cleared = _cleared(claim, estimates)
    failures = [estimate.p_value for ok, estimate in zip(cleared, estimates, strict=True) if estimate and not ok]
    if failures:
        return min(1.0, len(cleared) * min(failures))
    return max(1.0 if estimate is None else estimate.p_value for estimate in estimates)
