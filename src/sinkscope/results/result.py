"""The base of every result: a story, a summary and tables, which can be shown, drawn and saved.

A subclass says what its tables are and names its kind, whose page module draws it; the rest follows. What takes long
to import is imported when it is used.
"""

from __future__ import annotations

import base64
import io
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinkscope.errors import InputError
from sinkscope.user_paths import user_path

if TYPE_CHECKING:
    import pyarrow
    from matplotlib.figure import Figure as Drawing

    from sinkscope.pages.figure import Figure
    from sinkscope.results.kinds import Kind
    from sinkscope.results.run import Run
    from sinkscope.results.run_folder import RunFolder

MOST_SHOWN = 2000
"""Characters of a story in a repr."""
MOST_ROWS = 40
"""Rows that a notebook shows."""
SMALL_DPI = 50
"""Of the picture beside a story."""


class Result:
    """A result: `story` in a few sentences, `summary` as one JSON object, `tables` in full."""

    # Any: a type checker lets neither a property nor a cached one stand for an attribute with a type.
    kind: Any
    """What it is a result of, such as study; each product declares its own in `schemas.py`."""
    story: Any
    """Text."""
    summary: Any
    """A dictionary, as summary.json."""
    tables: Any
    """Columns by name, by table."""
    schemas: Any
    """The tables, declared: every column with its meaning."""

    @property
    def headline(self) -> tuple[str, ...]:
        """The table that says most, and those of its columns that a notebook shows."""
        return self._declared.headline

    @property
    def lacking(self) -> Sequence[str]:
        """Names of observables that its page needs and that it does not have."""
        return ()

    def table(self, name: str) -> pyarrow.Table:
        """A table for pyarrow; `.to_pandas()` needs pandas. The fields' metadata say what the columns mean."""
        from sinkscope.results.tables import arrow_table

        by_name = {schema.name: schema for schema in self.schemas}
        if name not in by_name:
            raise InputError(f"There is no table {name!r}. Choose one of these: {', '.join(by_name)}.")
        return arrow_table(by_name[name], self.tables[name])

    def write(self, folder: RunFolder) -> None:
        """Writes the summary and every table into an open run folder."""
        folder.write_json("summary.json", self.summary)
        self.write_tables(folder)

    def write_tables(self, folder: RunFolder) -> None:
        """Writes every table into an open run folder."""
        for schema in self.schemas:
            folder.write_table(schema, self.tables[schema.name])

    def write_for_page(self, folder: RunFolder) -> None:
        """Writes what the page is drawn from; the same, unless a subclass leaves out what no page shows."""
        self.write(folder)

    def save(self, out: Path | str, *, overwrite: bool = False) -> Path:
        """Writes a run folder, which appears when it is complete; `sinkscope compare` and `.report` read it."""
        from sinkscope.results.run_folder import run_folder

        with run_folder(Path(out), overwrite) as folder:
            self.write(folder)
        return folder.path

    def report(self, out: Path | str, *, overwrite: bool = False) -> Path:
        """Writes the page of this result: one file, which opens without a network."""
        from sinkscope.results.run_folder import check_page

        path = user_path(out)
        check_page(path, overwrite)
        self._check_whole()
        import_module(self._declared.page).write_page(self.as_run(), path)
        return path

    def plot(self, *names: str) -> Drawing:
        """Figures of the page, by name, as one matplotlib figure; without names, the chain or the main figures.

        Needs the extra `plot`. A name that is not there is refused with those that are.
        """
        from sinkscope.pages.drawn import drawing

        self._check_whole()
        kind = self._declared
        by_id = {figure.id: figure for figure in self.figures()}
        if unknown := [name for name in names if name not in by_id]:
            raise InputError(f"There is no figure {unknown[0]!r}. Choose some of these: {', '.join(by_id)}.")
        main = [name for name in kind.main_figures if name in by_id]
        title = "" if names or not kind.is_pictured else f"{self.summary['model']}: {self.summary['story']}"
        return drawing([by_id[name] for name in names or main or list(by_id)[:1]], title)

    def figures(self) -> list[Figure]:
        """The figures of the page."""
        return import_module(self._declared.page).figures(self.as_run())

    def as_run(self) -> Run:
        """The result as `read_run` reads it from a folder; pages are drawn from that."""
        from sinkscope.results.run import read_run
        from sinkscope.results.run_folder import run_folder

        with tempfile.TemporaryDirectory() as parent:
            with run_folder(Path(parent) / "run", False) as folder:
                self.write_for_page(folder)
            return read_run(folder.path)

    @property
    def _declared(self) -> Kind:
        from sinkscope.results.kinds import kinds

        return kinds()[self.kind]

    def _check_whole(self) -> None:
        if self.lacking:
            raise InputError(
                f"The page of a trace needs all observables, and this one lacks {', '.join(self.lacking)}. "
                "Leave `observables` out, or read its `tables`."
            )

    def __repr__(self) -> str:
        story = self.story if len(self.story) <= MOST_SHOWN else f"{self.story[:MOST_SHOWN]} ..."
        names = ", ".join(schema.name for schema in self.schemas)
        return f"{type(self).__name__}: {story}\nTables, as .table(name): {names}"

    def _repr_html_(self) -> str:
        """What a notebook shows, without script and without a network: the story, the table that says most and, of a
        chain, its picture."""
        from sinkscope.pages import html

        name, *columns = self.headline
        table = self.tables.get(name) or {column: [] for column in columns}
        answer, *below = self.story.split("\n\n")
        return html.render(
            "results/notebook.html",
            name=type(self).__name__,
            answer=answer,
            below=below,
            table=name,
            columns=[column.replace("_", " ") for column in columns],
            rows=list(zip(*(list(table[column])[:MOST_ROWS] for column in columns), strict=True)),
            num_rows=len(table[columns[0]]),
            picture=self._picture(),
        )

    def _picture(self) -> str:
        """The picture of a chain in base64; empty where there is none to draw."""
        from sinkscope.pages.drawn import can_draw

        if not self._declared.is_pictured or self.lacking or not can_draw():
            return ""
        image = io.BytesIO()
        self.plot().savefig(image, format="png", dpi=SMALL_DPI)
        return base64.b64encode(image.getvalue()).decode()
