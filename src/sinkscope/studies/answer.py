"""The answer of a study in a few sentences: what makes the sink of this model, by the claims that decided it.

Every clause rests on verdicts alone; where they don't decide, the answer says so. How many claims hold is said apart:
claims point opposite ways, and their number names no cause.
"""

from __future__ import annotations

from collections.abc import Sequence

from sinkscope.studies.causal_claims import CAUSAL_CLAIMS
from sinkscope.studies.judging import CAUSAL, Judgement, Verdict, some_of
from sinkscope.studies.study_data import StudyData

SHOWN_NEURONS = 4


class Verdicts(dict[str, Verdict]):
    """Claims by id, with what was decided about each."""

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
    """How many claims hold, the first (there is a sink) not counted; which do not, and which are not applicable."""
    sink, *others = judgements
    links = _count([j for j in others if j.claim.link != CAUSAL], "links seen in the untouched model")
    causal = _count([j for j in others if j.claim.link == CAUSAL], "claims on cause and effect")
    return f"Not counting {sink.id}, {links} {causal[0].upper()}{causal[1:]}"


def cause(verdicts: Verdicts) -> str:
    """What makes a token a sink."""
    if verdicts.hold("unmixing_creates_sink"):
        return _unmixed(verdicts)
    others_fail = verdicts.fail("unmixing_creates_sink") and verdicts.fail("variance_suffices")
    rest = "whether seeing only itself makes one is undecided"
    if verdicts.fail("unmixing_creates_sink"):
        rest = "seeing only itself makes none"
    if verdicts.hold("variance_suffices"):
        return f"More variance makes a token a sink; {rest}."
    if verdicts.hold("energy_suffices"):
        return f"More energy makes a token a sink, whatever it sees; {rest}."
    if verdicts.hold("amplification_creates_sink"):
        if others_fail:
            return "Only amplified variance, far beyond that of a token that sees itself alone, makes a token a sink."
        return "Amplified variance makes a token a sink; whether a smaller rise of the variance is enough is undecided."
    needed = " and ".join(claim.needs for claim in CAUSAL_CLAIMS if claim.needs and verdicts.hold(claim.id))
    if not others_fail:
        return f"What makes a token a sink is undecided{needed and f'; this one needs {needed}'}."
    neither = "Neither an unmixed value nor more variance makes another token a sink"
    if needed:
        return f"{neither}, but this one needs {needed}, so averaging is part of the cause, but not all of it."
    if verdicts.fail("opening_removes_sink"):
        return f"{neither}: the cause lies in the token or its place, not in averaging."
    return f"{neither}; whether this sink needs either is undecided."


def _unmixed(verdicts: Verdicts) -> str:
    seen = "one key alone, its own or another," if verdicts.hold("any_single_key_creates_sink") else "only itself"
    text = f"A token that sees {seen} becomes a sink"
    if verdicts.hold("variance_is_what_matters"):
        enough = {True: "its variance is enough", False: "its variance alone is not enough"}
        text += ", and it needs the variance that this brings"
        if verdicts.hold("variance_suffices") or verdicts.fail("variance_suffices"):
            text += f"; {enough[verdicts.hold('variance_suffices')]}"
        return text + "."
    without_value = verdicts.hold("energy_suffices") and not verdicts.hold("unmixed_value_matters")
    if verdicts.hold("energy_is_what_matters") or (without_value and verdicts.fail("variance_is_what_matters")):
        return text + " by its energy, not by its variance."
    if verdicts.hold("unmixed_value_matters"):
        only_own = verdicts.fail("any_single_key_creates_sink")
        value = "its own value alone" if only_own else "its unmixed value"
        if verdicts.hold("mean_suffices"):
            value = f"the mean of {'such' if only_own else 'unmixed'} values, whichever they are"
        text += f" by {value}: with the variance and the energy of a mixed token it stays one"
        none = ["a token that sees one other key"] if only_own else []
        none += ["a mixed token with its variance"] if verdicts.fail("variance_suffices") else []
        return text + (f", and {' or '.join(none)} becomes none." if none else ".")
    if verdicts.fail("variance_is_what_matters"):
        return text + "; its variance is not needed, and whether its value or its energy makes the sink is undecided."
    text += "; it is undecided whether it needs its variance"
    return text + ", and whether its value or its energy makes the sink."


def _writers(verdicts: Verdicts, study: StudyData, went: str | None) -> str:
    """The neurons that write the sink, and what is left of it without them."""
    carriers = study.minimal or study.writers
    if went is None or (not study.minimal and verdicts.fail("writers_necessary")):
        return "No set of neurons was found that carries it."
    neurons = some_of(carriers, SHOWN_NEURONS)
    named = f"neuron {neurons} writes it" if len(carriers) == 1 else f"neurons {neurons} write it"
    removal = "ablate_minimal_set" if study.minimal else "ablate_writers"
    share = study.left_by(removal, study.plan.sink) or 0.0  # None only where marked, which a removal never is
    decimals = 1 if 0 < share < 0.1 else 0
    left = f"the sink is {went}" if went.startswith("shifted") else f"{share:.{decimals}%} of the sink is left"
    without = f"without {'it' if len(carriers) == 1 else 'them'} {left}"
    if verdicts.hold("super_neurons_necessary"):
        return f"{named.capitalize()}: {without}."
    if verdicts.hold("writers_necessary"):
        most = f"the {len(carriers)} neurons that write most along its direction ({neurons})"
        return f"Without {most} {left}; a smaller set may be enough."
    return f"Whether {named} is not settled: {without}."


def _count(judged: Sequence[Judgement], words: str) -> str:
    applicable = [j for j in judged if j.verdict != "not applicable"]
    if not applicable:
        return f"none of the {words} can be judged here."
    held = [j for j in applicable if j.verdict == "holds"]
    text = f"{len(held)} of {len(applicable)} {words} hold"
    for verdict in ("does not hold", "undecided", "not applicable"):
        if named := [j.id for j in judged if j.verdict == verdict]:
            text += f"; {verdict}: {', '.join(named)}"
    return text + "."
