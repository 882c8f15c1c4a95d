"""Triton where it is installed: an extra, so the modules that hold kernels must import without it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

HAS_TRITON = find_spec("triton") is not None
if TYPE_CHECKING or HAS_TRITON:
    import triton


def jit(*counts: str) -> Any:
    """A decorator that compiles a kernel once for all values of the parameters named."""

    def decorate(function: Any) -> Any:
        if not HAS_TRITON:
            return function
        return triton.jit(do_not_specialize=[name for name in counts if name in function.__code__.co_varnames])(
            function
        )

    return decorate


def is_interpreted(kernel: Any) -> bool:
    """Whether Triton was imported with TRITON_INTERPRET=1, which runs kernels on the CPU."""
    return HAS_TRITON and not isinstance(kernel, triton.JITFunction)
