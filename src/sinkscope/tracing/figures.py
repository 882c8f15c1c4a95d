"""The five panels of the chain: variance, neurons, output vectors, dimensions, attention received; and what other
figures of a trace share with them.

Each function takes a Run, a saved folder or a result at hand, and reads its tables alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from sinkscope.measures.sink_score import LATER_QUERIES, RECEIVED_THRESHOLD
from sinkscope.pages.figure import (
    PATTERNS,
    Figure,
    axis,
    floats,
    line,
    log_axis,
    rounded,
    sink_level,
)
from sinkscope.pages.text import number, plotted, token_text
from sinkscope.results.run import Run, before_the_sink, curve_layers

NUM_POSITIONS_DRAWN = 64
"""Most positions in a curve."""
NUM_NEURONS_DRAWN = 6
"""Most super neurons with a bar."""
NUM_CURVES_DRAWN = 3
"""Most layers, or super neurons, with a curve each in one panel."""
PANEL_HEIGHT = 230
IDENTITIES = ("amplify_variance", "amplify_variance+before_norm", "scale_norm", "shift_mean")
"""Conditions that change nothing at a factor of 1. Those that put in a random or another sequence's deviation do."""
NOTHING = {"xaxis": {"visible": False}, "yaxis": {"visible": False}}


def chain_panels(run: Run) -> list[Figure]:
    """The chain from left to right: variance, neurons, output vectors, residual dimensions, attention received."""
    panels = [_variance(run), _writes(run), _output_vectors(run), _dom_ratio(run), _received(run)]
    return [with_tokens(run, panel) for panel in panels]


def position_texts(run: Run) -> dict[int, str]:
    """The tokens by position, if one sequence was read; several don't have the same tokens."""
    if run.summary["tokens"]["count"] > 1:
        return {}
    return {row["position"]: token_text(row["text"]) for row in run.rows("tokens", sequence=0)}


def with_tokens(run: Run, figure: Figure) -> Figure:
    """A figure by position with the tokens in its hover and its table, if one sequence was read."""
    return with_texts(position_texts(run), figure)


def with_texts(texts: Mapping[int, str], figure: Figure) -> Figure:
    """The same with the tokens given by position; unchanged without any."""
    if not texts or "position" not in figure.columns:
        return figure
    at = figure.columns.index("position") + 1
    traces = []
    for trace in figure.traces:
        tokens = [plotted(texts.get(position, "")) for position in trace["x"]]
        if trace["type"] == "heatmap":
            hover = trace["hovertemplate"].replace("%{x}", "%{x}, %{text}")
            traces.append(trace | {"text": [tokens] * len(trace["z"]), "hovertemplate": hover})
        else:
            traces.append(trace | {"text": tokens, "hovertemplate": "position %{x}, %{text}<br>%{y:.4g}"})
    rows = [(*row[:at], texts.get(row[at - 1], ""), *row[at:]) for row in figure.rows]
    columns = (*figure.columns[:at], "token", *figure.columns[at:])
    return replace(figure, traces=traces, columns=columns, rows=rows)


def shown_neurons(run: Run, most: int) -> tuple[list[dict], str]:
    """(at most `most` super neurons at the strongest key, a note on how many were left out). Those that first write the
    disparity, which the answer names, come first."""
    rows = run.rows("neurons", position=run.strongest)
    begins = [
        row for layer in run.appearance_layers for row in rows if row["layer"] == layer and row["role"] == "writes"
    ]
    ordered = begins + [row for row in rows if row not in begins]
    return ordered[:most], _cut(most, len(ordered), "neurons")


def _cut(shown: int, total: int, things: str) -> str:
    return f" The first {shown:,} of {total:,} {things}." if shown < total else ""


def is_drawn(run: Run, position: int, *targets: int | None) -> bool:
    """Whether a curve of sink rates shows this position: the first ones, the strongest key, and the targets of
    interventions. The last keys are left out: they have so few queries that they would look like sinks."""
    if position >= run.summary["tokens"]["length"] - LATER_QUERIES:
        return False
    return position < NUM_POSITIONS_DRAWN or position in (run.strongest, *targets)


