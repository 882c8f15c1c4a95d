"""A run as a folder that is whole or absent.

Everything is written into a hidden sibling, `.<name>.<pid>-<host>-<random>.partial`, and renamed when it is complete. A
process that is killed leaves that sibling behind; the next run to the same path sees its owner dead and removes it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import platform
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from sinkscope.errors import InputError
from sinkscope.results import tables

# A folder that holds one of these was written by a run; --overwrite deletes no other folder.
_SIGNS_OF_A_RUN = ("config.yaml", "environment.json", "summary.json")
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class RunFolder:
    """Writes the files of a run. `path` is the hidden folder while the run goes on, and the final one after it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write_json(self, name: str, value: Any) -> Path:
        """The path of `name` (with its suffix), holding `value` as strict JSON: NaN is null, infinity an error."""
        text = json.dumps(_plain(value, name), ensure_ascii=False, indent=2, allow_nan=False)
        return self._write_text(name, text + "\n")

    def write_yaml(self, name: str, value: Any) -> Path:
        """The path of `name` (with its suffix), holding `value` as YAML in the key order given."""
        import yaml

        return self._write_text(name, yaml.safe_dump(_plain(value, name), sort_keys=False, allow_unicode=True))

    def write_table(self, schema: tables.Schema, data: Mapping[str, Sequence | np.ndarray]) -> Path:
        """The path of the table, named after its schema."""
        return tables.write_table(schema, data, self.path / schema.name)

    def _write_text(self, name: str, text: str) -> Path:
        path = self.path / name
        path.write_text(text, encoding="utf-8", newline="\n")
        return path


@contextmanager
def run_folder(path: Path, overwrite: bool = False) -> Iterator[RunFolder]:
    """A RunFolder whose files appear at `path`, all at once, when the block ends without an exception.

    Any exception, Ctrl-C included, removes what was written and leaves an existing folder as it was.
    """
    check_output(path, overwrite)
    path = Path(path).resolve()
    partial = _hidden_sibling(path, "partial")
    try:
        with explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.mkdir()
        folder = RunFolder(partial)
        with explained(path, only=DISK_FULL):  # other errors in the block need not be about this folder
            yield folder
        with explained(path):
            _flush_to_disk(partial)
            _move_into_place(partial, path, overwrite)
        folder.path = path
    except BaseException:
        # ignore_errors: trouble while cleaning up must not hide what went wrong.
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A hidden sibling to write, which becomes the file `path` when the block ends without an exception."""
    partial = _hidden_sibling(path, "partial")
    try:
        yield partial
        _fsync(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def check_output(path: Path, overwrite: bool = False) -> None:
    """Returns if a run can be written to `path`, else raises InputError; commands call it before any work.

    It also clears what runs to this path left behind when they were killed.
    """
    with explained(path):
        path = Path(path).resolve()
        _clear_leftovers(path)
        _check_existing(path, overwrite)
        # The probe is the only honest question: for root, os.access says yes to a folder that refuses.
        ancestor = next(folder for folder in path.parents if folder.exists())
        probe = _hidden_sibling(ancestor / path.name, "partial")
        probe.mkdir()
        probe.rmdir()


def is_training_run(folder: Path) -> bool:
    """Whether `pretrain` made this folder, finished or not: its config.yaml alone describes a model and its training.

    It stands here, not in `pretrain`, for those who must know it before they wait for torch.
    """
    import yaml

    try:
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return False
    return isinstance(config, dict) and all(isinstance(config.get(key), dict) for key in ("model", "training"))


def check_page(path: Path, overwrite: bool = False) -> None:
    """Returns if a page can be written to `path`, else raises InputError."""
    if path.is_dir() or (path.exists() and not overwrite):
        raise InputError(
            expected=f"no file at {path} yet",
            found="a folder" if path.is_dir() else "one that exists",
            next_step="Choose another with --out, or replace it with --overwrite",
        )


def default_run_path(model_name: str, now: datetime) -> Path:
    """runs/<model>-<YYYYmmdd-HHMMSS>; a local path is named by its last part, odd characters become dashes."""
    if Path(model_name).expanduser().is_absolute() or model_name.startswith("."):
        model_name = Path(model_name).name
    safe_name = re.sub(r"[^A-Za-z0-9._-]+", "-", model_name).strip("-.")[:100] or "model"
    return Path("runs") / f"{safe_name}-{now:%Y%m%d-%H%M%S}"


def _check_existing(path: Path, overwrite: bool) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        raise InputError(
            expected=f"a folder at {path}, or nothing", found="a file", next_step="Choose another with --out"
        )
    if not overwrite:
        raise InputError(
            expected=f"no folder at {path} yet",
            found="one that exists",
            next_step="Choose another with --out, or replace it with --overwrite",
        )
    if any(path.iterdir()) and not any((path / name).is_file() for name in _SIGNS_OF_A_RUN):
        raise InputError(
            expected=f"a run in {path}, to overwrite",
            found="a folder with other files, which would be deleted",
            next_step="Choose another with --out",
        )


def _hidden_sibling(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}-{_host()}-{uuid.uuid4().hex[:8]}.{kind}")


def _host() -> str:
    # On a shared file system a process id of another machine says nothing here. A hash: the name is nobody's business.
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def _clear_leftovers(path: Path) -> None:
    """Removes what dead runs to `path` left, and puts back a folder that was moved aside when its replacement died."""
    if not path.parent.is_dir():
        return
    pattern = re.compile(rf"\.{re.escape(path.name)}\.(\d+)-{_host()}-[0-9a-f]{{8}}\.(partial|replaced)")
    for sibling in list(path.parent.iterdir()):
        match = pattern.fullmatch(sibling.name)
        if match is None or _is_alive(int(match[1])):
            continue
        if match[2] == "replaced" and not path.exists():
            sibling.rename(path)
        else:
            shutil.rmtree(sibling, ignore_errors=True)


def _is_alive(process_id: int) -> bool:
    if os.name != "posix":
        return True  # there os.kill with signal 0 ends the process instead of asking
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _flush_to_disk(folder: Path) -> None:
    """Without this a power cut after the rename could leave a folder of empty files."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            _fsync(Path(parent) / name)
        _fsync(Path(parent))


def _fsync(path: Path) -> None:
    if os.name != "posix" and path.is_dir():
        return  # other systems cannot open a folder
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _move_into_place(partial: Path, path: Path, overwrite: bool) -> None:
    _check_existing(path, overwrite)  # again: another run may have written there in the meantime
    replaced = _hidden_sibling(path, "replaced") if path.exists() else None
    try:
        if replaced is not None:
            path.rename(replaced)
        partial.rename(path)
    except BaseException:
        if replaced is not None and replaced.exists() and not path.exists():
            replaced.rename(path)
        raise
    _fsync(path.parent)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def explained(path: Path, only: tuple[int, ...] | None = None) -> Iterator[None]:
    """Turns an OSError, of any kind or of the kinds in `only`, into an InputError about writing to `path`."""
    try:
        yield
    except OSError as error:
        if only is not None and error.errno not in only:
            raise
        full = error.errno in DISK_FULL
        raise InputError(
            expected=f"to be able to write the run to {path}",
            found=error.strerror or str(error),
            next_step=f"{'Free some space, or choose' if full else 'Choose'} another folder with --out",
        ) from error


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
