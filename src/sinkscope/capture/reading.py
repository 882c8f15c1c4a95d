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
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sinkscope.capture.forward_reader import ForwardReader, Frozen, choose_positions
from sinkscope.capture.layer_statistics import LayerStatistics
from sinkscope.errors import InputError
from sinkscope.measures.dimension_disparity import effective_rank
from sinkscope.measures.sink_score import LATER_QUERIES
from sinkscope.models.anatomy import Anatomy, anatomy_of
from sinkscope.models.loading import LoadedModel
from sinkscope.models.token_batches import TokenBatch

RANK_TOKENS = 1024
"""Tokens that the effective rank of a layer is taken over."""
CHUNK_TOKENS = 1 << 17
"""Tokens in one forward pass: as many as one long context, so memory is what the longest text would need."""

Progress = Callable[[int, int], None]
"""Called with (forward passes done, forward passes in all)."""


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
    """[L, H, R] mean attention on the key each distance back, over at most 1,024 queries that have one."""
    distances: tuple[int, ...]
    channel_variance: Tensor | None
    """[L, C] variance of each channel of the value aggregation across sequences, averaged over positions."""
    lock_positions: Tensor
    """[L, Q] positions that the lock was read at."""
    positive_queries: Tensor
    """[L, H, Q] share of queries with a positive q . k on each lock position."""
    lock_share: Tensor
    """[L, H, Q] share of q . k, summed over queries, that is gone without the massive dimensions; NaN where there are
    none."""
    residual: list[LayerStatistics]
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

    def effective_ranks(self, excluded_positions: Sequence[int] = ()) -> list[float]:
        """The effective rank of each layer's tokens, without the tokens at some positions."""
        index = _rank_index(self.batch)
        kept = ~torch.isin(index % self.batch.length, torch.tensor(list(excluded_positions), dtype=torch.long))
        return [effective_rank(tokens[kept.to(tokens.device)]) for tokens in self.rank_tokens]


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
    rank_index = _rank_index(batch) if effective_rank else torch.empty(0, dtype=torch.long)
    num_passes = 1 if len(chunks) == 1 else 2 * len(chunks)
    done = 0

    def read(number: int, frozen: dict[int, Frozen] | None, *, survey: bool = False) -> ForwardReader:
        nonlocal done
        chunk, first_token = chunks[number], number * per_chunk * batch.length
        inside = (rank_index >= first_token) & (rank_index < first_token + chunk.numel())
        reader = ForwardReader(
            anatomy,
            (chunk.shape[0], chunk.shape[1]),
            keys=keys_S,
            across_sequences=batch.num_sequences > 1,
            frozen=frozen,
            rank_index=rank_index[:0] if survey else rank_index[inside] - first_token,
        )
        with torch.no_grad(), _evaluation_mode(loaded.model), reader.reading() as inputs:
            anatomy.decoder(input_ids=chunk.to(_input_device(anatomy)), use_cache=False, **inputs)
        done += 1
        if progress is not None:
            progress(done, num_passes)
        return reader

    frozen = None if len(chunks) == 1 else _freeze(read(number, None, survey=True) for number in range(len(chunks)))
    whole = read(0, frozen)
    for number in range(1, len(chunks)):
        _merge(whole, read(number, frozen))
    return _assembled(loaded.name, anatomy, batch, keys_S, whole, started_at)


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
    return torch.tensor(sorted(set(keys)))


@contextlib.contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Dropout off while reading; each module's own mode is put back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _input_device(anatomy: Anatomy) -> torch.device:
    return anatomy.decoder.get_input_embeddings().weight.device


def _merge(first: ForwardReader, second: ForwardReader) -> None:
    """Adds the second chunk's statistics to the first's."""
    for layer, statistics in first.statistics.items():
        first.statistics[layer] = statistics.merged(second.statistics[layer])
    assert first.sink_heads_BS is not None
    assert second.sink_heads_BS is not None
    first.sink_heads_BS = torch.cat([first.sink_heads_BS, second.sink_heads_BS])
    for layer, tokens in second.rank_tokens.items():
        first.rank_tokens[layer] = torch.cat([first.rank_tokens[layer], tokens])


