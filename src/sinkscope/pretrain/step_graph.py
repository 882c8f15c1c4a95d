"""An update recorded once as a CUDA graph and launched as one piece.

A small model's kernels last a few microseconds each, less than it takes to launch them: recorded, the host launches one
graph for the thousands of them. Everything that changes from step to step is written into tensors that the graph reads:
tokens, targets and the learning rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

WARM_UP_UPDATES = 3
"""Updates that are launched kernel by kernel first: they compile, tune, and create the state of the optimisers."""

Batch = tuple[Tensor, Tensor]
"""Tokens and targets, each [b, T]."""
Numbers = tuple[Tensor, Tensor]
"""The loss of an update and the norm of its gradient."""


class StepGraph:
    """One update of a model on a device, with inputs of its own."""

    def __init__(self, update: Callable[[Sequence[Batch]], Numbers], batches: Sequence[Batch], device: torch.device):
        self._inputs = [(torch.empty_like(x, device=device), torch.empty_like(y, device=device)) for x, y in batches]
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
        with torch.cuda.graph(self._graph):  # records, and computes nothing
            self._numbers = update(self._inputs)

    def update(self, batches: Sequence[Batch]) -> Numbers:
        """The numbers of one update on these batches; the next update overwrites them."""
        for inputs, batch in zip(self._inputs, batches, strict=True):
            for there, here in zip(inputs, batch, strict=True):
                there.copy_(here.contiguous().pin_memory(), non_blocking=True)
        self._graph.replay()
        return self._numbers
