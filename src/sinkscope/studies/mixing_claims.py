"""The claims about what makes a token a sink: the token itself, its place, which keys it attends to, or its variance.

Tokens are moved; masks, variance and energy are changed without one another, in a factorial of conditions. A cell of it
is a dict of the arguments that its conditions share at every target: the mixing (`name`), and the mixings whose level
`variance` and `energy` are brought to.

In a model with a norm on the aggregation, variance and energy are set on both sides of the norm. A claim is judged on
the side that speaks most for the moment that it is about, so that "variance does not matter" needs both sides to say
so.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from sinkscope.studies.checks import control_unless_marked, unless_marked
from sinkscope.studies.conditions import BASELINE, CONDITIONS, DOSE, SEE_SELF, Condition
from sinkscope.studies.judging import (
    CAUSAL,
    HALF,
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
    second_over_first,
    side_of,
)
from sinkscope.studies.study_data import NO_TARGET, StudyData

_VARIANCE_BACK = dict(name=SEE_SELF, variance=BASELINE)
_VARIANCE_BACK_ENERGY_KEPT = dict(name=SEE_SELF, variance=BASELINE, energy=SEE_SELF)
_MEAN_ALONE = dict(name="mean_of_itself")
_ENERGY_BACK = dict(name=SEE_SELF, energy=BASELINE)
_MORE_VARIANCE: dict[str, Any] = dict(name=BASELINE, variance=SEE_SELF)
_MORE_ENERGY: dict[str, Any] = dict(name=BASELINE, energy=SEE_SELF)
OTHER_WAYS = ("scale_norm", "swap_deviation", "random_direction")
"""Conditions that raise the variance without amplifying the token's own deviation. One that makes a sink speaks for
variance as the cause, one that makes none against it."""
SAME_TOKENS = "all tokens are the same, so no other one can stand there"


def _first_token(study: StudyData) -> ClaimNumbers | Empty:
    if not study.tokens_differ:
        return Empty(SAME_TOKENS)
    sink, elsewhere = study.plan.sink, study.plan.targets[:1]
    left_B2 = study.left_B2(Condition("other_token", sink))
    return ClaimNumbers(
        by_bar=[left_B2],
        control=study.left_by("other_token", elsewhere[0]) if elsewhere else None,
        note=_shifted(study),
    )


def _shifted(study: StudyData) -> str:
    """In words: what is left of the sink with its position ids shifted."""
    left = study.left_by("shift_positions", study.plan.sink)
    return "" if left is None else f"with all position ids shifted {left:.1%} is left"


def _token_carries(study: StudyData) -> ClaimNumbers | Empty:
    if not study.tokens_differ:
        return Empty(SAME_TOKENS)
    if not study.plan.targets:
        return Empty(NO_TARGET)
    control = float(study.rise_B("other_token").mean())
    return ClaimNumbers(by_bar=[study.rise_B("move_token")], control=control, note=study.where)


def _unmixing(study: StudyData) -> ClaimNumbers | Empty:
    if not study.plan.targets:
        return Empty(NO_TARGET)
    control = control_unless_marked(lambda: float(study.rise_B("mask_but_self").mean()))
    return ClaimNumbers(by_bar=[study.rise_B(SEE_SELF)], control=control, note=study.where)


def _opening(study: StudyData) -> ClaimNumbers | Empty:
    if study.plan.sink != 0:
        return Empty("the sink is not at position 0, so it attends to earlier keys already")
    hidden = study.plan.targets[:1]
    control = study.left_by("mask_but_self", hidden[0]) if hidden else None
    return ClaimNumbers(by_bar=[study.left_B2(Condition("open_to_later", 0))], control=control)


def _variance_matters(study: StudyData) -> ClaimNumbers | Empty:
    if not study.plan.targets:
        return Empty(NO_TARGET)
    total_B = study.rise_B(SEE_SELF)
    if total_B.mean() < RISE:
        return Empty("attending only to itself makes no sink, so there is nothing to take apart")
    cells = (_VARIANCE_BACK, _VARIANCE_BACK_ENERGY_KEPT)
    by_bar = [unless_marked(partial(_left_BS2, study, cell, study.sides)) for cell in cells]
    alone = _left_BS2(study, _MEAN_ALONE, (False,))
    judged = False
    if not isinstance(by_bar[0], Empty):
        judged = study.sides[side_of(least_left, by_bar[0])]
    control = control_unless_marked(
        lambda: float(second_over_first(_left_BS2(study, _ENERGY_BACK, (judged,)).mean(0)[0]))
    )
    mean_alone = f"{second_over_first(alone.mean(0)[0]):.1%} with its mean alone"
    note = _note(f"share of a rise by {100 * total_B.mean():.1f} points; {mean_alone}", study, *by_bar)
    return ClaimNumbers(by_bar=[*by_bar, alone], control=control, note=note)


def _left_BS2(study: StudyData, cell: dict[str, Any], sides: tuple[bool, ...]) -> np.ndarray:
    """[B, S, 2] the rise of a token that attends only to itself, and that in a cell, at the same targets."""
    by_side = []
    for side in sides:
        conditions = study.at_targets(**cell, before_norm=side)
        study.supports(*conditions)
        whole = [Condition(SEE_SELF, condition.target) for condition in conditions]
        study.supports(*whole)
        by_side.append(np.stack([study.risen_B(whole), study.risen_B(conditions)], 1))
    return np.stack(by_side, 1)


def _risen_BS(study: StudyData, cell: dict[str, Any]) -> np.ndarray:
    """[B, S] the rise in a cell, on each side of the norm on the aggregation."""
    return np.stack([study.rise_B(**cell, before_norm=side) for side in study.sides], 1)


def _note(text: str, study: StudyData, *by_side: np.ndarray | Empty) -> str:
    sides = (study.by_side(values) for values in by_side if not isinstance(values, Empty))
    return "; ".join(filter(None, [text, *sides]))


def _variance_suffices(study: StudyData) -> ClaimNumbers | Empty:
    if not study.plan.targets:
        return Empty(NO_TARGET)
    risen_BS = _risen_BS(study, _MORE_VARIANCE)
    side = side_of(most, risen_BS)
    judged = study.sides[side]
    beyond = unless_marked(lambda: (risen_BS - _risen_BS(study, _MORE_ENERGY))[:, [side]])  # on the same side
    return ClaimNumbers(
        by_bar=[risen_BS, beyond],
        control=control_unless_marked(lambda: float(study.rise_B(**_MORE_ENERGY, before_norm=judged).mean())),
        note=_note(f"{study.where}; {_other_ways(study)}", study, risen_BS),
    )


def _other_ways(study: StudyData) -> str:
    """In words: which other ways to raise the variance make a sink, and which do not."""
    texts = []
    for name in OTHER_WAYS:
        if not study.at_targets(name, DOSE):
            continue
        risen = control_unless_marked(lambda name=name: float(study.rise_B(name, DOSE).mean()))
        times = study.times_the_variance(name, DOSE)
        if risen is not None and times > 1:
            points = round(100 * risen) + 0.0  # no -0
            side = "for" if risen >= RISE else "against"
            texts.append(f"{CONDITIONS[name].label} (variance {times:.2g}x) {points:+.0f} points, {side} the claim")
    return f"other ways to raise the variance: {'; '.join(texts) or 'none'}"


_UNDER_HALF = Bar("below", HALF, least_left, at_targets=True)
MIXING_CLAIMS = (
    Claim(
        id="first_token_needed",
        link=CAUSAL,
        statement="Put another token at the sink's position: less than half of the sink is left",
        bars=(Bar("below", HALF, second_over_first),),
        numbers=_first_token,
        figures=("remaining", "forest"),
        step=Step.TOKEN,
        control_is="share left when another token is put at another position",
    ),
    Claim(
        id="token_carries_sink",
        link=CAUSAL,
        statement="Exchange the sink's token with an ordinary one further on: where it stands then, the sink rate "
        "rises by at least 5 points",
        bars=(UP,),
        numbers=_token_carries,
        figures=("forest",),
        step=Step.TOKEN,
        control_is="rise when another token is put there",
    ),
    Claim(
        id="unmixing_creates_sink",
        link=CAUSAL,
        statement="Let a token attend only to itself in the early layers: its sink rate rises by at least 5 points",
        bars=(UP,),
        numbers=_unmixing,
        figures=("created", "forest"),
        step=Step.ONE_KEY,
        control_is="rise when it attends to all but itself",
    ),
    Claim(
        id="opening_removes_sink",
        link=CAUSAL,
        statement="Let position 0 attend to later keys in the early layers: less than a quarter of the sink is left",
        bars=(TAKEN_AWAY,),
        numbers=_opening,
        figures=("remaining", "forest"),
        step=Step.ONE_KEY,
        control_is="share left when another position cannot attend to itself",
    ),
    Claim(
        id="variance_is_what_matters",
        link=CAUSAL,
        statement="With an ordinary token's variance, energy kept or not, or with none at all, a token that attends "
        "only to itself keeps less than half of its rise",
        bars=(_UNDER_HALF, _UNDER_HALF, _UNDER_HALF),
        numbers=_variance_matters,
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
)
