"""A trace and its findings as columns of the tables that schemas.py declares."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from sinkscope.models.anatomy import DENSE
from sinkscope.results.tables import Schema
from sinkscope.statistics import kendall_tau
from sinkscope.tracing.findings import Findings
from sinkscope.tracing.observables import TABLE_OF_AXES, Observable
from sinkscope.tracing.recorder import Recording
from sinkscope.tracing.reducers import Largest
from sinkscope.tracing.schemas import (
    DIMENSIONS,
    DISTANCES,
    HEADS,
    LAYERS,
    NEURONS,
    POSITIONS,
    SEQUENCE_SINKS,
    SINKS,
    TOKENS,
    columns,
)
from sinkscope.tracing.sequences import Sequences

KENDALL_POINTS = 1024
"""Kendall's tau compares all pairs of points, so of longer curves this many evenly spaced points are taken."""

BY_HEAD = {"attention_received": "received", "sink_rate": "head_sink_rate"}
"""Columns on what a key receives, and the observables [L, H, S] that fill them."""


def trace_tables(findings: Findings) -> dict[str, Mapping[str, list | np.ndarray]]:
    """The columns of every table, by the table's name."""
    return {
        SINKS.name: _sinks(findings),
        POSITIONS.name: _positions(findings),
        NEURONS.name: _neurons(findings),
        DIMENSIONS.name: _dimensions(findings),
        HEADS.name: _heads(findings),
        LAYERS.name: _layers(findings),
        **({DISTANCES.name: _distances(findings)} if "by_distance" in findings.recording else {}),
    }


def sequence_tables(sequences: Sequences, text_of: Callable[[int], str]) -> dict[str, Mapping[str, list | np.ndarray]]:
    """The tables `tokens` and `sequence_sinks`."""
    ids = torch.cat(list(sequences.ids))
    texts = {token: text_of(token) for token in ids.unique().tolist()}
    lengths = [len(ids) for ids in sequences.ids]
    recorded = {}
    for name, by_sequence in (("sink_rate", sequences.rates), ("attention_received", sequences.received)):
        columns = []
        for length, keys, values in zip(lengths, sequences.keys, by_sequence, strict=True):
            column = torch.full((length,), float("nan"))  # null at keys that were not recorded
            column[keys] = values.float()
            columns.append(column)
        recorded[name] = torch.cat(columns).numpy()
    return {
        TOKENS.name: {
            "sequence": np.repeat(np.arange(len(lengths)), lengths),
            "position": np.concatenate([np.arange(length) for length in lengths]),
            "id": ids.numpy(),
            "text": [texts[token] for token in ids.tolist()],
            **recorded,
        },
        SEQUENCE_SINKS.name: _rows(SEQUENCE_SINKS, sequences.sinks, text=[texts[sink.id] for sink in sequences.sinks]),
    }


def _rows(schema: Schema, entries: list, **columns: list) -> dict[str, list]:
    """The columns of a schema: those given, and the others from the entries' attributes of the same name."""
    names = [column.name for column in schema.columns]
    return {name: columns[name] if name in columns else [getattr(entry, name) for entry in entries] for name in names}


def _sinks(findings: Findings) -> dict:
    sinks, num_sequences = findings.sinks, findings.recording.batch.num_sequences
    return _rows(
        SINKS,
        sinks,
        num_sequences=[num_sequences] * len(sinks),
        in_sequences=[len(sink.sequences) for sink in sinks],
        certainty=[sink.certainty(num_sequences) for sink in sinks],
        num_layers=[len(sink.layers) for sink in sinks],
        first_layer=[min(sink.layers, default=None) for sink in sinks],
        last_layer=[max(sink.layers, default=None) for sink in sinks],
    )


def _dimensions(findings: Findings) -> dict:
    appearances = {
        (change.layer, position, change.dimension)
        for position, changes in findings.changes.items()
        for change in changes
        if change.appears
    }
    entries = findings.massive
    return _rows(
        DIMENSIONS,
        entries,
        appears=[(entry.layer, entry.position, entry.dimension) in appearances for entry in entries],
    )


def recorded_columns(recording: Recording, axes: str) -> dict[str, np.ndarray]:
    """The columns of the observables with these axes, flattened."""
    filled: dict[str, np.ndarray] = {}
    for observable in recording.observables:
        if observable.axes == axes:
            filled |= _columns_of(recording, observable)
    return filled


