"""Trains a decoder from a configuration to a finished run: optimise, evaluate, probe, checkpoint, resume.

A run is a folder: config.yaml, environment.json, metrics.jsonl and probes.jsonl while it goes on, checkpoints/,
snapshots/, and at the end model/, the tables and summary.json, whose presence says that the run is complete.
"""

from __future__ import annotations

import contextlib
import math
import reprlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sinkscope.errors import InputError
from sinkscope.models.token_batches import TokenBatch
from sinkscope.pretrain.checkpoints import (
    FOLDER,
    expected_layouts,
    export,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)
from sinkscope.pretrain.config import PretrainConfig, TrainingConfig
from sinkscope.pretrain.decoder import Decoder
from sinkscope.pretrain.metrics import (
    PROBE_BATCHES,
    JsonLines,
    StepNumbers,
    Tracker,
    check_tracker,
    log_keys,
    read_first_rows,
    read_rows,
    tracker,
    write_tables,
)
from sinkscope.pretrain.parallel import Processes, whole
from sinkscope.pretrain.probes import probe, random_batch, text_batch
from sinkscope.pretrain.runs import decoder_config_of_run, saved_configuration, shards_of_run
from sinkscope.pretrain.step import TrainingStep, flops_per_token, matrix_rate
from sinkscope.pretrain.tokenize import TokenizeConfig, load_tokenizer, tokenize
from sinkscope.pretrain.tokens import SPLITS, TokenShards, TokenStream, is_shards
from sinkscope.results.atomic import DISK_FULL, explained, locked
from sinkscope.results.run_folder import RunFolder, is_training_run, run_folder
from sinkscope.results.validated import read_json
from sinkscope.runtime import environment
from sinkscope.user_paths import user_path

WRITTEN_LATER = (
    *("metrics.jsonl", "probes.jsonl", "metrics.parquet", "probes.parquet", "summary.json", "tensorboard/events.*"),
    *("checkpoints/step-*", "snapshots/step-*", "model"),
)
"""What training adds to the run folder."""

PROGRESS_S = 5.0
"""Seconds between lines of progress."""

Say = Callable[[str], None]


def pretrain(
    config: PretrainConfig,
    out: Path,
    group: Processes,
    *,
    compile: bool | None = None,
    overwrite: bool = False,
    track: str | None = None,
    say: Say,
) -> dict[str, Any]:
    """The summary of a run in the folder `out`, trained to its end; a run that was stopped goes on where it was.

    Blocks are compiled on CUDA unless `compile` says otherwise. Every process of the group calls it.
    """
    out = user_path(out)
    say = say if group.is_first else lambda text: None
    config.training.rows(group.rank, group.num_processes)
    compile = group.device.type == "cuda" if compile is None else compile
    with locked(out) if group.is_first else contextlib.nullcontext():
        return _pretrain(config, out, group, compile, overwrite, track, say)


def _pretrain(
    config: PretrainConfig, out: Path, group: Processes, compile: bool, overwrite: bool, track: str | None, say: Say
) -> dict[str, Any]:
    if group.is_first:
        check_tracker(track)
        _open_run(config, out, overwrite, group, compile, say)
    group.from_first(None)
    shards = shards_of_run(config, out)
    summary = group.from_first(_finished_summary(config, out, say) if group.is_first else None)
    if summary is not None:
        say(f"the run in {out} is complete; choose another folder to train again, or overwrite it")
        return summary
    model = Decoder(decoder_config_of_run(config, shards))
    with tracker(track if group.is_first else None, out, config.plain()) as send:
        run = TrainingRun(out, model, shards, config.training, group, compile=compile, say=say, track=send)
        say(_opening(run, config, shards, compile))
        with explained(out, only=DISK_FULL):
            return run.train()


