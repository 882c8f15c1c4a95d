"""Training runs read from their folders: configuration, results, and which of them can be compared.

`read_finished_run` and `check_comparable` refuse incomplete runs, and runs of different data. `replicas` groups runs
into variants. `initial_configuration` and the functions below it give what a model is built from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from pydantic import BaseModel, Field

from sinkscope.errors import InputError
from sinkscope.pretrain.config import PretrainConfig, read_config
from sinkscope.pretrain.decoder_config import DecoderConfig
from sinkscope.pretrain.metrics import read_rows
from sinkscope.pretrain.presets import DESCRIBED, WITH_HEAD_NORM, decoder_config, with_defaults
from sinkscope.pretrain.tokenize import load_tokenizer
from sinkscope.pretrain.tokens import TokenShards, is_shards, open_shards
from sinkscope.results.kinds import Scalar
from sinkscope.results.run_folder import is_training_run
from sinkscope.results.validated import (
    Count,
    Name,
    UnusableFileError,
    Whole,
    read_json,
    read_yaml,
    refused,
    strictly,
)
from sinkscope.user_paths import user_path

# Settings that may differ between replicas of a variant. They change how often a run is measured or stored, how its
# batch is split or in which order sums are taken, but not what it learns; and the seed.
SETTINGS_OF_REPLICAS = (
    "micro_batch_size",
    "deterministic",
    "evaluate_every",
    "probe_every",
    "checkpoint_every",
    "keep_checkpoints",
    "snapshots",
    "seed",
)
THEN = ", then "
"""In environment.json, between an old value and a new one of a run that resumed on another machine or set-up."""


class ModelOfARun(BaseModel):
    attention_variant: Name | None = None
    variant_options: dict[str, Scalar] | None = None


class TrainingOfARun(BaseModel):
    steps: Count
    seed: Annotated[int, Field(ge=0)] | None = None


class ConfigOfARun(BaseModel):
    """What the config.yaml of a finished run must hold, also of an older version."""

    model: ModelOfARun
    training: TrainingOfARun


class SummaryOfARun(BaseModel):
    data: Name | None = None


class TokensOfAModel(BaseModel):
    """What is read of the config.json of an exported model."""

    vocab_size: Count
    bos_token_id: Whole | None = None
    eos_token_id: Whole | None = None


# Settings that must be equal for losses and observables to be compared: the same batches of the same tokens, and the
# same held-out windows.
EQUAL_SETTINGS = (
    "batch_size",
    "sequence_length",
    "skipped_targets",
    "evaluation_sequences",
    "probe_length",
    "probe_sequences",
)


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
    """Median over updates, so that the slow first ones, which compile, do not count."""

    @property
    def name(self) -> str:
        """The name of the folder, also if its path is `.`"""
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
        """The settings that make a variant: equal in replicas. Defaults of the decoder are left out."""
        training = {key: value for key, value in self.config["training"].items() if key not in SETTINGS_OF_REPLICAS}
        model = self.config["model"]
        shape = {key: value for key, value in model.items() if key not in ("seed", "max_position_embeddings")}
        # The weights have the run's seed unless the model's configuration names another: then that is a setting.
        if model.get("seed", self.seed) != self.seed:
            shape["model_seed"] = model["seed"]
        defaults = {key: getattr(DecoderConfig, key, None) for key in shape} | {"variant_options": {}}
        return training | {key: value for key, value in shape.items() if value not in (None, defaults[key])}


def read_finished_run(folder: Path) -> FinishedRun:
    """The complete training run in a folder; one that still trains, was stopped or is damaged is refused."""
    folder = Path(folder)
    for name in ("config.yaml", "metrics.jsonl", "environment.json"):
        if not (folder / name).is_file():
            problem = f"There is no {name} in {folder}" if folder.is_dir() else f"There is no folder {folder}"
            raise InputError(f"{problem}. Give the folder of a complete run that sinkscope pretrain wrote.")
    config = read_yaml(folder / "config.yaml", ConfigOfARun)
    config["training"] = with_defaults(config["training"])
    metrics, steps = read_rows(folder / "metrics.jsonl"), config["training"]["steps"]
    if not (folder / "summary.json").is_file():
        done = metrics[-1]["step"] if metrics else 0
        raise InputError(
            f"The training run in {folder} is not complete: it is at step {done} of {steps}. "
            "Wait for it, or finish it: run the same sinkscope pretrain command again."
        )
    # A row for every step, or for evaluations alone: the experiments in lab/ keep no more.
    logged_steps = [row["step"] for row in metrics]
    if logged_steps != sorted(set(logged_steps)) or logged_steps[-1:] != [steps]:
        raise refused(folder / "metrics.jsonl", f"its {len(metrics)} rows do not end at step {steps}")
    probes = folder / "probes.jsonl"
    run = FinishedRun(
        path=folder,
        summary=read_json(folder / "summary.json", SummaryOfARun),
        config=config,
        environment=read_json(folder / "environment.json", dict[str, Scalar]),
        evaluations=[row for row in metrics if row.get("validation_loss") is not None],
        probes=read_rows(probes) if probes.exists() else [],
        tokens_per_second=median([row["tokens_per_second"] for row in metrics]),
    )
    if not run.evaluations:
        raise InputError(
            f"There is no validation loss in {folder / 'metrics.jsonl'}. Train the run again with `overwrite=True`."
        )
    return run


Groups = dict[str, list[FinishedRun]]
"""Runs by the label of their variant, the baseline's first."""


