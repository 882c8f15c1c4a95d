"""Paths as users type them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from sinkscope.errors import InputError


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
        found = str(error).rstrip(".")
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return expanded
        found = os.strerror(error.errno or 0)
    name = str(path)
    raise InputError(
        expected="a path that can be opened",
        found=f"{name if len(name) <= 200 else f'{name[:100]}... of {len(name):,} characters'!r}: {found}",
        next_step="Check it, or give another",
    )
