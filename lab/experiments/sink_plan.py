"""The plan of the experiment where sinks are born: what sink_experiment.yaml says, as runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sinkscope.errors import InputError

PLAN = Path(__file__).with_name("sink_experiment.yaml")


@dataclass(frozen=True, kw_only=True)
class SinkRun:
    """One arm on one seed."""

    arm: str
    seed: int

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.arm}-{self.seed}"


def read_plan(path: Path = PLAN) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def planned_runs(plan: dict[str, Any]) -> list[SinkRun]:
    """All runs in the order in which they are trained."""
    runs = {run.name: run for arm, entry in plan["arms"].items() for run in seeds_of(arm, entry)}
    return chosen_runs(runs, [*plan["first"], *(name for name in runs if name not in plan["first"])])


def seeds_of(arm: str, entry: dict[str, Any]) -> list[SinkRun]:
    return [SinkRun(arm=arm, seed=seed) for seed in entry["seeds"]]


def chosen_runs(runs: dict[str, SinkRun], names: list[str]) -> list[SinkRun]:
    """The runs of some names, in their order; a name that is not in the plan is refused."""
    for name in names:
        if name not in runs:
            raise InputError(f"The plan has no run {name!r}. Choose among {', '.join(runs)}.")
    return [runs[name] for name in names]


def configuration(plan: dict[str, Any], run: SinkRun) -> dict[str, Any]:
    """The mappings of a `sinkscope pretrain` configuration: the recipe with what the arm changes, and the seed."""
    recipe, arm = plan["recipe"], plan["arms"][run.arm]
    return {
        part: recipe[part]
        | arm.get(part, {})
        | {"seed": run.seed}  # of the first weights, and of the order of the data
        for part in ("model", "training")
    }
