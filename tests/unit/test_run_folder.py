"""A run folder is whole or absent: after an error, Ctrl-C, kill -9, a full disk, and beside an older run."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors import SafetensorError

from sinkscope import atomic
from sinkscope.atomic import locked, whole_file
from sinkscope.audits.prefix import SinkPrefix
from sinkscope.errors import InputError
from sinkscope.fingerprints.signature import Inputs, Signature
from sinkscope.results import run_folder as module
from sinkscope.results.parts import Parts
from sinkscope.results.run_folder import check_output, check_page, default_run_path, remove_run, run_folder
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
        assert folder.path.name == ".run.sinkscope-partial"
    assert folder.path == path
    assert names(path) == {".sinkscope", "summary.json", "config.yaml", "sinks.parquet"}
    assert names(path.parent) == {"run"}
    assert (path / "config.yaml").read_text(encoding="utf-8") == "b:\n- 1\n- é\na: null\n"
    assert read_table(path / "sinks") == {"position": [0, 3]}


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_every_file_has_the_mode_that_the_user_wants(tmp_path, umask, mode):
    """Also one of a library that lets nobody but the owner read it."""
    before = os.umask(umask)
    try:
        with run_folder(tmp_path / "run") as folder:
            (folder.path / "a.safetensors").touch(0o600)  # as safetensors 0.8 does
            folder.write_json("b.json", {})
        with whole_file(tmp_path / "run" / "c.safetensors") as partial:
            partial.chmod(0o600)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "run").iterdir()} == {mode}


def test_files_that_are_saved_alone_have_the_mode_that_the_user_wants(tmp_path):
    """A prefix and a signature. Control: another umask gives another mode."""
    prefix = SinkPrefix(
        ids=(3,), layers=((torch.zeros(1, 1, 1, 2), torch.ones(1, 1, 1, 2)),), fired=(1.0, 0.0), config=None
    )
    hashes = dict(inputs_hash="0", weight_hash="0", dtype="float32")
    about = dict(inputs=Inputs(vocabulary=97), vocabulary=97, config=None, **hashes)
    signature = Signature(name="a", states=torch.zeros(512, 2), embeddings=None, **about)
    for umask, mode in ((0o027, 0o640), (0o002, 0o664)):
        before = os.umask(umask)
        try:
            for saved in (prefix, signature):
                saved.save(tmp_path / f"{type(saved).__name__}.safetensors")
        finally:
            os.umask(before)
        assert [file.stat().st_mode & 0o777 for file in tmp_path.iterdir()] == [mode] * 2


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "rows.json"
    with whole_file(path) as partial:
        partial.write_text("first")
        assert names(tmp_path) == {".rows.json.sinkscope-partial", ".rows.json.sinkscope-lock"}
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
    with pytest.raises(error), run_folder(path, overwrite) as folder:
        folder.write_json("summary.json", {"text": "half"})
        raise error
    assert names(tmp_path) == ({"run"} if overwrite else set())
    if overwrite:
        assert text_of(path) == "before"


def test_existing_folder_is_refused_before_any_work(tmp_path):
    write_run(tmp_path / "run")
    with pytest.raises(InputError, match="`overwrite=True`"), run_folder(tmp_path / "run"):
        pytest.fail("the block must not run")
    with pytest.raises(InputError, match="`overwrite=True`"):
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
    assert names(path) == {".sinkscope", "summary.json"}
    assert names(tmp_path) == {"run"}


def a_home(path: Path) -> None:
    (path / "thesis.tex").write_text("years of work")


def a_project(path: Path) -> None:
    (path / "config.yaml").write_text("model: {}\ntraining: {}\n")
    (path / "summary.json").write_text("{}")
    (path / "environment.json").write_text("{}")


def a_repository(path: Path) -> None:
    a_project(path)
    (path / ".git").mkdir()
    (path / ".git" / "HEAD").write_text("ref: refs/heads/main")


def a_mark_of_somebody_else(path: Path) -> None:
    (path / ".sinkscope").write_text("notes.txt")
    (path / "notes.txt").write_text("mine")


def a_damaged_mark(path: Path) -> None:
    (path / ".sinkscope").write_bytes(b"\xff\x00")


@pytest.mark.parametrize("make", [a_home, a_project, a_repository, a_mark_of_somebody_else, a_damaged_mark])
@pytest.mark.parametrize("linked", [False, True])
def test_a_folder_without_our_mark_is_never_replaced(tmp_path, make, linked):
    folder = tmp_path / "folder"
    folder.mkdir()
    out = tmp_path / "link" if linked else folder
    if linked:
        out.symlink_to(folder)
    check_output(out, overwrite=True)  # the control: an empty folder holds nothing to lose
    make(folder)
    before = {file: file.is_dir() or file.read_bytes() for file in folder.rglob("*")}
    with pytest.raises(InputError, match=r"no \.sinkscope file, so sinkscope did not"), run_folder(out, overwrite=True):
        pytest.fail("the block must not run")
    assert {file: file.is_dir() or file.read_bytes() for file in folder.rglob("*")} == before
    assert names(tmp_path) == {"folder", *(["link"] if linked else [])}


@pytest.mark.parametrize(
    "name",
    ["notes.txt", "model/notes.txt", ".git/HEAD", "checkpoints/notes.txt", "checkpoints/step-1/notes.txt", "link"],
)
def test_a_file_of_the_users_in_a_run_is_named_and_kept(tmp_path, name):
    path = tmp_path / "run"
    for overwrite in (False, True):  # the control: a run of ours alone is replaced
        with run_folder(path, overwrite, later=["metrics.jsonl", "checkpoints/step-*"]) as folder:
            (folder.path / "model").mkdir()
            (folder.path / "model" / "config.json").write_text("{}")
            (folder.path / "odd[1].json").write_text("{}")
        (path / "metrics.jsonl").write_text("")
        with run_folder(path / "checkpoints" / "step-1") as folder:
            folder.write_json("checkpoint.json", {})
        (path / ".metrics.jsonl.sinkscope-partial").write_text("what a killed process left")
    mine = path / name
    mine.parent.mkdir(exist_ok=True)
    if name == "link":
        (tmp_path / "elsewhere").mkdir()
        mine.symlink_to(tmp_path / "elsewhere")
    else:
        mine.write_text("mine")
    with pytest.raises(InputError, match=f"because {name} in it was not written by that run"):
        write_run(path, overwrite=True)
    assert mine.is_symlink() or mine.read_text() == "mine"
    mine.unlink()
    write_run(path, "second", overwrite=True)
    assert text_of(path) == "second"


def test_runs_in_a_folder_or_in_a_run_are_not_its_own(tmp_path):
    write_run(tmp_path / "runs" / "a")
    with pytest.raises(InputError, match=r"runs has no \.sinkscope file, so sinkscope did not write it"):
        write_run(tmp_path / "runs", overwrite=True)
    write_run(tmp_path / "runs" / "a" / "study")
    with pytest.raises(InputError, match=r"because study/\.sinkscope in it was not written by that run"):
        write_run(tmp_path / "runs" / "a", overwrite=True)
    assert text_of(tmp_path / "runs" / "a" / "study") == "first"


def test_the_folder_one_stands_in_is_not_moved_away(tmp_path, monkeypatch):
    write_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run")
    for path in (Path("."), tmp_path / "run"):
        with pytest.raises(InputError, match="started in"):
            check_output(path, overwrite=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="started in"):
        check_output(Path(".."), overwrite=True)
    with pytest.raises(InputError, match="a place inside it"):
        check_output(Path("/"), overwrite=True)
    write_run(Path("run"), "second", overwrite=True)  # the control
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(InputError, match="No such file"):
        check_output(Path("other"))


def test_overwriting_is_offered_only_where_it_would_be_done(tmp_path):
    mine, run, mixed = (tmp_path / name for name in ("mine", "run", "mixed"))
    mine.mkdir()
    (mine / "thesis.txt").write_text("")
    for path in (run, mixed):
        write_run(path, "first")
    (mixed / "thesis.txt").write_text("")
    for path, offered in ((mine, False), (mixed, False), (run, True)):
        with pytest.raises(InputError) as refused:
            check_output(path)
        assert ("overwrite=True" in str(refused.value)) == offered
    check_output(run, overwrite=True)


def test_only_pages_of_ours_are_replaced(tmp_path):
    page = tmp_path / "index.html"
    check_page(page)
    page.write_text("<!doctype html><title>my own page</title>")
    for overwrite, reason in ((False, "There is already a file"), (True, "is not a page that sinkscope wrote")):
        with pytest.raises(InputError, match=reason):
            check_page(page, overwrite)
    page.write_text(f"<!doctype html>\n{module.PAGE_MARK}")
    check_page(page, overwrite=True)  # the control
    with pytest.raises(InputError, match="is a folder, not a page"):
        check_page(tmp_path, overwrite=True)


def test_a_failed_swap_puts_the_old_folder_back(tmp_path, monkeypatch):
    path = tmp_path / "run"
    write_run(path, "before")
    rename = Path.rename

    def fails_for_the_new_one(self, target):
        if self.name.endswith("-partial"):
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
    with pytest.raises(InputError, match=r"no \.sinkscope file, so sinkscope did not"), run_folder(path) as folder:
        folder.write_json("summary.json", {"text": "late"})
        path.mkdir()
        (path / "summary.json").write_text('{"text": "early"}')
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
        left = {"run", ".run.sinkscope-partial", ".run.sinkscope-lock"}
        with pytest.raises(InputError, match="Another run is writing to"):
            check_output(path, overwrite=True)
        assert names(tmp_path) == left  # the control: what a living process writes is left alone
    finally:
        child.kill()
        child.communicate()
    assert names(tmp_path) == left
    assert text_of(path) == "before"
    write_run(path, "after", overwrite=True)
    assert names(tmp_path) == {"run"}
    assert text_of(path) == "after"


def test_kill_without_an_older_run(tmp_path):
    child = start_child(tmp_path / "run")
    child.kill()
    child.communicate()
    assert not (tmp_path / "run").exists()
    left = names(tmp_path)
    write_run(tmp_path / "other")
    assert names(tmp_path) == left | {"other"}  # the leftover of another path is not ours to judge
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
            if self.name.endswith("-partial"):
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
    with pytest.raises(InputError, match="`overwrite=True`"):
        check_output(path)
    assert names(tmp_path) == {"run"}
    assert text_of(path) == "before"


def test_ctrl_c_cleans_up_in_a_real_process(tmp_path):
    child = start_child(tmp_path / "run")
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=900)
    assert child.returncode != 0
    assert names(tmp_path) == set()


def test_one_writer_at_a_time(tmp_path):
    path = tmp_path / "deep" / "run"
    refused = []

    def second():
        with pytest.raises(InputError, match="Another run is writing to"), locked(path):
            pytest.fail("the block must not run")
        with locked(tmp_path / "deep" / "other"):  # the control
            refused.append(True)

    with locked(path):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        assert refused
        (tmp_path / "link").symlink_to(tmp_path / "deep")
        with locked(tmp_path / "link" / "run"):  # one's own lock is taken again, by any name of the folder
            pass
        assert names(path.parent) == {".run.sinkscope-lock"}
    assert names(tmp_path) == {"link"}  # the folder made for the lock went with it
    with pytest.raises(RuntimeError), locked(path):
        raise RuntimeError
    with locked(path):  # an error gives it back
        path.mkdir()
    assert names(tmp_path / "deep") == {"run"}


def test_of_many_writers_at_once_one_writes_and_the_others_are_refused(tmp_path):
    """Each holds the lock for a moment only, so that releases and openings meet."""
    path, inside, most = tmp_path / "run", [], []

    def write():
        for _ in range(200):
            try:
                with locked(path):
                    inside.append(1)
                    most.append(len(inside))
                    inside.pop()
            except InputError:
                pass

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(most) == {1}
    assert len(most) < 800  # the control: they did meet
    assert names(tmp_path) == set()


def test_what_is_half_removed_is_still_ours(tmp_path, monkeypatch):
    path = tmp_path / "run"
    write_run(path)
    with monkeypatch.context() as patch:
        patch.setattr(module.shutil, "rmtree", lambda path: None)  # killed on the way
        remove_run(path)
    assert names(path) == {".sinkscope"}
    check_output(path, overwrite=True)
    remove_run(path)
    assert names(tmp_path) == set()


@pytest.mark.parametrize(
    ("code", "next_step"),
    [(errno.ENOSPC, "Free some space"), (errno.EDQUOT, "Free some space"), (errno.EFBIG, "ulimit -f")],
)
def test_a_file_that_cannot_grow_is_the_persons_error(tmp_path, monkeypatch, code, next_step):
    path = tmp_path / "run"
    write_run(path, "before")

    def full(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(module.tables, "write_table", full)
    with pytest.raises(InputError, match=next_step), run_folder(path, overwrite=True) as folder:
        folder.write_json("summary.json", {"text": "half"})
        folder.write_table(SCHEMA, {"position": [0]})
    assert names(tmp_path) == {"run"}
    assert text_of(path) == "before"


def test_a_limit_on_file_sizes_is_the_persons_error(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(InputError, match=r"File too large.*ulimit -f"), run_folder(tmp_path / "run") as folder:
            folder.write_text("long.txt", "a" * 2000)
        with (
            pytest.raises(InputError, match=f"{tmp_path}/run/page.html: "),
            run_folder(tmp_path / "run") as folder,
            module.explained(folder.path / "page.html"),
        ):
            folder.write_text("page.html", "a" * 2000)
        assert names(tmp_path) == set()
        write_run(tmp_path / "run")  # control: what is short enough is written
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def full_by_safetensors(tensors, path):
    path.write_bytes(b"half")
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def full_by_the_system(tensors, path):
    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


def test_parts_whose_request_is_damaged_are_made_anew(tmp_path):
    def parts():
        return Parts(tmp_path / "run", {"seed": 0})

    parts().save("one", {"a": np.arange(3)})
    assert parts().load("one") is not None, "control"
    (tmp_path / ".run.sinkscope-parts" / "request.json").write_bytes(b"\xff")
    assert parts().load("one") is None


@pytest.mark.parametrize("full", [full_by_safetensors, full_by_the_system])
def test_a_disk_that_fills_up_under_parts_costs_no_finished_part(tmp_path, monkeypatch, full):
    parts = Parts(tmp_path / "run", {"seed": 0})
    parts.save("one", {"a": np.arange(3)})
    with monkeypatch.context() as patch:
        patch.setattr("sinkscope.results.parts.save_file", full)
        with pytest.raises(InputError, match="Free some space"):
            parts.save("two", {"a": np.arange(4)})
    parts = Parts(tmp_path / "run", {"seed": 0})
    assert (parts.load("one") or {})["a"].tolist() == [0, 1, 2]
    assert parts.load("two") is None
    assert Parts(tmp_path / "run", {"seed": 1}).load("one") is None  # the control: of another request


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


def test_a_parent_that_refuses_is_found_by_the_lock(tmp_path, monkeypatch):
    """The same promise wherever mounting is not permitted and the tests run as root."""

    def refuse(path, *_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    check_output(tmp_path / "run")  # the control
    monkeypatch.setattr(atomic.os, "open", refuse)
    with pytest.raises(InputError, match=r"Permission denied.*`out`"):
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
