"""The library of kernels in C: built once, kept, built again where what was kept is broken, and done without."""

import ctypes
import os
import shutil
import stat

import pytest
import torch

from sinkscope.kernels import compiled
from sinkscope.kernels.compiled import call, runs_in_c
from sinkscope.kernels.token_means import token_mean_square

pytestmark = pytest.mark.skipif(
    not any(shutil.which(name) for name in compiled.COMPILERS), reason="KERNELS IN C NOT CHECKED: no compiler"
)


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    """An empty cache, and nothing loaded before or after."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    _forget()
    yield
    _forget()


def _forget():
    compiled._library.cache_clear()
    compiled._function.cache_clear()


def kept(tmp_path):
    return sorted((tmp_path / "cache" / "sinkscope" / "kernels").glob("*"))


def mean_squares_are_right() -> bool:
    x_NC = torch.arange(12.0).view(3, 4)
    assert runs_in_c(x_NC)
    means_N = torch.empty(3)
    call("token_means", x_NC, 4, 3, 4, True, means_N)
    return means_N.tolist() == [3.5, 31.5, 91.5]


def test_a_machine_with_a_compiler_builds_them_without_a_warning():
    """A kernel that does not compile would pass unseen: torch takes its place."""
    assert runs_in_c(torch.zeros(1)), "the kernels in C do not build or load here"
    compiler = next(path for name in compiled.COMPILERS if (path := shutil.which(name)))
    for source in compiled.SOURCES:
        compiled._run(
            compiler, *compiled.FLAGS, "-fopenmp", "-Wall", "-Wextra", "-Werror", "-c", source, "-o", os.devnull
        )


def test_built_once_and_kept(tmp_path, monkeypatch):
    assert mean_squares_are_right()
    (library,) = kept(tmp_path)
    _forget()
    monkeypatch.setattr(compiled, "_run", lambda *_: pytest.fail("built a second time"))
    assert mean_squares_are_right()
    assert kept(tmp_path) == [library]


def test_a_broken_file_is_built_again(tmp_path):
    assert mean_squares_are_right()
    (library,) = kept(tmp_path)
    library.write_bytes(b"no library")
    _forget()
    assert mean_squares_are_right()
    assert ctypes.CDLL(str(kept(tmp_path)[0]))


def test_another_processor_or_source_has_its_own(tmp_path, monkeypatch):
    assert mean_squares_are_right()
    _forget()
    monkeypatch.setattr(compiled, "_processor", lambda: "another")
    assert mean_squares_are_right()
    assert len(kept(tmp_path)) == 2


def test_nowhere_to_keep_them(tmp_path, monkeypatch):
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file"))
    assert mean_squares_are_right()


@pytest.mark.parametrize("compiler", ["missing", "failing"])
def test_without_a_compiler_torch_gives_the_same(tmp_path, monkeypatch, compiler):
    script = tmp_path / "failing"
    script.write_text("#!/bin/sh\nexit 1\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(tmp_path / compiler))
    x_NC = torch.randn(5, 40)
    assert not runs_in_c(x_NC)
    torch.testing.assert_close(token_mean_square(x_NC), x_NC.square().mean(1))
    assert kept(tmp_path) == []


def test_a_compiler_without_openmp_builds_for_one_thread(tmp_path, monkeypatch):
    run = compiled._run

    def without_openmp(*command):
        if "-fopenmp" in command:
            raise compiled.subprocess.CalledProcessError(1, command)
        run(*command)

    monkeypatch.setattr(compiled, "_run", without_openmp)
    assert mean_squares_are_right()


def test_threads_are_those_of_torch():
    """One OpenMP in the process: a second would bring threads of its own."""
    assert runs_in_c(torch.zeros(1))
    with open("/proc/self/maps") as maps:
        libraries = {line.split()[-1] for line in maps if "gomp" in line or "libomp" in line or "iomp" in line}
    assert len(libraries) <= 1, libraries


def test_what_the_kernels_do_not_take():
    assert not runs_in_c(torch.zeros(1, dtype=torch.float64))
    assert runs_in_c(torch.zeros(1, dtype=torch.float64), (torch.float64,))
    assert not runs_in_c(torch.zeros(1, device="meta"))
