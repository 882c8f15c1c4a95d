"""Writing that is whole or absent, by one process at a time.

What is being written lies beside its place under a hidden name, `.<name>.sinkscope-<kind>`: the lock, the partial, what
it replaces, and finished parts. The kernel drops a lock when its process ends. So whoever holds the lock knows that
other hidden siblings were left by a killed process.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from sinkscope.errors import InputError
from sinkscope.user_paths import user_path

SPACE = "Free some space"
CANNOT_GROW = {errno.ENOSPC: SPACE, errno.EDQUOT: SPACE, errno.EFBIG: "Raise the limit on file sizes (ulimit -f)"}
"""Errors of the system when a file can take no more bytes, with what to do."""

_holders: dict[Path, int] = {}
"""The thread of this process that holds the lock of a path."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keeps every other process, and thread, from writing to `path` while the block runs; the second is refused.

    A thread may take a lock that it holds already. Missing parents are made, and go again if nothing was written.
    """
    with explained(path):  # a folder that this command was started in may be gone
        path = user_path(path).resolve()
    if _holders.get(path) == threading.get_ident():
        yield
        return
    with explained(path):
        missing = [folder for folder in path.parents if not folder.exists()]
    try:
        with explained(path):
            for folder in reversed(missing):
                folder.mkdir(exist_ok=True)
            if not path.parent.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "")
            lock = hidden_sibling(path, "lock")
            file_lock = _acquired(lock, path)
        _holders[path] = threading.get_ident()
        try:
            yield
        finally:
            del _holders[path]
            # Before the lock is dropped: whoever opened this file meanwhile sees that it has no name any more.
            lock.unlink(missing_ok=True)
            file_lock.release()
    finally:
        for folder in missing:
            with suppress(OSError):  # not empty: what was written is in it
                folder.rmdir()


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A hidden sibling to write, which becomes the file `path` when the block ends without an exception.

    It has the mode that the user's umask gives: safetensors lets nobody but the owner read what it writes.
    """
    path = user_path(path)
    with locked(path):
        partial = hidden_sibling(path, "partial")
        partial.unlink(missing_ok=True)  # left by a killed process, with a mode of its own
        try:
            partial.touch()
            mode = partial.stat().st_mode
            yield partial
            partial.chmod(mode)
            flush(partial)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def explained(path: Path, only: Container[int] | None = None) -> Iterator[None]:
    """Turns an error of the operating system into an InputError about writing to `path`.

    With `only`, just errors with these numbers; others pass unchanged.
    """
    try:
        yield
    except Exception as error:
        code = error.errno if isinstance(error, OSError) else _code_in_text(error)
        if code is None or (only is not None and code not in only):
            raise
        remedy = f"{CANNOT_GROW[code]}, or choose" if code in CANNOT_GROW else "Choose"
        final = re.sub(r"(^|/)\.([^/]+)\.sinkscope-partial\b", r"\1\2", str(path))
        raise InputError(f"Cannot write to {final}: {os.strerror(code)}. {remedy} another `out`.") from error


def hidden_sibling(path: Path, kind: str) -> Path:
    """Where the lock, the partial, the parts or the replaced one of `path` lies."""
    if not path.name:
        raise InputError(f"Cannot write to {path} itself, only to a place inside it. Choose another `out`.")
    return path.with_name(f".{path.name}.sinkscope-{kind}")


def is_hidden_sibling(path: Path) -> bool:
    """Whether `path` has the name of something that is being written, or that a killed process left."""
    return re.fullmatch(r"\..+\.sinkscope-(lock|partial|replaced|parts)", path.name) is not None


def flush(path: Path) -> None:
    """Returns when the bytes of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _acquired(lock: Path, path: Path) -> FileLock:
    """The lock, acquired; refused at once if another run holds it."""
    file_lock = FileLock(lock, timeout=0)
    try:
        file_lock.acquire()
    except Timeout:
        raise InputError(f"Another run is writing to {path}. Wait until it ends, or choose another `out`.") from None
    return file_lock


def _code_in_text(error: Exception) -> int | None:
    """The system's error number in a message: libraries in Rust (safetensors, tokenizers) give it only there."""
    match = re.search(r"\(os error (\d+)\)", str(error))
    return None if match is None else int(match[1])
