"""Figures as data for Plotly: traces and a layout, with the table they show and the file it comes from.

A colour is the name of a CSS variable, such as var(--series-1), which the page replaces by the theme's colour. Series
also differ in dash and marker, and maps in brightness, so that figures can be read without colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sinkscope.measures.sink_score import MIN_SINK_RATE
from sinkscope.pages.text import percent, plotted

# Colour, dash and marker of the n-th series of a figure.
LOOKS = (
    ("var(--series-1)", "solid", "circle"),
    ("var(--series-2)", "dash", "square"),
    ("var(--series-3)", "dot", "diamond"),
    ("var(--series-4)", "dashdot", "triangle-up"),
    ("var(--series-5)", "longdash", "x"),
    ("var(--muted)", "longdashdot", "cross"),
)
MAP_COLOURS = [[step / 4, f"var(--map-{step})"] for step in range(5)]
PATTERNS = ("", "/", ".", "x", "-", "+")
INTERVAL_LOOK = {"thickness": 1, "width": 3}


@dataclass(frozen=True)
class Figure:
    """One figure: what Plotly draws, and the same as a table (`columns`, `rows`)."""

    id: str
    title: str
    caption: str
    sources: tuple[str, ...]
    traces: list[dict[str, Any]]
    layout: dict[str, Any]
    columns: tuple[str, ...] = ()
    rows: list[tuple] = field(default_factory=list)
    height: int = 300
    num_rows: int = 0
    """How many rows there are in all, where `rows` holds the largest alone."""


def floats(values: Sequence | np.ndarray) -> np.ndarray:
    """A column as float64, nulls as NaN."""
    return np.array([np.nan if value is None else value for value in values], dtype=float)


def rounded(values: Sequence | np.ndarray) -> list:
    """Nested lists with four significant digits, so that the page stays small; NaN and infinity become null."""
    array = values if isinstance(values, np.ndarray) else floats(values)
    if array.ndim > 1:
        return [rounded(row) for row in array]
    return [float(f"{value:.4g}") if np.isfinite(value) else None for value in array.tolist()]


def axis(title: str, **options: Any) -> dict[str, Any]:
    return {"title": {"text": title, "font": {"size": 12}}, **options}


def log_axis(title: str, *series: Sequence | np.ndarray) -> dict[str, Any]:
    """A logarithmic axis for these values; a linear one if they lie within a factor of three."""
    values = np.concatenate([floats(values) for values in series])
    values = values[(values > 0) & np.isfinite(values)]
    if not len(values) or values.max() < 3 * values.min():
        return axis(title)
    return axis(title, type="log", tickvals=log_ticks(values))


def log_ticks(values: np.ndarray) -> list[float]:
    """Powers of ten around the values, and 2 and 5 times them where they span fewer than three."""
    if not len(values):
        return []
    low, high = np.log10(values.min()), np.log10(values.max())
    digits = (1, 2, 5) if high - low < 3 else (1,)
    ticks = (digit * 10.0**power for power in range(int(np.floor(low)), int(np.ceil(high)) + 1) for digit in digits)
    return [tick for tick in ticks if low - 0.3 <= np.log10(tick) <= high + 0.3]


def categories(names: Sequence[str], **options: Any) -> dict[str, Any]:
    """An axis of names in this order, each with its label."""
    order = {"type": "category", "categoryorder": "array", "categoryarray": list(names)}
    return order | {"tickmode": "linear", "dtick": 1, **options}


def look_of(index: int) -> tuple[str, str, str]:
    """Colour, dash and marker of the n-th series; a colour that is used again gets another dash and marker."""
    turn = index // len(LOOKS)
    _, dash, symbol = LOOKS[(index + turn) % len(LOOKS)]
    return LOOKS[index % len(LOOKS)][0], dash, symbol


def band(x: Sequence, low: Sequence, high: Sequence, look: int) -> dict[str, Any]:
    """The area between two curves, behind the n-th series."""
    return {
        "type": "scatter",
        "mode": "none",
        "x": [*x, *reversed(x)],
        "y": rounded([*high, *reversed(low)]),
        "fill": "toself",
        "fillcolor": look_of(look)[0],
        "opacity": 0.18,
        "hoverinfo": "skip",
        "showlegend": False,
    }


def line(
    x: Sequence, y: Sequence | np.ndarray, name: str, look: int, *, low=None, high=None, **options: Any
) -> dict[str, Any]:
    """A series with markers, in the n-th look, with its interval where there is one."""
    colour, dash, symbol = look_of(look)
    trace = {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [None if isinstance(place, float) and not np.isfinite(place) else place for place in x],
        "y": rounded(y),
        "name": plotted(name),
        "line": {"color": colour, "dash": dash, "width": 1.6},
        "marker": {"color": colour, "symbol": symbol, "size": 5},
        **options,
    }
    if low is not None and high is not None and any(value is not None for value in low):
        trace["error_y"] = bounds(y, low, high, colour)
    return trace


def points(
    x: Sequence | np.ndarray,
    y: Sequence,
    name: str,
    look: int,
    *,
    low=None,
    high=None,
    marker: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Markers alone, in the n-th look, with the interval of `x` where there is one. Names must be safe for Plotly."""
    colour, _, symbol = look_of(look)
    trace = {
        "type": "scatter",
        "mode": "markers",
        "x": rounded(x),
        "y": list(y),
        "name": name,
        "marker": {"color": colour, "symbol": symbol, "size": 7, **(marker or {})},
        **options,
    }
    if low is not None and high is not None:
        trace["error_x"] = bounds(x, low, high, colour)
    return trace


