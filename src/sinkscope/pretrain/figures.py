"""The figures of one training run or of several: a line for each variant, with a band from lowest to highest seed."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from sinkscope.pages.figure import (
    Figure,
    axis,
    band,
    categories,
    level,
    levels,
    line,
    log_axis,
    look_of,
    points,
    sink_level,
)
from sinkscope.pages.text import number, plotted
from sinkscope.pretrain.appearances import LINKS
from sinkscope.pretrain.comparison import TrainingComparison

Row = dict[str, Any]
SETTLED = 0.25
"""The axis of a loss fits what comes after this share of training: the steep beginning would flatten the rest."""
PROBED = {
    "sink_rate": (
        "Sink rate",
        "Share of heads and sequences that count the probed key as their sink, held-out text.",
    ),
    "dom_ratio": ("Dimension disparity", "DomRatio at the probed key, mean over layers, held-out text."),
    "effective_rank": ("Effective rank", "Of the residuals, mean over layers, held-out text."),
}
BATCHES = {"random": "random tokens", "text": "held-out text"}
COUNTS = {"tickformat": "", "exponentformat": "B"}
"""Ticks such as 10M and 2B."""
SPREAD = 0.7
"""Share of the space between two links that the variants fill."""


def training_figures(comparison: TrainingComparison) -> list[Figure]:
    """Ratios, losses and observables, in this order; what was not measured has no figure."""
    figures = []
    if len(comparison.variants) > 1:
        figures += [_ratios(comparison), _advantage(comparison)]
    figures += [_losses(comparison, "tokens", "training tokens"), _losses(comparison, "elapsed_s", "seconds")]
    return figures + [_observable(comparison, name) for name in PROBED if _probed(comparison, name)]


def appearance_figures(comparison: TrainingComparison) -> list[Figure]:
    """The order in which the links appear, one figure for each batch that was probed."""
    return [_appearances(comparison, batch) for batch in BATCHES if comparison.rows("births", batch=batch)]


def median_tokens(rows: Sequence[Row]) -> int | None:
    """The tokens by which a link had appeared in half of the seeds; None if it appeared in fewer.

    `rows` are those of one link in the table births, one for each seed.
    """
    tokens = sorted(row["tokens"] for row in rows if row["tokens"] is not None)
    middle = (len(rows) - 1) // 2
    return tokens[middle] if middle < len(tokens) else None


def _ratios(comparison: TrainingComparison) -> Figure:
    """Each variant's ratio of tokens (or seconds) to the baseline's, with the interval over seeds."""
    traces, table = [], []
    for look, (quantity, name) in enumerate((("tokens_ratio", "tokens"), ("seconds_ratio", "seconds"))):
        rows = [row for row in comparison.rows("variants", quantity=quantity) if row["variant"] != comparison.baseline]
        rows = [row for row in rows if row["mean"] is not None]
        if not rows:
            continue
        symbol = look_of(look)[2]
        means, low, high = ([row[part] for row in rows] for part in ("mean", "low", "high"))
        table += [(row["variant"], name, ratio_text(row), row["low"], row["high"], row["num_seeds"]) for row in rows]
        traces.append(
            points(
                means,
                [plotted(row["variant"]) for row in rows],
                name,
                look,
                low=low,
                high=high,
                # A bound is an arrowhead that points to where the true ratio lies.
                marker={
                    "symbol": [{">": "triangle-right", "<": "triangle-left"}.get(row["bound"], symbol) for row in rows],
                    "size": 10,
                },
                text=[ratio_text(row) for row in rows],
                hovertemplate="%{y}: %{text}<extra></extra>",
            )
        )
    return Figure(
        "ratios",
        f"Tokens and seconds to {comparison.baseline}'s final loss",
        "Divided by the baseline's; left of 1 is sooner. Bars: 95 % interval over seeds. "
        "Arrowhead: only a bound is known, and the ratio lies further in that direction.",
        ("variants",),
        traces,
        {
            "xaxis": axis("ratio to the baseline"),
            "yaxis": categories([plotted(name) for name in comparison.variants[:0:-1]]),
            **levels(level(1, plotted(comparison.baseline), vertical=True)),
        },
        ("variant", "in", "ratio", "low", "high", "seeds"),
        table,
        height=130 + 34 * len(comparison.variants),
    )


def ratio_text(row: Row) -> str:
    """A ratio with its bound, such as > 1.0."""
    return f"{row['bound']} {number(row['mean'])}".strip()


def _losses(comparison: TrainingComparison, x_name: str, x_title: str) -> Figure:
    rows = comparison.rows("losses")
    end = max(row["tokens"] for row in rows if row["variant"] == comparison.baseline)
    settled = [row["validation_loss"] for row in rows if row["tokens"] >= SETTLED * end]
    settled = settled or [rows[-1]["validation_loss"]]
    room = 0.06 * (max(settled) - min(settled)) or 0.1
    ends = [row["validation_loss"] for row in comparison.rows("training_runs", variant=comparison.baseline)]
    finish, label = level(fmean(ends), plotted(f"{comparison.baseline}'s final loss"))
    label |= {"x": 0, "xanchor": "left"}  # on the right it would cover the ends of the curves
    return _curves(
        f"loss-{x_name.replace('_', '-')}",
        f"Validation loss against {x_title}",
        "As evaluated, not smoothed. The steep beginning is cut off; the table holds it.",
        ("losses",),
        _series(comparison, rows, x_name, "validation_loss"),
        x_title,
        yaxis=axis("", range=[min(settled) - room, max(settled) + room]),
        **levels((finish, label)),
    )


def _advantage(comparison: TrainingComparison) -> Figure:
    """Each run's loss minus that of the baseline's run with the same seed, or minus the baseline's mean."""
    rows = comparison.rows("losses")
    base = [row for row in rows if row["variant"] == comparison.baseline]
    of_seed = {(row["seed"], row["step"]): row["validation_loss"] for row in base}
    of_all = {step: fmean(row["validation_loss"] for row in base if row["step"] == step) for _, step in of_seed}
    seeds = {seed for seed, _ in of_seed}
    differences = []
    for row in rows:
        is_paired = row["seed"] in seeds
        reference = of_seed.get((row["seed"], row["step"])) if is_paired else of_all.get(row["step"])
        if reference is not None:
            differences.append(row | {"difference": row["validation_loss"] - reference})
    end = max(row["tokens"] for row in base)
    settled = [row["difference"] for row in differences if row["tokens"] >= SETTLED * end] or [0.0]
    low, high = min(0.0, *settled), max(0.0, *settled)
    room = 0.06 * (high - low) or 0.1
    return _curves(
        "advantage",
        f"Validation loss minus {comparison.baseline}'s",
        "At the same number of tokens, seed by seed; below 0 is better. Bands: from the lowest to the highest seed.",
        ("losses",),
        _series(comparison, differences, "tokens", "difference"),
        "training tokens",
        yaxis=axis("", range=[low - room, high + room]),
    )


