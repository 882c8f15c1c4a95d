"""The numbers of a run: from the device to a row of a log and to an experiment tracker, and to tables at the end.

The device never waits for its numbers to be read: those of an update are fetched while the next one runs. During a run
the logs are JSON lines, metrics.jsonl and probes.jsonl. A run that resumes reads them back and checks that no row is
missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from sinkscope.arguments import TRACKERS, check_choice
from sinkscope.atomic import whole_file
from sinkscope.errors import InputError
from sinkscope.pretrain.config import TrainingConfig
from sinkscope.pretrain.optimisers import learning_rate
from sinkscope.results.tables import Column, Schema, write_table
from sinkscope.results.validated import (
    MOST_LINES_OF_JSON,
    Count,
    Name,
    UnusableFileError,
    Whole,
    parse_json,
    read_json_lines,
    read_text,
    refused,
)

PROBE_BATCHES = ("random", "text")
"""The batches that are probed, in the order of their rows in probes.jsonl."""
METRICS = Schema(
    "metrics",
    (
        Column("step", "int", "updates done"),
        Column("tokens", "int", "training tokens seen"),
        Column("loss", "float", "mean loss of the update's batch, before the update"),
        Column("gradient_norm", "float", "norm of the gradient before clipping"),
        Column("learning_rate", "float", "learning rate of the update"),
        Column("tokens_per_second", "float", "training tokens a second, without probes, evaluations and checkpoints"),
        Column(
            "mfu",
            "float",
            "model FLOP/s, as a share of what the device reaches in a large matrix product",
            nullable=True,
        ),
        Column("elapsed_s", "float", "seconds since the run began, everything included"),
        Column("validation_loss", "float", "mean loss on held-out text after the update", nullable=True),
    ),
)
PROBES = Schema(
    "probes",
    (
        Column("step", "int", "updates done"),
        Column("tokens", "int", "training tokens seen"),
        Column("batch", "str", "what was probed: random tokens or held-out text"),
        Column("quantity", "str", "name of the observable (docs/pretraining.md)"),
        Column("layer", "int", "layer; empty for the whole model", nullable=True),
        Column(
            "value",
            "float",
            "its value; empty where it has none, such as the sink rate of a short sequence",
            nullable=True,
        ),
    ),
)


class MetricsRow(BaseModel):
    """What a row of metrics.jsonl must hold. Comparisons divide by tokens, seconds and speeds, so these are above 0."""

    step: Count
    tokens: Count
    loss: float
    gradient_norm: Annotated[float, Field(ge=0)]
    learning_rate: Annotated[float, Field(ge=0)]
    tokens_per_second: Annotated[float, Field(ge=1e-9, le=1e15)]
    mfu: Annotated[float, Field(ge=0)] | None = None
    elapsed_s: Annotated[float, Field(ge=1e-9, le=1e12)]
    validation_loss: float | None = None


class ProbesRow(BaseModel):
    """What a row of probes.jsonl must hold: observables of the whole model, and by layer."""

    step: Whole
    tokens: Whole
    batch: Name
    whole: dict[str, float | None]
    layers: dict[str, list[float | None]]


ROWS = {"metrics.jsonl": MetricsRow, "probes.jsonl": ProbesRow}

Tracker = Callable[[int, dict[str, float]], None]


class JsonLines:
    """A file of JSON objects, one a line. `write` hands a row to the system; `sync` waits until it is on the disk."""

    def __init__(self, path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
        """Begins the file with `rows`; what was in it before is dropped."""
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
"""Identifies a row of a log: the step and, for a probe, the batch."""


def log_keys(config: TrainingConfig, done: int) -> dict[str, list[Key]]:
    """The keys of the rows that each log must hold after `done` updates, by the name of its file.

    Nothing is required before the first update: the probe at step 0 belongs to a run that has begun.
    """
    if done == 0:
        return {"metrics.jsonl": [], "probes.jsonl": []}
    probe_steps = [step for step in range(done + 1) if config.is_due(config.probe_every, step)]
    return {
        "metrics.jsonl": [(step, "") for step in range(1, done + 1)],
        "probes.jsonl": [(step, batch) for step in probe_steps for batch in PROBE_BATCHES],
    }


def row_key(row: Mapping[str, Any]) -> Key:
    return row["step"], row.get("batch", "")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl or probes.jsonl; a last line that a killed process left unfinished is dropped."""
    return _checked(path, read_json_lines(path, ROWS[path.name]))


