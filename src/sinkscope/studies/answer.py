"""The answer of a study in a few sentences: which mechanism makes the sink of this model, and which neurons write it.

It rests on verdicts alone, and says so where they decide nothing. The cause has one decisive number, that of the claim
which its mechanism names, and the number of its control.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from sinkscope.statistics import bootstrap_mean_interval
from sinkscope.studies.conditions import SEE_FAR, SEE_PREVIOUS, SEE_SELF
from sinkscope.studies.judging import CAUSAL, HALF, RISE, Judgement, Verdict, some_of
from sinkscope.studies.mechanism import mechanism_of
from sinkscope.studies.study_data import StudyData

SHOWN_NEURONS = 4
OTHER_VERDICTS: dict[Verdict, str] = {
    "does not hold": "these do not",
    "undecided": "undecided",
    "not applicable": "not applicable",
}
ById = Mapping[str, Judgement]


def answer(judgements: Sequence[Judgement], study: StudyData, went: str | None) -> str:
    """What makes the sink, and what writes it."""
    rate = judgements[0].effect or 0.0
    text = f"Position {study.plan.sink} is a sink for {rate:.1%} of heads. "
    return text + f"{cause(judgements, study)} {_writers(_by_id(judgements)['neurons_necessary'], study, went)}"


def counts(judgements: Sequence[Judgement]) -> str:
    """How many claims hold, and which don't. The first one, that there is a sink, is not counted."""
    others = judgements[1:]
    links = _count([j for j in others if j.claim.link != CAUSAL], "claims about the model as it is")
    causal = _count([j for j in others if j.claim.link == CAUSAL], "claims about cause and effect")
    return f"Besides the sink itself, {links} {causal[0].upper()}{causal[1:]}"


def cause(judgements: Sequence[Judgement], study: StudyData) -> str:
    """What makes the sink, by its mechanism."""
    by_id = _by_id(judgements)
    mechanism = mechanism_of({id: judgement.verdict for id, judgement in by_id.items()})
    return SENTENCES.get(mechanism, _undecided)(by_id, study)


def _by_id(judgements: Sequence[Judgement]) -> ById:
    return {judgement.id: judgement for judgement in judgements}


def _token(by_id: ById, study: StudyData) -> str:
    moved, places = by_id["token_carries_sink"], " or ".join(map(str, study.plan.targets))
    return (
        "The cause is the token that stands there, wherever it stands: "
        f"moved to position {places} it is a sink there too ({_points(moved.effect)}; "
        f"another token put there: {_points(moved.control)})."
    )


def _position(by_id: ById, study: StudyData) -> str:
    sink, other = study.plan.sink, by_id["first_token_needed"]
    where = "the first place" if sink == 0 else f"position {sink}"
    text = f"The cause is {where}, whatever token stands there: "
    text += f"with another one {_share(other.effect)} of the sink is left"
    if other.control is not None:
        text += f" (with another one elsewhere: {_share(other.control)})"
    shifted = study.left_by("shift_positions", sink)
    if sink or shifted is None:
        return f"{text}."
    counts = "the index 0" if shifted < HALF else "being first, not the index 0"
    return f"{text}. What counts is {counts}: with all position ids shifted {_share(shifted)} is left."


def _no_averaging(by_id: ById, study: StudyData) -> str:
    made = by_id["unmixing_creates_sink"]
    keys = "to one key alone, its own or another," if _any_key(study) else "only to itself"
    text = (
        f"The cause is that its value is not averaged with others: any token that attends {keys} becomes a sink "
        f"({_points(made.effect)}; attending to all but itself: {_points(made.control)}). "
        "Its higher variance is not needed"
    )
    mean_B, ordinary_B = (_risen(study, name) for name in ("mean_of_itself", "mean_of_ordinary"))
    made_B = _risen(study, SEE_SELF)
    if mean_B is not None and made_B is not None and _is_at_least(mean_B - HALF * made_B, 0.0):
        beside = "" if ordinary_B is None else f"; that of an ordinary token: {_points(ordinary_B.mean())}"
        return f"{text}: the average value vector of such tokens does it alone ({_points(mean_B.mean())}{beside})."
    return f"{text}."


