"""The manipulation check: whether a condition did what its name says, on the judging sequences.

For each layer it compares what is true at the target with what must be; CONDITIONS says what that is. A few dozen
sequences give the variance in one layer to within 5 to 15 %, so the estimate of a single layer cannot tell whether a
condition is off by 10 %. The estimate over all layers can. A condition fails, and is marked, if

- the root mean square over its layers of log(actual / expected), minus what sampling adds to it, is above log 1.1; or
- in one layer the whole 99 % interval of actual / expected is more than 10 % off.

Interventions that set values outright have no check: neurons and dimensions that are removed, copied or held, and
output vectors that are changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from sinkscope.statistics import bootstrap_tail, resample_weights, weighted_means
from sinkscope.studies.conditions import BASELINE, TOLERANCE, AtTarget, Condition, Expected, in_words
from sinkscope.studies.judging import Empty

if TYPE_CHECKING:
    from sinkscope.interventions.plan import Plan
    from sinkscope.studies.condition_result import ConditionResult

CONFIDENCE = 0.99
"""Of the interval in a single layer. Higher than 95 %, because several layers are tested."""
FARTHEST = np.log(1e6)
"""No ratio counts as farther off than this, so that 0 / x or x / 0 in one layer leaves the mean finite."""


T = TypeVar("T")


class MarkedError(Exception):
    """A claim or a control rests on a condition that failed its manipulation check."""


def unless_marked(judged: Callable[[], T]) -> T | Empty:
    """What `judged` returns; Empty, with the reason, if a condition that it rests on failed its check."""
    try:
        return judged()
    except MarkedError as marked:
        return Empty(str(marked))


def control_unless_marked(control: Callable[[], float]) -> float | None:
    """The number of a control; None if a condition that it rests on failed its check."""
    number = unless_marked(control)
    return None if isinstance(number, Empty) else number


class Ran(Protocol):
    """The results that are checked, as `StudyData` has them."""

    @property
    def plan(self) -> Plan: ...
    @property
    def baseline(self) -> ConditionResult: ...
    @property
    def results(self) -> dict[Condition, ConditionResult]: ...


def missed(study: Ran, *conditions: Condition) -> str | None:
    """How one condition, at one or more targets, failed its check; None if it passed."""
    for by_target in zip(*(_expected(study, condition) for condition in conditions), strict=True):
        what, rule = by_target[0].what, by_target[0].rule
        actual_BL = np.sum([expected.actual_BL for expected in by_target], 0)
        expected_BL = np.sum([expected.expected_BL for expected in by_target], 0)
        if miss := _miss(rule, actual_BL, expected_BL):
            return f"{in_words(conditions[0].label)}: failed its manipulation check ({what} {miss})"
    return None


def _expected(study: Ran, condition: Condition) -> list[Expected]:
    """What must be true of the target under a condition, from its name."""
    result, target, side = study.results[condition], condition.target, condition.before_norm
    if condition.levelled:
        levels = []
        for row, moment in enumerate(("variance", "energy")):
            if (mixing := getattr(condition, moment)) is not None:
                level = study.baseline if mixing == BASELINE else study.results[Condition(mixing, target)]
                expected_BL = level.squares(target, side)[row]
                levels.append(Expected(moment, "equal", result.squares(target, side)[row], expected_BL))
        return levels
    acted_on = slice(len(study.plan.layers))
    variance_BL, energy_BL = result.squares(target, side)[..., acted_on]
    baseline_variance_BL, baseline_energy_BL = study.baseline.squares(target, side)[..., acted_on]
    weights_BL, own_weight_BL = result.weights(target)
    at_target = AtTarget(
        factor=condition.factor or 1.0,
        variance_BL=variance_BL,
        energy_BL=energy_BL,
        weights_BL=weights_BL,
        own_weight_BL=own_weight_BL,
        later_variance_BL=result.later_squares(side)[0, :, acted_on],
        baseline_variance_BL=baseline_variance_BL,
        baseline_energy_BL=baseline_energy_BL,
        baseline_weights_BL=study.baseline.weights(target)[0],
    )
    return condition.kind.check(at_target)


def _miss(rule: str, actual_BL: np.ndarray, expected_BL: np.ndarray) -> str | None:
    """How far the layers together, or one of them, are off; None if they are close enough."""
    limits = {"equal": (-FARTHEST, FARTHEST), "at most": (0.0, FARTHEST), "at least": (-FARTHEST, 0.0)}[rule]

    def off(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.nan_to_num(np.clip(np.log(actual / expected), *limits))  # 0 / 0 is not off

    weights_RB, tail = resample_weights(len(actual_BL)), bootstrap_tail(len(actual_BL), CONFIDENCE)
    off_L = off(actual_BL.mean(0), expected_BL.mean(0))
    off_RL = off(weighted_means(weights_RB, actual_BL), weighted_means(weights_RB, expected_BL))
    low_L, high_L = np.quantile(off_RL, [tail, 1 - tail], axis=0)
    proven_L = np.maximum(low_L, -high_L)
    # Sampling alone makes the squares larger, by the variance of the resampled values.
    mean_square = float(np.mean(off_L**2 - off_RL.var(0)))
    if mean_square > np.log(1 + TOLERANCE) ** 2:
        return f"off by a factor of {np.exp(mean_square**0.5):.2f}, root mean square over layers"
    if proven_L.max() > np.log(1 + TOLERANCE):
        layer = int(proven_L.argmax())
        return f"{np.exp(off_L[layer]):.2f} times what it should be in layer {layer}"
    return None