def by_layer_and_position(run: Run, name: str) -> np.ndarray:
    """A column of `positions` as [layer, position]."""
    return floats(run.tables["positions"][name]).reshape(run.summary["num_layers"], -1)


def mean_over_layers(values_LT: np.ndarray) -> np.ndarray:
    """[T] the mean over those layers that have numbers: in a hybrid, layers without attention have none."""
    return values_LT[np.isfinite(values_LT).any(1)].mean(0)


def _variance(run: Run) -> Figure:
    applicable = run.summary.get("variance_ratio") is not None
    name = "value_variance" if applicable else "second_moment"
    values, law = (by_layer_and_position(run, column)[:, :NUM_POSITIONS_DRAWN] for column in (name, "averaging_law"))
    fits = run.tables["layers"]["averaging_law_r_squared"]
    fit = ", ".join(f"{number(fits[layer])} in layer {layer}" for layer in curve_layers(run.summary))
    positions = range(values.shape[1])
    cut = _cut(NUM_POSITIONS_DRAWN, run.summary["tokens"]["length"], "positions")
    alone = run.summary["tokens"]["count"] == 1
    why = "One sequence has no variance across sequences" if alone else "Position 0 has none across sequences here"
    traces, listed = [], []
    for look, layer in enumerate(curve_layers(run.summary)):
        traces.append(line(positions, values[layer], f"layer {layer}", look))
        if applicable:
            expected = line(positions, law[layer], "law", look, mode="lines", showlegend=look == 0)
            expected["line"] |= {"dash": "dot", "width": 1}
            traces.append(expected)
        listed += [(layer, position, values[layer, position], law[layer, position]) for position in positions]
    return Figure(
        "variance",
        "Variance by position" if applicable else "Energy by position",
        f"Variance of the value aggregation across sequences. Dotted: what averaging predicts (log R^2 {fit})." + cut
        if applicable
        else f"{why}, so the second moment is shown.{cut}",
        ("positions", "layers"),
        traces,
        {"xaxis": axis("position"), "yaxis": log_axis("", values[curve_layers(run.summary)].ravel())},
        ("layer", "position", name.replace("_", " "), "averaging law"),
        listed,
        PANEL_HEIGHT,
    )


def _writes(run: Run) -> Figure:
    values = by_layer_and_position(run, "largest_write")[:, :NUM_POSITIONS_DRAWN]
    of_neurons = sorted({neuron["layer"] for neuron in run.rows("neurons", position=run.strongest)})
    if run.appearance_layers:
        where, layers = "the layers where disparity appears", run.appearance_layers
    elif of_neurons:
        where, layers = "the layers of super neurons", of_neurons
    elif run.summary["sinks"]:
        where, layers = "the layer before the first with the sink", [before_the_sink(run.summary)]
    else:
        where, layers = "the first layer", [0]
    cut = _cut(NUM_CURVES_DRAWN, len(layers), "such layers")
    cut += _cut(NUM_POSITIONS_DRAWN, run.summary["tokens"]["length"], "positions")
    layers = layers[:NUM_CURVES_DRAWN]
    positions = range(values.shape[1])
    return Figure(
        "writes",
        "Neuron activations",
        f"Largest |activation| x output norm of any neuron, in {where}.{cut}",
        ("positions",),
        [line(positions, values[layer], f"layer {layer}", look) for look, layer in enumerate(layers)],
        {"xaxis": axis("position"), "yaxis": log_axis("", values[layers].ravel())},
        ("layer", "position", "largest write"),
        [(layer, position, values[layer, position]) for layer in layers for position in positions],
        PANEL_HEIGHT,
    )


