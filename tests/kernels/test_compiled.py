"""The library of kernels in C: built once, kept, built again where what was kept is broken, and done without."""

import ctypes
import os
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

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


def compiler() -> str:
    return next(path for name in compiled.COMPILERS if (path := shutil.which(name)))


def mean_squares_are_right() -> bool:
    x_NC = torch.arange(12.0).view(3, 4)
    assert runs_in_c(x_NC)
    means_N = torch.empty(3)
    call("token_means", x_NC, 4, 3, 4, True, means_N)
    return means_N.tolist() == [3.5, 31.5, 91.5]


def test_a_machine_with_a_compiler_builds_them_without_a_warning():
    """A kernel that does not compile would pass unseen: torch takes its place."""
    assert runs_in_c(torch.zeros(1)), "the kernels in C do not build or load here"
    for source in compiled.SOURCES:
        compiled._run(
            compiler(),
            *compiled.FLAGS,
            *compiled.WAYS[0],
            "-Wall",
            "-Wextra",
            "-Werror",
            "-c",
            source,
            "-o",
            os.devnull,
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


def test_two_that_build_at_once_leave_one_whole_file(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        loaded = list(pool.map(lambda _: compiled._library.__wrapped__(), range(2)))
    assert None not in loaded
    assert len(kept(tmp_path)) == 1
    _forget()
    assert mean_squares_are_right()


def test_a_folder_that_others_can_write_to_is_not_trusted(tmp_path):
    folder = tmp_path / "cache" / "sinkscope" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert mean_squares_are_right()
    assert kept(tmp_path) == []


def test_without_a_home_they_are_not_kept(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert compiled._cache_folder() is None
    assert mean_squares_are_right()


def test_a_compiler_with_arguments(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", f"{shutil.which('env')} LANG=C {compiler()} -pipe")
    assert mean_squares_are_right()
    assert len(kept(tmp_path)) == 1


@pytest.mark.parametrize(
    "refused", [["-march=native"], ["-march=native", "-mcpu=native"], ["-fopenmp", "-march=native"]]
)
def test_a_compiler_that_knows_less_builds_what_it_can(refused, tmp_path, monkeypatch):
    script = tmp_path / "cc"
    patterns = "|".join(f"*' {flag} '*" for flag in refused)
    script.write_text(f'#!/bin/sh\ncase " $* " in {patterns}) exit 1;; esac\n{compiler()} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    assert mean_squares_are_right()
    assert len(kept(tmp_path)) == 1
    _forget()
    monkeypatch.setattr(compiled, "_run", lambda *_: pytest.fail("built a second time"))
    assert mean_squares_are_right()


def test_a_compiler_that_never_ends_is_asked_once(tmp_path, monkeypatch):
    script = tmp_path / "cc"
    script.write_text("#!/bin/sh\necho >> asked\nexec sleep 60\n")
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CC", str(script))
    monkeypatch.setattr(compiled, "LONGEST_BUILD_S", 0.5)
    assert not runs_in_c(torch.zeros(1))
    assert (tmp_path / "asked").read_text() == "\n"


def test_without_sources_torch_takes_over(monkeypatch):
    monkeypatch.setattr(compiled, "SOURCES", [])
    assert not runs_in_c(torch.zeros(1))


@pytest.mark.parametrize("loaded_before", [True, False])
def test_a_forked_child_counts_the_same_alone(loaded_before, tmp_path):
    """The threads of OpenMP are gone there, and waiting for them would never end."""
    program = f"""
import json, os, signal, torch
from sinkscope.kernels.token_statistics import token_statistics
torch.set_num_threads(2)
x = torch.randn(999, 640)
(x @ x.T).exp().sum()  # torch's own threads are there
if {loaded_before}:
    before = token_statistics(x, path="c")
child = os.fork()
if child == 0:
    signal.alarm(20)
    with open("found", "w") as file:
        json.dump([values.tolist() for values in token_statistics(x, path="c")[:7]], file)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
with open("found") as file:
    assert json.load(file) == [values.tolist() for values in token_statistics(x, path="c")[:7]]
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 0, done.stderr


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
            raise subprocess.CalledProcessError(1, command)
        run(*command)

    monkeypatch.setattr(compiled, "_run", without_openmp)
    assert mean_squares_are_right()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_threads_are_those_of_torch(tmp_path):
    """One OpenMP in the process: a second would bring threads of its own."""
    assert runs_in_c(torch.zeros(1))
    assert b"GOMP_parallel" in kept(tmp_path)[0].read_bytes()
    with open("/proc/self/maps") as maps:
        libraries = {line.split()[-1] for line in maps if "gomp" in line or "libomp" in line or "iomp" in line}
    assert len(libraries) <= 1, libraries


def test_what_the_kernels_do_not_take():
    assert not runs_in_c(torch.zeros(1, dtype=torch.float64))
    assert runs_in_c(torch.zeros(1, dtype=torch.float64), (torch.float64,))
    assert not runs_in_c(torch.zeros(1, device="meta"))
