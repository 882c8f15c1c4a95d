"""Reads one forward pass layer by layer: each layer's activations are reduced when the layer ends and then let go.

What needs to be known before it can be read (which positions deserve their neurons in full, which dimensions are
massive, the variance of the values across the batch) is taken from what the pass has already seen; where a batch is
split into chunks, a first round over all chunks finds it and a second reads with it frozen.
Axes: B sequences, T positions, S keys read, H heads, K key-value heads, D head size, E width, U units, P candidate
positions, Q lock positions, R distances.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.capture.attention_readers import read_attention
from sinkscope.capture.attention_tap import CausalMask, attention_tap
from sinkscope.capture.layer_statistics import LayerStatistics, Moments
from sinkscope.capture.neuron_tap import LayerUnits
from sinkscope.capture.tiled_attention import AttentionRule, ReadingRequest
from sinkscope.kernels.token_statistics import token_statistics
from sinkscope.measures.dimension_disparity import MASSIVE_RATIO
from sinkscope.measures.sink_score import LATER_QUERIES, SINK_THRESHOLD
from sinkscope.models.anatomy import Anatomy, Layer

NUM_CANDIDATES = 12
"""Positions whose neurons and dimensions are kept in full at each layer: four each by attention received so far and
by DomRatio before and after the layer, and the earliest positions where these overlap."""
NUM_LOCK_POSITIONS = 4


@dataclass(frozen=True)
class Frozen:
    """What a first round over all chunks found about one layer."""

    value_variance_KS: Tensor | None
    candidates_P: Tensor
    lock_Q: Tensor


class ForwardReader:
    """The statistics of every layer for one chunk of sequences. Layer -1 is the residual stream that enters layer 0."""

    def __init__(
        self,
        anatomy: Anatomy,
        shape: tuple[int, int],
        *,
        keys: Tensor | None,
        across_sequences: bool,
        frozen: dict[int, Frozen] | None = None,
        rank_index: Tensor,
    ) -> None:
        self.anatomy = anatomy
        self.num_sequences, self.length = shape
        self.keys = keys
        self.across_sequences = across_sequences
        """Whether the whole batch, of which this is a chunk, has more than one sequence."""
        self.frozen = frozen
        self.request = ReadingRequest(keys=keys, distances=distances(self.length))
        self.statistics: dict[int, LayerStatistics] = {}
        self.rank_tokens: dict[int, Tensor] = {}
        self.rank_index = rank_index
        """Tokens of this chunk that the effective rank is taken over."""
        self.sink_heads_BS: Tensor | None = None
        """[B, S] how many heads of all layers so far count each key as their sink."""
        self.attention_path = ""
        self._received_T: Tensor | None = None
        self._dom_ratio_T: Tensor | None = None
        self._pending: dict[str, Any] = {}
        self._massive_BQE: Tensor
        self._rekeying = False
        self._layer: LayerStatistics
        """The layer that is being read; set when its block is entered."""

    @contextlib.contextmanager
    def reading(self) -> Iterator[dict]:
        """Opens every tap; yields the arguments that the forward call needs beside the tokens."""
        with contextlib.ExitStack() as stack:
            for layer in self.anatomy.layers:
                units = LayerUnits(layer)
                handles = [
                    layer.block.register_forward_pre_hook(self._enter_block(layer), with_kwargs=True),
                    layer.attention.register_forward_pre_hook(self._enter_attention, with_kwargs=True),
                    layer.output_projection.register_forward_hook(self._leave_output_projection),
                    layer.attention.register_forward_hook(self._leave_attention(layer), with_kwargs=True),
                    layer.block.register_forward_hook(self._leave_block(layer, units)),
                    *units.hooks(),
                ]
                for handle in handles:
                    stack.callback(handle.remove)
            yield stack.enter_context(attention_tap(self.anatomy, self._on_attention))

    def _enter_block(self, layer: Layer):
        def hook(module, args, kwargs) -> None:
            if layer.index == 0:
                self._read_residual(-1, args[0] if args else kwargs["hidden_states"])
            self._layer = self._new_statistics(layer.index)

        return hook

    def _enter_attention(self, module, args, kwargs) -> None:
        if self._rekeying:
            return
        state_BTE = args[0] if args else kwargs["hidden_states"]
        self._pending["normed_state"] = state_BTE
        if self.across_sequences:
            self._layer.moments["direction"] = Moments.of(nn.functional.normalize(state_BTE.float(), dim=-1))
        tokens = token_statistics(state_BTE.flatten(0, 1), columns=False)
        self._layer.sums["dom_ratio_normed"] = self._by_position(tokens.largest / tokens.mean_abs)

    def _on_attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        if self._rekeying:
            self._pending["key_without"] = key
            return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
        request, out = self.request, self._layer
        if self.across_sequences:
            out.moments["value"] = Moments.of(value)
            variance_KS = out.moments["value"].variance if self.frozen is None else self.frozen[layer].value_variance_KS
            request = replace(request, key_weights=variance_KS)
        reading, self.attention_path = read_attention(query, key, value, rule, request)

        positions = torch.arange(self.length, device=key.device) if self.keys is None else self.keys.to(key.device)
        alpha_BHS = reading.received / (self.length - positions)
        counted_BHS = alpha_BHS > SINK_THRESHOLD
        out.sums["received"], out.sums["sink_heads"] = alpha_BHS.sum(0), counted_BHS.sum(0)
        heads_BS = counted_BHS.sum(1)
        self.sink_heads_BS = (
            heads_BS if self.sink_heads_BS is None else self.sink_heads_BS.to(heads_BS.device) + heads_BS
        )
        out.sums["by_distance"] = reading.by_distance.sum(0)
        if reading.entropy is not None and reading.mixing is not None:
            out.sums["entropy"], out.sums["head_entropy"] = (
                reading.entropy.sum(0).mean(0),
                reading.entropy.sum(0).mean(-1),
            )
            out.sums["mixing"], out.sums["head_mixing"] = reading.mixing.sum(0).mean(0), reading.mixing.sum(0).mean(-1)
        if reading.weighted_mixing is not None:
            out.sums["averaging_law"] = reading.weighted_mixing.sum(0).mean(0)

        if self._received_T is None:
            self._received_T = torch.zeros(self.length, device=key.device)
        self._received_T = self._received_T.to(key.device).index_add(0, positions, alpha_BHS.sum(0).mean(0).float())
        self._read_lock(layer, query, key)
        return reading.output

    def _read_lock(self, layer: int, query_BHTD: Tensor, key_BKSD: Tensor) -> None:
        """Which queries agree in sign with the keys of the lock positions, and the queries' sum, for
        `_leave_attention`."""
        positions_Q = self.statistics[layer - 1].lock_positions.to(key_BKSD.device)
        groups = query_BHTD.shape[1] // key_BKSD.shape[1]
        keys_BHQD = key_BKSD[:, :, positions_Q].repeat_interleave(groups, dim=1)
        later_QT = torch.arange(self.length, device=key_BKSD.device)[None, :] >= positions_Q[:, None]
        agree_BHTQ = torch.matmul(query_BHTD, keys_BHQD.transpose(2, 3)) > 0
        self._layer.sums["positive_queries"] = (agree_BHTQ & later_QT.T).sum(2).sum(0) / later_QT.sum(1)
        query_sum_BHQD = torch.matmul(later_QT.to(query_BHTD.dtype), query_BHTD).float()
        self._pending["lock"] = (positions_Q, query_sum_BHQD, groups)
        self._layer.sums["lock_all"] = (query_sum_BHQD * keys_BHQD).sum((0, -1))

    def _leave_output_projection(self, module, args, output) -> None:
        if self._rekeying:
            return
        aggregation_BTC = args[0].view(self.num_sequences, self.length, -1)
        energy_BT = torch.linalg.vector_norm(
            aggregation_BTC, dim=-1, dtype=torch.promote_types(output.dtype, torch.float32)
        ).square_()
        self._layer.sums["second_moment"] = energy_BT.sum(0) / aggregation_BTC.shape[-1]
        if self.across_sequences:
            self._layer.moments["aggregation"] = Moments.of(aggregation_BTC)
            self._layer.moments["projected"] = Moments.of(output.view(self.num_sequences, self.length, -1))

    def _leave_attention(self, layer: Layer):
        """The lock: how much of q . k is gone when the massive dimensions of the normalised state are set to zero."""

        def hook(module, args, kwargs, output) -> None:
            if self._rekeying:
                return
            state_BTE = self._pending.pop("normed_state")
            positions_Q, query_sum_BHQD, groups = self._pending.pop("lock")
            massive_BQE = self._massive_BQE.to(state_BTE.device)
            edited = state_BTE[:, positions_Q].masked_fill(massive_BQE, 0)
            call_args, call_kwargs = _at_positions((args, kwargs), positions_Q, self.length)
            if args:
                call_args = (edited, *call_args[1:])
            else:
                call_kwargs["hidden_states"] = edited
            self._rekeying = True
            try:
                module.forward(*call_args, **call_kwargs)
            finally:
                self._rekeying = False
            key_BHQD = self._pending.pop("key_without").repeat_interleave(groups, dim=1)
            self._layer.sums["lock_without"] = (query_sum_BHQD * key_BHQD).sum((0, -1))
            self._layer.sums["lock_massive"] = massive_BQE.any(-1).sum(0)

        return hook

    def _leave_block(self, layer: Layer, units: LayerUnits):
        def hook(module, args, output) -> None:
            hidden_BTE = output[0] if isinstance(output, tuple) else output
            self._read_residual(layer.index, hidden_BTE)
            self._read_units(layer.index, units)
            units.__init__(layer)

        return hook

    def _read_residual(self, layer: int, hidden_BTE: Tensor) -> None:
        out = self._layer if layer >= 0 else self._new_statistics(layer)
        tokens = token_statistics(hidden_BTE.flatten(0, 1))
        ratio_N = tokens.largest / tokens.mean_abs
        out.sums["dom_ratio"] = self._by_position(ratio_N)
        out.sums["top_energy_share"] = self._by_position(tokens.largest.square() / tokens.energy)
        out.sums["participation_ratio"] = self._by_position(tokens.participation_ratio)
        out.sums["kurtosis"] = self._by_position(tokens.kurtosis)
        out.largest["residual"] = self._largest_by_position(tokens.largest, tokens.argmax)
        out.sums["dimension_total"] = tokens.column_abs

        before_T, self._dom_ratio_T = self._dom_ratio_T, out.sums["dom_ratio"]
        if self.frozen is not None:
            out.candidates, out.lock_positions = self.frozen[layer].candidates_P, self.frozen[layer].lock_Q
        else:
            out.candidates, out.lock_positions = choose_positions(self._dom_ratio_T, before_T, self._received_T)
        chosen_BPE = hidden_BTE[:, out.candidates].float()
        out.sums["dimension_abs"], out.sums["dimension"] = chosen_BPE.abs().sum(0), chosen_BPE.sum(0)
        at_lock_BQE = hidden_BTE[:, out.lock_positions].abs()
        self._massive_BQE = at_lock_BQE >= MASSIVE_RATIO * at_lock_BQE.mean(-1, keepdim=True)
        if len(self.rank_index):
            self.rank_tokens[layer] = hidden_BTE.flatten(0, 1)[self.rank_index.to(hidden_BTE.device)]

    def _read_units(self, layer: int, units: LayerUnits) -> None:
        if not units.complete:
            raise RuntimeError(
                f"layer {layer} passed no neurons to its down projection: its row in the family table is wrong"
            )
        out = self.statistics[layer]
        reading = units.read()
        out.largest["write"] = self._largest_by_position(reading.top_write, reading.top_unit)
        out.sums["unit_energy"] = reading.energy
        device = out.candidates.device
        tokens = (torch.arange(self.num_sequences, device=device)[:, None] * self.length + out.candidates).flatten()
        chosen_BPU = units.at(tokens).unflatten(0, (self.num_sequences, -1))
        out.sums["unit_activation"] = chosen_BPU.sum(0)
        out.sums["unit_square"] = chosen_BPU.square().sum(0)
        if units.write_scale_N is not None:
            written_BPU = chosen_BPU * units.write_scale_N[tokens].view(self.num_sequences, -1, 1)
            out.sums["unit_written"], out.sums["unit_written_square"] = written_BPU.sum(0), written_BPU.square_().sum(0)

    def _new_statistics(self, layer: int) -> LayerStatistics:
        nowhere = torch.empty(0, dtype=torch.long)
        self.statistics[layer] = LayerStatistics(self.num_sequences, nowhere, nowhere)
        return self.statistics[layer]

    def _by_position(self, values_N: Tensor) -> Tensor:
        return values_N.view(self.num_sequences, self.length).sum(0)

    def _largest_by_position(self, values_N: Tensor, index_N: Tensor) -> tuple[Tensor, Tensor]:
        largest_T, sequence_T = values_N.view(self.num_sequences, self.length).max(0)
        return largest_T, index_N.view(self.num_sequences, self.length).gather(0, sequence_T[None]).squeeze(0)


def distances(length: int) -> tuple[int, ...]:
    """How far back attention by distance is read: 0 to 4, then powers of two."""
    return tuple(d for d in (0, 1, 2, 3, 4, *(2**power for power in range(3, 40))) if d < length)


def choose_positions(
    dom_ratio_T: Tensor, dom_ratio_before_T: Tensor | None, received_T: Tensor | None
) -> tuple[Tensor, Tensor]:
    """([P] sorted positions to keep in full, [Q] those of them with the largest DomRatio, where a lock can be)."""
    length, device = len(dom_ratio_T), dom_ratio_T.device
    # Earlier positions win among those that nothing points at.
    score_T = -torch.arange(length, device=device, dtype=torch.float32) / length
    if received_T is not None:
        received_T = received_T.to(device) * (torch.arange(length, device=device) < length - LATER_QUERIES)
    for signal_T in (dom_ratio_T, dom_ratio_before_T, received_T):
        if signal_T is not None:
            score_T[signal_T.to(device).topk(min(4, length)).indices] += 2
    candidates_P = score_T.topk(min(NUM_CANDIDATES, length)).indices.sort().values
    return candidates_P, candidates_P[
        dom_ratio_T[candidates_P].topk(min(NUM_LOCK_POSITIONS, len(candidates_P))).indices
    ]


def _at_positions(value: Any, positions_Q: Tensor, length: int) -> Any:
    """The arguments of an attention call restricted to some positions: whatever has the length of the text is cut."""
    if isinstance(value, CausalMask):
        return CausalMask(None)
    if isinstance(value, tuple | list):
        return type(value)(_at_positions(item, positions_Q, length) for item in value)
    if isinstance(value, dict):
        return {name: _at_positions(item, positions_Q, length) for name, item in value.items()}
    if isinstance(value, Tensor) and value.ndim >= 2 and value.shape[1] == length:
        return value.index_select(1, positions_Q.to(value.device))
    if isinstance(value, Tensor) and value.ndim == 1 and value.shape[0] == length:
        return value.index_select(0, positions_Q.to(value.device))
    return value
