"""A kept launcher must only ever run the kernel that Triton would choose: checked with a stand-in for Triton's."""

import pytest
import torch
import triton

from sinkscope.kernels import launch as module


class Compiled:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def __getitem__(self, grid):
        return lambda *args: self.log.append((self.name, grid, args))


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
