"""A kept launcher must only ever run the kernel that Triton would choose, with the arguments that Triton would pass."""

import os
import subprocess
import sys

import pytest
import torch
import triton

from sinkscope.kernels import launch as module


class Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self, log, name):
        self.log, self.name = log, name

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *args):
        assert (stream, function, metadata) == (77, "function", "metadata")
        assert launch_metadata is enter is leave is None
        self.log.append((self.name, (x, y, z), args))


class Driver:
    @staticmethod
    def get_current_stream(device):
        return 77


class Kernel(triton.JITFunction):
    """Counts how often it was bound."""

    def __init__(self):
        self.log, self.num_bound = [], 0

    def __getitem__(self, grid):
        def bind(*args, **options):
            self.num_bound += 1
            return Compiled(self.log, self.num_bound)

        return bind


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(module, "_launchers", {})
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    return Kernel()


def test_the_second_like_launch_is_not_bound_again(kernel):
    x = torch.zeros(64)
    for _ in range(3):
        module.launch(kernel, (4, 1, 1), (x,), (64, 0.5), (16, True), num_warps=4)
    assert kernel.num_bound == 1
    assert kernel.log == [(1, (4, 1, 1), (x, 64, 0.5, 16, True))] * 2


def test_whatever_triton_looks_at_makes_another_launch(kernel):
    x = torch.zeros(64)
    base = {"grid": (4, 1, 1), "tensors": (x,), "numbers": (64, 0.5), "constants": (16, True), "num_warps": 4}
    others = [
        {"tensors": (x[1:],)},  # not aligned to 16 bytes
        {"tensors": (x.int(),)},
        {"numbers": (1, 0.5)},
        {"numbers": (2**40, 0.5)},
        {"constants": (32, True)},
        {"constants": (16, False)},
        {"num_warps": 8},
        {"grid": (5, 1, 1)},
    ]
    for number, other in enumerate([{}, *others]):
        module.launch(kernel, **{**base, **other})
        assert kernel.num_bound == number + 1
    module.launch(Kernel(), **base)
    assert kernel.log == []


def test_what_is_kept_is_bounded(kernel, monkeypatch):
    monkeypatch.setattr(module, "MAX_LAUNCHERS", 3)
    x = torch.zeros(4)
    for length in range(10):
        module.launch(kernel, (1, 1, 1), (x,), (length,), ())
    assert len(module._launchers) <= 3


def test_triton_hands_its_launcher_the_same_both_ways():
    """Triton's own code with a driver that notes what reaches the C launcher, so that no GPU is needed."""
    program = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

seen = []

class Launcher:
    def __init__(self, source, metadata):
        self.noted = (source.fn.__name__, metadata.num_warps)

    def __call__(self, *args):
        seen.append((self.noted, id(self), args))

class Utils:
    def load_binary(self, name, binary, shared, device):
        return 1, 2, 32, 0, 1024

    def get_device_properties(self, device):
        return {"max_shared_mem": 200_000}

class Driver:
    launcher_cls, utils = Launcher, Utils()
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 77)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

driver.set_active(Driver())
from sinkscope.kernels.token_means import _means_kernel, triton_means

x = torch.randn(5, 40)
for _ in range(3):
    triton_means(x, square=True)
names, places, args = zip(*seen)
assert set(names) == {("_means_kernel", 1)} and len(set(places)) == 1, seen
grid_stream_function = [call[:5] for call in args]
assert grid_stream_function == [(5, 1, 1, 77, 2)] * 3, grid_stream_function
assert all(call[-6] is x and call[-4:] == (40, 40, 64, True) for call in args), args
triton_means(torch.randn(201)[1:].view(5, 40), square=True)  # control: not aligned to 16 bytes
assert seen[-1][1] != places[0]
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
