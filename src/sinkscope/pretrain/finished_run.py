"""What a training run left in its folder, read once and checked; a run that is not complete is refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from sinkscope.errors import InputError
from sinkscope.pretrain.decoder_config import DecoderConfig
from sinkscope.pretrain.metrics_log import read_rows
from sinkscope.pretrain.training_config import with_defaults
from sinkscope.results.validated import (
    LARGEST_INT,
    NAME,
    SCALAR,
    Each,
    Int,
    Maybe,
    read_json,
    read_yaml,
    refused,
)

# What changes how often a run is looked at or stored, or how its batch is cut, and nothing of what it learns.
WITHOUT_EFFECT = (
    *("micro_batch_size", "evaluate_every", "probe_every", "checkpoint_every", "keep_checkpoints", "snapshots", "seed"),
)
CONFIG = {
    "model": {"attention_variant": Maybe(NAME), "variant_options": Maybe(Each(SCALAR))},
    "training": {"steps": Int(1), "seed": Maybe(Int(0, LARGEST_INT))},
}
SUMMARY = {"data": Maybe(NAME)}


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
    for name in ("config.yaml", "metrics.jsonl", "environment.json"):
        if not (folder / name).is_file():
            found = f"no {name}" if folder.is_dir() else "no such folder"
            raise _refused(folder, found, "Give a folder that sinkscope pretrain wrote")
    config = read_yaml(folder / "config.yaml", CONFIG)
    config["training"] = with_defaults(config["training"])
    metrics, steps = read_rows(folder / "metrics.jsonl"), config["training"]["steps"]
    if not (folder / "summary.json").is_file():
        done = metrics[-1]["step"] if metrics else 0
        raise _refused(
            folder,
            f"one that is not complete: step {done} of {steps}",
            "Wait for it, or finish it: run the same sinkscope pretrain command again",
        )
    logged = [row["step"] for row in metrics]  # each step's, or of an experiment that was kept, the evaluations alone
    if logged != sorted(set(logged)) or logged[-1:] != [steps]:
        raise refused(folder / "metrics.jsonl", f"{len(metrics)} rows that do not go on to step {steps}")
    probes = folder / "probes.jsonl"
    run = FinishedRun(
        path=folder,
        summary=read_json(folder / "summary.json", SUMMARY),
        config=config,
        environment=read_json(folder / "environment.json", Each(SCALAR)),
        evaluations=[row for row in metrics if row.get("validation_loss") is not None],
        probes=read_rows(probes) if probes.exists() else [],
        tokens_per_second=median([row["tokens_per_second"] for row in metrics]),
    )
    if not run.evaluations:
        raise _refused(folder, "no validation loss in metrics.jsonl", "Train it again with `overwrite=True`")
    return run


def _refused(folder: Path, found: str, next_step: str) -> InputError:
    return InputError(expected=f"a complete training run in {folder}", found=found, next_step=next_step)
