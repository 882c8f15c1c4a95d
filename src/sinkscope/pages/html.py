"""One HTML file that contains its style, script and data, from a template.

It opens from disk and loads nothing. Templates escape every string, and show its control and reordering characters as
symbols.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from sinkscope.atomic import explained, whole_file
from sinkscope.pages.figure import Figure
from sinkscope.pages.text import NO_VALUE, interval, isolated, number, script_json, token_text, visible

if TYPE_CHECKING:
    from jinja2 import Environment, Template
    from markupsafe import Markup

# Verdict as (symbol, class): the word stands beside the symbol, so neither colour nor shape is needed alone.
VERDICTS = {
    "holds": ("\u2713", "holds"),
    "does not hold": ("\u2717", "fails"),
    "undecided": ("?", "open"),
    "not applicable": (NO_VALUE, "none"),
}
FileName = Callable[[str], str]
"""Names the file that holds a table, as seen from the page."""
MAX_ROWS = 400
"""Rows of a table under a figure; the Parquet holds all of them."""


@cache
def environment() -> Environment:
    """The templates of every folder of sinkscope, named by their place in it, such as studies/page.html."""
    # Here, since jinja2 takes a while to import and the command line reads names of this module.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = Environment(
        loader=FileSystemLoader(list(sys.modules["sinkscope"].__path__)),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"number": number, "interval": interval, "isolated": _isolated, "token_text": token_text}
    templates.tests |= {"link": lambda value: isinstance(value, Link), "all_numbers": _all_numbers}
    templates.globals |= {
        "verdicts": VERDICTS,
        "no_value": NO_VALUE,
        "max_rows": MAX_ROWS,
        "own_file": own_file,
        "sources": sources,
    }
    return templates


def render(template: str | Template, **values: Any) -> Markup:
    """The HTML that a template makes of these values."""
    from markupsafe import Markup

    return Markup(environment().get_template(template).render(values))


def write_page(
    destination: Path,
    template: str | Template,
    title: str,
    figures: Sequence[Figure],
    circumstances: str = "",
    **values: Any,
) -> None:
    """Writes the page as one file, whole or not at all. It can load nothing and run only its own script.

    The template extends pages/base.html, and knows `title`, `figures` and `values`.
    """
    from markupsafe import Markup

    ids = [figure.id for figure in figures]
    if len(set(ids)) < len(ids):
        raise ValueError(f"two figures of one page have the same id: {sorted(ids)}")
    plotly, script = _asset("plotly-cartesian.min.js"), _asset("page.js")
    drawn = {figure.id: {"traces": figure.traces, "layout": figure.layout} for figure in figures}
    page = render(
        template,
        title=title,
        circumstances=circumstances,
        figures=figures,
        png_name=re.sub(r"[^A-Za-z0-9._-]+", "-", title).strip("-.")[:80],
        script_hashes=Markup(" ".join(f"'sha256-{_hash(text)}'" for text in (plotly, script))),
        style=Markup(_asset("page.css")),
        drawn=Markup(script_json(drawn)),
        plotly=Markup(plotly),
        script=Markup(script),
        **values,
    )
    with explained(destination), whole_file(destination) as partial:
        partial.write_text(page, encoding="utf-8", newline="\n")


def own_file(table: str) -> str:
    """The file of a table in the folder of the one run that a page is about."""
    return f"{table}.parquet"


class Link(NamedTuple):
    """Text that leads to a target, such as #forest; plain text without one."""

    text: str
    target: str | None


def to_run(name: str, folder: Path, beside: Path) -> Link:
    """The name of a run, which leads to its page, if it has one, as seen from a page in the folder `beside`."""
    page = folder / "report.html"
    return Link(name, quote(Path(os.path.relpath(page, beside)).as_posix()) if page.is_file() else None)


def sources(drawn: Figure, file_name: FileName | None) -> str:
    """The files that the figure comes from."""
    names = ", ".join(map(file_name or own_file, drawn.sources))
    return names if file_name else f"{names} of each run"


def _shown(value: Any) -> Any:
    """What a template shows of an expression, before it is escaped; HTML stays as it is."""
    return value if hasattr(value, "__html__") else visible(str(value))


def _isolated(value: Any) -> Markup:
    """`isolated` for templates, which know by its type that it is HTML."""
    from markupsafe import Markup

    return Markup(isolated(str(value)))


def _all_numbers(rows: Sequence[Sequence[Any]], column: int) -> bool:
    """Whether a column of a table holds numbers alone."""
    return not any(isinstance(row[column], str | Link | bool) for row in rows)


def _asset(name: str) -> str:
    """A script or style that every page carries. Plotly's bundle for charts with axes is a third of the whole library;
    its licence stands beside it."""
    return (importlib.resources.files("sinkscope.pages") / "assets" / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
