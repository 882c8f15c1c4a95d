"""Which weights a model has now: a hash to know a checkpoint by, and a cheap one that tells when it has changed."""

from __future__ import annotations

import hashlib
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from sinkscope.models.checkpoint_checks import each_weight

HASHED_ELEMENTS = 1 << 20
_hashed: WeakKeyDictionary[nn.Module, tuple[tuple | None, str]] = WeakKeyDictionary()
"""By model: the sums that its weights had, and their hash."""


def weight_hash(model: nn.Module) -> str:
    """SHA-256 of the parameters as they are now: name, shape, dtype and values, in the order of their names.

    A tensor with more than 2^20 elements is sampled: every n-th element, with the smallest n that leaves at most
    2^20, then the first and the last 4,096. So the hash tells checkpoints apart, but may miss a single edited weight.
    """
    sums = _sums(model)
    known = _hashed.get(model)
    if sums is None or known is None or known[0] != sums:
        known = sums, _sha256(model)
        _hashed[model] = known
    return known[1]


@torch.no_grad()
def _sums(model: nn.Module) -> tuple | None:
    """Of each weight its name and the sum of its bits as integers of 64 bits, several times faster than SHA-256. None
    where a weight has no bits of its own, as those of tensor subclasses.

    Any one value that changes shows, also through `.data`. Several may cancel out: values that change places, by eight
    bytes or a multiple, leave the sum as it is.
    """
    weights: list[tuple] = []
    sums: dict[torch.device, list[Tensor]] = {}
    for name, weight in each_weight(model):
        if type(weight) not in (Tensor, nn.Parameter) or weight.layout != torch.strided:
            return None
        bytes_of_it = weight.contiguous().reshape(-1).view(torch.uint8)
        whole = len(bytes_of_it) // 8 * 8
        words, rest = bytes_of_it[:whole], bytes_of_it[whole:]
        if words.storage_offset() % 8:
            words = words.clone()
        weights.append((name, tuple(weight.shape), weight.dtype, tuple(rest.tolist()) if len(rest) else ()))
        sums.setdefault(weight.device, []).append(words.view(torch.int64).sum())
    # Read once for each device: a GPU would be waited for at every weight.
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
    """A cheap hash of a model's weights: where they are, how often they were changed in place, and a row and a column
    of each.

    torch does not count changes through `.data`. Those of a whole row or column show, which is how neurons and tokens
    are taken out; one of a single value may not. Weights that accelerate keeps elsewhere count by their names alone.
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
    for found in lines.values():
        digest.update(torch.cat(found).view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()


def _lines(weight: Tensor) -> list[Tensor]:
    """The values along each axis, through the middle of the others."""
    middle = [size // 2 for size in weight.shape]
    if weight.ndim < 2:
        return [weight.reshape(-1)]
    return [
        weight[tuple(slice(None) if other == axis else middle[other] for other in range(weight.ndim))]
        for axis in range(weight.ndim)
    ]
