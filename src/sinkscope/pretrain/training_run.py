"""The training loop: update, evaluate, probe, checkpoint, resume, and export the model at the end.

What one update does is in step.py. In a distributed run every process runs this loop, and the first one alone writes
files. A method that gathers shards or broadcasts must be called by all of them, also where only the first uses the
result: `_pause`, `_evaluate`, `_checkpoint`, `_whole_model`.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch

from sinkscope.errors import InputError
from sinkscope.models.sharded import whole_copy
from sinkscope.models.token_batches import TokenBatch
from sinkscope.pretrain.checkpoints import (
    FOLDER,
    expected_layouts,
    export,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)
from sinkscope.pretrain.config import TrainingConfig
from sinkscope.pretrain.decoder import Decoder
from sinkscope.pretrain.metrics import (
    PROBE_BATCHES,
    JsonLines,
    StepNumbers,
    Tracker,
    log_keys,
    read_first_rows,
    read_rows,
    write_tables,
)
from sinkscope.pretrain.parallel import Processes
from sinkscope.pretrain.probes import probe, random_batch, text_batch
from sinkscope.pretrain.step import TrainingStep, flops_per_token, matrix_rate
from sinkscope.pretrain.tokenize import load_tokenizer
from sinkscope.pretrain.tokens import TokenShards, TokenStream
from sinkscope.progress import Say
from sinkscope.results.run_folder import RunFolder, run_folder

PROGRESS_S = 5.0
"""Seconds between lines of progress."""


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
        """Trains from the newest checkpoint, or from the start, to the end; returns the run's summary.

        On a GPU a row of numbers comes one update late (metrics.py), so that the loop does not wait for the device.
        Before an evaluation, a probe or a checkpoint all of them are fetched, and training stops if one is not finite:
        no checkpoint of a diverged model is written.
        """
        done = self._resume()
        self.said_at = time.perf_counter()
        if self.group.is_first:
            self.metrics = self._open_log("metrics.jsonl", done)
            self.probes = self._open_log("probes.jsonl", done)
        if done == 0:
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
                    # The last row is this step's, since all rows were waited for.
                    rows[-1]["validation_loss"] = self.validation_loss = self._evaluate(step + 1)
            except FloatingPointError as error:
                raise self._diverged(error) from error
            self._log(rows)
            if is_due:
                self._pause(step + 1)
        return self._finish()

    def _resume(self) -> int:
        """Loads the newest checkpoint, if there is one; returns how many updates it was taken after."""
        expected = expected_layouts(self.step.parameters, self.step.optimisers)
        # The first process chooses, so that all of them load the same checkpoint.
        path = newest_checkpoint(self.run, expected, self.say) if self.group.is_first else None
        path = self.group.from_first(path)
        if path is None:
            return 0
        record = load_checkpoint(path, self.step.parameters, self.step.optimisers, self.group)
        if record["data"] != self.shards.fingerprint:
            raise InputError(
                f"The run in {self.run} was started with other tokens than those of `data`. "
                "Give the same `data` again, or start anew with `overwrite=True`."
            )
        self.numbers.elapsed_before = record["elapsed_s"]
        self.seconds = {name: record["seconds"].get(name, 0.0) for name in self.seconds}
        self.validation_loss = record["validation_loss"]
        self.say(f"resuming at step {record['step']} from {path.name}")
        return record["step"]

    def _open_log(self, name: str, done: int) -> JsonLines:
        """A log that begins with the rows of the `done` updates; later rows, of updates that are done again, go.

        Refuses to continue if one of the rows is missing.
        """
        path = self.run / name
        return JsonLines(path, read_first_rows(path, log_keys(self.config, done)[name]))

    def _is_due(self, step: int) -> bool:
        """Whether there is something to do after a step: evaluate, probe, or save."""
        config = self.config
        intervals = (config.evaluate_every, config.probe_every, config.checkpoint_every)
        return any(config.is_due(interval, step) for interval in intervals) or step in config.snapshots

    def _pause(self, step: int) -> None:
        """Probes and saves what is due after a step."""
        config = self.config
        snapshot = self.run / "snapshots" / f"step-{step:08d}"
        must_probe = config.is_due(config.probe_every, step)
        # A run that was stopped after its snapshot and before its checkpoint comes to this step a second time.
        must_export = step in config.snapshots and not self.group.from_first(snapshot.exists())
        model = self._whole_model() if must_probe or must_export else None
        if must_probe and model is not None:
            self._probe(step, model)
        if must_export and model is not None:
            self._export(model, snapshot)
        # The checkpoint comes last. So a step with a checkpoint has its probe and its snapshot too, and a run that
        # resumes there needs to make neither up.
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
        """The batches that are probed, by name, the same ones at every step: random tokens and held-out text."""
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
                # The effective rank takes longer than all other numbers together, and papers report it for text.
                result = probe(model, batch, effective_rank=name == "text")
                row = {"step": step, "tokens": self.numbers.tokens(step), "batch": name, **result.row()}
                self.probes.write(row)
                numbers = {f"{name}/{key}": value for key, value in result.whole.items() if value is not None}
                self.track(step, numbers)

    def _checkpoint(self, step: int) -> None:
        with _Timer(self.seconds, "checkpoints"):
            if self.group.is_first:
                # A run resumes at a checkpoint only if the logs have every row before it.
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
            if row["step"] in (1, self.config.steps) or time.perf_counter() - self.said_at > PROGRESS_S:
                self.said_at = time.perf_counter()
                self.say(self.numbers.progress(row, self.validation_loss))

    def _diverged(self, error: FloatingPointError) -> InputError:
        names = sorted(path.name for path in (self.run / FOLDER).glob("step-????????"))
        newest = f"The last good checkpoint is {names[-1]}" if names else "There is no checkpoint yet"
        return InputError(
            f"Training diverged: {error}. {newest}. "
            "Start anew with a lower `learning_rate`, more `warmup_steps` or a lower `clip`."
        )

    def _finish(self) -> dict[str, Any]:
        """Exports the model, writes tables and summary, and returns the summary; a run killed here does this again."""
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
            # Written last: a folder with summary.json is a complete run.
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
        # Gathering is collective, so every process takes part in it, also those that do not keep the result.
        copy = whole_copy(model, self.step.parameters)
        return copy if self.group.is_first else None


class _Timer:
    """Adds the seconds that a block takes to `seconds[name]`."""

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self.seconds, self.name = seconds, name

    def __enter__(self) -> None:
        self.started_at = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self.name] += time.perf_counter() - self.started_at
