"""Trains the runs of sink_experiment.yaml or another plan, several at a time, and asks each what the plan asks.

    python lab/experiments/sink_experiment.py --data tokens --runs runs/sink --keep kept --jobs 6

Each run is a `sinkscope pretrain` in a folder of its own, then `sink_measures.py` on its model. Complete runs, in
--runs or in what --done names, are left out; so the same command goes on where it was stopped. --keep gets
results-N.jsonl.xz with a line for each finished run: configuration, summary, held-out losses, probes, measures.
--steps and --small make a trial of the whole chain in a minute on a CPU; its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from sink_plan import PLAN, chosen_runs, configuration, planned_runs, read_plan
from training_pool import TrainingPool, add_options, positive_number, say, stop_with_the_parent

from sinkscope.errors import InputError
from sinkscope.pretrain.tokens import open_shards

MEASURES = Path(__file__).with_name("sink_measures.py")
SMALL_MODEL = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
SMALL_TRAINING = {"batch_size": 4, "evaluation_sequences": 8, "probe_sequences": 8, "warmup_steps": 2}


def main() -> None:
    stop_with_the_parent()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--plan", type=Path, default=PLAN, help="what is trained; %(default)s without it")
    parser.add_argument("--only", help="runs of the plan by name, such as softmax-1,head_norm-1; all without it")
    parser.add_argument("--steps", type=positive_number, help="for a trial: steps of every run")
    parser.add_argument("--small", action="store_true", help="for a trial: a tiny model, and few windows to measure")
    options = parser.parse_args()
    try:
        open_shards(Path(options.data))
        missing = carry_out(options)
    except InputError as error:
        print(f"sink_experiment: {error}", file=sys.stderr)
        sys.exit(2)
    if missing:
        say(f"{len(missing)} runs are missing; the same command goes on with them: {', '.join(missing)}")
        sys.exit(1)
    say("all runs are complete")


def carry_out(options: argparse.Namespace) -> list[str]:
    """The names of the runs that are missing when the budget is spent."""
    plan = trial(read_plan(options.plan), options.steps, options.small)
    runs = planned_runs(plan)
    if options.only:
        runs = chosen_runs({run.name: run for run in runs}, options.only.split(","))

    def measure(folder: Path) -> list[str]:
        command = [sys.executable, str(MEASURES), str(folder), "--data", options.data, "--plan", str(options.plan)]
        return [*command, "--small"] if options.small else command

    pool = TrainingPool(options, lambda run: configuration(plan, run), measure=measure)
    pool.carry_out([[run] for run in runs])
    return [run.name for run in pool.missing]


def trial(plan: dict[str, Any], steps: int | None, small: bool) -> dict[str, Any]:
    """The plan itself, or a cut one that shows that everything works."""
    plan = copy.deepcopy(plan)
    model, training = plan["recipe"]["model"], plan["recipe"]["training"]
    if steps is not None:
        every = max(1, steps // 2)
        training |= {"steps": steps, "evaluate_every": every, "probe_every": every}
    if small:
        model |= SMALL_MODEL
        training |= SMALL_TRAINING
    return plan


if __name__ == "__main__":
    main()
