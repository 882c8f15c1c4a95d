"""The study on models whose truth is known: it finds the planted chain, and claims no link that a decoy lacks."""

import copy
import functools
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from planted_models import (
    DECOYS,
    LOCKS,
    MECHANISM,
    MECHANISM_OF_CAUSE,
    caused,
    decoy,
    locked,
    planted_chain,
    random_tokens,
    true_of,
)

from sinkscope.arguments import STUDY_SEQUENCES
from sinkscope.interventions.aggregation import ChangeAggregation
from sinkscope.interventions.mask import mask_to_self
from sinkscope.interventions.neurons import densify_neurons
from sinkscope.models.anatomy import Neuron
from sinkscope.models.initial import Configuration, draw
from sinkscope.models.loading import load
from sinkscope.studies import judging
from sinkscope.studies.claims import CLAIMS
from sinkscope.studies.conditions import Condition
from sinkscope.studies.mechanism import mechanism_of
from sinkscope.studies.study import NO_SINK, UNPLANNED, Study, study
from sinkscope.tracing.replay import Replay
from sinkscope.tracing.trace import trace

SMALL = dict(num_sequences=STUDY_SEQUENCES, length=32)
"""The smallest study there is: models this small take some seconds each."""
PARITY = Path(__file__).parents[1] / "parity" / "kept"
CAUSAL = {name for name, claim in CLAIMS.items() if claim.link == "causal"}
HOLDS, FAILS, EMPTY = "holds", "does not hold", "not applicable"


TOKEN = ("first_token_needed", "token_carries_sink")
"""What is false of all planted models but that with a special token."""


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors this small only lose by being shared out."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def verdicts_of(found: Study) -> dict[str, str]:
    verdicts = {judgement.id: judgement.verdict for judgement in found.judgements}
    assert list(verdicts) == list(CLAIMS)
    return verdicts


def notes_of(found: Study) -> dict[str, str]:
    return {judgement.id: judgement.note for judgement in found.judgements}


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.proof)])
def test_every_claim_but_that_of_the_token_holds_in_the_planted_chain(seed):
    model, facts = planted_chain(seed)
    found = study(load(model))
    verdicts = verdicts_of(found)
    assert verdicts == dict.fromkeys(CLAIMS, HOLDS) | dict.fromkeys(TOKEN, FAILS)
    ((layer, neuron),) = facts.super_neurons
    assert found.mechanism == found.summary["mechanism"] == "variance"
    assert told_of(found).startswith("The cause is the high variance of its value: ")
    assert f" Neuron {layer}:{neuron} writes it: without it 0% of the sink is left" in told_of(found)
    assert found.minimal_set == tuple(Neuron(layer, None, neuron) for layer, neuron in facts.super_neurons)
    assert found.went == "gone"
    assert found.plan.dimensions == (facts.massive_dimension,)
    assert found.tables["minimal_set"]["role"] == ["needed"]
    notes = notes_of(found)
    assert "they read a coordinate" in notes["lock"]
    assert "the sink needs the coordinate that keys read, not sparse vectors" in notes["neurons_necessary"]


@functools.cache
def small_chain() -> tuple[Any, Study, list[ChangeAggregation]]:
    """(the chain, its smallest study, the edits of the aggregation made for it), read by several tests."""
    model, _ = planted_chain(0)
    made = []

    def kept(edit, *args, make=ChangeAggregation.__init__, **options) -> None:
        make(edit, *args, **options)
        made.append(edit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChangeAggregation, "__init__", kept)
        return model, study(load(model), **SMALL), made