def _columns_of(recording: Recording, observable: Observable) -> dict[str, np.ndarray]:
    """The columns of one observable; null in every row if it could not be recorded, as a variance of one sequence."""
    declared = [column.name for column in columns(observable)]
    if observable.name not in recording:
        return dict.fromkeys(declared, np.full(_num_rows(recording, observable.axes), np.nan))
    values = [_rows_of(recording, observable.axes, observable.name).flatten().numpy()]
    place = observable.reducer.place if isinstance(observable.reducer, Largest) else None
    if place == "neuron":
        neurons_LT = recording[f"{observable.name}_neuron"]
        experts_LT, numbers_LT = torch.full_like(neurons_LT, DENSE), torch.zeros_like(neurons_LT)
        has_neurons_LT = torch.zeros_like(neurons_LT, dtype=torch.bool)
        for layer in recording.anatomy.feed_forward_layers:
            experts_LT[layer.index], numbers_LT[layer.index] = layer.neuron_places(neurons_LT[layer.index])
            has_neurons_LT[layer.index] = True
        values += [
            np.ma.masked_array(experts_LT.flatten().numpy(), mask=(experts_LT == DENSE).flatten().numpy()),
            np.ma.masked_array(numbers_LT.flatten().numpy(), mask=~has_neurons_LT.flatten().numpy()),
        ]
    elif place is not None:
        values.append(recording[f"{observable.name}_{place}"].flatten().numpy())
    return dict(zip(declared, values, strict=True))


def _rows_of(recording: Recording, axes: str, name: str) -> Tensor:
    """The layers' values of an observable, of those layers that a table with these axes has rows of."""
    return recording.of_attention(name) if "H" in axes else recording[name]


def _sizes(recording: Recording, axes: str) -> list[int]:
    """The number of rows along each axis of a table. Heads are in the layers with attention alone."""
    num_layers = len(recording.attention_layers) if "H" in axes else recording.num_layers
    sizes = {"L": num_layers, "T": recording.batch.length, "H": recording.anatomy.num_heads}
    return [sizes[axis] for axis in axes]


def _num_rows(recording: Recording, axes: str) -> int:
    """How many rows a table with these axes has."""
    return math.prod(_sizes(recording, axes))


def recorded_tables(recording: Recording) -> dict[str, dict[str, np.ndarray]]:
    """The tables of a recording that lacks what the findings need: only the columns that its observables fill."""
    axis_names = {"L": ("layer",), "LT": ("layer", "position"), "LH": ("layer", "head")}
    tables = {}
    for axes, name in TABLE_OF_AXES.items():
        if filled := recorded_columns(recording, axes):
            tables[name] = dict(zip(axis_names[axes], _numbered(recording, axes), strict=True)) | filled
    return tables


def _numbered(recording: Recording, axes: str) -> list[np.ndarray]:
    """By axis, the index of each row along it: the columns layer, position or head."""
    numbered = [numbers.flatten() for numbers in np.indices(_sizes(recording, axes))]
    if "H" in axes:
        numbered[0] = np.array(recording.attention_layers)[numbered[0]]
    return numbered


def _positions(findings: Findings) -> dict:
    recording = findings.recording
    layer, position = _numbered(recording, "LT")
    columns: dict[str, np.ndarray] = {"layer": layer, "position": position}
    for name, by_head in BY_HEAD.items():
        values_LT = torch.full((recording.num_layers, recording.batch.length), float("nan"))
        values_LT[:, recording.keys] = recording.reduced(by_head, lambda values_HS: values_HS.mean(0)).float()
        columns[name] = values_LT.flatten().numpy()
    return columns | recorded_columns(recording, "LT")


def _neurons(findings: Findings) -> dict:
    neurons = findings.super_neurons
    sparsity = {
        name: [float(getattr(neuron.sparsity, name)) for neuron in neurons]
        for name in ("max_over_median", "top_share", "participation_ratio", "kurtosis")
    }
    return _rows(NEURONS, neurons, **sparsity)


