"""The numbers of each update on their way from the device to a row of the log, without the device ever waiting."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sinkscope.pretrain.optimisers import learning_rate
from sinkscope.pretrain.training_config import TrainingConfig


@dataclass
class Pending:
    step: int
    values: Tensor
    """[loss, gradient norm] in host memory, there once the event has happened."""
    arrived: torch.cuda.Event | None


class StepNumbers:
    """Rows of updates in their order. On CUDA the newest update stays on its way until the next one is launched."""

    def __init__(self, config: TrainingConfig, flops_per_token: float, flop_rate: float) -> None:
        self.config = config
        self.flops_per_token = flops_per_token
        self.flop_rate = flop_rate
        """FLOP/s that all devices together could do."""
        self.elapsed_before = 0.0
        """Seconds that the run took before it was resumed."""
        self._started_at = self._clock = time.perf_counter()
        self._pending: deque[Pending] = deque()

    @property
    def elapsed_s(self) -> float:
        return self.elapsed_before + time.perf_counter() - self._started_at

    def restart_clock(self) -> None:
        """Leaves the time since the last update out of the next one's tokens/s."""
        self._clock = time.perf_counter()

    def tokens(self, steps: int) -> int:
        return steps * self.config.batch_size * self.config.sequence_length

    def push(self, step: int, loss: Tensor, norm: Tensor) -> None:
        """Takes what an update returned; nothing waits for it."""
        values = torch.stack([loss, norm.to(loss.dtype)])
        arrived = None
        if values.is_cuda:
            values = torch.empty(2, pin_memory=True).copy_(values, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self._pending.append(Pending(step, values, arrived))

    def rows(self, *, wait_for_all: bool) -> list[dict[str, Any]]:
        """The rows that are there; FloatingPointError where a number is not finite."""
        numbers = []
        while self._pending and (wait_for_all or len(self._pending) > 1 or self._pending[0].arrived is None):
            entry = self._pending.popleft()
            if entry.arrived is not None:
                entry.arrived.synchronize()
            loss, norm = entry.values.tolist()
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise FloatingPointError(f"loss {loss}, gradient norm {norm} at step {entry.step}")
            numbers.append((entry.step, loss, norm))
        if not numbers:
            return []
        now = time.perf_counter()
        # Two that arrived together share their time: which of them waited for the other cannot be seen from here.
        rate = self.tokens(len(numbers)) / (now - self._clock)
        self._clock = now
        return [
            {
                "step": step,
                "tokens": self.tokens(step),
                "loss": loss,
                "gradient_norm": norm,
                "learning_rate": learning_rate(step - 1, self.config),
                "tokens_per_second": rate,
                "mfu": rate * self.flops_per_token / self.flop_rate,
                "elapsed_s": self.elapsed_s,
                "validation_loss": None,
            }
            for step, loss, norm in numbers
        ]

    def progress(self, row: dict[str, Any], validation_loss: float | None) -> str:
        """A row as a line for people, with the time that is left."""
        left_s = (self.config.steps - row["step"]) * row["elapsed_s"] / row["step"]
        held_out = "" if validation_loss is None else f", held out {validation_loss:.4f}"
        return (
            f"step {row['step']}/{self.config.steps}: loss {row['loss']:.4f}{held_out}, "
            f"{row['tokens_per_second']:,.0f} tokens/s, MFU {row['mfu']:.1%}, {left_s:,.0f} s left"
        )
