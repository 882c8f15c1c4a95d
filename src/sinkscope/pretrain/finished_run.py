"""What a training run left in its folder, read once and checked; a run that is not complete is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from sinkscope.errors import InputError
from sinkscope.pretrain.decoder_config import DecoderConfig
from sinkscope.pretrain.metrics_log import METRICS, read_rows
from sinkscope.pretrain.training_config import with_defaults

# What changes how often a run is looked at or stored, or how its batch is cut, and nothing of what it learns.
WITHOUT_EFFECT = (
    *("micro_batch_size", "evaluate_every", "probe_every", "checkpoint_every", "keep_checkpoints", "snapshots", "seed"),
)
PROBE_KEYS = {"step", "tokens", "batch", "whole", "layers"}


@dataclass(frozen=True)
class FinishedRun:
    """One complete training run. `evaluations` are the rows of metrics.jsonl that have a validation loss."""

    path: Path
    summary: dict[str, Any]
    config: dict[str, Any]
    environment: dict[str, Any]
    evaluations: list[dict[str, Any]]
    probes: list[dict[str, Any]]
    tokens_per_second: float
    """Median over updates, so that compilation does not count."""

    @property
    def name(self) -> str:
        """The name of the folder, also where it was given as a dot."""
        return self.path.resolve().name

    @property
    def variant(self) -> str:
        return self.config["model"].get("attention_variant", DecoderConfig.attention_variant)

    @property
    def seed(self) -> int:
        return self.config["training"]["seed"]

    @property
    def validation_loss(self) -> float:
        return self.evaluations[-1]["validation_loss"]

    @property
    def settings(self) -> dict[str, Any]:
        """What tells this run from all but its replicas, by name; what the decoder has by default is left out."""
        training = {key: value for key, value in self.config["training"].items() if key not in WITHOUT_EFFECT}
        model = self.config["model"]
        shape = {key: value for key, value in model.items() if key not in ("seed", "max_position_embeddings")}
        if model.get("seed", self.seed) != self.seed:
            shape["model_seed"] = model["seed"]
        usual = {key: getattr(DecoderConfig, key, None) for key in shape} | {"variant_options": {}}
        return training | {key: value for key, value in shape.items() if value not in (None, usual[key])}


def read_finished_run(folder: Path) -> FinishedRun:
    """The training run in a folder; a run that goes on, was stopped, or is damaged is refused."""
    folder = Path(folder)
    config = _read(folder, "config.yaml", yaml.safe_load)
    if not isinstance(config, dict) or not {"model", "training"} <= set(config):
        raise _refused(folder, "another config.yaml", "Give a folder that sinkscope pretrain wrote")
    config["training"] = with_defaults(config["training"])
    metrics = _read_rows(folder / "metrics.jsonl", {column.name for column in METRICS.columns})
    if not (folder / "summary.json").is_file():
        done, steps = metrics[-1]["step"] if metrics else 0, config["training"]["steps"]
        raise _refused(
            folder,
            f"one that is not complete: step {done} of {steps}",
            "Wait for it, or finish it: run the same sinkscope pretrain command again",
        )
    probes = folder / "probes.jsonl"
    run = FinishedRun(
        path=folder,
        summary=_read(folder, "summary.json", json.loads),
        config=config,
        environment=_read(folder, "environment.json", json.loads),
        evaluations=[row for row in metrics if row["validation_loss"] is not None],
        probes=_read_rows(probes, PROBE_KEYS) if probes.is_file() else [],
        tokens_per_second=median([row["tokens_per_second"] for row in metrics]) if metrics else 0.0,
    )
    if not run.evaluations:
        raise _refused(folder, "no validation loss in metrics.jsonl", "Run sinkscope pretrain again with --overwrite")
    return run


def _read(folder: Path, name: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        found = f"no {name}" if folder.is_dir() else "no such folder"
        raise _refused(folder, found, "Give a folder that sinkscope pretrain wrote") from error
    except (ValueError, yaml.YAMLError) as error:
        raise _refused(folder, f"a damaged {name}", "Run sinkscope pretrain again with --overwrite") from error


def _read_rows(path: Path, expected: set[str]) -> list[dict[str, Any]]:
    try:
        rows = read_rows(path)
        if not all(isinstance(row, dict) and expected <= set(row) for row in rows):
            raise ValueError(f"rows without {', '.join(sorted(expected))}")
    except FileNotFoundError as error:
        raise _refused(path.parent, f"no {path.name}", "Give a folder that sinkscope pretrain wrote") from error
    except ValueError as error:
        found = f"a damaged {path.name}"
        raise _refused(path.parent, found, "Run sinkscope pretrain again with --overwrite") from error
    return rows


def _refused(folder: Path, found: str, next_step: str) -> InputError:
    return InputError(expected=f"a complete training run in {folder}", found=found, next_step=next_step)
