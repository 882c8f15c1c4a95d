"""The claims about what makes a token a sink: whom it sees, its variance and its energy, each set without the others,
and its variance amplified.

A cell of the factorial is named by what a condition at any target has: its mixing, and the mixings at whose level its
variance and its energy are. In a model with a norm on the aggregation each is set on both sides of the norm, and a
claim is judged on the side that speaks most for the moment: a moment that does nothing does it on neither side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from sinkscope.studies.checks import control_unless_marked, unless_marked
from sinkscope.studies.conditions import (
    BASELINE,
    CONDITIONS,
    DOSE,
    FACTORS,
    SEE_FAR,
    SEE_PREVIOUS,
    SEE_SELF,
    SEE_TWO,
    Condition,
)
from sinkscope.studies.judging import (
    CAUSAL,
    RISE,
    TAKEN_AWAY,
    UP,
    UP_ON_A_SIDE,
    Bar,
    Claim,
    ClaimNumbers,
    Empty,
    Step,
    least_left,
    most,
    side_of,
)
from sinkscope.studies.study_data import NO_TARGET, StudyData


def _rise(
    name: str, factor: float | None = None, *, control: tuple, sides: bool = False
) -> Callable[[StudyData], ClaimNumbers | Empty]:
    """The rise under one condition, with that under another as its control. `sides`: both act on the aggregation, and
    the control's number is that of the side where the condition does most."""

    def numbers(study: StudyData) -> ClaimNumbers | Empty:
        if not study.plan.targets:
            return Empty(NO_TARGET)
        risen_BS = _risen_BS(study, dict(name=name, factor=factor)) if sides else study.rise_B(name, factor)[:, None]
        judged = study.sides[side_of(most, risen_BS)]
        beside = control_unless_marked(lambda: float(study.rise_B(*control, before_norm=judged).mean()))
        return ClaimNumbers(by_bar=[risen_BS], control=beside, note=_note(study.where, study, risen_BS))

    return numbers


def _risen_BS(study: StudyData, cell: dict[str, Any]) -> np.ndarray:
    """The rise in a cell on each side of the norm on the aggregation."""
    return np.stack([study.rise_B(**cell, before_norm=side) for side in study.sides], 1)


def _note(text: str, study: StudyData, *by_side: np.ndarray | Empty) -> str:
    sides = (study.by_side(values) for values in by_side if not isinstance(values, Empty))
    return "; ".join(filter(None, [text, *sides]))


def _dose_response(study: StudyData) -> ClaimNumbers | Empty:
    """Kendall's tau between factor and rate at the target, mean over targets; 0 where the rate never moves."""
    if not study.plan.targets:
        return Empty(NO_TARGET)
    tau_BS = np.stack([_tau_B(study, side) for side in study.sides], 1)
    note = "Kendall's tau of rate against factor, by sequence and position"
    return ClaimNumbers(by_bar=[tau_BS], control=0.0, note=_note(note, study, tau_BS))


def _tau_B(study: StudyData, before_norm: bool) -> np.ndarray:
    rates = [[study.baseline.later_BS[:, target] for target in study.plan.targets]]
    for factor in FACTORS:
        conditions = study.at_targets("amplify_variance", factor, before_norm=before_norm)
        study.supports(*conditions)
        rates.append([study.results[c].later_BS[:, c.target] for c in conditions])
    rates_FKB = np.array(rates)
    first, second = np.triu_indices(len(rates_FKB), 1)
    signs = np.sign(rates_FKB[second] - rates_FKB[first])
    moved = np.square(signs).sum(0)
    # Written out: opposite trends add up to exactly 0, the threshold, which another rounding would miss on one side.
    return (signs.sum(0) / np.sqrt(np.maximum(moved, 1) * len(first))).mean(0)


