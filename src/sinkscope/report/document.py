"""One HTML file with its style, script and data inside: it opens from disk and loads nothing."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import importlib.util
import re
import string
from collections.abc import Sequence
from pathlib import Path

from sinkscope.errors import InputError
from sinkscope.report.figure import Figure
from sinkscope.report.text import escaped, isolated, script_json
from sinkscope.results.atomic import explained, whole_file


def write_page(destination: Path, title: str, body: str, figures: Sequence[Figure]) -> None:
    """Writes one file with everything in it, at once. The page may load nothing, and run no script but its own."""
    ids = [figure.id for figure in figures]
    if len(set(ids)) < len(ids):
        raise ValueError(f"two figures of one page have the same id: {sorted(ids)}")
    assets = importlib.resources.files("sinkscope.report") / "assets"
    plotly, script = _plotly(), (assets / "page.js").read_text(encoding="utf-8")
    page = string.Template((assets / "page.html").read_text(encoding="utf-8")).substitute(
        title=escaped(title),
        file_name=escaped(re.sub(r"[^A-Za-z0-9._-]+", "-", title).strip("-.")[:80]),
        script_hashes=" ".join(f"'sha256-{_hash(text)}'" for text in (plotly, script)),
        style=(assets / "page.css").read_text(encoding="utf-8"),
        body=body,
        figures=script_json({figure.id: {"traces": figure.traces, "layout": figure.layout} for figure in figures}),
        plotly=plotly,
        script=script,
    )
    with explained(destination), whole_file(destination) as partial:
        partial.write_text(page, encoding="utf-8", newline="\n")


def header(title: str, circumstances: str) -> str:
    return (
        f'<header><h1>{isolated(title)}</h1><span class="muted">{isolated(circumstances)}</span>'
        '<button id="theme">Dark theme</button></header>'
    )


def _plotly() -> str:
    """The script that the plotly package carries; the package itself is not imported."""
    if importlib.util.find_spec("plotly") is None:
        raise InputError(
            expected="plotly, to draw the report",
            found="no such package",
            next_step='Run: pip install "sinkscope[report]"',
        )
    path = importlib.resources.files("plotly") / "package_data" / "plotly.min.js"
    # A browser turns every line end into one character before it compares the hash.
    return path.read_text(encoding="utf-8").replace("\r\n", "\n").replace("\r", "\n")


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
