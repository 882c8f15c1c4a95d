"""The page of a run of `sinkscope fingerprint`: the answer, every pair with its verdict, and the pairs as a map."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sinkscope.fingerprints.schemas import METHOD
from sinkscope.pages import html
from sinkscope.pages.figure import Figure, categories, heat_map
from sinkscope.pages.text import interval, plotted
from sinkscope.results.run import Run
from sinkscope.results.tables import rows_where


def write_page(run: Run, destination: Path) -> None:
    """Writes the page of fingerprints."""
    tables, summary, inputs = run.tables, run.summary, run.summary["inputs"]
    title = "Origins of " + ", ".join(model["name"] for model in summary["models"][:4])
    circumstances = f"{inputs['num_sequences']} sequences of {inputs['length']} ids below {inputs['vocabulary']}"
    pairs = []
    for pair in sorted(rows_where(tables["pairs"]), key=_by_z):
        low_to_high = "" if _value(pair["low"]) is None else interval(pair["low"], pair["high"])
        numbers = [_value(pair[name]) for name in ("z", "p", "q", "unrelated_z")]
        pairs.append((pair["base"], pair["suspect"], pair["verdict"], _value(pair["effect"]), low_to_high, *numbers))
    unrelated = [
        (row["model"], row["unrelated"], _value(row["effect"]), _value(row["z"]))
        for row in rows_where(tables["unrelated"])
    ]
    html.write_page(
        destination,
        "fingerprints/page.html",
        title,
        figures(run),
        circumstances,
        summary=summary,
        pairs=pairs,
        unrelated=unrelated,
        method=METHOD[summary["method"]],
        command=run.command,
    )


def _value(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value


def _by_z(pair: Mapping[str, Any]) -> tuple[bool, float]:
    """The largest z first, those without one last."""
    z = _value(pair["z"])
    return z is None, -(z or 0.0)


def figures(run: Run) -> list[Figure]:
    """The figure of the page: a map of the effect of every pair."""
    names, pairs = [model["name"] for model in run.summary["models"]], run.rows("pairs")
    values = np.full((len(names), len(names)), np.nan)
    for pair in pairs:
        row, column = names.index(pair["base"]), names.index(pair["suspect"])
        values[row, column] = values[column, row] = np.nan if pair["effect"] is None else pair["effect"]
    labels = [plotted(name) for name in names]
    pairs_map = Figure(
        "pairs",
        "Effect by pair",
        "Alignment of two models, or the mean tau of the published test; pairs that were not compared are blank.",
        ("pairs",),
        [heat_map(labels, labels, values, "effect", "%{y} and %{x}", largest=1.0)],
        {"xaxis": categories(labels), "yaxis": categories(labels)},
        ("base", "suspect", "effect"),
        [(pair["base"], pair["suspect"], _value(pair["effect"])) for pair in pairs],
        height=min(900, 220 + 24 * len(names)),
    )
    return [pairs_map]
