"""Fake quantisation and streaming against plain definitions, each with a control, and that the model is left as it was.

Axes: N texts, T positions, E inputs, O outputs.
"""

import argparse
import json
import sys

import downstream
import numpy as np
import pytest
import torch
from downstream import change, linear_layers, quantised, quantised_inputs, quantised_weights, streaming, token_losses
from tiny_models import tiny_model
from torch import Tensor

from sinkscope.errors import InputError
from sinkscope.models.loading import load
from sinkscope.pretrain.config import decoder_config, preset
from sinkscope.pretrain.decoder import Decoder

LENGTH = 20


@pytest.fixture
def model():
    return tiny_model("llama")


@pytest.fixture
def ids_NT():
    return torch.randint(97, (3, LENGTH), generator=torch.Generator().manual_seed(0))


def rounded(values: list[float], bits: int) -> list[float]:
    """The definition, number by number: s round(x / s), s the largest magnitude over 2^(bits - 1) - 1."""
    step = max(abs(value) for value in values) / (2 ** (bits - 1) - 1)
    return [step * round(value / step) for value in values]


def logits(model, ids_NT: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids_NT, use_cache=False).logits


def test_rounding_by_hand():
    # Three levels on each side of 0, a third apart: 0.5 is 1.5 steps, of which the even neighbour is 2.
    found = quantised(torch.tensor([[1.0, -0.5, 0.3, 0.1]]), 3, -1)
    torch.testing.assert_close(found, torch.tensor([[1.0, -2 / 3, 1 / 3, 0.0]]))
    assert quantised(torch.zeros(2, 3), 8, -1).tolist() == [[0.0] * 3] * 2
    assert quantised(torch.ones(2, 3, dtype=torch.bfloat16), 8, -1).dtype == torch.bfloat16


@pytest.mark.parametrize("shared_by", ["text", "token"])
def test_every_linear_layer_reads_rounded_inputs(model, ids_NT, shared_by):
    before, after, layers = {}, {}, linear_layers(model)
    assert len(layers) == 3 * 7, "all but the output head"
    handles = [part.register_forward_pre_hook(lambda m, args: before.setdefault(m, args[0])) for part in layers]
    with quantised_inputs(model, 4, shared_by):
        handles += [part.register_forward_pre_hook(lambda m, args: after.setdefault(m, args[0])) for part in layers]
        logits(model, ids_NT)
    for layer in layers:
        for raw_TE, found_TE in zip(before[layer], after[layer], strict=True):
            rows = [raw_TE.flatten().tolist()] if shared_by == "text" else raw_TE.tolist()
            expected = torch.tensor([rounded(row, 4) for row in rows]).view(found_TE.shape)
            torch.testing.assert_close(found_TE, expected)
            assert not torch.allclose(found_TE, raw_TE, atol=1e-3), "the control"
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("group", [None, 20])
def test_weights_are_rounded_by_channel_or_group(model, group):
    """48 inputs in groups of 20 leave a group of 8."""
    plain = [layer.weight.detach().clone() for layer in linear_layers(model)]
    with quantised_weights(model, 4, group):
        for layer, raw_OI in zip(linear_layers(model), plain, strict=True):
            size = group or raw_OI.shape[1]
            expected = [
                [value for start in range(0, len(row), size) for value in rounded(row[start : start + size], 4)]
                for row in raw_OI.tolist()
            ]
            torch.testing.assert_close(layer.weight.detach(), torch.tensor(expected))
            assert not torch.allclose(layer.weight, raw_OI, atol=1e-3), "the control"


def test_sixteen_bits_change_nothing_and_two_do(model, ids_NT):
    plain = token_losses(model, ids_NT)
    for open_bits in (
        lambda bits: quantised_inputs(model, bits, "text"),
        lambda bits: quantised_weights(model, bits, None),
    ):
        with open_bits(16):
            assert np.abs(token_losses(model, ids_NT) - plain).max() < 2e-3
        with open_bits(2):
            assert np.abs(token_losses(model, ids_NT) - plain).max() > 2e-2
        with pytest.raises(ZeroDivisionError), open_bits(2):
            raise ZeroDivisionError
        assert np.array_equal(token_losses(model, ids_NT), plain), "left as it was"


def visible(window: int, kept: range) -> Tensor:
    """[T, T] who sees whom, pair by pair."""
    rows = [[s <= t and (t - s < window or s in kept) for s in range(LENGTH)] for t in range(LENGTH)]
    return torch.tensor(rows)


