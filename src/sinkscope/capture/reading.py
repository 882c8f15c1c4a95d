"""read_model(model, batch): every observable of the sink chain from one forward pass, reduced.

A batch of more tokens than a chunk holds is read twice: a first round finds what a later one must know beforehand
(the variance of the values across all sequences, the positions to keep in full), and the second reads with it. Every
statistic merges exactly.
Axes: L layers, H heads, T positions, S keys read, B sequences, P candidate positions, E width, U units, R distances,
Q lock positions.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.capture.attention_request import distances
from sinkscope.capture.edits import check_chunks
from sinkscope.capture.forward_reader import ForwardReader, Frozen
from sinkscope.capture.layer_statistics import Statistics, stacked
from sinkscope.capture.lock import LockInput
from sinkscope.capture.overflow import check_finite
from sinkscope.capture.sole_reader import sole_reader
from sinkscope.errors import InputError
from sinkscope.kernels.standout import point_at
from sinkscope.measures.dimension_disparity import effective_rank
from sinkscope.measures.directional_collapse import cosine_from_deviation
from sinkscope.measures.sink_score import LATER_QUERIES, eligible_positions
from sinkscope.models.anatomy import Anatomy, anatomy_of
from sinkscope.models.loading import LoadedModel
from sinkscope.models.token_batches import TokenBatch

RANK_TOKENS = 1024
"""Tokens that the effective rank of a layer is taken over."""
CHUNK_TOKENS = 1 << 17
"""Tokens in one forward pass: as many as one long context, so memory is what the longest text would need."""

Progress = Callable[[int, int], None]
"""Called with (forward passes done, forward passes in all)."""


@dataclass(frozen=True)
class ResidualRow:
    """The residual stream behind one layer, or entering layer 0, at the candidate positions, with the layer's units."""

    num_sequences: int
    candidates: Tensor
    """[P] positions kept in full; a position may stand there twice."""
    sums: dict[str, Tensor]
    """Sums over sequences: dimension, dimension_abs [P, E], unit_activation, unit_square [P, U], and over all tokens
    dimension_total [E], unit_energy [U]. Behind a post-norm also unit_written, unit_written_square."""

    def mean(self, name: str) -> Tensor:
        return self.sums[name] / self.num_sequences


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What one model did on one batch, reduced. Tensors are float32 on the CPU; layer axes follow the model's
    layers."""

    model_name: str
    anatomy: Anatomy
    batch: TokenBatch
    attention_path: str
    keys: Tensor
    """[S] key positions that were read."""
    received: Tensor
    """[L, H, S] mean attention received, over sequences."""
    head_sink_rate: Tensor
    """[L, H, S] share of sequences in which the head counts the key as a sink."""
    sequence_sink_rate: Tensor
    """[B, S] share of layers and heads that count the key as a sink, by sequence."""
    by_position: dict[str, Tensor]
    """[L, T] by name: entropy, mixing, value_variance, averaging_law, dom_ratio, ..."""
    by_head: dict[str, Tensor]
    """[L, H] by name: entropy, mixing."""
    by_distance: Tensor
    """[L, H, R] mean attention on the key each distance back, over at most 256 queries that have one."""
    distances: tuple[int, ...]
    channel_variance: Tensor | None
    """[L, C] variance of each channel of the value aggregation across sequences, averaged over positions."""
    lock_positions: Tensor
    """[L, Q] positions that the lock was read at."""
    lock_inputs: list[LockInput]
    """What the lock of each layer is read from."""
    residual: list[ResidualRow]
    """Statistics of the residual stream and the units; entry 0 is the stream that enters layer 0, entry l + 1 leaves
    layer l."""
    rank_tokens: list[Tensor]
    """[n, E] the tokens of each layer that the effective rank is taken over; empty if it was not asked for."""
    elapsed_s: float

    @property
    def num_layers(self) -> int:
        return self.received.shape[0]

    @property
    def sink_rate(self) -> Tensor:
        """[S] mean over sequences, layers and heads."""
        return self.sequence_sink_rate.mean(0)

    def cpu(self) -> Reading:
        """The same reading with its tensors on the CPU, one transfer for all layers of each."""
        moved: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                moved[field.name] = value.cpu()
            elif isinstance(value, dict):
                moved[field.name] = {name: tensor.cpu() for name, tensor in value.items()}
        return replace(self, **moved)

    def effective_ranks(
        self, excluded_positions: Sequence[int] = (), fell_back: Callable[[str], None] = lambda note: None
    ) -> list[float]:
        """The effective rank of each layer's tokens, without the tokens at some positions; see `effective_rank`."""
        index = _rank_index(self.batch)
        kept = ~torch.isin(index % self.batch.length, torch.tensor(list(excluded_positions), dtype=torch.long))
        return [
            effective_rank(
                tokens[kept.to(tokens.device)], lambda note, layer=layer: fell_back(f"layer {layer}: {note}")
            )
            for layer, tokens in enumerate(self.rank_tokens)
        ]


