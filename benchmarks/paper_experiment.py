"""Trains what the table beside the paper's needs: head-wise RMSNorm against softmax, other variants, ablations.

    python benchmarks/paper_experiment.py --config shape.yaml --data tokens --runs runs/paper --keep kept --dry-run
    python benchmarks/paper_experiment.py --config shape.yaml --data tokens --runs runs/paper --keep kept --budget-s 540

The same tokens, shape and schedule for all. In this order, each run a `sinkscope pretrain` in a folder of its own:
- tune: softmax and head_norm on one seed, an equal number of trials each: every learning rate with every weight decay.
  The norm's third setting, the initial lambda, goes through its values along that grid as in a Latin square, so it
  gets no trial more.
- judge: both with their best settings on the other seeds, seed by seed, so that a pair ends together.
- others: one seed each of the other variants; those that have the norm take its settings, the rest softmax's.
- ablate: head_norm with an initial lambda of 1, and first_norm, which normalises position 0 only; the other seeds last.
Complete runs are skipped, stopped ones go on. When the budget ends, what is running is stopped, and what is missing is
said. DIR of --keep gets results-N.jsonl.xz with a line for each run: configuration, summary, held-out losses, probes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from kept_results import KeptResults, read_results, run_result
from paper_plan import BAD_LAMBDA, Run, best_trial, judging_groups, run_configuration, tuning_groups

from sinkscope.errors import InputError
from sinkscope.number_lists import whole_numbers
from sinkscope.pretrain.run_setup import PretrainConfig, resolve
from sinkscope.pretrain.token_shards import open_shards
from sinkscope.pretrain.training_config import read_yaml

SOURCE = Path(__file__).resolve().parent.parent / "src"
GRACE_S = 15.0
"""Out of the budget: what importing took, and what a stopped run gets to end."""
PROGRESS_S, POLL_S = 30.0, 0.2


def main() -> None:
    # A termination must unwind the stack, so that no run is left behind without its parent.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    options = parsed()
    try:
        open_shards(Path(options.data))
        is_file = options.config.endswith((".yaml", ".yml"))
        base = read_yaml(Path(options.config)) if is_file else {"preset": options.config}
        trials = tuning_groups(options.learning_rates, options.weight_decays, options.lambdas, options.tune_seed)
        if options.tune_seed in options.seeds:
            raise InputError(
                expected="seeds that nothing was tuned on",
                found=f"{options.tune_seed} in --seeds",
                next_step="Give another --tune-seed",
            )
        if BAD_LAMBDA in options.lambdas:
            raise InputError(
                expected=f"initial lambdas other than {BAD_LAMBDA:g}, which is an ablation",
                found=f"{BAD_LAMBDA:g} in --lambdas",
                next_step="Leave it out",
            )
        if options.dry_run:
            unknown = [Run(stage="judge", variant=variant, seed=0) for variant in ("softmax", "head_norm")]
            return show_plan(trials + judging_groups(*unknown, options.seeds), options, base)
        missing = carry_out(options, base, trials)
    except InputError as error:
        print(f"paper_experiment: {error}", file=sys.stderr)
        sys.exit(2)
    if missing:
        say(f"{len(missing)} runs are missing; the same command goes on with them:")
        say("\n".join(f"  {run.name}" for run in missing))
        sys.exit(1)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="shape and training: a YAML file of sinkscope pretrain")
    parser.add_argument("--data", required=True, help="token shards that sinkscope tokenize wrote")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the run folders")
    parser.add_argument("--keep", type=Path, required=True, help="folder of the results that are kept")
    parser.add_argument("--done", type=Path, help="what --keep wrote before, on a machine whose --runs are lost")
    parser.add_argument(
        "--jobs", type=positive_number, default=1, help="runs at a time; those that share a device slow each other down"
    )
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="seconds for everything")
    parser.add_argument("--tune-seed", type=int, default=0)
    parser.add_argument("--tune-steps", type=positive_number, help="steps of a trial; else those of the configuration")
    parser.add_argument("--seeds", type=whole_numbers, default=[1, 2, 3, 4], help="to judge on, such as 1,2,3,4")
    parser.add_argument("--learning-rates", type=positive_numbers, default=[1e-3, 2e-3, 4e-3])
    parser.add_argument("--weight-decays", type=positive_numbers, default=[0.1, 0.5])
    parser.add_argument("--lambdas", type=positive_numbers, default=[0.25, 0.5], help="initial lambdas to try")
    parser.add_argument("--dry-run", action="store_true", help="show the plan and train nothing")
    return parser.parse_args()


def positive_number(text: str) -> int:
    """A whole number of at least 1; argparse refuses the rest with exit code 2."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def positive_numbers(text: str) -> list[float]:
    """The numbers of a list such as 0.1,0.5."""
    numbers = [float(item) for item in text.split(",")]
    if min(numbers) <= 0:
        raise ValueError
    return numbers


def say(text: str) -> None:
    print(text, flush=True)


