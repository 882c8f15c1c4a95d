"""A trace and its findings as the columns of the tables declared in results.trace_schemas."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from sinkscope.capture.findings import Findings
from sinkscope.models.anatomy import DENSE
from sinkscope.results.tables import Schema
from sinkscope.results.trace_schemas import DIMENSIONS, DISTANCES, HEADS, LAYERS, NEURONS, POSITIONS, SINKS
from sinkscope.statistics import kendall_tau

KENDALL_POINTS = 1024
"""Kendall's tau compares all pairs, so longer curves are read at as many evenly spaced points."""


def trace_tables(findings: Findings) -> dict[str, Mapping[str, list | np.ndarray]]:
    """The columns of every table, by the table's name."""
    return {
        SINKS.name: _sinks(findings),
        POSITIONS.name: _positions(findings),
        NEURONS.name: _neurons(findings),
        DIMENSIONS.name: _rows(DIMENSIONS, findings.massive),
        HEADS.name: _heads(findings),
        LAYERS.name: _layers(findings),
        DISTANCES.name: _distances(findings),
    }


def _rows(schema: Schema, entries: list, **columns: list) -> dict[str, list]:
    """Columns from the attributes of the same name, or as given."""
    return {
        c.name: columns[c.name] if c.name in columns else [getattr(entry, c.name) for entry in entries]
        for c in schema.columns
    }


def _sinks(findings: Findings) -> dict:
    sinks = findings.sinks
    return _rows(
        SINKS,
        sinks,
        num_sequences=[findings.reading.batch.num_sequences] * len(sinks),
        num_layers=[len(sink.layers) for sink in sinks],
        first_layer=[min(sink.layers, default=None) for sink in sinks],
        last_layer=[max(sink.layers, default=None) for sink in sinks],
    )


def _positions(findings: Findings) -> dict:
    reading = findings.reading
    num_layers, length = reading.by_position["dom_ratio"].shape
    columns: dict[str, np.ndarray] = {
        "layer": np.repeat(np.arange(num_layers), length),
        "position": np.tile(np.arange(length), num_layers),
    }
    for name, by_head_LHS in (("attention_received", reading.received), ("sink_rate", reading.head_sink_rate)):
        values_LT = torch.full((num_layers, length), float("nan"))
        values_LT[:, reading.keys] = by_head_LHS.mean(1).float()
        columns[name] = values_LT.flatten().numpy()
    missing = np.full(num_layers * length, np.nan)
    for column in POSITIONS.columns:
        if column.name not in columns and not column.name.startswith("largest_write_"):
            values = reading.by_position.get(column.name)
            columns[column.name] = missing if values is None else values.flatten().numpy()
    places = [
        layer.unit_places(reading.by_position["largest_write_unit"][layer.index]) for layer in reading.anatomy.layers
    ]
    experts = torch.cat([expert for expert, _ in places]).numpy()
    columns["largest_write_expert"] = np.ma.masked_array(experts, mask=experts == DENSE)
    columns["largest_write_neuron"] = torch.cat([neuron for _, neuron in places]).numpy()
    return columns


def _neurons(findings: Findings) -> dict:
    units = findings.super_neurons
    sparsity = {
        name: [float(getattr(unit.sparsity, name)) for unit in units]
        for name in ("max_over_median", "top_share", "participation_ratio", "kurtosis")
    }
    return _rows(NEURONS, units, **sparsity)


