"""The claims about cause and effect. What makes a token a sink is in `mixing_claims`; here follow what the sink needs
and through which neurons and dimensions it comes about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sinkscope.measures.thresholds import TOP_SHARE
from sinkscope.pages.text import percent
from sinkscope.studies.conditions import (
    DIMENSIONS,
    DOSE,
    MAX_NEURONS,
    NUM_DRAWS,
    NUM_RANDOM_SETS,
    RANDOM_OF,
    SUPER_NEURONS,
    TURNED_BASIS,
    Condition,
    draws,
)
from sinkscope.studies.judging import (
    CAUSAL,
    EMPTY_CONTROL,
    QUARTER,
    RISE,
    SPARED,
    TAKEN_AWAY,
    UP,
    Bar,
    Claim,
    ClaimNumbers,
    Empty,
    Step,
    least_left,
    most_left,
    second_over_first,
    side_of,
    some_of,
)
from sinkscope.studies.mixing_claims import MIXING_CLAIMS
from sinkscope.studies.study_data import NO_NEURONS, NO_TARGET, NO_VARIANCE, StudyData

if TYPE_CHECKING:
    from sinkscope.models.anatomy import Neuron

NO_MINIMAL_SET = "removing the neurons that write the massive dimensions, or the sink's direction, leaves the sink"
NO_WRITERS = "no feed-forward comes before the first head that has the sink"
NO_DIMENSION = "there are no massive dimensions"


def _beside(control: float, level: float, what: str, *notes: str) -> dict[str, Any]:
    """`control` and `note` of a claim whose control is a random set. `level` is what that set does at the sink, over
    what it is compared with: if it does too little, it is an empty control, which has no number."""
    empty = []
    if level < EMPTY_CONTROL:
        empty = [f"empty control: random {what} do only {level:.1%} as much at the sink"]
    return dict(control=None if empty else control, note="; ".join([*notes, *empty]))


def _equalising(study: StudyData) -> ClaimNumbers | Empty:
    if not study.sink_varies:
        return Empty(NO_VARIANCE)
    left, other = study.left_BS2("equalise_variance"), study.plan.targets[:1]
    judged = study.sides[side_of(least_left, left)]
    return ClaimNumbers(
        by_bar=[left],
        control=study.left_by("equalise_variance", other[0], judged) if other else None,
        note=study.by_side(left),
    )


def _mean_suffices(study: StudyData) -> ClaimNumbers | Empty:
    if not study.sink_varies:
        return Empty(NO_VARIANCE)
    alike = study.left_BS2("remove_deviation")
    judged = study.sides[side_of(most_left, alike)]
    without_mean = study.left_by("remove_mean", study.plan.sink, judged)
    return ClaimNumbers(by_bar=[alike], control=without_mean, note=study.by_side(alike))


def _necessity(study: StudyData) -> ClaimNumbers | Empty:
    if not study.minimal:
        return Empty(NO_MINIMAL_SET, "does not hold")
    return _left_without(study, "ablate_minimal_set", study.minimal)


def _writers_necessity(study: StudyData) -> ClaimNumbers | Empty:
    if study.minimal:
        return Empty("there is a minimal set")
    if not study.writers:
        return Empty(NO_WRITERS)
    at_sink, elsewhere = (
        second_over_first(study.left_B2(Condition(f"ablate_writers_{where}", study.plan.sink)).mean(0))
        for where in ("at_sink", "elsewhere")
    )
    where = f"removed only at the sink they leave {at_sink:.1%}, removed everywhere else {elsewhere:.1%}"
    return _left_without(study, "ablate_writers", study.writers, where)


def _left_without(study: StudyData, removal: str, neurons: Sequence[Neuron], *notes: str) -> ClaimNumbers:
    """What is left of the sink when the neurons are removed, and when each of the random sets is."""
    sink, before_B = study.plan.sink, study.at_sink_B()
    random_sets = [study.at_sink_B(Condition("random_set", sink, number=n)) for n in range(NUM_RANDOM_SETS)]
    worst = float(min(rate_B.mean() for rate_B in random_sets) / before_B.mean())
    noun = "neuron" if len(neurons) == 1 else "neurons"
    listed = f"{len(neurons)} {noun}: {some_of(neurons)}"
    return ClaimNumbers(
        by_bar=[study.left_B2(Condition(removal, sink)), np.stack([before_B, *random_sets], 1)],
        **_beside(worst, study.controls.sets_level, "sets", listed, *notes),
    )


def _least_over_first(means: np.ndarray) -> np.ndarray:
    return means[..., 1:].min(-1) / means[..., 0]


def _most_over_first(means: np.ndarray) -> np.ndarray:
    return means[..., 1:].max(-1) / means[..., 0]


def _sparsity_necessity(study: StudyData) -> ClaimNumbers | Empty:
    if not study.minimal:
        return Empty("there is no minimal set")
    if study.top_shares(study.minimal)[0] < TOP_SHARE:
        # Spreading a vector that is dense already only changes its direction, which says nothing about sparsity.
        return Empty("the output vectors of the minimal set are not sparse")
    sink, before_B = study.plan.sink, study.at_sink_B()
    left = {
        done: np.stack([before_B, *(study.at_sink_B(draw) for draw in draws(done, sink))], 1)
        for done in ("densify", "turn", "move")
    }
    spread, turned, moved = (values.mean(0)[1:] / before_B.mean() for values in left.values())
    basis = study.not_turned or float(study.at_sink_B(Condition(TURNED_BASIS, sink)).mean() / before_B.mean())
    return ClaimNumbers(
        by_bar=list(left.values()),
        control=None if isinstance(basis, str) else basis,
        note=what_it_is(spread, moved, turned, basis, study.link_values.locked_on or "direction or the coordinate"),
    )


def what_it_is(
    spread: Sequence[float], moved: Sequence[float], turned: Sequence[float], basis: float | str, read: str
) -> str:
    """In words: what the sink needs of the output vectors, by the shares of it that each draw leaves. It is the
    sparsity, or what keys `read`, which is a coordinate or a direction.

    `basis` is the share that is left when the whole residual basis is rotated, or why that cannot be done. It decides
    nothing: the model computes the same in a rotated basis, so all of the sink should be left.
    """
    most, least = max(*spread, *turned), min(moved)
    if most < QUARTER <= least:
        needed = "the sink needs sparse vectors: any other single dimension does as well"
    elif max(map(np.mean, (spread, turned, moved))) < QUARTER:
        needed = f"the sink needs the {read} that keys read, not sparse vectors"
    elif min(map(np.mean, (spread, turned))) >= QUARTER:
        needed = "the sink needs neither sparse vectors nor their direction"
    else:
        needed = "the sink does not need sparse vectors: what is left depends on the draw"
    by_draw = {"spread": spread, "in another dimension": moved, "turned": turned}
    ranges = [f"{how} {min(shares):.1%} to {max(shares):.1%}" for how, shares in by_draw.items()]
    check = f"the residual basis cannot be rotated ({basis})"
    if not isinstance(basis, str):
        check = f"in a rotated residual basis {basis:.1%}"
    return f"{needed}; left by {NUM_DRAWS} draws: {', '.join(ranges)}; {check}"


def _sufficiency(study: StudyData) -> ClaimNumbers | Empty:
    if not study.plan.super_neurons or not study.plan.targets:
        return Empty(NO_NEURONS)
    risen_B, control_B = study.rise_B("transplant_super_neurons"), study.rise_B("transplant_random_set")
    return ClaimNumbers(by_bar=[risen_B], **_beside(float(control_B.mean()), study.controls.neurons_level, "neurons"))


def _dimensions_suffice(study: StudyData) -> ClaimNumbers | Empty:
    if not study.plan.dimensions or not study.plan.targets:
        return Empty(NO_DIMENSION if study.plan.targets else NO_TARGET)
    risen_B, control_B = study.rise_B("transplant_dimensions"), study.rise_B("transplant_random_dimensions")
    beside = _beside(float(control_B.mean()), study.controls.dimensions_level, "dimensions", study.where)
    return ClaimNumbers(by_bar=[risen_B], **beside)


def _mediation(cause: str, factor: float | None, held: str) -> Callable[[StudyData], ClaimNumbers | Empty]:
    def numbers(study: StudyData) -> ClaimNumbers | Empty:
        there = study.plan.super_neurons if held == SUPER_NEURONS else study.plan.dimensions
        if not study.plan.targets or not there:
            return Empty(NO_NEURONS if held == SUPER_NEURONS else NO_DIMENSION)
        total_B, random_B, direct_B = (study.rise_B(cause, factor, of) for of in (None, RANDOM_OF[held], held))
        if total_B.mean() < RISE:
            return Empty("the intervention makes no sink, so there is no effect to mediate")
        level = study.controls.neurons_level if held == SUPER_NEURONS else study.controls.dimensions_level
        what = "neurons" if held == SUPER_NEURONS else "dimensions"
        gone = float(1 - random_B.mean() / total_B.mean())
        note = f"total effect {100 * total_B.mean():+.1f} points, direct {100 * direct_B.mean():+.1f}"
        return ClaimNumbers(by_bar=[np.stack([total_B, random_B, direct_B], 1)], **_beside(gone, level, what, note))

    return numbers


def _mediated(means: np.ndarray) -> np.ndarray:
    """The share of the total rise that is gone while the mediator is held, beyond what is gone while a random set is.
    The last axis holds the rise in total, with the random set held, and with the mediator held."""
    return (means[..., 1] - means[..., 2]) / means[..., 0]


def _mediation_claim(short: str, effect: str, cause: str, factor: float | None, held: str) -> Claim:
    mediator = "super neurons" if held == SUPER_NEURONS else "massive dimensions"
    return Claim(
        id=f"mediation_{short}_{held}",
        link=CAUSAL,
        statement=f"At least half of the effect of {effect} runs through {mediator}, beyond what random ones carry",
        bars=(Bar("at least", 0.5, _mediated),),
        numbers=_mediation(cause, factor, held),
        figures=("mediation-effects",),
        step=Step.BY_SUPER_NEURONS if held == SUPER_NEURONS else Step.BY_DIMENSIONS,
        control_is="share of the rise that is gone with as many matched random ones held",
    )


CAUSAL_CLAIMS = (
    *MIXING_CLAIMS,
    Claim(
        id="equalising_removes_sink",
        link=CAUSAL,
        statement="Lower the sink's value variance to that of later positions: less than a quarter of the sink is left",
        bars=(Bar("below", QUARTER, least_left),),
        numbers=_equalising,
        figures=("remaining", "forest"),
        step=Step.LESS_VARIANCE,
        needs="its variance (or the energy in it)",  # equalising lowers both
        control_is="share left when the variance of another position is lowered",
    ),
    Claim(
        id="mean_suffices",
        link=CAUSAL,
        statement="Replace the sink's value aggregation by its mean over sequences: the sink keeps at least half of "
        "its rate",
        bars=(Bar("at least", 0.5, most_left),),
        numbers=_mean_suffices,
        figures=("remaining", "forest"),
        step=Step.LESS_VARIANCE,
        control_is="share left when that mean is removed instead",
    ),
    Claim(
        id="super_neurons_necessary",
        link=CAUSAL,
        statement="Remove a minimal set of neurons: less than a quarter of the sink is left. Each of "
        f"{NUM_RANDOM_SETS} random sets leaves at least {percent(SPARED)}",
        bars=(TAKEN_AWAY, Bar("at least", SPARED, _least_over_first)),
        numbers=_necessity,
        figures=("remaining", "forest"),
        step=Step.SUPER_NEURONS,
        control_is=f"share left by the worst of {NUM_RANDOM_SETS} matched random sets",
    ),
    Claim(
        id="writers_necessary",
        link=CAUSAL,
        statement=f"Where there is no minimal set, remove the (up to {MAX_NEURONS}) neurons that write most strongly "
        f"along the sink's direction: less than a quarter of the sink is left. Each of {NUM_RANDOM_SETS} matched "
        f"random sets leaves at least {percent(SPARED)}",
        bars=(TAKEN_AWAY, Bar("at least", SPARED, _least_over_first)),
        numbers=_writers_necessity,
        figures=("remaining", "forest"),
        control_is=f"share left by the worst of {NUM_RANDOM_SETS} matched random sets",
    ),
    Claim(
        id="channel_sparsity_necessary",
        link=CAUSAL,
        statement="Spread the minimal set's output vectors over all dimensions, or turn them to random directions: "
        "less than a quarter of the sink is left. Moved whole to another single dimension they leave more (in each of "
        f"{NUM_DRAWS} draws)",
        bars=(
            Bar("below", QUARTER, _most_over_first),
            Bar("below", QUARTER, _most_over_first),
            Bar("at least", QUARTER, _least_over_first),
        ),
        numbers=_sparsity_necessity,
        figures=("remaining", "forest"),
        step=Step.SPARSITY,
        control_is="share left when the whole residual basis is rotated, with all that reads it",
    ),
    Claim(
        id="super_neurons_sufficient",
        link=CAUSAL,
        statement="Copy the super neurons' activations from the sink to another token: its sink rate rises by at least "
        "5 points",
        bars=(UP,),
        numbers=_sufficiency,
        figures=("forest",),
        step=Step.SUPER_NEURONS,
        control_is="rise when as many matched random neurons are copied",
    ),
    Claim(
        id="dimensions_suffice",
        link=CAUSAL,
        statement="Copy the sink's massive dimensions to another token: its sink rate rises by at least 5 points",
        bars=(UP,),
        numbers=_dimensions_suffice,
        figures=("forest",),
        step=Step.DIMENSIONS,
        control_is="rise when as many matched random dimensions are copied",
    ),
    _mediation_claim("mask", "attending only to itself", "mask_to_self", None, SUPER_NEURONS),
    _mediation_claim("mask", "attending only to itself", "mask_to_self", None, DIMENSIONS),
    _mediation_claim("amplification", "amplified variance", "amplify_variance", DOSE, SUPER_NEURONS),
    _mediation_claim("amplification", "amplified variance", "amplify_variance", DOSE, DIMENSIONS),
)
