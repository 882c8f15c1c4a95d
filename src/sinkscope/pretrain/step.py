"""One update of a decoder: loss, gradients, clipping, optimisers. Also the loss on held-out text, and the FLOPs.

Three things make small models fast:

- Regional compilation. Each block is compiled on its own; the blocks share one compiled graph. The last norm and the
  loss are compiled too. Compared with compiling the whole model, training starts several times sooner and runs as fast.
- One CUDA graph for the whole update, if one process trains a compiled model. The kernels of a small model take a few
  microseconds each, less than their launch: the host then launches one graph instead of thousands of kernels.
- The cross entropy in chunks of tokens, together with its gradients. The logits are the largest tensor of a small
  language model. Only those of one chunk are held at a time, and the backward pass recomputes nothing.

Axes: B sequences, T positions, t positions whose loss counts, N tokens, n tokens of a chunk, E width, V vocabulary, W
vocabulary padded for alignment.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sinkscope.models.sharded import whole
from sinkscope.pretrain.decoder import Decoder
from sinkscope.pretrain.optimisers import build_optimisers, learning_rate, set_learning_rate
from sinkscope.pretrain.parallel import Processes, gradient_sync, local, spread

if TYPE_CHECKING:
    from sinkscope.pretrain.config import TrainingConfig
    from sinkscope.pretrain.tokens import TokenStream

WARM_UP_UPDATES = 3
"""Updates before the CUDA graph is recorded. They compile, tune kernels and create the optimisers' state; none of this
may happen during a recording."""

Batch = tuple[Tensor, Tensor]
"""Tokens and targets, each [b, T]."""
Numbers = tuple[Tensor, Tensor]
"""The loss of an update, and the norm of its gradient before clipping."""

CHUNK_TOKENS = 8192
"""Large enough for full matrix units, small enough that the logits stay under a gigabyte at 50,000 tokens."""
ALIGNMENT = 64
"""Columns of the logits are padded to a multiple of this: unaligned rows halve the speed of the matrix products."""


class LanguageModelLoss(nn.Module):
    """The mean loss of a batch; one module, so that DDP and FSDP2 see every use of every weight."""

    def __init__(self, model: Decoder, skipped_targets: int = 0) -> None:
        super().__init__()
        self.model = model
        self.skipped_targets = skipped_targets

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        # Cut off rather than masked, so that no logits are computed for them.
        counted = slice(self.skipped_targets, None)
        hidden_BtE, targets_Bt = self.model.hidden_states(tokens_BT)[:, counted], targets_BT[:, counted]
        return vocabulary_loss(hidden_BtE.flatten(0, 1), self.model.lm_head_weight, targets_Bt.flatten())


class TrainingStep:
    """A model, its optimisers, and this process's share of each batch; `record` allows a CUDA graph."""

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
        # Kept, because after a forward pass FSDP2 shows gathered weights in place of these shards. With the buffers, in
        # which a variant may keep running statistics.
        self.parameters = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        # A graph would hold collectives, which all processes must launch in the same order: with several, no graph.
        on_one_device = group.device.type == "cuda" and group.mode == "single"
        self._is_recorded = record and compile and on_one_device
        self._graph: StepGraph | None = None
        self._launched = 0
        self.optimisers = build_optimisers(model, model.blocks, config, capturable=self._is_recorded)

    def update(self, step: int, stream: TokenStream) -> Numbers:
        """Does update number `step`, from 0; returns its loss, mean over all processes, and its gradient norm.

        Both stay on the device, so that the host need not wait for them. The next update may overwrite them.
        """
        with in_one_order() if self.config.deterministic else contextlib.nullcontext():
            return self._launch_or_replay(step, stream)

    def _launch_or_replay(self, step: int, stream: TokenStream) -> Numbers:
        set_learning_rate(self.optimisers, learning_rate(step, self.config))
        batches = [stream.batch(step, rows) for rows in self.rows]
        if self._is_recorded and self._graph is None and self._launched == WARM_UP_UPDATES:
            self._graph = StepGraph(self._update, batches, self.group.device)
        if self._graph is not None:
            return self._graph.update(batches)
        self._launched += 1
        return self._update([(self._moved(tokens), self._moved(targets)) for tokens, targets in batches])

    def _update(self, batches: Sequence[Batch]) -> Numbers:
        """The update itself, on batches that are on the device; with several batches, gradients are accumulated."""
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
        sums = torch.zeros(2, dtype=torch.float64, device=self.group.device)
        # Every process must make the same number of forward passes, since FSDP2 gathers the weights in each. A process
        # with no windows left in the last round runs the first one again and drops its loss.
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
        """The tensor on the device. From pinned memory, so that the copy runs beside the kernels."""
        if self.group.device.type == "cpu":
            return tensor
        return tensor.contiguous().pin_memory().to(self.group.device, non_blocking=True)

    def _autocast(self) -> contextlib.AbstractContextManager:
        on_cuda = self.group.device.type == "cuda"
        return torch.autocast("cuda", torch.bfloat16) if on_cuda else contextlib.nullcontext()


