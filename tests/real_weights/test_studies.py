"""Whole studies of trained models: that they run end to end, and what any right instrument must find."""

import pytest

from sinkscope.arguments import STUDY_SEQUENCES
from sinkscope.measures.sink_score import SINK_RATE
from sinkscope.models.loading import load
from sinkscope.studies.claims import CLAIMS
from sinkscope.studies.conditions import Condition
from sinkscope.studies.study import Study, study

pytestmark = pytest.mark.real_weights
SMALL = dict(num_sequences=STUDY_SEQUENCES, length=40)
"""Some hundred passes of each model: minutes on two slow cores."""


def verdicts(found: Study) -> dict[str, str]:
    assert [judgement.id for judgement in found.judgements] == list(CLAIMS)
    return {judgement.id: judgement.verdict for judgement in found.judgements}


@pytest.fixture(scope="session")
def gemma3_model(gemma3):
    return load(gemma3, device="cpu")


def test_smollm2(smollm2):
    found = study(load(smollm2, device="cpu"), **SMALL)
    by_id = verdicts(found)
    held = ("sink", "super_neurons", "dimension_disparity", "unmixing_creates_sink")
    assert {claim: by_id[claim] for claim in held} == dict.fromkeys(held, "holds")
    assert found.plan.sink == 0
    # Either a set was found, and the verdict is about it; or none was, and the claim says so.
    assert by_id["super_neurons_necessary"] != "not applicable"
    if found.minimal_set:
        assert found.went is not None
    else:
        assert by_id["super_neurons_necessary"] == "does not hold"


def test_gemma3_without_bos_has_nothing_to_explain(gemma3_model):
    found = study(gemma3_model, bos=False, **SMALL)
    by_id = verdicts(found)
    assert by_id.pop("sink") == "does not hold"
    assert set(by_id.values()) == {"not applicable"}
    assert found.measured.outcomes == {}
    assert found.verdict.startswith("No sink to explain")


def test_gemma3_with_bos(gemma3_model):
    found = study(gemma3_model, bos=True, **SMALL)
    by_id = verdicts(found)
    assert by_id["sink"] == "holds"
    assert found.plan.sink == 0
    # Every sequence begins with the same token: what compares sequences cannot be judged.
    for claim in ("variance_discrepancy", "averaging_law", "equalising_removes_sink", "directional_collapse"):
        assert by_id[claim] == "not applicable"
    assert by_id["unmixing_creates_sink"] in ("holds", "does not hold", "undecided")
    if found.minimal_set:
        left = found.measured.at_sink_B(Condition("ablate_minimal_set", 0)).mean()
        assert left < found.measured.at_sink_B().mean()
    assert found.measured.untouched.rate_BS[:, 0].mean() >= SINK_RATE
