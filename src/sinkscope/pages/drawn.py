"""Figures of a page, drawn by matplotlib for notebooks and papers.

A `Figure` is written for Plotly, as traces and a layout. Each function here draws one part of that with matplotlib; a
key of the layout that is not read here is missing in notebooks.
"""

from __future__ import annotations

import html
import importlib.util
import io
import math
from collections.abc import Collection, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from sinkscope.errors import check_installed
from sinkscope.pages.figure import LOOKS, Figure, floats
from sinkscope.pages.text import END_ISOLATE, ISOLATE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

# What Plotly's names are in matplotlib.
COLOURS = {colour: f"C{number}" for number, (colour, _, _) in enumerate(LOOKS)} | {"var(--muted)": "gray"}
DASHES = {
    "solid": "-",
    "dash": "--",
    "dot": ":",
    "dashdot": "-.",
    "longdash": (0, (8, 3)),
    "longdashdot": (0, (8, 3, 1, 3)),
}
MARKERS = {
    "circle": "o",
    "square": "s",
    "diamond": "D",
    "triangle-up": "^",
    "triangle-right": ">",
    "triangle-left": "<",
}
PIXELS_AN_INCH = 75
MANY = 4
"""From so many figures side by side each is narrower."""
NOTEBOOK_DPI = 80


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


@cache
def drawing_class() -> type[Drawing]:
    """matplotlib's figure, which a notebook shows also where no backend of matplotlib was chosen."""
    check_installed("Drawing", "plot", "matplotlib")
    from matplotlib.figure import Figure

    class InNotebooks(Figure):
        def _repr_png_(self) -> bytes:
            image = io.BytesIO()
            self.savefig(image, format="png", dpi=NOTEBOOK_DPI)
            return image.getvalue()

    return InNotebooks


def drawing(figures: Sequence[Figure], title: str = "") -> Drawing:
    """The figures side by side as one matplotlib figure. Needs the extra `plot`."""
    height = min(max(figure.height for figure in figures) / PIXELS_AN_INCH, 10)
    width = 6 if len(figures) < MANY else 4
    whole = drawing_class()(figsize=(width * len(figures), max(height, 3.5)), layout="constrained")
    if title:
        # parse_math off: a model's name is text, and a stray dollar sign in it must not be read as a formula.
        whole.suptitle(title, fontsize=11, parse_math=False, wrap=True)
    panels = whole.subplots(1, len(figures), squeeze=False)[0]
    for axes, figure in zip(panels, figures, strict=True):
        _draw(axes, figure)
    labels = {tuple(axes.get_legend_handles_labels()[1]) for axes in panels}
    if len(panels) > 1 and len(labels) == 1 and any(*labels):
        whole.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    else:
        for axes in panels:
            if any(axes.get_legend_handles_labels()[1]):
                axes.legend(fontsize=7)
    return whole


def _draw(axes: Axes, figure: Figure) -> None:
    """Draws one figure into its panel: traces, thresholds with their names, and axes."""
    names = [label for label in figure.layout.get("annotations", ()) if label["text"]]
    is_above = any(label.get("yref") == "paper" for label in names)
    axes.set_title(_plain(figure.title), fontsize=10, parse_math=False, pad=16 if is_above else None)
    bars = [trace for trace in figure.traces if trace["type"] == "bar"]
    # Names in their order; those that the layout does not order come as the series bring them.
    orders = []
    for axis in ("xaxis", "yaxis"):
        names_in_order = figure.layout.get(axis, {}).get("categoryarray", ())
        orders.append({name: place for place, name in enumerate(names_in_order)})
    for trace in figure.traces:
        if trace["type"] == "heatmap":
            _heat_map(axes, trace)
        elif trace["type"] == "bar":
            _bars(axes, trace, bars.index(trace), len(bars))
        elif trace["mode"] == "none":
            y = floats(trace["y"])
            axes.fill(trace["x"], y, color=_colour(trace["fillcolor"]), alpha=trace["opacity"], lw=0)
        else:
            _series(axes, trace, orders)
    for shape in figure.layout.get("shapes", ()):
        is_vertical = shape.get("yref") == "paper"
        draw, value = (axes.axvline, shape["x0"]) if is_vertical else (axes.axhline, shape["y0"])
        draw(value, color="gray", linestyle=":", lw=1)
    for label in names:
        _name(axes, label)
    is_map = any(trace["type"] == "heatmap" for trace in figure.traces)  # which has set its own ticks
    for name, order in zip(("x", "y"), orders, strict=True):
        _axis(axes, name, figure.layout.get(f"{name}axis", {}), () if is_map else order)
    axes.tick_params(labelsize=8)


def _name(axes: Axes, label: dict[str, Any]) -> None:
    """The name of a threshold, beside its line."""
    along_x = "axes fraction" if label.get("xref") == "paper" else "data"
    along_y = "axes fraction" if label.get("yref") == "paper" else "data"
    axes.annotate(
        _plain(label["text"]),
        (label["x"], label["y"]),
        xycoords=(along_x, along_y),
        ha=label["xanchor"],
        va=label["yanchor"],
        fontsize=7,
        color="gray",
    )


