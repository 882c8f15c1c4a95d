"""Kernels run on the GPU where there is one, and in Triton's interpreter everywhere else.

Triton reads the variable when it is imported and when a kernel is decorated, so it is set before any test does so.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
