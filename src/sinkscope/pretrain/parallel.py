"""The processes that train a run: one alone, or those that torchrun started, with DDP or FSDP2.

DDP keeps a whole model in every process; FSDP2 gives each process a shard of every weight, a DTensor. A collective
(`from_first`, `summed`, `sharded.whole`) must be called by all processes in the same order, or they wait for each other
for ever.
"""

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
        values: list[Any] = [value]  # broadcast in place
        dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    def summed(self, values: Tensor) -> Tensor:
        """The sum over processes, in every process; changes `values` itself."""
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
        # One GPU for each process of this machine.
        resolved = resolve_device(f"cuda:{torchrun.number('LOCAL_RANK')}")
        torch.cuda.set_device(resolved)
    # Gloo for objects in CPU memory, beside NCCL for tensors.
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

        gathered_dtype = torch.bfloat16 if group.device.type == "cuda" else None
        policy = MixedPrecisionPolicy(param_dtype=gathered_dtype, reduce_dtype=torch.float32)
        mesh = dist.device_mesh.init_device_mesh(group.device.type, (group.num_processes,))
        for block in blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        # The whole last: it takes the parameters that no block has taken.
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return module


@contextlib.contextmanager
def gradient_sync(module: nn.Module, enabled: bool) -> Iterator[None]:
    """While open, backward passes sum their gradients over processes, or only keep them if not `enabled`.

    Summing only in the last of an update's backward passes saves all other exchanges.
    """
    if isinstance(module, nn.parallel.DistributedDataParallel) and not enabled:
        with module.no_sync():
            yield
        return
    if hasattr(module, "set_requires_gradient_sync"):  # FSDP2 adds this method to the module
        module.set_requires_gradient_sync(enabled)  # type: ignore[operator]
    yield


def laid_out_as(parameter: Tensor, tensor: Tensor) -> Tensor:
    """The tensor, which every process has whole, on the parameter's device and sharded as the parameter is."""
    tensor = tensor.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return tensor
    # src_data_rank=None: every process takes its shard of what it has, and nothing is sent.
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)


def local(tensor: Tensor) -> Tensor:
    """This process's shard of a tensor; all of it if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
