"""What the ladder's results say, by plan.md: the token multiplier of each arm, with its interval over seeds.

    python lab/ladder/read_off.py --size small

A seed counts for an arm once all four of its decays are there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import numpy as np
from arms import ARMS
from ladder import ENDS

from sinkscope.statistics import mean_interval

RESULTS = Path(__file__).resolve().parent / "results"
MEASURES = ("held out", "prose", "code", "training batches")
Curve = list[tuple[int, float]]
"""(tokens, loss after the decay that ends there), by tokens."""
Curves = dict[str, dict[str, dict[int, Curve]]]
"""By measure, arm and seed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="small")
    options = parser.parse_args()
    rows = read_rows(options.size)
    print_rates(rows)
    curves = read_curves(rows)
    print_losses(curves)
    print_multipliers(curves)


def read_rows(size: str) -> list[dict[str, Any]]:
    rows = []
    for path in sorted(RESULTS.glob(f"{size}-*.jsonl")):
        rows += [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return rows


def loss_of(row: dict[str, Any], measure: str) -> float:
    """The loss after a decay: on a held-out stratum, on their mean, or on the batches of its last tenth."""
    if measure in ("prose", "code"):
        return row["decayed"][measure]
    if measure == "held out":
        return (row["decayed"]["prose"] + row["decayed"]["code"]) / 2
    last_tenth = row["decay"][-max(1, round(len(row["decay"]) / 10)) :]
    return sum(last_tenth) / len(last_tenth)


def best_rates(rows: list[dict[str, Any]]) -> dict[str, float]:
    """By arm, the rate of the lowest held-out loss at the first end on the first seed."""
    scanned = [row for row in rows if row["seed"] == 1 and row["end"] == ENDS[0]]
    best: dict[str, dict[str, Any]] = {}
    for row in scanned:
        arm = row["arm"]
        if arm not in best or loss_of(row, "held out") < loss_of(best[arm], "held out"):
            best[arm] = row
    return {arm: row["rate"] for arm, row in best.items()}


def read_curves(rows: list[dict[str, Any]]) -> Curves:
    """The curves of each arm's best rate that have all ends."""
    rates = best_rates(rows)
    curves: Curves = {measure: {arm: {} for arm in ARMS} for measure in MEASURES}
    for measure, by_arm in curves.items():
        for row in rows:
            if row["rate"] == rates[row["arm"]]:
                curve = by_arm[row["arm"]].setdefault(row["seed"], [])
                curve.append((row["tokens"], loss_of(row, measure)))
        for arm, by_seed in by_arm.items():
            by_arm[arm] = {seed: sorted(curve) for seed, curve in by_seed.items() if len(curve) == len(ENDS)}
    return curves


def multiplier(baseline: Curve, arm: Curve, end: int = -1) -> float:
    """How many times fewer tokens the arm needs for the loss that the baseline has at one of its ends.

    An arm that is worse there: the baseline's tokens for the arm's loss, over the tokens of that end.
    """
    tokens, loss = baseline[end]
    if arm[end][1] <= loss:
        return tokens / tokens_at(arm, loss)
    return tokens_at(baseline, arm[end][1]) / tokens


def tokens_at(curve: Curve, loss: float) -> float:
    """Tokens at which a curve reaches a loss: linear in log tokens between its ends, its first or last line beyond."""
    parts = list(itertools.pairwise(curve))
    reached = [after <= loss for _, (_, after) in parts]
    (tokens, above), (more_tokens, below) = parts[reached.index(True)] if any(reached) else parts[-1]
    share = (above - loss) / (above - below)
    return math.exp(math.log(tokens) + share * (math.log(more_tokens) - math.log(tokens)))


def interval(ratios: list[float]) -> str:
    """Geometric mean and 95 % interval over seeds (Student's t of the logarithm)."""
    logs = np.log(ratios)
    mean = f"{math.exp(logs.mean()):.3f}"
    if len(logs) < 2:
        return mean
    low, high = mean_interval(logs)
    return f"{mean} [{math.exp(low):.3f}, {math.exp(high):.3f}]"


def print_rates(rows: list[dict[str, Any]]) -> None:
    rates = sorted({row["rate"] for row in rows})
    print(f"Held-out loss of seed 1 at {ENDS[0]:.0%} of the tokens, by rate:\n")
    print("| arm | " + " | ".join(f"{rate:g}" for rate in rates) + " |")
    print("| --- |" + " ---: |" * len(rates))
    for arm in ARMS:
        losses = {
            row["rate"]: loss_of(row, "held out")
            for row in rows
            if (row["arm"], row["seed"], row["end"]) == (arm, 1, ENDS[0])
        }
        print(f"| {arm} | " + " | ".join(f"{losses[rate]:.4f}" if rate in losses else "" for rate in rates) + " |")


def print_losses(curves: Curves) -> None:
    print("\nHeld-out loss at the best rate, at the four ends:\n")
    print("| arm | seed | " + " | ".join(f"{end:.0%}" for end in ENDS) + " |")
    print("| --- | ---: |" + " ---: |" * len(ENDS))
    for arm, by_seed in curves["held out"].items():
        for seed, curve in sorted(by_seed.items()):
            print(f"| {arm} | {seed} | " + " | ".join(f"{loss:.4f}" for _, loss in curve) + " |")


def print_multipliers(curves: Curves) -> None:
    for number, end in ((-1, 1.0), (-2, 0.8), (-3, 0.6)):
        print(f"\nToken multiplier at softmax's loss at {end:.0%}, by what the loss is read on:\n")
        print("| arm | seeds | " + " | ".join(MEASURES) + " |")
        print("| --- | ---: |" + " ---: |" * len(MEASURES))
        for arm in ARMS:
            if arm == "softmax":
                continue
            cells = [interval(ratios_of(curves, measure, "softmax", arm, number)) for measure in MEASURES]
            num_seeds = len(ratios_of(curves, "held out", "softmax", arm, number))
            print(f"| {arm} | {num_seeds} | " + " | ".join(cells) + " |")
    for other in ("scale", "head_gate"):
        cells = [interval(head_norm_over(curves, measure, other)) for measure in MEASURES]
        print(f"\nhead_norm's multiplier over {other}'s: {', '.join(map(' '.join, zip(MEASURES, cells, strict=True)))}")


def ratios_of(curves: Curves, measure: str, baseline: str, arm: str, end: int = -1) -> list[float]:
    """The multiplier of each seed that both arms have."""
    of_baseline, of_arm = curves[measure][baseline], curves[measure][arm]
    return [multiplier(of_baseline[seed], of_arm[seed], end) for seed in sorted(of_baseline.keys() & of_arm.keys())]


def head_norm_over(curves: Curves, measure: str, other: str) -> list[float]:
    """head_norm's multiplier over another arm's, both at softmax's final loss, seed by seed."""
    of = curves[measure]
    seeds = sorted(of["softmax"].keys() & of["head_norm"].keys() & of[other].keys())
    return [
        multiplier(of["softmax"][seed], of["head_norm"][seed]) / multiplier(of["softmax"][seed], of[other][seed])
        for seed in seeds
    ]


if __name__ == "__main__":
    main()
