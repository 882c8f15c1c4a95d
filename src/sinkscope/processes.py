"""Work shared among the processes that torchrun started; a single process does everything.

Processes exchange what they found over gloo, on the CPU: reduced numbers, never activations.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from sinkscope.errors import InputError

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
    each, more = divmod(len(items), count())
    first = rank() * each + min(rank(), more)
    return items[first : first + each + (rank() < more)]


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
            expected=f"{count()} processes at work",
            found="that one of them has ended; its own message stands above or in its log",
            next_step="Start the same command again: finished parts are kept",
        ) from error
    return values


def from_first(make: Callable[[], T]) -> T:
    """What the first process makes, in all of them; without torchrun, no torch is imported for it."""
    return gathered(make() if rank() == 0 else None)[0]  # type: ignore[return-value]


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Joins the processes of torchrun while open; without torchrun, nothing."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    import torch.distributed

    global _sharing
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.distributed.init_process_group("gloo")
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
        return type(value)(moved(item, device) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: moved(getattr(value, field.name), device) for field in fields(value)})
    return value
