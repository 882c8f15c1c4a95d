"""The page of `sinkscope intervene`: what the interventions changed, beside the untouched model and a control."""

from __future__ import annotations

from pathlib import Path

from sinkscope.measures.sink_score import LATER_QUERIES
from sinkscope.report import html
from sinkscope.report.figure import Figure, axis, line, log_axis
from sinkscope.report.html import header, write_page
from sinkscope.report.text import escaped, isolated, token_text
from sinkscope.report.trace import with_texts
from sinkscope.studies.intervene import ARMS, Intervened

MOST_POSITIONS = 256
"""Positions that a curve shows."""


def write_intervened_page(result: Intervened, command: str, destination: Path) -> None:
    """Writes the page of a result."""
    recording, figures = result.before.recording, intervened_figures(result)
    title, count = f"Interventions on {recording.model_name}", recording.batch.num_sequences
    many = "one sequence" if count == 1 else f"{count} sequences"
    told = "".join(
        f"<section><h3>{name}</h3><p>{isolated(getattr(result, arm).story)}</p></section>"
        for arm, name in zip(ARMS, ("Before", "After", "Under the control"), strict=True)
    )
    means, texts = dict(result.tables["means"]), position_texts(result)
    if texts:
        means = {"token": [texts[position] for position in means["position"]], **means}
    listed = html.table(tuple(means), list(zip(*means.values(), strict=True)))
    drawn = "".join(html.figure(figure) for figure in figures)
    body = [
        header(title, f"{many} of {recording.batch.length} tokens"),
        f'<main id="main"><div class="runs">{told}</div>',
        f"<p>The control: {escaped(result.control_is)}. Calibrated on {escaped(result.calibrated_on)}.</p>",
        f'<div class="figures">{drawn}</div>',
        f"<h2>Means over layers</h2><p>At the positions acted on and at the first sinks.</p>{listed}",
        f"<h2>Method</h2><p><code>{isolated(command)}</code></p></main>",
    ]
    write_page(destination, title, "".join(body), figures)


def position_texts(result: Intervened) -> dict[int, str]:
    """The tokens by position, where one text was read and can be written."""
    before = result.before
    if before.tokenizer is None or before.recording.batch.num_sequences > 1:
        return {}
    return {at: token_text(before.token_text(token)) for at, token in enumerate(before.recording.batch.ids[0].tolist())}


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
    drawn = Figure(
        quantity.replace("_", "-"),
        title,
        caption,
        ("observables",),
        [line(places, own, arm, look) for look, (arm, own) in enumerate(zip(ARMS, values, strict=True))],
        {"xaxis": axis("key position"), "yaxis": axis("", rangemode="tozero")},
        ("position", *ARMS),
        list(zip(places, *values, strict=True)),
    )
    return with_texts(position_texts(result), drawn)


def _by_layer(result: Intervened, position: int) -> Figure:
    values = [arm["dom_ratio"].double()[:, position].tolist() for arm in result.observables]
    layers, texts = list(range(len(values[0]))), position_texts(result)
    return Figure(
        f"dom-ratio-{position}",
        f"DomRatio at position {position}" + (f", {texts[position]}" if texts else ""),
        "max |h| / mean |h| of the residual, by layer.",
        ("observables",),
        [line(layers, own, arm, look) for look, (arm, own) in enumerate(zip(ARMS, values, strict=True))],
        {"xaxis": axis("layer"), "yaxis": log_axis("", *values)},
        ("layer", *ARMS),
        list(zip(layers, *values, strict=True)),
    )