@contextlib.contextmanager
def in_one_order() -> Iterator[None]:
    """While open, torch uses no kernel that adds up in the order in which its threads finish.

    The usual backward pass of attention is such a kernel, if a sequence is longer than one of its blocks.
    """
    settings: Any = torch.utils.deterministic  # a module whose attribute type checkers don't see
    before = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else torch refuses matrix products
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # a debugging aid that would only cost time here
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        settings.fill_uninitialized_memory = before[1]


def compile_blocks(model: Decoder) -> None:
    """Compiles the forward method of each block and of the last norm.

    The method and not the module, so that hooks, such as those of FSDP2 and of the probes, run outside of the graph.
    """
    for module in (*model.blocks, model.final_norm):
        module.forward = torch.compile(module.forward, dynamic=False)


class StepGraph:
    """One update of a model, recorded as a CUDA graph. It reads its batches from tensors of its own."""

    def __init__(self, update: Callable[[Sequence[Batch]], Numbers], batches: Sequence[Batch], device: torch.device):
        self._inputs = [(torch.empty_like(x, device=device), torch.empty_like(y, device=device)) for x, y in batches]
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
        with torch.cuda.graph(self._graph):  # records the kernels without running them
            self._numbers = update(self._inputs)

    def update(self, batches: Sequence[Batch]) -> Numbers:
        """The numbers of one update on these batches; the next update overwrites them."""
        for inputs, batch in zip(self._inputs, batches, strict=True):
            for target, source in zip(inputs, batch, strict=True):
                target.copy_(source.contiguous().pin_memory(), non_blocking=True)
        self._graph.replay()
        return self._numbers


def vocabulary_loss(hidden_NE: Tensor, weight_VE: Tensor, targets_N: Tensor) -> Tensor:
    """The mean cross entropy of the targets under softmax(hidden weight^T), in float32."""
    return _VocabularyLoss.apply(hidden_NE, weight_VE, targets_N)  # type: ignore[return-value]


