"""How much memory there is, and that running out of it is an error that can be told."""

import errno
import os

import numpy as np
import pytest
import torch

from sinkscope.errors import InputError
from sinkscope.memory import bound_memory, is_out_of_memory, memory_bytes

GIB = 1 << 30


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": f"{GIB}", "memory.max": f"{2 * GIB}"}, GIB),
        ("0::/elsewhere", {"memory.max": f"{GIB}\n"}, GIB),  # in a container that sees its own group only
        ("4:memory:/a\n3:cpu,cpuacct:/\n0::/", {"memory/a/memory.limit_in_bytes": f"{GIB}"}, GIB),
        ("4:memory:/", {"memory/memory.limit_in_bytes": f"{2**63 - 4096}"}, None),
        ("0::/", {"memory.max": "max"}, None),
        (None, {}, None),
    ],
)
def test_memory_is_what_the_control_group_leaves(tmp_path, groups, files, expected):
    for name, text in files.items():
        file = tmp_path / "sys" / "fs" / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    if groups is not None:
        (tmp_path / "proc" / "self").mkdir(parents=True)
        (tmp_path / "proc" / "self" / "cgroup").write_text(groups)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert memory_bytes(tmp_path) == min(machine, expected or machine)


def too_much_torch():
    torch.empty(1 << 60, dtype=torch.uint8)


def too_much_numpy():
    np.ones(1 << 60, dtype=np.uint8)


@pytest.mark.parametrize("allocate", [too_much_torch, too_much_numpy])
def test_memory_that_runs_out_is_known(allocate):
    with pytest.raises((RuntimeError, MemoryError)) as error:
        allocate()
    assert is_out_of_memory(error.value)
    with pytest.raises(InputError) as told:
        try:
            allocate()
        except Exception as cause:
            raise InputError("These are not the whole weights. Fetch them.") from cause
    assert is_out_of_memory(told.value)


def test_other_errors_are_not_taken_for_it():
    assert is_out_of_memory(OSError(errno.ENOMEM, "no memory"))
    for error in (
        RuntimeError("shapes"),
        OSError(errno.ENOENT, "no such file"),
        InputError("There is no 'not enough memory.txt'."),
    ):
        assert not is_out_of_memory(error)


def test_a_lower_limit_stays(monkeypatch):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (10, 10))
    monkeypatch.setattr(resource, "setrlimit", lambda *limit: pytest.fail("the limit must stay"))
    bound_memory()
