"""Pages and pictures as data: their text line by line, and what each figure draws, its numbers to four digits.

Of a page, only the file counts: which tags it has, and which library drew it, may change as long as this reads them.
"""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from matplotlib.collections import LineCollection
from matplotlib.ticker import FixedLocator

INLINE = {"a", "b", "bdi", "br", "code", "em", "span", "strong", "sub", "sup"}
UNSEEN = {"script", "style"}
CELLS = {"td", "th"}
ROWS_KEPT = 12
"""Rows of a table whose text is kept, its header among them; of the others, how many there are."""
LONGEST = 60
"""Values of a list that are all kept; of a longer one, every n-th, their number and their sums."""


def page(path: Path) -> dict[str, Any]:
    """The text of a page in its order, with a line for the place of each figure, and the figures by name."""
    read = _Page()
    read.feed(path.read_text(encoding="utf-8"))
    read.close()
    figures = {name: thinned(drawn) for name, drawn in json.loads(read.figures).items()}
    return {"text": read.lines, "figures": figures}


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.figures = ""
        """The JSON of the page's figures."""
        self.open, self.tag, self.text, self.num_rows = "", "", "", 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in INLINE:
            self.text += f"[{given['href']}]" if given.get("href") else ""
            return
        if tag in CELLS:
            self.text += " | "
            return
        self.end_line()
        self.tag = tag
        self.open = given.get("id") or tag if tag in UNSEEN else ""
        if tag == "table":
            self.num_rows = 0
        if figure := given.get("data-figure"):
            self.lines.append(f"figure: {figure}")

    def handle_endtag(self, tag: str) -> None:
        if tag in INLINE or tag in CELLS:
            return
        self.end_line()
        self.open = self.tag = ""
        if tag == "table":
            self.lines.append(f"table: {self.num_rows} rows, with the header")

    def handle_data(self, data: str) -> None:
        if self.open == "figures":
            self.figures += data
        elif not self.open:
            self.text += data

    def end_line(self) -> None:
        line = f"{self.tag or 'text'}: {' '.join(self.text.split())}"
        is_row = self.tag == "tr"
        self.num_rows += is_row
        if self.text.strip() and not (is_row and self.num_rows > ROWS_KEPT):
            self.lines.append(line)
        self.text = ""


def picture(drawing: Any) -> dict[str, Any]:
    """What a figure of matplotlib shows."""
    title = drawing.get_suptitle() if hasattr(drawing, "get_suptitle") else ""
    legends = [text.get_text() for legend in drawing.legends for text in legend.get_texts()]
    return {"title": title, "legends": legends, "panels": [_panel(axes) for axes in drawing.axes]}


def _panel(axes: Any) -> dict[str, Any]:
    legend = axes.get_legend()
    found = {
        "title": axes.get_title(),
        "legend": [text.get_text() for text in legend.get_texts()] if legend else [],
        "texts": [text.get_text() for text in axes.texts],
        "lines": [_line(line) for line in axes.lines],
        "areas": [_corners(patch) for patch in axes.patches],
        "bars of errors": [_ends(drawn) for drawn in axes.collections if isinstance(drawn, LineCollection)],
        "images": [image.get_array().tolist() for image in axes.images],
    }
    for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        found[name] = {
            "label": axis.get_label_text(),
            "scale": axis.get_scale(),
            "range": [float(end) for end in axis.get_view_interval()],
            "ticks": _asked_ticks(axis),
        }
    return thinned(found)


def _asked_ticks(axis: Any) -> list[str]:
    """The labels along an axis, but for those that matplotlib chooses by itself."""
    is_asked = isinstance(axis.get_major_locator(), FixedLocator)
    return [tick.get_text() for tick in axis.get_ticklabels()] if is_asked else []


def _line(line: Any) -> dict[str, Any]:
    look = f"{line.get_linestyle()} {line.get_marker()}"
    return {"label": line.get_label(), "look": look, "x": list(line.get_xdata()), "y": list(line.get_ydata())}


def _corners(patch: Any) -> dict[str, Any]:
    x, y = patch.get_patch_transform().transform(patch.get_path().vertices).T.tolist()
    return {"x": x, "y": y}


def _ends(drawn: LineCollection) -> dict[str, Any]:
    points = [point for segment in drawn.get_segments() for point in segment.tolist()]
    return {"x": [x for x, _ in points], "y": [y for _, y in points]}


def thinned(value: Any) -> Any:
    """The same with numbers to four digits, and of long lists every n-th entry, their number and their sums."""
    if isinstance(value, dict):
        return {name: thinned(item) for name, item in value.items()}
    if not isinstance(value, list):
        return _rounded(value)
    if value and all(isinstance(item, list) for item in value):
        flat = [entry for item in value for entry in item]
        return {"lengths": thinned([len(item) for item in value]), "flat": thinned(flat)}
    if len(value) <= LONGEST:
        return [thinned(item) for item in value]
    step = math.ceil(len(value) / LONGEST)
    numbers = [number for number in map(_rounded, value) if isinstance(number, int | float)]
    sums = [float(f"{total:.4g}") for total in (sum(numbers), sum(map(abs, numbers)))]
    return {"count": len(value), "sums": sums, f"every {step}": thinned(value[::step])}


def _rounded(value: Any) -> Any:
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    return value
