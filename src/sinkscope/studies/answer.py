"""The answer of a study in a few sentences: what makes the sink of this model, and which neurons write it.

It rests on verdicts alone, and says so where they decide nothing. How many claims hold is a separate sentence, because
claims can point in opposite directions and their number names no cause.
"""

from __future__ import annotations

from collections.abc import Sequence

from sinkscope.studies.causal_claims import CAUSAL_CLAIMS
from sinkscope.studies.judging import CAUSAL, Judgement, Verdict, some_of
from sinkscope.studies.study_data import StudyData

SHOWN_NEURONS = 4
OTHER_VERDICTS: dict[Verdict, str] = {
    "does not hold": "these do not",
    "undecided": "undecided",
    "not applicable": "not applicable",
}


class Verdicts(dict[str, Verdict]):
    """Verdicts by claim id."""

    def hold(self, claim: str) -> bool:
        return self.get(claim) == "holds"

    def fail(self, claim: str) -> bool:
        return self.get(claim) == "does not hold"


def answer(judgements: Sequence[Judgement], study: StudyData, went: str | None) -> str:
    """What makes the sink, and what writes it."""
    verdicts = Verdicts({judgement.id: judgement.verdict for judgement in judgements})
    rate = judgements[0].effect or 0.0
    text = f"Position {study.plan.sink} is a sink for {rate:.1%} of heads. "
    return text + f"{cause(verdicts)} {_writers(verdicts, study, went)}"


def counts(judgements: Sequence[Judgement]) -> str:
    """How many claims hold, and which don't. The first one, that there is a sink, is not counted."""
    others = judgements[1:]
    links = _count([j for j in others if j.claim.link != CAUSAL], "claims about the model as it is")
    causal = _count([j for j in others if j.claim.link == CAUSAL], "claims about cause and effect")
    return f"Besides the sink itself, {links} {causal[0].upper()}{causal[1:]}"


def cause(verdicts: Verdicts) -> str:
    """What makes a token a sink."""
    if verdicts.hold("unmixing_creates_sink"):
        return _one_key(verdicts)
    others_fail = verdicts.fail("unmixing_creates_sink") and verdicts.fail("variance_suffices")
    rest = "whether attending only to itself does is undecided"
    if verdicts.fail("unmixing_creates_sink"):
        rest = "attending only to itself does not"
    if verdicts.hold("variance_suffices"):
        return f"A higher value variance makes a token a sink; {rest}."
    if verdicts.hold("energy_suffices"):
        return f"A higher energy of its value makes a token a sink, whatever it attends to; {rest}."
    if verdicts.hold("amplification_creates_sink"):
        if others_fail:
            return (
                "Only amplified variance makes a token a sink, far above that of a token that attends only to itself."
            )
        return "Amplified variance makes a token a sink; whether a smaller rise of the variance is enough is undecided."
    needed = " and ".join(claim.needs for claim in CAUSAL_CLAIMS if claim.needs and verdicts.hold(claim.id))
    if not others_fail:
        text = "What makes a token a sink is undecided"
        return f"{text}; this one needs {needed}." if needed else f"{text}."
    neither = "Neither attending only to itself nor a higher variance makes another token a sink"
    if needed:
        return f"{neither}, but this one needs {needed}. So averaging is a part of the cause, not all of it."
    if verdicts.fail("opening_removes_sink"):
        return f"{neither}: the cause is the token or its position, not averaging."
    return f"{neither}; whether this sink needs either is undecided."


def _one_key(verdicts: Verdicts) -> str:
    """What makes a token that attends to a single key a sink: its variance, its energy, or its value."""
    to_any_key = verdicts.hold("any_single_key_creates_sink")
    keys = "to one key alone, its own or another," if to_any_key else "only to itself"
    text = f"A token that attends {keys} becomes a sink."
    if verdicts.hold("variance_is_what_matters"):
        text += " It needs the higher variance that this gives it"
        if verdicts.hold("variance_suffices"):
            return f"{text}, which is enough by itself."
        if verdicts.fail("variance_suffices"):
            return f"{text}, which is not enough by itself."
        return f"{text}."
    without_value = verdicts.hold("energy_suffices") and not verdicts.hold("unmixed_value_matters")
    if verdicts.hold("energy_is_what_matters") or (without_value and verdicts.fail("variance_is_what_matters")):
        return f"{text} The cause is its higher energy, not its variance."
    if verdicts.hold("unmixed_value_matters"):
        return f"{text} {_by_value(verdicts)}"
    if verdicts.fail("variance_is_what_matters"):
        return f"{text} Its high variance is not needed; whether the cause is its value or its energy is undecided."
    return f"{text} Whether the cause is its value, its variance or its energy is undecided."


def _by_value(verdicts: Verdicts) -> str:
    """The cause, where it is the value: which value, and which other tokens become no sink."""
    only_own = verdicts.fail("any_single_key_creates_sink")
    if verdicts.hold("mean_suffices"):
        keys = "to one key alone" if verdicts.hold("any_single_key_creates_sink") else "only to itself"
        value = f"the average value vector of a token that can attend {keys}"
    else:
        value = "its own value vector" if only_own else "a value vector that is not averaged with others"
    text = f"The cause is {value}. Its high variance and energy are not needed: with those of an ordinary token it "
    text += "stays a sink"
    others = ["a token that attends to one other key"] if only_own else []
    if verdicts.fail("variance_suffices"):
        others.append("an ordinary token with its variance")
    return f"{text}, and {' or '.join(others)} becomes none." if others else f"{text}."


def _writers(verdicts: Verdicts, study: StudyData, went: str | None) -> str:
    """The neurons that write the sink, and what is left of it without them."""
    writers = study.minimal or study.writers
    if went is None or (not study.minimal and verdicts.fail("writers_necessary")):
        return "No set of neurons was found that writes it."
    listed = some_of(writers, SHOWN_NEURONS)
    write_it = f"neuron {listed} writes it" if len(writers) == 1 else f"neurons {listed} write it"
    removal = "ablate_minimal_set" if study.minimal else "ablate_writers"
    share = study.left_by(removal, study.plan.sink) or 0.0  # None only after a failed check, and a removal has none
    decimals = 1 if 0 < share < 0.1 else 0
    left = f"the sink is {went}" if went.startswith("shifted") else f"{share:.{decimals}%} of the sink is left"
    without = f"without {'it' if len(writers) == 1 else 'them'} {left}"
    if verdicts.hold("super_neurons_necessary"):
        return f"{write_it.capitalize()}: {without}."
    if verdicts.hold("writers_necessary"):
        strongest = f"the {len(writers)} neurons that write most strongly along its direction ({listed})"
        return f"Without {strongest} {left}; fewer neurons may do."
    return f"Whether {write_it} is undecided: {without}."


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
