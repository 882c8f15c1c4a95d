"""Kendall's tau of many columns against scipy's in a loop over them.

    python benchmarks/fingerprint_speed.py                      # two threads of the CPU
    python benchmarks/fingerprint_speed.py --device cuda        # the same work on a GPU beside it

Both are timed in turns, so that what disturbs the machine disturbs both, and the fastest of the rounds counts. The
results must agree to 1e-12. Half of the columns are rounded, so that there are ties. Without scipy (a GPU machine may
have none) only ours is timed, and checked against the definition over all pairs in three columns.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from sinkscope.origins.kendall import kendall_tau_columns
from sinkscope.statistics import kendall_tau

LEAST = 20
"""Times scipy's speed that two threads must reach."""
LARGEST_DIFFERENCE = 1e-12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-samples", type=int, default=2000)
    parser.add_argument("--num-columns", type=int, default=400)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    x, y = columns(options.num_samples, options.num_columns)
    ways: dict[str, Callable[[], object]] = {f"ours, {options.threads} threads": lambda: kendall_tau_columns(x, y)}
    if importlib.util.find_spec("scipy") is not None:
        given = x.double().numpy(), y.double().numpy()  # newer releases of scipy round the tau of float32 to float32
        ways["scipy in a loop"] = lambda: scipy_taus(*given)
        worst = np.abs(kendall_tau_columns(x, y).numpy() - scipy_taus(*given)).max()
    else:
        some = [kendall_tau(x[:, c].double().numpy(), y[:, c].double().numpy()) for c in range(3)]
        worst = np.abs(kendall_tau_columns(x, y)[:3].numpy() - some).max()
    if options.device != "cpu":
        on_device = [values.to(options.device) for values in (x, y)]
        ways[f"ours, {torch.cuda.get_device_name(options.device)}"] = lambda: kendall_tau_columns(*on_device).cpu()
        worst = max(worst, float((kendall_tau_columns(*on_device).cpu() - kendall_tau_columns(x, y)).abs().max()))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, run in ways.items():
            started_at = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started_at)
    print(
        f"{options.num_samples} samples, {options.num_columns} columns; {platform.machine()}, torch {torch.__version__}"
    )
    print(f"{'PASS' if worst <= LARGEST_DIFFERENCE else 'FAIL'}: largest difference {worst:.1e}")
    print("\n| | fastest of rounds | median |\n| --- | ---: | ---: |")
    for name, found in seconds.items():
        print(f"| {name} | {min(found) * 1e3:.2f} ms | {np.median(found) * 1e3:.2f} ms |")
    if "scipy in a loop" in seconds:
        ratio = min(seconds["scipy in a loop"]) / min(next(iter(seconds.values())))
        print(f"\n{'PASS' if ratio >= LEAST else 'FAIL'}: {ratio:.1f} times scipy's speed, at least {LEAST}")


def columns(num_samples: int, num_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_samples, num_columns, generator=generator)
    y = 0.3 * x + torch.randn(num_samples, num_columns, generator=generator)
    x[:, ::4], y[:, 1::4] = (x[:, ::4] * 50).round(), (y[:, 1::4] * 50).round()
    return x, y


def scipy_taus(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    from scipy.stats import kendalltau  # type: ignore[import-not-found]

    return np.array([kendalltau(x[:, column], y[:, column]).statistic for column in range(x.shape[1])])


if __name__ == "__main__":
    main()