def show_plan(groups: list[list[Run]], options: argparse.Namespace, base: dict[str, Any]) -> None:
    total = 0
    with tempfile.TemporaryDirectory() as folder:
        options.runs = Path(folder)
        configs = [(run, written_config(run, options, base)[1].training) for group in groups for run in group]
    for number, (run, training) in enumerate(configs):
        tokens = training.steps * training.batch_size * training.sequence_length
        total += tokens
        say(f"{number + 1:3d}  {run.name:60s} {training.steps:7,d} steps {tokens / 1e6:9,.1f} M tokens")
    say(f"     {'all':60s} {'':13s} {total / 1e6:9,.1f} M tokens")


def carry_out(options: argparse.Namespace, base: dict[str, Any], trials: list[list[Run]]) -> list[Run]:
    """The runs that are missing when the budget is spent; those that wait for the tuning are told as such."""
    experiment = Experiment(options, base)
    best = [Run(stage="judge", variant=variant, seed=0) for variant in ("softmax", "head_norm")]
    if experiment.carry_out(trials):
        best = [best_trial(experiment.kept.results, run.variant) for run in best]
        for run in best:
            say(f"tuned:  {run.name}")
        experiment.carry_out(judging_groups(*best, options.seeds))
        return experiment.missing
    return experiment.missing + [run for group in judging_groups(*best, options.seeds) for run in group]


def written_config(run: Run, options: argparse.Namespace, base: dict[str, Any]) -> tuple[Path, PretrainConfig]:
    """The configuration file of a run beside its folder, and what it says in full."""
    path = options.runs / f"{run.name}.yaml"
    path.write_text(yaml.safe_dump(run_configuration(base, run, options.tune_steps)), encoding="utf-8")
    return path, resolve(str(path), data=[options.data], training={})


def command(config: Path, options: argparse.Namespace) -> list[str]:
    """What trains the run of a configuration file, into the folder of its name."""
    pretrain = [sys.executable, "-m", "sinkscope", "pretrain", "--config", str(config)]
    return [*pretrain, "--out", str(config.with_name(config.name.removesuffix(".yaml"))), "--data", options.data]


class Experiment:
    """Runs of a plan as processes, a few at a time, within the budget."""

    def __init__(self, options: argparse.Namespace, base: dict[str, Any]) -> None:
        self.options, self.base = options, base
        done = read_results(options.done) if options.done else []
        self.done = {Run(**result["run"]).name: result for result in done}
        self.kept = KeptResults(options.keep, say)
        options.runs.mkdir(parents=True, exist_ok=True)
        self.missing: list[Run] = []
        self.running: dict[Run, tuple[subprocess.Popen, float]] = {}
        self.overhead_s = 0.0
        """Of the newest run: the first one compiles, later ones find what it compiled."""
        self.deadline = time.monotonic() + options.budget_s - GRACE_S
        self.spoken_at = time.monotonic()

    def carry_out(self, groups: list[list[Run]]) -> bool:
        """Whether all runs are complete; a group is begun only if all of it is likely to fit into the budget."""
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
        return len(self.missing) == missing_before

    def _is_complete(self, run: Run) -> bool:
        folder = self.options.runs / run.name
        result = self.done.get(run.name)
        if result is None and (folder / "summary.json").is_file():
            result = run_result(run, folder, jobs=self.options.jobs)
        if result is None:
            return False
        if not result["diverged"] and result["config"] != written_config(run, self.options, self.base)[1].plain():
            raise InputError(
                expected=f"{run.name} with the configuration of this experiment",
                found="another one among the complete runs",
                next_step="Choose another folder with --runs, and another --done",
            )
        self.kept.add(result)
        return True

    def _fits(self, run: Run, num_left: int) -> bool:
        """Whether so many runs like this one are likely to end in time, by the slowest one seen."""
        training = written_config(run, self.options, self.base)[1].training
        tokens = training.steps * training.batch_size * training.sequence_length
        rates = [result["tokens_per_second"] for result in self.kept.results if not result["diverged"]]
        run_s = self.overhead_s + tokens / min(rates, default=float("inf"))
        return -(-num_left // self.options.jobs) * run_s < self.deadline - time.monotonic()

    def _start(self, run: Run) -> None:
        path, _ = written_config(run, self.options, self.base)
        search = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
        with (self.options.runs / f"{run.name}.log").open("wb") as log:
            # A session of its own: its compilation workers are stopped with it.
            environment = os.environ | {"PYTHONPATH": search}
            process = subprocess.Popen(
                command(path, self.options), stdout=log, stderr=log, env=environment, start_new_session=True
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
        folder = self.options.runs / run.name
        if code == 0:
            result = run_result(run, folder, jobs=self.options.jobs)
            training_s = result["summary"]["tokens"] / result["tokens_per_second"]
            self.overhead_s = max(0.0, elapsed_s - training_s)  # less than 0 in a run that went on
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # a complete run needs none, the disk may
            loss = f"held out {result['summary']['validation_loss']:.4f}"
        elif "expected a finite loss" in (line := self._last_line(run)):
            result, loss = {"run": asdict(run), "diverged": True, "why": line}, "diverged"
        else:
            raise InputError(
                expected=f"{run.name} to train to its end",
                found=f"exit code {code}, {line}",
                next_step=f"Read {self.options.runs / run.name}.log",
            )
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
        lines = (self.options.runs / f"{run.name}.log").read_text(encoding="utf-8", errors="replace").splitlines()
        return lines[-1].strip() if lines else "nothing said yet"


if __name__ == "__main__":
    main()
