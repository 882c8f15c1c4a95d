"""The page of `sinkscope intervene`: what the interventions changed, beside the untouched model and a control."""

from __future__ import annotations

from pathlib import Path

from sinkscope.measures.sink_score import LATER_QUERIES
from sinkscope.report import html
from sinkscope.report.figure import Figure, axis, line, log_axis
from sinkscope.report.html import header, write_page
from sinkscope.report.text import escaped, isolated
from sinkscope.studies.intervene import ARMS, Intervened

MOST_POSITIONS = 256
"""Positions that a curve shows."""


def write_intervened_page(result: Intervened, command: str, destination: Path) -> None:
    """Writes the page of a result."""
    recording, figures = result.before.recording, intervened_figures(result)
    title = f"Interventions on {recording.model_name}"
    told = "".join(
        f"<section><h3>{name}</h3><p>{isolated(getattr(result, arm).story)}</p></section>"
        for arm, name in zip(ARMS, ("Before", "After", "Under the control"), strict=True)
    )
    means = result.tables["means"]
    listed = html.table(tuple(means), list(zip(*means.values(), strict=True)))
    drawn = "".join(html.figure(figure, None) for figure in figures)
    body = [
        header(title, f"{recording.batch.num_sequences} sequences of {recording.batch.length} tokens"),
        f'<main id="main"><div class="runs">{told}</div>',
        f"<p>The control: {escaped(result.control_is)}. Calibrated on {escaped(result.calibrated_on)}.</p>",
        f'<div class="figures">{drawn}</div>',
        f"<h2>Means over layers</h2><p>At the positions acted on and at the first sinks.</p>{listed}",
        f"<h2>Method</h2><p><code>{isolated(command)}</code></p></main>",
    ]
    write_page(destination, title, "".join(body), figures)


def intervened_figures(result: Intervened) -> list[Figure]:
    """Curves by position and by layer, before, after and under the control."""
    length = result.before.recording.batch.length
    judged = min(max(length - LATER_QUERIES, 1), MOST_POSITIONS)
    cut = "" if judged == length else f" The first {judged} of {length} positions; the last ones have few queries."
    return [
        _curves(result, "sink_rate", "Sink rate by position", f"Mean over layers.{cut}", judged),
        _curves(result, "received", "Attention received by position", f"Mean over layers and heads.{cut}", judged),
        *(_by_layer(result, position) for position in result.shown[:4]),
    ]


def _curves(result: Intervened, quantity: str, title: str, caption: str, num_positions: int) -> Figure:
    values = [arm[quantity].double().mean(0)[:num_positions].tolist() for arm in result.observables]
    places = list(range(num_positions))
    return Figure(
        quantity.replace("_", "-"),
        title,
        caption,
        ("observables",),
        [line(places, own, arm, look) for look, (arm, own) in enumerate(zip(ARMS, values, strict=True))],
        {"xaxis": axis("key position"), "yaxis": axis("", rangemode="tozero")},
        ("position", *ARMS),
        list(zip(places, *values, strict=True)),
    )


def _by_layer(result: Intervened, position: int) -> Figure:
    values = [arm["dom_ratio"].double()[:, position].tolist() for arm in result.observables]
    layers = list(range(len(values[0])))
    return Figure(
        f"dom-ratio-{position}",
        f"DomRatio at position {position}",
        "max |h| / mean |h| of the residual, by layer.",
        ("observables",),
        [line(layers, own, arm, look) for look, (arm, own) in enumerate(zip(ARMS, values, strict=True))],
        {"xaxis": axis("layer"), "yaxis": log_axis("", *values)},
        ("layer", *ARMS),
        list(zip(layers, *values, strict=True)),
    )
