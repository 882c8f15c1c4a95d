"""The claims about through which neurons the sink comes about. What makes a token a sink is in `mixing_claims`.

The control of each is the same change of the same neurons, written elsewhere: along their output vectors turned by a
random rotation, or with their coordinates in a random order. It writes as much, so it could make or end a sink as well.
What is added in another direction makes the state longer, and all of it weaker behind a norm: so the control of the
mediation, at a token that competes with the sink, is shown and not a part of the verdict.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sinkscope.pages.text import percent
from sinkscope.studies.conditions import (
    AT_SINK,
    CONTROLS_OF,
    ELSEWHERE,
    NUM_DRAWS,
    NUM_RANDOM_SETS,
    SUPER_NEURONS,
    TURNED_BASIS,
    WRITTEN_ELSEWHERE,
    Condition,
    draws,
)
from sinkscope.studies.judging import (
    CAUSAL,
    HALF,
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
    mediated,
    second_over_first,
    some_of,
)
from sinkscope.studies.mixing_claims import MIXING_CLAIMS
from sinkscope.studies.study_data import NO_NEURONS, StudyData

NO_WRITERS = "no neuron writes a massive dimension, and no feed-forward comes before the first head that has the sink"


def _necessity(study: StudyData) -> ClaimNumbers | Empty:
    neurons = study.removed
    if not neurons:
        return Empty(NO_WRITERS, "does not hold")
    sink, before_B = study.plan.sink, study.at_sink_B()
    sets = [study.at_sink_B(Condition("random_set", sink, number=n)) for n in range(len(study.controls.sets))]
    by_direction = []
    for how in WRITTEN_ELSEWHERE:
        by_direction.append(np.mean([study.at_sink_B(draw) for draw in draws(f"ablate_{how}", sink)], axis=0))
    least = [second_over_first(np.array([before_B.mean(), after_B.mean()])) for after_B in by_direction]
    listed = f"{len(neurons)} {'neuron' if len(neurons) == 1 else 'neurons'}: {some_of(neurons)}"
    return ClaimNumbers(
        by_bar=[
            study.left_B2(study.removal),
            np.stack([before_B, *sets], 1),
            np.stack([before_B, *by_direction], 1),
        ],
        control=float(min(least)),
        note="; ".join(filter(None, [listed, _places(study), _sparsity(study)])),
    )


def _places(study: StudyData) -> str:
    """In words: what is left without the neurons at the sink alone, and elsewhere alone."""
    left = []
    for where, words in ((AT_SINK, "only at the sink"), (ELSEWHERE, "everywhere else")):
        share = study.left_by(f"{study.removal.name}{where}", study.plan.sink)
        left += [] if share is None else [f"removed {words} they leave {share:.1%}"]
    return ", ".join(left)


def _sparsity(study: StudyData) -> str:
    """In words: what the sink needs of the minimal set's output vectors."""
    sink, before = study.plan.sink, study.at_sink_B().mean()
    shares = []
    for how in ("spread", "move", "turn"):
        name = "densify" if how == "spread" else how
        drawn = [draw for draw in draws(f"{name}_minimal_set", sink) if draw in study.results]
        if not drawn:
            return ""
        shares.append([float(study.at_sink_B(draw).mean() / before) for draw in drawn])
    spread, moved, turned = shares
    basis = study.not_turned or float(study.at_sink_B(Condition(TURNED_BASIS, sink)).mean() / before)
    return what_it_is(spread, moved, turned, basis, study.link_values.locked_on or "direction or the coordinate")


def _least_over_first(means: np.ndarray) -> np.ndarray:
    return means[..., 1:].min(-1, initial=np.inf) / means[..., 0]


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
    risen_B = study.rise_B("transplant_super_neurons")
    by_control = [study.rise_B(f"transplant_{how}") for how in WRITTEN_ELSEWHERE]
    control_B = max(by_control, key=np.mean)
    return ClaimNumbers(by_bar=[risen_B, risen_B - control_B], control=float(control_B.mean()), note=study.where)


def _mediation(study: StudyData) -> ClaimNumbers | Empty:
    if not study.plan.targets or not study.plan.super_neurons:
        return Empty(NO_NEURONS)
    total_B, direct_B = (study.rise_B("mask_to_self", None, of) for of in (None, SUPER_NEURONS))
    if total_B.mean() < RISE:
        return Empty("attending only to itself makes no sink, so there is no effect to mediate")
    by_control = [study.rise_B("mask_to_self", None, of) for of in CONTROLS_OF[SUPER_NEURONS]]
    gone = 1 - min(control_B.mean() for control_B in by_control) / total_B.mean()
    note = f"total effect {100 * total_B.mean():+.1f} points, direct {100 * direct_B.mean():+.1f}"
    return ClaimNumbers(by_bar=[np.stack([total_B, direct_B], 1)], control=float(gone), note=note)


CAUSAL_CLAIMS = (
    *MIXING_CLAIMS,
    Claim(
        id="neurons_necessary",
        link=CAUSAL,
        statement="Remove the smallest set of neurons found or, where none is, those that write most along the sink's "
        f"direction: less than a quarter of the sink is left. Each of {NUM_RANDOM_SETS} matched random sets leaves "
        f"{percent(SPARED)}, and as large a change along other directions half",
        bars=(TAKEN_AWAY, Bar("at least", SPARED, _least_over_first), Bar("at least", HALF, _least_over_first)),
        numbers=_necessity,
        figures=("remaining", "forest"),
        step=Step.SUPER_NEURONS,
        control_is="share left when what they write is removed along other directions instead",
    ),
    Claim(
        id="super_neurons_sufficient",
        link=CAUSAL,
        statement="Copy the super neurons' activations from the sink to another token: its sink rate rises by at least "
        "5 points, and by 5 points more than when they write along other directions",
        bars=(UP, UP),
        numbers=_sufficiency,
        figures=("forest",),
        step=Step.SUPER_NEURONS,
        control_is="rise when the same activations are written along other directions",
    ),
    Claim(
        id="mediation_mask_super_neurons",
        link=CAUSAL,
        statement="At least half of the effect of attending only to itself runs through super neurons: it is gone "
        "while these are held at their baseline values",
        bars=(Bar("at least", HALF, mediated, at_targets=True),),
        numbers=_mediation,
        figures=("mediation-effects",),
        step=Step.BY_SUPER_NEURONS,
        control_is="share of the rise that is gone with as large a change along other directions",
    ),
)
