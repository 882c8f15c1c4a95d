"""Models whose weights are spread over processes: FSDP2 and tensor parallelism keep them as DTensors.

A block that FSDP2 shards gathers its weights while it runs. What reads weights elsewhere asks for them whole here. That
is a collective: every rank must do it in the same order, or the others wait for ever. So every rank reads the same
batch, and goes on with what rank 0 recorded. Under tensor parallelism no process sees a whole layer, so a copy with all
weights is read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from copy import deepcopy
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sinkscope.errors import InputError

PATIENCE = timedelta(minutes=5)
"""How long a rank waits for the others before it says that they do not take part."""

T = TypeVar("T")


def is_sharded(model: nn.Module) -> bool:
    """Whether any weight of a model is spread over processes, or was until a forward pass gathered it."""
    return _has_fsdp(model) or any(hasattr(parameter, "full_tensor") for parameter in model.parameters())


def is_tensor_parallel(model: nn.Module) -> bool:
    """Whether processes share the heads and neurons of a layer, so that none of them computes all."""
    placements = [getattr(parameter, "placements", ()) for parameter in model.parameters()]
    most = max((sum(placement.is_shard() for placement in of_one) for of_one in placements), default=0)
    return most > _has_fsdp(model)


def original_class(model: nn.Module) -> type:
    """The class that a model had before FSDP2, which puts one of its own in front."""
    return next(kind for kind in type(model).__mro__ if not hasattr(kind, "unshard"))


def _has_fsdp(model: nn.Module) -> bool:
    return any(hasattr(module, "unshard") for module in model.modules())


def whole_copy(model: Any, parameters: Mapping[str, Tensor] | None = None) -> Any:
    """A model of transformers that is spread over processes, with all of its weights in this one: a collective.

    `parameters`: its shards by name, where the model shows gathered weights in their place.
    """
    if not hasattr(model, "config"):
        raise InputError(
            f"This {type(model).__name__} is tensor-parallel and not a model of transformers, so its weights cannot be "
            "put together. Load a checkpoint of it into one process, and read that."
        )
    parameters = dict(model.named_parameters()) if parameters is None else parameters
    weights = {name: whole(parameter.detach()) for name, parameter in parameters.items()}
    # Built without memory, then given the gathered tensors: the sharded model stays as it is.
    with torch.device("meta"):
        result = type(model)(deepcopy(model.config))
    result.load_state_dict(weights, strict=False, assign=True)  # not strict: tied weights have one name here
    for name, buffer in model.named_buffers():
        path, _, last = name.rpartition(".")
        setattr(result.get_submodule(path), last, buffer)
    result.tie_weights()
    return result.train(model.training)


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, gathered from all processes if it is sharded: then a collective."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[operator]


@contextlib.contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """While open, each process has the weights that FSDP2 shards, except those of blocks: a collective.

    A block, in a list of modules, gathers its own weights when it runs. `unsharded(block)` gathers those of one block.
    """
    parts = list(_fsdp_modules(model))
    for part in parts:
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.reshard()


def _fsdp_modules(module: nn.Module) -> Iterator[Any]:
    """The modules that FSDP2 shards as a whole, without those in lists."""
    if hasattr(module, "unshard"):
        yield module
    for child in module.children():
        if not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _fsdp_modules(child)


def from_rank_0(value: T) -> T:
    """The value of rank 0, on every rank; refused if the other ranks do not ask for it too."""
    values: list[Any] = [value]  # broadcast in place
    try:
        group = _group(dist.group.WORLD)
        dist.monitored_barrier(group, PATIENCE)
        dist.broadcast_object_list(values, src=0, group=group)
    except RuntimeError as error:
        raise InputError(
            f"The weights of this model are spread over {dist.get_world_size()} processes, and not all of them read it "
            "now. Call probe or trace on every rank at the same step, not on rank 0 alone."
        ) from error
    return values[0]


@cache
def _group(world: Any) -> Any:
    """A group of all processes beside the one that trains, whose collectives it must not disturb. Making it waits for
    all of them too."""
    return dist.new_group(backend="gloo", timeout=PATIENCE)
