"""Experiment trackers, imported only when asked for: each is a function that takes a step and its numbers."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sinkscope.errors import InputError

PACKAGES = {"trackio": "trackio", "wandb": "wandb", "tensorboard": "torch.utils.tensorboard"}
Tracker = Callable[[int, dict[str, float]], None]


@contextlib.contextmanager
def tracker(name: str | None, run: Path, config: dict[str, Any]) -> Iterator[Tracker]:
    """A function that sends numbers to the tracker called `name`; for None it does nothing."""
    if name is None:
        yield lambda step, numbers: None
        return
    package = _imported(name)
    if name == "tensorboard":
        with package.SummaryWriter(str(run / "tensorboard")) as writer:

            def add(step: int, numbers: dict[str, float]) -> None:
                for key, value in numbers.items():
                    writer.add_scalar(key, value, step)

            yield add
        return
    package.init(project="sinkscope", name=run.name, config=config)
    try:
        yield lambda step, numbers: package.log(numbers, step=step)
    finally:
        package.finish()


def check_tracker(name: str | None) -> None:
    """Returns if the tracker can be used, else raises InputError."""
    if name is not None:
        _imported(name)


def _imported(name: str) -> Any:
    if name not in PACKAGES:
        raise InputError(
            expected=f"a tracker: {', '.join(PACKAGES)}", found=repr(name), next_step="Choose one with --track"
        )
    try:
        return importlib.import_module(PACKAGES[name])
    except ModuleNotFoundError as error:
        raise InputError(
            expected=f"the package {name}, for --track {name}",
            found="it is not installed",
            next_step=f"Run: pip install {name}",
        ) from error
