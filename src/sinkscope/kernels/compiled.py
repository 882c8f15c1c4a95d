"""The kernels in C for the CPU, built by the machine's own compiler the first time they are wanted.

torch starts thousands of operations for what one loop over a row in the cache can do, and no library that we stand on
has that loop. So a CPU has kernels as a GPU has Triton's: built where they run and kept in the user's cache. Without a
compiler torch and numpy read the same, more slowly.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shlex
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
FLAGS = ("-O3", "-std=c11", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC")
WAYS = tuple(
    (*processor, threading)
    for threading in ("-fopenmp", "-fopenmp-simd")
    for processor in (["-march=native"], ["-mcpu=native"], [])
)
"""What is tried in this order: where OpenMP cannot be had (Apple's compiler), or not torch's own, one thread with
vectors; where a compiler does not know this processor, or not by the first name, what any of its kind can do."""
LONGEST_BUILD_S = 60
AT_MOST_32_BITS = (torch.float32, torch.bfloat16, torch.float16)
"""What float32 holds without loss."""
_forked = False


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
    given = os.environ.get("CC")
    commands = [shlex.split(given)] if given else [[name] for name in COMPILERS]
    command = next(([path, *rest] for name, *rest in commands if (path := shutil.which(name))), None)
    supported = os.name == "posix" and ctypes.sizeof(ctypes.c_void_p) == 8 and SOURCES
    library = _found(command) if command is not None and supported else None
    if library is not None and _forked:
        library.work_alone()
    return library


def _found(command: list[str]) -> ctypes.CDLL | None:
    """The library as it was kept, else built anew."""
    # torch for ARM loads its OpenMP for itself alone: it is shown to others here, where it is loaded at all.
    with contextlib.suppress(OSError):
        ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOW | os.RTLD_NOLOAD | os.RTLD_GLOBAL)
    folder = _cache_folder()
    if folder is not None:
        for way in WAYS:
            with contextlib.suppress(OSError):
                return _load(folder / _name(command, way))
    for way in WAYS:
        for place in (folder, None) if folder is not None else (None,):
            try:
                return _built(command, way, place)
            except subprocess.TimeoutExpired:
                return None
            except (OSError, subprocess.CalledProcessError):
                continue
    return None


def _built(command: list[str], way: tuple[str, ...], folder: Path | None) -> ctypes.CDLL:
    """Builds the library and keeps it in a folder, or nowhere."""
    with tempfile.TemporaryDirectory(prefix="sinkscope-", dir=folder, ignore_cleanup_errors=True) as workshop:
        objects = [Path(workshop, f"{source.stem}.o") for source in SOURCES]
        for source, built in zip(SOURCES, objects, strict=True):
            _run(*command, *FLAGS, *way, "-c", source, "-o", built)
        # Linked without an OpenMP of its own, it finds the one that torch loaded: the idle threads of a second would
        # take the cores from the first.
        library = Path(workshop, _name(command, way))
        _run(*command, "-shared", *objects, "-lm", "-o", library)
        loaded = _load(library)
        if folder is not None:
            with library.open("rb") as file:
                os.fsync(file.fileno())  # a file that is there is whole: loading a part of one kills the process
            os.replace(library, folder / library.name)
    return loaded


def _load(library: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(library), mode=os.RTLD_NOW)


def _name(command: list[str], way: tuple[str, ...]) -> str:
    digest = hashlib.sha256("\0".join((*command, *FLAGS, *way, _processor())).encode())
    for source in (*SOURCES, *SOURCES[0].parent.glob("*.h")):
        digest.update(source.read_bytes())
    return f"{digest.hexdigest()[:32]}.so"


def _cache_folder() -> Path | None:
    """Where libraries are kept; None where there is no such place, or one that others can write to: what lies there is
    run."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(cache):  # no home
        return None
    folder = Path(cache, "sinkscope", "kernels")
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.stat()
        if (
            found.st_uid == os.geteuid()
            and not found.st_mode & 0o022
            and os.access(folder, os.R_OK | os.W_OK | os.X_OK)
        ):
            return folder
    return None


def _after_fork() -> None:
    """In a forked child OpenMP's threads are gone."""
    global _forked
    _forked = True
    if _library.cache_info().currsize and (library := _library()) is not None:
        library.work_alone()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _processor() -> str:
    """What tells apart processors that may share a home: code built for one need not run on another."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return f"{platform.machine()} {platform.processor()}"


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=LONGEST_BUILD_S)
