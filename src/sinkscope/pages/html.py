"""One HTML file that contains its style, script and data, from a template.

It opens from disk and loads nothing. Templates escape every string, and show its control and
reordering characters as symbols.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from sinkscope.atomic import explained, whole_file
from sinkscope.errors import InputError
from sinkscope.pages.figure import Figure
from sinkscope.pages.text import NO_VALUE, escaped, interval, isolated, number, script_json, token_text, visible

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


def can_write_pages() -> bool:
    """Whether plotly is installed, whose script every page carries."""
    return importlib.util.find_spec("plotly") is not None


@cache
def environment() -> Environment:
    """The templates of every folder of sinkscope, named by their place in it, such as studies/page.html."""
    # Here, since jinja2 takes a while to import and the command line asks this module whether pages can be written.
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
    templates.tests |= {"link": _is_link, "all_numbers": _all_numbers}
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
    assets = importlib.resources.files("sinkscope.pages") / "assets"
    plotly, script = _plotly(), (assets / "page.js").read_text(encoding="utf-8")
    drawn = {figure.id: {"traces": figure.traces, "layout": figure.layout} for figure in figures}
    page = render(
        template,
        title=title,
        circumstances=circumstances,
        figures=figures,
        png_name=re.sub(r"[^A-Za-z0-9._-]+", "-", title).strip("-.")[:80],
        script_hashes=Markup(" ".join(f"'sha256-{_hash(text)}'" for text in (plotly, script))),
        style=Markup((assets / "page.css").read_text(encoding="utf-8")),
        drawn=Markup(script_json(drawn)),
        plotly=Markup(plotly),
        script=Markup(script),
        **values,
    )
    with explained(destination), whole_file(destination) as partial:
        partial.write_text(page, encoding="utf-8", newline="\n")


def write_glued(destination: Path, title: str, body: str, figures: Sequence[Figure]) -> None:
    from markupsafe import Markup

    write_page(destination, "pages/glued.html", title, figures, body=Markup(body))


def header(title: str, circumstances: str) -> str:
    return (
        f'<header><h1>{isolated(title)}</h1><span class="muted">{isolated(circumstances)}</span>'
        '<button id="theme">Dark theme</button></header>'
    )


def own_file(table: str) -> str:
    """The file of a table in the folder of the one run that a page is about."""
    return f"{table}.parquet"


def verdict(word: str, *, with_word: bool = True) -> str:
    """A verdict as symbol and word; if the word is not shown, screen readers still get it."""
    symbol, style = VERDICTS.get(word, ("\u00b7", "none"))
    text = f" {escaped(word)}" if with_word else ""
    label = "" if with_word else f' title="{escaped(word)}" role="img" aria-label="{escaped(word)}"'
    return f'<span class="verdict {style}"><span class="symbol"{label}>{symbol}</span>{text}</span>'


def tally(verdicts: Sequence[str]) -> str:
    """How many claims have each verdict."""
    counts = ((word, verdicts.count(word)) for word in VERDICTS)
    return (
        '<p class="tally">'
        + "".join(f"<span>{verdict(word)}: {count}</span>" for word, count in counts if count)
        + "</p>"
    )


def rule(claim: dict[str, Any]) -> str:
    """The condition under which the claim holds, such as low >= 0.05; a dash if no number was judged."""
    if claim["threshold"] is None:
        return NO_VALUE
    text = claim["rule"].replace("threshold", f"{claim['threshold']:g}")
    return text.replace(">=", "\N{GREATER-THAN OR EQUAL TO}").replace("<=", "\N{LESS-THAN OR EQUAL TO}")


def control(claim: dict[str, Any]) -> str:
    """The control's value and name; empty if there is no control."""
    parts = [number(claim["control"])] if claim["control"] is not None else []
    return " ".join([*parts, f"({claim['control_name']})"] if claim["control_name"] else parts)


class Link(NamedTuple):
    """Text that leads to a target, such as #forest; plain text without one."""

    text: str
    target: str | None


def linked(text: str, target: str | None) -> str:
    """A link as HTML."""
    return isolated(text) if target is None else f'<a href="{escaped(target)}">{isolated(text)}</a>'


def to_run(name: str, folder: Path, beside: Path) -> Link:
    """The name of a run, which leads to its page, if it has one, as seen from a page in the folder `beside`."""
    page = folder / "report.html"
    return Link(name, quote(Path(os.path.relpath(page, beside)).as_posix()) if page.is_file() else None)


def evidence(claim: dict[str, Any]) -> str:
    """A list item: verdict, statement, effect with its interval, control and n."""
    numbers = f"{number(claim['effect'])} ({interval(claim['low'], claim['high'])})"
    if claim["effect"] is None:
        numbers = claim["note"] or NO_VALUE
    elif text := control(claim):
        numbers += f"; control {text}"
    return (
        f"<li>{verdict(claim['verdict'], with_word=False)} {escaped(claim['statement'])} "
        f'<span class="numbers">{escaped(numbers)}</span></li>'
    )