def _output_vectors(run: Run) -> Figure:
    if run.rows("output_energy"):
        return _output_energy(run)
    neurons, cut = shown_neurons(run, NUM_NEURONS_DRAWN)
    names = [neuron_name(neuron) for neuron in neurons]
    series = (("top_share", "super neuron", 1), ("layer_top_share", "median of its layer", 2))
    return Figure(
        "output-vectors",
        "Down-projection energy",
        f"Energy share of the top dimension of each super neuron's output vector.{cut}"
        if neurons
        else "No super neurons were found.",
        ("neurons",),
        [
            {
                "type": "bar",
                "x": names,
                "y": rounded([neuron[column] for neuron in neurons]),
                "name": label,
                "marker": {"color": f"var(--series-{colour})", "pattern": {"shape": PATTERNS[colour - 1]}},
            }
            for column, label, colour in series
        ],
        {"xaxis": axis("layer:neuron", type="category"), "yaxis": axis("", range=[0, 1])} if neurons else NOTHING,
        ("layer", "expert", "neuron", "top share", "median of its layer"),
        [(u["layer"], u["expert"], u["neuron"], u["top_share"], u["layer_top_share"]) for u in neurons],
        PANEL_HEIGHT,
    )


def _output_energy(run: Run) -> Figure:
    entries = run.rows("output_energy")
    neurons = list(dict.fromkeys((row["kind"], neuron_name(row)) for row in entries))
    first = {neuron_name(neuron): place for place, neuron in enumerate(shown_neurons(run, len(neurons))[0])}
    supers = [neuron for neuron in neurons if neuron[0] == "super"]
    supers.sort(key=lambda neuron: first.get(neuron[1], len(first)))
    medians = [neuron for neuron in neurons if neuron[0] == "median"]
    traces, listed = [], []
    for look, (kind, name) in enumerate([*supers[:NUM_CURVES_DRAWN], *medians[:1]]):
        # Super neurons of one layer share its median neuron, whose rows then stand in the table once for each of them.
        by_rank = {row["rank"]: row for row in entries if row["kind"] == kind and neuron_name(row) == name}
        rows = [by_rank[rank] for rank in sorted(by_rank)]
        label = name if kind == "super" else "median"
        traces.append(
            line(
                [row["rank"] + 1 for row in rows],
                [row["energy_share"] for row in rows],
                label,
                5 if kind == "median" else look,
                customdata=[row["dimension"] for row in rows],
                hovertemplate="dimension %{customdata}<br>energy share %{y:.3g}",
            )
        )
        listed += [(name, kind, row["rank"] + 1, row["dimension"], row["energy_share"]) for row in rows[:10]]
    return Figure(
        "output-vectors",
        "Down-projection energy",
        "Energy of each output dimension, largest first, of super neurons and of the median neuron."
        + _cut(NUM_CURVES_DRAWN, len(supers), "super neurons"),
        ("output_energy",),
        traces,
        {
            "xaxis": axis("dimension's rank", type="log", tickvals=[1, 2, 5, 10, 20, 50]),
            "yaxis": log_axis("", [share for trace in traces for share in trace["y"]]),
        },
        ("layer:neuron", "kind", "rank", "dimension", "energy share"),
        listed,
        PANEL_HEIGHT,
    )


def _dom_ratio(run: Run) -> Figure:
    layers = run.tables["layers"]
    has_sink = any(value is not None for value in layers["dom_ratio_sink"])
    traces = [line(layers["layer"], layers["dom_ratio_elsewhere"], "elsewhere" if has_sink else "all positions", 1)]
    if has_sink:
        traces.insert(0, line(layers["layer"], layers["dom_ratio_sink"], "sink", 0))
    turned = layers["dom_ratio_turned_sink"]
    if any(value is not None for value in turned):
        traces.append(line(layers["layer"], turned, "sink, basis turned", 2))
    return Figure(
        "dom-ratio",
        "Residual dimensions",
        "DomRatio, max |h| / mean |h|, by layer. Elsewhere: mean over the positions that are not sinks. In a random "
        "basis massive dimensions vanish, but a shared direction does not: the table has its share of the energy.",
        ("layers",),
        traces,
        {
            "xaxis": axis("layer"),
            "yaxis": log_axis("", layers["dom_ratio_sink"], layers["dom_ratio_elsewhere"]),
        },
        ("layer", "DomRatio at the sink", "DomRatio elsewhere", "at the sink, basis turned", "share of one direction"),
        list(
            zip(
                *(layers[name] for name in ("layer", "dom_ratio_sink", "dom_ratio_elsewhere")),
                *(turned, layers["direction_share_sink"]),
                strict=True,
            )
        ),
        PANEL_HEIGHT,
    )


