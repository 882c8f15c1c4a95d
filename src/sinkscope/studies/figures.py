"""The figures of a study's page, by section: what makes a sink, what it needs, what carries the effect, what else
changes.

Those of the chain are in `tracing.figures`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sinkscope.pages.figure import (
    LOOKS,
    MAP_COLOURS,
    PATTERNS,
    Figure,
    axis,
    categories,
    floats,
    heat_map,
    level,
    levels,
    line,
    points,
    rounded,
    sink_level,
)
from sinkscope.pages.text import interval, number, percent, plotted
from sinkscope.results.run import Run
from sinkscope.studies.conditions import BASELINE, MOVED_FIGURE, REMAINING_FIGURE, in_words, labels_in
from sinkscope.studies.judging import QUARTER, RISE, SPARED
from sinkscope.tracing.figures import IDENTITIES, dose_curve, is_drawn, neuron_name

NUM_NEURONS, NUM_CONDITIONS = 2, 4
"""Histograms are shown for this many neurons, each under this many conditions."""
ROUNDING = 1e-9
"""What is not larger than this counts as 0."""
EFFECT_COLUMNS = ("before", "after", "difference", "low", "high", "n")


def study_figures(run: Run) -> dict[str, list[Figure]]:
    """Figures by section; a section whose tables are empty has none."""
    return {
        "creation": _if_any(run, "rates", created) + dose_response(run) + _if_any(run, "effects", _forest),
        "necessity": _if_any(run, "effects", _remaining) + _if_any(run, "rates", moved),
        "mediation": _if_any(run, "mediation", mediation),
        "confounds": _if_any(run, "effects", confounds),
        "histograms": histograms(run),
        "text": _if_any(run, "text_losses", _text_losses) + _if_any(run, "head_roles", _head_roles),
    }


def _if_any(run: Run, table: str, build: Callable[[Run], Figure | None]) -> list[Figure]:
    figure = build(run) if any(run.tables[table].values()) else None
    return [] if figure is None else [figure]


def _text_losses(run: Run) -> Figure:
    """What is lost on text by what was removed."""
    rows = run.rows("text_losses")
    names = [row["removed"].replace("_", " ") for row in rows]
    changes, low, high = ([row[name] for row in rows] for name in ("change", "low", "high"))
    return Figure(
        "text-losses",
        "What is lost on text without the sink",
        "Change of the mean loss in nats, paired by sequence, with its interval. The random ones are the controls.",
        ("text_losses",),
        [points(changes, names, "change", 0, low=low, high=high, showlegend=False)],
        {"xaxis": axis("change of the loss, nats"), "yaxis": categories(names[::-1])},
        ("removed", "loss", "change", "low", "high", "n"),
        [tuple(row.values()) for row in rows],
        120 + 22 * len(names),
    )


def _head_roles(run: Run) -> Figure:
    """A map of what the heads with the sink are worth on text."""
    rows = run.rows("head_roles")
    num_heads = max(row["head"] for row in rows) + 1
    values = np.full((run.summary["num_layers"], num_heads), np.nan)
    for row in rows:
        values[row["layer"], row["head"]] = row["text"]
    return Figure(
        "head-roles",
        "What each head with the sink is worth on text",
        "Rise of the loss with the head at its mean, to first order, over what the heads of the model are worth on "
        "average. A head is dormant where it is worth less than a tenth of that, and active where more, by its "
        "interval on prose and on code; the table has both.",
        ("head_roles",),
        [heat_map(range(num_heads), range(len(values)), values, "worth", "layer %{y}, head %{x}", largest=2.0)],
        {"xaxis": axis("head"), "yaxis": axis("layer")},
        ("layer", "head", "role", "on text", "interval", "on code", "interval"),
        [
            (
                *(row[name] for name in ("layer", "head", "role", "text")),
                interval(row["text_low"], row["text_high"]),
                row["code"],
                interval(row["code_low"], row["code_high"]),
            )
            for row in rows
        ],
    )


def _forest(run: Run) -> Figure | None:
    quantities = {"sink_rate_at_target": "at the target", "sink_rate_at_sink": "at the sink"}
    entries = [row for row in strongest_doses(run.rows("effects")) if row["quantity"] in quantities]
    if not entries:
        return None
    names = list(dict.fromkeys(plotted(condition_name(row)) for row in entries))[::-1]
    traces = []
    for look, (quantity, label) in enumerate(quantities.items()):
        rows = [row for row in entries if row["quantity"] == quantity]
        differences, low, high = ([row[name] for row in rows] for name in ("difference", "low", "high"))
        conditions = [plotted(condition_name(row)) for row in rows]
        traces.append(points(differences, conditions, label, look, low=low, high=high))
    return Figure(
        "forest",
        "Change of the sink rate under every intervention",
        "Change against the baseline, with its interval over sequences. Between the dotted lines, at 5 points, it "
        "counts as no change. Interventions with a factor are shown at their largest factor.",
        ("effects",),
        traces,
        {
            "xaxis": axis("change of the sink rate"),
            "yaxis": categories(names),
            **levels(
                level(-RISE, "", vertical=True), level(RISE, f"\N{PLUS-MINUS SIGN}{percent(RISE)}", vertical=True)
            ),
        },
        ("condition", "quantity", *EFFECT_COLUMNS),
        [
            (condition_name(row), quantities[row["quantity"]], *(row[name] for name in EFFECT_COLUMNS))
            for row in entries
        ],
        120 + 22 * len(names),
    )


def _remaining(run: Run) -> Figure | None:
    """Share of the sink rate that each removal leaves."""
    labels = labels_in(REMAINING_FIGURE)
    entries = [
        row
        for row in run.rows("effects", quantity="sink_rate_at_sink")
        if row["condition"] in labels and row["target"] not in targets(run) and row["before"] > 0
    ]
    if not entries:
        return None
    sets = run.rows("random_sets")
    names = [labels[row["condition"]] for row in entries]
    # The interval is that of the difference. Where rates differ by sequence, its end may lie below a rate of 0.
    shares, low, high = (
        [max(0.0, row["before"] + row[part]) / row["before"] for row in entries]
        for part in ("difference", "low", "high")
    )
    random_name = f"{len(sets)} matched random sets"
    traces = [points(shares, names, "removal", 0, low=low, high=high, marker={"size": 8}, showlegend=False)]
    if sets:
        remaining = [row["remaining"] for row in sets]
        faint = {"marker": {"opacity": 0.7}, "showlegend": False}
        traces.append(points(remaining, [random_name] * len(sets), "one random set", 4, **faint))
    listed = list(zip(names, shares, low, high, strict=True))
    return Figure(
        "remaining",
        "How much of the sink is left",
        "Sink rate over that of the baseline, with the interval of the change. The minimal set is necessary if less "
        f"than a quarter of the sink is left without it, while each matched random set leaves {percent(SPARED)}.",
        ("effects", "random_sets"),
        traces,
        {
            "xaxis": axis("share of the sink rate left", rangemode="tozero"),
            "yaxis": categories([random_name, *names[::-1]]),
            **levels(level(QUARTER, "a quarter", vertical=True), level(SPARED, percent(SPARED), vertical=True)),
        },
        ("removal", "share left", "low", "high"),
        listed + [(f"random set {row['set']}", row["remaining"], None, None) for row in sets],
        140 + 26 * (len(names) + 1),
    )


def mediation(run: Run) -> Figure:
    """Total, direct and indirect effect of each intervention, with the indirect share and its interval."""
    entries = run.rows("mediation")
    names = [
        plotted(f"{in_words(row['intervention'])}, through {row['mediator'].replace('_', ' ')}") for row in entries
    ]
    shares = [f"share {number(row['share'])}<br>{interval(row['low'], row['high'])}" for row in entries]
    parts = ("total", "random", "direct", "indirect")
    return Figure(
        "mediation-effects",
        "Total, direct and indirect effect",
        "Rise of the sink rate at the target. Total: nothing is held. Random: as many matched random neurons or "
        "dimensions are held at their baseline values. Direct: the mediator is held. Indirect: random minus direct, "
        "with its share of the total.",
        ("mediation",),
        [
            {
                "type": "bar",
                "x": [name.replace(", through ", "<br>through ") for name in names],
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
    """Every quantity under every condition, over that of the baseline."""
    entries = strongest_doses(run.rows("effects"))
    names = list(dict.fromkeys(condition_name(row) for row in entries))
    quantities = list(dict.fromkeys(row["quantity"] for row in entries))
    ratios = np.full((len(names), len(quantities)), np.nan)
    for row in entries:
        # There is no ratio to a value that is 0 but for rounding, such as the entropy of a token with a single key.
        if abs(row["before"]) > ROUNDING and row["after"] / row["before"] > 0:
            ratios[names.index(condition_name(row)), quantities.index(row["quantity"])] = row["after"] / row["before"]
    labels = [[number(float(value)) if np.isfinite(value) else "" for value in row] for row in ratios]
    return Figure(
        "confounds",
        "Every quantity, over that of the baseline",
        "The stronger the shade, the further from 1, upwards or downwards. Blank: no ratio. Interventions with a "
        "factor are shown at their largest factor.",
        ("effects",),
        [
            {
                "type": "heatmap",
                "x": [plotted(name.replace("_", " ")) for name in quantities],
                "y": list(map(plotted, names)),
                # Beyond a factor of 16 the colour stays the same; the number in the cell says how far.
                "z": rounded(np.minimum(np.abs(np.log2(ratios)), 4)),
                "text": labels,
                "texttemplate": "%{text}",
                "hovertemplate": "%{y}<br>%{x}<br>%{text} times the baseline<extra></extra>",
                "colorscale": MAP_COLOURS,
                "zmin": 0,
                "showscale": False,
                "hoverongaps": False,
                "xgap": 1,
                "ygap": 1,
            }
        ],
        {
            "xaxis": {
                "side": "top",
                "type": "category",
                "showgrid": False,
                "dtick": 1,
                "tickangle": -45,
                "automargin": True,
            },
            "yaxis": categories(list(map(plotted, names)), autorange="reversed", showgrid=False),
        },
        ("condition", "quantity", *EFFECT_COLUMNS),
        [
            (condition_name(row), row["quantity"].replace("_", " "), *(row[name] for name in EFFECT_COLUMNS))
            for row in entries
        ],
        200 + 22 * len(names),
    )


def histograms(run: Run) -> list[Figure]:
    """Activations of the first neurons at the sink, at the target and elsewhere."""
    entries = run.rows("histograms")
    groups: dict[tuple[str, str], list[dict]] = {}
    for row in entries:
        groups.setdefault((neuron_name(row), condition_name(row)), []).append(row)
    neurons = list(dict.fromkeys(neuron for neuron, _ in groups))[:NUM_NEURONS]
    conditions = list(dict.fromkeys(condition for _, condition in groups))[:NUM_CONDITIONS]
    pairs = [(neuron, condition) for neuron in neurons for condition in conditions if (neuron, condition) in groups]
    return [_histogram(index, *names, groups[names]) for index, names in enumerate(pairs)]


def _histogram(index: int, neuron: str, condition: str, entries: list[dict]) -> Figure:
    traces = []
    for look, place in enumerate(("sink", "target", "elsewhere")):
        rows = sorted((row for row in entries if row["place"] == place), key=lambda row: row["bin_low"])
        if rows:
            counts = floats([row["count"] for row in rows])
            # Shares and not counts: a sequence has one token at the sink and many elsewhere.
            x = [row["bin_low"] for row in rows] + [rows[-1]["bin_high"]]
            share = rounded(np.append(counts, counts[-1]) / max(counts.sum(), 1))
            trace = line(x, share, place, look, mode="lines")
            trace["line"] |= {"shape": "hv"}
            traces.append(trace)
    return Figure(
        f"histogram-{index}",
        f"Neuron {neuron}: {condition}",
        "Distribution of the neuron's activation: share of the tokens at each place.",
        ("histograms",),
        traces,
        {"xaxis": axis("activation"), "yaxis": axis("share of tokens", rangemode="tozero")},
        ("place", "from", "to", "tokens"),
        [(row["place"], row["bin_low"], row["bin_high"], row["count"]) for row in entries if row["count"]],
        260,
    )


NUM_TARGETS = 4
DOSED = (*IDENTITIES, "swap_deviation", "random_direction")


def targets(run: Run) -> list[int]:
    """The positions at which the study tried to make a sink."""
    pairs = set(zip(run.tables["rates"]["condition"], run.tables["rates"]["target"], strict=True))
    acted = {target for condition, target in pairs if condition in ("mask_to_self", "amplify_variance")}
    return sorted(target for target in acted if target is not None)


def _rates_figure(run: Run, id: str, title: str, caption: str, pairs: list[tuple[str, int | None]]) -> Figure | None:
    """Sink rate at every position, in the baseline and under each of the pairs (condition, target)."""
    series: dict[str, list[dict]] = {}
    acted_on = [target for _, target in pairs]
    for condition, target in [(BASELINE, None), *pairs]:
        for row in strongest_doses(run.rows("rates", condition=condition, target=target)):
            if is_drawn(run, row["position"], *acted_on):
                series.setdefault(condition_name(row), []).append(row)
    if len(series) < 2:
        return None
    ordered = {name: sorted(rows, key=lambda row: row["position"]) for name, rows in series.items()}
    return Figure(
        id,
        title,
        caption,
        ("rates",),
        [
            line(
                [row["position"] for row in rows],
                [row["rate"] for row in rows],
                name,
                5 if name == in_words(BASELINE) else look,
                low=[row["low"] for row in rows],
                high=[row["high"] for row in rows],
            )
            for look, (name, rows) in enumerate(ordered.items(), start=-1)
        ],
        {
            "xaxis": axis("key position"),
            "yaxis": axis("sink rate", rangemode="tozero"),
            **sink_level(),
        },
        ("condition", "position", "rate", "low", "high"),
        [
            (name, row["position"], row["rate"], row["low"], row["high"])
            for name, rows in ordered.items()
            for row in rows
        ],
        340,
    )


def created(run: Run) -> Figure | None:
    """Sink rates after acting on one position."""
    positions = targets(run)
    if not positions:
        return None
    target = 10 if 10 in positions else positions[0]
    return _rates_figure(
        run,
        "created",
        f"Sinks after acting on position {target}",
        "Sink rate at every position. Amplification is shown at its largest factor. Usually the old sink stays.",
        [("mask_to_self", target), ("amplify_variance", target)],
    )


def moved(run: Run) -> Figure | None:
    """Sink rates after each removal."""
    done = dict.fromkeys(zip(run.tables["rates"]["condition"], run.tables["rates"]["target"], strict=True))
    return _rates_figure(
        run,
        "moved",
        "Where the sink moves",
        "Sink rate at every position under each removal. The sink may be gone, weaker, or at another position.",
        [pair for pair in done if pair[0] in labels_in(MOVED_FIGURE) and pair[1] not in targets(run)],
    )


def dose_response(run: Run) -> list[Figure]:
    """The sink rate by factor, a figure for each of the first targets."""
    figures = []
    for target in targets(run)[:NUM_TARGETS]:
        traces, listed = [], []
        for look, condition in enumerate(DOSED):
            rows = dose_curve(run, condition, target)
            if rows:
                x, y, low, high = ([row[name] for row in rows] for name in ("factor", "rate", "low", "high"))
                traces.append(line(x, y, in_words(condition), look, low=low, high=high))
                listed += [(in_words(condition), *values) for values in zip(x, y, low, high, strict=True)]
        if traces:
            figures.append(
                Figure(
                    f"dose-{target}",
                    f"Dose and response at position {target}",
                    "Sink rate at this position by factor, with its variance amplified. Controls change as much in "
                    "other ways, at the largest factor only.",
                    ("rates",),
                    traces,
                    {
                        "xaxis": axis(
                            "factor", type="log", tickvals=[1, 1.5, 2, 4, 8], ticktext=["1", "1.5", "2", "4", "8"]
                        ),
                        "yaxis": axis("sink rate", rangemode="tozero"),
                    },
                    ("condition", "factor", "rate", "low", "high"),
                    listed,
                    340,
                )
            )
    return figures


def condition_name(row: dict[str, Any]) -> str:
    """What was done, where and how strongly, such as: variance amplified @10 x4."""
    target = "" if row["target"] is None else f" @{row['target']}"
    factor = "" if row.get("factor") is None else f" \N{MULTIPLICATION SIGN}{row['factor']:g}"
    return in_words(row["condition"]) + target + factor


def strongest_doses(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of each condition, target and quantity at its largest factor."""
    strongest: dict[tuple, dict[str, Any]] = {}
    for row in entries:
        key = (row["condition"], row["target"], row.get("quantity"), row.get("position"))
        kept = strongest.get(key)
        if kept is None or (row["factor"] or 0) > (kept["factor"] or 0):
            strongest[key] = row
    return list(strongest.values())
