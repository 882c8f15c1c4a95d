"""The real command: what it prints, what it writes, and how it refuses."""

import json
import shutil

import pytest
import torch
from command_line import assert_refused
from training_runs import short_run

from sinkscope.fingerprints.schemas import FINGERPRINT_TABLES
from sinkscope.results.tables import read_table


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return short_run(tmp_path_factory.mktemp("runs"))


def test_a_run_knows_its_initialisation(run, sinkscope, tmp_path):
    few = ("--num-sequences", 96, "--length", 16)
    specs = (f"init:{run}", run, run / "snapshots" / "step-00000002", run / "checkpoints" / "step-00000004")
    result = sinkscope("fingerprint", *specs, *few, "--out", "found", "--fresh", 2)
    assert result.code == 0, result.err
    assert "3 same origin" in result.out
    assert "no proof of theft" in " ".join(result.out.split())
    assert "innocence" not in result.out, "nothing was found different"
    found = tmp_path / "found"
    for schema in FINGERPRINT_TABLES:
        read_table(found / schema.name, schema)
    page = (found / "report.html").read_text()
    assert "3 same origin" in page
    assert "no proof of theft" in page
    summary = json.loads((found / "summary.json").read_text())
    assert [pair["verdict"] for pair in summary["pairs"]] == ["same origin"] * 3
    assert summary["unrelated"] == ["fresh-0", "fresh-1"]
    assert [model["name"] for model in summary["models"]][:2] == [f"init:{run.name}", run.name]
    assert str(tmp_path) not in (found / "summary.json").read_text()
    assert not list(tmp_path.glob(".found*"))  # parts are gone once the run is whole

    # Signatures alone say the same, without any weights; of a fresh initialisation so few sequences can't tell.
    names = sorted(path.name for path in (found / "signatures").iterdir())
    assert len(names) == 6
    paths = [found / "signatures" / name for name in (names[0], names[1], names[4])]
    again = sinkscope("fingerprint", *paths, "--matrix", "--fresh", 0, "--json")
    assert again.code == 0, again.err
    pairs = json.loads(again.out)["pairs"]
    assert [pair["verdict"] for pair in pairs] == ["same origin", "can't tell", "can't tell"]
    assert pairs[0]["z"] == summary["pairs"][0]["z"]


def test_the_published_method(run, sinkscope):
    result = sinkscope(
        "fingerprint",
        run,
        run / "snapshots" / "step-00000002",
        "--method",
        "seedprint",
        "--num-sequences",
        64,
        "--json",
    )
    assert result.code == 0, result.err
    summary = json.loads(result.out)
    assert summary["method"] == "seedprint"
    assert summary["unrelated"] == []
    assert summary["pairs"][0]["q"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{run}", "--length", 129), "the context of"),
        (("{run}", "--vocabulary", 100_000), "ids, and the sequences have 100000"),
        (("nothing/here.safetensors",), "Cannot use nothing/here.safetensors: there is no such file"),
        (("{run}/model/model.safetensors",), "it is not the signature of a model"),
        (("init:nothing",), "There is no folder nothing"),
        (("tiny",), "tiny is a preset of pretrain, and has no weights"),
    ],
)
def test_what_is_refused(run, sinkscope, tmp_path, arguments, message):
    result = sinkscope("fingerprint", run, *(str(each).format(run=run) for each in arguments))
    assert_refused(result, message, tmp_path)


@pytest.mark.parametrize("content", [b"", b"other"])
def test_a_damaged_checkpoint_is_refused(run, sinkscope, tmp_path, content):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    checkpoint = copy / "checkpoints" / "step-00000004"
    weights = checkpoint / "training.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5] + content)
    result = sinkscope("fingerprint", run, checkpoint, "--num-sequences", 64)
    assert result.code == 2
    assert "is damaged: training.safetensors has other bytes. Give another checkpoint" in result.err
    assert "Traceback" not in result.err


def test_a_refused_command_keeps_what_an_interrupted_one_finished(run, sinkscope, tmp_path):
    parts = tmp_path / ".found.sinkscope-parts"
    parts.mkdir()
    (parts / "batch").write_text("finished")
    assert sinkscope("fingerprint", run, run, "--method", "guess", "--out", "found").code == 2
    assert (parts / "batch").exists()


def test_weights_that_are_no_numbers_are_refused(run, sinkscope, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(run / "model")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = torch.nan
    model.save_pretrained(tmp_path / "broken")
    result = sinkscope("fingerprint", run, tmp_path / "broken", "--num-sequences", 64)
    assert_refused(result, "NaN in", tmp_path)


def test_other_vocabularies_are_refused_unless_ids_are_shared(run, sinkscope, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(run / "model")
    num_ids = model.config.vocab_size
    model.resize_token_embeddings(num_ids + 2)
    model.save_pretrained(tmp_path / "more")
    arguments = ("fingerprint", run, tmp_path / "more", "--num-sequences", 64, "--length", 16, "--fresh", 0)
    assert_refused(sinkscope(*arguments), "give their number as --vocabulary", tmp_path)
    result = sinkscope(*arguments, "--vocabulary", num_ids, "--json")
    assert json.loads(result.out)["pairs"][0]["verdict"] == "same origin"
