"""launch(kernel, ...): starts a Triton kernel, from the second like launch on at the cost of its C launcher alone.

Triton binds and specialises every argument at each launch: 40 to 90 us of host time in a model's pass, more than the
kernels themselves take on a short text.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None  # an extra: without it the definitions must still import
if TYPE_CHECKING or HAS_TRITON:
    import triton

MAX_LAUNCHERS = 4096
CHECKED_VERSIONS = ("3.6.", "3.7.")
"""Releases of Triton whose compiled kernels were seen to take arguments so; under others every launch is bound."""
_launchers: dict[tuple, tuple[Callable[..., None], Any, Any]] = {}
"""The launcher of each compiled kernel, the kernel's handle on its device, and what the launcher must know of it."""


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: tuple[Tensor, ...],
    numbers: tuple[int | float, ...],
    constants: tuple[Any, ...],
    **options: Any,
) -> None:
    """Runs a kernel whose parameters are tensors, then numbers, then constants, on the first tensor's device.

    A compiled kernel fits all arguments of the same types, alignment, divisibility and equality to 1. Here it is kept
    by its numbers themselves, which settle all that but the types: a number must always come as int or always as float.
    Hooks that a profiler set at launches are only called at the first.
    """
    device = tensors[0].device
    like = [(tensor.dtype, tensor.data_ptr() % 16) for tensor in tensors]
    key = (id(kernel), device, grid, numbers, constants, *options.values(), *like)
    kept = _launchers.get(key)
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        # Only where it is needed: entering a device costs as much as a launch does.
        with torch.cuda.device(device):
            launch(kernel, grid, tensors, numbers, constants, **options)
    elif kept is not None:
        run, function, metadata = kept
        driver: Any = triton.runtime.driver.active
        stream = driver.get_current_stream(device.index)
        run(*grid, stream, function, metadata, None, None, None, *tensors, *numbers, *constants)
    elif is_interpreted(kernel) or not triton.__version__.startswith(CHECKED_VERSIONS):
        kernel[grid](*tensors, *numbers, *constants, **options)
    else:
        if len(_launchers) >= MAX_LAUNCHERS:  # many lengths: compiling is not repeated, only binding
            _launchers.clear()
        compiled = kernel[grid](*tensors, *numbers, *constants, **options)
        _launchers[key] = compiled.run, compiled.function, compiled.packed_metadata


def is_interpreted(kernel: Any) -> bool:
    """Whether Triton was imported with TRITON_INTERPRET=1, which runs kernels on the CPU."""
    return not isinstance(kernel, triton.JITFunction)
