"""A run as a folder that appears only when it is complete, with a mark that says that sinkscope wrote it.

Everything is written into a hidden sibling, which is renamed when it is complete. The mark, `.sinkscope`, lists the
files that we wrote. A folder is replaced only if it has a mark and no other files: what somebody else put there is
never removed.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from datetime import datetime
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from sinkscope.atomic import (
    CANNOT_GROW,
    explained,
    flush,
    hidden_sibling,
    is_hidden_sibling,
    locked,
    whole_file,
)
from sinkscope.errors import InputError
from sinkscope.results import tables
from sinkscope.results.validated import read_yaml
from sinkscope.user_paths import user_path

MARK = ".sinkscope"
PAGE_MARK = '<meta name="generator" content="sinkscope">'
_FIRST_LINE = "Written by sinkscope, which replaces this folder only while it holds no other files than these:"
_REPLACE = "Choose another `out`, or replace it with `overwrite=True`."


class RunFolder:
    """Writes the files of a run. `path` is the hidden folder while the run goes on, and the final one after it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write_json(self, name: str, value: Any) -> Path:
        """The path of `name` (with its suffix), holding `value` as strict JSON: NaN is null, infinity an error."""
        text = json.dumps(_plain(value, name), ensure_ascii=False, indent=2, allow_nan=False)
        return self.write_text(name, text + "\n")

    def write_yaml(self, name: str, value: Any) -> Path:
        """The path of `name` (with its suffix), holding `value` as YAML in the key order given."""
        import yaml

        return self.write_text(name, yaml.safe_dump(_plain(value, name), sort_keys=False, allow_unicode=True))

    def write_table(self, schema: tables.Schema, data: Mapping[str, Sequence | np.ndarray]) -> Path:
        """The path of the table, named after its schema."""
        return tables.write_table(schema, data, self.path / schema.name)

    def write_text(self, name: str, text: str) -> Path:
        """The path of `name` (with its suffix), holding `text`."""
        path = self.path / name
        with whole_file(path) as partial:
            partial.write_text(text, encoding="utf-8", newline="\n")
        return path


@contextmanager
def run_folder(path: Path, overwrite: bool = False, *, later: Sequence[str] = ()) -> Iterator[RunFolder]:
    """A RunFolder whose files appear at `path`, all at once, when the block ends without an exception.

    Any exception, Ctrl-C included, removes what was written and leaves an existing folder as it was. `later` names
    what the run itself will add to the folder: files, and run folders, with * for any letters.
    """
    with locked(path):
        check_output(path, overwrite)
        path = user_path(path).resolve()
        partial = hidden_sibling(path, "partial")
        try:
            with explained(path):
                partial.mkdir()
            folder = RunFolder(partial)
            with explained(path, only=CANNOT_GROW):  # other errors in the block need not be about this folder
                yield folder
                _mark(partial, later)
            with explained(path):
                _flush_all(partial)
                _move_into_place(partial, path, overwrite)
            folder.path = path
        except BaseException:
            # ignore_errors: trouble while cleaning up must not hide what went wrong.
            shutil.rmtree(partial, ignore_errors=True)
            raise


def check_output(path: Path, overwrite: bool = False) -> None:
    """Returns if a run can be written to `path`, else raises InputError; commands call it before any work.

    It also clears what runs to this path left behind when they were killed.
    """
    with locked(path), explained(path):
        path = user_path(path).resolve()
        _clear_leftovers(path)
        _check_existing(path, overwrite)


def check_page(path: Path, overwrite: bool = False) -> None:
    """Returns if a page can be written to `path`, else raises InputError; only a page of ours is replaced."""
    path = user_path(path)
    with explained(path):
        if not path.exists():
            return
        if path.is_dir():
            raise InputError(f"{path} is a folder, not a page. Choose another `out`.")
        if not overwrite:
            raise InputError(f"There is already a file {path}. {_REPLACE}")
        with path.open("rb") as file:
            is_ours = PAGE_MARK.encode() in file.read(1 << 10)
    if not is_ours:
        raise InputError(
            f"{path} is not a page that sinkscope wrote, so it is not replaced. "
            "Choose another `out`, or remove it yourself."
        )


def remove_run(path: Path) -> None:
    """Removes a folder that `run_folder` wrote. The mark goes last, so that a killed removal can be repeated."""
    for entry in path.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != MARK:
            entry.unlink()
    shutil.rmtree(path)


@dataclass(frozen=True)
class OfTraining:
    """What the config.yaml of a training run alone holds."""

    model: dict[str, Any]
    training: dict[str, Any]


