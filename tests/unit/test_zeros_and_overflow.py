"""States of zeros have no ratio and are left out; numbers that overflow are refused; each beside its control.

Real checkpoints have embedding rows of zeros (unused vocabulary) and, in float16, activations that leave its range.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from planted_models import planted_chain
from tiny_models import tiny_model

from sinkscope.arguments import STUDY_SEQUENCES
from sinkscope.cli_output import write_pictures
from sinkscope.errors import InputError
from sinkscope.fingerprints.signature import Inputs, sign
from sinkscope.initial_bias.measurement import measure_bias
from sinkscope.interventions.intervene import intervene
from sinkscope.measures.contraction import principal
from sinkscope.models.given_ids import given_batch
from sinkscope.models.loading import load
from sinkscope.models.token_batches import batch_with_others
from sinkscope.results.run_folder import run_folder
from sinkscope.studies.study import study
from sinkscope.tracing.trace import trace

RATIOS = ("dom_ratio", "participation_ratio", "top_energy_share", "kurtosis", "dom_ratio_normed")
NULL = 5
"""The token whose embedding is zero."""


def model_with_a_zero_row(family="llama"):
    model = tiny_model(family)
    with torch.no_grad():
        model.get_input_embeddings().weight[NULL] = 0
    return model


def tokens(num_sequences=6, length=40):
    return torch.randint(10, 97, (num_sequences, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("chunk_tokens", [1 << 17, 80, 40])
@pytest.mark.parametrize("position", [0, 7])
def test_a_zero_token_is_left_out_of_every_mean(position, chunk_tokens):
    model, ids = model_with_a_zero_row(), tokens()
    ids[1, position] = NULL
    found = trace(model, ids, chunk_tokens=chunk_tokens).recording.by_position
    without = trace(model, torch.cat([ids[:1], ids[2:]]), chunk_tokens=chunk_tokens).recording.by_position
    # At position 0 nothing can fill a state of zeros; at any other it attends to others, and is zero on entering only.
    names, layers = (RATIOS, slice(None)) if position == 0 else (("dom_ratio_normed",), slice(0, 1))
    for name in (*names, "cosine"):
        torch.testing.assert_close(found[name][layers, position], without[name][layers, position], msg=name)
        assert found[name].isfinite().all()
    # The control: a mean over all sequences, the empty one as 0, is another number.
    assert not torch.allclose(found["dom_ratio_normed"][0, position] * 5 / 6, without["dom_ratio_normed"][0, position])


def test_one_sequence_and_many_point_at_the_same_positions():
    model, ids = model_with_a_zero_row(), tokens(1)
    ids[0, 9] = NULL
    one, three = (trace(model, x).recording.rows("positions_of_interest")[0, 0] for x in (ids, ids.repeat(3, 1)))
    assert torch.equal(one, three)
    assert 9 not in one[:8]


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "falcon"])
@pytest.mark.parametrize("num_sequences", [1, 6])
def test_where_all_are_zero_the_value_is_empty_and_the_run_is_written(family, num_sequences, tmp_path):
    model, ids = model_with_a_zero_row(family), tokens(num_sequences)
    ids[:, 0] = NULL
    found = trace(model, ids)
    with run_folder(tmp_path / "run", overwrite=False) as folder:
        found.write(folder)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    positions = found.tables["positions"]
    empty = np.isnan(np.asarray(positions["dom_ratio_normed"])).reshape(-1, 40)
    if family != "falcon":  # whose norms have a bias
        assert empty[:, 0].all()
        assert np.isnan(np.asarray(positions["dom_ratio"])).reshape(-1, 40)[:, 0].all()
    assert not empty[:, 1:].any()
    assert np.isfinite(np.asarray(positions["largest_write"])).all()
    assert all(value is not None for value in summary["dom_ratio"]["elsewhere"])


def study_with_zeros(monkeypatch, *places):
    """A study of the planted chain with a token of zeros in some places (sequence, position)."""
    model, _ = planted_chain(0)
    with torch.no_grad():
        model.get_input_embeddings().weight[NULL] = 0

    def batch(*args, **kwargs):
        made = batch_with_others(*args, **kwargs)
        ids = torch.where(made.ids == NULL, NULL + 1, made.ids)
        for place in places:
            ids[place] = NULL
        return replace(made, ids=ids)

    monkeypatch.setattr("sinkscope.studies.study.batch_with_others", batch)
    return study(load(model), num_sequences=STUDY_SEQUENCES, length=32)


def test_a_study_and_its_page_survive_zero_tokens(monkeypatch, tmp_path):
    found = study_with_zeros(monkeypatch, ([1, 3, 20, 60], 0), ([1, 5, 20, 70], 10))
    with run_folder(tmp_path / "run", overwrite=False) as folder:
        folder.write_yaml("config.yaml", {})
        folder.write_json("environment.json", {})
        found.write(folder)
        write_pictures(folder)
    assert "NaN" not in (tmp_path / "run" / "report.html").read_text().split("<script", 1)[0]
    by_id = {judgement.id: judgement for judgement in found.judgements}
    assert all(np.isfinite(judgement.effect) for judgement in by_id.values() if judgement.effect is not None)
    # DomRatio at the sink is that of the sequences that have one.
    ratio = found.trace.recording["dom_ratio"][list(found.plan.layers_with_disparity), 0].mean()
    assert f"{ratio:.3g} at the sink" in by_id["dimension_disparity"].note
    assert by_id["dimension_disparity"].verdict == "holds"
    effects = found.tables["effects"]
    rows = {(q, t): n for q, t, n in zip(effects["quantity"], effects["target"], effects["n"], strict=True)}
    assert rows["dom_ratio_at_target", 0] == STUDY_SEQUENCES - 2
    assert rows["dom_ratio_at_target", 10] == STUDY_SEQUENCES  # where a token of zeros attends to others


def test_a_study_survives_a_sink_of_zeros_alone(monkeypatch, tmp_path):
    found = study_with_zeros(monkeypatch, (slice(None), 0))
    with run_folder(tmp_path / "run", overwrite=False) as folder:
        found.write(folder)


LOUD = {"llama": "model.layers.1.mlp.down_proj", "gpt2": "transformer.h.1.mlp.c_proj"}


def overflowing(family, dtype=torch.float16):
    """A model whose layer 1 writes what float16 cannot hold, though it can hold the weights."""
    model = tiny_model(family, dtype=dtype)
    with torch.no_grad():
        weight = model.get_submodule(LOUD[family]).weight
        weight.copy_(weight.sign() * 6e4)
    return model


def read_by(name, model):
    ids, loaded = tokens(16), load(model)
    if name == "trace":
        return trace(loaded, ids)
    if name == "trace without effective rank":
        return trace(loaded, ids, effective_rank=False)
    if name == "study":
        return study(loaded, length=32, num_sequences=STUDY_SEQUENCES)
    if name == "intervene":
        return intervene(loaded, {"mask_to_self": 10}, num_sequences=2, length=40)
    if name == "bias":
        return measure_bias(loaded, given_batch(ids, model=model))
    return sign(loaded, Inputs(vocabulary=97, length=20, num_sequences=64))


@pytest.mark.parametrize("name", ["trace", "trace without effective rank", "study", "intervene", "bias", "signature"])
@pytest.mark.parametrize("family", LOUD)
def test_overflow_is_refused_and_a_wider_type_is_named(family, name):
    with pytest.raises(InputError) as refused:
        read_by(name, overflowing(family))
    where = "last layer" if name == "signature" else "layer 1, at position"
    assert where in str(refused.value)
    assert '`dtype="float32"`' in str(refused.value)


@pytest.mark.parametrize("family", LOUD)
def test_control_the_wider_type_is_read(family):
    found = trace(overflowing(family, torch.float32), tokens())
    assert all(values.isfinite().all() for values in found.recording.by_position.values())


def test_a_model_that_turns_to_nan_is_refused_with_the_type_beyond_its_own():
    model = tiny_model("llama")
    model.model.layers[0].register_forward_hook(lambda module, args, output: output * float("nan"))
    with pytest.raises(InputError, match=r'leaves layer 0, at position 0.*dtype="float64"'):
        trace(model, tokens())
    with pytest.raises(InputError, match="no type is wider"):
        trace(model.double(), tokens())


def test_repeated_eigenvalues_fall_back_and_the_record_says_so(monkeypatch):
    def fails(gram, **options):
        raise torch.linalg.LinAlgError("The algorithm failed to converge because the input matrix is ill-conditioned")

    model = tiny_model("llama")
    expected = trace(model, tokens()).summary
    unit = torch.nn.functional.normalize(torch.eye(7, 12).double() + 0.1, dim=-1)
    direction = principal(unit)
    monkeypatch.setattr(torch.linalg, "eigvalsh", fails)
    monkeypatch.setattr(torch.linalg, "eigh", fails)
    found = trace(model, tokens()).summary
    assert found["effective_rank"] == pytest.approx(expected["effective_rank"], rel=1e-6)
    assert found["fallbacks"][0].startswith("layer 0: the eigenvalue solver did not converge")
    assert "fallbacks" not in expected
    assert principal(unit) == pytest.approx(direction)
