"""sinkscope study: what it writes and prints, how it goes on after an interruption, and how it refuses."""

import json
import os
import random
import re
import signal
import subprocess
import time

import pytest
import yaml
from command_line import assert_refused, in_a_process, started_process
from planted_models import decoy, planted_chain
from safetensors.numpy import load_file
from tiny_models import tiny_model

from sinkscope.results import saved
from sinkscope.results.tables import read_table
from sinkscope.studies.claims import CLAIMS
from sinkscope.studies.condition_runner import ConditionRunner
from sinkscope.studies.schemas import STUDY_TABLES

KILLS = 2
SMALL = ("--num-sequences", 16, "--length", 32)
FILES = {"config.yaml", "environment.json", "summary.json", "calibration.safetensors", "chain.png", "report.html"}
TRACE_TABLES = (
    "sinks",
    "positions",
    "neurons",
    "dimensions",
    "heads",
    "layers",
    "distances",
    "tokens",
    "sequence_sinks",
)


TOKENS_MOVED = ("move_token", "other_token", "shift_positions")
EXCLUDED = ("first_token_needed", "token_carries_sink")
"""What the planted chain, which runs on variance, is not about."""


@pytest.fixture(scope="session")
def chain_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "chain"
    planted_chain(0)[0].save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def bos_folder(tmp_path_factory):
    """A model whose sink is its special token: there is none without BOS."""
    folder = tmp_path_factory.mktemp("models") / "special"
    decoy("special_token", 0)[0].save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def sinkless_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "sinkless"
    tiny_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def ran(monkeypatch):
    """Names of the conditions that run."""
    names, run = [], ConditionRunner.run

    def counted(self, condition, **options):
        names.append(condition.part)
        return run(self, condition, **options)

    monkeypatch.setattr(ConditionRunner, "run", counted)
    return names


def interrupt_after(monkeypatch, count: int) -> None:
    """Sends Ctrl-C when `count` conditions are done."""
    run, done = ConditionRunner.run, []

    def interrupted(self, condition, **options):
        done.append(condition)
        if len(done) > count:
            os.kill(os.getpid(), signal.SIGINT)
        return run(self, condition, **options)

    monkeypatch.setattr(ConditionRunner, "run", interrupted)


def visible(folder) -> set[str]:
    return {entry.name for entry in folder.iterdir() if not entry.name.startswith(".")}


def contents(run) -> tuple:
    """What must not depend on how a run came about."""
    summary = json.loads((run / "summary.json").read_text())
    assert summary["receipt"].pop("seconds") > 0
    means = {name: value.tolist() for name, value in load_file(run / "calibration.safetensors").items()}
    return summary, means, {table.stem: read_table(table) for table in run.glob("*.parquet")}


def test_a_run_holds_the_verdicts_and_all_that_led_to_them(chain_folder, sinkscope, tmp_path):
    result = sinkscope("study", chain_folder, "--out", "run", "--json", *SMALL)
    assert result.code == 0, result.err
    summary = json.loads(result.out)
    run = tmp_path / "run"
    assert summary == json.loads((run / "summary.json").read_text())
    assert [claim["id"] for claim in summary["claims"]] == list(CLAIMS)
    acted = {each["name"]: each["layers"] for each in summary["receipt"]["interventions"]}
    assert acted["mask_to_self-10"] == list(range(6))
    assert all(layers for name, layers in acted.items() if not name.startswith(TOKENS_MOVED))
    assert summary["mechanism"] == "variance"
    assert summary["cause"] in summary["verdict"]
    assert summary["rules"].keys() == {"version", "hash"}
    for claim in summary["claims"]:
        assert claim.keys() == {"id", "verdict", "effect", "low", "high", "control", "n"}
        assert claim["n"] == 16
        assert claim["verdict"] in (("does not hold",) if claim["id"] in EXCLUDED else ("holds", "undecided"))
        assert claim["low"] <= claim["effect"] <= claim["high"]
    facts = planted_chain(0)[1]
    assert summary["minimal_set"] == [{"layer": 2, "expert": None, "neuron": facts.super_neurons[0][1]}]
    assert summary["sink_without_minimal_set"] == "gone"
    assert (summary["writers"], summary["sink_without_writers"]) == ([], None)
    assert f"Neuron 2:{facts.super_neurons[0][1]} writes it" in summary["verdict"]
    tables = {schema.name for schema in STUDY_TABLES} | set(TRACE_TABLES)
    assert visible(run) == FILES | {f"{name}.parquet" for name in tables}
    assert {name: len(read_table(run / name)) > 0 for name in tables} == dict.fromkeys(tables, True)
    assert {entry.name for entry in tmp_path.iterdir()} == {"run"}, "its parts are gone"
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["command"].startswith(f"sinkscope study {chain_folder} --out run")
    assert (config["num_sequences"], config["length"], config["bos"]) == (16, 32, "auto")
    page = (run / "report.html").read_text(encoding="utf-8")
    (answer,) = re.findall('<p class="answer">(.*?)</p>', page)
    assert summary["verdict"] in answer
    assert " hold" not in answer, "the counts stand below, not in the answer"
    assert page.index(summary["counts"]) > page.index(answer)
    assert "amplify_variance.position_10.factor_8.layer_2" in load_file(run / "calibration.safetensors")


