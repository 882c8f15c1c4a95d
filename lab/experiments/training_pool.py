"""Training runs as processes, a few at a time, within a budget of seconds; what ended before is left out."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from kept_results import KeptResults, read_results, run_result

from sinkscope.errors import InputError
from sinkscope.pretrain.config import PretrainConfig
from sinkscope.pretrain.presets import resolve

SOURCE = Path(__file__).resolve().parents[2] / "src"
GRACE_S = 15.0
"""Out of the budget: what importing took, and what a stopped run gets to end."""
PROGRESS_S, POLL_S = 30.0, 0.2

Run = Any
"""A frozen dataclass with a `name` that no other run has."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that a pool needs."""
    parser.add_argument("--data", required=True, help="token shards that sinkscope tokenize wrote")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the run folders")
    parser.add_argument("--keep", type=Path, required=True, help="folder of the results that are kept")
    parser.add_argument("--done", type=Path, help="what --keep wrote before, on a machine whose --runs are lost")
    parser.add_argument(
        "--jobs", type=positive_number, default=1, help="runs at a time; those that share a device slow each other down"
    )
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="seconds for everything")


def positive_number(text: str) -> int:
    """A whole number of at least 1; argparse refuses the rest with exit code 2."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def say(text: str) -> None:
    print(text, flush=True)


def stop_with_the_parent() -> None:
    """A termination must unwind the stack, so that no run is left without its parent."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def training_command(config: Path, folder: Path, data: str) -> list[str]:
    """What trains the run of a configuration file, into a folder."""
    pretrain = [sys.executable, "-m", "sinkscope", "pretrain", "--config", str(config)]
    return [*pretrain, "--out", str(folder), "--data", data]


