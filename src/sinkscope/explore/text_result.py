"""What the live page shows of one text, from a trace or from the tables of a finished one, and the part of it that the
browser draws.

Axes: L layers, H heads, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sinkscope.measures.sink_score import eligible_positions
from sinkscope.models.anatomy import Neuron
from sinkscope.pages.text import token_text, visible
from sinkscope.results.run import read_run
from sinkscope.results.validated import refused
from sinkscope.tracing.figures import mean_over_layers
from sinkscope.tracing.findings import NEEDED
from sinkscope.tracing.trace import Trace

QUANTITIES = {
    "attention_received": "Attention received, mean over heads",
    "dom_ratio": "DomRatio: max |h| / mean |h| of the residual",
    "largest_write": "Largest write of any neuron, |activation| x norm of its output vector",
    "mixing": "Mixing, sum a^2 of its attention: 1 where a token attends to a single key",
    "second_moment": "Energy, E[o^2], of the value aggregation",
}
"""What is shown by layer and position, with its label on the page. The chain has a panel for each."""
CHAIN = ("mixing", "second_moment", "largest_write", "dom_ratio", "attention_received")
"""The order of the panels, from cause to effect."""
OBSERVABLES = sorted(NEEDED | {"received_by_sequence", "mixing", "second_moment"})
"""What is recorded of a prompt: only what the page shows, because someone is waiting."""
NEURON, DIMENSION = ("position", "layer", "expert", "neuron"), ("position", "dimension")
"""The fields by which rows of the two lists are matched between the baseline and an intervention."""
WINDOW = 256
"""How many positions the page draws at once."""
MOST_LISTED = 24
"""Neurons or dimensions in a list."""
NEURON_COLUMNS = ("position", "layer", "expert", "neuron", "dimension", "activation", "write_share", "role")
MASSIVE = ("position", "layer", "dimension", "value", "ratio")
SILENT = 0.01
"""A neuron is called silent if at most this share of its baseline activation is left."""


@dataclass(frozen=True, kw_only=True)
class TextResult:
    """What a model did on one text, as arrays and lists that the page can show."""

    story: str
    strongest: int
    """Position of the strongest key."""
    tokens: Sequence[str] | None
    """None if the trace is of several sequences."""
    received_T: np.ndarray
    sink_rate_T: np.ndarray
    by_position: Mapping[str, np.ndarray]
    """[L, T] by quantity."""
    heads: Callable[[int], np.ndarray | None]
    """position -> [L, H] the attention that it receives; None if that was not kept."""
    neurons: Sequence[Mapping[str, Any]]
    dimensions: Sequence[Mapping[str, Any]]
    unlisted: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """Neurons and dimensions that the baseline lists and this one doesn't, with their values here; None where they
    were not read."""

    @property
    def length(self) -> int:
        return len(self.received_T)


def from_trace(trace: Trace, before: TextResult | None = None) -> TextResult:
    """From a trace of one text. `before` is the baseline if interventions are on: what it lists is looked up here
    too."""
    recording, findings = trace.recording, trace.findings
    received_LHT = recording["received"].double().numpy()
    neurons = _from_the_first([_fields(neuron, NEURON_COLUMNS) for neuron in findings.super_neurons])
    dimensions = _strongest_layers([_fields(dimension, MASSIVE) for dimension in findings.massive])
    unlisted: dict[str, list[Mapping[str, Any]]] = {"neurons": [], "dimensions": []}
    if before is not None:
        for row in _missing(before.neurons, neurons, NEURON):
            neuron = Neuron(row["layer"], row["expert"], row["neuron"])
            now = findings.activation(row["position"], neuron)
            unlisted["neurons"].append({**row, "activation": now, "write_share": None})
        for row in _missing(before.dimensions, dimensions, DIMENSION):
            value, ratio = findings.dimension(row["position"], row["layer"], row["dimension"]) or (None, None)
            unlisted["dimensions"].append({**row, "value": value, "ratio": ratio})
    return TextResult(
        story=trace.story,
        strongest=findings.strongest[0],
        tokens=[trace.token_text(token) for token in recording.batch.told_apart[0].tolist()],
        received_T=recording.of_attention("received").double().numpy().mean((0, 1)),
        sink_rate_T=_where_judged(recording.sink_rate.double().numpy()),
        by_position={
            "attention_received": received_LHT.mean(1),
            **{name: recording[name].double().numpy() for name in QUANTITIES if name != "attention_received"},
        },
        heads=lambda position: received_LHT[:, :, position],
        neurons=neurons,
        dimensions=dimensions,
        unlisted=unlisted,
    )


def _fields(record: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


def from_run(folder: Path) -> TextResult:
    """From the tables of a finished trace. Of several sequences it holds means by position."""
    columns = ("layer", "position", "sink_rate", *QUANTITIES)
    run = read_run(
        folder,
        columns={
            "positions": columns,
            "heads": ("layer", "head", "position", "attention_received"),
            "neurons": NEURON_COLUMNS,
            "dimensions": MASSIVE,
            "tokens": ("sequence", "position", "text"),
        },
        of=("trace", "study"),
    )
    num_layers = run.summary["num_layers"]
    by_position = {
        name: np.array(run.tables["positions"][name], dtype=float).reshape(num_layers, -1) for name in columns[2:]
    }

    def heads(position: int) -> np.ndarray | None:
        if not (rows := run.rows("heads", position=position)):
            return None
        received_LH = np.full((num_layers, max(row["head"] for row in rows) + 1), np.nan)
        for row in rows:
            received_LH[row["layer"], row["head"]] = row["attention_received"]
        return received_LH

    tokens = run.tables.get("tokens") if run.summary["tokens"]["count"] == 1 else None
    positions = list(range(run.summary["tokens"]["length"]))
    if tokens is not None and tokens["position"][: len(positions)] != positions:
        raise refused(folder / "tokens.parquet", "its rows are not those of one sequence, in its order")
    return TextResult(
        story=run.answer,
        strongest=run.strongest,
        tokens=None if tokens is None else tokens["text"],
        received_T=mean_over_layers(by_position["attention_received"]),
        sink_rate_T=_where_judged(mean_over_layers(by_position.pop("sink_rate"))),
        by_position=by_position,
        heads=heads,
        neurons=_from_the_first(run.rows("neurons")),
        dimensions=_strongest_layers(run.rows("dimensions")),
    )


def _where_judged(rate_T: np.ndarray) -> np.ndarray:
    """The sink rates, NaN for keys with too few later queries to be judged."""
    return np.where(eligible_positions(len(rate_T)).numpy(), rate_T, np.nan)


def _from_the_first(neurons: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Sorted by position and layer, so that the neuron that begins a massive dimension comes before those that enlarge
    it."""
    return sorted(neurons, key=lambda neuron: (neuron["position"], neuron["layer"]))