def _share_left(*cells: dict[str, Any], control: dict[str, Any]) -> Callable[[StudyData], ClaimNumbers | Empty]:
    """What cells of the factorial leave of the rise of a token that sees only itself. A control that sets a moment too
    has the number of the side where the first cell leaves least."""
    by_sides = len(control) > 1

    def numbers(study: StudyData) -> ClaimNumbers | Empty:
        if not study.plan.targets:
            return Empty(NO_TARGET)
        total_B = study.rise_B(SEE_SELF)
        if total_B.mean() < RISE:
            return Empty("a token that sees only itself makes no sink that could be taken apart")

        def left_BS2(cell: dict[str, Any]) -> np.ndarray:
            risen_BS = _risen_BS(study, cell)
            return np.stack([np.broadcast_to(total_B[:, None], risen_BS.shape), risen_BS], 2)

        by_bar = [unless_marked(partial(left_BS2, cell)) for cell in cells]
        beside = dict(control)
        if by_sides and not isinstance(by_bar[0], Empty):
            beside["before_norm"] = study.sides[side_of(least_left, by_bar[0])]
        return ClaimNumbers(
            by_bar=by_bar,
            control=control_unless_marked(lambda: float(study.rise_B(**beside).mean() / total_B.mean())),
            note=_note(f"of a rise of {total_B.mean():.1%}", study, *by_bar),
        )

    return numbers


def _single_key(study: StudyData) -> ClaimNumbers | Empty:
    if not study.plan.targets:
        return Empty(NO_TARGET)
    seen = {"the key before": SEE_PREVIOUS, "a far one": SEE_FAR}
    risen = {key: unless_marked(partial(study.rise_B, mixing)) for key, mixing in seen.items()}
    said = (
        f"{key} {100 * risen_B.mean():+.1f} points" for key, risen_B in risen.items() if not isinstance(risen_B, Empty)
    )
    control = control_unless_marked(lambda: float(study.rise_B(SEE_TWO).mean()))
    return ClaimNumbers(by_bar=list(risen.values()), control=control, note=", ".join(said))


def _suffices(
    cell: dict[str, Any], *, control: dict[str, Any], beats_control: bool = False
) -> Callable[[StudyData], ClaimNumbers | Empty]:
    def numbers(study: StudyData) -> ClaimNumbers | Empty:
        if not study.plan.targets:
            return Empty(NO_TARGET)
        risen_BS = _risen_BS(study, cell)
        by_bar: list[np.ndarray | Empty] = [risen_BS]
        side = side_of(most, risen_BS)
        judged = study.sides[side]
        if beats_control:  # on the same side
            by_bar.append(unless_marked(lambda: (risen_BS - _risen_BS(study, control))[:, [side]]))
        return ClaimNumbers(
            by_bar=by_bar,
            control=control_unless_marked(lambda: float(study.rise_B(**control, before_norm=judged).mean())),
            note=_note(study.where, study, risen_BS),
        )

    return numbers


def _variance_suffices(study: StudyData) -> ClaimNumbers | Empty:
    numbers = _suffices(_MORE_VARIANCE, control=_MORE_ENERGY, beats_control=True)(study)
    return numbers if isinstance(numbers, Empty) else replace(numbers, note=f"{numbers.note}; {_other_ways(study)}")


def _other_ways(study: StudyData) -> str:
    """What other ways to raise the variance say for the claim that it suffices, or against it."""
    said = []
    for name in OTHER_WAYS:
        risen = control_unless_marked(lambda name=name: float(study.rise_B(name, DOSE).mean()))
        times = study.times_the_variance(name, DOSE)
        if risen is not None and times > 1:
            points = round(100 * risen) + 0.0  # no -0
            side = "for" if risen >= RISE else "against"
            said.append(f"{CONDITIONS[name].label} ({times:.2g}x) {points:+.0f} points, {side} it")
    return f"other ways to more variance: {'; '.join(said) or 'none'}"


def _opening(study: StudyData) -> ClaimNumbers | Empty:
    if study.plan.sink != 0:
        return Empty("the sink is not at position 0: it sees earlier keys already")
    hidden = study.plan.targets[:1]
    control = study.left_by("mask_but_self", hidden[0]) if hidden else None
    return ClaimNumbers(by_bar=[study.left_B2(Condition("open_to_later", 0))], control=control)


OTHER_WAYS = ("scale_norm", "swap_deviation", "random_direction")
"""Conditions that raise the variance beside amplification, which they do not support: what makes no sink at more
variance speaks against variance, what makes one for it."""
_UNDER_HALF = Bar("below", 0.5, least_left)
_VARIANCE_BACK = dict(name=SEE_SELF, variance=BASELINE)
_VARIANCE_BACK_ENERGY_KEPT = dict(name=SEE_SELF, variance=BASELINE, energy=SEE_SELF)
_ENERGY_BACK = dict(name=SEE_SELF, energy=BASELINE)
_BOTH_BACK = dict(name=SEE_SELF, variance=BASELINE, energy=BASELINE)
_MORE_VARIANCE = dict(name=BASELINE, variance=SEE_SELF)
_MORE_ENERGY = dict(name=BASELINE, energy=SEE_SELF)
_TWO_KEYS = dict(name=SEE_TWO)