def _heads(findings: Findings) -> dict:
    reading = findings.reading
    positions = [sink.position for sink in findings.sinks] or [findings.strongest[0]]
    num_layers, num_heads, _ = reading.received.shape
    parts: dict[str, list[Tensor]] = {column.name: [] for column in HEADS.columns}
    missing = torch.full((num_layers, num_heads), float("nan"))
    positive_LHQ, lock_share_LHQ = findings.lock
    for position in positions:
        index = int((reading.keys == position).nonzero()[0])
        at_lock = (reading.lock_positions == position)[:, None, :].float()
        seen = at_lock.sum(-1) > 0
        values = {
            "layer": torch.arange(num_layers)[:, None].expand(num_layers, num_heads),
            "head": torch.arange(num_heads)[None, :].expand(num_layers, num_heads),
            "position": torch.full((num_layers, num_heads), position),
            "attention_received": reading.received[:, :, index],
            "sink_rate": reading.head_sink_rate[:, :, index],
            "positive_queries": torch.where(seen, (positive_LHQ * at_lock).sum(-1), missing),
            "lock_share": torch.where(seen, torch.where(at_lock > 0, lock_share_LHQ, 0).sum(-1), missing),
            "entropy": reading.by_head.get("entropy", missing),
            "mixing": reading.by_head.get("mixing", missing),
        }
        for name, value in values.items():
            parts[name].append(value.flatten())
    return {name: torch.cat(values).numpy() for name, values in parts.items()}


def _layers(findings: Findings) -> dict:
    reading = findings.reading
    num_layers = reading.num_layers
    sinks = [sink.position for sink in findings.sinks]
    unknown = [None] * num_layers
    at_sink, elsewhere = findings.dom_ratio_at(sinks[0] if sinks else findings.strongest[0])
    activations = [findings.massive_activations(layer) for layer in range(num_layers)]
    massive_at_sink = []
    for layer, (_, counts_P) in enumerate(activations):
        slot = (
            (reading.residual[layer + 1].candidates.cpu() == sinks[0]).nonzero().flatten()
            if sinks and reading.rank_tokens
            else []
        )
        massive_at_sink.append(int(counts_P[slot[0]]) if len(slot) else None)
    ranks, ranks_without_sink = findings.effective_ranks
    return {
        "layer": list(range(num_layers)),
        "variance_ratio": _floats(findings.variance_ratio, num_layers),
        "averaging_law_r_squared": _floats(findings.averaging_law_r_squared, num_layers),
        "kendall_positions": _kendall_positions(findings),
        "kendall_channels": _kendall_channels(findings),
        "dom_ratio_sink": at_sink.tolist() if sinks else unknown,
        "dom_ratio_elsewhere": elsewhere.tolist(),
        "median_magnitude": [median for median, _ in activations],
        "massive_activations_sink": massive_at_sink,
        "effective_rank": ranks or unknown,
        "effective_rank_without_sink": ranks_without_sink or unknown,
        "born": [layer in findings.birth_layers for layer in range(num_layers)],
        "erased": [layer in findings.erasure_layers for layer in range(num_layers)],
    }


def _distances(findings: Findings) -> dict:
    by_distance_LR = findings.reading.by_distance.mean(1)
    num_layers, num_distances = by_distance_LR.shape
    return {
        "layer": np.repeat(np.arange(num_layers), num_distances),
        "distance": np.tile(np.array(findings.reading.distances), num_layers),
        "attention": by_distance_LR.flatten().numpy(),
    }


def _floats(values: Tensor | None, count: int) -> list:
    return [None] * count if values is None else values.tolist()


def _kendall_positions(findings: Findings) -> list[float | None]:
    if findings.variance_ratio is None:
        return [None] * findings.reading.num_layers
    before, behind = (findings.reading.by_position[name] for name in ("value_variance", "projected_variance"))
    return [_thinned_tau(before[layer], behind[layer]) for layer in range(findings.reading.num_layers)]


def _kendall_channels(findings: Findings) -> list[float | None]:
    variance_LC = findings.reading.channel_variance
    if variance_LC is None:
        return [None] * findings.reading.num_layers
    return [
        _thinned_tau(variance_LC[layer.index], layer.aggregation_channel_norms().cpu())
        for layer in findings.reading.anatomy.layers
    ]


def _thinned_tau(x: Tensor, y: Tensor) -> float:
    index = torch.linspace(0, len(x) - 1, min(len(x), KENDALL_POINTS)).long()
    return kendall_tau(x[index].numpy(), y[index].numpy())