class _VocabularyLoss(torch.autograd.Function):
    """Computes the gradients in the forward pass, chunk by chunk; the backward pass scales them."""

    @staticmethod
    def forward(ctx, hidden_NE: Tensor, weight_VE: Tensor, targets_N: Tensor) -> Tensor:
        device = hidden_NE.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight_VE.dtype
        vocab_size, num_tokens = weight_VE.shape[0], hidden_NE.shape[0]
        # On held-out text neither gradient is needed.
        with_gradients = any(ctx.needs_input_grad[:2])
        with torch.autocast(device, enabled=False):
            padding = -vocab_size % ALIGNMENT
            weight_WE = torch.nn.functional.pad(weight_VE.to(dtype), (0, 0, 0, padding))
            hidden_NE = hidden_NE.to(dtype)
            chunk_loss = _compiled_chunk_loss if device == "cuda" else _chunk_loss
            total = torch.zeros((), dtype=torch.float32, device=hidden_NE.device)
            grad_hidden_NE = torch.empty_like(hidden_NE)
            grad_weight_VE = torch.zeros_like(weight_VE, dtype=_wide(weight_VE))
            for start in range(0, num_tokens, CHUNK_TOKENS):
                chunk = slice(start, start + CHUNK_TOKENS)
                hidden_nE = hidden_NE[chunk]
                loss, grad_nW = chunk_loss(hidden_nE @ weight_WE.T, targets_N[chunk], vocab_size, num_tokens)
                total += loss
                if with_gradients:
                    grad_hidden_NE[chunk] = grad_nW @ weight_WE
                    grad_weight_VE += (grad_nW.T @ hidden_nE)[:vocab_size]
        ctx.weight_dtype = weight_VE.dtype
        if with_gradients:
            ctx.save_for_backward(grad_hidden_NE, grad_weight_VE)
        return total

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        grad_hidden_NE, grad_weight_VE = ctx.saved_tensors
        scale = grad_outputs[0]
        return grad_hidden_NE * scale, (grad_weight_VE * scale).to(ctx.weight_dtype), None


def _chunk_loss(logits_nW: Tensor, targets_n: Tensor, vocab_size: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    """(the chunk's share of the mean loss, its gradient with respect to the logits, in the logits' dtype).

    The gradient of the cross entropy of one token is softmax(logits) - onehot(target).
    """
    column_W = torch.arange(logits_nW.shape[1], device=logits_nW.device)
    # The padded columns get probability 0.
    wide_nW = torch.where(column_W < vocab_size, logits_nW.to(_wide(logits_nW)), float("-inf"))
    log_sum_n = torch.logsumexp(wide_nW, dim=-1)
    is_target_nW = column_W == targets_n[:, None]
    loss = (log_sum_n - torch.where(is_target_nW, wide_nW, 0.0).sum(-1)).sum() / num_tokens
    gradient_nW = ((wide_nW - log_sum_n[:, None]).exp() - is_target_nW.to(wide_nW.dtype)) / num_tokens
    return loss, gradient_nW.to(logits_nW.dtype)


def _wide(values: Tensor) -> torch.dtype:
    """float32, or the dtype of the values if that is wider."""
    return torch.promote_types(values.dtype, torch.float32)


_compiled_chunk_loss = torch.compile(_chunk_loss, dynamic=False)


def flops_per_token(model: Decoder, length: int) -> float:
    """Floating-point operations of the model's forward and backward pass per token: 6 N + 6 L T E.

    N counts the parameters that multiply: all but the input embedding, which is looked up. A tied embedding is the
    output matrix too, so it counts. In causal attention a token attends to T / 2 keys of width E on average, in L
    layers. Work done twice, such as activations computed again, would not count.
    """
    config = model.config
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if not config.tie_word_embeddings:
        num_parameters -= model.model.embed_tokens.weight.numel()
    shape = config.attention_shape()
    width = shape.num_heads * shape.head_size
    return 6 * num_parameters + 6 * config.num_hidden_layers * length * width


@torch.no_grad()
def matrix_rate(device: torch.device) -> float:
    """FLOP/s of a large matrix product in the dtype that training multiplies in; the best of six measurements."""
    on_cuda = device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if on_cuda else (768, torch.float32)
    # Random numbers: a GPU multiplies zeros faster.
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(6):
        _wait(device)
        started_at = time.perf_counter()
        for _ in range(5 if on_cuda else 1):
            torch.matmul(a, b)
        _wait(device)
        best = min(best, (time.perf_counter() - started_at) / (5 if on_cuda else 1))
    return 2 * size**3 / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
