"""What is measured of a model under the schemes, and how models are compared."""

import argparse
import json
import sys

import downstream
import numpy as np
import pytest
import torch
from downstream import change
from tiny_models import tiny_model

from sinkscope.errors import InputError
from sinkscope.pretrain.decoder import Decoder
from sinkscope.pretrain.presets import decoder_config, preset


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


def test_what_cannot_be_measured_is_refused(tmp_path, monkeypatch, capsys):
    settings = {"length": 64, "window": 60, "first": 4}
    with pytest.raises(InputError, match="--first 4, --window 60 and --length 64 do not fit"):
        downstream.all_conditions(argparse.Namespace(**settings))
    tiny_model("llama").save_pretrained(tmp_path / "model")
    arguments = ["downstream", str(tmp_path / "model"), "--data", "nowhere", "--out", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", [*arguments, "--length", "64", "--window", "16", "--device", "cpu"])
    with pytest.raises(SystemExit, match="2"):
        downstream.main()
    assert "There is no nowhere" in capsys.readouterr().err
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
    assert len(rows) == 11
    assert capsys.readouterr().out.count("\n") == 13
    controls = [row for row in rows if row["condition"].startswith(("24", "window of 64", "as it is", "late"))]
    assert len(controls) == 5
    for row in controls:
        assert row["perplexity_factor"] == pytest.approx(1, abs=1e-3)
