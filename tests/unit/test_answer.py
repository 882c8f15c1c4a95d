"""The sentence that names the cause says no more than the verdicts do."""

from types import SimpleNamespace
from typing import Any

import pytest

from sinkscope.models.anatomy import Neuron
from sinkscope.studies.answer import Verdicts, _writers, cause, counts
from sinkscope.studies.claims import CLAIMS
from sinkscope.studies.judging import Judgement

UNMIXING = "unmixing_creates_sink"
NO = "does not hold"
NEITHER = {UNMIXING: NO, "variance_suffices": NO}


@pytest.mark.parametrize(
    ("verdicts", "said", "not_said"),
    [
        ({}, "undecided", "makes a token a sink;"),
        ({UNMIXING: NO}, "undecided.", "Neither"),
        (
            {UNMIXING: NO, "opening_removes_sink": "holds"},
            "undecided; this one needs to attend only to itself.",
            "Neither",
        ),
        (NEITHER, "whether this sink needs either is undecided", ", not averaging"),
        ({**NEITHER, "opening_removes_sink": NO}, ", not averaging", "undecided"),
        (
            {**NEITHER, "opening_removes_sink": "holds"},
            "needs to attend only to itself. So averaging",
            ", not averaging",
        ),
        (
            {**NEITHER, "opening_removes_sink": NO, "equalising_removes_sink": "holds"},
            "needs its variance (or the energy in it). So averaging",
            ", not averaging",
        ),
        ({UNMIXING: NO, "variance_suffices": "holds"}, "; attending only to itself does not.", "undecided"),
        ({"variance_suffices": "holds"}, "; whether attending only to itself does is undecided.", "does not"),
        (
            {"amplification_creates_sink": "holds"},
            "whether a smaller rise of the variance is enough is undecided",
            "Only",
        ),
        (
            {"amplification_creates_sink": "holds", UNMIXING: NO, "variance_suffices": NO},
            "Only amplified variance",
            "undecided",
        ),
        ({UNMIXING: "holds"}, "Whether the cause is its value, its variance or its energy is undecided.", "not needed"),
        (
            {UNMIXING: "holds", "variance_is_what_matters": NO},
            "Its high variance is not needed; whether the cause is its value or its energy is undecided.",
            "The cause is",
        ),
        (
            {UNMIXING: "holds", "unmixed_value_matters": "holds", "variance_suffices": NO},
            "an ordinary token with its variance becomes none",
            "It needs",
        ),
        (
            {UNMIXING: "holds", "unmixed_value_matters": "holds"},
            "a value vector that is not averaged with others",
            "becomes none",
        ),
        (
            {UNMIXING: "holds", "unmixed_value_matters": "holds", "any_single_key_creates_sink": NO},
            "The cause is its own value vector. Its high variance and energy are not needed: with those of an ordinary "
            "token it stays a sink, and a token that attends to one other key becomes none.",
            "not averaged",
        ),
        (
            {
                UNMIXING: "holds",
                "unmixed_value_matters": "holds",
                "any_single_key_creates_sink": NO,
                "variance_suffices": NO,
            },
            "a token that attends to one other key or an ordinary token with its variance becomes none",
            "not averaged",
        ),
        (
            {UNMIXING: "holds", "unmixed_value_matters": "holds", "mean_suffices": "holds"},
            "the average value vector of a token that can attend only to itself",
            "not averaged",
        ),
        (
            {UNMIXING: "holds", "variance_is_what_matters": "holds"},
            "It needs the higher variance that this gives it.",
            "enough",
        ),
        ({UNMIXING: "holds", "energy_is_what_matters": "holds"}, "The cause is its higher energy", "value"),
        (
            {
                UNMIXING: "holds",
                "energy_suffices": "holds",
                "variance_is_what_matters": NO,
                "unmixed_value_matters": "holds",
            },
            "a value vector that is not averaged with others",
            "its higher energy",
        ),
    ],
)
def test_the_cause_says_what_was_decided(verdicts, said, not_said):
    sentence = cause(Verdicts(verdicts))
    assert said in sentence
    assert not_said not in sentence


def test_the_counts_leave_no_claim_out():
    """Control: a claim that is not applicable counts neither for the rest nor against it."""
    verdicts = {"lock": NO, "averaging_law": "undecided", "channel_sparsity_necessary": "not applicable"}
    assert _counted(lambda id: verdicts.get(id, "holds")) == (
        "Besides the sink itself, 5 of 7 claims about the model as it is hold; these do not: lock; undecided: "
        "averaging_law. 20 of 20 claims about cause and effect hold; not applicable: channel_sparsity_necessary."
    )
    assert _counted(lambda id: "holds" if id == "sink" else "not applicable") == (
        "Besides the sink itself, none of the claims about the model as it is can be judged here. "
        "None of the claims about cause and effect can be judged here."
    )


def _counted(verdict_of) -> str:
    return counts([Judgement(claim=claim, verdict=verdict_of(id), n=16) for id, claim in CLAIMS.items()])


@pytest.mark.parametrize(
    ("verdicts", "minimal", "writers", "went", "said"),
    [
        ({}, 0, 0, None, "No set of neurons was found that writes it."),
        (
            {"super_neurons_necessary": "holds"},
            *(1, 0, "gone"),
            "Neuron 3:0 writes it: without it 14% of the sink is left.",
        ),
        (
            {"super_neurons_necessary": NO, "writers_necessary": "holds"},
            *(0, 6, "weaker (6%)"),
            "Without the 6 neurons that write most strongly along its direction (3:0, 3:1, 3:2, 3:3 and 2 more) 22% of "
            "the sink is left; fewer neurons may do.",
        ),
        (
            {"super_neurons_necessary": "holds"},
            *(1, 0, "shifted to position 7 (31.0%)"),
            "Neuron 3:0 writes it: without it the sink is shifted to position 7 (31.0%).",
        ),
        (
            {"super_neurons_necessary": NO, "writers_necessary": NO},
            *(0, 6, "weaker (30%)"),
            "No set of neurons was found that writes it.",
        ),
        (
            {"super_neurons_necessary": NO, "writers_necessary": "undecided"},
            *(0, 2, "gone"),
            "Whether neurons 3:0, 3:1 write it is undecided: without them 22% of the sink is left.",
        ),
    ],
)
def test_what_writes_the_sink_is_said_where_it_was_found(verdicts, minimal, writers, went, said):
    neurons = tuple(Neuron(3, None, neuron) for neuron in range(8))
    study: Any = SimpleNamespace(minimal=neurons[:minimal], writers=neurons[:writers])
    left = {"ablate_minimal_set": 0.14, "ablate_writers": 0.22}
    study.plan, study.left_by = SimpleNamespace(sink=0), lambda removal, position: left[removal]
    assert _writers(Verdicts(verdicts), study, went) == said


@pytest.mark.parametrize(("share", "said"), [(0.142, "14%"), (0.0048, "0.5%"), (0.0, "0%")])
def test_a_small_share_is_not_told_as_none(share, said):
    study: Any = SimpleNamespace(minimal=(Neuron(3, None, 0),), writers=(), plan=SimpleNamespace(sink=0))
    study.left_by = lambda removal, position: share
    sentence = _writers(Verdicts({"super_neurons_necessary": "holds"}), study, "gone")
    assert sentence == f"Neuron 3:0 writes it: without it {said} of the sink is left."
