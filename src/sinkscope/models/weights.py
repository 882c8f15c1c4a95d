"""The weights a model has now, one by one, and as a hash: one to know a checkpoint by, and a cheap one that tells when
it has changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from sinkscope.errors import InputError
from sinkscope.models.sharded import whole

HASHED_ELEMENTS = 1 << 20
"""Of a larger tensor, this many elements are hashed."""
_hashed: WeakKeyDictionary[nn.Module, tuple[tuple | None, str]] = WeakKeyDictionary()
"""By model: the sums that its weights had, and their hash."""


def weight_hash(model: nn.Module) -> str:
    """SHA-256 of the parameters as they are now: name, shape, dtype and values, in the order of their names.

    A tensor with more than 2^20 elements is sampled: every n-th element, with the smallest n that leaves at most
    2^20, then the first and the last 4,096. So the hash tells checkpoints apart, but may miss a single edited weight.
    """
    sums = _sums(model)
    cached = _hashed.get(model)
    if sums is None or cached is None or cached[0] != sums:
        cached = sums, _sha256(model)
        _hashed[model] = cached
    return cached[1]


@torch.no_grad()
def _sums(model: nn.Module) -> tuple | None:
    """The name of each weight and the sum of its bytes read as 64-bit integers, several times faster than SHA-256.

    None if a weight is a tensor subclass or sparse, and has no bytes of its own. A single value that changes shows,
    also if it was changed through `.data`. Several may cancel out: values that swap places, by a multiple of eight
    bytes, leave the sum as it is.
    """
    weights: list[tuple] = []
    sums: dict[torch.device, list[Tensor]] = {}
    for name, weight in each_weight(model):
        if type(weight) not in (Tensor, nn.Parameter) or weight.layout != torch.strided:
            return None
        all_bytes = weight.contiguous().reshape(-1).view(torch.uint8)
        whole = len(all_bytes) // 8 * 8
        words, rest = all_bytes[:whole], all_bytes[whole:]
        if words.storage_offset() % 8:
            words = words.clone()  # a view as int64 must begin at a multiple of eight bytes
        weights.append((name, tuple(weight.shape), weight.dtype, tuple(rest.tolist()) if len(rest) else ()))
        sums.setdefault(weight.device, []).append(words.view(torch.int64).sum())
    # Read once for each device: reading each sum would wait for the GPU at every weight.
    return tuple(weights), tuple(tuple(torch.stack(totals).tolist()) for totals in sums.values())


def _sha256(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, weight in each_weight(model):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype};".encode())
        values = weight.reshape(-1)
        if values.numel() > HASHED_ELEMENTS:
            stride = -(-values.numel() // HASHED_ELEMENTS)
            values = torch.cat([values[::stride], values[:4096], values[-4096:]])
        if values.numel():
            digest.update(values.contiguous().view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()


@torch.no_grad()
def weight_checksum(model: nn.Module) -> str:
    """A cheap hash of a model's weights: their addresses, how often each was changed in place, and a row and a column.

    torch does not count changes through `.data`. Among those, a change of a whole row or column shows, as when neurons
    or tokens are taken out; a change of a single value may not. Weights that accelerate keeps elsewhere count by their
    names alone.
    """
    digest = hashlib.sha256()
    lines: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} {parameter.device};".encode())
        if parameter.is_meta or not parameter.numel():
            continue
        if not parameter.is_inference():  # else torch does not count its changes
            digest.update(f"{parameter.data_ptr()} {parameter._version};".encode())
        lines.setdefault((parameter.device, parameter.dtype), []).extend(_lines(parameter.detach()))
    for same_type in lines.values():
        digest.update(torch.cat(same_type).view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()


def _lines(weight: Tensor) -> list[Tensor]:
    """The values along each axis, through the middle of the others."""
    middle = [size // 2 for size in weight.shape]
    if weight.ndim < 2:
        return [weight.reshape(-1)]
    return [weight[(*middle[:axis], slice(None), *middle[axis + 1 :])] for axis in range(weight.ndim)]


def check_in_memory(model: nn.Module, purpose: str) -> None:
    """Refuses a model of which accelerate keeps weights elsewhere between passes, where they are to be changed."""
    offloaded = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if offloaded is not None:
        raise InputError(
            f"{purpose} needs a model whose weights are in memory, and {offloaded} is offloaded. Load it without "
            "offloading; trace, probe and interventions read it as it is."
        )


def each_weight(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter once with its name, sorted; those that are sharded, or that accelerate keeps elsewhere, are
    brought in one by one."""
    for name, parameter in sorted(model.named_parameters()):
        if not parameter.is_meta:
            yield name, whole(parameter.detach())
            continue
        from accelerate.utils import align_module_device

        module_name, _, last = name.rpartition(".")
        module = model.get_submodule(module_name)
        with align_module_device(module):
            parameter = getattr(module, last)
            if parameter.is_meta:
                raise InputError(f"{name} is on the meta device and has no values. Load the weights first.")
            yield name, parameter.detach()


def held(module: Any, name: str) -> Tensor:
    """The whole values of a module's parameter, also where it is sharded over processes, or where accelerate keeps it
    on the CPU or on disk between passes."""
    parameter = getattr(module, name)
    if not parameter.is_meta:
        return whole(parameter.detach())
    from accelerate.utils import align_module_device

    with align_module_device(module):
        return getattr(module, name).detach()
