"""The page of `sinkscope intervene`: what the interventions changed, beside the baseline and a control."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sinkscope.interventions.schemas import ARMS, MOST_POSITIONS
from sinkscope.measures.sink_score import LATER_QUERIES
from sinkscope.pages import html
from sinkscope.pages.figure import Figure, axis, floats, line, log_axis
from sinkscope.pages.text import token_text
from sinkscope.results.run import Run
from sinkscope.tracing.figures import with_texts

Table = Mapping[str, list]


def write_page(run: Run, destination: Path) -> None:
    """Writes the page of interventions."""
    summary = run.summary
    tokens = summary["before"]["tokens"]
    title, count = f"Interventions on {summary['before']['model']}", tokens["count"]
    many = "one sequence" if count == 1 else f"{count} sequences"
    means, texts = dict(run.tables["means"]), position_texts(summary)
    if texts:
        means = {"token": [texts.get(position, "") for position in means["position"]], **means}
    html.write_page(
        destination,
        "interventions/page.html",
        title,
        figures(run),
        f"{many} of {tokens['length']} tokens",
        summary=summary,
        checks=summary.get("checks") or (),  # a run of an earlier version has none
        columns=list(means),
        means=list(zip(*means.values(), strict=True)),
        command=run.command,
    )


def position_texts(summary: Mapping[str, Any]) -> dict[int, str]:
    """The tokens by position that the page shows, where one text was read and can be written."""
    return {token["position"]: token_text(token["text"]) for token in summary.get("texts") or ()}


def figures(run: Run) -> list[Figure]:
    """Curves by position and by layer, before, after and under the control."""
    tables, texts = run.tables, position_texts(run.summary)
    length = run.summary["before"]["tokens"]["length"]
    judged = min(max(length - LATER_QUERIES, 1), MOST_POSITIONS)
    cut = "" if judged == length else f" The first {judged} of {length} positions; the last ones have few queries."
    return [
        with_texts(texts, _curves(tables, "sink_rate", "Sink rate by position", f"Mean over layers.{cut}", judged)),
        with_texts(
            texts,
            _curves(tables, "received", "Attention received by position", f"Mean over layers and heads.{cut}", judged),
        ),
        *(_by_layer(tables, position, texts) for position in sorted(set(tables["means"]["position"]))[:4]),
    ]


def _arms(tables: Mapping[str, Table], quantity: str) -> list[np.ndarray]:
    """[L, T] before, after and under the control."""
    observables = tables["observables"]
    rows = [row for row, name in enumerate(observables["quantity"]) if name == quantity]
    num_layers = len({observables["layer"][row] for row in rows})
    return [floats([observables[arm][row] for row in rows]).reshape(num_layers, -1) for arm in ARMS]


def _curves(tables: Mapping[str, Table], quantity: str, title: str, caption: str, num_positions: int) -> Figure:
    values = [arm[:, :num_positions].mean(0).tolist() for arm in _arms(tables, quantity)]
    positions = list(range(num_positions))
    return Figure(
        quantity.replace("_", "-"),
        title,
        caption,
        ("observables",),
        [line(positions, values[look], arm, look) for look, arm in enumerate(ARMS)],
        {"xaxis": axis("key position"), "yaxis": axis("", rangemode="tozero")},
        ("position", *ARMS),
        list(zip(positions, *values, strict=True)),
    )


def _by_layer(tables: Mapping[str, Table], position: int, texts: Mapping[int, str]) -> Figure:
    values = [arm[:, position].tolist() for arm in _arms(tables, "dom_ratio")]
    layers = list(range(len(values[0])))
    return Figure(
        f"dom-ratio-{position}",
        f"DomRatio at position {position}" + (f", {texts[position]}" if position in texts else ""),
        "max |h| / mean |h| of the residual, by layer.",
        ("observables",),
        [line(layers, values[look], arm, look) for look, arm in enumerate(ARMS)],
        {"xaxis": axis("layer"), "yaxis": log_axis("", *values)},
        ("layer", *ARMS),
        list(zip(layers, *values, strict=True)),
    )
