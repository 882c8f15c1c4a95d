"""The real command bias: what it writes for configurations, models and training runs, its page, and how it refuses."""

import json
import math
import shutil
import time

import numpy as np
import pytest
import torch
from chromium import CHROMIUM, Chromium
from command_line import assert_refused
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from tokenizers import Tokenizer, models
from training_runs import short_run
from transformers import PreTrainedTokenizerFast

import sinkscope as package
from sinkscope.compare.page import write_comparison_page
from sinkscope.initial_bias.controls import CONTROLS
from sinkscope.initial_bias.schemas import BIAS_TABLES, QUANTITIES
from sinkscope.results.run import read_run
from sinkscope.results.tables import read_table

FEW = ("--num-sequences", 32, "--length", 8)
HOSTILE = "</td><script>alert(1)</script>"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return short_run(tmp_path_factory.mktemp("trained"), steps=60, snapshots=(0, 20), learning_rate=3e-3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A GPT-2 with weights and a tokenizer whose every token is hostile."""
    folder = tmp_path_factory.mktemp("model") / "gpt2"
    tiny_model("gpt2").save_pretrained(folder)
    vocabulary = {f"{HOSTILE}{i}": i for i in range(97)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=f"{HOSTILE}0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=f"{HOSTILE}0").save_pretrained(folder)
    return folder


def test_a_configuration_is_drawn_from_seeds_and_every_table_is_whole(sinkscope, tmp_path):
    result = sinkscope("bias", "tiny", "--seeds", 5, *FEW, "--out", "run")
    assert result.code == 0, result.err
    assert "over 5 seeds" in " ".join(result.out.split())
    run = tmp_path / "run"
    for schema in BIAS_TABLES:
        table = read_table(run / schema.name, schema)
        assert len(table[schema.columns[0].name]) > 0 or schema.name == "persistence"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["seeds"] == [0, 1, 2, 3, 4]
    assert summary["tokens"] == {"kind": "random", "length": 8, "count": 32, "seed": 0, "bos": False, "left_out": 0}
    assert set(summary["bias"]) == set(QUANTITIES)
    assert set(summary["controls"]) == set(CONTROLS)
    rows = read_run(run).rows
    by_seed = [row["value"] for row in rows("bias", quantity="inter_cosine", over="sequences")]
    (over_seeds,) = rows("bias", quantity="inter_cosine", over="seeds")
    assert over_seeds["value"] == pytest.approx(np.mean(by_seed))
    assert over_seeds["value_low"] < over_seeds["value"] < over_seeds["value_high"]
    added = [row["inter_added"] for row in rows("contraction")]
    assert added[0] is None
    first, last = rows("contraction")[0]["inter"], rows("contraction")[-1]["inter"]
    assert sum(added[1:]) == pytest.approx(last - first, abs=1e-12)
    assert (run / "report.html").is_file()


def test_the_same_command_gives_the_same_numbers_as_python(sinkscope, tmp_path):
    result = sinkscope("bias", "tiny", "--seeds", 2, *FEW, "--controls", "no_attention", "--json")
    assert result.code == 0, result.err
    again = package.bias("tiny", seeds=2, num_sequences=32, length=8, controls=["no_attention"])
    printed = json.loads(result.out)
    assert list(printed["controls"]) == ["no_attention"]
    assert printed["bias"]["entropy"]["low"] is None, "two seeds have no interval"
    assert printed["prefers_tokens"] is None
    assert printed["bias"]["inter_cosine"]["value"] == again.summary["bias"]["inter_cosine"]["value"]
    assert printed["story"] == again.story


def test_a_model_with_weights_and_its_tokens_as_text(sinkscope, tmp_path, folder):
    result = sinkscope("bias", folder, *FEW, "--out", "run")
    assert result.code == 0, result.err
    run = read_run(tmp_path / "run")
    assert {row["over"] for row in run.rows("bias")} == {"sequences"}
    assert all(row["text"].startswith(HOSTILE) for row in run.rows("preferred_tokens"))
    page = (tmp_path / "run" / "report.html").read_text()
    assert HOSTILE not in page
    assert "&lt;script&gt;alert(1)" in page
    # The folder's configuration alone is drawn anew instead.
    result = sinkscope("bias", folder / "config.json", "--seeds", 1, *FEW, "--controls", "none", "--out", "drawn")
    assert result.code == 0, result.err
    drawn = json.loads((tmp_path / "drawn" / "summary.json").read_text())
    assert drawn["seeds"] == [0]
    assert drawn["controls"] == {}
    assert drawn["bias"]["entropy"]["over"] == "sequences"


def test_families_that_cannot_honour_a_control_go_on_with_the_others(sinkscope, tmp_path):
    for family, control in (("opt", "odd_feed_forward"), ("gpt_oss", "tanh_activation")):
        tiny_model(family).save_pretrained(tmp_path / family)
        result = sinkscope("bias", tmp_path / family, *FEW, "--out", f"run-{family}")
        assert result.code == 0, result.err
        assert f"{control}: In " in " ".join(result.out.split())
        summary = json.loads((tmp_path / f"run-{family}" / "summary.json").read_text())
        assert [name for name, entry in summary["controls"].items() if "refused" in entry] == [control]


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe", "gemma3"])
def test_grouped_queries_mixtures_and_windows(sinkscope, tmp_path, family):
    tiny_model(family).save_pretrained(tmp_path / family)
    result = sinkscope("bias", tmp_path / family / "config.json", "--seeds", 2, *FEW, "--out", "run")
    assert result.code == 0, result.err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["family"] == family
    assert all("refused" not in entry for entry in summary["controls"].values())


def test_a_training_run_is_followed_from_its_own_beginning(sinkscope, trained, tmp_path):
    result = sinkscope("bias", trained, "--seeds", 5, "--num-sequences", 64, "--length", 16, "--out", "run")
    assert result.code == 0, result.err
    run = read_run(tmp_path / "run")
    assert run.summary["seeds"][0] == 11
    rows = run.rows("persistence")
    assert [(row["checkpoint"], row["step"]) for row in rows] == [
        ("run/step-00000000", 0),
        ("run/step-00000020", 20),
        ("run/model", None),
    ]
    # At step 0 the model is its beginning: it agrees with itself as far as it can, and its states are the same.
    assert rows[0]["correlation"] == pytest.approx(rows[0]["ceiling"], abs=1e-6)
    assert rows[0]["mean_state_cosine"] == pytest.approx(1, abs=1e-6)
    assert rows[-1]["mean_state_cosine"] < 0.999
    # Control: other seeds know nothing of it.
    assert all(abs(row["other_seeds"]) < 0.15 for row in rows)
    assert "the preference has a rank correlation of" in run.answer


def test_checkpoints_can_be_named_one_by_one(sinkscope, trained, tmp_path):
    along = ("--along", trained / "snapshots" / "step-00000020", "--along", trained)
    result = sinkscope("bias", f"init:{trained}", *FEW, "--controls", "none", *along, "--json")
    assert result.code == 0, result.err
    summary = json.loads(result.out)
    assert summary["model"] == "init:run"
    assert [row["checkpoint"] for row in summary["persistence"]] == ["run/step-00000020", "run"]
    assert all(row["other_seeds"] is None for row in summary["persistence"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tiny", "--length", 500), "context of 128 tokens"),
        (("tiny", "--controls", "no_such"), "--controls cannot be 'no_such'. Choose one of tanh_activation"),
        (("no-such/folder/at/all",), "There is no folder or .gguf file"),
        (("init:nowhere",), "There is no folder nowhere"),
        (("MODEL", "--seeds", 3), "--seeds is for a configuration"),
        (("MODEL", "--along", "OTHER"), "Give checkpoints of the same training run"),
        (("NAN",), "NaN in transformer.h.0.mlp.c_fc.weight"),
    ],
)
def test_what_cannot_be_honoured_ends_with_a_message_and_nothing_written(
    sinkscope, tmp_path, folder, arguments, message
):
    tiny_model("llama", vocab_size=101).save_pretrained(tmp_path / "other")
    broken = shutil.copytree(folder, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["transformer.h.0.mlp.c_fc.weight"][0, 0] = math.nan
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    places = {"MODEL": folder, "OTHER": tmp_path / "other", "NAN": broken}
    sizes = () if any(str(a).startswith(("--num", "--length")) for a in arguments) else FEW
    assert_refused(sinkscope("bias", *(places.get(a, a) for a in arguments), *sizes), message, tmp_path)
    assert not (tmp_path / "runs").exists()


def test_a_run_of_bias_is_no_study_and_cannot_be_compared(tmp_path, sinkscope):
    assert sinkscope("bias", "tiny", "--seeds", 1, *FEW, "--controls", "none", "--out", "run").code == 0
    with pytest.raises(package.InputError, match="a run of sinkscope bias"):
        write_comparison_page([tmp_path / "run", tmp_path / "run"], tmp_path / "page.html")


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium; .ci/run installs it")
def test_the_page_is_drawn_without_errors_requests_or_overflow(sinkscope, trained, tmp_path):
    result = sinkscope("bias", trained, "--seeds", 5, *FEW, "--out", "run")
    assert result.code == 0, result.err
    browser = Chromium()
    try:
        browser.open(tmp_path / "run" / "report.html")
        assert browser.evaluate("document.querySelectorAll('.plot').length") == 10
        assert browser.evaluate("[...document.querySelectorAll('.plot')].every(plot => plot.querySelector('.xy'))")
        overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert browser.evaluate(overflow) <= 0
        browser.resize(400)
        narrow = "[...document.querySelectorAll('.plot')].every(plot => plot._fullLayout.width < 400)"
        deadline = time.monotonic() + 20
        while not browser.evaluate(narrow) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert browser.evaluate(overflow) <= 0
        assert browser.errors == []
        assert all(address.startswith(("file:", "data:", "blob:")) for address in browser.requests)
    finally:
        browser.close()


def test_python_takes_a_model_object_and_leaves_it_as_it_was():
    model = tiny_model("llama")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    result = package.bias(model, num_sequences=16, length=4)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert set(result.tables) == {schema.name for schema in BIAS_TABLES}


def test_a_training_run_is_not_replaced_by_another_run(sinkscope, trained, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    result = sinkscope("bias", copy, *FEW, "--controls", "none", "--out", copy, "--overwrite")
    assert result.code == 2
    assert "a training run" in result.err
    assert (copy / "model").is_dir()


def test_weights_that_are_all_zero_are_refused(sinkscope, trained, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(trained / "model")
    for weight in model.parameters():
        weight.data.zero_()
    model.save_pretrained(tmp_path / "zero")
    result = sinkscope("bias", tmp_path / "zero", *FEW, "--controls", "none", "--out", "run")
    assert result.code == 2
    assert "no ordinary tokens, only special ones, unused ones" in result.err
    assert not (tmp_path / "run").exists()