def sink_rates(run: Run) -> tuple[list[int], list, list, list]:
    """(positions, sink rates, lower ends, upper ends); the ends of intervals are None unless a study measured them."""
    measured = run.rows("rates", condition="untouched")
    if measured:
        measured = [row for row in measured if is_drawn(run, row["position"])]
        positions, rates, low, high = ([row[name] for row in measured] for name in ("position", "rate", "low", "high"))
        return positions, rates, low, high
    means = mean_over_layers(by_layer_and_position(run, "sink_rate"))
    positions = [position for position in np.flatnonzero(np.isfinite(means)).tolist() if is_drawn(run, position)]
    return positions, means[positions].tolist(), [None] * len(positions), [None] * len(positions)


def dose_curve(run: Run, condition: str, target: int) -> list[dict]:
    """Rows of `rates` at the target, by factor. A curve begins with the baseline's rate at factor 1 if the condition
    changes nothing there. A single dose stays a point."""
    at_target = run.rows("rates", condition=condition, target=target, position=target)
    dosed = sorted((row for row in at_target if row["factor"] is not None), key=lambda row: row["factor"])
    if len(dosed) > 1 and condition in IDENTITIES and dosed[0]["factor"] > 1:
        dosed = [row | {"factor": 1.0} for row in run.rows("rates", condition="untouched", position=target)] + dosed
    return dosed


def _received(run: Run) -> Figure:
    positions, rates, low, high = sink_rates(run)
    if not positions:
        return _received_unjudged(run)
    # Points without a line: between chosen keys nothing was recorded.
    chosen = {} if run.summary.get("keys") is None else {"mode": "markers"}
    return Figure(
        "received",
        "Sink rate",
        f"Share of heads that give a key more than {RECEIVED_THRESHOLD} of their attention."
        + _cut(len(positions), run.summary["tokens"]["length"], "positions; the last ones have few queries"),
        ("rates",) if "rates" in run.tables else ("positions",),
        [line(positions, rates, "sink rate", 0, low=low, high=high, showlegend=False) | chosen],
        {
            "xaxis": axis("key position"),
            "yaxis": axis("", rangemode="tozero"),
            **sink_level(),
        },
        ("position", "sink rate", "low", "high"),
        list(zip(positions, rates, low, high, strict=True)),
        PANEL_HEIGHT,
    )


def _received_unjudged(run: Run) -> Figure:
    """The panel of a text that is too short for a sink rate: attention received itself."""
    means = mean_over_layers(by_layer_and_position(run, "attention_received"))
    positions = np.flatnonzero(np.isfinite(means)).tolist()
    means = means[positions].tolist()
    return Figure(
        "received",
        "Attention received",
        f"Mean over layers, heads and queries. There is no sink rate: a key needs {LATER_QUERIES} later queries.",
        ("positions",),
        [line(positions, means, "attention received", 0, showlegend=False)],
        {"xaxis": axis("key position"), "yaxis": axis("", range=[0, 1])},
        ("position", "attention received"),
        list(zip(positions, means, strict=True)),
        PANEL_HEIGHT,
    )


def neuron_name(row: dict) -> str:
    """layer:neuron, or layer:expert:neuron in a mixture of experts."""
    return ":".join(str(row[part]) for part in ("layer", "expert", "neuron") if row[part] is not None)
