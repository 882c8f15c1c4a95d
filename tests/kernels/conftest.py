"""Kernel tests run on the GPU where there is one, and in Triton's interpreter everywhere else."""

import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    # Triton reads the variable when it is imported and when a kernel is decorated. Another tier's tests may have
    # imported both already (a forward pass in transformers imports Triton), in this process or this xdist worker. They
    # keep their copies; the kernel tests import fresh ones. Triton's native library cannot be loaded twice and stays.
    for name in list(sys.modules):
        of_triton = name.split(".")[0] == "triton" and not name.startswith("triton._C")
        if of_triton or name.startswith("sinkscope.kernels."):
            del sys.modules[name]


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