@pytest.mark.parametrize("kept", [range(0), range(2), range(2, 4)])
def test_streaming_is_attention_under_that_mask(model, ids_NT, kept):
    model.set_attn_implementation("eager")
    mask = torch.zeros(3, 1, LENGTH, LENGTH).masked_fill(~visible(6, kept), torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = model(ids_NT, attention_mask=mask, use_cache=False).logits
    plain = logits(model, ids_NT)
    with streaming(load(model), 6, kept):
        torch.testing.assert_close(logits(model, ids_NT), expected, rtol=1e-4, atol=1e-5)
    assert (expected - plain).abs().max() > 1e-3, "the control"
    assert torch.equal(logits(model, ids_NT), plain), "left as it was"
    with streaming(load(model), LENGTH, range(0)):
        torch.testing.assert_close(logits(model, ids_NT), plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", ["softmax", "head_norm", "first_norm", "sigmoid", "learned_sink", "softmax_one"])
def test_streaming_of_every_kind_of_attention(variant, ids_NT):
    model = Decoder(decoder_config(preset("tiny") | {"attention_variant": variant})).eval()
    with torch.no_grad():
        for block in model.blocks:  # attention far from even
            block.self_attn.q_proj.weight *= 20
        mask = visible(6, range(2)).expand(3, 1, -1, -1)
        expected = model(ids_NT, attention_mask=mask, use_cache=False).logits
    with streaming(load(model), 6, range(2)):
        torch.testing.assert_close(logits(model, ids_NT), expected, rtol=1e-4, atol=1e-5)
    with streaming(load(model), 5, range(2)):
        assert (logits(model, ids_NT) - expected).abs().max() > 1e-3, "the control"


def test_losses_are_those_of_the_model(model, ids_NT, monkeypatch):
    with torch.no_grad():
        expected = model(ids_NT, labels=ids_NT).loss
    monkeypatch.setattr(downstream, "BATCH_TOKENS", 2 * LENGTH)  # two passes
    found = token_losses(model, ids_NT)
    assert found.shape == (3, LENGTH - 1)
    assert found.mean() == pytest.approx(float(expected), rel=1e-5)


def test_a_change_by_hand():
    row = change(np.array([[1.0, 3.0], [2.0, 4.0]]), np.array([[1.0, 2.0], [2.0, 3.0]]))
    assert row["perplexity"] == pytest.approx(np.exp(2.5))
    assert row["perplexity_factor"] == pytest.approx(np.exp(0.5))
    assert row["perplexity_factor_low"] == row["perplexity_factor_high"] == pytest.approx(np.exp(0.5))
    assert change(np.ones((1, 2)), np.ones((1, 2)))["perplexity_factor_low"] is None, "one text has no interval"


def test_a_model_against_the_first_by_text():
    tokens = {"condition": "8 bits", "tokens_sha256": "same"}
    first = {"model": "a", "loss_changes": [0.1, 0.3], **tokens}
    second = {"model": "b", "loss_changes": [0.0, 0.2], **tokens}
    other = {"model": "c", "loss_changes": [0.0, 0.2], **tokens, "tokens_sha256": "other"}
    downstream.add_against_first([first, second, other])
    ends = [second[name] for name in ("against_first", "against_first_low", "against_first_high")]
    assert ends == pytest.approx([np.exp(-0.1)] * 3), "the change differs by text, what it is less the first's does not"
    assert downstream.in_per_cent(second, "against_first") == "-9.52% [-9.52%, -9.52%]"
    assert "against_first" not in first
    assert downstream.in_per_cent(other, "against_first") == "", "the control: other tokens are not paired"


def test_what_cannot_be_measured_is_refused(tmp_path, monkeypatch, capsys, model):
    settings = {"length": 64, "window": 60, "first": 4}
    with pytest.raises(InputError, match="found first 4, window 60, length 64"):
        downstream.all_conditions(argparse.Namespace(**settings))
    with pytest.raises(InputError, match="a window or soft-capping of the model's own"):
        mistral = tiny_model("mistral")
        with streaming(load(mistral), 6, range(0)):
            logits(mistral, torch.zeros(1, LENGTH, dtype=torch.long))
    model.save_pretrained(tmp_path / "model")
    arguments = ["downstream", str(tmp_path / "model"), "--data", "nowhere", "--out", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", [*arguments, "--length", "64", "--window", "16", "--device", "cpu"])
    with pytest.raises(SystemExit, match="2"):
        downstream.main()
    assert "expected token shards or a text file; found no nowhere" in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


def test_the_script_prints_a_table_and_writes_it(tmp_path, monkeypatch, capsys):
    model = Decoder(decoder_config(preset("tiny") | {"attention_variant": "head_norm"}))
    model.save_pretrained(tmp_path / "model")
    windows = torch.randint(512, (4, 64), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(downstream, "texts", lambda loaded, options: windows)
    arguments = ["downstream", str(tmp_path / "model"), "--data", "x", "--length", "64", "--window", "16"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--device", "cpu", "--out", str(tmp_path / "out.json")])
    downstream.main()
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert not list(tmp_path.glob(".*"))
    assert len(rows) == 12
    assert capsys.readouterr().out.count("\n") == 14
    controls = [row for row in rows if row["condition"].startswith(("16-bit", "window of 64", "as it is", "late"))]
    assert len(controls) == 5
    for row in controls:
        assert row["perplexity_factor"] == pytest.approx(1, abs=1e-3)