def _open_run(config: PretrainConfig, out: Path, overwrite: bool, group: Processes, compile: bool, say: Say) -> None:
    """Makes the run folder with all that training needs, or checks that the existing one has the same configuration.

    Texts are tokenized into it once. What cannot be trained is refused before the folder appears.
    """
    if is_training_run(out) and not overwrite:
        if differences := _differences(saved_configuration(out), config.plain()):
            raise InputError(
                expected=f"the configuration that the run in {out} began with",
                found="; ".join(differences[:3]),
                next_step="Choose another `out`, or replace the run with `overwrite=True`",
            )
        shards_of_run(config, out).verify()
        return
    with run_folder(out, overwrite, later=WRITTEN_LATER) as folder:
        folder.write_yaml("config.yaml", config.plain())
        precision = "bfloat16 autocast" if group.device.type == "cuda" else "float32"
        folder.write_json(
            "environment.json",
            environment(
                device=group.device,
                precision=precision,
                compiled=compile,
                parallel=group.mode,
                num_processes=group.num_processes,
            ),
        )
        if not is_shards(config.data):
            texts = TokenizeConfig(
                data=tuple(config.data), validation=tuple(config.validation), vocab_size=config.vocab_size
            )
            tokenize(texts, folder.path / "tokens", progress=say)
        shards = shards_of_run(config, folder.path)
        shards.verify()
        decoder_config_of_run(config, shards)
        settings = config.training
        for split in SPLITS:
            TokenStream(shards, split, length=settings.sequence_length, batch_size=settings.batch_size, seed=0)


def _finished_summary(config: PretrainConfig, out: Path, say: Say) -> dict[str, Any] | None:
    """The summary of a run that is complete, with all of its rows; None where there is more to do."""
    file = out / "summary.json"
    if not file.is_file():
        return None
    try:
        summary = read_json(file, {})
    except InputError as error:
        say(f"{file} is damaged ({error.found}); the end of the run is written again")
        return None
    for name, keys in log_keys(config.training, config.training.steps).items():
        read_first_rows(out / name, keys)
    return summary


def _differences(found: Any, expected: Any, where: str = "") -> list[str]:
    if isinstance(found, dict) and isinstance(expected, dict):
        keys = [*expected, *(key for key in found if key not in expected)]
        return [
            line
            for key in keys
            for line in _differences(found.get(key), expected.get(key), f"{where}.{key}" if where else str(key))
        ]
    return [] if found == expected else [f"{where} {reprlib.repr(found)} there, {reprlib.repr(expected)} now"]


def _opening(run: TrainingRun, config: PretrainConfig, shards: TokenShards, compile: bool) -> str:
    settings, group = config.training, run.group
    num_tokens, wanted = shards.num_tokens("train"), settings.steps * settings.batch_size * settings.sequence_length
    return (
        f"{config.model.get('attention_variant', 'softmax')}, {run.num_parameters / 1e6:,.1f} M parameters; "
        f"{settings.steps} steps of {settings.batch_size} x {settings.sequence_length} tokens, "
        f"{wanted / num_tokens:.2f} epochs of {num_tokens / 1e6:,.1f} M; "
        f"{group.device.type} x {group.num_processes} ({group.mode}), "
        f"{'bfloat16 autocast' if group.device.type == 'cuda' else 'float32'}, "
        f"{'blocks compiled' if compile else 'eager'}, {settings.optimiser}"
    )