def read_first_rows(path: Path, keys: Sequence[Key]) -> list[dict[str, Any]]:
    """The first rows of a log, which must have these keys for the run to continue; later rows are ignored."""
    rows = []
    try:
        # Without what follows the last line break: the process may have been killed while it wrote a row.
        lines = read_text(path, MOST_LINES_OF_JSON).split("\n")[:-1] if keys else []
        for number, (key, line) in enumerate(zip(keys, lines, strict=False), 1):
            rows.append(parse_json(line, path, ROWS[path.name], where=f"line {number}"))
            if row_key(rows[-1]) != key:
                raise refused(path, f"line {number} is of {_key_text(row_key(rows[-1]))}, not of {_key_text(key)}")
        if len(rows) < len(keys):
            raise refused(path, f"it has {len(rows)} rows and lacks {_key_text(keys[len(rows)])}")
        return _checked(path, rows)
    except UnusableFileError as error:
        advice = "Put back a copy of the file, or start the run again with `overwrite=True`."
        raise refused(path, error.reason, advice) from error


def _checked(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a log; refuses steps or times that decrease, and observables with different numbers of layers."""
    for name in ("step", "tokens", "elapsed_s"):
        if any(row.get(name, 0) > following.get(name, 0) for row, following in pairwise(rows)):
            raise refused(path, f"{name} is smaller in one line than in the line before it")
    if len({len(values) for row in rows for values in row.get("layers", {}).values()}) > 1:
        raise refused(path, "its observables have different numbers of layers")
    return rows


def _key_text(key: Key) -> str:
    return ", ".join(filter(None, (f"step {key[0]}", key[1])))


def write_tables(run: Path) -> None:
    """Writes metrics and probes as Parquet into the run folder, from their JSON lines, where pyarrow is installed."""
    if importlib.util.find_spec("pyarrow") is None:
        return
    metrics = read_rows(run / "metrics.jsonl")
    write_table(METRICS, {c.name: [row.get(c.name) for row in metrics] for c in METRICS.columns}, run / METRICS.name)
    if (run / "probes.jsonl").exists():
        table_rows = []
        for row in read_rows(run / "probes.jsonl"):
            table_rows += _probe_rows(row)
        write_table(PROBES, PROBES.from_rows(table_rows), run / PROBES.name)


def _probe_rows(row: dict[str, Any]) -> list[dict[str, Any]]:
    """A row of probes.jsonl as rows of the table: one for each quantity of the whole model, and of each layer."""
    keys = {name: row[name] for name in ("step", "tokens", "batch")}
    entries = [keys | {"quantity": name, "layer": None, "value": value} for name, value in row["whole"].items()]
    for name, values in row["layers"].items():
        entries += [keys | {"quantity": name, "layer": layer, "value": value} for layer, value in enumerate(values)]
    return entries


@dataclass
class PendingNumbers:
    """The numbers of one update on their way from the device."""

    step: int
    values: Tensor
    """[loss, gradient norm] in host memory, valid once `arrived` has happened."""
    arrived: torch.cuda.Event | None
    """None on a CPU, where they are valid at once."""


class StepNumbers:
    """Makes a row of metrics.jsonl for each update, in order.

    On CUDA the row of an update is ready only after the next update was launched, so that the device always has work.
    """

    def __init__(self, config: TrainingConfig, flops_per_token: float, flop_rate: float) -> None:
        self.config = config
        self.flops_per_token = flops_per_token
        self.flop_rate = flop_rate
        """FLOP/s that all devices together reach in a large matrix product."""
        self.elapsed_before = 0.0
        """Seconds that the run took before it was resumed."""
        self._started_at = self._clock = time.perf_counter()
        self._pending: deque[PendingNumbers] = deque()

    @property
    def elapsed_s(self) -> float:
        return self.elapsed_before + time.perf_counter() - self._started_at

    def restart_clock(self) -> None:
        """Leaves the time since the last update, spent on probes or checkpoints, out of the next one's tokens/s."""
        self._clock = time.perf_counter()

    def tokens(self, steps: int) -> int:
        return steps * self.config.batch_size * self.config.sequence_length

    def push(self, step: int, loss: Tensor, norm: Tensor) -> None:
        """Takes what an update returned, without waiting for it."""
        values = torch.stack([loss, norm.to(loss.dtype)])
        arrived = None
        if values.is_cuda:
            # Into pinned memory, or the copy would wait for the device.
            values = torch.empty(2, pin_memory=True).copy_(values, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self._pending.append(PendingNumbers(step, values, arrived))

    def rows(self, *, wait_for_all: bool) -> list[dict[str, Any]]:
        """The rows that are ready, or all if `wait_for_all`; FloatingPointError if a number is not finite."""
        numbers = []
        # On CUDA the newest update stays pending, unless all are to be waited for.
        while self._pending and (wait_for_all or len(self._pending) > 1 or self._pending[0].arrived is None):
            entry = self._pending.popleft()
            if entry.arrived is not None:
                entry.arrived.synchronize()
            loss, norm = entry.values.tolist()
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise FloatingPointError(f"loss {loss}, gradient norm {norm} at step {entry.step}")
            numbers.append((entry.step, loss, norm))
        if not numbers:
            return []
        now = time.perf_counter()
        # Two updates that are fetched together share their time: how long each of them took is not known.
        rate = self.tokens(len(numbers)) / (now - self._clock)
        self._clock = now
        return [
            {
                "step": step,
                "tokens": self.tokens(step),
                "loss": loss,
                "gradient_norm": norm,
                "learning_rate": learning_rate(step - 1, self.config),
                "tokens_per_second": rate,
                "mfu": rate * self.flops_per_token / self.flop_rate,
                "elapsed_s": self.elapsed_s,
                "validation_loss": None,
            }
            for step, loss, norm in numbers
        ]

    def progress(self, row: dict[str, Any], validation_loss: float | None) -> str:
        """A row as a line to print, with the time that is left."""
        remaining_s = (self.config.steps - row["step"]) * row["elapsed_s"] / row["step"]
        held_out = "" if validation_loss is None else f", held out {validation_loss:.4f}"
        return (
            f"step {row['step']}/{self.config.steps}: loss {row['loss']:.4f}{held_out}, "
            f"{row['tokens_per_second']:,.0f} tokens/s, MFU {row['mfu']:.1%}, {remaining_s:,.0f} s left"
        )


@contextlib.contextmanager
def tracker(name: str | None, run: Path, config: dict[str, Any]) -> Iterator[Tracker]:
    """A function that sends the numbers of a step to the tracker called `name`; without a name it does nothing."""
    if name is None:
        yield lambda step, numbers: None
        return
    package = _imported(name)
    if name == "tensorboard":
        with package.SummaryWriter(str(run / "tensorboard")) as writer:

            def add(step: int, numbers: dict[str, float]) -> None:
                for key, value in numbers.items():
                    writer.add_scalar(key, value, step)

            yield add
        return
    # A run that resumes goes on in the same run of W&B, and one that overwrites another begins a new one.
    started_at = json.loads((run / "environment.json").read_text())["started_at"]
    identity = hashlib.sha256(f"{run.resolve()} {started_at}".encode()).hexdigest()[:16]
    resumed = {"id": identity, "resume": "allow"} if name == "wandb" else {}
    package.init(project="sinkscope", name=run.name, config=config, **resumed)
    try:
        yield lambda step, numbers: package.log(numbers, step=step)
    finally:
        package.finish()


def check_tracker(name: str | None) -> None:
    """Returns if the tracker can be used, else raises InputError."""
    if name is not None:
        _imported(name)


def _imported(name: str) -> Any:
    check_choice("track", name, TRACKERS)
    try:
        return importlib.import_module(TRACKERS[name])
    except ModuleNotFoundError as error:
        raise InputError(
            f"`track={name!r}` needs the package {name}, which is not installed. Run: pip install {name}."
        ) from error
