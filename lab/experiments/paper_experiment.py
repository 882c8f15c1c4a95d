"""Trains what the table beside the paper's needs: head-wise RMSNorm against softmax, other variants, ablations.

    python lab/experiments/paper_experiment.py --config shape.yaml --data tokens --runs runs/paper --keep kept --dry-run
    python lab/experiments/paper_experiment.py --config shape.yaml --data tokens --runs runs/paper --keep kept

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
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from paper_plan import BAD_LAMBDA, Run, best_trial, judging_groups, run_configuration, tuning_groups
from training_pool import TrainingPool, add_options, positive_number, say, stop_with_the_parent

from sinkscope.arguments import whole_numbers
from sinkscope.errors import InputError
from sinkscope.pretrain.presets import read_recipe
from sinkscope.pretrain.tokens import open_shards


def main() -> None:
    stop_with_the_parent()
    options = parsed()
    try:
        open_shards(Path(options.data))
        is_file = options.config.endswith((".yaml", ".yml"))
        base = read_recipe(Path(options.config)) if is_file else {"preset": options.config}
        trials = tuning_groups(options.learning_rates, options.weight_decays, options.lambdas, options.tune_seed)
        if options.tune_seed in options.seeds:
            raise InputError(
                f"Seed {options.tune_seed} of --seeds is the one that was tuned on. Give another --tune-seed."
            )
        if BAD_LAMBDA in options.lambdas:
            raise InputError(f"--lambdas has {BAD_LAMBDA:g}, which is an ablation. Leave it out.")
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
    add_options(parser)
    parser.add_argument("--tune-seed", type=int, default=0)
    parser.add_argument("--tune-steps", type=positive_number, help="steps of a trial; else those of the configuration")
    parser.add_argument("--seeds", type=whole_numbers, default=[1, 2, 3, 4], help="to judge on, such as 1,2,3,4")
    parser.add_argument("--learning-rates", type=positive_numbers, default=[1e-3, 2e-3, 4e-3])
    parser.add_argument("--weight-decays", type=positive_numbers, default=[0.1, 0.5])
    parser.add_argument("--lambdas", type=positive_numbers, default=[0.25, 0.5], help="initial lambdas to try")
    parser.add_argument("--dry-run", action="store_true", help="show the plan and train nothing")
    return parser.parse_args()


def positive_numbers(text: str) -> list[float]:
    """The numbers of a list such as 0.1,0.5."""
    numbers = [float(item) for item in text.split(",")]
    if min(numbers) <= 0:
        raise ValueError
    return numbers


def pool(options: argparse.Namespace, base: dict[str, Any]) -> TrainingPool:
    return TrainingPool(options, lambda run: run_configuration(base, run, options.tune_steps))


def show_plan(groups: list[list[Run]], options: argparse.Namespace, base: dict[str, Any]) -> None:
    total = 0
    with tempfile.TemporaryDirectory() as folder:
        options.runs = options.keep = Path(folder)
        resolved = pool(options, base).resolved
        configs = [(run, resolved(run).training) for group in groups for run in group]
    for number, (run, training) in enumerate(configs):
        tokens = training.steps * training.batch_size * training.sequence_length
        total += tokens
        say(f"{number + 1:3d}  {run.name:60s} {training.steps:7,d} steps {tokens / 1e6:9,.1f} M tokens")
    say(f"     {'all':60s} {'':13s} {total / 1e6:9,.1f} M tokens")


def carry_out(options: argparse.Namespace, base: dict[str, Any], trials: list[list[Run]]) -> list[Run]:
    """The runs that are missing when the budget is spent; those that wait for the tuning are among them."""
    experiment = pool(options, base)
    best = [Run(stage="judge", variant=variant, seed=0) for variant in ("softmax", "head_norm")]
    if experiment.carry_out(trials):
        best = [best_trial(experiment.kept.results, run.variant) for run in best]
        for run in best:
            say(f"tuned:  {run.name}")
        experiment.carry_out(judging_groups(*best, options.seeds))
        return experiment.missing
    return experiment.missing + [run for group in judging_groups(*best, options.seeds) for run in group]


if __name__ == "__main__":
    main()
