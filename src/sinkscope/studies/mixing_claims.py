"""The claims about what makes a token a sink: which keys it attends to, its variance, or its energy.

Each is changed without the others, in a factorial of conditions. A cell of it is a dict of the arguments that its
conditions share at every target: the mixing (`name`), and the mixings whose level `variance` and `energy` are brought
to.

In a model with a norm on the aggregation, variance and energy are set on both sides of the norm. A claim is judged on
the side that speaks most for the moment that it is about, so that "variance does not matter" needs both sides to say
so.
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
    """The numbers of a claim about the rise under one condition, with another one as control. `sides`: both act on the
    aggregation, and the control is read on the side of the norm where the condition does most."""

    def numbers(study: StudyData) -> ClaimNumbers | Empty:
        if not study.plan.targets:
            return Empty(NO_TARGET)
        risen_BS = _risen_BS(study, dict(name=name, factor=factor)) if sides else study.rise_B(name, factor)[:, None]
        judged = study.sides[side_of(most, risen_BS)]
        beside = control_unless_marked(lambda: float(study.rise_B(*control, before_norm=judged).mean()))
        return ClaimNumbers(by_bar=[risen_BS], control=beside, note=_note(study.where, study, risen_BS))

    return numbers


def _risen_BS(study: StudyData, cell: dict[str, Any]) -> np.ndarray:
    """[B, S] the rise in a cell, on each side of the norm on the aggregation."""
    return np.stack([study.rise_B(**cell, before_norm=side) for side in study.sides], 1)


def _note(text: str, study: StudyData, *by_side: np.ndarray | Empty) -> str:
    sides = (study.by_side(values) for values in by_side if not isinstance(values, Empty))
    return "; ".join(filter(None, [text, *sides]))


def _dose_response(study: StudyData) -> ClaimNumbers | Empty:
    """Kendall's tau between factor and sink rate, mean over targets; 0 where the rate never changes."""
    if not study.plan.targets:
        return Empty(NO_TARGET)
    tau_BS = np.stack([_tau_B(study, side) for side in study.sides], 1)
    note = "Kendall's tau between factor and sink rate, mean over sequences and positions"
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
    """The numbers of a claim about how much of the rise of a token that attends only to itself is left in some cells of
    the factorial. A control that sets a moment too is read on the side of the norm where the first cell leaves
    least."""
    by_sides = len(control) > 1

    def numbers(study: StudyData) -> ClaimNumbers | Empty:
        if not study.plan.targets:
            return Empty(NO_TARGET)
        total_B = study.rise_B(SEE_SELF)
        if total_B.mean() < RISE:
            return Empty("attending only to itself makes no sink, so there is nothing to take apart")

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
            note=_note(f"share of a rise by {100 * total_B.mean():.1f} points", study, *by_bar),
        )

    return numbers


def _single_key(study: StudyData) -> ClaimNumbers | Empty:
    if not study.plan.targets:
        return Empty(NO_TARGET)
    attended = {"the previous key": SEE_PREVIOUS, "a distant key": SEE_FAR}
    risen = {key: unless_marked(partial(study.rise_B, mixing)) for key, mixing in attended.items()}
    texts = (
        f"{key} {100 * risen_B.mean():+.1f} points" for key, risen_B in risen.items() if not isinstance(risen_B, Empty)
    )
    control = control_unless_marked(lambda: float(study.rise_B(SEE_TWO).mean()))
    return ClaimNumbers(by_bar=list(risen.values()), control=control, note=", ".join(texts))


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
    """In words: which other ways to raise the variance make a sink, and which do not."""
    texts = []
    for name in OTHER_WAYS:
        risen = control_unless_marked(lambda name=name: float(study.rise_B(name, DOSE).mean()))
        times = study.times_the_variance(name, DOSE)
        if risen is not None and times > 1:
            points = round(100 * risen) + 0.0  # no -0
            side = "for" if risen >= RISE else "against"
            texts.append(f"{CONDITIONS[name].label} (variance {times:.2g}x) {points:+.0f} points, {side} the claim")
    return f"other ways to raise the variance: {'; '.join(texts) or 'none'}"


def _opening(study: StudyData) -> ClaimNumbers | Empty:
    if study.plan.sink != 0:
        return Empty("the sink is not at position 0, so it attends to earlier keys already")
    hidden = study.plan.targets[:1]
    control = study.left_by("mask_but_self", hidden[0]) if hidden else None
    return ClaimNumbers(by_bar=[study.left_B2(Condition("open_to_later", 0))], control=control)


