"""Figures of all layers: maps by position and by head, the effective rank by layer, and attention by distance."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sinkscope.measures.sink_score import LATER_QUERIES, RECEIVED_THRESHOLD
from sinkscope.pages.figure import (
    Figure,
    axis,
    categories,
    floats,
    heat_map,
    line,
)
from sinkscope.results.run import Run
from sinkscope.tracing.figures import by_layer_and_position, mean_over_layers, with_tokens

NUM_POSITIONS_MAPPED = 256
"""Most positions in a map. Of a longer sequence it shows the first ones, and evenly spaced later ones."""
NUM_CELLS_LISTED = 20
"""Cells in the table under a map, the largest first."""


def maps(run: Run) -> list[Figure]:
    """Layer x position and layer x head maps."""
    is_judged = run.strongest < run.summary["tokens"]["length"] - LATER_QUERIES
    by_position = [
        _position_map(run, "attention_received", "Attention received", "mean over heads and sequences"),
        _position_map(run, "dom_ratio", "DomRatio", "max |h| / mean |h| of the residual that leaves the layer", True),
        _variance_map(run),
        _position_map(run, "largest_write", "Largest neuron write", "of any neuron in any sequence", True),
    ]
    return [
        *(with_tokens(run, figure) for figure in by_position),
        *([head_map(run, "sink_rate", "Sink rate by head", "heads-sink-rate")] if is_judged else []),
        head_map(run, "attention_received", "Attention received by head", "heads-attention-received"),
        *_locks(run),
    ]


def _variance_map(run: Run) -> Figure:
    if not any(run.tables["positions"]["value_variance"]):  # one sequence, or tokens that are the same in all
        caption = "second moment of the value aggregation; there is no variance across sequences"
        return _position_map(run, "second_moment", "Energy", caption, True)
    caption = "across sequences, mean over channels; blank where zero"
    return _position_map(run, "value_variance", "Value variance", caption, True)


def _locks(run: Run) -> list[Figure]:
    """A map of how far each head's scores for the strongest key rest on the massive dimensions; none without these."""
    if all(row["lock_share"] is None for row in run.rows("heads", position=run.strongest)):
        return []
    figure = head_map(run, "lock_share", "Lock share by head", "heads-lock-share")
    return [replace(figure, caption=f"{figure.caption} Share of q . k that is lost without the massive dimensions.")]


def layer_curves(run: Run) -> list[Figure]:
    """Effective rank by layer and attention by distance."""
    return [_effective_rank(run), _distances(run)]


def mapped_positions(run: Run) -> list[int]:
    """The positions that maps show."""
    length = run.summary["tokens"]["length"]
    if length <= NUM_POSITIONS_MAPPED:
        return list(range(length))
    first = NUM_POSITIONS_MAPPED // 4
    later = np.linspace(first, length - 1, NUM_POSITIONS_MAPPED - first).astype(int)
    return sorted({*range(first), *later.tolist(), run.strongest, *(sink["position"] for sink in run.summary["sinks"])})


def _position_map(run: Run, name: str, title: str, caption: str, logarithmic: bool = False) -> Figure:
    positions = mapped_positions(run)
    values = by_layer_and_position(run, name)[:, positions]
    length = run.summary["tokens"]["length"]
    if len(positions) < length:
        caption += f"; {len(positions)} of {length} positions"
    largest = None
    if name == "attention_received":
        # The last keys have few queries. Without being sinks they would stretch the scale.
        judged = [column for column, position in enumerate(positions) if position < length - LATER_QUERIES]
        recorded = values[:, judged][np.isfinite(values[:, judged])]
        largest = float(recorded.max(initial=RECEIVED_THRESHOLD))
        caption += f"; the last {LATER_QUERIES} keys have few queries"
    where = "layer %{y}, position %{x}"
    return Figure(
        f"map-{name.replace('_', '-')}",
        title,
        f"By layer and position, {caption}.",
        ("positions",),
        [
            heat_map(
                positions,
                range(len(values)),
                values,
                title.lower(),
                where,
                logarithmic=logarithmic,
                largest=largest,
            )
        ],
        # Shown positions are equally wide, since gaps for the others would make a long map unreadable.
        {"xaxis": axis("position", type="category" if len(positions) < length else "linear"), "yaxis": axis("layer")},
        ("layer", "position", title.lower()),
        _largest(values, range(len(values)), positions),
        num_rows=int(np.isfinite(values).sum()),
    )


def head_map(run: Run, name: str, title: str, id: str) -> Figure:
    """A column of `heads` by layer and head, at the strongest key."""
    entries = run.rows("heads", position=run.strongest)
    num_heads, what = max(row["head"] for row in entries) + 1, name.replace("_", " ")
    values = floats([row[name] for row in entries]).reshape(-1, num_heads)
    layers = sorted({row["layer"] for row in entries})  # in a hybrid, those with attention
    return Figure(
        id,
        title,
        f"By layer and head, for the key at position {run.strongest}.",
        ("heads",),
        [heat_map(range(num_heads), layers, values, what, "layer %{y}, head %{x}", largest=1.0)],
        {"xaxis": axis("head"), "yaxis": axis("layer")},
        ("layer", "head", what),
        _largest(values, layers, range(num_heads)),
        num_rows=int(np.isfinite(values).sum()),
    )


def _largest(values: np.ndarray, y, x) -> list[tuple]:
    """The largest cells of a map as (y, x, value)."""
    cells = np.argwhere(np.isfinite(values))
    order = np.argsort([-values[row, column] for row, column in cells], kind="stable")[:NUM_CELLS_LISTED]
    return [(y[row], x[column], float(values[row, column])) for row, column in cells[order].tolist()]


def _effective_rank(run: Run) -> Figure:
    layers = run.tables["layers"]
    series = (("effective_rank", "all tokens"), ("effective_rank_without_sink", "without the tokens at sinks"))
    return Figure(
        "effective-rank",
        "Effective rank by layer",
        "Exponential of the entropy of the normalised singular values of up to 1,024 tokens.",
        ("layers",),
        [
            line(layers["layer"], layers[column], name, look)
            for look, (column, name) in enumerate(series)
            if any(value is not None for value in layers[column])
        ],
        {"xaxis": axis("layer"), "yaxis": axis("", rangemode="tozero")},
        ("layer", *(name for _, name in series)),
        list(zip(layers["layer"], *(layers[column] for column, _ in series), strict=True)),
    )


def _distances(run: Run) -> Figure:
    table = run.tables["distances"]
    values = mean_over_layers(floats(table["attention"]).reshape(run.summary["num_layers"], -1))
    distances = table["distance"][: len(values)]
    names = list(map(str, distances))
    return Figure(
        "distances",
        "Attention by distance",
        "Attention on the key that many positions back, mean over layers: what recent tokens receive.",
        ("distances",),
        [line(names, values, "attention", 0, showlegend=False)],
        {"xaxis": axis("distance", **categories(names)), "yaxis": axis("", rangemode="tozero")},
        ("distance", "attention"),
        list(zip(distances, values.tolist(), strict=True)),
    )
