"""A study's answer in words."""

from __future__ import annotations

from collections.abc import Sequence

from sinkscope.models.anatomy import Unit
from sinkscope.studies.claims import CLAIMS, Judgement
from sinkscope.studies.plan import Plan


def verdict_sentence(plan: Plan, judgements: Sequence[Judgement], minimal_set: Sequence[Unit], went: str | None) -> str:
    """What a reader takes home: is there a sink, which links hold, what causes it."""
    by_id = {judgement.id: judgement for judgement in judgements}
    rate = by_id["sink"].effect or 0.0  # of that position, as it was judged
    if by_id["sink"].verdict != "holds":
        fails = "which may or may not reach" if by_id["sink"].verdict == "undecided" else "and a sink needs"
        strongest = f"position {plan.sink}, the strongest in the sequences it was chosen on,"
        return f"No sink to explain: {strongest} is one for {rate:.1%} of heads, {fails} 5 %."
    text = f"Position {plan.sink} is a sink for {rate:.1%} of heads. "
    for kind, words in (("reading", "links seen in the untouched model"), ("causal", "claims on cause and effect")):
        judged = [j for j in judgements if (CLAIMS[j.id][0] == "causal") == (kind == "causal") and j.id != "sink"]
        text += _count(judged, words)
    if went is not None:
        # Whether that many units are needed is a claim of its own, with its interval.
        left = f"position {plan.sink} falls below the 5 % of a sink" if went == "gone" else f"the sink is {went}"
        named = ", ".join(map(str, minimal_set))
        text += f"Without its minimal set of units ({named}) {left}."
    return text.strip()


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
