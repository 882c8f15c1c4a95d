"""The claims about cause and effect: each one entry, as in `claims`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sinkscope.interventions.matching import UNTOUCHED
from sinkscope.studies.conditions import (
    DIMENSIONS,
    DOSE,
    FACTORS,
    RANDOM_OF,
    SEE_FAR,
    SEE_PREVIOUS,
    SEE_SELF,
    SEE_TWO,
    SUPER_NEURONS,
    TURNED_BASIS,
    Condition,
)
from sinkscope.studies.controls import EMPTY, NUM_RANDOM_SETS
from sinkscope.studies.judging import (
    QUARTER,
    RISE,
    SPARED,
    TOP_SHARE,
    Bar,
    Claim,
    Empty,
    Numbers,
    percent,
    second_over_first,
)
from sinkscope.studies.measured import NO_UNITS, NO_VARIANCE, Measured

CAUSAL = "causal"
NO_TARGET = "no position is free of a sink and has enough later queries"
NO_MINIMAL_SET = "no set of the units that write the massive dimensions takes the sink away"
NO_DIMENSION = "there is no massive dimension"

Found = Numbers | Empty


def _beside(control: float, level: float, what: str, *notes: str) -> dict[str, Any]:
    """A random set's number and the claim's note; where the set is empty it has no number, and the note says so."""
    empty = [f"an empty control: random {what} do {level:.1%} of this at the sink"] if level < EMPTY else []
    return dict(control=None if empty else control, note="; ".join([*notes, *empty]))


def _where(study: Measured) -> str:
    return f"mean over positions {', '.join(map(str, study.plan.targets))}"


def _rise(name: str, factor: float | None = None, *, control: tuple) -> Callable[[Measured], Found]:
    """The rise under one condition, with that under another as its control."""

    def numbers(study: Measured) -> Found:
        if not study.plan.targets:
            return Empty(NO_TARGET)
        control_B = study.rise_B(*control)
        return Numbers(by_bar=[study.rise_B(name, factor)], control=float(control_B.mean()), note=_where(study))

    return numbers


def _dose_response(study: Measured) -> Found:
    """Kendall's tau between factor and rate at the target, mean over targets; 0 where the rate never moves."""
    targets = study.plan.targets
    if not targets:
        return Empty(NO_TARGET)
    rates_FKB = np.array(
        [
            [study.untouched.later_BS[:, target] for target in targets],
            *(
                [
                    study.outcomes[Condition("amplify_variance", target, factor)].later_BS[:, target]
                    for target in targets
                ]
                for factor in FACTORS
            ),
        ]
    )
    first, second = np.triu_indices(len(rates_FKB), 1)
    signs = np.sign(rates_FKB[second] - rates_FKB[first])
    moved = np.square(signs).sum(0)
    tau = signs.sum(0) / np.sqrt(np.maximum(moved, 1) * len(first))
    note = "Kendall's tau of rate against factor, by sequence and position"
    return Numbers(by_bar=[tau.mean(0)], control=0.0, note=note)


def _cell(name: str, **levels: str) -> dict[str, Any]:
    """A cell of the factorial at every target."""
    return dict(name=name, **levels)


def _missed(study: Measured, *cells: dict[str, Any]) -> Empty | None:
    """A condition that did not do what its name says supports nothing."""
    if not study.plan.targets:
        return Empty(NO_TARGET)
    for cell in cells:
        if missed := study.missed(*(Condition(target=target, **cell) for target in study.plan.targets)):
            return Empty(missed)
    return None


def _share_left(*cells: dict[str, Any], control: dict[str, Any]) -> Callable[[Measured], Found]:
    """What cells of the factorial leave of the rise of a token that sees only itself."""

    def numbers(study: Measured) -> Found:
        if empty := _missed(study, *cells):
            return empty
        total_B = study.rise_B(SEE_SELF)
        if total_B.mean() < RISE:
            return Empty("a token that sees only itself makes no sink that could be taken apart")
        return Numbers(
            by_bar=[np.stack([total_B, study.rise_B(**cell)], 1) for cell in cells],
            control=float(study.rise_B(**control).mean() / total_B.mean()),
            note=f"of a rise of {total_B.mean():.1%}",
        )

    return numbers


def _single_key(study: Measured) -> Found:
    if not study.plan.targets:
        return Empty(NO_TARGET)
    previous_B, far_B = study.rise_B(SEE_PREVIOUS), study.rise_B(SEE_FAR)
    note = f"the key before {previous_B.mean():+.1%}, a far one {far_B.mean():+.1%}"
    return Numbers(by_bar=[previous_B, far_B], control=float(study.rise_B(SEE_TWO).mean()), note=note)


