"""Trains the runs of one arm of the ladder (plan.md), one after the other, until a limit of seconds.

    python lab/ladder/ladder.py --arm head_norm --tokens DIR --kept DIR --out DIR --limit-s 570

First every rate up to the first decay, on seed 1; then the best rate on all seeds, decay by decay. Each decay is a line
in DIR/ARM.jsonl. What is there, or in lab/ladder/results, is not trained again; --kept holds weights to go on from.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import numpy as np
import torch
from arms import ARMS, LENGTH
from trainer import Recipe, State, Trainer

RATES = (0.0045, 0.003, 0.00675, 0.002, 0.01)
RATE_STEP = 1.5
ENDS = (0.4, 0.6, 0.8, 1.0)
"""Where decays end, as shares of all steps."""
DECAY_SHARE = 0.2
"""Of the tokens up to the end of a decay."""
BIN = 20
"""Updates of which a mean training loss is kept."""
RECIPES = {
    "tiny": Recipe(size="tiny", steps=50, rows=4, warmup_steps=5),
    "small": Recipe(size="small", steps=2000, rows=128, warmup_steps=100),
    "larger": Recipe(size="larger", steps=7680, rows=128, warmup_steps=200),
}
SEEDS = (1, 2, 3)
Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    arm: str
    size: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.size}-{self.arm}-{self.rate:g}-seed{self.seed}"


class OutOfTimeError(Exception):
    """The limit is reached."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", choices=ARMS, required=True)
    parser.add_argument("--size", choices=RECIPES, default="small")
    parser.add_argument("--tokens", type=Path, required=True, help="what prepare.py wrote")
    parser.add_argument("--kept", type=Path, required=True, help="weights, and a copy of the results")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--limit-s", type=float, default=float("inf"))
    parser.add_argument("--attention", choices=["flash", "cudnn"], default="flash")
    parser.add_argument("--bench-s", type=float, help="only measure how fast updates are, for about so long")
    options = parser.parse_args()
    deadline = time.monotonic() + options.limit_s
    torch.backends.cuda.enable_cudnn_sdp(options.attention == "cudnn")
    torch.backends.cuda.enable_flash_sdp(options.attention == "flash")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    recipe = RECIPES[options.size]
    trainer = Trainer(options.arm, recipe, *read_tokens(options.tokens, recipe, device))
    say(options.arm, f"ready, {sum(p.numel() for p in trainer.parameters):,} parameters, {memory(device)}")
    if options.bench_s:
        return bench(trainer, options.bench_s)
    ladder = Ladder(trainer, options.kept, options.out, deadline)
    try:
        ladder.climb(options.rates, options.seeds)
        say(options.arm, "all done")
    except OutOfTimeError:
        say(options.arm, "out of time; the same command goes on")