def _heads(findings: Findings) -> dict:
    """The table `heads`: a block of rows, one for each layer and head, for each sink (else for the strongest key)."""
    recording = findings.recording
    positions = [sink.position for sink in findings.sinks] or [findings.strongest[0]]
    layer, head = _numbered(recording, "LH")
    positive_AHQ, lock_share_AHQ = findings.lock
    of_heads = recorded_columns(recording, "LH")
    rows = []
    for position in positions:
        key = int((recording.keys == position).nonzero()[0])
        # In each layer the lock was measured at other positions: its value at this one, or null.
        at_lock_A1Q = (findings.lock_positions == position)[:, None, :]
        measured_AH = at_lock_A1Q.any(-1).expand(positive_AHQ.shape[:2])
        locks = {
            name: torch.where(at_lock_A1Q, values_AHQ, 0).sum(-1).where(measured_AH, float("nan"))
            for name, values_AHQ in (("positive_queries", positive_AHQ), ("lock_share", lock_share_AHQ))
        }
        received = {
            name: recording.reduced(by_head, lambda values_HS, key=key: values_HS[:, key])[recording.attention_layers]
            for name, by_head in BY_HEAD.items()
        }
        by_head = {name: values_AH.flatten().numpy() for name, values_AH in (received | locks).items()}
        rows.append({"layer": layer, "head": head, "position": np.full_like(layer, position)} | by_head | of_heads)
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def _layers(findings: Findings) -> dict:
    recording = findings.recording
    num_layers = recording.num_layers
    sinks = [sink.position for sink in findings.sinks]
    unknown = [None] * num_layers
    at_sink, elsewhere = findings.dom_ratio_at(sinks[0] if sinks else findings.strongest[0])
    massive_at_sink: list[int | None] = [None] * num_layers
    if sinks and "rank_tokens" in recording:
        slots = [findings.slot(layer, sinks[0]) for layer in range(num_layers)]
        counts = zip(slots, findings.massive_activations.tolist(), strict=True)
        massive_at_sink = [None if slot is None else counts_P[slot] for slot, counts_P in counts]
    ranks, ranks_without_sink = findings.effective_ranks
    ratio_before, law_before = findings.before_norm
    return {
        "layer": list(range(num_layers)),
        "variance_ratio": _floats(findings.variance_ratio, num_layers),
        "averaging_law_r_squared": _floats(findings.averaging_law_r_squared, num_layers),
        "variance_ratio_before_norm": _floats(ratio_before, num_layers),
        "averaging_law_r_squared_before_norm": _floats(law_before, num_layers),
        "kendall_positions": _in_all_layers(recording, _kendall_positions(findings)),
        "kendall_channels": _in_all_layers(recording, _kendall_channels(findings)),
        "dom_ratio_sink": at_sink.tolist() if sinks else unknown,
        "dom_ratio_elsewhere": elsewhere.tolist(),
        **{
            f"{name}_sink": recording[name][:, sinks[0]].tolist() if sinks and name in recording else unknown
            for name in ("dom_ratio_turned", "direction_share")
        },
        "median_magnitude": findings.median_magnitudes.tolist(),
        "massive_activations_sink": massive_at_sink,
        "effective_rank": ranks or unknown,
        "effective_rank_without_sink": ranks_without_sink or unknown,
        "born": [layer in findings.appears_in for layer in range(num_layers)],
        "erased": [layer in findings.disappears_in for layer in range(num_layers)],
        **recorded_columns(recording, "L"),
    }


def _distances(findings: Findings) -> dict:
    by_distance_LR = findings.recording["by_distance"].mean(1)
    num_layers, num_distances = by_distance_LR.shape
    return {
        "layer": np.repeat(np.arange(num_layers), num_distances),
        "distance": np.tile(np.array(findings.recording.distances), num_layers),
        "attention": by_distance_LR.flatten().numpy(),
    }


def _in_all_layers(recording: Recording, values: list | None) -> list:
    """A value of each layer with attention, with None for the other layers; all None if there are none."""
    by_layer = dict(zip(recording.attention_layers, values, strict=True)) if values else {}
    return [by_layer.get(layer) for layer in range(recording.num_layers)]


def _floats(values: Tensor | None, count: int) -> list:
    """The values as a list; a column of nulls if there are none."""
    return [None] * count if values is None else values.tolist()


def _kendall_positions(findings: Findings) -> list[float | None] | None:
    """Do positions keep their order of variance through the output projection? Of the layers with attention."""
    recording = findings.recording
    if findings.variance_ratio is None or "projected_variance" not in recording:
        return None
    return _thinned_tau(recording.of_attention("value_variance"), recording.of_attention("projected_variance"))


def _kendall_channels(findings: Findings) -> list[float | None] | None:
    """Does the output projection read channels of more variance more strongly? Of the layers with attention."""
    recording = findings.recording
    if "value_variance_by_channel" not in recording:
        return None
    return _thinned_tau(recording.of_attention("value_variance_by_channel"), findings.output_channel_norms)


def _thinned_tau(x_LN: Tensor, y_LN: Tensor) -> list[float | None]:
    """Kendall's tau of two curves in each layer, from at most KENDALL_POINTS points."""
    num_points = x_LN.shape[1]
    index = torch.linspace(0, num_points - 1, min(num_points, KENDALL_POINTS)).long()
    return kendall_tau(x_LN[:, index].numpy(), y_LN[:, index].numpy()).tolist()