MIXING_CLAIMS = (
    Claim(
        id="unmixing_creates_sink",
        link=CAUSAL,
        statement="A token that sees only itself up to the birth becomes a sink: rate up by 5 points",
        bars=(UP_ON_A_SIDE,),
        numbers=_rise(SEE_SELF, control=("mask_but_self",)),
        figures=("created", "forest"),
        step=Step.ONE_KEY,
        control_is="rise when it sees all but itself",
    ),
    Claim(
        id="any_single_key_creates_sink",
        link=CAUSAL,
        statement="A token that sees exactly one other key becomes a sink, be it the one before or a far one: up by 5 "
        "points in both cases",
        bars=(UP, UP),
        numbers=_single_key,
        figures=("factorial", "forest"),
        step=Step.ONE_KEY,
        control_is="rise when it sees itself and the one before",
    ),
    Claim(
        id="unmixed_value_matters",
        link=CAUSAL,
        statement="With the variance and the energy of a mixed token, one that sees only itself keeps half of its rise",
        bars=(Bar("at least", 0.5, least_left),),
        numbers=_share_left(_BOTH_BACK, control=_TWO_KEYS),
        figures=("factorial", "forest"),
        step=Step.ONE_KEY,
        control_is="share when it sees itself and the one before",
    ),
    Claim(
        id="variance_is_what_matters",
        link=CAUSAL,
        statement="With the variance of a mixed token, whether or not its energy follows, one that sees only itself "
        "keeps under half of its rise",
        bars=(_UNDER_HALF, _UNDER_HALF),
        numbers=_share_left(_VARIANCE_BACK, _VARIANCE_BACK_ENERGY_KEPT, control=_ENERGY_BACK),
        figures=("factorial", "forest"),
        step=Step.MOMENTS,
        control_is="share with the energy of a mixed token",
    ),
    Claim(
        id="variance_suffices",
        link=CAUSAL,
        statement="A mixed token with the variance of one that sees only itself becomes a sink: up by 5 points, and by "
        "more than with its energy",
        bars=(UP_ON_A_SIDE, Bar("above", 0.0, most)),
        numbers=_variance_suffices,
        figures=("factorial", "forest"),
        step=Step.MOMENTS,
        control_is="rise with its energy",
    ),
    Claim(
        id="energy_is_what_matters",
        link=CAUSAL,
        statement="With the energy of a mixed token and its own variance, one that sees only itself keeps under half "
        "of its rise",
        bars=(_UNDER_HALF,),
        numbers=_share_left(_ENERGY_BACK, control=_VARIANCE_BACK),
        figures=("factorial", "forest"),
        step=Step.MOMENTS,
        control_is="share with the variance of a mixed token",
    ),
    Claim(
        id="energy_suffices",
        link=CAUSAL,
        statement="A mixed token with the energy of one that sees only itself becomes a sink: up by 5 points",
        bars=(UP_ON_A_SIDE,),
        numbers=_suffices(_MORE_ENERGY, control=_MORE_VARIANCE),
        figures=("factorial", "forest"),
        step=Step.MOMENTS,
        control_is="rise with its variance",
    ),
    Claim(
        id="opening_removes_sink",
        link=CAUSAL,
        statement="With position 0 opened to later keys up to the birth under a quarter of the sink is left",
        bars=(TAKEN_AWAY,),
        numbers=_opening,
        figures=("remaining", "forest"),
        step=Step.ONE_KEY,
        needs="to see itself alone",
        control_is="left when another position is hidden from itself",
    ),
    Claim(
        id="amplification_creates_sink",
        link=CAUSAL,
        statement="Amplifying its variance 8x makes a token a sink: rate up by 5 points",
        bars=(UP_ON_A_SIDE,),
        numbers=_rise("amplify_variance", DOSE, control=("shift_mean", DOSE), sides=True),
        figures=("dose", "forest"),
        step=Step.MOMENTS,
        control_is="rise when the mean is shifted as far and the variance stays",
    ),
    Claim(
        id="dose_response",
        link=CAUSAL,
        statement="The more variance, the more of a sink (trend over factors 1 to 8)",
        bars=(Bar("above", 0.0, most),),
        numbers=_dose_response,
        figures=("dose", "forest"),
        step=Step.MOMENTS,
        control_is="no trend",
    ),
)
