"""Reading beside the model: on CUDA a second stream reduces activations while the model goes on.

Reading is bound by memory and by exponentials, the model's products by tensor cores, so the two share the device well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

BESIDE_TOKENS = 8192
"""From as many tokens on: below, the time goes into launching, and keeping streams in step only adds to it."""


class SideStream:
    """Runs blocks of work on a second stream of the tensors' device; without CUDA, or for few tokens, in place."""

    def __init__(self, num_tokens: int) -> None:
        self.enough = num_tokens >= BESIDE_TOKENS
        self.streams: dict[torch.device, torch.cuda.Stream] = {}
        self.held: list[Tensor] = []

    def beside(self, *inputs: Tensor) -> contextlib.AbstractContextManager:
        """What runs inside reads `inputs`, which stay alive until `join`: the model must not reuse their memory
        before."""
        return self._on_stream(inputs) if self.enough and inputs[0].is_cuda else contextlib.nullcontext()

    @contextlib.contextmanager
    def _on_stream(self, inputs: tuple[Tensor, ...]) -> Iterator[None]:
        device = inputs[0].device
        stream = self.streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_stream(torch.cuda.current_stream(device))
        self.held.extend(inputs)
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """The model's streams wait, on the device, for all that was begun beside them."""
        for device, stream in self.streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        self.held.clear()