def check_comparable(runs: Sequence[FinishedRun]) -> None:
    """Returns if the losses of these runs can be compared, else raises InputError."""
    # Runs of earlier versions have no hash of their tokens in the summary: the names of their sources are compared.
    have_hashes = all(run.summary.get("data") for run in runs)

    def settings_of(run: FinishedRun) -> dict[str, Any]:
        settings = {name: run.config["training"].get(name) for name in EQUAL_SETTINGS}
        if have_hashes:
            return settings | {"data": run.summary["data"][:12]}
        return settings | {"data": [run.config.get("data"), run.config.get("validation")]}

    first = settings_of(runs[0])
    for run in runs[1:]:
        for name, value in settings_of(run).items():
            if value != first[name]:
                raise InputError(
                    "Runs are compared only on the same data, in batches and held-out windows of the same size. "
                    f"{name} is {value} in {run.path} and {first[name]} in {runs[0].path}. "
                    f"Leave {run.path} out, or train it again with the same {name}."
                )


def replicas(runs: list[FinishedRun]) -> Groups:
    """Replicas by label, the baseline first; a label names the variant and what else differs from the baseline."""
    # Settings are dictionaries, which no dictionary takes as keys: hence pairs.
    variants: list[tuple[dict[str, Any], list[FinishedRun]]] = []
    for run in runs:
        group = next((group for settings, group in variants if settings == run.settings), None)
        if group is None:
            variants.append((run.settings, [run]))
        elif twin := next((other for other in group if other.seed == run.seed), None):
            raise InputError(
                f"{twin.path} and {run.path} are both runs of {run.variant} with seed {run.seed}. "
                f"Leave one of them out, or train it with a `seed` other than {run.seed}."
            )
        else:
            group.append(run)
    first = next((index for index, (_, group) in enumerate(variants) if group[0].variant == "softmax"), 0)
    variants.insert(0, variants.pop(first))
    baseline_settings = variants[0][0]
    return {_label(group[0], settings, baseline_settings): group for settings, group in variants}


def num_machines(runs: Sequence[FinishedRun]) -> int:
    """How many different machines and set-ups the runs were timed on: with more than one, seconds are not compared."""
    names = ("device_name", "num_processes", "parallel", "precision", "compiled", "num_threads")
    machines: set[Any] = set()
    for index, run in enumerate(runs):
        set_up = tuple(str(run.environment.get(name)) for name in names)
        # A run that resumed on another set-up was timed on neither of the two: it counts as one of its own.
        has_changed = any(THEN in value for value in set_up)
        machines.add(index if has_changed else set_up)
    return len(machines)


