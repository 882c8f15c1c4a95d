"""Which mechanism makes the sink: the rules, as data. No number stands here, since each rule rests on the verdict of a
claim, which has its condition, its bar, its interval and its control.

The rules were written before the models were seen that they are now applied to; docs/study.md names those that earlier
claims were made on. `rules()` states what was applied: a rule, a claim or a bar that changes, changes the hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from sinkscope.studies.claims import CLAIMS
from sinkscope.studies.judging import Claim, Verdict

VERSION = "1"
UNDECIDED, NO_SINK = "undecided", "no_sink"


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """One mechanism: it is the model's if every rule is met. No two can be."""

    name: str
    means: str
    holds: tuple[str, ...] = ()
    """Claims that must hold."""
    fails: tuple[str, ...] = ()
    """Claims that must not hold, each with its whole interval: undecided is not enough."""
    decisive: str
    """The claim whose number and control the sentence gives."""

    def is_met(self, verdicts: Mapping[str, Verdict]) -> bool:
        return all(verdicts.get(claim) == "holds" for claim in self.holds) and all(
            verdicts.get(claim) == "does not hold" for claim in self.fails
        )


MECHANISMS = (
    Mechanism(
        name="token",
        means="this token, wherever it stands",
        holds=("first_token_needed", "token_carries_sink"),
        decisive="token_carries_sink",
    ),
    Mechanism(
        name="position",
        means="whatever token stands there, by its place",
        fails=("first_token_needed", "token_carries_sink", "unmixing_creates_sink", "variance_suffices"),
        decisive="first_token_needed",
    ),
    Mechanism(
        name="no_averaging",
        means="any token that attends to one key alone, whatever its variance",
        holds=("unmixing_creates_sink", "opening_removes_sink"),
        fails=("first_token_needed", "variance_is_what_matters"),
        decisive="unmixing_creates_sink",
    ),
    Mechanism(
        name="variance",
        means="any token with that variance",
        holds=("variance_suffices", "variance_is_what_matters"),
        fails=("first_token_needed",),
        decisive="variance_suffices",
    ),
)


def decisive_claims() -> dict[str, Claim]:
    """The claims that mechanisms rest on, with the sink and the neurons: those that are judged on text too."""
    named = [claim for each in MECHANISMS for claim in (*each.holds, *each.fails)]
    return {id: claim for id, claim in CLAIMS.items() if id in ("sink", *named, "neurons_necessary")}


def mechanism_of(verdicts: Mapping[str, Verdict]) -> str:
    """The name of the mechanism that verdicts by claim decide; undecided if none is, no_sink without a sink."""
    if verdicts.get("sink") != "holds":
        return NO_SINK
    return next((each.name for each in MECHANISMS if each.is_met(verdicts)), UNDECIDED)


def rules() -> dict[str, str]:
    """The version of the rules, and a hash of every mechanism and claim with its bars."""
    stated = {"mechanisms": [asdict(each) for each in MECHANISMS], "claims": [_stated(c) for c in CLAIMS.values()]}
    text = json.dumps(stated, sort_keys=True)
    return {"version": VERSION, "hash": hashlib.sha256(text.encode()).hexdigest()[:16]}


def _stated(claim: Claim) -> dict:
    """What a claim asks."""
    bars = [[bar.rule, bar.threshold, bar.statistic.__qualname__, bar.centred, bar.at_targets] for bar in claim.bars]
    return {"id": claim.id, "statement": claim.statement, "bars": bars, "control": claim.control_is}