def _suffices(cell: dict[str, Any], *, control: dict[str, Any], beats_control: bool) -> Callable[[Measured], Found]:
    def numbers(study: Measured) -> Found:
        if empty := _missed(study, cell):
            return empty
        risen_B, control_B = study.rise_B(**cell), study.rise_B(**control)
        bars = [risen_B, risen_B - control_B] if beats_control else [risen_B]
        return Numbers(by_bar=bars, control=float(control_B.mean()), note=_where(study))

    return numbers


def _opening(study: Measured) -> Found:
    if study.plan.sink != 0:
        return Empty("the sink is not at position 0: it sees earlier keys already")
    hidden = Condition("mask_but_self", study.plan.targets[0]) if study.plan.targets else None
    control = float(study.at_sink_B(hidden).mean() / study.at_sink_B().mean()) if hidden else None
    return Numbers(by_bar=[_left(study, Condition("open_to_later", 0))], control=control)


def _left(study: Measured, removed: Condition) -> np.ndarray:
    """[B, 2] the sink before and after a condition: the second over the first is what it leaves."""
    return np.stack([study.at_sink_B(), study.at_sink_B(removed)], 1)


def _equalising(study: Measured) -> Found:
    if not study.sink_varies:
        return Empty(NO_VARIANCE)
    sink, other = (Condition("equalise_variance", place) for place in (study.plan.sink, *study.plan.targets[:1]))
    control = float(study.at_sink_B(other).mean() / study.at_sink_B().mean())
    return Numbers(by_bar=[_left(study, sink)], control=control)


def _necessity(study: Measured) -> Found:
    if not study.minimal:
        return Empty(NO_MINIMAL_SET, "does not hold")
    sink, before_B = study.plan.sink, study.at_sink_B()
    random_sets = [study.at_sink_B(Condition("random_set", sink, number=n)) for n in range(NUM_RANDOM_SETS)]
    worst = float(min(rate_B.mean() for rate_B in random_sets) / before_B.mean())
    note = f"{len(study.minimal)} units: {', '.join(map(str, study.minimal[:8]))}"
    left = _left(study, Condition("ablate_minimal_set", sink))
    return Numbers(
        by_bar=[left, np.stack([before_B, *random_sets], 1)],
        **_beside(worst, study.controls.sets_level, "sets", note),
    )


def _least_over_first(means: np.ndarray) -> np.ndarray:
    return means[..., 1:].min(-1) / means[..., 0]


def _sparsity_necessity(study: Measured) -> Found:
    if not study.minimal:
        return Empty("no minimal set was found")
    if study.top_shares(study.minimal)[0] < TOP_SHARE:
        # Spreading a vector that is dense already only turns it elsewhere, which says nothing about sparsity.
        return Empty("the set's output vectors are not channel-sparse")
    left = {
        done: _left(study, Condition(f"{done}_minimal_set", study.plan.sink))
        for done in ("ablate", "densify", "turn", "move")
    }
    if not study.not_turned:
        left["basis"] = _left(study, Condition(TURNED_BASIS, study.plan.sink))
    shares = {done: float(second_over_first(values.mean(0))) for done, values in left.items()}
    return Numbers(
        by_bar=[left["densify"], left["turn"], left["move"]],
        control=shares["ablate"],
        note=what_it_is(shares["densify"], shares["move"], shares["turn"], shares.get("basis"), study.not_turned),
    )


def what_it_is(spread: float, moved: float, turned: float, basis: float | None, not_turned: str = "") -> str:
    """Which of them the sink needs, by what is left of it: the coordinate, the direction, or the sparsity."""
    gone = tuple(share < QUARTER for share in (spread, turned, moved))
    if gone == (True, True, False):
        found = "it is the sparsity: another single dimension does as well"
    elif all(gone) and basis is None:
        found = f"it is the direction or the coordinate: the basis cannot be turned ({not_turned})"
    elif all(gone) and basis is not None:
        stays = "it is the direction that is read, neither its sparsity nor its coordinate"
        found = stays if basis >= QUARTER else "it is the coordinate"
    elif not gone[0] and not gone[1]:
        found = "it is neither the sparsity nor the direction"
    else:
        found = "it is not the sparsity alone"
    shares = {"spread": spread, "another dimension": moved, "turned": turned, "turned with all readers": basis}
    return found + "; left: " + ", ".join(f"{how} {share:.1%}" for how, share in shares.items() if share is not None)


