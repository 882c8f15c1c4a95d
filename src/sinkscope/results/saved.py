"""Saved results, read again from their folders: story, summary, tables, figures and page, without the model.

A folder may come from anybody, so all that a page draws is checked as in `read_run`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from sinkscope.names import run_path
from sinkscope.results.kinds import kind_of
from sinkscope.results.result import Result
from sinkscope.results.run import Run, Table, read_run
from sinkscope.results.run_folder import RunFolder
from sinkscope.results.tables import Schema


@dataclass(frozen=True, repr=False)
class SavedResult(Result):
    """A result as its folder holds it; the model that it is of is not loaded."""

    run: Run

    @property
    def kind(self) -> str:
        """What it is a result of, such as study."""
        return self.run.kind

    @property
    def story(self) -> str:
        return f"{self.run.answer}\n\n{self.summary.get('counts') or ''}".rstrip()

    @property
    def summary(self) -> dict[str, Any]:
        return self.run.summary

    @property
    def tables(self) -> dict[str, Table]:
        return self.run.tables

    @property
    def schemas(self) -> tuple[Schema, ...]:
        return self.run.schemas

    def as_run(self) -> Run:
        return self.run

    def write(self, folder: RunFolder) -> None:
        """Writes the summary, every table, and what was asked for on which machine into an open run folder."""
        super().write(folder)
        if self.run.config:
            folder.write_yaml("config.yaml", self.run.config)
        if self.run.environment:
            folder.write_json("environment.json", self.run.environment)


def load_result(folder: str | Path) -> Result:
    """The result that a folder holds, with its story, summary, tables, figures and page; its model is not loaded.

        sinkscope.load_result("runs/study").table("claims")

    The folder is one that `.save` or a command wrote. A training run gives the same as `compare_training(folder)`.
    """
    path = run_path(folder)
    kind = kind_of(path)
    if kind.load:
        return import_module(kind.load).load([path])
    return SavedResult(read_run(path))


def write_page_of_run(name: str | Path, out: Path) -> str:
    """Writes the page of a finished run from its files alone, and returns the run's answer. reference:NAME stands for
    the training run of that model."""
    result = load_result(name)
    result.report(out, overwrite=True)
    return result.story.split("\n\n")[0]