def _probed(comparison: TrainingComparison, quantity: str) -> list[Row]:
    """The rows of a quantity on held-out text, where it has a value."""
    rows = comparison.rows("observables", quantity=quantity, batch="text")
    return [row for row in rows if row["mean"] is not None]


def _observable(comparison: TrainingComparison, quantity: str) -> Figure:
    title, caption = PROBED[quantity]
    rows = _probed(comparison, quantity)
    means = [row["mean"] for row in rows]
    y_axis = log_axis("", means) if quantity == "dom_ratio" else axis("", rangemode="tozero")
    if quantity == "sink_rate":
        y_axis["tickformat"] = "~%"
    more = sink_level() if quantity == "sink_rate" else {}
    series = _series(comparison, rows, "tokens", "mean")
    id = quantity.replace("_", "-")
    return _curves(id, title, caption, ("observables",), series, "training tokens", yaxis=y_axis, **more)


def _series(
    comparison: TrainingComparison, rows: list[Row], x_name: str, y_name: str
) -> list[tuple[int, str, list[Row]]]:
    """(look, variant, curve) of each variant: mean, lowest and highest at the steps that all of its seeds have."""
    series = []
    for look, variant in enumerate(comparison.variants):
        of_variant = [row for row in rows if row["variant"] == variant]
        num_seeds = len({row["seed"] for row in of_variant})
        curve = []
        for step in sorted({row["step"] for row in of_variant}):
            at_step = [row for row in of_variant if row["step"] == step]
            if len(at_step) == num_seeds:
                values = [row[y_name] for row in at_step]
                x = fmean(row[x_name] for row in at_step)
                curve.append({"x": x, "y": fmean(values), "low": min(values), "high": max(values)})
        if curve:
            series.append((look, variant, curve))
    return series


