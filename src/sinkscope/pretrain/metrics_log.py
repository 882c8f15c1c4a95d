"""Rows of a run as JSON lines while it goes on, and as tables when it ends."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sinkscope.results.atomic import whole_file
from sinkscope.results.tables import Column, Schema, write_table

METRICS = Schema(
    "metrics",
    (
        Column("step", "int", "updates done"),
        Column("tokens", "int", "training tokens seen"),
        Column("loss", "float", "mean loss of the update's batch, before the update"),
        Column("gradient_norm", "float", "norm of the gradient before clipping"),
        Column("learning_rate", "float", "learning rate of the update"),
        Column("tokens_per_second", "float", "training tokens a second, without probes, evaluations and checkpoints"),
        Column("mfu", "float", "model FLOPs over what the device's own matrix products reach", nullable=True),
        Column("elapsed_s", "float", "seconds since the run began, everything included"),
        Column("validation_loss", "float", "mean loss on held-out text after the update", nullable=True),
    ),
)
PROBES = Schema(
    "probes",
    (
        Column("step", "int", "updates done"),
        Column("tokens", "int", "training tokens seen"),
        Column("batch", "str", "what was read: random tokens or held-out text"),
        Column("quantity", "str", "name of the observable"),
        Column("layer", "int", "layer; empty for the whole model", nullable=True),
        Column("value", "float", "value; empty where it does not apply", nullable=True),
    ),
)


class JsonLines:
    """A file of JSON objects, one a line, each on its way to disk when `write` returns."""

    def __init__(self, path: Path, *, last_step: int) -> None:
        """Rows after `last_step` are dropped: a resumed run will write them again."""
        self.path = path
        rows = [row for row in read_rows(path) if row["step"] <= last_step] if path.exists() else []
        with whole_file(path) as partial, partial.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Returns when every row is on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; a last line that a killed process left unfinished is dropped."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


def write_tables(run: Path) -> None:
    """Writes metrics and probes as Parquet into the run folder, from their JSON lines, where pyarrow is installed."""
    if importlib.util.find_spec("pyarrow") is None:
        return
    metrics = read_rows(run / "metrics.jsonl")
    write_table(METRICS, {c.name: [row.get(c.name) for row in metrics] for c in METRICS.columns}, run / METRICS.name)
    if (run / "probes.jsonl").exists():
        tidy = [entry for row in read_rows(run / "probes.jsonl") for entry in _tidy(row)]
        write_table(PROBES, PROBES.from_rows(tidy), run / PROBES.name)


def _tidy(row: dict[str, Any]) -> list[dict[str, Any]]:
    keys = {name: row[name] for name in ("step", "tokens", "batch")}
    entries = [keys | {"quantity": name, "layer": None, "value": value} for name, value in row["whole"].items()]
    for name, values in row["layers"].items():
        entries += [keys | {"quantity": name, "layer": layer, "value": value} for layer, value in enumerate(values)]
    return entries
