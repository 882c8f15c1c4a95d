"""Memory: how much of it there is, and how to tell that it ran out."""

from __future__ import annotations

import errno
import os
from pathlib import Path

_OUT_OF_MEMORY_WORDS = (
    *("can't allocate memory", "not enough memory", "Cannot allocate memory", "bad_alloc", "failed to map segment"),
    "can't start new thread",
)
"""Words in the errors of torch, its allocator, safetensors, the dynamic linker, and Python (a thread needs a stack)."""


def memory_bytes(root: Path = Path("/")) -> int:
    """The memory of this machine, or less if a control group of this process limits it."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        groups = []
    for _, controllers, group in (line.split(":", 2) for line in groups):
        if controllers in ("", "memory"):
            place = root / "sys/fs/cgroup" / controllers
            for folder in (place / group.lstrip("/"), *(place / group.lstrip("/")).parents):
                try:
                    sizes.append(int((folder / ("memory.limit_in_bytes" if controllers else "memory.max")).read_text()))
                except (OSError, ValueError):  # the other version of cgroups, a group outside this container, or "max"
                    continue
    return min(sizes)


def bound_memory() -> None:
    """Makes an allocation beyond `memory_bytes` fail from now on; otherwise the kernel would kill the process silently.

    Only for programs, and on a CPU: the limit holds for the whole process, and GPU drivers reserve more than they use.
    """
    import resource

    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = memory_bytes()
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error means that memory ran out, judged by its name and words, so that torch need not be imported."""
    while error is not None:
        by_name = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
        by_words = isinstance(error, OSError | RuntimeError | ImportError) and any(
            words in str(error) for words in _OUT_OF_MEMORY_WORDS
        )
        if by_name or by_words or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            return True
        error = error.__cause__ or error.__context__
    return False