def unequal_conditions(groups: Groups) -> list[str]:
    """Sentences on what cannot be compared because the variants have different seeds, machines or probes."""
    notes = []
    runs = [run for group in groups.values() for run in group]
    if num_machines(runs) > 1:
        notes.append(
            "Seconds are not compared, because the runs were made on different machines or numbers of devices."
        )
    baseline = next(iter(groups))
    seeds = {run.seed for run in groups[baseline]}
    common = {label: seeds & {run.seed for run in group} for label, group in list(groups.items())[1:]}
    if none := [label for label, shared in common.items() if not shared]:
        notes.append(
            f"No seed in common with {baseline}, so compared with its mean, without an interval: {_listed(none)}."
        )
    if one := [label for label, shared in common.items() if len(shared) == 1]:
        notes.append(f"One seed in common with {baseline}, so ratios have no interval: {_listed(one)}.")
    for label, shared in common.items():
        unpaired = sorted({run.seed for run in groups[label]} - shared)
        if shared and unpaired:
            notes.append(f"Seeds that {baseline} lacks are left out of {label}'s ratios: {_listed(unpaired)}.")
    if any(not run.probes for run in runs):
        without = [run.name for run in runs if not run.probes]
        notes.append(f"Trained without probes, so their sinks, disparity and links are not known: {_listed(without)}.")
    return notes


def _listed(items: Sequence[str | int]) -> str:
    return ", ".join(map(str, items))


def _label(run: FinishedRun, settings: dict[str, Any], baseline: dict[str, Any]) -> str:
    """The variant's name, with the settings in which it differs from the baseline."""
    entries = [run.variant]
    for key in sorted(settings.keys() | baseline.keys() | {"variant_options"}):
        default = getattr(DecoderConfig, key, None)
        value = settings.get(key, default)
        if key == "variant_options" and run.variant in WITH_HEAD_NORM:
            stated = {"per_head": False, "offset": False} | (value or {})
            entries += [f"{name} {option}" for name, option in stated.items() if option != DESCRIBED.get(name)]
            continue
        if key == "attention_variant" or value == baseline.get(key, default):
            continue
        if key == "variant_options":
            entries += [f"{name} {option}" for name, option in (value or {}).items()]
        else:
            entries.append(f"{key} {value}")
    return ", ".join(entries)


def initial_configuration(run: Path) -> tuple[DecoderConfig, Path]:
    """The configuration, with its seed, that a run's first weights are drawn from, and the folder of its tokenizer.

    The size of the vocabulary comes from an exported model in the run folder or, if there is none, from the data.
    """
    if not is_training_run(run):
        wrong = f"{run} has no config.yaml of a training run" if run.is_dir() else f"There is no folder {run}"
        raise InputError(f"{wrong}. Give a folder that sinkscope pretrain wrote.")
    try:
        config = read_config(run)
    except UnusableFileError as error:
        raise InputError(
            f"Another version of sinkscope wrote the training run in {run}: {error.reason}. "
            "Give a folder that sinkscope pretrain wrote."
        ) from error
    for folder in (run / "model", *sorted(run.glob("snapshots/step-????????"))):
        if (file := folder / "config.json").is_file():
            exported = strictly(TokensOfAModel, read_json(file, TokensOfAModel))
            return decoder_config(config.model | exported.model_dump(exclude_unset=True)), folder
    shards = shards_of_run(config, run)
    return decoder_config_of_run(config, shards), shards.path


def shards_of_run(config: PretrainConfig, run: Path) -> TokenShards:
    """The token shards that a run trains on: its data, or those that were made from its texts."""
    return open_shards(user_path(config.data[0]) if is_shards(config.data) else run / "tokens")


def decoder_config_of_run(config: PretrainConfig, shards: TokenShards) -> DecoderConfig:
    """The decoder's configuration, with the vocabulary and the end-of-text token of the data."""
    vocab_size = config.model.get("vocab_size", shards.vocab_size)
    if vocab_size < shards.vocab_size:
        raise InputError(
            f"vocab_size is {vocab_size} in the model's configuration, and the data have {shards.vocab_size} tokens. "
            "Leave it out of the configuration, or tokenize the data with a smaller one."
        )
    end = load_tokenizer(shards.path).eos_token_id
    return decoder_config(config.model | {"vocab_size": vocab_size, "bos_token_id": end, "eos_token_id": end})
