"""The answer of a study in a few sentences: what makes the sink of this model, by the claims that decided it.

Every clause rests on verdicts alone; where they don't decide, the answer says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from sinkscope.measures.sink_score import SINK_RATE
from sinkscope.studies.causal_claims import CAUSAL
from sinkscope.studies.judging import Judgement, percent
from sinkscope.studies.measured import Measured

SHOWN_UNITS = 4


class _Verdicts:
    def __init__(self, judgements: Sequence[Judgement]) -> None:
        self._by_id = {judgement.id: judgement.verdict for judgement in judgements}

    def hold(self, claim: str) -> bool:
        return self._by_id.get(claim) == "holds"

    def fail(self, claim: str) -> bool:
        return self._by_id.get(claim) == "does not hold"


def answer(judgements: Sequence[Judgement], study: Measured, went: str | None) -> str:
    """What makes the sink, what writes it, and how many claims hold."""
    verdicts = _Verdicts(judgements)
    rate = judgements[0].effect or 0.0
    text = f"Position {study.plan.sink} is a sink for {rate:.1%} of heads. "
    text += f"{cause(verdicts)} {_writers(verdicts, study, went)}"
    others = judgements[1:]
    text += _count([j for j in others if j.claim.link != CAUSAL], "links seen in the untouched model")
    text += _count([j for j in others if j.claim.link == CAUSAL], "claims on cause and effect")
    return text.strip()


def cause(verdicts: _Verdicts) -> str:
    """What makes a token a sink."""
    if verdicts.hold("unmixing_creates_sink"):
        return _unmixed(verdicts)
    if verdicts.hold("variance_suffices"):
        return "More variance makes a token a sink; seeing only itself does not."
    if verdicts.hold("energy_suffices"):
        return "More energy makes a token a sink, whatever it sees; seeing only itself does not."
    if verdicts.hold("amplification_creates_sink"):
        return "Only amplified variance, far beyond that of a token that sees itself alone, makes a token a sink."
    if verdicts.fail("unmixing_creates_sink") and verdicts.fail("variance_suffices"):
        return (
            "Neither an unmixed value nor more variance makes another token a sink: the cause lies in the token or its "
            "place, not in averaging."
        )
    return "What makes a token a sink is undecided."


def _unmixed(verdicts: _Verdicts) -> str:
    seen = "exactly one key, whichever it is," if verdicts.hold("any_single_key_creates_sink") else "only itself"
    text = f"A token that sees {seen} becomes a sink"
    if verdicts.hold("variance_is_what_matters"):
        enough = {True: "its variance is enough", False: "its variance alone is not enough"}
        text += ", and it needs the variance that this brings"
        if verdicts.hold("variance_suffices") or verdicts.fail("variance_suffices"):
            text += f"; {enough[verdicts.hold('variance_suffices')]}"
        return text + "."
    if verdicts.hold("energy_is_what_matters") or (
        verdicts.hold("energy_suffices") and verdicts.fail("variance_is_what_matters")
    ):
        return text + " by its energy, not by its variance."
    if verdicts.hold("unmixed_value_matters"):
        text += " by its unmixed value: with the variance and the energy of a mixed token it stays one"
        if verdicts.fail("variance_suffices"):
            text += ", and more variance alone makes none"
        return text + "."
    needed = "is not needed" if verdicts.fail("variance_is_what_matters") else "may or may not be needed"
    return text + f"; its variance {needed}, and whether its value or its energy does it is undecided."


def _writers(verdicts: _Verdicts, study: Measured, went: str | None) -> str:
    """The units that write the sink."""
    if went is None:
        return "No set of units was found that carries it. "
    units = ", ".join(map(str, study.minimal[:SHOWN_UNITS]))
    if (more := len(study.minimal) - SHOWN_UNITS) > 0:
        units += f" and {more} more"
    named = f"unit {units} writes it" if len(study.minimal) == 1 else f"units {units} write it"
    left = f"falls below the {percent(SINK_RATE)} of a sink" if went == "gone" else f"is {went}"
    if verdicts.hold("super_neurons_necessary"):
        return f"{named.capitalize()}: without {'it' if len(study.minimal) == 1 else 'them'} the sink {left}. "
    return f"Whether {named} is not settled: without them the sink {left}. "


def _count(judged: Sequence[Judgement], words: str) -> str:
    applicable = [j for j in judged if j.verdict != "not applicable"]
    if not applicable:
        return f"None of the {words} can be judged here. "
    held = [j for j in applicable if j.verdict == "holds"]
    text = f"{len(held)} of {len(applicable)} {words} hold"
    for verdict in ("does not hold", "undecided"):
        if named := [j.id for j in applicable if j.verdict == verdict]:
            text += f"; {verdict}: {', '.join(named)}"
    return text + ". "
