"""Rows of a run as JSON lines while it goes on, and as tables when it ends."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from sinkscope.errors import InputError
from sinkscope.pretrain.training_config import TrainingConfig
from sinkscope.results.atomic import whole_file
from sinkscope.results.tables import Column, Schema, write_table
from sinkscope.results.validated import (
    MOST_LINES_OF_JSON,
    NAME,
    Each,
    Int,
    Maybe,
    Real,
    parse_json,
    read_json_lines,
    read_text,
    refused,
)

PROBE_BATCHES = ("random", "text")
"""What is probed, in the order of the rows."""
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


# What a row must hold. Ratios are taken of tokens, seconds and speeds, so none of them is 0.
ROWS = {
    "metrics.jsonl": {
        "step": Int(1),
        "tokens": Int(1),
        "loss": Real(),
        "gradient_norm": Real(0),
        "learning_rate": Real(0),
        "tokens_per_second": Real(1e-9, 1e15),
        "mfu": Maybe(Real(0)),
        "elapsed_s": Real(1e-9, 1e12),
        "validation_loss": Maybe(Real()),
    },
    "probes.jsonl": {
        "step": Int(),
        "tokens": Int(),
        "batch": NAME,
        "whole": {"sink_rate": Maybe(Real())},
        "layers": Each([Maybe(Real())]),
    },
}


class JsonLines:
    """A file of JSON objects, one a line, each on its way to disk when `write` returns."""

    def __init__(self, path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
        """Begins with the rows of before that are kept; all others in the file are dropped."""
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


Key = tuple[int, str]
"""What tells the rows of a log apart: the step and, for a probe, the batch."""


def log_keys(config: TrainingConfig, done: int) -> dict[str, list[Key]]:
    """The keys of the rows that each log begins with after some updates, by the name of its file."""
    probed = [step for step in range(done + 1) if done and config.is_due(config.probe_every, step)]
    return {
        "metrics.jsonl": [(step, "") for step in range(1, done + 1)],
        "probes.jsonl": [(step, batch) for step in probed for batch in PROBE_BATCHES],
    }


def row_key(row: Mapping[str, Any]) -> Key:
    return row["step"], row.get("batch", "")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl or probes.jsonl; a last line that a killed process left unfinished is dropped."""
    return _checked(path, read_json_lines(path, ROWS[path.name]))


def read_first_rows(path: Path, keys: Sequence[Key]) -> list[dict[str, Any]]:
    """The rows with these keys, which a log must begin with for its run to go on; what follows is not looked at."""
    rows = []
    try:
        lines = read_text(path, MOST_LINES_OF_JSON).split("\n")[:-1] if keys else []
        for number, (key, line) in enumerate(zip(keys, lines, strict=False), 1):
            rows.append(parse_json(line, path, ROWS[path.name], where=f"line {number}"))
            if row_key(rows[-1]) != key:
                raise refused(path, f"{_named(row_key(rows[-1]))}, on line {number}, in the place of {_named(key)}")
        if len(rows) < len(keys):
            raise refused(path, f"{len(rows)} rows, none of {_named(keys[len(rows)])}")
        return _checked(path, rows)
    except InputError as error:
        raise InputError(
            expected=f"every row so far in {path}",
            found=error.found,
            next_step="Put back a copy of the file, or start the run again with `overwrite=True`",
        ) from error


def _checked(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a log, in which nothing goes back and every observable has as many layers."""
    for name in ("step", "tokens", "elapsed_s"):
        if any(row.get(name, 0) > following.get(name, 0) for row, following in pairwise(rows)):
            raise refused(path, f"a {name} that is smaller than in the line before it")
    if len({len(values) for row in rows for values in row.get("layers", {}).values()}) > 1:
        raise refused(path, "observables of different numbers of layers")
    return rows


def _named(key: Key) -> str:
    return ", ".join(filter(None, (f"step {key[0]}", key[1])))


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