def table(columns: Sequence[str], entries: Iterable[Sequence[Any]]) -> str:
    """A table; numbers are aligned to the right."""
    body, numeric = [], [True] * len(columns)
    for entry in entries:
        cells = []
        for index, value in enumerate(entry):
            if isinstance(value, str | Link):
                numeric[index] = False
                cells.append(f"<td>{linked(*value) if isinstance(value, Link) else isolated(value)}</td>")
            else:
                cells.append(f'<td class="number">{number(value)}</td>')
        body.append(f"<tr>{''.join(cells)}</tr>")
    head = "".join(
        f'<th scope="col"{" class=number" if is_number else ""}>{escaped(column)}</th>'
        for column, is_number in zip(columns, numeric, strict=True)
    )
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def figure(drawn: Figure, file_name: FileName | None = own_file, *, wide: bool = False, below: str = "") -> str:
    """A figure with its caption, buttons, source and table; `file_name` is None if it shows several runs."""
    return (
        f'<figure class="figure{" wide" if wide else ""}" id="{escaped(drawn.id)}"><figcaption>'
        f'<h3>{isolated(drawn.title)}</h3><p class="caption">{escaped(drawn.caption)}</p></figcaption>'
        f"{plot(drawn)}{below}{tools(drawn, file_name)}</figure>"
    )


def section(
    id: str,
    title: str,
    text: str,
    figures: Iterable[Figure],
    *,
    wide: Collection[str] = (),
    below: Mapping[str, str] = MappingProxyType({}),
    extra: str = "",
    is_small: bool = False,
) -> str:
    """A heading, a sentence and figures. `wide` names the figures that take the whole width; `below` says by figure
    what stands under it; `extra` stands before them all."""
    drawn = "".join(figure(each, wide=each.id in wide, below=below.get(each.id, "")) for each in figures)
    return (
        f'<h2 id="{id}">{escaped(title)}</h2><p class="caption">{escaped(text)}</p>{extra}'
        f'<div class="figures{" small" if is_small else ""}">{drawn}</div>'
    )


def plot(drawn: Figure) -> str:
    """The element in which the page's script draws the figure."""
    return (
        f'<div class="plot" tabindex="0" role="group" data-figure="{escaped(drawn.id)}" '
        f'style="height:{drawn.height}px" '
        f'aria-label="{escaped(drawn.title)}; plus and minus zoom, arrows move, 0 resets"></div>'
    )


def tools(drawn: Figure, file_name: FileName | None = own_file) -> str:
    """Buttons, source and table under a figure."""
    listed = drawn.rows[:MAX_ROWS]
    total = max(len(drawn.rows), drawn.num_rows)
    cut = f", {len(listed):,} of {total:,} rows" if len(listed) < total else ""
    details = f"<details><summary>Table{cut}</summary>{table(drawn.columns, listed)}</details>" if listed else ""
    return (
        f'<div class="tools"><button data-action="png" aria-label="Save {escaped(drawn.title)} as PNG">PNG</button>'
        f'<button data-action="reset" aria-label="Reset the zoom of {escaped(drawn.title)}">Reset zoom</button>'
        f'<span class="source">{escaped(sources(drawn, file_name))}</span></div>{details}'
    )


def sources(drawn: Figure, file_name: FileName | None) -> str:
    """The files that the figure comes from."""
    names = ", ".join(map(file_name or own_file, drawn.sources))
    return names if file_name else f"{names} of each run"


def facts(pairs: Iterable[tuple[str, Any]]) -> str:
    """A list of names and values; empty values are left out."""
    shown = [(name, value) for name, value in pairs if value not in (None, "", [], {})]
    return (
        '<dl class="facts">'
        + "".join(f"<dt>{escaped(name)}</dt><dd>{isolated(str(value))}</dd>" for name, value in shown)
        + "</dl>"
    )


def _shown(value: Any) -> Any:
    """What a template shows of an expression, before it is escaped; HTML stays as it is."""
    return value if hasattr(value, "__html__") else visible(str(value))


def _isolated(value: Any) -> Markup:
    from markupsafe import Markup

    return Markup(isolated(str(value)))


def _is_link(value: Any) -> bool:
    return isinstance(value, Link)


def _all_numbers(rows: Sequence[Sequence[Any]], column: int) -> bool:
    """Whether a column of a table holds numbers alone."""
    return not any(isinstance(row[column], str | Link) for row in rows)


def _plotly() -> str:
    """The script that the plotly package carries; the package itself is not imported."""
    if not can_write_pages():
        raise InputError('The report needs plotly, which is not installed. Run: pip install "sinkscope[report]".')
    path = importlib.resources.files("plotly") / "package_data" / "plotly.min.js"
    # A browser turns every line end into one character before it compares the hash.
    return path.read_text(encoding="utf-8").replace("\r\n", "\n").replace("\r", "\n")


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
