"""Where commands read and write: paths that can name no file, home, folders of the user's own, two writers at once."""

import threading

import pytest
from command_line import assert_refused

from sinkscope.atomic import locked

COMMANDS = {
    "model": ("trace", "{}", "--out", "run"),
    "text": ("trace", "--tokens", "text:{}", "--out", "run"),
    "run": ("trace", "init:{}", "--out", "run"),
    "out": ("trace", "--out", "{}"),
    "intervene out": ("intervene", "--mask-to-self", "3", "--out", "{}"),
    "study out": ("study", "--bos", "both", "--out", "{}"),
    "bias": ("bias", "{}", "--out", "run"),
    "along": ("bias", "--seeds", "1", "--along", "{}", "--num-sequences", "16", "--length", "4", "--out", "run"),
    "suspect": ("fingerprint", "reference:softmax", "{}", "--fresh", "0", "--out", "run"),
    "compared": ("compare", "{}", "reference:softmax"),
    "page": ("compare", "reference:softmax", "reference:learned_sink", "--out", "{}.html"),
    "data": ("pretrain", "--data", "{}", "--out", "run"),
    "recipe": ("pretrain", "--config", "{}.yaml", "--data", "text.txt", "--out", "run"),
    "trained": ("pretrain", "--data", "text.txt", "--out", "{}"),
    "shards": ("tokenize", "--data", "text.txt", "--out", "{}"),
    "tokenizer": ("tokenize", "--data", "text.txt", "--tokenizer", "{}", "--out", "run"),
}


@pytest.mark.parametrize("place", COMMANDS)
def test_a_path_that_can_name_no_file(place, sinkscope, tmp_path):
    (tmp_path / "text.txt").write_text("a line of text\n" * 50)
    before = {entry.name for entry in tmp_path.iterdir()}
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in ("~nosuchuser/x", "x" * 300, "loop/x"):
        result = sinkscope(*(argument.format(path) for argument in COMMANDS[place]))
        assert_refused(result, "Cannot open the path", tmp_path)
    (tmp_path / "loop").unlink()
    assert {entry.name for entry in tmp_path.iterdir() if entry.name != "runs"} == before


TRACE = ("trace", "--num-sequences", 2, "--length", 32, "--no-effective-rank")


def test_home_is_meant_by_a_tilde(sinkscope, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    assert sinkscope(*TRACE, "--out", "~/run").code == 0
    assert (tmp_path / "home" / "run" / "summary.json").is_file()
    for overwrite in ((), ("--overwrite",)):
        assert_refused(sinkscope(*TRACE, "--out", "~", *overwrite), "--out", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"home"}


WRITERS = {
    "trace": TRACE,
    "study": ("study",),
    "intervene": ("intervene", "--mask-to-self", "3"),
    "bias": ("bias",),
    "fingerprint": ("fingerprint", "reference:softmax", "reference:learned_sink"),
    "tokenize": ("tokenize", "--data", "text.txt", "--vocab-size", 300),
    "pretrain": ("pretrain", "--data", "text.txt"),
}


@pytest.mark.parametrize("command", WRITERS)
def test_no_command_replaces_a_folder_of_the_users(command, sinkscope, tmp_path):
    """Each would take it for a run by its files' names, and begins with this check."""
    (tmp_path / "text.txt").write_text("a line of text\n" * 50)
    project = tmp_path / "project"
    (project / ".git").mkdir(parents=True)
    for name in ("config.yaml", "summary.json", "environment.json", ".git/HEAD"):
        (project / name).write_text("{}")
    result = sinkscope(*WRITERS[command], "--out", "project", "--overwrite")
    assert_refused(result, "no .sinkscope file, so sinkscope did not write it", tmp_path)
    assert "--out" in result.err
    assert {path.name for path in project.rglob("*")} == {
        *("config.yaml", "summary.json", "environment.json", ".git", "HEAD")
    }


@pytest.mark.parametrize("command", WRITERS)
def test_a_second_writer_is_refused_before_any_work(command, sinkscope, tmp_path):
    (tmp_path / "text.txt").write_text("a line of text\n" * 50)
    ready, done = threading.Event(), threading.Event()

    def hold():
        with locked(tmp_path / "run"):
            ready.set()
            done.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    ready.wait()
    try:
        assert_refused(sinkscope(*WRITERS[command], "--out", "run"), "Another run is writing to", tmp_path)
    finally:
        done.set()
        holder.join()
    assert {path.name for path in tmp_path.iterdir()} <= {"text.txt", "runs"}