def _variance(by_id: ById, study: StudyData) -> str:
    given = by_id["variance_suffices"]
    return (
        "The cause is the high variance of its value: an ordinary token that is given this variance becomes a sink "
        f"({_points(given.effect)}; given its energy alone: {_points(given.control)}), "
        "and a token that attends only to itself becomes none without it."
    )


SENTENCES: dict[str, Callable[[ById, StudyData], str]] = {
    "token": _token,
    "position": _position,
    "no_averaging": _no_averaging,
    "variance": _variance,
}


KNOWN: tuple[tuple[str, str, str], ...] = (
    ("first_token_needed", "it needs its token", "any token there will do"),
    ("token_carries_sink", "the token is a sink elsewhere too", "the token is none elsewhere"),
    ("unmixing_creates_sink", "another token becomes one by attending only to itself", "no other becomes one so"),
    ("opening_removes_sink", "it goes when it attends to later keys", "it stays when it attends to later keys"),
    ("variance_suffices", "a higher variance makes an ordinary token a sink", "a higher variance makes none"),
    ("variance_is_what_matters", "and without that variance none becomes one", "and the variance is not needed"),
)
"""By claim: what is known if it holds, and if it does not."""


def _undecided(by_id: ById, study: StudyData) -> str:
    known = []
    for claim, if_it_holds, if_not in KNOWN:
        verdict = by_id[claim].verdict if claim in by_id else None
        known += [if_it_holds] if verdict == "holds" else [if_not] if verdict == "does not hold" else []
    text = "Which mechanism makes it is undecided"
    return f"{text}. What is known: {'; '.join(known)}." if known else f"{text}."


def _any_key(study: StudyData) -> bool:
    """Whether a token that attends to one other key alone, near or far, becomes a sink too."""
    rises = [_risen(study, mixing) for mixing in (SEE_PREVIOUS, SEE_FAR)]
    return all(risen_B is not None and _is_at_least(risen_B, RISE) for risen_B in rises)


def _risen(study: StudyData, name: str) -> np.ndarray | None:
    """[B] the rise under one kind of condition; None where it was not run."""
    conditions = study.at_targets(name)
    return study.risen_B(conditions) if conditions else None


def _is_at_least(values_B: np.ndarray, threshold: float) -> bool:
    """Whether the whole 95 % interval of a mean is."""
    low, _ = bootstrap_mean_interval(values_B)
    return bool(low >= threshold)


def _points(rise: float | None) -> str:
    return "not measured" if rise is None else f"{round(100 * rise, 1) + 0.0:+.1f} points"


def _share(share: float | None) -> str:
    """A share in percent; a small one is not told as none."""
    share = share or 0.0
    return f"{share:.{1 if 0 < share < 0.1 else 0}%}"


def _writers(judged: Judgement, study: StudyData, went: str | None) -> str:
    """The neurons that write the sink, and what is left of it without them."""
    writers = study.removed
    if went is None or (not study.minimal and judged.verdict == "does not hold"):
        return "No set of neurons was found that writes it."
    listed = some_of(writers, SHOWN_NEURONS)
    write_it = f"neuron {listed} writes it" if len(writers) == 1 else f"neurons {listed} write it"
    share = study.left_by(study.removal.name, study.plan.sink)
    left = f"the sink is {went}" if went.startswith("shifted") else f"{_share(share)} of the sink is left"
    without = f"without {'it' if len(writers) == 1 else 'them'} {left}"
    control = (
        "" if judged.control is None else f" (as large a change in other directions leaves {_share(judged.control)})"
    )
    if judged.verdict != "holds":
        return f"Whether {write_it} is undecided: {without}{control}."
    if study.minimal:
        return f"{write_it.capitalize()}: {without}{control}."
    strongest = f"the {len(writers)} neurons that write most strongly along its direction ({listed})"
    return f"Without {strongest} {left}{control}; fewer neurons may do."


def _count(judgements: Sequence[Judgement], what: str) -> str:
    applicable = [j for j in judgements if j.verdict != "not applicable"]
    if not applicable:
        return f"none of the {what} can be judged here."
    held = [j for j in applicable if j.verdict == "holds"]
    text = f"{len(held)} of {len(applicable)} {what} hold"
    for verdict, words in OTHER_VERDICTS.items():
        ids = [j.id for j in judgements if j.verdict == verdict]
        if ids:
            text += f"; {words}: {', '.join(ids)}"
    return text + "."