def test_the_referees_table_says_what_a_condition_left_alone():
    """Entropy and mixing at every position as a trace under the same mask has them; norms held, and not held."""
    model, found, _ = small_chain()
    target = found.plan.targets[0]
    with mask_to_self(model, target):
        traced = trace(model, found.trace.recording.batch, effective_rank=False).recording
    table = found.tables["attention_rows"]
    for quantity in ("entropy", "mixing"):
        kept = [
            (after, low, before, high)
            for condition, at, of, after, low, before, high in zip(
                *(table[name] for name in ("condition", "target", "quantity", "after", "low", "before", "high")),
                strict=True,
            )
            if (condition, at, of) == ("mask_to_self", target, quantity)
        ]
        np.testing.assert_allclose([row[0] for row in kept], traced[quantity].mean(0), rtol=1e-4, atol=1e-6)
        assert all(low - 1e-6 <= after - before <= high + 1e-6 for after, low, before, high in kept)
        effects = found.tables["effects"]
        (elsewhere,) = (
            after
            for condition, at, of, after in zip(
                *(effects[name] for name in ("condition", "target", "quantity", "after")), strict=True
            )
            if (condition, at, of) == ("mask_to_self", target, f"{quantity}_elsewhere")
        )
        others = np.delete(np.asarray(traced[quantity].mean(0)), target)
        assert elsewhere == pytest.approx(others.mean(), rel=1e-4)
    norms = found.tables["norms"]
    changed = {
        (condition, place): []
        for condition in ("mask_to_self", "clamp_norms+mask_to_self")
        for place in ("target", "elsewhere")
    }
    for condition, at, place, before, after in zip(
        *(norms[name] for name in ("condition", "target", "place", "before", "after")), strict=True
    ):
        if at == target and (condition, place) in changed:
            changed[condition, place].append(abs(after / before - 1))
    assert max(changed["clamp_norms+mask_to_self", "target"] + changed["clamp_norms+mask_to_self", "elsewhere"]) < 1e-4
    assert max(changed["mask_to_self", "target"]) > 1  # control: what makes the sink makes a large norm
    # A sink by direction, which the norm has no part in.
    baseline, free, held = (
        result.later_BS[:, target].mean()
        for result in (
            found.data.baseline,
            *(found.data.results[Condition("mask_to_self", target, held=of)] for of in (None, "norms")),
        )
    )
    assert held - baseline > 0.8 * (free - baseline) > 0.1