class TrainingPool:
    """Runs of a plan as processes.

    `configuration` gives the mappings of a run's `sinkscope pretrain` file. `measure`, where given, is a command for
    the folder of a finished run; it writes `measures.json` there, which is kept with the rest.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        configuration: Callable[[Run], dict[str, Any]],
        *,
        measure: Callable[[Path], list[str]] | None = None,
    ) -> None:
        self.options, self.configuration, self.measure = options, configuration, measure
        done = read_results(options.done) if options.done else []
        self.done = {result["name"]: result for result in done}
        self.kept = KeptResults(options.keep, say)
        options.runs.mkdir(parents=True, exist_ok=True)
        self.missing: list[Run] = []
        self.failed: dict[Run, str] = {}
        self.running: dict[Run, tuple[subprocess.Popen, float]] = {}
        self.overhead_s = 0.0
        """Of the newest run: the first one compiles, later ones find what it compiled."""
        self.deadline = time.monotonic() + options.budget_s - GRACE_S
        self.spoken_at = time.monotonic()

    def carry_out(self, groups: Sequence[Sequence[Run]]) -> bool:
        """Whether all runs are complete; a group is begun only if all of it is likely to fit into the budget.

        A run that fails does not stop the others: it is refused when they have ended.
        """
        missing_before = len(self.missing)
        try:
            for group in groups:
                waiting = [run for run in group if not self._is_complete(run)]
                for number, run in enumerate(waiting):
                    self._wait(below=self.options.jobs)
                    if not self._fits(run, len(waiting) - number):
                        self.missing += waiting[number:]
                        break
                    self._start(run)
            self._wait(below=1)
        finally:
            self._stop()
        for run, why in self.failed.items():
            raise InputError(f"{run.name} did not train to its end: {why.rstrip('.')}. Read {self._log(run)}.")
        return len(self.missing) == missing_before

    def resolved(self, run: Run) -> PretrainConfig:
        """What a run's configuration says in full; writes the file of it beside the run's folder."""
        path = self._path(run, ".yaml")
        path.write_text(yaml.safe_dump(self.configuration(run)), encoding="utf-8")
        return resolve(str(path), data=[self.options.data], training={})

    def _path(self, run: Run, suffix: str = "") -> Path:
        return self.options.runs / f"{run.name}{suffix}"

    def _log(self, run: Run) -> Path:
        return self._path(run, ".log")

    def _is_complete(self, run: Run) -> bool:
        result = self.done.get(run.name)
        if result is None and (self._path(run) / "summary.json").is_file():
            result = self._result(run)
        if result is None:
            return False
        if not result["diverged"] and result["config"] != self.resolved(run).plain():
            raise InputError(
                f"The complete runs have {run.name} with another configuration. Choose another folder with "
                "--runs, and another --done."
            )
        self.kept.add(result)
        return True

    def _result(self, run: Run) -> dict[str, Any]:
        return run_result(run.name, asdict(run), self._path(run), jobs=self.options.jobs)

    def _fits(self, run: Run, num_left: int) -> bool:
        """Whether so many runs like this one are likely to end in time, by the slowest one seen."""
        training = self.resolved(run).training
        tokens = training.steps * training.batch_size * training.sequence_length
        rates = [result["tokens_per_second"] for result in self.kept.results if not result["diverged"]]
        run_s = self.overhead_s + tokens / min(rates, default=float("inf"))
        return -(-num_left // self.options.jobs) * run_s < self.deadline - time.monotonic()

    def _start(self, run: Run) -> None:
        self.resolved(run)
        commands = [training_command(self._path(run, ".yaml"), self._path(run), self.options.data)]
        if self.measure is not None:
            commands.append(self.measure(self._path(run)))
        search = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
        with self._log(run).open("wb") as log:
            # A session of its own: its compilation workers are stopped with it.
            process = subprocess.Popen(
                ["sh", "-c", " && ".join(shlex.join(command) for command in commands)],
                stdout=log,
                stderr=log,
                env=os.environ | {"PYTHONPATH": search},
                start_new_session=True,
            )
        self.running[run] = process, time.monotonic()
        say(f"begins: {run.name}")

    def _wait(self, *, below: int) -> None:
        """Returns when fewer than `below` runs are left, ended or stopped."""
        while len(self.running) >= below:
            for run, (process, started_at) in list(self.running.items()):
                if process.poll() is not None:
                    del self.running[run]
                    self._ended(run, process.returncode, time.monotonic() - started_at)
            if time.monotonic() > self.deadline:
                return self._stop()
            if time.monotonic() - self.spoken_at > PROGRESS_S:
                self.spoken_at = time.monotonic()
                for run in self.running:
                    say(f"  {run.name}: {self._last_line(run)}")
            time.sleep(POLL_S)

    def _ended(self, run: Run, code: int, elapsed_s: float) -> None:
        folder, line = self._path(run), self._last_line(run)
        if (folder / "summary.json").is_file():
            result = self._result(run)
            training_s = result["summary"]["tokens"] / result["tokens_per_second"]
            self.overhead_s = max(0.0, elapsed_s - training_s)  # less than 0 in a run that went on
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # a complete run needs none, the disk may
            loss = f"held out {result['summary']['validation_loss']:.4f}"
            if code:
                loss += f", but its measures failed: {line}"
        elif "Training diverged" in line:
            result = {"name": run.name, "run": asdict(run), "diverged": True, "why": line}
            loss = "diverged"
        else:
            self.failed[run] = f"exit code {code}, {line}"
            return say(f"failed: {run.name}: {self.failed[run]}")
        self.kept.add(result)
        say(f"ends:   {run.name}: {loss}, {elapsed_s:.0f} s, {self.deadline - time.monotonic():.0f} s left")

    def _stop(self) -> None:
        """Interrupts what is running; each goes on from its newest checkpoint the next time."""
        for process, _ in self.running.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
        until = time.monotonic() + GRACE_S / 3
        for run, (process, _) in self.running.items():
            try:
                process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            self.missing.append(run)
        self.running.clear()

    def _last_line(self, run: Run) -> str:
        lines = self._log(run).read_text(encoding="utf-8", errors="replace").splitlines()
        return lines[-1].strip() if lines else "nothing said yet"
