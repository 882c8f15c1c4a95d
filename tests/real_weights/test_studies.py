"""Whole studies of trained models: that they run end to end, and what any right instrument must find."""

import pytest

from sinkscope.arguments import STUDY_SEQUENCES
from sinkscope.measures.sink_score import MIN_SINK_RATE
from sinkscope.studies.claims import CLAIMS
from sinkscope.studies.conditions import Condition
from sinkscope.studies.study import Study, study

SMALL = dict(num_sequences=STUDY_SEQUENCES, length=40)
"""Some hundred passes of a model that has a sink: a quarter of an hour on two slow cores."""


def verdicts(found: Study) -> dict[str, str]:
    assert [judgement.id for judgement in found.judgements] == list(CLAIMS)
    return {judgement.id: judgement.verdict for judgement in found.judgements}


@pytest.mark.proof
def test_smollm2(smollm2_model):
    found = study(smollm2_model, **SMALL)
    by_id = verdicts(found)
    held = ("sink", "super_neurons", "dimension_disparity", "unmixing_creates_sink")
    assert {claim: by_id[claim] for claim in held} == dict.fromkeys(held, "holds")
    assert found.plan.sink == 0
    # Either a set was found, and the verdict is about it; or none was, and the claim says so.
    assert by_id["neurons_necessary"] != "not applicable"
    if found.minimal_set:
        assert found.went is not None
    else:
        assert by_id["neurons_necessary"] == "does not hold"


@pytest.mark.real_weights
def test_gemma3_without_bos_has_nothing_to_explain(gemma3_model):
    # 16 sequences without a sink cannot tell that it is none: of those not seen, too many may have one.
    found = study(gemma3_model, bos=False, length=SMALL["length"], num_sequences=32)
    by_id = verdicts(found)
    assert by_id.pop("sink") == "does not hold"
    assert set(by_id.values()) == {"not applicable"}
    assert found.data.results == {}
    assert found.verdict.startswith("There is no sink to explain")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("stories15m_model", marks=pytest.mark.real_weights),
        pytest.param("gemma3_model", marks=pytest.mark.proof),
    ],
)
def test_a_sink_that_needs_bos(name, request):
    found = study(request.getfixturevalue(name), bos=True, **SMALL)
    by_id = verdicts(found)
    assert by_id["sink"] == "holds"
    assert found.plan.sink == 0
    # Every sequence begins with the same token: what compares sequences cannot be judged.
    assert by_id["variance_discrepancy"] == by_id["lock"] == "not applicable"
    assert by_id["unmixing_creates_sink"] in ("holds", "does not hold", "undecided")
    if found.minimal_set:
        left = found.data.at_sink_B(Condition("ablate_minimal_set", 0)).mean()
        assert left < found.data.at_sink_B().mean()
    assert found.data.baseline.rate_BS[:, 0].mean() >= MIN_SINK_RATE
