"""The atlas: what is finished is not run again, what fails is told, and the page and the table say what was found."""

import json
import subprocess
import threading
from pathlib import Path

import atlas
import pytest
from study_tables import write_study_folder

from sinkscope.cli import command_line
from sinkscope.errors import InputError
from sinkscope.results.tables import read_table

LIST = """
study: {length: 32, num_sequences: 16}
audit: {num_sequences: 2}
models:
  - {name: with a sink, model: weights/a.gguf, dtype: float32, study: {bos: "no"}}
  - reference:softmax
"""
AUDITED = {
    "schemes": {"W8A8_STATIC": {"measured": 0.8}},
    "advice": [
        {"scheme": "W8A8_STATIC", "remedy": "rotate", "share_won_back": 0.2},
        {"scheme": "W8A8_STATIC", "remedy": "prefix", "share_won_back": 0.9},
        {"scheme": "window", "remedy": "keep tokens", "share_won_back": 1.0},
    ],
}


@pytest.fixture
def models(tmp_path):
    path = tmp_path / "models.yaml"
    path.write_text(LIST)
    return path


def planted(calls, fails=""):
    """Writes what a command would, and remembers its arguments."""

    def run(arguments, environment):
        calls.append(arguments)
        command, model, _, out = arguments[:4]
        if model == fails:
            return "expected a model; found none"
        if command == "study":
            write_study_folder(Path(out), model=model, sink=model != "reference:softmax")
        else:
            Path(out).mkdir(parents=True)
            (Path(out) / "summary.json").write_text(json.dumps(AUDITED))
        return ""

    return run


def test_an_atlas_goes_on_where_it_was_stopped(models, tmp_path, capsys):
    out, calls = tmp_path / "out", []
    assert atlas.main([str(models), "--out", str(out)], planted(calls, fails="reference:softmax")) == 1
    assert "expected a model; found none" in capsys.readouterr().err
    assert [call[:2] for call in calls] == [
        ["study", "weights/a.gguf"],
        ["audit", "weights/a.gguf"],
        ["study", "reference:softmax"],
    ]
    assert "Not finished: reference-softmax" in (out / "atlas.html").read_text().replace("<bdi>", "")
    calls.clear()
    assert atlas.main([str(models), "--out", str(out)], planted(calls)) == 0
    assert [call[:2] for call in calls] == [["study", "reference:softmax"], ["audit", "reference:softmax"]]
    table = read_table(out / "atlas", atlas.ATLAS)
    assert table["model"] == ["with-a-sink", "reference-softmax"]
    assert table["neurons"] == ["2:90, 2:7", ""]
    assert table["remedy"][0] == "prefix: 90% of 0.800 nats"
    assert table["cause"][1] == "No sink on these tokens."
    page = (out / "atlas.html").read_text()
    assert 'href="with-a-sink/study/report.html"' in page
    assert "Not finished" not in page
    table = (out / "atlas.md").read_text()
    assert table.count("\n") == 4
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{table.splitlines()[0]}\n| --- |\n| old |\n\nafter | all\n")
    assert atlas.main([str(models), "--out", str(out), "--into", str(page)], planted(calls)) == 0
    assert page.read_text() == f"before\n\n{table}\nafter | all\n"
    page.write_text("no table")
    assert atlas.main([str(models), "--out", str(out), "--into", str(page)], planted(calls)) == 2


def test_each_gpu_takes_a_model_and_one_that_fails_leaves_its_gpu_to_the_next(tmp_path, monkeypatch):
    """a and b begin side by side; b fails at once; a ends only when c has begun, so c must be on b's GPU."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    together, c_began, seen = threading.Barrier(2, timeout=10), threading.Event(), {}

    def run(arguments, environment):
        model = arguments[1]
        seen[model] = environment["CUDA_VISIBLE_DEVICES"]
        if model == "c":
            c_began.set()
            return ""
        together.wait()
        return "out of memory" if model == "b" else "" if c_began.wait(10) else "c never began"

    entries = [atlas.Entry(name, name) for name in "abc"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert atlas.study_all(entries, tmp_path, run) == ["b: out of memory"]
    assert {seen["a"], seen["b"]} == {"0", "1"}
    assert seen["c"] == seen["b"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-7")  # those that the user may have, by the names he gave
    c_began.clear()
    assert atlas.study_all(entries, tmp_path, run) == ["b: out of memory"]
    assert {seen["a"], seen["b"]} == {"5", "GPU-7"}


def test_a_command_that_dies_without_a_word_is_told(monkeypatch):
    killed = subprocess.CompletedProcess([], -9, stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: killed)
    assert atlas.run_command(["study"], {}) == "ended with exit code -9"


def test_the_commands_can_be_typed(models, tmp_path):
    for entry in atlas.read_list(models):
        for command, *arguments in atlas.commands(entry, tmp_path):
            parsed = command_line().commands[command]
            parsed.make_parser(parsed.make_context(command, [], resilient_parsing=True)).parse_args(arguments)


def test_a_list_that_is_not_understood_is_refused(tmp_path, capsys):
    path = tmp_path / "models.yaml"
    path.write_text("modles: [a]")
    with pytest.raises(InputError, match="modles"):
        atlas.read_list(path)
    assert atlas.main([str(path)]) == 2
    not_options = ("study: [1]\nmodels: [a]", "models: [{model: a, study: 3}]", "models: [{model: a, audit: 3}]")
    no_folder = ("models: ['..']", "models: [{model: a, name: ./.}]", "models: ['']")
    for wrong in ("models: 3", "models: [{name: a}]", "models: [a", "\0", "[" * 10_000, *not_options, *no_folder):
        path.write_text(wrong)
        assert atlas.main([str(path)]) == 2, wrong
    assert atlas.main([str(tmp_path / "no such file.yaml")]) == 2
    path.write_text("models: [{model: a, audit: {seed: 1}}, b]")
    assert [entry.audit for entry in atlas.read_list(path)] == [{"seed": 1}, None]
    path.write_text("audit: {seed: 1}\nmodels: [{model: a, audit: false}, b]")
    assert [entry.audit for entry in atlas.read_list(path)] == [None, {"seed": 1}]
    path.write_text("models: [a/b, a-b]")
    with pytest.raises(InputError, match="have the name a-b"):
        atlas.read_list(path)


def test_a_damaged_file_of_one_model_costs_only_its_row(models, tmp_path, capsys):
    out = tmp_path / "out"
    assert atlas.main([str(models), "--out", str(out)], planted([])) == 0
    for damaged in ("study", "audit"):
        summary = out / "with-a-sink" / damaged / "summary.json"
        whole = summary.read_text()
        for content in ("{", "{}", whole.replace('"measured"', '"lost"').replace('"verdict"', '"lost"')):
            summary.write_text(content)
            assert atlas.main([str(models), "--out", str(out)], planted([])) == 1
            assert f"with-a-sink: Cannot use {summary}" in capsys.readouterr().err
            assert read_table(out / "atlas", atlas.ATLAS)["model"] == ["reference-softmax"]
        summary.write_text(whole)
    assert atlas.main([str(models), "--out", str(out)], planted([])) == 0, "control: whole again"
    (tmp_path / "file").touch()
    assert atlas.main([str(models), "--out", str(tmp_path / "file")], planted([])) == 2