def read_model(
    loaded: LoadedModel,
    batch: TokenBatch,
    *,
    keys: Sequence[int] | None = None,
    effective_rank: bool = True,
    chunk_tokens: int = CHUNK_TOKENS,
    progress: Progress | None = None,
) -> Reading:
    """Reads the whole chain of a causal language model on a batch of tokens; `keys` reads chosen key positions only."""
    anatomy = anatomy_of(loaded.model)
    keys_S = _checked_keys(keys, batch.length, anatomy.context)
    started_at = time.perf_counter()
    per_chunk = max(1, chunk_tokens // batch.length)
    chunks = batch.ids.split(per_chunk)
    check_chunks(len(chunks))
    rank_index = _rank_index(batch) if effective_rank else torch.empty(0, dtype=torch.long)
    num_passes = 1 if len(chunks) == 1 else 2 * len(chunks)
    done = 0

    def read(number: int, frozen: Frozen | None, *, survey: bool = False) -> Statistics:
        nonlocal done, path
        chunk, first_token = chunks[number], number * per_chunk * batch.length
        inside = (rank_index >= first_token) & (rank_index < first_token + chunk.numel())
        reader = ForwardReader(
            anatomy,
            (chunk.shape[0], chunk.shape[1]),
            keys=keys_S,
            across_sequences=batch.num_sequences > 1,
            chunked=len(chunks) > 1,
            frozen=frozen,
            rank_index=rank_index[:0] if survey else rank_index[inside] - first_token,
        )
        with without_autograd(loaded), evaluation_mode(loaded.model), reader.reading():
            anatomy.decoder(input_ids=chunk.to(input_device(anatomy)), use_cache=False)
            statistics = reader.statistics()
        path = reader.attention_path
        done += 1
        if progress is not None:
            progress(done, num_passes)
        return statistics

    path, frozen = "", None
    if len(chunks) > 1:
        frozen = _freeze((read(number, None, survey=True) for number in range(len(chunks))), keys_S)
    whole = read(0, frozen)
    for number in range(1, len(chunks)):
        whole = whole.merged(read(number, frozen))
    keys_S = torch.arange(batch.length) if keys_S is None else keys_S
    return _assembled(loaded.name, anatomy, batch, keys_S, path, whole, started_at)


def _rank_index(batch: TokenBatch) -> Tensor:
    """[n] the batch's first tokens, or evenly spaced ones of its first sequence where that is longer than all of
    them."""
    if batch.length > RANK_TOKENS:
        return torch.linspace(0, batch.length - 1, RANK_TOKENS).long()
    return torch.arange(min(RANK_TOKENS, batch.num_sequences * batch.length))


def _checked_keys(keys: Sequence[int] | None, length: int, context: int | None) -> Tensor | None:
    if length <= LATER_QUERIES:
        raise InputError(
            expected=f"at least {LATER_QUERIES + 1} tokens, so that some key has {LATER_QUERIES} later queries",
            found=f"length {length}",
            next_step="Give --length 64",
        )
    if context is not None and length > context:
        raise InputError(
            expected=f"at most {context} tokens, the model's context",
            found=f"length {length}",
            next_step=f"Give --length {context}",
        )
    if keys is None:
        return None
    wrong = [key for key in keys if not 0 <= key < length]
    if wrong or not keys:
        raise InputError(
            expected=f"key positions from 0 to {length - 1}",
            found=", ".join(map(str, wrong)) or "none",
            next_step="Give --keys 0,10 or a greater --length",
        )
    return torch.tensor(sorted(set(keys)), dtype=torch.long)


def without_autograd(loaded: LoadedModel) -> contextlib.AbstractContextManager:
    """Inference mode costs each operation less than no_grad, a sixth of what the host adds on a short text. But what a
    model keeps of such a pass (some rotary embeddings do) may never be trained through, so a model that its owner may
    train gets no_grad."""
    parameters = (p for module in _all_modules(loaded.model) for p in module._parameters.values() if p is not None)
    may_be_trained = loaded.source == "given" and any(parameter.requires_grad for parameter in parameters)
    return torch.no_grad() if may_be_trained else torch.inference_mode()


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Dropout off while reading, by this thread alone; each module's own mode is put back."""
    with sole_reader(model):
        training = [module for module in _all_modules(model) if module.training]
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True


def _all_modules(model: nn.Module) -> list[nn.Module]:
    """Several times faster than model.modules(), which makes each one's name."""
    modules: list[nn.Module] = [model]
    for module in modules:
        if module._modules:
            modules += [child for child in module._modules.values() if child is not None]
    return modules


def input_device(anatomy: Anatomy) -> torch.device:
    return anatomy.decoder.get_input_embeddings().weight.device


def _freeze(surveys: Iterator[Statistics], keys_S: Tensor | None) -> Frozen:
    """What all chunks together say: the same positions that one pass over the whole batch would have picked."""
    first = next(surveys)
    dom_ratio, received, values = first.sums["dom_ratio"], first.sums["received"], first.moments.get("value", [])
    for other in surveys:
        dom_ratio, received = dom_ratio + other.sums["dom_ratio"], received + other.sums["received"]
        values = [mine.merged(theirs) for mine, theirs in zip(values, other.moments.get("value", []), strict=True)]
    length = dom_ratio.shape[1]
    keys = torch.arange(length) if keys_S is None else keys_S
    so_far_LT = dom_ratio.new_zeros(received.shape[0], length)
    so_far_LT[:, keys] = (
        (received.sum(1) * eligible_positions(length)[keys].to(received.device)).cumsum(0).to(so_far_LT)
    )
    pointed_at = [point_at(dom_ratio[0], dom_ratio[0])]
    pointed_at += [point_at(ratio_T, received_T) for ratio_T, received_T in zip(dom_ratio[1:], so_far_LT, strict=True)]
    return Frozen([moments.variance for moments in values], pointed_at)


def _assembled(
    model_name: str,
    anatomy: Anatomy,
    batch: TokenBatch,
    keys_S: Tensor,
    attention_path: str,
    statistics: Statistics,
    started_at: float,
) -> Reading:
    check_finite(anatomy.decoder, statistics.largest["residual"][0], first_layer=-1)
    mean, moments = statistics.mean, statistics.moments
    by_position = {name: mean(name) for name in ("second_moment", "dom_ratio_normed")}
    by_position |= {name: mean(name) for name in ("entropy", "mixing", "averaging_law") if name in statistics.sums}
    for name in ("dom_ratio", "top_energy_share", "participation_ratio", "kurtosis"):
        by_position[name] = mean(name)[1:]
    largest, write = statistics.largest["residual"], statistics.largest["write"]
    by_position |= {"largest_residual": largest[0][1:], "largest_residual_dimension": largest[1][1:]}
    by_position |= {"largest_write": write[0], "largest_write_unit": write[1]}
    channel_variance = None
    if batch.num_sequences > 1:
        by_position["value_variance"] = _stack(moments["aggregation"], "variance")
        by_position["projected_variance"] = _stack(moments["projected"], "variance")
        by_position["cosine"] = cosine_from_deviation(
            _stack(moments["direction"], "deviation"), statistics.sums["num_states"], batch.num_sequences
        )
        num_deviations = batch.length * (batch.num_sequences - 1)
        channel_variance = _stack(moments["aggregation"], "channel_deviation") / num_deviations
    received = mean("received")
    return Reading(
        model_name=model_name,
        anatomy=anatomy,
        batch=batch,
        attention_path=attention_path,
        keys=keys_S,
        received=received,
        head_sink_rate=mean("sink_heads"),
        sequence_sink_rate=statistics.sink_heads_BS / (received.shape[0] * received.shape[1]),
        by_position=by_position,
        by_head={name: mean(f"head_{name}") for name in ("entropy", "mixing") if f"head_{name}" in statistics.sums},
        by_distance=mean("by_distance"),
        distances=distances(batch.length),
        channel_variance=channel_variance,
        lock_positions=_stack(statistics.lock_inputs, "positions_Q"),
        lock_inputs=statistics.lock_inputs,
        residual=_rows(statistics),
        rank_tokens=statistics.rank_tokens[1:],
        elapsed_s=time.perf_counter() - started_at,
    )


def _stack(layers: Sequence[Any], name: str) -> Tensor:
    return stacked({number: getattr(layer, name) for number, layer in enumerate(layers)})


def _rows(statistics: Statistics) -> list[ResidualRow]:
    sums = {name: statistics.sums[name].unbind() for name in ("dimension", "dimension_abs", "dimension_total")}
    return [
        ResidualRow(
            statistics.num_sequences,
            candidates_P,
            {name: values[row] for name, values in sums.items()} | (statistics.units[row - 1] if row else {}),
        )
        for row, candidates_P in enumerate(statistics.candidates.unbind())
    ]
