"""Finished parts of long work, kept beside the run folder until the run is complete, so that it can be resumed.

Parts belong to one request: a different request at the same place starts anew. Each is written to a temporary name and
moved, so a part that exists is complete.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Mapping
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from sinkscope import processes
from sinkscope.atomic import CANNOT_GROW, explained, hidden_sibling, whole_file
from sinkscope.user_paths import user_path


class Parts:
    """A hidden folder of named arrays. Without a path nothing is kept."""

    def __init__(self, run_path: Path | None, request: Mapping[str, Any]) -> None:
        self.path = None if run_path is None else hidden_sibling(user_path(run_path).resolve(), "parts")
        self._request = json.dumps(request, sort_keys=True, default=str)
        self._prefix = ""

    def within(self, name: str) -> Parts:
        """Parts of the same request with names of their own."""
        inner = copy(self)
        inner._prefix = f"{self._prefix}{name}-"
        return inner

    @cached_property
    def _folder(self) -> Path | None:
        """The folder, made or cleared for this request on first use, since a refused run must change nothing."""
        if self.path is None:
            return None
        with explained(self.path, only=CANNOT_GROW):
            stated = self.path / "request.json"
            if stated.is_file() and stated.read_bytes() == self._request.encode():
                return self.path
            if self.path.exists():
                shutil.rmtree(self.path)
            self.path.mkdir(parents=True)
            with whole_file(stated) as partial:
                partial.write_text(self._request, encoding="utf-8")
        return self.path

    def _file(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{self._prefix}{name}.safetensors"

    def prepare(self) -> None:
        """Makes or clears the folder now: of several processes that share it, one must come before the others."""
        _ = self._folder

    def load(self, name: str, holds: Collection[str] = ()) -> dict[str, np.ndarray] | None:
        """The arrays of a part; None if it is not finished, or lacks what it must hold: an earlier version wrote it."""
        if self._folder is None or not (file := self._file(name)).is_file():
            return None
        try:
            arrays = load_file(file)
        except SafetensorError:  # cut off by a full disk or a power cut: to be made again
            return None
        return arrays if arrays.keys() >= set(holds) else None

    def save(self, name: str, arrays: Mapping[str, np.ndarray]) -> None:
        if self._folder is None:
            return
        with explained(self._folder, only=CANNOT_GROW), whole_file(self._file(name)) as partial:
            save_file({key: np.ascontiguousarray(value) for key, value in arrays.items()}, partial)

    def kept(
        self, name: str, holds: Collection[str], make: Callable[[], dict[str, np.ndarray] | None]
    ) -> dict[str, np.ndarray] | None:
        """The arrays of a part, or what `make` gives in its place, kept unless it is None.

        Under torchrun the first process reads and writes for all, and all of them make it: they may share the work.
        """
        arrays = processes.from_first(lambda: self.load(name, holds))
        if arrays is None and (arrays := make()) is not None and processes.rank() == 0:
            self.save(name, arrays)
        return arrays

    def discard(self) -> None:
        """Removes the parts, once the run they belong to is complete."""
        if self.path is not None:
            shutil.rmtree(self.path, ignore_errors=True)
