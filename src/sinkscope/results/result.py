"""What every function gives back that finds something out: a story, a summary and tables, which can be shown and saved.

A subclass says what its tables are; the rest follows. Pages and pictures are drawn by a higher layer of the package,
which the package root names in VIEWS. It imports this file, so what takes long to import is imported when used.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinkscope.errors import InputError
from sinkscope.user_paths import user_path

if TYPE_CHECKING:
    import pyarrow
    from matplotlib.figure import Figure

    from sinkscope.results.run_folder import RunFolder

VIEWS: list[str] = []
"""The module that shows results in a notebook and writes their pages."""
MOST_SHOWN = 2000
"""Characters of a story in a repr."""


class Result:
    """What was found out: `story` in a few sentences, `summary` in one JSON object, `tables` in full."""

    # Any: a type checker lets neither a property nor a cached one stand for an attribute with a type.
    headline: Any
    """The table that says most, and those of its columns that a notebook shows."""
    story: Any
    """Text."""
    summary: Any
    """A dictionary, as summary.json."""
    tables: Any
    """Columns by name, by table."""
    schemas: Any
    """The tables, declared: every column with its meaning."""

    def table(self, name: str) -> pyarrow.Table:
        """A table for pyarrow; `.to_pandas()` needs pandas. The fields' metadata say what the columns mean."""
        from sinkscope.results.tables import arrow_table

        found = [schema for schema in self.schemas if schema.name == name]
        if not found:
            raise InputError(
                expected=f"a table: {', '.join(schema.name for schema in self.schemas)}",
                found=repr(name),
                next_step="Choose one of them",
            )
        return arrow_table(found[0], self.tables[name])

    def write(self, folder: RunFolder) -> None:
        """Writes the summary and every table into an open run folder."""
        folder.write_json("summary.json", self.summary)
        self.write_tables(folder)

    def write_tables(self, folder: RunFolder) -> None:
        for schema in self.schemas:
            folder.write_table(schema, self.tables[schema.name])

    def save(self, out: Path | str, *, overwrite: bool = False) -> Path:
        """Writes a run folder, which appears when it is complete; `sinkscope compare` and `.report` read it."""
        from sinkscope.results.run_folder import run_folder

        with run_folder(Path(out), overwrite) as folder:
            self.write(folder)
        return folder.path

    def report(self, out: Path | str, *, overwrite: bool = False) -> Path:
        """Writes the page of this result: one file, which opens without a network. Needs the extra `report`."""
        path = user_path(out)
        view().write_report(self, path, overwrite=overwrite)
        return path

    def plot(self, *names: str) -> Figure:
        """Figures of the page, by name, as one of matplotlib; without names, the chain or those that say most.

        Needs the extra `report`. A name that is not there is refused with those that are.
        """
        return view().plot(self, names)

    def __repr__(self) -> str:
        story = self.story if len(self.story) <= MOST_SHOWN else f"{self.story[:MOST_SHOWN]} ..."
        names = ", ".join(schema.name for schema in self.schemas)
        return f"{type(self).__name__}: {story}\nTables, as .table(name): {names}"

    def _repr_html_(self) -> str:
        """What a notebook shows: the story, the table that says most and, of a chain, its picture."""
        return view().in_notebook(self)


def view() -> Any:
    """The module that shows results, imported when it is first needed."""
    return import_module(VIEWS[0])
