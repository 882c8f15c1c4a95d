"""The runs of the paper's experiment, in the order in which they are trained, and the configuration of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sinkscope.errors import InputError

WITH_LAMBDA = ("head_norm", "head_norm_gate", "first_norm")
OTHERS = ("head_norm_gate", "gate", "qk_norm", "softmax_one", "learned_sink", "sigmoid")
BAD_LAMBDA = 1.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run of the plan; without a learning rate, one whose settings the tuning will say."""

    stage: str
    variant: str
    seed: int
    learning_rate: float | None = None
    weight_decay: float | None = None
    initial_lambda: float | None = None

    @property
    def name(self) -> str:
        """The name of its folder, which says everything that sets it apart."""
        numbers = {"lr": self.learning_rate, "wd": self.weight_decay, "lambda": self.initial_lambda}
        settings = "".join(f"-{key}{value:g}" for key, value in numbers.items() if value is not None)
        return f"{self.stage}-{self.variant}-seed{self.seed}{settings or '-as-tuned'}"


def tuning_groups(rates: Sequence[float], decays: Sequence[float], lambdas: Sequence[float], seed: int) -> list:
    """Pairs of trials, softmax and head_norm, that end together."""
    groups = []
    for row, rate in enumerate(rates):
        for column, decay in enumerate(decays):
            trial = Run(stage="tune", variant="softmax", seed=seed, learning_rate=rate, weight_decay=decay)
            value = lambdas[(row + column) % len(lambdas)]
            groups.append([trial, replace(trial, variant="head_norm", initial_lambda=value)])
    return groups


def judging_groups(softmax: Run, norm: Run, seeds: Sequence[int]) -> list[list[Run]]:
    """The runs after the tuning, with the settings of its best trials."""
    judged = [[replace(trial, stage="judge", seed=seed) for trial in (softmax, norm)] for seed in seeds]
    others = [
        [replace(norm if variant in WITH_LAMBDA else softmax, stage="others", variant=variant, seed=seeds[0])]
        for variant in OTHERS
    ]
    ablations = [
        [replace(norm, stage="ablate", seed=seed, **changes)]
        for seed in seeds
        for changes in ({"variant": "first_norm"}, {"initial_lambda": BAD_LAMBDA})
    ]
    return judged + others[:2] + ablations[:2] + others[2:] + ablations[2:]


def best_trial(results: Sequence[dict[str, Any]], variant: str) -> Run:
    """The trial of a variant with the lowest held-out loss at its end."""
    trials = [result for result in results if result["run"]["stage"] == "tune" and not result["diverged"]]
    mine = [result for result in trials if result["run"]["variant"] == variant]
    if not mine:
        raise InputError(
            f"No trial of {variant} trains to its end: the loss is not finite in any. Give lower --learning-rates."
        )
    return Run(**min(mine, key=lambda result: result["summary"]["validation_loss"])["run"])


def run_configuration(base: dict[str, Any], run: Run, tune_steps: int | None) -> dict[str, Any]:
    """The mappings of a `sinkscope pretrain` configuration: the base with the run's variant, seed and settings."""
    options: dict[str, Any] = {} if run.initial_lambda is None else {"initial_lambda": run.initial_lambda}
    if run.variant in WITH_LAMBDA:  # these runs share one lambda among the heads
        options |= {"per_head": False, "offset": False}
    model = {"attention_variant": run.variant, "variant_options": options, "seed": run.seed}
    training: dict[str, Any] = {"seed": run.seed}
    if run.learning_rate is not None:
        training |= {"learning_rate": run.learning_rate, "weight_decay": run.weight_decay}
    if run.stage == "tune":  # only its last loss is looked at
        training |= {"probe_every": 0, "snapshots": []} | ({"steps": tune_steps} if tune_steps else {})
    return base | {"model": base.get("model", {}) | model, "training": base.get("training", {}) | training}