def _sufficiency(study: Measured) -> Found:
    if not study.plan.super_neurons or not study.plan.targets:
        return Empty(NO_UNITS)
    risen_B, control_B = study.rise_B("transplant_super_neurons"), study.rise_B("transplant_random_set")
    return Numbers(by_bar=[risen_B], **_beside(float(control_B.mean()), study.controls.units_level, "units"))


def _dimensions_suffice(study: Measured) -> Found:
    if not study.plan.dimensions or not study.plan.targets:
        return Empty(NO_DIMENSION if study.plan.targets else NO_TARGET)
    risen_B, control_B = study.rise_B("transplant_dimensions"), study.rise_B("transplant_random_dimensions")
    beside = _beside(float(control_B.mean()), study.controls.dimensions_level, "dimensions", _where(study))
    return Numbers(by_bar=[risen_B], **beside)


def _mediation(cause: str, factor: float | None, held: str) -> Callable[[Measured], Found]:
    def numbers(study: Measured) -> Found:
        there = study.plan.super_neurons if held == SUPER_NEURONS else study.plan.dimensions
        if not study.plan.targets or not there:
            return Empty(NO_UNITS if held == SUPER_NEURONS else NO_DIMENSION)
        total_B, random_B, direct_B = (study.rise_B(cause, factor, of) for of in (None, RANDOM_OF[held], held))
        if total_B.mean() < RISE:
            return Empty(f"{cause} makes no sink that could be mediated")
        level = study.controls.units_level if held == SUPER_NEURONS else study.controls.dimensions_level
        what = "units" if held == SUPER_NEURONS else "dimensions"
        gone = float(1 - random_B.mean() / total_B.mean())
        note = f"total effect {total_B.mean():+.1%}, direct {direct_B.mean():+.1%}"
        return Numbers(by_bar=[np.stack([total_B, random_B, direct_B], 1)], **_beside(gone, level, what, note))

    return numbers


def _mediated(means: np.ndarray) -> np.ndarray:
    """What is gone with the mediator held and not with a random set held, of the total rise."""
    return (means[..., 1] - means[..., 2]) / means[..., 0]


def _mediation_claim(short: str, possessive: str, cause: str, factor: float | None, held: str) -> Claim:
    mediator = "super neurons" if held == SUPER_NEURONS else "massive dimensions"
    return Claim(
        id=f"mediation_{short}_{held}",
        link=CAUSAL,
        statement=f"At least half of {possessive} effect runs through the {mediator}, beyond what random ones carry",
        bars=(Bar("at least", 0.5, _mediated),),
        numbers=_mediation(cause, factor, held),
        control_is="gone with as many matched random ones held",
    )


_UP = Bar("at least", RISE)
_TAKEN_AWAY = Bar("below", QUARTER, second_over_first)
_UNDER_HALF = Bar("below", 0.5, second_over_first)
_VARIANCE_BACK = _cell(SEE_SELF, variance=UNTOUCHED)
_VARIANCE_BACK_ENERGY_KEPT = _cell(SEE_SELF, variance=UNTOUCHED, energy=SEE_SELF)
_ENERGY_BACK = _cell(SEE_SELF, energy=UNTOUCHED)
_BOTH_BACK = _cell(SEE_SELF, variance=UNTOUCHED, energy=UNTOUCHED)
_MORE_VARIANCE = _cell(UNTOUCHED, variance=SEE_SELF)
_MORE_ENERGY = _cell(UNTOUCHED, energy=SEE_SELF)

