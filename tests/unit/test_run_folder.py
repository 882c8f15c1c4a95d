"""A run folder is whole or absent: after an error, Ctrl-C, kill -9, a full disk, and beside an older run."""

import errno
import json
import os
import platform
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import yaml

from sinkscope.errors import InputError
from sinkscope.results import run_folder as module
from sinkscope.results.run_folder import check_output, default_run_path, run_folder, whole_file
from sinkscope.results.tables import Column, Schema, read_table

SCHEMA = Schema("sinks", (Column("position", "int", "position of the sink"),))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def write_run(path: Path, text: str = "first", overwrite: bool = False) -> None:
    with run_folder(path, overwrite) as folder:
        folder.write_json("summary.json", {"text": text})


def text_of(path: Path) -> str:
    return json.loads((path / "summary.json").read_text())["text"]


def test_a_run_appears_whole_and_at_once(tmp_path):
    path = tmp_path / "deep" / "er" / "run"
    with run_folder(path) as folder:
        folder.write_json("summary.json", {"a": 1})
        folder.write_yaml("config.yaml", {"b": [1, "é"], "a": None})
        folder.write_table(SCHEMA, {"position": [0, 3]})
        assert not path.exists()
        assert folder.path.parent == path.parent
        assert folder.path.name.startswith(".run.")
        assert folder.path.name.endswith(".partial")
    assert folder.path == path
    assert names(path) == {"summary.json", "config.yaml", "sinks.parquet"}
    assert names(path.parent) == {"run"}
    assert (path / "config.yaml").read_text(encoding="utf-8") == "b:\n- 1\n- é\na: null\n"
    assert read_table(path / "sinks") == {"position": [0, 3]}


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "rows.json"
    with whole_file(path) as partial:
        partial.write_text("first")
        assert names(tmp_path) == {partial.name}
        assert partial.name.startswith(".rows.json.")
    assert names(tmp_path) == {"rows.json"}
    for error in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(error), whole_file(path) as partial:
            partial.write_text("half")
            raise error
        assert path.read_text() == "first"
        assert names(tmp_path) == {"rows.json"}
    # Control: without an error the same words are there.
    with whole_file(path) as partial:
        partial.write_text("half")
    assert path.read_text() == "half"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, InputError])
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_error_leaves_nothing_new(tmp_path, error, overwrite):
    path = tmp_path / "run"
    if overwrite:
        write_run(path, "before")
    raised = error(expected="a", found="b", next_step="c") if error is InputError else error()
    with pytest.raises(error), run_folder(path, overwrite) as folder:
        folder.write_json("summary.json", {"text": "half"})
        raise raised
    assert names(tmp_path) == ({"run"} if overwrite else set())
    if overwrite:
        assert text_of(path) == "before"


def test_existing_folder_is_refused_before_any_work(tmp_path):
    write_run(tmp_path / "run")
    with pytest.raises(InputError, match="--overwrite"), run_folder(tmp_path / "run"):
        pytest.fail("the block must not run")
    with pytest.raises(InputError, match="--overwrite"):
        check_output(tmp_path / "run")
    check_output(tmp_path / "other")  # the control
    assert names(tmp_path) == {"run"}


def test_overwrite_replaces_the_whole_folder(tmp_path):
    path = tmp_path / "run"
    with run_folder(path) as folder:
        folder.write_json("summary.json", {"text": "first"})
        (folder.path / "old.txt").write_text("old")
    with run_folder(path, overwrite=True) as folder:
        assert text_of(path) == "first"  # untouched until the new one is whole
        folder.write_json("summary.json", {"text": "second"})
    assert text_of(path) == "second"
    assert names(path) == {"summary.json"}
    assert names(tmp_path) == {"run"}


def test_overwrite_deletes_only_runs(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    check_output(home, overwrite=True)  # an empty folder holds nothing to lose
    (home / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="would be deleted"), run_folder(home, overwrite=True):
        pytest.fail("the block must not run")
    assert names(home) == {"thesis.tex"}


def test_a_failed_swap_puts_the_old_folder_back(tmp_path, monkeypatch):
    path = tmp_path / "run"
    write_run(path, "before")
    rename = Path.rename

    def fails_for_the_new_one(self, target):
        if self.name.endswith(".partial"):
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails_for_the_new_one)
    with pytest.raises(InputError, match="Input/output error"):
        write_run(path, "after", overwrite=True)
    assert names(tmp_path) == {"run"}
    assert text_of(path) == "before"
    monkeypatch.undo()
    write_run(path, "after", overwrite=True)  # the control: with a working rename it does change
    assert text_of(path) == "after"


