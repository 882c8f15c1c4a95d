"""The page of a run of `sinkscope audit`: what to do with each scheme, what it costs and where, and the sink tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sinkscope.audits.schemas import CONTROL_FAILS
from sinkscope.audits.texts import held_out_in_words
from sinkscope.pages import html
from sinkscope.pages.figure import Figure, axis, categories, heat_map, level, levels, line, log_axis
from sinkscope.pages.text import NO_VALUE, interval, plotted, token_text
from sinkscope.results.run import Run
from sinkscope.results.tables import rows_where

Table = Mapping[str, list]
LOOKS = {"linear": 0, "cache": 1, "window": 2}
"""The colour of each kind of scheme."""
NUM_TOKENS = 20
"""How many different sink tokens are listed."""


def write_page(run: Run, destination: Path) -> None:
    """Writes the page of an audit."""
    tables, summary = run.tables, run.summary
    title = f"What breaks, and what to do: {summary['model']}"
    tokens = summary["tokens"]
    circumstances = (
        f"{summary['family']}, {summary['num_layers']} layers; "
        f"{held_out_in_words(tokens['count'], tokens['length'], tokens.get('source'))}; loss {summary['loss']:.3f}"
    )
    page_figures = figures(run)
    by_id = {figure.id: figure for figure in page_figures}
    remedies, curve, scatter = by_id.get("remedies"), by_id.get("curve"), by_id["scatter"]
    # What helps, the largest effect first, and then what does not.
    trials = sorted(rows_where(tables["remedies"]), key=lambda row: (not row["holds"], -row["won"]))
    html.write_page(
        destination,
        "audits/audit_page.html",
        title,
        page_figures,
        circumstances,
        summary=summary,
        decisions=_decisions(tables["decisions"]),
        schemes=_schemes(tables["damages"]),
        advice=_advice(row for row in trials if row["is_loaded"]),
        experiments=_advice(row for row in trials if not row["is_loaded"]),
        what=[(row["remedy"], row["scheme"], row["what"]) for row in trials],
        remedies=remedies,
        curve=curve,
        worst_modules=_worst_modules(tables["damages"]),
        maps=[figure for figure in page_figures if figure not in (remedies, curve, scatter)],
        scatter=scatter,
        command=run.command,
        **_sinks(tables["sink_tokens"]),
    )


def figures(run: Run) -> list[Figure]:
    """The figures of the page: what is left of the damage, prediction against measurement, maps of modules."""
    figures = [_scatter(run.tables["damages"], run.summary), *_maps(run.tables)]
    first = [_remedies(run.tables["remedies"]), _curve(run.tables["curve"])]
    return [*(figure for figure in first if figure is not None), *figures]


def _two_digits(value: float | None) -> str:
    """A correlation; of values that are all equal there is none, which a file keeps as null."""
    return "nan" if value is None else f"{value:.2f}"


def _measured(row: Mapping[str, Any], name: str = "measured") -> tuple[float, str]:
    """A value of a row, and its interval in words."""
    return row[name], interval(row[f"{name}_low"], row[f"{name}_high"])


def _decisions(decisions: Table) -> list[tuple]:
    return [
        (
            row["scheme"],
            row["verdict"],
            row["bits"],
            *_measured(row, "costs"),
            row["repair"] or NO_VALUE,
            *_measured(row, "left"),
        )
        for row in rows_where(decisions)
    ]


def _schemes(damages: Table) -> list[tuple]:
    rows = []
    for row in rows_where(damages, level="model"):
        control = row["control"]
        fails = abs(control) > CONTROL_FAILS
        rows.append(
            (
                row["scheme"],
                *_measured(row),
                row["predicted"],
                *_measured(row, "divergence"),
                f"{row['same_top']:.1%}",
                f"{control:+.4f}" + ", fails" * fails,
            )
        )
    return rows


def _advice(trials: Iterable[Mapping[str, Any]]) -> list[tuple]:
    """The rows of the table of remedies: whether to apply each, and what it and its control recover."""
    return [
        (
            "yes" if row["holds"] else "no",
            row["remedy"],
            row["scheme"],
            row["damage"],
            *_measured(row, "won"),
            *_measured(row, "control"),
            row["control_is"],
        )
        for row in trials
    ]


def _remedies(remedies: Table) -> Figure | None:
    """What each remedy leaves of the damage of each scheme."""
    rows = rows_where(remedies)
    if not rows:
        return None
    schemes = list(dict.fromkeys(row["scheme"] for row in rows))
    names = list(dict.fromkeys(row["remedy"] for row in rows))
    labels = {scheme: plotted(scheme) for scheme in schemes}
    damages = {row["scheme"]: row["damage"] for row in rows}
    traces = [line(list(labels.values()), [damages[s] for s in schemes], "without a remedy", 5, mode="markers")]
    for look, name in enumerate(names):
        of_remedy = [row for row in rows if row["remedy"] == name]
        ends = {end: [row[f"left_{end}"] for row in of_remedy] for end in ("low", "high")}
        x = [labels[row["scheme"]] for row in of_remedy]
        traces.append(line(x, [row["left"] for row in of_remedy], name, look, mode="markers", **ends))
    return Figure(
        "remedies",
        "Damage that remains with each remedy",
        "Loss above that of the baseline in 16 bits, in nats a token. The controls are in the table.",
        ("remedies",),
        traces,
        {
            "xaxis": categories(list(labels.values())),
            "yaxis": axis("nats a token"),
            **levels(level(0, "baseline")),
        },
        ("remedy", "scheme", "damage", "remains", "95 % interval", "control recovers", "95 % interval"),
        [
            (row["remedy"], row["scheme"], row["damage"], *_measured(row, "left"), *_measured(row, "control"))
            for row in rows
        ],
        height=380,
    )


def _curve(curve: Table) -> Figure | None:
    """What is left of each damage against the bits that modules in 16 bits add."""
    rows = rows_where(curve)
    if not rows:
        return None
    traces = []
    for look, scheme in enumerate(dict.fromkeys(row["scheme"] for row in rows)):
        of_scheme = [row for row in rows if row["scheme"] == scheme]
        ends = {end: [row[f"left_{end}"] for row in of_scheme] for end in ("low", "high")}
        x, y = ([row[name] for row in of_scheme] for name in ("bits", "left"))
        traces.append(line(x, y, scheme, look, mode="lines+markers", **ends))
    return Figure(
        "curve",
        "Damage against the modules that stay in 16 bits",
        "Fused groups with the largest predicted damage for their size, one after another, up to the budget.",
        ("curve",),
        traces,
        {"xaxis": axis("bits a weight, or a number of the cache"), "yaxis": axis("nats a token")},
        ("scheme", "groups", "modules", "bits", "remains", "95 % interval"),
        [(row["scheme"], row["num_groups"], row["num_modules"], row["bits"], *_measured(row, "left")) for row in rows],
        height=380,
    )


def _worst_modules(damages: Table) -> list[tuple]:
    return [
        (row["place"], row["scheme"], row["predicted"], *_measured(row)) for row in rows_where(damages, level="module")
    ]


def _maps(tables: Mapping[str, Table]) -> list[Figure]:
    """The modules by predicted damage: of the worst scheme of linear layers, and of attention."""
    predictions = rows_where(tables["predictions"])
    totals = Counter[str]()
    for row in predictions:
        totals[row["scheme"]] += row["predicted"]
    figures = []
    linear = [row for row in predictions if row["what"] == "linear"]
    if linear:
        worst = max({row["scheme"] for row in linear}, key=lambda name: totals[name])
        rows = [row | {"y": row["kind"]} for row in linear if row["scheme"] == worst]
        figures.append(_map("map-linear", f"Predicted damage by module: {worst}", rows, "predicted", "predictions"))
    rows = [row | {"y": row["scheme"]} for row in predictions if row["what"] != "linear"]
    if rows:
        figures.append(
            _map("map-attention", "Predicted damage by layer: cache and window", rows, "predicted", "predictions")
        )
    rows = [
        row | {"y": row["kind"] if row["what"] == "inputs" else row["what"]} for row in rows_where(tables["readings"])
    ]
    title = "Largest token over median token in the input of each module"
    figures.append(_map("map-tokens", title, rows, "token_ratio", "readings"))
    return figures


def _map(id: str, title: str, rows: Sequence[Mapping[str, Any]], column: str, source: str) -> Figure:
    kinds = list(dict.fromkeys(row["y"] for row in rows))[::-1]
    layers = sorted({row["layer"] for row in rows})
    values = np.full((len(kinds), len(layers)), np.nan)
    for row in rows:
        if row[column] is not None:
            values[kinds.index(row["y"]), layers.index(row["layer"])] = row[column]
    labels = list(map(plotted, kinds))
    where = "layer %{x}, %{y}"
    return Figure(
        id,
        title,
        "Nats a token." if source == "predictions" else "Where this ratio is large, a sink token sets the scale.",
        (source,),
        [heat_map(layers, labels, values, column.replace("_", " "), where, logarithmic=True)],
        {"xaxis": axis("layer"), "yaxis": categories(labels)},
        ("layer", "module", column.replace("_", " ")),
        [(row["layer"], row["y"], row[column]) for row in rows],
        height=140 + 24 * len(kinds),
    )


def _scatter(damages: Table, summary: Mapping[str, Any]) -> Figure:
    """Predicted against measured damage of each scheme in each group of layers."""
    rows = rows_where(damages, level="group")
    positive = [row for row in rows if row["measured"] > 0]  # the axes are logarithmic
    num_hidden = len(rows) - len(positive)
    traces = []
    for what, look in LOOKS.items():
        of_kind = [row for row in positive if row["what"] == what]
        text = [plotted(f"{row['scheme']}, {row['place']} layers") for row in of_kind]
        extra = {"mode": "markers", "text": text, "hovertemplate": "%{text}<br>%{x:.4g}, %{y:.4g}<extra></extra>"}
        ends = {end: [row[f"measured_{end}"] for row in of_kind] for end in ("low", "high")}
        x, y = ([row[name] for row in of_kind] for name in ("predicted", "measured"))
        traces.append(line(x, y, what, look, **ends, **extra))
    predicted, measured = ([row[name] for row in positive] for name in ("predicted", "measured"))
    if positive:
        diagonal = [min(predicted), max(predicted)]
        traces.append(line(diagonal, diagonal, "equal", 5, mode="lines"))
    return Figure(
        "scatter",
        "Predicted and measured damage",
        f"{len(rows)} cells: each scheme in each third of the layers, in nats a token. Rank correlation "
        f"{_two_digits(summary.get('rank_correlation'))}; of the measurements on one half of the texts with those on "
        f"the other half {_two_digits(summary.get('repeatability'))}."
        + f" {num_hidden} cells without measured damage are in the table alone."
        * (num_hidden > 0),
        ("damages",),
        traces,
        {"xaxis": log_axis("predicted", predicted), "yaxis": log_axis("measured", measured)},
        ("layers", "scheme", "predicted", "measured", "95 % interval"),
        [(row["place"], row["scheme"], row["predicted"], *_measured(row)) for row in rows],
        height=420,
    )


def _sinks(sinks: Table) -> dict[str, list]:
    """The most frequent sink tokens, and each of them where it is first a sink."""
    rows = rows_where(sinks)
    frequent = Counter((row["token"], row["token_text"]) for row in rows).most_common(NUM_TOKENS)
    places: dict[int, list[int]] = {}
    for row in rows:
        places.setdefault(row["token"], []).append(row["position"])
    entries = [
        (
            str(token),
            NO_VALUE if text is None else token_text(text),
            count,
            ", ".join(map(str, sorted(set(places[token]))[:8])),
        )
        for (token, text), count in frequent
    ]
    first = {row["token"]: row for row in reversed(rows)}
    return {"sinks": entries, "in_texts": [first[token] for (token, text), _ in frequent if text is not None]}
