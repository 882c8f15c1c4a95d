"""Work shared among the processes that torchrun started; a single process does everything.

Processes exchange their results over gloo, on the CPU: reduced numbers, never activations.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from sinkscope.arguments import check_choice
from sinkscope.errors import InputError

PARALLEL = ("auto", "single", "ddp", "fsdp")
NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
VARIABLES = (*NUMBERS, "MASTER_ADDR", "MASTER_PORT")
"""What torchrun puts into the environment."""
START = "Start with torchrun --nproc-per-node 2 -m sinkscope ..., or unset RANK and WORLD_SIZE."

T = TypeVar("T")
_sharing = False
"""Whether work is shared. A training run has several processes too, but only one of them traces its probes."""


def count() -> int:
    """How many processes share the work."""
    if not _sharing:
        return 1
    import torch.distributed

    return torch.distributed.get_world_size()


def rank() -> int:
    """The number of this process; 0 is the one that writes."""
    if count() == 1:
        return 0
    import torch.distributed

    return torch.distributed.get_rank()


def share(items: Sequence[T] | Any) -> Any:
    """This process's slice of some items, in the order of the processes."""
    size, remainder = divmod(len(items), count())  # the first processes take one of the remainder each
    first = rank() * size + min(rank(), remainder)
    return items[first : first + size + (rank() < remainder)]


def gathered(value: T) -> list[T]:
    """The values of all processes, in their order, with tensors on the CPU."""
    if count() == 1:
        return [value]
    import torch.distributed

    values: list[Any] = [None] * count()
    try:
        torch.distributed.all_gather_object(values, moved(value, "cpu"))
    except RuntimeError as error:
        raise InputError(
            f"One of the {count()} processes has ended; its own message stands above or in its log. "
            "Start the same command again: finished parts are kept."
        ) from error
    return values


def from_first(make: Callable[[], T]) -> T:
    """What the first process makes, in all of them; without torchrun, no torch is imported for it."""
    return gathered(make() if rank() == 0 else None)[0]  # type: ignore[return-value]


def number(name: str) -> int:
    """A number that torchrun gives; 0 without torchrun."""
    return int(os.environ.get(name, "0"))


def is_one_of_several(parallel: str = "auto") -> bool:
    """Whether torchrun started this process among several.

    Refused if `parallel` needs torchrun and its variables are missing or make no sense.
    """
    check_choice("parallel", parallel, PARALLEL)
    environment = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    if parallel == "single" or (parallel == "auto" and "WORLD_SIZE" not in environment):
        return False
    if missing := [name for name in VARIABLES if name not in environment]:
        raise InputError(f"{', '.join(missing)} must be in the environment, as torchrun sets them. {START}")
    if wrong := [name for name in NUMBERS if not environment[name].isdecimal()]:
        raise InputError(f"{wrong[0]} in the environment must be a number, not {environment[wrong[0]]!r}. {START}")
    if number("RANK") >= number("WORLD_SIZE"):
        raise InputError(
            f"RANK in the environment must be below WORLD_SIZE, {number('WORLD_SIZE')}, not {number('RANK')}. {START}"
        )
    return True


def join(backend: str, **options: Any) -> None:
    """Joins the process group that torchrun describes."""
    import torch.distributed

    try:
        torch.distributed.init_process_group(backend, **options)
    except (RuntimeError, ValueError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        reason = str(error).splitlines()[0]
        raise InputError(f"Cannot join the other processes at {address}: {reason}. {START}") from error


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Joins the processes of torchrun while open; without torchrun, nothing."""
    if os.environ.get("WORLD_SIZE", "1") == "1" or not is_one_of_several():
        yield
        return
    import torch.distributed

    global _sharing
    if torch.cuda.is_available():
        torch.cuda.set_device(number("LOCAL_RANK") % torch.cuda.device_count())  # several may share one
    join("gloo")
    _sharing = True
    try:
        yield
    finally:
        _sharing = False
        torch.distributed.destroy_process_group()


def moved(value: Any, device: Any) -> Any:
    """The value with every tensor in it moved to a device."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: moved(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [moved(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: moved(getattr(value, field.name), device) for field in fields(value)})
    return value
