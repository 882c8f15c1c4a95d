"""The kernels in C for the CPU, built by the machine's own compiler the first time they are wanted.

torch starts thousands of operations for what one loop over a row in the cache can do, and no library that we stand on
has that loop. So a CPU has kernels as a GPU has Triton's: built where they run and kept in the user's cache. Without a
compiler the same numbers come from torch and numpy, more slowly.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCES = sorted((Path(__file__).parent / "c").glob("*.c"))
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-march=native", "-std=c11", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC")
LONGEST_BUILD_S = 60


def runs_in_c(x: Tensor, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> bool:
    """Whether a kernel for these dtypes can take a tensor: it lies on the CPU, and the library could be built."""
    return x.is_cpu and x.dtype in dtypes and _library() is not None


def call(name: str, *arguments: Tensor | int | None) -> None:
    """Runs a kernel, whose parameters are pointers and int64 alone; None is a null pointer."""
    function = _function(name, len(arguments))
    function(*(x if isinstance(x, int) else 0 if x is None else x.data_ptr() for x in arguments))


@lru_cache(maxsize=64)
def _function(name: str, num_parameters: int) -> Any:
    library = _library()
    assert library is not None, "runs_in_c was not asked"
    function = library[name]
    # An address is a number of 64 bits like any other, and is passed faster as one.
    function.argtypes, function.restype = [ctypes.c_int64] * num_parameters, None
    return function


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    names = (os.environ["CC"],) if os.environ.get("CC") else COMPILERS
    compiler = next((path for name in names if (path := shutil.which(name))), None)
    if compiler is None or os.name != "posix":
        return None
    for flags in ((*FLAGS, "-fopenmp"), FLAGS):  # Apple's compiler has no OpenMP: one thread, then
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            return _loaded(compiler, flags)
    return None


def _loaded(compiler: str, flags: tuple[str, ...]) -> ctypes.CDLL:
    """The library from the cache, or built and put there."""
    digest = hashlib.sha256("\0".join((compiler, *flags, _processor())).encode())
    for source in SOURCES:
        digest.update(source.read_bytes())
    kept = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "sinkscope", "kernels")
    kept = kept / f"{digest.hexdigest()[:32]}.so"
    if kept.is_file():
        with contextlib.suppress(OSError):
            return ctypes.CDLL(str(kept), mode=os.RTLD_NOW)
    with tempfile.TemporaryDirectory(prefix="sinkscope-") as folder:
        objects = [Path(folder, f"{source.stem}.o") for source in SOURCES]
        for source, built in zip(SOURCES, objects, strict=True):
            _run(compiler, *flags, "-c", source, "-o", built)
        # Linked without an OpenMP of its own, it finds the one that torch loaded: the idle threads of a second would
        # take the cores from the first.
        _run(compiler, "-shared", *objects, "-lm", "-o", Path(folder, kept.name))
        library = ctypes.CDLL(str(Path(folder, kept.name)), mode=os.RTLD_NOW)
        with contextlib.suppress(OSError):  # nowhere to keep it: it is built again next time
            _keep(Path(folder, kept.name), kept)
    return library


def _keep(built: Path, kept: Path) -> None:
    kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    partial = kept.with_suffix(f".{os.getpid()}")
    shutil.copy(built, partial)
    os.replace(partial, kept)


def _processor() -> str:
    """What tells apart processors that may share a home: code built for one need not run on another."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return f"{platform.machine()} {platform.processor()}"


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=LONGEST_BUILD_S)