def test_a_folder_that_appears_meanwhile_is_kept(tmp_path):
    path = tmp_path / "run"
    with pytest.raises(InputError, match="one that exists"), run_folder(path) as folder:
        folder.write_json("summary.json", {"text": "late"})
        write_run(path, "early")
    assert text_of(path) == "early"
    assert names(tmp_path) == {"run"}


def test_a_link_to_a_run_stays_a_link(tmp_path):
    write_run(tmp_path / "real", "first")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_run(tmp_path / "link", "second", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert text_of(tmp_path / "real") == "second"


CHILD = """
    import sys, time
    from pathlib import Path
    from sinkscope.results.run_folder import run_folder
    with run_folder(Path(sys.argv[1]), overwrite=True) as folder:
        folder.write_json("summary.json", {"text": "child"})
        print("written", flush=True)
        time.sleep(60)
"""


def start_child(path: Path, source: str = CHILD) -> subprocess.Popen:
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(source), str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")},
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"written\n"
    return child


def test_kill_leaves_no_run_and_the_next_run_clears_up(tmp_path):
    path = tmp_path / "run"
    write_run(path, "before")
    child = start_child(path)
    try:
        (partial,) = names(tmp_path) - {"run"}
        check_output(path, overwrite=True)
        assert partial in names(tmp_path)  # the control: what a living process writes is left alone
    finally:
        child.kill()
        child.communicate()
    assert names(tmp_path) == {"run", partial}
    assert text_of(path) == "before"
    write_run(path, "after", overwrite=True)
    assert names(tmp_path) == {"run"}
    assert text_of(path) == "after"


def test_kill_without_an_older_run(tmp_path):
    child = start_child(tmp_path / "run")
    child.kill()
    child.communicate()
    assert not (tmp_path / "run").exists()
    assert len(names(tmp_path)) == 1
    write_run(tmp_path / "other")
    assert len(names(tmp_path)) == 2  # the leftover of another path is not ours to judge
    write_run(tmp_path / "run")
    assert names(tmp_path) == {"run", "other"}


def test_kill_between_the_two_renames_loses_nothing(tmp_path):
    path = tmp_path / "run"
    write_run(path, "before")
    stop_before_second_rename = """
        import sys, time
        from pathlib import Path
        from sinkscope.results.run_folder import run_folder
        rename = Path.rename
        def slow_rename(self, target):
            if self.name.endswith(".partial"):
                print("written", flush=True)
                time.sleep(60)
            return rename(self, target)
        Path.rename = slow_rename
        with run_folder(Path(sys.argv[1]), overwrite=True) as folder:
            folder.write_json("summary.json", {"text": "child"})
    """
    child = start_child(path, stop_before_second_rename)
    child.kill()
    child.communicate()
    assert not path.exists()
    with pytest.raises(InputError, match="--overwrite"):
        check_output(path)
    assert names(tmp_path) == {"run"}
    assert text_of(path) == "before"


def test_ctrl_c_cleans_up_in_a_real_process(tmp_path):
    child = start_child(tmp_path / "run")
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=30)
    assert child.returncode != 0
    assert names(tmp_path) == set()


def test_a_partial_of_another_machine_is_left_alone(tmp_path, monkeypatch):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    here = tmp_path / f".run.{dead.pid}-{module._host()}-00000000.partial"
    monkeypatch.setattr(platform, "node", lambda: "elsewhere")
    there = tmp_path / f".run.{dead.pid}-{module._host()}-00000000.partial"
    monkeypatch.undo()
    here.mkdir()
    there.mkdir()
    write_run(tmp_path / "run")
    assert names(tmp_path) == {"run", there.name}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_the_persons_error(tmp_path, monkeypatch, code):
    path = tmp_path / "run"
    write_run(path, "before")

    def full(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(module.tables, "write_table", full)
    with pytest.raises(InputError, match="Free some space"), run_folder(path, overwrite=True) as folder:
        folder.write_json("summary.json", {"text": "half"})
        folder.write_table(SCHEMA, {"position": [0]})
    assert names(tmp_path) == {"run"}
    assert text_of(path) == "before"


def test_control_other_errors_in_the_block_are_not_blamed_on_the_disk(tmp_path):
    with pytest.raises(FileNotFoundError), run_folder(tmp_path / "run"):
        (tmp_path / "no_such_model").read_bytes()
    assert names(tmp_path) == set()


@pytest.fixture
def mounted(tmp_path):
    """A function that mounts a tiny file system, where this machine permits it."""
    target = tmp_path / "disk"
    target.mkdir()

    def mount(options: str) -> Path:
        answer = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(target)], capture_output=True, check=False
        )
        if answer.returncode:
            pytest.skip("mounting is not permitted here")
        return target

    yield mount
    if os.path.ismount(target):
        subprocess.run(["umount", str(target)], check=True)