def _freeze(readers: Iterator[ForwardReader]) -> dict[int, Frozen]:
    """What all chunks together say about each layer: the same positions that one pass over the whole batch would have
    picked."""
    survey: dict[int, LayerStatistics] = {}
    for reader in readers:
        for layer, statistics in reader.statistics.items():
            # Chunks pick positions of their own in this round, so only what every chunk reads alike is kept.
            nowhere = statistics.candidates[:0]
            part = LayerStatistics(statistics.num_sequences, nowhere, nowhere)
            part.sums = {name: statistics.sums[name] for name in ("dom_ratio", "received") if name in statistics.sums}
            part.moments = {name: statistics.moments[name] for name in ("value",) if name in statistics.moments}
            survey[layer] = survey[layer].merged(part) if layer in survey else part
        keys_S = reader.keys
    frozen, before_T, received_T = {}, None, None
    for layer, statistics in survey.items():
        dom_ratio_T = statistics.sums["dom_ratio"]
        if "received" in statistics.sums:
            received_T = torch.zeros_like(dom_ratio_T) if received_T is None else received_T.to(dom_ratio_T.device)
            positions = slice(None) if keys_S is None else keys_S
            received_T[positions] += statistics.sums["received"].mean(0)
        candidates_P, lock_Q = choose_positions(dom_ratio_T, before_T, received_T)
        variance_KS = statistics.moments["value"].variance if "value" in statistics.moments else None
        frozen[layer] = Frozen(variance_KS, candidates_P, lock_Q)
        before_T = dom_ratio_T
    return frozen


def _assembled(
    model_name: str,
    anatomy: Anatomy,
    batch: TokenBatch,
    keys_S: Tensor | None,
    reader: ForwardReader,
    started_at: float,
) -> Reading:
    layers = [reader.statistics[layer.index] for layer in anatomy.layers]
    silent = [
        layer.index
        for layer, statistics in zip(anatomy.layers, layers, strict=True)
        if "received" not in statistics.sums
    ]
    sink_heads_BS = reader.sink_heads_BS
    if silent or sink_heads_BS is None:
        raise RuntimeError(f"layers {silent} reported no attention: the row of family {anatomy.family.name} is wrong")

    def stacked(values: list[Tensor]) -> Tensor:
        # One transfer for all layers: many small ones would cost more than the reading on a short text.
        devices = {value.device for value in values}
        return torch.stack(values if len(devices) == 1 else [value.cpu() for value in values]).cpu()

    def mean(sum_name: str) -> Tensor:
        return stacked([statistics.sums[sum_name] for statistics in layers]) / batch.num_sequences

    names = [
        *("second_moment", "dom_ratio", "dom_ratio_normed", "top_energy_share", "participation_ratio", "kurtosis"),
        *(name for name in ("entropy", "mixing", "averaging_law") if name in layers[0].sums),
    ]
    by_position = {name: mean(name) for name in names}
    for name, place in (("residual", "dimension"), ("write", "unit")):
        by_position[f"largest_{name}"] = stacked([statistics.largest[name][0] for statistics in layers])
        by_position[f"largest_{name}_{place}"] = stacked([statistics.largest[name][1] for statistics in layers])
    channel_variance = None
    if batch.num_sequences > 1:
        by_position["value_variance"] = stacked([statistics.moments["aggregation"].variance for statistics in layers])
        by_position["projected_variance"] = stacked([statistics.moments["projected"].variance for statistics in layers])
        by_position["cosine"] = stacked([statistics.moments["direction"].mean_cosine for statistics in layers])
        channel_variance = stacked([s.moments["aggregation"].channel_deviation for s in layers]) / (
            batch.length * (batch.num_sequences - 1)
        )
    lock_all, lock_without = mean("lock_all"), mean("lock_without")
    lock_share = torch.where(mean("lock_massive")[:, None] > 0, 1 - lock_without / lock_all, float("nan"))
    before = [reader.statistics[layer.index - 1] for layer in anatomy.layers]
    num_heads_in_all = len(layers) * layers[0].sums["received"].shape[0]
    return Reading(
        model_name=model_name,
        anatomy=anatomy,
        batch=batch,
        attention_path=reader.attention_path,
        keys=torch.arange(batch.length) if keys_S is None else keys_S,
        received=mean("received"),
        head_sink_rate=mean("sink_heads"),
        sequence_sink_rate=sink_heads_BS.cpu() / num_heads_in_all,
        by_position=by_position,
        by_head={name: mean(f"head_{name}") for name in ("entropy", "mixing") if f"head_{name}" in layers[0].sums},
        by_distance=mean("by_distance"),
        distances=reader.request.distances,
        channel_variance=channel_variance,
        lock_positions=stacked([statistics.lock_positions for statistics in before]),
        positive_queries=mean("positive_queries"),
        lock_share=lock_share,
        residual=[statistics.without_means() for statistics in reader.statistics.values()],
        rank_tokens=[reader.rank_tokens[layer.index] for layer in anatomy.layers] if reader.rank_tokens else [],
        elapsed_s=time.perf_counter() - started_at,
    )
