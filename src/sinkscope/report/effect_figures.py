"""The figures of what interventions do beside making and removing sinks: mediation, confounds, activations."""

from __future__ import annotations

from typing import Any

import numpy as np

from sinkscope.report.figure import LOOKS, MAP_COLOURS, PATTERNS, Figure, axis, categories, floats, line, rounded
from sinkscope.report.run_contents import Run
from sinkscope.report.text import interval, number, plotted
from sinkscope.report.trace_figures import unit_name

NUM_UNITS, NUM_CONDITIONS = 2, 4
"""Histograms shown: so many units, under so many conditions each."""
ROUNDING = 1e-9
EFFECT_COLUMNS = ("before", "after", "difference", "low", "high", "n")


def condition_name(row: dict[str, Any]) -> str:
    """What was done, where and how strongly: amplify variance @10 x4."""
    name = row["condition"].replace("_", " ").replace("+", " + ")
    target = "" if row["target"] is None else f" @{row['target']}"
    factor = "" if row.get("factor") is None else f" \N{MULTIPLICATION SIGN}{row['factor']:g}"
    return name + target + factor


def strongest_doses(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of each condition, target and quantity at its largest factor."""
    strongest: dict[tuple, dict[str, Any]] = {}
    for row in entries:
        key = (row["condition"], row["target"], row.get("quantity"), row.get("position"))
        kept = strongest.get(key)
        if kept is None or (row["factor"] or 0) > (kept["factor"] or 0):
            strongest[key] = row
    return list(strongest.values())


def mediation(run: Run) -> Figure:
    """Total, direct and indirect effects, with the indirect share and its interval."""
    entries = run.rows("mediation")
    names = [plotted(f"{row['intervention']} through {row['mediator']}".replace("_", " ")) for row in entries]
    shares = [f"share {number(row['share'])}<br>{interval(row['low'], row['high'])}" for row in entries]
    parts = ("total", "direct", "indirect")
    return Figure(
        "mediation-effects",
        "Total, direct and indirect effect",
        "Rise of the sink rate at the target: in all, while the mediator is held at its untouched values, and the rest "
        "with its share and interval.",
        ("mediation",),
        [
            {
                "type": "bar",
                "x": [name.replace(" through ", "<br>through ") for name in names],
                "y": rounded([row[part] for row in entries]),
                "name": part,
                "marker": {"color": LOOKS[index][0], "pattern": {"shape": PATTERNS[index]}},
                "text": shares if part == "indirect" else None,
                "textposition": "outside",
                "cliponaxis": False,
            }
            for index, part in enumerate(parts)
        ],
        {"xaxis": {"type": "category"}, "yaxis": axis("sink rate")},
        ("intervention", "mediator", *parts, "indirect share", "low", "high", "n"),
        [tuple(row.values()) for row in entries],
        340,
    )


def confounds(run: Run) -> Figure:
    """Every quantity after over before, under every condition."""
    entries = strongest_doses(run.rows("effects"))
    names = list(dict.fromkeys(condition_name(row) for row in entries))
    quantities = list(dict.fromkeys(row["quantity"] for row in entries))
    ratios = np.full((len(names), len(quantities)), np.nan)
    for row in entries:
        # Of what is 0 but for rounding, such as the entropy of a token that sees one key, there is no ratio.
        if abs(row["before"]) > ROUNDING and row["after"] / row["before"] > 0:
            ratios[names.index(condition_name(row)), quantities.index(row["quantity"])] = row["after"] / row["before"]
    labels = [[number(float(value)) if np.isfinite(value) else "" for value in row] for row in ratios]
    return Figure(
        "confounds",
        "Every quantity, after over before",
        "A stronger shade is further from 1, either way; blank where there is no ratio. Factors at their largest.",
        ("effects",),
        [
            {
                "type": "heatmap",
                "x": [plotted(name.replace("_", " ")).replace(" ", "<br>") for name in quantities],
                "y": list(map(plotted, names)),
                # Beyond a factor of 16 one colour: the number in the cell says how far.
                "z": rounded(np.minimum(np.abs(np.log2(ratios)), 4)),
                "text": labels,
                "texttemplate": "%{text}",
                "hovertemplate": "%{y}<br>%{x}<br>after / before %{text}<extra></extra>",
                "colorscale": MAP_COLOURS,
                "zmin": 0,
                "showscale": False,
                "hoverongaps": False,
                "xgap": 1,
                "ygap": 1,
            }
        ],
        {
            "xaxis": {"side": "top", "type": "category", "showgrid": False, "dtick": 1, "automargin": True},
            "yaxis": categories(list(map(plotted, names)), autorange="reversed", showgrid=False),
        },
        ("condition", "quantity", *EFFECT_COLUMNS),
        [
            (condition_name(row), row["quantity"].replace("_", " "), *(row[name] for name in EFFECT_COLUMNS))
            for row in entries
        ],
        80 + 22 * len(names),
    )


def histograms(run: Run) -> list[Figure]:
    """Activations of the first units at the sink, at the target and elsewhere."""
    entries = run.rows("histograms")
    groups: dict[tuple[str, str], list[dict]] = {}
    for row in entries:
        groups.setdefault((unit_name(row), condition_name(row)), []).append(row)
    units = list(dict.fromkeys(unit for unit, _ in groups))[:NUM_UNITS]
    conditions = list(dict.fromkeys(condition for _, condition in groups))[:NUM_CONDITIONS]
    shown = [(unit, condition) for unit in units for condition in conditions if (unit, condition) in groups]
    return [_histogram(index, *names, groups[names]) for index, names in enumerate(shown)]


def _histogram(index: int, unit: str, condition: str, entries: list[dict]) -> Figure:
    traces = []
    for look, place in enumerate(("sink", "target", "elsewhere")):
        own = sorted((row for row in entries if row["place"] == place), key=lambda row: row["bin_low"])
        if own:
            counts = floats([row["count"] for row in own])
            # Shares: a batch has one sink token a sequence and many elsewhere.
            x = [row["bin_low"] for row in own] + [own[-1]["bin_high"]]
            share = rounded(np.append(counts, counts[-1]) / max(counts.sum(), 1))
            trace = line(x, share, place, look, mode="lines")
            trace["line"] |= {"shape": "hv"}
            traces.append(trace)
    return Figure(
        f"histogram-{index}",
        f"Unit {unit}, {condition}",
        "Activations of the unit as shares of the tokens at each place.",
        ("histograms",),
        traces,
        {"xaxis": axis("activation"), "yaxis": axis("share of tokens", rangemode="tozero")},
        ("place", "from", "to", "tokens"),
        [(row["place"], row["bin_low"], row["bin_high"], row["count"]) for row in entries if row["count"]],
        260,
    )