def is_training_run(folder: Path) -> bool:
    """Whether `pretrain` made this folder, finished or not: its config.yaml alone describes a model and its training.

    It is here and not in `pretrain` for callers that must know before torch is imported.
    """
    try:
        read_yaml(folder / "config.yaml", OfTraining)
    except InputError:
        return False
    return True


def tables_path(page: Path) -> Path:
    """The folder beside a page that holds the tables of the training runs that it compares."""
    return page.with_name(f"{page.stem}-tables")


def default_run_path(model_name: str, now: datetime) -> Path:
    """runs/<model>-<YYYYmmdd-HHMMSS>; a local path is named by its last part, odd characters become dashes."""
    if model_name.startswith(("/", "~", ".")):
        model_name = Path(model_name).name
    safe_name = re.sub(r"[^A-Za-z0-9._-]+", "-", model_name).strip("-.")[:100] or "model"
    return Path("runs") / f"{safe_name}-{now:%Y%m%d-%H%M%S}"


def _check_existing(path: Path, overwrite: bool) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        raise InputError(f"{path} is a file, and a run is a folder. Choose another `out`.")
    if Path.cwd().is_relative_to(path):
        raise InputError(
            f"{path} cannot be replaced, because this command was started in it. "
            "Change to another folder first, or choose another `out`."
        )
    if any(path.iterdir()) and not _marked(path):
        raise InputError(
            f"{path} has no {MARK} file, so sinkscope did not write it and does not replace it. "
            "Choose another `out`, or remove it yourself."
        )
    if (foreign := next(_foreign(path, path), None)) is not None:
        raise InputError(
            f"{path} is not replaced, because {foreign.relative_to(path)} in it was not written by that run. "
            "Choose another `out`, or move that file elsewhere."
        )
    if not overwrite:
        raise InputError(f"There is already a folder {path}. {_REPLACE}")


def _foreign(run: Path, folder: Path) -> Iterator[Path]:
    """Files in a run's folder that its mark does not list; links are not followed."""
    listed = _marked(run)
    for entry in sorted(folder.iterdir()):
        name = entry.relative_to(run).as_posix()
        is_ours = name in listed or any(fnmatchcase(name, pattern) for pattern in listed)
        if is_hidden_sibling(entry):
            continue
        if entry.is_dir() and not entry.is_symlink():
            yield from _foreign(entry if is_ours else run, entry)
        elif not is_ours:
            yield entry


def _mark(folder: Path, later: Sequence[str]) -> None:
    written = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if not file.is_dir()}
    lines = [_FIRST_LINE, *sorted(written | {MARK, *later})]
    (folder / MARK).write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
    # safetensors lets nobody but the owner read what it writes; the mark has the mode that the user's umask gives.
    for name in written:
        shutil.copymode(folder / MARK, folder / name)


def _marked(folder: Path) -> list[str]:
    """What the mark in a folder lists; nothing where there is no mark."""
    try:
        first, *names = (folder / MARK).read_text(encoding="utf-8").splitlines() or [""]
    except (OSError, UnicodeDecodeError):
        return []
    return names if first == _FIRST_LINE else []


def _clear_leftovers(path: Path) -> None:
    """Removes what a killed run to `path` left, and puts back a folder that was moved aside for a successor that died.

    Nobody else is writing them: the lock is ours.
    """
    replaced, partial = hidden_sibling(path, "replaced"), hidden_sibling(path, "partial")
    if replaced.exists() and not path.exists():
        replaced.rename(path)
    for leftover in (replaced, partial):
        if leftover.exists():
            shutil.rmtree(leftover)


def _flush_all(folder: Path) -> None:
    """Without this a power cut after the rename could leave a folder of empty files."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            flush(Path(parent) / name)
        flush(Path(parent))


def _move_into_place(partial: Path, path: Path, overwrite: bool) -> None:
    _check_existing(path, overwrite)  # again: somebody may have written there in the meantime
    replaced = hidden_sibling(path, "replaced")
    is_there = path.exists()
    try:
        if is_there:
            path.rename(replaced)
        partial.rename(path)
    except BaseException:
        if replaced.exists() and not path.exists():
            replaced.rename(path)
        raise
    flush(path.parent)
    if is_there:
        shutil.rmtree(replaced, ignore_errors=True)


def _plain(value: Any, where: str) -> Any:
    """`value` in the types JSON has; `where` names the entry in an error."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isinf(value):
            raise ValueError(f"{where}: JSON has no infinity")
        return None if math.isnan(value) else value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str | int | np.integer) or isinstance(key, bool):
                raise ValueError(f"{where}: a key must be a string or an int, found {key!r}")
        return {str(key): _plain(item, f"{where}: {key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise ValueError(f"{where}: JSON has no {type(value).__name__}")