def _axis(axes: Axes, name: str, layout: dict[str, Any], categories: Collection[str]) -> None:
    """Sets up the axis x or y as its layout says, with these names along it."""
    along = axes.xaxis if name == "x" else axes.yaxis
    is_log = layout.get("type") == "log"
    if is_log:
        axes.set(**{f"{name}scale": "log"})  # before ticks: a new scale replaces them
    if categories:
        names = [_plain(category) for category in categories]
        long = name == "x" and max(map(len, names)) > 8
        look = {"rotation": 30, "ha": "right"} if long else {}
        along.set_ticks(range(len(names)), names, **look)
    axes.set(**{f"{name}label": _plain(layout.get("title", {}).get("text", ""))})
    if "range" in layout:
        axes.set(**{f"{name}lim": layout["range"]})
    if "tickvals" in layout:
        places = layout["tickvals"]
        texts = layout.get("ticktext", [f"{place:g}" for place in places])
        low, high = sorted(along.get_view_interval())
        # A tick outside would stretch the axis.
        ticks = [(place, _plain(text)) for place, text in zip(places, texts, strict=True) if low <= place <= high]
        along.set_ticks([place for place, _ in ticks], [text for _, text in ticks])
        if is_log:
            along.set_minor_formatter("")  # matplotlib would write its own labels between ours
    if layout.get("autorange") == "reversed":
        getattr(axes, f"invert_{name}axis")()


def _series(axes: Axes, trace: dict[str, Any], orders: list[dict[str, int]]) -> None:
    """A curve or points, with error bars. A name along an axis is drawn at its place in that axis's order; one that the
    order lacks is added to it."""
    mode, line, marker = trace["mode"], trace.get("line", {}), trace.get("marker", {})
    errors, places = {}, {}
    for name, order in zip(("x", "y"), orders, strict=True):
        if ends := trace.get(f"error_{name}"):
            below, above = ends["arrayminus"], ends["array"]
            # An interval need not hold its estimate, and matplotlib refuses an error below 0.
            errors[f"{name}err"] = [[max(0.0, _number(end)) for end in side] for side in (below, above)]
        places[name] = []
        for place in trace[name]:
            is_name = isinstance(place, str)
            places[name].append(order.setdefault(place, len(order)) if is_name else _number(place, math.nan))
    marker_sign = ""
    if "markers" in mode:
        symbol = marker.get("symbol", "circle")  # one for all points, or one for each
        marker_sign = MARKERS.get(symbol if isinstance(symbol, str) else symbol[0], "x")
    axes.errorbar(
        **places,
        **errors,
        color=_colour(line.get("color", marker.get("color", "var(--muted)"))),
        linestyle=DASHES.get(line.get("dash", "solid"), "-") if "lines" in mode else "none",
        drawstyle="steps-post" if line.get("shape") == "hv" else "default",
        marker=marker_sign,
        markersize=3.5,
        lw=1.2,
        capsize=2,
        label=_plain(trace.get("name", "")) if trace.get("showlegend", True) else "",
    )


def _bars(axes: Axes, trace: dict[str, Any], index: int, count: int) -> None:
    """The bars of one series of `count`, side by side within 0.8 of each name's place."""
    names = [_plain(name) for name in trace["x"]]
    places = [place + 0.8 * ((index + 0.5) / count - 0.5) for place in range(len(names))]
    heights = [_number(value) for value in trace["y"]]
    axes.bar(places, heights, 0.8 / count, color=f"C{index}", label=_plain(trace.get("name", "")))
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right")


def _heat_map(axes: Axes, trace: dict[str, Any]) -> None:
    values = [floats(row) for row in trace["z"]]
    image = axes.imshow(
        values, aspect="auto", origin="lower", vmin=trace.get("zmin"), vmax=trace.get("zmax"), interpolation="nearest"
    )
    for names, set_ticks in ((trace["x"], axes.set_xticks), (trace["y"], axes.set_yticks)):
        step = max(1, len(names) // 12)
        # Every name is written, and of numbers about a dozen.
        places = range(0, len(names), 1 if isinstance(names[0], str) else step)
        set_ticks(places, [str(_plain(names[place])) for place in places])
    if trace.get("showscale", True):
        bar, layout = axes.figure.colorbar(image, ax=axes), trace.get("colorbar", {})
        if "tickvals" in layout:
            low, high = image.get_clim()  # a tick outside would stretch the bar
            pairs = zip(layout["tickvals"], layout["ticktext"], strict=True)
            ticks = [(place, text) for place, text in pairs if low <= place <= high]
            bar.set_ticks([place for place, _ in ticks], labels=[text for _, text in ticks])


def _plain(text: Any) -> Any:
    """A label without what Plotly reads in it; numbers stay as they are."""
    if not isinstance(text, str):
        return text
    plain = html.unescape(text.replace("<br>", "\n").replace(ISOLATE, "").replace(END_ISOLATE, ""))
    return plain.replace("$", r"\$")  # a lone dollar sign would begin a formula


def _colour(name: str) -> str:
    return COLOURS.get(name, "gray")


def _number(value: float | None, otherwise: float = 0.0) -> float:
    return otherwise if value is None else value
