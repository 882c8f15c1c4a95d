"""One arm on one device: its update as a CUDA graph that reads batches, rates and steps by itself, for run after run.

A run is set by tables on the device, a row for each step: which windows of the text, and which learning rate. So one
graph serves all runs of an arm, and the host only launches it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from arms import LENGTH, build, fuse
from torch import Tensor, nn

from sinkscope.pretrain.decoder import Decoder
from sinkscope.pretrain.step import compile_blocks, vocabulary_loss

WEIGHT_DECAY, BETAS, CLIP = 0.1, (0.9, 0.95), 1.0
EVALUATION_ROWS = 128

State = dict[str, Sequence[Tensor]]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What all runs share."""

    size: str
    steps: int
    rows: int
    """Sequences of a batch."""
    warmup_steps: int


class Trainer:
    """Trains runs of one arm. `tokens` are the text, `strata` the held-out ones, on the device."""

    def __init__(self, arm: str, recipe: Recipe, tokens: Tensor, strata: dict[str, Tensor]) -> None:
        self.arm, self.recipe, self.tokens = arm, recipe, tokens
        self.device = device = tokens.device
        self.strata = strata
        self.starting: dict[int, State] = {}
        self.model: Decoder = build(arm, recipe.size, 0).to(device).train()  # type: ignore[arg-type]
        fuse(self.model)
        self.parameters = list(self.model.parameters())
        self.rate = torch.zeros((), device=device)
        self.optimiser = self._optimiser()
        self.rates = torch.zeros(recipe.steps, device=device)
        self.starts = torch.zeros(recipe.steps, recipe.rows, dtype=torch.long, device=device)
        self.losses = torch.zeros(recipe.steps, device=device)
        self.norms = torch.zeros(recipe.steps, device=device)
        self.step = torch.zeros(1, dtype=torch.long, device=device)
        self.offsets = torch.arange(LENGTH + 1, device=device)
        self.windows = torch.zeros(EVALUATION_ROWS, LENGTH + 1, dtype=tokens.dtype, device=device)
        self.loss_sum = torch.zeros((), device=device)
        self.launch, self.launch_evaluation = self._update, self._evaluate
        if device.type == "cuda":
            compile_blocks(self.model)
            self._record()

    def begin(self, seed: int, rate: float) -> None:
        """The start of a run: weights of its seed, an empty optimiser, the batches of its seed, a constant rate."""
        if seed not in self.starting:
            parameters = build(self.arm, self.recipe.size, seed).parameters()
            self.starting[seed] = {"parameters": [parameter.detach().to(self.device) for parameter in parameters]}
        self._copy(self.parameters, self.starting[seed]["parameters"])
        for states in self._moments().values():
            for tensor in states:
                tensor.zero_()
        self.step.zero_()
        self.set_tables(seed, rate)

    def set_tables(self, seed: int, rate: float) -> None:
        """The batches of a seed, every window at most once, and a constant rate after the warm-up."""
        recipe = self.recipe
        generator = torch.Generator().manual_seed(seed)
        num_windows = (len(self.tokens) - 1) // LENGTH
        needed = recipe.steps * recipe.rows
        if num_windows < needed:
            raise ValueError(
                f"The text has {num_windows} windows, a run needs {needed}. Give more text or fewer steps."
            )
        order = torch.randperm(num_windows, generator=generator)[:needed]
        self.starts.copy_((order * LENGTH).view(recipe.steps, recipe.rows))
        steps = torch.arange(recipe.steps, device=self.device)
        self.rates.copy_(rate * ((steps + 1) / recipe.warmup_steps).clamp(max=1.0))

    def decay(self, first: int, length: int, rate: float) -> None:
        """A straight line to 0 over the steps first to first + length."""
        fall = 1 - (torch.arange(length, device=self.device) + 1) / length
        self.rates[first : first + length] = rate * fall

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.launch()

    def held_out(self) -> dict[str, float]:
        """The mean loss of each stratum."""
        losses = {}
        for name, tokens in self.strata.items():
            count = (len(tokens) - 1) // LENGTH // EVALUATION_ROWS * EVALUATION_ROWS
            starts = torch.arange(count, device=self.device) * LENGTH
            self.loss_sum.zero_()
            batches = starts.split(EVALUATION_ROWS)
            for rows in batches:
                self.windows.copy_(tokens[rows[:, None] + self.offsets])
                self.launch_evaluation()
            losses[name] = self.loss_sum.item() / len(batches)
        return losses

    def state(self) -> State:
        """A copy of everything that training changes."""
        state = {"parameters": self.parameters, "place": [self.step, self.losses], **self._moments()}
        return {name: [tensor.detach().clone() for tensor in tensors] for name, tensors in state.items()}

    def restore(self, state: State) -> None:
        self._copy(self.parameters, state["parameters"])
        for name, tensors in self._moments().items():
            self._copy(tensors, state[name])
        self._copy([self.step, self.losses], state["place"])

    def train_losses(self, first: int, last: int) -> list[float]:
        return self.losses[first:last].tolist()

    def is_finite(self) -> bool:
        done = int(self.step.item())
        return all(math.isfinite(value) for value in self.losses[:done].tolist())

    def _update(self) -> None:
        starts = self.starts.index_select(0, self.step)[0]
        windows = self.tokens[starts[:, None] + self.offsets].long()
        self.rate.copy_(self.rates.index_select(0, self.step)[0])
        loss = self._loss(windows, self.model.lm_head_weight)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.losses.index_copy_(0, self.step, loss.detach()[None])
        self.norms.index_copy_(0, self.step, norm.detach()[None])
        self.step += 1

    def _evaluate(self) -> None:
        # With gradients on, so that the blocks need not be compiled a second time; none are computed.
        self.loss_sum += self._loss(self.windows.long(), self.model.lm_head_weight.detach(), detach=True)

    def _loss(self, windows: Tensor, weight: Tensor, detach: bool = False) -> Tensor:
        on_cuda = self.device.type == "cuda"
        with torch.autocast("cuda", torch.bfloat16, enabled=on_cuda):
            hidden = self.model.hidden_states(windows[:, :-1]).flatten(0, 1)
            return vocabulary_loss(hidden.detach() if detach else hidden, weight, windows[:, 1:].flatten())

    def _record(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._update()
            self._evaluate()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        update, evaluation = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(update):
            self._update()
        with torch.cuda.graph(evaluation, pool=update.pool()):
            self._evaluate()
        self.launch, self.launch_evaluation = update.replay, evaluation.replay

    def _optimiser(self) -> torch.optim.AdamW:
        gains = {
            id(p) for name, p in self.model.named_parameters() if p.ndim < 2 or name.endswith(("lambdas", "offsets"))
        }
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self.parameters if id(p) not in gains], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in self.parameters if id(p) in gains], "weight_decay": 0.0},
        ]
        on_cuda = self.device.type == "cuda"
        return torch.optim.AdamW(groups, lr=self.rate, betas=BETAS, fused=True if on_cuda else None, capturable=on_cuda)

    def _moments(self) -> State:
        states = [self.optimiser.state[parameter] for parameter in self.parameters]
        return {name: [state[name] for state in states if state] for name in ("exp_avg", "exp_avg_sq", "step")}

    @staticmethod
    @torch.no_grad()
    def _copy(there: Sequence[Tensor], here: Sequence[Tensor]) -> None:
        for target, source in zip(there, here, strict=True):
            target.copy_(source)
