"""The page of a run of `sinkscope bias`: which tokens are preferred, where states contract, why, and what remains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sinkscope.initial_bias.schemas import QUANTITIES
from sinkscope.pages import html
from sinkscope.pages.figure import Figure, axis, categories, level, levels, line, log_axis
from sinkscope.pages.text import NO_VALUE, interval, plotted, token_text
from sinkscope.results.run import Run

LINK = "After the layer. The cosine rises where values vary less and share a direction."
EFFECTS = ("entropy_deficit", "probability_ratio", "inter_cosine", "intra_cosine")


def write_page(run: Run, destination: Path) -> None:
    """Writes the page of a run of sinkscope bias."""
    groups = _groups(run)
    page_figures = [figure for group in groups.values() for figure in group]
    rows = run.rows("bias", over="seeds") or run.rows("bias")
    quantities = [
        (
            row["quantity"],
            row["value"],
            interval(row["value_low"], row["value_high"]),
            QUANTITIES.get(row["quantity"], ""),
        )
        for row in rows
    ]
    controls = run.summary["controls"]
    html.write_page(
        destination,
        "initial_bias/page.html",
        f"Born biased: {run.model}",
        page_figures,
        run.circumstances,
        run=run,
        groups=groups,
        quantities=quantities,
        over=f"{rows[0]['n']} {rows[0]['over']}",
        tokens=_tokens(run),
        contraction_text=_contraction_text(run),
        refused={name: entry["refused"] for name, entry in controls.items() if "refused" in entry},
    )


def figures(run: Run) -> list[Figure]:
    """All figures of the page."""
    return [figure for group in _groups(run).values() for figure in group]


def _groups(run: Run) -> dict[str, list[Figure]]:
    """The figures by section of the page."""
    contraction = [
        _cosines(run),
        _added(run, "inter"),
        _added(run, "intra"),
        _positions(run, "value_variance", "Value variance by position", "Across sequences, of the value aggregation."),
        _positions(run, "inter", "Cosine between sequences by position", LINK),
    ]
    return {
        "contraction": contraction,
        "controls": [_effects(run, quantity) for quantity in EFFECTS] if run.rows("controls") else [],
        "persistence": [_persistence(run)] if run.rows("persistence") else [],
    }


def _tokens(run: Run) -> list[tuple]:
    """The most probable tokens of each seed."""
    return [
        (
            NO_VALUE if row["seed"] is None else str(row["seed"]),
            str(row["token"]),
            NO_VALUE if row["text"] is None else token_text(row["text"]),
            row["prediction_ratio"],
            row["probability_ratio"],
        )
        for row in run.rows("preferred_tokens")
    ]


def _contraction_text(run: Run) -> str:
    last = run.rows("contraction")[-1]
    text = (
        "After the last layer the cosine of the mean state with the top principal direction is "
        f"{last['alignment']:.2f}, and that direction holds {last['top_share']:.0%} of the energy. The mean states of "
        f"two halves of the sequences have a cosine of {last['split_half']:.2f}"
    )
    between = last["between_seeds"]
    return f"{text}." if between is None else f"{text}, those of two seeds of {between:.2f}."


def _depth(row: dict[str, Any]) -> float:
    """The number of layers that a state has passed; between attention and feed-forward, a half."""
    return row["layer"] + {"embeddings": 1.0, "attention": 0.5, "feed_forward": 1.0}[row["part"]]


def _cosines(run: Run) -> Figure:
    rows = run.rows("contraction")
    depth = [_depth(row) for row in rows]
    names = {"inter": "between sequences", "intra": "between positions"}
    columns = ("layer", "part", "inter", "intra", "alignment", "top_share", "split_half", "between_seeds")
    traces = [_line(depth, rows, name, label, look) for look, (name, label) in enumerate(names.items())]
    if rows[0]["between_seeds"] is not None:
        traces.append(line(depth, [row["between_seeds"] for row in rows], "mean states of two seeds", 2))
    return Figure(
        "cosines",
        "Mean cosine of states",
        "By the number of layers passed. A half is the point between attention and feed-forward.",
        ("contraction",),
        traces,
        {"xaxis": axis("layers passed"), "yaxis": axis("")},
        tuple(name.replace("_", " ") for name in columns),
        [tuple(row[name] for name in columns) for row in rows],
    )


def _added(run: Run, name: str) -> Figure:
    between = {"inter": "sequences", "intra": "positions"}[name]
    parts = {"attention": "attention", "feed_forward": "feed-forward"}
    column, traces, table = f"{name}_added", [], []
    for look, (part, label) in enumerate(parts.items()):
        rows = run.rows("contraction", part=part)
        traces.append(_line([row["layer"] for row in rows], rows, column, label, look))
        table += [
            (row["layer"], label, row[column], interval(row[f"{column}_low"], row[f"{column}_high"])) for row in rows
        ]
    return Figure(
        f"added-{name}",
        f"What attention and feed-forward add between {between}",
        f"Mean cosine between {between} after each of them, minus that before it.",
        ("contraction",),
        traces,
        {"xaxis": axis("layer"), "yaxis": axis(""), **levels(level(0, ""))},
        ("layer", "part", "added", "interval"),
        table,
    )


def _positions(run: Run, column: str, title: str, caption: str) -> Figure:
    """A curve by position for the first, the middle and the last layer."""
    last = run.summary["num_layers"] - 1
    layers = {layer: run.rows("contraction_positions", layer=layer) for layer in sorted({0, last // 2, last})}
    positions = [row["position"] for row in layers[0]]
    values = [row[column] for rows in layers.values() for row in rows]
    return Figure(
        f"position-{column.replace('_', '-')}",
        title,
        caption,
        ("contraction_positions",),
        [_line(positions, rows, column, f"layer {layer}", look) for look, (layer, rows) in enumerate(layers.items())],
        {"xaxis": axis("position"), "yaxis": log_axis("", values) if column == "value_variance" else axis("")},
        ("layer", "position", column.replace("_", " ")),
        [(layer, row["position"], row[column]) for layer, rows in layers.items() for row in rows],
    )


def _effects(run: Run, quantity: str) -> Figure:
    rows = run.rows("controls", quantity=quantity)
    names = [row["control"].replace("_", " ") for row in rows]
    labels = [plotted(name) for name in names]
    trace = _line(labels, rows, "difference", quantity.replace("_", " "), 0) | {"mode": "markers"}
    return Figure(
        f"effect-{quantity.replace('_', '-')}",
        f"Change of {quantity.replace('_', ' ')}",
        f"Change of: {QUANTITIES[quantity]}.",
        ("controls",),
        [trace],
        {"xaxis": categories(labels), "yaxis": axis(""), **levels(level(0, ""))},
        ("control", "under it", "change", "interval"),
        [
            (name, row["value"], row["difference"], interval(row["difference_low"], row["difference_high"]))
            for name, row in zip(names, rows, strict=True)
        ],
    )


def _persistence(run: Run) -> Figure:
    rows = run.rows("persistence")
    names = [plotted(row["checkpoint"]) for row in rows]
    traces = [_line(names, rows, "correlation", "with its own initial weights", 0)]
    for look, (name, label) in enumerate(
        (("other_seeds", "with other seeds' initial weights"), ("ceiling", "the most to expect"))
    ):
        if rows[0][name] is not None:
            traces.append(line(names, [row[name] for row in rows], label, look + 1))
    columns = ("correlation", "other_seeds", "ceiling", "mean_state_cosine", "prediction_ratio", "entropy_deficit")
    return Figure(
        "persistence-correlation",
        "Rank correlation with the preference of the initial weights",
        "Of the mean probabilities of all tokens.",
        ("persistence",),
        traces,
        {"xaxis": categories(names), "yaxis": axis("")},
        ("checkpoint", "step", *(name.replace("_", " ") for name in columns)),
        [(row["checkpoint"], row["step"], *(row[name] for name in columns)) for row in rows],
    )


def _line(x: Sequence, rows: list[dict[str, Any]], column: str, label: str, look: int) -> dict[str, Any]:
    """A column of rows with its interval."""
    low, high = ([row[f"{column}_{end}"] for row in rows] for end in ("low", "high"))
    return line(x, [row[column] for row in rows], label, look, low=low, high=high)
