"""One update of a decoder: forward and backward passes, clipping, optimisers; and the loss on held-out text.

Compilation is regional: each block is compiled on its own, all of them with one graph, and so are the last norm and
the loss. That starts several times sooner than compiling the whole model, at the same speed. A compiled model that one
process trains with AdamW is recorded as a CUDA graph besides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sinkscope.pretrain.decoder import Decoder
from sinkscope.pretrain.optimisers import build_optimisers, learning_rate, set_learning_rate
from sinkscope.pretrain.parallel import Processes, gradient_sync, local, spread, whole
from sinkscope.pretrain.step_graph import WARM_UP_UPDATES, Batch, Numbers, StepGraph
from sinkscope.pretrain.token_stream import TokenStream
from sinkscope.pretrain.training_config import TrainingConfig
from sinkscope.pretrain.vocabulary_loss import vocabulary_loss


class LanguageModelLoss(nn.Module):
    """The mean loss of a batch; one module, so that DDP and FSDP2 see every use of every weight."""

    def __init__(self, model: Decoder, skipped_targets: int = 0) -> None:
        super().__init__()
        self.model = model
        self.skipped_targets = skipped_targets

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        counted = slice(self.skipped_targets, None)
        hidden_BtE, targets_Bt = self.model.hidden_states(tokens_BT)[:, counted], targets_BT[:, counted]
        return vocabulary_loss(hidden_BtE.flatten(0, 1), self.model.lm_head_weight, targets_Bt.flatten())


class TrainingStep:
    """A model with its optimisers, in this process's share of the work; `record` allows a graph where one can be."""

    def __init__(
        self, model: Decoder, config: TrainingConfig, group: Processes, *, compile: bool, record: bool = True
    ) -> None:
        self.model = model
        self.config = config
        self.group = group
        self.rows = config.rows(group.rank, group.num_processes)
        model.to(group.device).train()  # type: ignore[arg-type]
        if compile:
            compile_blocks(model)
        self.loss = spread(LanguageModelLoss(model, config.skipped_targets), model.blocks, group)
        # Kept, since FSDP2 shows gathered weights in their place after a forward pass. Buffers are changed by training
        # too, where a variant keeps statistics.
        self.parameters = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        # Muon's step reads its learning rate on the host, and collectives belong to all processes at once.
        on_one_device = group.device.type == "cuda" and group.mode == "single"
        self._is_recorded = record and compile and on_one_device and config.optimiser == "adamw"
        self._graph: StepGraph | None = None
        self._launched = 0
        self.optimisers = build_optimisers(model, model.blocks, config, capturable=self._is_recorded)

    def update(self, step: int, stream: TokenStream) -> Numbers:
        """(mean loss over all processes, norm of the gradient before clipping) of the update that follows `step`
        updates; both stay on the device, so that nothing waits for it, until the next update."""
        set_learning_rate(self.optimisers, learning_rate(step, self.config))
        batches = [stream.batch(step, rows) for rows in self.rows]
        if self._is_recorded and self._graph is None and self._launched == WARM_UP_UPDATES:
            self._graph = StepGraph(self._update, batches, self.group.device)
        if self._graph is not None:
            return self._graph.update(batches)
        self._launched += 1
        return self._update([(self._moved(tokens), self._moved(targets)) for tokens, targets in batches])

    def _update(self, batches: Sequence[Batch]) -> Numbers:
        total = torch.zeros((), device=self.group.device)
        for number, (tokens, targets) in enumerate(batches, 1):
            with gradient_sync(self.loss, number == len(batches)), self._autocast():
                loss = self.loss(tokens, targets) / len(batches)
                loss.backward()
            total += loss.detach()
        norm = whole(nn.utils.clip_grad_norm_(self.parameters.values(), self.config.clip))
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        return self.group.summed(total) / self.group.num_processes, norm

    @torch.no_grad()
    def check_weights(self, step: int) -> None:
        """Returns if every weight is finite after `step` updates, else raises FloatingPointError, in every process."""
        finite = torch.stack([torch.isfinite(local(parameter)).all() for parameter in self.parameters.values()])
        if self.group.summed((~finite).sum().double()) > 0:
            raise FloatingPointError(f"weights that are not finite after step {step}")

    @torch.no_grad()
    def evaluate(self, stream: TokenStream) -> float:
        """The mean loss on the same held-out windows at every step."""
        size, rank = self.rows[0].stop - self.rows[0].start, self.group.rank
        round_size = size * self.group.num_processes
        count = min(self.config.evaluation_sequences, stream.num_windows)
        if count > round_size:
            count -= count % round_size  # a smaller last batch would be compiled anew
        sums = torch.zeros(2, dtype=torch.float64, device=self.group.device)
        # Every process makes the same number of calls: with FSDP2 each of them gathers weights from all.
        for start in range(0, count, round_size):
            rows = slice(start + rank * size, min(start + (rank + 1) * size, count))
            is_empty = rows.start >= count
            tokens, targets = stream.evenly_spaced(count, slice(0, 1) if is_empty else rows)
            with self._autocast():
                loss = self.loss(self._moved(tokens), self._moved(targets))
            if not is_empty:
                sums += torch.stack([loss.double() * len(tokens), torch.full_like(loss, len(tokens)).double()])
        total, number = self.group.summed(sums).tolist()
        return total / number

    def _moved(self, tensor: Tensor) -> Tensor:
        if self.group.device.type == "cpu":
            return tensor
        return tensor.contiguous().pin_memory().to(self.group.device, non_blocking=True)

    def _autocast(self) -> contextlib.AbstractContextManager:
        on_cuda = self.group.device.type == "cuda"
        return torch.autocast("cuda", torch.bfloat16) if on_cuda else contextlib.nullcontext()


def compile_blocks(model: Decoder) -> None:
    """Compiles each block's forward, and the last norm's.

    The forward and not the call: hooks, those of FSDP2 and of the probes among them, then stay outside.
    """
    for module in (*model.blocks, model.final_norm):
        module.forward = torch.compile(module.forward, dynamic=False)