def _strongest_layers(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of each dimension at each position, the layer in which it stands out most; largest first."""
    most: dict[tuple[int, int], Mapping[str, Any]] = {}
    for row in sorted(rows, key=lambda row: -row["ratio"]):
        most.setdefault((row["position"], row["dimension"]), row)
    return list(most.values())


def window(
    now: TextResult, before: TextResult | None, start: int, position: int | None, quantity: str
) -> dict[str, Any]:
    """What the browser draws, as JSON: up to WINDOW positions from `start` on.

    `before` is the baseline if interventions are on. `position` is the opened token; None opens the strongest key.
    """
    start = min(start, max(0, now.length - 1)) // WINDOW * WINDOW
    opened = now.strongest if position is None or position >= now.length else position
    in_window = slice(start, start + WINDOW)

    def both(values: Callable[[TextResult], Any]) -> dict[str, Any]:
        return {"now": _listed(values(now)), "before": None if before is None else _listed(values(before))}

    # What the baseline lists stays listed when an intervention silences it, or it could not be put back.
    first = before or now
    parts = {
        "neurons": _rows(first.neurons, now.neurons, now.unlisted.get("neurons", ()), NEURON, "activation"),
        "dimensions": _rows(first.dimensions, now.dimensions, now.unlisted.get("dimensions", ()), DIMENSION, "value"),
    }
    return {
        "story": now.story,
        "story_before": before.story if before else None,
        "start": start,
        "length": now.length,
        "window": WINDOW,
        "opened": opened,
        "opened_text": shown_token(now, opened),
        "strongest": now.strongest,
        "tokens": [shown_token(now, at) for at in range(now.length)[in_window]],
        "received": both(lambda result: result.received_T[in_window]),
        "sink_rate": both(lambda result: result.sink_rate_T[in_window]),
        "chain": [
            {
                "quantity": name,
                "meaning": QUANTITIES[name],
                **both(lambda result, name=name: result.by_position[name][:, opened]),
                "elsewhere": _listed(_elsewhere(now.by_position[name], opened)),
            }
            for name in CHAIN
        ],
        "heads": both(lambda result: result.heads(opened)),
        "map": {
            "quantity": quantity,
            "meaning": QUANTITIES[quantity],
            **both(lambda result: result.by_position[quantity][:, in_window]),
        },
        **{name: rows[:MOST_LISTED] for name, rows in parts.items()},
        "counts": {name: len(rows) for name, rows in parts.items()},
    }


def shown_token(result: TextResult, position: int) -> str:
    """A token with its spaces and control characters shown; empty where there are several sequences."""
    return "" if result.tokens is None else visible(token_text(result.tokens[position]))


def _rows(
    before: Sequence[Mapping], now: Sequence[Mapping], unlisted: Sequence[Mapping], keys: Sequence[str], value: str
) -> list[dict[str, Any]]:
    """The rows of the baseline with their values now, then those that are new."""
    old = {_name(row, keys): row for row in before}
    new = {_name(row, keys): row for row in now}
    values_now = {_name(row, keys): row for row in unlisted}
    rows = []
    for name, row in old.items():
        current = new.get(name) or values_now[name]
        if name in new:
            state = ""
        elif current[value] is not None and abs(current[value]) <= SILENT * abs(row[value]):
            state = "silent now"
        else:
            state = "no longer listed"
        rows.append({**current, "state": state, "before": row[value]})
    return rows + [{**row, "state": "new", "before": None} for name, row in new.items() if name not in old]


def _missing(before: Sequence[Mapping], now: Sequence[Mapping], keys: Sequence[str]) -> list[Mapping]:
    """The rows of the baseline that are no longer listed."""
    listed = {_name(row, keys) for row in now}
    return [row for row in before if _name(row, keys) not in listed]


def _name(row: Mapping, keys: Sequence[str]) -> tuple:
    return tuple(row[key] for key in keys)


def _elsewhere(values_LT: np.ndarray, position: int) -> np.ndarray:
    """[L] mean over the other positions."""
    others = np.delete(values_LT, position, axis=1)
    counted = np.isfinite(others)
    return np.where(counted, others, 0).sum(1) / np.maximum(counted.sum(1), 1)


def _listed(values: np.ndarray | None) -> Any:
    """Numbers for JSON with five digits, more than a page can show; what is not finite is null."""
    if values is None or values.ndim > 1:
        return None if values is None else [_listed(row) for row in values]
    return [float(f"{value:.5g}") if np.isfinite(value) else None for value in values.tolist()]
