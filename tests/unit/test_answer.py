"""The mechanism follows from the verdicts by frozen rules, and the sentence says no more than they do."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sinkscope.models.anatomy import Neuron
from sinkscope.studies import mechanism
from sinkscope.studies.answer import _share, _writers, cause, counts
from sinkscope.studies.claims import CLAIMS
from sinkscope.studies.judging import Judgement, Verdict
from sinkscope.studies.mechanism import MECHANISMS, mechanism_of, rules

HOLDS, NO = "holds", "does not hold"
ELSEWHERE = " (as large a change in other directions leaves 97%)"
VARIANCE = {"first_token_needed": NO, "variance_is_what_matters": HOLDS, "variance_suffices": HOLDS}
NO_AVERAGING = {
    **{"first_token_needed": NO, "unmixing_creates_sink": HOLDS},
    **{"opening_removes_sink": HOLDS, "variance_is_what_matters": NO},
}
POSITION = dict.fromkeys(("first_token_needed", "token_carries_sink", "unmixing_creates_sink", "variance_suffices"), NO)
TOKEN = {"first_token_needed": HOLDS, "token_carries_sink": HOLDS}
DECIDED = {"variance": VARIANCE, "no_averaging": NO_AVERAGING, "position": POSITION, "token": TOKEN}


@pytest.mark.parametrize("name", DECIDED)
def test_each_mechanism_needs_every_one_of_its_rules(name):
    """With one claim undecided there is no mechanism, and with one the other way round another at most."""
    verdicts: dict[str, Verdict] = {"sink": HOLDS, **DECIDED[name]}
    assert mechanism_of(verdicts) == name
    for claim in DECIDED[name]:
        assert mechanism_of({**verdicts, claim: "undecided"}) == "undecided"
        other: Verdict = NO if verdicts[claim] == HOLDS else HOLDS
        assert mechanism_of({**verdicts, claim: other}) != name
    assert mechanism_of({**verdicts, "sink": "undecided"}) == "no_sink"


def test_no_verdicts_meet_the_rules_of_two_mechanisms():
    claims = sorted({claim for each in MECHANISMS for claim in (*each.holds, *each.fails)})
    most = 0
    for verdicts in product((HOLDS, NO, "undecided"), repeat=len(claims)):
        most = max(most, sum(each.is_met(dict(zip(claims, verdicts, strict=True))) for each in MECHANISMS))
    assert most == 1


def test_a_rule_that_changes_changes_the_hash(monkeypatch):
    """The rules are frozen: whoever changes one on purpose gives it a new version, and the hash here."""
    assert rules() == {"version": "1", "hash": "7170a10caa9939ad"}
    hashes = {rules()["hash"]}
    for changed in (
        replace(CLAIMS["sink"], statement="another"),
        replace(CLAIMS["sink"], bars=(replace(CLAIMS["sink"].bars[0], threshold=0.06),)),
        replace(CLAIMS["sink"], control_is="another"),
    ):
        monkeypatch.setitem(CLAIMS, "sink", changed)
        hashes.add(rules()["hash"])
    monkeypatch.undo()
    monkeypatch.setattr(mechanism, "MECHANISMS", MECHANISMS[1:])
    assert len({*hashes, rules()["hash"]}) == 5


def judged(verdicts: Mapping[str, Verdict], **numbers: tuple[float, float]) -> list[Judgement]:
    """Judgements of all claims, undecided where none is given; `numbers` are (effect, control)."""
    found = []
    for id, claim in CLAIMS.items():
        effect, control = numbers.get(id, (None, None))
        verdict = verdicts.get(id, HOLDS if id == "sink" else "undecided")
        found.append(Judgement(claim=claim, verdict=verdict, n=16, effect=effect, control=control))
    return found


def data(risen: Mapping[str, float], left: float | None = None) -> Any:
    """Data of a study in which kinds of conditions raise the sink rate by so much."""
    study = SimpleNamespace(plan=SimpleNamespace(sink=0, targets=(10,)), left_by=lambda name, position: left)
    study.at_targets = lambda name: [name] if name in risen else []
    study.risen_B = lambda names: np.full(16, risen[names[0]])
    return study


@pytest.mark.parametrize(
    ("verdicts", "numbers", "study", "said"),
    [
        (
            TOKEN,
            {"token_carries_sink": (0.33, 0.001)},
            data({}),
            "The cause is the token that stands there, wherever it stands: moved to position 10 it is a sink there too "
            "(+33.0 points; another token put there: +0.1 points).",
        ),
        (
            POSITION,
            {"first_token_needed": (0.98, 1.0)},
            data({}, left=0.01),
            "The cause is the first place, whatever token stands there: with another one 98% of the sink is left (with "
            "another one elsewhere: 100%). What counts is the index 0: with all position ids shifted 1.0% is left.",
        ),
        (
            NO_AVERAGING,
            {"unmixing_creates_sink": (0.41, 0.001)},
            data({"see_self": 0.41, "see_previous": 0.3, "see_far": 0.3, "mean_of_itself": 0.3, "mean_of_ordinary": 0}),
            "The cause is that its value is not averaged with others: any token that attends to one key alone, its own "
            "or another, becomes a sink (+41.0 points; attending to all but itself: +0.1 points). Its higher variance "
            "is not needed: the average value vector of such tokens does it alone (+30.0 points; that of an ordinary "
            "token: +0.0 points).",
        ),
        (
            NO_AVERAGING,
            {"unmixing_creates_sink": (0.41, 0.001)},
            data({"see_self": 0.41, "see_previous": 0.3, "see_far": 0.01, "mean_of_itself": 0.1}),
            "The cause is that its value is not averaged with others: any token that attends only to itself becomes a "
            "sink (+41.0 points; attending to all but itself: +0.1 points). Its higher variance is not needed.",
        ),
        (
            VARIANCE,
            {"variance_suffices": (0.2, 0.01)},
            data({}),
            "The cause is the high variance of its value: an ordinary token that is given this variance becomes a sink "
            "(+20.0 points; given its energy alone: +1.0 points), and a token that attends only to itself becomes none "
            "without it.",
        ),
        ({}, {}, data({}), "Which mechanism makes it is undecided."),
        (
            {"first_token_needed": NO, "unmixing_creates_sink": HOLDS},
            {},
            data({}),
            "Which mechanism makes it is undecided. What is known: any token there will do; another token becomes one "
            "by attending only to itself.",
        ),
    ],
)
def test_the_sentence_of_each_mechanism(verdicts, numbers, study, said):
    assert cause(judged(verdicts, **numbers), study) == said


def test_the_counts_leave_no_claim_out():
    """Control: a claim that is not applicable counts neither for the rest nor against it."""
    verdicts = {"lock": NO, "super_neurons": "undecided", "variance_suffices": "not applicable"}
    assert _counted(lambda id: verdicts.get(id, "holds")) == (
        "Besides the sink itself, 2 of 4 claims about the model as it is hold; these do not: lock; undecided: "
        "super_neurons. 8 of 8 claims about cause and effect hold; not applicable: variance_suffices."
    )
    assert _counted(lambda id: "holds" if id == "sink" else "not applicable") == (
        "Besides the sink itself, none of the claims about the model as it is can be judged here. "
        "None of the claims about cause and effect can be judged here."
    )


def _counted(verdict_of) -> str:
    return counts([Judgement(claim=claim, verdict=verdict_of(id), n=16) for id, claim in CLAIMS.items()])


@pytest.mark.parametrize(
    ("verdict", "minimal", "writers", "went", "said"),
    [
        ("undecided", 0, 0, None, "No set of neurons was found that writes it."),
        (HOLDS, 1, 0, "gone", f"Neuron 3:0 writes it: without it 14% of the sink is left{ELSEWHERE}."),
        (
            *(HOLDS, 0, 6, "weaker (6%)"),
            "Without the 6 neurons that write most strongly along its direction (3:0, 3:1, 3:2, 3:3 and 2 more) 22% of "
            f"the sink is left{ELSEWHERE}; fewer neurons may do.",
        ),
        (
            *(HOLDS, 1, 0, "shifted to position 7 (31.0%)"),
            f"Neuron 3:0 writes it: without it the sink is shifted to position 7 (31.0%){ELSEWHERE}.",
        ),
        (NO, 0, 6, "weaker (30%)", "No set of neurons was found that writes it."),
        (
            *("undecided", 0, 2, "gone"),
            f"Whether neurons 3:0, 3:1 write it is undecided: without them 22% of the sink is left{ELSEWHERE}.",
        ),
    ],
)
def test_what_writes_the_sink_is_said_where_it_was_found(verdict, minimal, writers, went, said):
    neurons = tuple(Neuron(3, None, neuron) for neuron in range(8))
    left = {"ablate_minimal_set": 0.14, "ablate_writers": 0.22}
    study: Any = data({})
    study.minimal, study.removed = neurons[:minimal], neurons[: minimal or writers]
    study.removal = SimpleNamespace(name="ablate_minimal_set" if minimal else "ablate_writers")
    study.left_by = lambda name, position: left[name]
    claim = CLAIMS["neurons_necessary"]
    assert _writers(Judgement(claim=claim, verdict=verdict, n=16, control=0.97), study, went) == said


@pytest.mark.parametrize(("share", "said"), [(0.142, "14%"), (0.0048, "0.5%"), (0.0, "0%"), (None, "0%")])
def test_a_small_share_is_not_told_as_none(share, said):
    assert _share(share) == said