class TrainingRun:
    """One run from its start, or from its newest checkpoint, to its end."""

    def __init__(
        self,
        run: Path,
        model: Decoder,
        shards: TokenShards,
        config: TrainingConfig,
        group: Processes,
        *,
        compile: bool,
        say: Say,
        track: Tracker,
    ) -> None:
        self.run, self.shards, self.config, self.group = run, shards, config, group
        self.say, self.track = say, track
        self.decoder_config = model.config
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        torch.manual_seed(config.seed)
        stream = {"length": config.sequence_length, "batch_size": config.batch_size, "seed": config.seed}
        self.train_stream = TokenStream(shards, "train", **stream)
        self.validation_stream = TokenStream(shards, "validation", **stream)
        self.probe_batches = self._probe_batches(model) if group.is_first else {}
        self.step = TrainingStep(model, config, group, compile=compile)
        self.matrix_rate = matrix_rate(group.device)
        rate = self.matrix_rate * group.num_processes
        self.numbers = StepNumbers(config, flops_per_token(model, config.sequence_length), rate)
        self.seconds = {"probes": 0.0, "evaluation": 0.0, "checkpoints": 0.0}
        self.validation_loss: float | None = None

    def train(self) -> dict[str, Any]:
        """The run's summary, when all steps are done and everything is written."""
        done = self._resume()
        self.spoken_at = time.perf_counter()
        if self.group.is_first:
            self.metrics, self.probes = (self._log_until(done, name) for name in ("metrics.jsonl", "probes.jsonl"))
        if not done:
            self._pause(0)
        self.numbers.restart_clock()
        for step in range(done, self.config.steps):
            loss, norm = self.step.update(step, self.train_stream)
            self.numbers.push(step + 1, loss, norm)
            is_due = self._is_due(step + 1)
            try:
                rows = self.numbers.rows(wait_for_all=is_due)
                if is_due:
                    self.step.check_weights(step + 1)
                if self.config.is_due(self.config.evaluate_every, step + 1):
                    rows[-1]["validation_loss"] = self.validation_loss = self._evaluate(step + 1)
            except FloatingPointError as error:
                raise self._diverged(error) from error
            self._log(rows)
            if is_due:
                self._pause(step + 1)
        return self._finish()

    def _resume(self) -> int:
        """Loads the newest checkpoint; returns the number of updates done before."""
        expected = expected_layouts(self.step.parameters, self.step.optimisers)
        path = newest_checkpoint(self.run, expected, self.say) if self.group.is_first else None
        path = self.group.from_first(path)
        if path is None:
            return 0
        record = load_checkpoint(path, self.step.parameters, self.step.optimisers, self.group)
        if record["data"] != self.shards.fingerprint:
            raise InputError(
                expected=f"the data that the run in {self.run} began with",
                found="other tokens",
                next_step="Give the first ones as `data`, or start again with `overwrite=True`",
            )
        self.numbers.elapsed_before = record["elapsed_s"]
        self.seconds = {name: record["seconds"].get(name, 0.0) for name in self.seconds}
        self.validation_loss = record["validation_loss"]
        self.say(f"resuming at step {record['step']} from {path.name}")
        return record["step"]

    def _log_until(self, done: int, name: str) -> JsonLines:
        """A log with the rows of the updates done; refuses to go on if one is missing."""
        path = self.run / name
        return JsonLines(path, read_first_rows(path, log_keys(self.config, done)[name]))

    def _is_due(self, step: int) -> bool:
        """Whether the loop must stop at a step to evaluate, probe or write."""
        config = self.config
        intervals = (config.evaluate_every, config.probe_every, config.checkpoint_every)
        return any(config.is_due(interval, step) for interval in intervals) or step in config.snapshots

    def _pause(self, step: int) -> None:
        config = self.config
        wants_probe = config.is_due(config.probe_every, step)
        snapshot = self.run / "snapshots" / f"step-{step:08d}"
        wants_snapshot = step in config.snapshots and not self.group.from_first(snapshot.exists())
        model = self._whole_model() if wants_probe or wants_snapshot else None
        if wants_probe and model is not None:
            self._probe(step, model)
        if wants_snapshot and model is not None:
            self._export(model, snapshot)
        # Last, so that a step that has a checkpoint has everything else too.
        if step and config.is_due(config.checkpoint_every, step):
            self._checkpoint(step)
        self.numbers.restart_clock()

    def _evaluate(self, step: int) -> float:
        with _Timer(self.seconds, "evaluation"):
            loss = self.step.evaluate(self.validation_stream)
        if not math.isfinite(loss):
            raise FloatingPointError(f"loss {loss} on held-out text after step {step}")
        return loss

    def _probe_batches(self, model: Decoder) -> dict[str, TokenBatch]:
        config = self.config
        if not config.probe_every:
            return {}
        length = min(config.probe_length, config.sequence_length)
        windows = self.validation_stream.evenly_spaced(config.probe_sequences)[0]
        random = random_batch(model, length=length, num_sequences=config.probe_sequences)
        return dict(zip(PROBE_BATCHES, (random, text_batch(windows, length=length)), strict=True))

    def _probe(self, step: int, model: Decoder) -> None:
        with _Timer(self.seconds, "probes"):
            for name, batch in self.probe_batches.items():
                # The effective rank takes longer than all else, and the literature gives it for text.
                result = probe(model, batch, effective_rank=name == "text")
                row = {"step": step, "tokens": self.numbers.tokens(step), "batch": name, **result.row()}
                self.probes.write(row)
                numbers = {f"{name}/{key}": value for key, value in result.whole.items() if value is not None}
                self.track(step, numbers)

    def _checkpoint(self, step: int) -> None:
        with _Timer(self.seconds, "checkpoints"):
            if self.group.is_first:
                self.metrics.sync()
                self.probes.sync()
            save_checkpoint(
                self.run,
                step,
                self.step.parameters,
                self.step.optimisers,
                self.group,
                keep=self.config.keep_checkpoints,
                data=self.shards.fingerprint,
                elapsed_s=self.numbers.elapsed_s,
                seconds=self.seconds,
                validation_loss=self.validation_loss,
            )

    def _log(self, rows: list[dict[str, Any]]) -> None:
        if not self.group.is_first:
            return
        for row in rows:
            self.metrics.write(row)
            self.track(row["step"], {key: value for key, value in row.items() if value is not None and key != "step"})
            if row["step"] in (1, self.config.steps) or time.perf_counter() - self.spoken_at > PROGRESS_S:
                self.spoken_at = time.perf_counter()
                self.say(self.numbers.progress(row, self.validation_loss))

    def _diverged(self, what: FloatingPointError) -> InputError:
        names = sorted(path.name for path in (self.run / FOLDER).glob("step-????????"))
        return InputError(
            expected="finite losses, gradients and weights",
            found=str(what),
            next_step=f"The last good checkpoint is {names[-1] if names else 'none yet'}; "
            "start anew with a lower `learning_rate`, more `warmup_steps` or a lower `clip`",
        )

    def _finish(self) -> dict[str, Any]:
        """Exports the model and writes tables and summary; a run that was killed here starts this again."""
        model, path = self._whole_model(), self.run / "model"
        summary: dict[str, Any] = {
            "steps": self.config.steps,
            "tokens": self.numbers.tokens(self.config.steps),
            "num_parameters": self.num_parameters,
            "validation_loss": self.validation_loss,
            "elapsed_s": self.numbers.elapsed_s,
            **{f"{name}_s": seconds for name, seconds in self.seconds.items()},
            "matrix_rate": self.matrix_rate,
            "data": self.shards.fingerprint,
        }
        if model is not None:
            if not path.exists():
                self._export(model, path)
            self.metrics.close()
            self.probes.close()
            write_tables(self.run)
            summary["loss"] = read_rows(self.run / "metrics.jsonl")[-1]["loss"]
            # Last: its presence says that the run is complete.
            RunFolder(self.run).write_json("summary.json", summary)
            self.say(f"done in {summary['elapsed_s']:,.0f} s; the model is in {path}")
        return summary

    def _export(self, model: Decoder, path: Path) -> None:
        with run_folder(path) as folder:
            export(model, folder.path, tokenizer=load_tokenizer(self.shards.path))

    def _whole_model(self) -> Decoder | None:
        """The model with all of its weights, in the first process; None in the others, which must call it too."""
        model = self.step.model
        if self.group.mode != "fsdp":
            return model if self.group.is_first else None
        weights = {name: whole(parameter.detach()) for name, parameter in self.step.parameters.items()}
        if not self.group.is_first:
            return None
        with torch.device("meta"):
            copy = Decoder(self.decoder_config)
        copy.load_state_dict(weights, strict=False, assign=True)
        copy.tie_weights()
        return copy


class _Timer:
    """Adds the seconds that a block takes to `seconds[name]`."""

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self.seconds, self.name = seconds, name

    def __enter__(self) -> None:
        self.started_at = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self.name] += time.perf_counter() - self.started_at