OTHER_WAYS = ("scale_norm", "swap_deviation", "random_direction")
"""Conditions that raise the variance without amplifying the token's own deviation. One that makes a sink speaks for
variance as the cause, one that makes none against it."""
_UNDER_HALF = Bar("below", 0.5, least_left, at_targets=True)
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
        statement="Let a token attend only to itself in the early layers: its sink rate rises by at least 5 points",
        bars=(UP_ON_A_SIDE,),
        numbers=_rise(SEE_SELF, control=("mask_but_self",)),
        figures=("created", "forest"),
        step=Step.ONE_KEY,
        control_is="rise when it attends to all but itself",
    ),
    Claim(
        id="any_single_key_creates_sink",
        link=CAUSAL,
        statement="Let a token attend only to the previous key, or only to a distant one: each time its sink rate "
        "rises by at least 5 points",
        bars=(UP, UP),
        numbers=_single_key,
        figures=("factorial", "forest"),
        step=Step.ONE_KEY,
        control_is="rise when it attends to itself and the previous key",
    ),
    Claim(
        id="unmixed_value_matters",
        link=CAUSAL,
        statement="With an ordinary token's variance and energy, a token that attends only to itself keeps at least "
        "half of its rise",
        bars=(Bar("at least", 0.5, least_left, at_targets=True),),
        numbers=_share_left(_BOTH_BACK, control=_TWO_KEYS),
        figures=("factorial", "forest"),
        step=Step.ONE_KEY,
        control_is="share of the rise when it attends to itself and the previous key",
    ),
    Claim(
        id="variance_is_what_matters",
        link=CAUSAL,
        statement="With an ordinary token's variance, energy kept or not, a token that attends only to itself keeps "
        "less than half of its rise",
        bars=(_UNDER_HALF, _UNDER_HALF),
        numbers=_share_left(_VARIANCE_BACK, _VARIANCE_BACK_ENERGY_KEPT, control=_ENERGY_BACK),
        figures=("factorial", "forest"),
        step=Step.MOMENTS,
        control_is="share of the rise with the energy of an ordinary token",
    ),
    Claim(
        id="variance_suffices",
        link=CAUSAL,
        statement="Give an ordinary token the value variance of one that attends only to itself: its sink rate rises "
        "by at least 5 points, and by more than when only its energy is raised",
        bars=(UP_ON_A_SIDE, Bar("above", 0.0, most)),
        numbers=_variance_suffices,
        figures=("factorial", "forest"),
        step=Step.MOMENTS,
        control_is="rise when only its energy is raised",
    ),
    Claim(
        id="energy_is_what_matters",
        link=CAUSAL,
        statement="With an ordinary token's energy but its own variance, a token that attends only to itself keeps "
        "less than half of its rise",
        bars=(_UNDER_HALF,),
        numbers=_share_left(_ENERGY_BACK, control=_VARIANCE_BACK),
        figures=("factorial", "forest"),
        step=Step.MOMENTS,
        control_is="share of the rise with the variance of an ordinary token",
    ),
    Claim(
        id="energy_suffices",
        link=CAUSAL,
        statement="Give an ordinary token just the energy of one that attends only to itself: its sink rate rises by "
        "at least 5 points",
        bars=(UP_ON_A_SIDE,),
        numbers=_suffices(_MORE_ENERGY, control=_MORE_VARIANCE),
        figures=("factorial", "forest"),
        step=Step.MOMENTS,
        control_is="rise when its variance is raised",
    ),
    Claim(
        id="opening_removes_sink",
        link=CAUSAL,
        statement="Let position 0 attend to later keys in the early layers: less than a quarter of the sink is left",
        bars=(TAKEN_AWAY,),
        numbers=_opening,
        figures=("remaining", "forest"),
        step=Step.ONE_KEY,
        needs="to attend only to itself",
        control_is="share left when another position cannot attend to itself",
    ),
    Claim(
        id="amplification_creates_sink",
        link=CAUSAL,
        statement=f"Multiply a token's deviation from its mean by {DOSE:g} (its variance by {DOSE**2:g}): its sink "
        "rate rises by at least 5 points",
        bars=(UP_ON_A_SIDE,),
        numbers=_rise("amplify_variance", DOSE, control=("shift_mean", DOSE), sides=True),
        figures=("dose", "forest"),
        step=Step.MOMENTS,
        control_is="rise when its mean is shifted as far and its variance stays",
    ),
    Claim(
        id="dose_response",
        link=CAUSAL,
        statement="The more a token's variance is amplified, the higher is its sink rate (trend over factors 1 to "
        f"{DOSE:g})",
        bars=(Bar("above", 0.0, most),),
        numbers=_dose_response,
        figures=("dose", "forest"),
        step=Step.MOMENTS,
        control_is="no trend",
    ),
)