def _curves(
    id: str,
    title: str,
    caption: str,
    sources: tuple[str, ...],
    series: list[tuple[int, str, list[Row]]],
    x_title: str,
    **layout: Any,
) -> Figure:
    traces, table = [], []
    for look, variant, curve in series:
        x, y, low, high = ([point[key] for point in curve] for key in ("x", "y", "low", "high"))
        if low != high:
            traces.append(band(x, low, high, look))
        traces.append(line(x, y, variant, look))
        table += [(variant, *point) for point in zip(x, y, low, high, strict=True)]
    columns = ("variant", x_title, "mean", "lowest seed", "highest seed")
    layout = {"xaxis": axis(x_title, **COUNTS), **layout}
    # The legend of many variants takes several lines above the curves.
    height = 300 + 8 * max(0, len(series) - 3)
    return Figure(id, title, caption, sources, traces, layout, columns, table, height)


def _appearances(comparison: TrainingComparison, batch: str) -> Figure:
    """Links from top to bottom in the order of the chain; a marker a variant, from its first to its last seed."""
    end = max(comparison.tables["training_runs"]["tokens"])
    never = 1.12 * end  # where links stand that did not appear: right of every run's last token
    links = [link.name for link in LINKS]
    traces, table = [], []
    for look, variant in enumerate(comparison.variants):
        shift = SPREAD * ((look + 0.5) / len(comparison.variants) - 0.5)
        markers = []
        for index, link in enumerate(links):
            rows = comparison.rows("births", variant=variant, batch=batch, link=link)
            if not rows:
                continue
            tokens = [row["tokens"] for row in rows if row["tokens"] is not None]
            median = median_tokens(rows)
            count = f"{len(tokens)} of {len(rows)}"
            low = min(tokens, default=never)
            high = never if len(tokens) < len(rows) else max(tokens)
            x = never if median is None else median
            markers.append({"x": x, "y": index + shift, "low": low, "high": high, "text": f"{link}: {count} seeds"})
            table.append((variant, link, count, median))
        symbol = look_of(look)[2]
        x, y, low, high, text = ([marker[key] for marker in markers] for key in ("x", "y", "low", "high", "text"))
        traces.append(
            points(
                x,
                y,
                plotted(variant),
                look,
                low=low,
                high=high,
                marker={"symbol": [symbol + ("-open" if value == never else "") for value in x], "size": 9},
                text=text,
                hovertemplate="%{text}<extra></extra>",
            )
        )
    return Figure(
        f"appearances-{batch}",
        f"When each link appears, on {BATCHES[batch]}",
        "Tokens after which a link stays above its threshold to the end of the run, in the layer where it is largest. "
        "Marker: the middle seed; bar: from the first seed to the last. Open marker at the right edge: did not appear.",
        ("births",),
        traces,
        {
            "xaxis": axis("training tokens", **COUNTS, range=[-0.03 * end, 1.17 * end]),
            "yaxis": axis("", tickvals=list(range(len(links))), ticktext=links, range=[len(links) - 0.5, -0.5]),
            **levels(level(never, "did not appear", vertical=True)),
        },
        ("variant", "link", "seeds in which it appeared", "tokens, middle seed"),
        table,
        height=150 + len(links) * max(34, 9 * len(comparison.variants)),
    )