@pytest.mark.parametrize("what", ["json", "table"])
def test_a_disk_that_is_really_full(mounted, what):
    disk = mounted("size=64k")
    write_run(disk / "run", "before")
    random = np.random.default_rng(0).integers(0, 2**60, 50_000)
    with pytest.raises(InputError, match="No space left"), run_folder(disk / "run", overwrite=True) as folder:
        if what == "json":
            folder.write_json("summary.json", random)
        else:
            folder.write_table(SCHEMA, {"position": random})
    assert names(disk) == {"run"}
    assert text_of(disk / "run") == "before"
    write_run(disk / "small")  # the control: what fits is written


def test_a_read_only_disk_is_refused_for_root_too(mounted):
    disk = mounted("ro,size=64k")
    for path in (disk / "run", disk / "deep" / "run"):
        with pytest.raises(InputError, match="Read-only"), run_folder(path):
            pytest.fail("the block must not run")


def test_a_parent_without_permission(tmp_path):
    parent = tmp_path / "locked"
    parent.mkdir(mode=0o500)
    if not subprocess.run(["mkdir", parent / "probe"], capture_output=True, check=False).returncode:
        pytest.skip("this user may write to any folder")
    with pytest.raises(InputError, match="Permission denied"):
        check_output(parent / "run")
    parent.chmod(0o700)
    check_output(parent / "run")  # the control


def test_a_parent_that_refuses_is_found_by_the_probe(tmp_path, monkeypatch):
    """The same promise wherever mounting is not permitted and the tests run as root."""

    def refuse(self, *_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    check_output(tmp_path / "run")  # the control
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(InputError, match=r"Permission denied.*--out"):
        check_output(tmp_path / "run")


def test_a_path_that_is_a_file_or_lies_in_one(tmp_path):
    (tmp_path / "file").write_text("")
    for overwrite in (False, True):
        with pytest.raises(InputError, match="a file"):
            check_output(tmp_path / "file", overwrite)
    with pytest.raises(InputError, match="Not a directory"):
        check_output(tmp_path / "file" / "run")
    with pytest.raises(InputError, match="name too long"):
        check_output(tmp_path / ("x" * 250))
    assert names(tmp_path) == {"file"}


@dataclass
class Settings:
    length: int
    out: Path


def test_json_is_strict_and_keeps_the_order(tmp_path):
    value = {
        "z": float("nan"),
        "a": np.float32(0.5),
        "n": np.int64(3),
        "b": np.bool_(True),
        "list": (1, np.array([1.0, np.nan])),
        "settings": Settings(4, Path("runs/x")),
        "text": "é",
        3: None,
    }
    with run_folder(tmp_path / "run") as folder:
        folder.write_json("summary.json", value)
        folder.write_yaml("config.yaml", value)
    text = (tmp_path / "run" / "summary.json").read_text(encoding="utf-8")
    expected = {
        "z": None,
        "a": 0.5,
        "n": 3,
        "b": True,
        "list": [1, [1.0, None]],
        "settings": {"length": 4, "out": "runs/x"},
        "text": "é",
        "3": None,
    }
    assert "é" in text
    assert "NaN" not in text
    assert json.loads(text) == expected
    assert list(json.loads(text)) == list(expected)
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text(encoding="utf-8")) == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [({"a": [0.0, float("inf")]}, r"a\[1\]: JSON has no infinity"), ({"a": {1, 2}}, "no set"), ({None: 1}, "a key")],
)
def test_what_json_does_not_have_is_an_error(tmp_path, value, message):
    with pytest.raises(ValueError, match=message), run_folder(tmp_path / "run") as folder:
        folder.write_json("summary.json", value)
    assert names(tmp_path) == set()


@pytest.mark.parametrize(
    ("model", "folder"),
    [
        ("tiny-llama", "tiny-llama"),
        ("org/Llama-3.2-1B", "org-Llama-3.2-1B"),
        ("/home/somebody/models/tiny.gguf", "tiny.gguf"),
        ("../models/tiny", "tiny"),
        ("../..", "model"),
        ("..", "model"),
        ("", "model"),
        ("a b:c\n*é", "a-b-c"),
        ("x" * 300, "x" * 100),
    ],
)
def test_default_path(model, folder):
    path = default_run_path(model, datetime(2026, 3, 4, 5, 6, 7))
    assert path == Path("runs") / f"{folder}-20260304-050607"
