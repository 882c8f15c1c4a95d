"""What people see of a result on a terminal: a short table and one sentence, on standard output.

Text from models is printed as text, never as markup, and nothing in it moves the cursor.
"""

from __future__ import annotations

import math
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sinkscope.pages.text import printed

NUM_SHOWN = 8
"""Rows of a list that are shown; the tables hold all of them."""


class Terminal:
    """Standard output, for sentences and tables."""

    def __init__(self, *, soft_wrap: bool = False) -> None:
        self._console = Console(soft_wrap=soft_wrap)

    def say(self, text: str, **style: str) -> None:
        self._console.print(self._text(text, **style))

    def say_where(self, path: Path) -> None:
        """The page of a run, or its folder where no page could be drawn."""
        page = path / "report.html"
        self.say(f"Written to {page if page.is_file() else path}")

    def table(self, title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]], limit: int = NUM_SHOWN) -> None:
        title = f"{title} ({limit} of {len(rows)})" if len(rows) > limit else title
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))  # for 80 columns
        for column in columns:
            # The end of a name tells two checkpoints apart; words in a heading stay whole.
            table.add_column(column, overflow="fold", min_width=max(map(len, column.split())))
        for row in rows[:limit]:
            table.add_row(*(self._text(cell) for cell in row))
        self._console.print(table)

    def _text(self, text: str, **style: str) -> Text:
        return Text(printed(text, self._console.encoding), **style)  # type: ignore[arg-type]


def ends(low: float, high: float) -> str:
    """An interval, or nothing where there is none."""
    return "" if math.isnan(low) else f"{low:.3g} to {high:.3g}"


def spans(layers: list[int]) -> str:
    """0, 2-5, 9 for [0, 2, 3, 4, 5, 9]."""
    spans: list[list[int]] = []
    for layer in layers:
        if spans and layer == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], layer]
        else:
            spans.append([layer, layer])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
