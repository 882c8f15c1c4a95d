"""Whether the conditions of a study did what their names say, on the judging sequences.

What each must have brought about, and how far off counts as a miss, is in `interventions.checks`, for the conditions of
a study and for `sinkscope intervene` alike. Here their results are put into that form, summed over targets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from sinkscope.interventions.check_results import miss
from sinkscope.interventions.checks import AtTarget, Expected, PassAtTarget
from sinkscope.studies.conditions import BASELINE, Condition, in_words
from sinkscope.studies.judging import Empty

if TYPE_CHECKING:
    from sinkscope.interventions.plan import Plan
    from sinkscope.studies.condition_result import ConditionResult

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
        in_all = by_target[0]._replace(
            actual_BL=np.sum([expected.actual_BL for expected in by_target], 0),
            expected_BL=np.sum([expected.expected_BL for expected in by_target], 0),
        )
        if how := miss(in_all):
            return f"{in_words(conditions[0].label)}: failed its manipulation check ({in_all.what} {how})"
    return None


def _expected(study: Ran, condition: Condition) -> list[Expected]:
    """What must be true of the target under a condition, from its name."""
    result, target, side = study.results[condition], condition.target, condition.before_norm
    if not condition.levelled:
        at_target = AtTarget(
            position=target,
            factor=condition.factor or 1.0,
            under=_pass_at(study, result, target, side),
            baseline=_pass_at(study, study.baseline, target, side),
        )
        return condition.kind.check(at_target)
    levels = []
    for row, moment in enumerate(("variance", "energy")):
        if (mixing := getattr(condition, moment)) is not None:
            level = study.baseline if mixing == BASELINE else study.results[Condition(mixing, target)]
            actual_BL, expected_BL = result.squares(target, side)[row], level.squares(target, side)[row]
            levels.append(Expected(moment, f"its {moment} is that of {mixing}", "equal", actual_BL, expected_BL))
    return levels


def _pass_at(study: Ran, result: ConditionResult, target: int, side: bool) -> PassAtTarget:
    """What a condition's result holds of its target; of the moments, in the layers that the aggregation is changed
    in."""
    acted_on = slice(len(study.plan.layers))
    variance_BL, energy_BL = result.squares(target, side)[..., acted_on]
    weights_BL, own_weight_BL = result.weights(target)
    return PassAtTarget(
        variance_BL=variance_BL,
        energy_BL=energy_BL,
        weights_BL=weights_BL,
        own_weight_BL=own_weight_BL,
        later_variance_BL=result.later_squares(side)[0, :, acted_on],
    )
