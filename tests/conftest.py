"""Kernels run on the GPU where there is one, and in Triton's interpreter everywhere else; Ctrl-C means what it should;
no generated example fails for being slow.

Triton reads the variable when it is imported and when a kernel is decorated, so it is set before any test does so.
"""

import os
import signal

import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would the commands that they interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("without_deadline", deadline=None)
settings.load_profile("without_deadline")