CAUSAL_CLAIMS = (
    Claim(
        id="unmixing_creates_sink",
        link=CAUSAL,
        statement="A token that sees only itself up to the birth becomes a sink: rate up by 5 points",
        bars=(_UP,),
        numbers=_rise(SEE_SELF, control=("mask_but_self",)),
        control_is="rise when it sees all but itself",
    ),
    Claim(
        id="any_single_key_creates_sink",
        link=CAUSAL,
        statement="A token that sees exactly one other key becomes a sink, the one before or a far one: up by 5 points",
        bars=(_UP, _UP),
        numbers=_single_key,
        control_is="rise when it sees itself and the one before",
    ),
    Claim(
        id="unmixed_value_matters",
        link=CAUSAL,
        statement="With the variance and the energy of a mixed token, one that sees only itself keeps half of its rise",
        bars=(Bar("at least", 0.5, second_over_first),),
        numbers=_share_left(_BOTH_BACK, control=_cell(SEE_TWO)),
        control_is="share when it sees itself and the one before",
    ),
    Claim(
        id="variance_is_what_matters",
        link=CAUSAL,
        statement="With the variance of a mixed token, whether or not its energy follows, one that sees only itself "
        "keeps under half of its rise",
        bars=(_UNDER_HALF, _UNDER_HALF),
        numbers=_share_left(_VARIANCE_BACK, _VARIANCE_BACK_ENERGY_KEPT, control=_ENERGY_BACK),
        control_is="share with the energy of a mixed token",
    ),
    Claim(
        id="variance_suffices",
        link=CAUSAL,
        statement="A mixed token with the variance of one that sees only itself becomes a sink: up by 5 points, and by "
        "more than with its energy",
        bars=(_UP, Bar("above", 0.0)),
        numbers=_suffices(_MORE_VARIANCE, control=_MORE_ENERGY, beats_control=True),
        control_is="rise with its energy",
    ),
    Claim(
        id="energy_is_what_matters",
        link=CAUSAL,
        statement="With the energy of a mixed token and its own variance, one that sees only itself keeps under half "
        "of its rise",
        bars=(_UNDER_HALF,),
        numbers=_share_left(_ENERGY_BACK, control=_VARIANCE_BACK),
        control_is="share with the variance of a mixed token",
    ),
    Claim(
        id="energy_suffices",
        link=CAUSAL,
        statement="A mixed token with the energy of one that sees only itself becomes a sink: up by 5 points",
        bars=(_UP,),
        numbers=_suffices(_MORE_ENERGY, control=_MORE_VARIANCE, beats_control=False),
        control_is="rise with its variance",
    ),
    Claim(
        id="opening_removes_sink",
        link=CAUSAL,
        statement="With position 0 opened to later keys up to the birth under a quarter of the sink is left",
        bars=(_TAKEN_AWAY,),
        numbers=_opening,
        control_is="left when another position is hidden from itself",
    ),
    Claim(
        id="amplification_creates_sink",
        link=CAUSAL,
        statement="Amplifying its variance 8x makes a token a sink: rate up by 5 points",
        bars=(_UP,),
        numbers=_rise("amplify_variance", DOSE, control=("scale_norm", DOSE)),
        control_is="rise when the norm is scaled alike",
    ),
    Claim(
        id="dose_response",
        link=CAUSAL,
        statement="The more variance, the more of a sink (trend over factors 1 to 8)",
        bars=(Bar("above", 0.0),),
        numbers=_dose_response,
        control_is="no trend",
    ),
    Claim(
        id="equalising_removes_sink",
        link=CAUSAL,
        statement="Bringing the sink's variance down to that of later positions leaves under a quarter of the sink",
        bars=(_TAKEN_AWAY,),
        numbers=_equalising,
        control_is="left when another position is equalised",
    ),
    Claim(
        id="super_neurons_necessary",
        link=CAUSAL,
        statement="Without a minimal set of units under a quarter of the sink is left; "
        f"{NUM_RANDOM_SETS} matched random sets each leave {percent(SPARED)}",
        bars=(_TAKEN_AWAY, Bar("at least", SPARED, _least_over_first)),
        numbers=_necessity,
        control_is=f"left by the worst of {NUM_RANDOM_SETS} matched random sets",
    ),
    Claim(
        id="channel_sparsity_necessary",
        link=CAUSAL,
        statement="With that set's output vectors spread over all dimensions, or turned, under a quarter of the sink "
        "is left; in another single dimension more",
        bars=(_TAKEN_AWAY, _TAKEN_AWAY, Bar("at least", QUARTER, second_over_first)),
        numbers=_sparsity_necessity,
        control_is="left when they are removed",
    ),
    Claim(
        id="super_neurons_sufficient",
        link=CAUSAL,
        statement="The super neurons' activations make another token a sink: up by 5 points",
        bars=(_UP,),
        numbers=_sufficiency,
        control_is="rise by as many matched random units",
    ),
    Claim(
        id="dimensions_suffice",
        link=CAUSAL,
        statement="The sink's massive dimensions make another token a sink: up by 5 points",
        bars=(_UP,),
        numbers=_dimensions_suffice,
        control_is="rise by as many matched random dimensions",
    ),
    _mediation_claim("mask", "the mask's", "mask_to_self", None, SUPER_NEURONS),
    _mediation_claim("mask", "the mask's", "mask_to_self", None, DIMENSIONS),
    _mediation_claim("amplification", "amplification's", "amplify_variance", DOSE, SUPER_NEURONS),
    _mediation_claim("amplification", "amplification's", "amplify_variance", DOSE, DIMENSIONS),
)
