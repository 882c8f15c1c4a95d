"""The processes of a run: one, or those that torchrun started, with DDP or FSDP2."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from sinkscope import processes as torchrun
from sinkscope.runtime import resolve_device

Mode = Literal["single", "ddp", "fsdp"]
TIMEOUT = timedelta(hours=1)
"""How long a process waits for another: the first one tokenises text and writes checkpoints while the others wait."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Processes:
    """This process, as one of those that train a run."""

    mode: Mode
    rank: int
    num_processes: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes files and speaks."""
        return self.rank == 0

    def from_first(self, value: T) -> T:
        """The first process's value, in every process; all of them wait for it."""
        if self.mode == "single":
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def summed(self, values: Tensor) -> Tensor:
        """The sum over processes, in every process."""
        if self.mode != "single":
            dist.all_reduce(values)
        return values


@contextlib.contextmanager
def processes(parallel: str = "auto", device: str = "auto") -> Iterator[Processes]:
    """Joins the process group that torchrun describes, or stays alone without torchrun; leaves it at the end."""
    if not torchrun.is_one_of_several(parallel):
        yield Processes(mode="single", rank=0, num_processes=1, device=resolve_device(device))
        return
    resolved = resolve_device(device)
    if resolved.type == "cuda":
        resolved = resolve_device(f"cuda:{torchrun.number('LOCAL_RANK')}")
        torch.cuda.set_device(resolved)
    torchrun.join("cpu:gloo,cuda:nccl" if resolved.type == "cuda" else "gloo", timeout=TIMEOUT)
    try:
        yield Processes(
            mode="fsdp" if parallel == "fsdp" else "ddp",
            rank=dist.get_rank(),
            num_processes=dist.get_world_size(),
            device=resolved,
        )
    finally:
        dist.destroy_process_group()


def spread(module: nn.Module, blocks: nn.ModuleList, group: Processes) -> nn.Module:
    """The module to call in training: itself, wrapped in DDP, or sharded block by block.

    With FSDP2 on CUDA, weights are gathered in bfloat16 and gradients summed in float32; optimisers hold float32.
    """
    if group.mode == "ddp":
        on_cuda = group.device.type == "cuda"
        return nn.parallel.DistributedDataParallel(
            module, device_ids=[group.device] if on_cuda else None, gradient_as_bucket_view=True
        )
    if group.mode == "fsdp":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        low = torch.bfloat16 if group.device.type == "cuda" else None
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
        mesh = dist.device_mesh.init_device_mesh(group.device.type, (group.num_processes,))
        for block in blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return module


@contextlib.contextmanager
def gradient_sync(module: nn.Module, enabled: bool) -> Iterator[None]:
    """Sums gradients over processes only in the last of an update's backward passes."""
    if isinstance(module, nn.parallel.DistributedDataParallel) and not enabled:
        with module.no_sync():
            yield
        return
    if hasattr(module, "set_requires_gradient_sync"):
        module.set_requires_gradient_sync(enabled)  # type: ignore[operator]
    yield


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, gathered from all processes if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def laid_out_as(parameter: Tensor, tensor: Tensor) -> Tensor:
    """The tensor, which every process has, on the parameter's device, and sharded where the parameter is."""
    tensor = tensor.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return tensor
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)


def local(tensor: Tensor) -> Tensor:
    """This process's shard of a tensor; all of it if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
