"""Paths as users type them."""

from __future__ import annotations

import errno
import os
import reprlib
from pathlib import Path
from typing import Any

from sinkscope.errors import InputError


def check_path(name: str, value: Any, *, expected: str = "a path") -> str | Path:
    """The value itself; refused where it is neither text nor a Path. `name` is the parameter's."""
    if not isinstance(value, str | Path):
        raise InputError(f"`{name}` must be {expected} as text or a Path, not {reprlib.repr(value)}.")
    return value


def user_path(path: str | Path) -> Path:
    """The path that a user typed, with ~ as home; refused if no file can have this name.

    `exists`, `is_dir` and the like raise no error on the path returned.
    """
    expanded = Path(path)
    try:
        expanded = expanded.expanduser()
        expanded.stat()
        return expanded
    except (RuntimeError, ValueError) as error:  # no such user; a NUL in the name
        reason = str(error).rstrip(".")
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return expanded
        reason = os.strerror(error.errno or 0)
    name = str(path)
    shortened = name if len(name) <= 200 else f"{name[:100]}... of {len(name):,} characters"
    raise InputError(f"Cannot open the path {shortened!r}: {reason}. Check it, or give another.")
