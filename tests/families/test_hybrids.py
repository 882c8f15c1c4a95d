"""Hybrids: models in which some layers have a state-space model, linear attention or a convolution in place of
attention or beside it. Their attention is traced where it is, the residual stream and neurons in every layer."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from small_families import check_attention, check_sum, refused_with, small_model, tokens
from transformers import PreTrainedModel

import sinkscope
from sinkscope.errors import InputError
from sinkscope.explore.text_result import from_run
from sinkscope.tracing.trace import Trace, trace

EVERY_OTHER = ("jamba", "bamba", "lfm2", "qwen3_5_text", "olmo_hybrid", "kimi_linear")
"""Families whose small models have attention in layers 1 and 3 alone."""
LAYERS = {name: [1, 3] for name in EVERY_OTHER} | {"falcon_h1": [0, 1, 2, 3], "nemotron_h": [2]}
"""The layers with attention. In falcon_h1 Mamba stands beside attention; in nemotron_h each layer has one part."""


def model_of(name: str) -> PreTrainedModel:
    model = small_model(name)
    assert model is not None
    return model


@functools.cache
def traced(name: str) -> Trace:
    return trace(model_of(name), tokens(40))


@pytest.mark.parametrize("name", LAYERS)
def test_attention_is_traced_where_it_is_and_every_layer_adds_up(name):
    recording = traced(name).recording
    assert recording.attention_layers == LAYERS[name]
    check_attention(model_of(name), tokens(40))
    check_sum(model_of(name))


def test_a_sink_rate_counts_the_heads_that_exist():
    recording = traced("jamba").recording
    is_sink_LHS = recording["head_sink_rate"][[1, 3]]
    torch.testing.assert_close(recording.sink_rate, is_sink_LHS.mean((0, 1)))
    assert traced("jamba").findings.strongest[1] == pytest.approx(float(is_sink_LHS.mean((0, 1)).max()), abs=0.05)


@pytest.mark.parametrize("name", ["jamba", "nemotron_h"])
def test_tables_have_rows_for_what_is_there(name, tmp_path: Path):
    result, attention = traced(name), LAYERS[name]
    heads, positions = result.tables["heads"], result.tables["positions"]
    assert sorted(set(heads["layer"])) == attention
    by_layer = {column: np.asarray(positions[column]).reshape(4, -1) for column in ("entropy", "dom_ratio")}
    assert np.isfinite(by_layer["dom_ratio"]).all()
    assert [layer for layer in range(4) if np.isfinite(by_layer["entropy"][layer]).all()] == attention
    writes = np.isfinite(np.asarray(positions["largest_write"]).reshape(4, -1)).all(1)
    assert writes.tolist() == [layer.has_feed_forward for layer in result.recording.anatomy.layers]
    assert result.summary["attention_layers"] == attention
    page = result.report(tmp_path / "report.html").read_text(encoding="utf-8")
    assert f"4 layers, {len(attention)} with attention" in page
    shown = from_run(result.save(tmp_path / "run")).heads(result.findings.strongest[0])
    assert shown is not None
    assert np.isfinite(shown).all(1).nonzero()[0].tolist() == attention


def test_chunks_give_what_one_pass_gives():
    model = model_of("jamba")
    whole, joined = traced("jamba").recording, trace(model, tokens(40), chunk_tokens=40).recording
    for name in ("received", "dom_ratio", "largest_write", "averaging_law"):
        torch.testing.assert_close(joined[name], whole[name], equal_nan=True, rtol=1e-4, atol=1e-5)


def test_a_mask_acts_in_the_layers_with_attention():
    model = model_of("jamba")
    with sinkscope.mask_to_self(model, 5) as mask:
        assert mask.place.layers == (1, 3)
        received = trace(model, tokens(40)).recording
    assert float(received["mixing"][1, 5]) == pytest.approx(1.0)
    with pytest.raises(InputError, match=r"Layer 0 has no attention. Choose among layers 1, 3"):
        sinkscope.mask_to_self(model, 5, layers=0)


def test_interventions_do_what_they_say_in_a_hybrid():
    result = sinkscope.intervene(model_of("jamba"), {"amplify": "10:4"}, num_sequences=8, length=32)
    assert all(check.passed for check in result.checks)


def test_a_hybrid_is_audited():
    audit = sinkscope.audit(model_of("lfm2"), schemes=["W8A8", "W8A8_STATIC"], num_sequences=2, length=64)
    assert audit.summary["num_layers"] == 4


REFUSALS = {
    "study": (sinkscope.study, "A study needs attention and a feed-forward in every layer"),
    "bias": (functools.partial(sinkscope.bias, controls=[]), "The bias of a model needs attention"),
    "rotate": (sinkscope.rotate, "a JambaMambaMixer writes it in layer 0"),
}


@pytest.mark.parametrize("call", REFUSALS)
def test_what_needs_attention_in_every_layer_refuses_a_hybrid(call):
    function, words = REFUSALS[call]
    assert words in (refused_with(function, model_of("jamba")) or "")


def test_head_norm_goes_where_attention_is():
    model = model_of("lfm2")
    norms = sinkscope.insert_head_norm(model)
    try:
        assert len(norms) == 2
        assert "value_variance_before_norm" in trace(model, tokens()).recording
    finally:
        sinkscope.remove_head_norm(model)


def test_a_model_without_attention_says_so():
    with pytest.raises(InputError, match="so it has no attention sink"):
        trace(model_of("mamba"), tokens())