def say(arm: str, text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {arm:15s} {text}", flush=True)


def memory(device: torch.device) -> str:
    return f"{torch.cuda.max_memory_reserved() / 2**30:.1f} GiB" if device.type == "cuda" else "cpu"


def read_tokens(folder: Path, recipe: Recipe, device: torch.device) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(text to train on, held-out text by stratum)."""

    def moved(tokens: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(tokens.astype(np.int32)).to(device)

    strata = {stratum: moved(np.load(folder / f"{stratum}-valid.npy")) for stratum in ("prose", "code")}
    paths = sorted(path for path in folder.glob("*.npy") if not path.stem.endswith("-valid"))
    return moved(np.concatenate([np.load(path) for path in paths])), strata


def bench(trainer: Trainer, seconds: float) -> None:
    """Says how many tokens a second are trained on; for a while longer, so that others meet no empty device."""
    trainer.begin(1, 0.003)
    trainer.launch()
    torch.cuda.synchronize()
    started_at, rates = time.perf_counter(), []
    while time.perf_counter() - started_at < seconds:
        part_at = time.perf_counter()
        trainer.step.zero_()
        trainer.run(20)
        torch.cuda.synchronize()
        rates.append(20 * trainer.recipe.rows * LENGTH / (time.perf_counter() - part_at))
    losses = trainer.train_losses(0, 20)
    evaluated_at = time.perf_counter()
    trainer.held_out()
    evaluated_s = time.perf_counter() - evaluated_at
    rate = sorted(rates)[len(rates) // 2] / 1e6
    say(trainer.arm, f"{rate:.3f} M tokens/s, held out in {evaluated_s:.2f} s, last loss {losses[-1]:.3f}")


class Ladder:
    """The runs of one arm, what is known of them, and where their weights are kept."""

    def __init__(self, trainer: Trainer, kept: Path, out: Path, deadline: float) -> None:
        self.trainer, self.kept, self.deadline = trainer, kept, deadline
        self.recipe, self.arm = trainer.recipe, trainer.arm
        self.files = [out / f"{self.recipe.size}-{self.arm}.jsonl", kept / f"{self.recipe.size}-{self.arm}.jsonl"]
        for path in self.files:
            path.parent.mkdir(parents=True, exist_ok=True)
        results = Path(__file__).resolve().parent / "results" / self.files[0].name
        self.rows: dict[tuple[str, float], Row] = {}
        for path in [results, *self.files]:
            for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
                row = json.loads(line)
                self.rows[row["run"], row["end"]] = row
        self.holds: Run | None = None
        """The run whose trunk is on the device."""

    def climb(self, rates: tuple[float, ...], seeds: tuple[int, ...]) -> None:
        scanned = list(rates)
        for rate in scanned:
            self.branch(Run(self.arm, self.recipe.size, rate, seeds[0]), ENDS[0])
        while (best := self.best(scanned, seeds[0])) in (min(scanned), max(scanned)) and len(scanned) < len(rates) + 2:
            scanned.append(best / RATE_STEP if best == min(scanned) else best * RATE_STEP)
            self.branch(Run(self.arm, self.recipe.size, scanned[-1], seeds[0]), ENDS[0])
        say(self.arm, f"best rate {best:g}")
        for seed in seeds:
            for end in ENDS:
                self.branch(Run(self.arm, self.recipe.size, best, seed), end)

    def best(self, rates: list[float], seed: int) -> float:
        """The rate of the lowest held-out loss at the first end, the mean of the strata."""
        return min(rates, key=lambda rate: self._loss(Run(self.arm, self.recipe.size, rate, seed)))

    def branch(self, run: Run, end: float) -> None:
        """Trains a run's constant rate up to a decay, and the decay; writes its line."""
        if (run.name, end) in self.rows:
            return
        trainer = self.trainer
        last = round(end * self.recipe.steps)
        decay = round(DECAY_SHARE * last)
        started_at = time.monotonic()
        first = self._take(run)
        trainer.set_tables(run.seed, run.rate)
        self._train(run, last - decay - first, is_trunk=True)
        trunk = trainer.state()
        self._keep(run, trunk)
        row: Row = {"run": run.name, "arm": run.arm, "size": run.size, "rate": run.rate, "seed": run.seed, "end": end}
        row |= {"tokens": last * self.recipe.rows * LENGTH, "decay_steps": decay}
        row["constant"] = trainer.held_out()
        row["trunk"] = self._binned(0, last - decay)
        trainer.decay(last - decay, decay, run.rate)
        self._train(run, decay, is_trunk=False)
        row["decayed"] = trainer.held_out()
        row["decay"] = self._binned(last - decay, last)
        row["finite"] = trainer.is_finite()
        row["elapsed_s"] = round(time.monotonic() - started_at, 2)
        trainer.restore(trunk)
        self.rows[run.name, end] = row
        for path in self.files:
            with path.open("a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")
        losses = ", ".join(f"{name} {loss:.4f}" for name, loss in row["decayed"].items())
        say(self.arm, f"{run.name} to {end:.0%}: {losses}, {row['elapsed_s']:.0f} s")

    def _train(self, run: Run, num_steps: int, *, is_trunk: bool) -> None:
        while num_steps > 0:
            part = min(BIN, num_steps)
            self.trainer.run(part)
            num_steps -= part
            if self.trainer.device.type == "cuda":
                torch.cuda.synchronize()
            if time.monotonic() > self.deadline:
                if is_trunk:
                    self._keep(run, self.trainer.state())
                raise OutOfTimeError

    def _take(self, run: Run) -> int:
        """Brings the trunk of a run to the device; returns how many steps it has."""
        if self.holds != run:
            path = self._path(run)
            if path.is_file():
                self.trainer.begin(run.seed, run.rate)
                self.trainer.restore(torch.load(path, map_location=self.trainer.device))
            else:
                self.trainer.begin(run.seed, run.rate)
            self.holds = run
        return int(self.trainer.step.item())

    def _keep(self, run: Run, state: State) -> None:
        path = self._path(run)
        torch.save(state, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)

    def _path(self, run: Run) -> Path:
        return self.kept / f"{run.name}.pt"

    def _binned(self, first: int, last: int) -> list[float]:
        losses = self.trainer.train_losses(first, last)
        return [round(sum(part) / len(part), 5) for n in range(0, len(losses), BIN) if (part := losses[n : n + BIN])]

    def _loss(self, run: Run) -> float:
        losses = self.rows[run.name, ENDS[0]]["decayed"].values()
        loss = sum(losses) / len(losses)
        return loss if loss == loss else float("inf")


if __name__ == "__main__":
    main()