def test_the_variance_of_models_drawn_afresh_stands_beside_the_trained_one():
    """The control of `variance_discrepancy`, by the slow way: a whole fresh model of the same configuration."""
    model, found, _ = small_chain()
    fresh_NLBST = found.data.fresh_deviation_NLBST
    assert fresh_NLBST is not None
    batch = found.trace.recording.batch
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = len(found.plan.layers)
    plain = trace(draw(Configuration(name="fresh", config=config), 1), batch, effective_rank=False)
    fresh_NLT = fresh_NLBST.mean(2)[:, :, 0]
    np.testing.assert_allclose(fresh_NLT[1], plain.recording["value_variance"], rtol=1e-4)

    def ratio(variance_LT: np.ndarray) -> float:
        by_layer = variance_LT[:, 0] / variance_LT[:, -(SMALL["length"] // 2) :].mean(1)
        return float(np.prod(by_layer) ** (1 / len(by_layer)))

    first, second, third = map(ratio, fresh_NLT)
    trained = ratio(found.data.squared_deviation_LBST[:, :, 0].mean(1))
    judged = {judgement.id: judgement for judgement in found.judgements}["variance_discrepancy"]
    assert judged.effect == pytest.approx(trained / (first * second * third) ** (1 / 3), rel=1e-4)
    assert judged.control == pytest.approx(first / (second * third) ** 0.5, rel=1e-4)


NO_NEURON = {"super_neurons": FAILS, "super_neurons_sufficient": EMPTY, "mediation_mask_super_neurons": EMPTY}
# Its disparity carries no sink.
IDLE_NEURON = {
    "dimension_disparity": HOLDS,
    **dict.fromkeys(("super_neurons", "super_neurons_sufficient", "mediation_mask_super_neurons"), FAILS),
}
VARIANCE_DOES_IT = {"unmixing_creates_sink": HOLDS, "variance_is_what_matters": HOLDS}
LINKS: dict[str, dict[str, str]] = {
    # Keys that avoid what the norm makes small at the sink read no direction that its states share.
    "sink_from_norm": {
        **VARIANCE_DOES_IT,
        **NO_NEURON,
        **dict.fromkeys(("dimension_disparity", "lock", "neurons_necessary"), FAILS),
    },
    "sink_from_ordinary_units": {
        **VARIANCE_DOES_IT,
        **NO_NEURON,
        "dimension_disparity": FAILS,
        "neurons_necessary": HOLDS,
    },
    "disparity_without_sink": {**dict.fromkeys(CLAIMS, EMPTY), "sink": FAILS},
    "large_neuron": {**VARIANCE_DOES_IT, **NO_NEURON, "dimension_disparity": FAILS},
    "disparity_beside_sink": {**VARIANCE_DOES_IT, **IDLE_NEURON, "neurons_necessary": HOLDS},
    "disparity_after_sink": {**VARIANCE_DOES_IT, **IDLE_NEURON, "neurons_necessary": FAILS},
    "special_token": {
        **NO_NEURON,
        **dict.fromkeys(TOKEN, HOLDS),
        **dict.fromkeys(("dimension_disparity", "unmixing_creates_sink"), FAILS),
        # Every sequence has the same token there: what compares sequences says nothing about it.
        **dict.fromkeys(("variance_discrepancy", "lock"), EMPTY),
    },
    # A dense writer, and a lock on a direction: the neuron is found without a massive dimension.
    "dense_neuron": {**VARIANCE_DOES_IT, **NO_NEURON, "neurons_necessary": HOLDS, "lock": HOLDS},
}


UNMIXING = ("unmixing_creates_sink", "opening_removes_sink")
VARIANCE = ("variance_is_what_matters", "variance_suffices")
CAUSE_LINKS: dict[str, dict[str, str]] = {
    # Energy comes along with variance; the variance alone does nothing.
    "energy": {**dict.fromkeys(UNMIXING, HOLDS), **dict.fromkeys((*TOKEN, "variance_is_what_matters"), FAILS)},
    # Mixed values stay mixed at any variance, unmixed ones unmixed; of `own` only those of the token itself.
    "unmixed": {**dict.fromkeys(UNMIXING, HOLDS), **dict.fromkeys((*TOKEN, *VARIANCE), FAILS)},
    "own": {**dict.fromkeys(UNMIXING, HOLDS), **dict.fromkeys((*TOKEN, *VARIANCE), FAILS)},
    "mean": {**dict.fromkeys(UNMIXING, HOLDS), **dict.fromkeys(("token_carries_sink", *VARIANCE), FAILS)},
    # Nothing that is done to the aggregation makes or removes the sink; without a rise there is none to take apart.
    "position": {
        **dict.fromkeys((*TOKEN, *UNMIXING, "variance_suffices"), FAILS),
        "variance_is_what_matters": EMPTY,
        "super_neurons_sufficient": HOLDS,
    },
}
"""Beside variance, which is the planted chain."""


def told_of(found: Study) -> str:
    """The answer behind the rate: the cause first, then what writes the sink."""
    return found.verdict.split(" of heads. ", 1)[1]


@pytest.mark.parametrize("cause", CAUSE_LINKS)
def test_what_opens_the_super_neuron_is_told_right(cause):
    """With 48 sequences: of a dozen dimensions, 16 know a variance too badly to check that a level was met."""
    model, _ = caused(cause, 0)
    found = study(load(model), num_sequences=48, length=32)
    verdicts = {judgement.id: judgement.verdict for judgement in found.judgements}
    assert {claim: verdicts[claim] for claim in CAUSE_LINKS[cause]} == CAUSE_LINKS[cause]
    # Not more than its energy does is not a sink by its variance; where both are equal, nothing need be decided.
    assert verdicts["variance_suffices"] != HOLDS
    assert verdicts["neurons_necessary"] == HOLDS
    assert found.mechanism == MECHANISM_OF_CAUSE.get(cause, "undecided")


@pytest.mark.parametrize("kind", DECOYS)
def test_the_right_link_of_a_decoy_fails(kind):
    """By the kept study of its first seed, which `tests/parity` compares with today's."""
    kept = json.loads(gzip.decompress((PARITY / f"decoy-{kind}.json.gz").read_bytes()))
    verdicts = dict(zip(*(kept["tables"]["claims"][column] for column in ("id", "verdict")), strict=True))
    assert list(verdicts) == list(CLAIMS)
    assert true_of(kind) <= CLAIMS.keys()
    assert {claim: verdicts[claim] for claim in LINKS[kind]} == LINKS[kind]
    assert wrongly_held(kind, verdicts) == set()
    assert kept["summary"]["mechanism"] in (MECHANISM.get(kind, "variance"), "undecided")
    if kind == "dense_neuron":
        assert "they read a direction" in kept["tables"]["claims"]["note"][list(CLAIMS).index("lock")]


def wrongly_held(kind: str, verdicts: dict[str, str]) -> set[str]:
    """The claims that a study of a decoy found to hold, though they are false of it."""
    return {claim for claim, verdict in verdicts.items() if verdict == HOLDS} - true_of(kind)


@pytest.mark.proof
@pytest.mark.parametrize("quarter", range(4))
def test_200_decoys_and_at_most_4_wrong_holds_in_all(quarter):
    """Over all claims. A quarter of the decoys each, with at most one that is wrong: four at most in all."""
    assert len(DECOYS) * 25 == 200
    wrong, held = [], 0
    for seed in range(quarter, 25, 4):
        for kind in DECOYS:
            model, facts = decoy(kind, seed)
            verdicts: Any = verdicts_of(study(load(model), bos=facts.bos, **SMALL))
            assert (verdicts["sink"] == HOLDS) == (facts.sink is not None), (kind, seed)
            wrong += [(kind, seed, claim) for claim in sorted(wrongly_held(kind, verdicts))]
            mechanism = mechanism_of(verdicts)
            if mechanism not in (MECHANISM.get(kind, "variance"), "undecided"):
                wrong.append((kind, seed, mechanism))
            held += list(verdicts.values()).count(HOLDS)
    print(f"quarter {quarter}: {held} claims hold, of which {len(wrong)} are false: {wrong}")
    assert len(wrong) <= 1, wrong


# What heads lock on to


@pytest.mark.parametrize(("lock", "least", "most"), [("sparsity", 0.75, 1.25), ("coordinate", 0.0, 0.25)])
def test_where_the_neuron_may_write(lock, least, most):
    """Without a study: what is left of the sink rate of a trace when the neuron's vector points elsewhere."""
    model, facts = locked(lock, 1)
    ids = random_tokens(facts, num_sequences=4, length=32)

    def left(mode: Any, seed: int) -> float:
        with densify_neurons(model, facts.super_neurons, mode, avoid=[facts.massive_dimension or 0], seed=seed):
            return float(trace(model, ids, effective_rank=False).recording.sink_rate[0]) / before

    before = float(trace(model, ids, effective_rank=False).recording.sink_rate[0])
    assert before > 0.3
    assert max(left("spread", 1), left("turn", 1)) < 0.25
    assert least <= left("move", 1) < most


NEEDS = {
    "sparsity": ("they read a direction", "the sink needs sparse vectors"),
    # A part of any vector is read, so that it is a matter of the draw what is left: one draw alone would mislead.
    "aside": ("they read a coordinate", "the sink does not need sparse vectors"),
    "coordinate": ("they read a coordinate", "the sink needs the coordinate that keys read, not sparse vectors"),
    "direction": ("a lock on a direction", "the sink needs the direction that keys read, not sparse vectors"),
}


@pytest.mark.proof
@pytest.mark.parametrize("lock", LOCKS)
def test_what_heads_lock_on_to_is_told_right(lock):
    model, facts = locked(lock, 1)
    found = study(load(model), **SMALL)
    verdicts, notes = verdicts_of(found), notes_of(found)
    lock_note, needed = NEEDS[lock]
    assert verdicts["lock"] == HOLDS
    assert lock_note in notes["lock"]
    assert needed in notes["neurons_necessary"]
    # One neuron writes in each of them, sparsely or not.
    assert verdicts["neurons_necessary"] == HOLDS
    assert found.minimal_set == tuple(Neuron(layer, None, neuron) for layer, neuron in facts.super_neurons)
    for claim in ("super_neurons", "dimension_disparity"):
        assert (verdicts[claim] == HOLDS) == (facts.massive_dimension is not None), claim


def test_a_sink_that_is_undecided_among_all_claims_explains_nothing(monkeypatch):
    """Alone its p-value, 0.0019 at best with 16 sequences, would pass this level."""
    monkeypatch.setattr(judging, "FAMILY_LEVEL", 0.002)
    model, _ = decoy("sink_from_norm", 0)
    sink, *others = study(load(model), num_sequences=STUDY_SEQUENCES, length=48).judgements
    assert sink.low < sink.effect, "the sink must vary for its interval to matter"
    assert sink.verdict == "undecided"
    assert {(other.verdict, other.note) for other in others} == {(EMPTY, NO_SINK)}


def test_causal_claims_are_listed_where_only_the_judging_sequences_show_a_sink(monkeypatch):
    """A rate near 5 % can lie on either side: here the planning side is moved."""
    monkeypatch.setattr("sinkscope.studies.study.MIN_SINK_RATE", 0.9)
    model, _ = decoy("sink_from_ordinary_units", 0)
    found = study(load(model), **SMALL)
    judged = {judgement.id: (judgement.verdict, judgement.note) for judgement in found.judgements}
    assert list(judged) == list(CLAIMS)
    assert judged["sink"][0] == HOLDS
    assert {judged[claim] for claim in CAUSAL} == {(EMPTY, UNPLANNED)}


def test_each_aggregation_edit_is_calibrated_once():
    _, found, made = small_chain()
    assert {len(edit._calibrations) for edit in made} == {1}
    means = {name for result in found.data.results.values() for name in result.means}
    assert len(means) == len(made) * len(found.plan.layers)


def test_no_condition_changes_where_feed_forwards_run_from_its_position_on(monkeypatch):
    """The whole study again, with every feed-forward run whole."""
    model, found, _ = small_chain()
    begun, read = set(), Replay.read

    def whole(replay, first_layer, first_position=0, **options):
        begun.add(first_position)
        return read(replay, first_layer, **options)

    monkeypatch.setattr(Replay, "read", whole)
    expected = study(load(model), **SMALL).data.results
    # From position 1 where neurons are removed everywhere but at the sink, which is at 0.
    assert begun == {found.plan.sink, 1, *found.plan.targets}
    assert list(found.data.results) == list(expected)
    for condition, result in found.data.results.items():
        for name, values in vars(expected[condition]).items():
            if isinstance(values, np.ndarray):
                np.testing.assert_allclose(
                    getattr(result, name), values, rtol=1e-3, atol=1e-4, err_msg=f"{condition} {name}"
                )