def bounds(value: Sequence | np.ndarray, low: Sequence, high: Sequence, colour: str) -> dict[str, Any]:
    """Error bars from an interval's ends."""
    middle = floats(value)
    return {
        "type": "data",
        "symmetric": False,
        "array": rounded(floats(high) - middle),
        "arrayminus": rounded(middle - floats(low)),
        "color": colour,
        **INTERVAL_LOOK,
    }


def heat_map(
    x: Sequence,
    y: Sequence,
    values: np.ndarray,
    value_name: str,
    where: str,
    *,
    logarithmic: bool = False,
    largest: float | None = None,
) -> dict[str, Any]:
    """A map of `values` [y, x]; `where` is the hover text before the number. NaN is left blank.

    Values above `largest` are drawn in its colour.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        colour_values = np.where(values > 0, np.log10(values), np.nan) if logarithmic else values
    bar: dict[str, Any] = {"thickness": 10, "outlinewidth": 0}
    if logarithmic:
        ticks = log_ticks(values[np.isfinite(colour_values)])
        bar |= {"tickvals": rounded(np.log10(ticks)), "ticktext": [f"{tick:g}" for tick in ticks]}
    return {
        "type": "heatmap",
        "x": list(x),
        "y": list(y),
        "z": rounded(colour_values),
        "customdata": rounded(values) if logarithmic else None,
        "hovertemplate": f"{where}<br>{value_name} %{{{'customdata' if logarithmic else 'z'}:.4g}}<extra></extra>",
        "colorscale": MAP_COLOURS,
        "zmin": 0 if largest is not None else None,
        "zmax": largest,
        "colorbar": bar,
        "hoverongaps": False,
        "xgap": 0.5,
        "ygap": 0.5,
    }


def level(value: float, text: str, *, vertical: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """A dashed line at a threshold, as a Plotly shape and its label."""
    along, across = ("y", "x") if vertical else ("x", "y")
    shape = {
        "type": "line",
        f"{along}0": 0,
        f"{along}1": 1,
        f"{along}ref": "paper",
        f"{across}0": value,
        f"{across}1": value,
        "line": {"color": "var(--muted)", "width": 1, "dash": "dot"},
    }
    label = {
        across: value,
        along: 1,
        f"{along}ref": "paper",
        f"{along}anchor": "bottom" if vertical else "right",
        f"{across}anchor": "center" if vertical else "bottom",
        "text": text,
        "showarrow": False,
        "font": {"size": 10, "color": "var(--muted)"},
    }
    return shape, label


def levels(*lines: tuple[dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
    """Entries of a layout that draw these thresholds."""
    return {"shapes": [shape for shape, _ in lines], "annotations": [label for _, label in lines]}


def sink_level() -> dict[str, Any]:
    """Entries of a layout that draw the sink rate from which on a position is a sink, for an axis y of sink rates."""
    return levels(level(MIN_SINK_RATE, f"a sink: {percent(MIN_SINK_RATE)}"))