def test_a_model_without_a_sink_gets_an_honest_answer(sinkless_folder, sinkscope, tmp_path, ran):
    result = sinkscope("study", sinkless_folder, "--out", "run", *SMALL)
    assert result.code == 0, result.err
    assert "There is no sink to explain" in result.out
    assert "run/report.html" in result.out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    verdicts = {claim["id"]: claim["verdict"] for claim in summary["claims"]}
    assert verdicts == {**dict.fromkeys(CLAIMS, "not applicable"), "sink": "does not hold"}
    (sink,) = (claim for claim in summary["claims"] if claim["id"] == "sink")
    assert f"is a sink for {sink['effect']:.1%} of heads" in summary["verdict"], "the position's rate as it was judged"
    assert summary["minimal_set"] == []
    assert ran == []
    assert "There is no sink to explain" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert {entry.name for entry in tmp_path.iterdir()} == {"run"}


def test_a_run_is_replaced_only_when_asked(sinkless_folder, sinkscope, tmp_path):
    assert sinkscope("study", sinkless_folder, "--out", "run", *SMALL).code == 0
    environment = tmp_path / "run" / "environment.json"
    environment.write_text("{}")  # a mark, since two runs within one second write the same text
    assert_refused(sinkscope("study", sinkless_folder, "--out", "run", *SMALL), "--overwrite", tmp_path)
    assert environment.read_text() == "{}"
    assert sinkscope("study", sinkless_folder, "--out", "run", "--overwrite", *SMALL).code == 0
    assert "started_at" in environment.read_text()


REFUSED = {
    ("--bos", "yes"): "--bos no",
    ("--bos", "both"): "--bos no",
    ("--length", "100000"): "--length",
}


@pytest.mark.parametrize(("options", "message"), REFUSED.items(), ids=lambda value: "_".join(value)[:24])
def test_refused_options_leave_nothing(options, message, sinkscope, chain_folder, tmp_path):
    assert_refused(sinkscope("study", chain_folder, "--out", "run", *options), message, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_comparison_says_which_study_goes_on(chain_folder, sinkless_folder, sinkscope, monkeypatch):
    interrupt_after(monkeypatch, 2)
    result = sinkscope("compare", chain_folder, sinkless_folder, "--out", "page.html")
    assert result.code == 130
    assert f"sinkscope study {chain_folder} --out runs/" in result.err
    assert "can be compared" in result.err


def test_an_interrupted_study_goes_on_from_its_finished_parts(chain_folder, sinkscope, tmp_path, monkeypatch, ran):
    command = ("study", chain_folder, *SMALL)
    assert sinkscope(*command, "--out", "whole").code == 0
    whole = list(ran)
    ran.clear()
    with monkeypatch.context() as patch:
        interrupt_after(patch, 7)
        result = sinkscope(*command, "--out", "run")
    assert result.code == 130
    assert "Traceback" not in result.err
    assert "--out run goes on" in result.err
    assert "no run was written" not in result.err
    assert visible(tmp_path) == {"whole"}
    assert ran == whole[:7]
    # A part that was cut off is made again.
    part = tmp_path / ".run.sinkscope-parts" / f"{whole[2]}.safetensors"
    part.write_bytes(part.read_bytes()[:-10])
    ran.clear()
    # A command that is refused leaves the parts alone.
    assert sinkscope("study", chain_folder, "--length", 20, "--out", "run").code == 2
    assert sinkscope(*command, "--out", "run").code == 0
    assert ran == [whole[2], *whole[7:]]
    assert {entry.name for entry in tmp_path.iterdir()} == {"whole", "run"}
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


def test_killed_at_random_moments_a_study_goes_on_to_the_same_tables(chain_folder, sinkscope, tmp_path):
    command = ("study", chain_folder, *SMALL)
    started_at = time.monotonic()
    assert in_a_process(*command, "--out", "whole", cwd=tmp_path).returncode == 0
    elapsed_s = time.monotonic() - started_at
    for _ in range(KILLS):
        started = started_process(*command, "--out", "run", cwd=tmp_path)
        try:
            started.wait(timeout=random.uniform(0.1, 0.9) * elapsed_s)
        except subprocess.TimeoutExpired:
            started.kill()
        assert started.wait() in (0, 2, -signal.SIGKILL), "done, or refused since the one before was done"
    # A kill right after the folder got its name leaves the parts that it was made of; the next run takes them away.
    if {entry.name for entry in tmp_path.iterdir()} != {"whole", "run"}:
        result = sinkscope(*command, "--out", "run", "--overwrite")
        assert result.code == 0, result.err
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")
    assert {entry.name for entry in tmp_path.iterdir()} == {"whole", "run"}


def test_another_request_at_the_same_place_starts_anew(chain_folder, sinkscope, tmp_path, monkeypatch, ran):
    with monkeypatch.context() as patch:
        interrupt_after(patch, 5)
        assert sinkscope("study", chain_folder, *SMALL, "--out", "run").code == 130
    ran.clear()
    assert sinkscope("study", chain_folder, *SMALL, "--out", "run", "--seed", 1).code == 0
    assert len(ran) == len(set(ran)) > 60
    other = contents(tmp_path / "run")[0]
    assert other["tokens"]["seed"] == 1


def test_an_interruption_while_writing_costs_no_condition(chain_folder, sinkscope, tmp_path, monkeypatch, ran):
    with monkeypatch.context() as patch:
        patch.setattr(saved, "load_result", lambda *_: os.kill(os.getpid(), signal.SIGINT))
        assert sinkscope("study", chain_folder, *SMALL, "--out", "run").code == 130
    assert {entry.name for entry in tmp_path.iterdir()} == {".run.sinkscope-parts"}
    ran.clear()
    assert sinkscope("study", chain_folder, *SMALL, "--out", "run").code == 0
    assert ran == []
    assert (tmp_path / "run" / "report.html").is_file()


def test_bos_both_writes_two_runs_and_a_page(bos_folder, sinkscope, tmp_path, monkeypatch, ran):
    command = ("study", bos_folder, *SMALL, "--bos", "both", "--out", "run", "--json")
    with monkeypatch.context() as patch:
        interrupt_after(patch, 3)
        assert sinkscope(*command).code == 130
    assert visible(tmp_path) == set()
    ran.clear()
    result = sinkscope(*command)
    assert result.code == 0, result.err
    with_bos, without = json.loads(result.out)
    assert [summary["tokens"]["bos"] for summary in (with_bos, without)] == [True, False]
    verdicts = [{claim["id"]: claim["verdict"] for claim in summary["claims"]} for summary in (with_bos, without)]
    assert [by_id["sink"] for by_id in verdicts] == ["holds", "does not hold"]
    assert verdicts[0]["variance_discrepancy"] == "not applicable"
    assert len(ran) == len(set(ran))
    assert {entry.name for entry in tmp_path.iterdir()} == {"run-bos", "run-no-bos", "run.html"}
    text = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert "run-bos" in text
    assert "run-no-bos" in text
    assert yaml.safe_load((tmp_path / "run-no-bos" / "config.yaml").read_text())["bos"] == "no"
    assert_refused(sinkscope(*command), "run-bos", tmp_path)


def test_bos_both_replaces_no_page_unasked(bos_folder, sinkscope, tmp_path, ran):
    (tmp_path / "run.html").write_text("mine")
    assert_refused(sinkscope("study", bos_folder, "--bos", "both", "--out", "run"), "run.html", tmp_path)
    assert (tmp_path / "run.html").read_text() == "mine"
    assert visible(tmp_path) == {"run.html"}
    assert ran == []
