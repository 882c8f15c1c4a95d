"""Reads one forward pass layer by layer: each layer's activations are reduced when the layer ends and then let go.

During the pass little more is done than to reduce activations, since on a short text every further operation costs as
much as the model's own; the reduced tensors of all layers are put together at the end.
What needs to be known before it can be read (which positions deserve their neurons in full, the variance of the
values across the batch) is taken from what the pass has already seen; where a batch is split into chunks, a first
round over all chunks finds it and a second reads with it frozen.
Axes: B sequences, T positions, N = B * T tokens, S keys read, H heads, K key-value heads, D head size, E width, U
units, L layers, P candidate positions, Q lock positions, R distances.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.capture.attention_readers import read_attention
from sinkscope.capture.attention_tap import attention_tap
from sinkscope.capture.layer_statistics import Moments, Statistics, stacked
from sinkscope.capture.lock import LOCK_SEQUENCES, LockInput
from sinkscope.capture.neuron_tap import LayerUnits
from sinkscope.capture.tiled_attention import AttentionRule, ReadingRequest, sampled_queries
from sinkscope.kernels.token_statistics import token_statistics
from sinkscope.measures.sink_score import SINK_THRESHOLD
from sinkscope.models.anatomy import Anatomy, Layer

NUM_LOCK_POSITIONS = 4
"""Positions of the largest DomRatio that are looked at in full in each layer."""


@dataclass(frozen=True)
class Frozen:
    """What a first round over all chunks found."""

    value_variance_KS: list[Tensor]
    """By layer; empty for a batch of one sequence."""
    dominant_Q: list[Tensor]
    """Positions of the largest DomRatio, for the stream entering layer 0 and for each layer."""


class ForwardReader:
    """The statistics of every layer for one chunk of sequences."""

    def __init__(
        self,
        anatomy: Anatomy,
        shape: tuple[int, int],
        *,
        keys: Tensor | None,
        across_sequences: bool,
        rank_index: Tensor,
        frozen: Frozen | None = None,
    ) -> None:
        self.anatomy = anatomy
        self.num_sequences, self.length = shape
        self.keys = keys
        self.across_sequences = across_sequences
        """Whether the whole batch, of which this is a chunk, has more than one sequence."""
        self.frozen = frozen
        self.request = ReadingRequest(keys=keys, distances=distances(self.length))
        self.rank_index = rank_index
        """Tokens of this chunk that the effective rank is taken over."""
        self.attention_path = ""
        self.silent_layers = {layer.index for layer in anatomy.layers}
        self._kept: dict[str, list[Any]] = defaultdict(list)
        """Reduced tensors by name, one of each layer in order; of the residual also that entering layer 0."""
        self._attention_call: tuple[Tensor, tuple[tuple, dict[str, Any]]]
        """The state that enters the attention that is about to run, and the call's other arguments."""
        self._constants: dict[tuple[torch.device, str], Tensor] = {}

    @contextlib.contextmanager
    def reading(self) -> Iterator[dict]:
        """Opens every tap; yields the arguments that the forward call needs beside the tokens."""
        with contextlib.ExitStack() as stack:
            first = self.anatomy.layers[0].block.register_forward_pre_hook(self._enter_first_block, with_kwargs=True)
            stack.callback(first.remove)
            for layer in self.anatomy.layers:
                units = LayerUnits(layer)
                handles = [
                    layer.attention.register_forward_pre_hook(self._enter_attention, with_kwargs=True),
                    layer.output_projection.register_forward_hook(self._leave_output_projection),
                    layer.block.register_forward_hook(self._leave_block(layer, units)),
                    *units.hooks(),
                ]
                for handle in handles:
                    stack.callback(handle.remove)
            yield stack.enter_context(attention_tap(self.anatomy, self._on_attention))

    def _enter_first_block(self, module, args, kwargs) -> None:
        self._read_residual(args[0] if args else kwargs["hidden_states"])

    def _enter_attention(self, module, args, kwargs) -> None:
        state_BTE = args[0] if args else kwargs["hidden_states"]
        if self.across_sequences:
            self._kept["direction"].append(Moments.of(nn.functional.normalize(state_BTE.float(), dim=-1)))
        self._kept["state_largest"].append(torch.linalg.vector_norm(state_BTE, ord=torch.inf, dim=-1))
        self._kept["state_total"].append(torch.linalg.vector_norm(state_BTE, ord=1, dim=-1, dtype=_wide(state_BTE)))
        rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        self._attention_call = (state_BTE, (args[1:], rest))

    def _on_attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        self.silent_layers.discard(layer)
        request, keys_S = self.request, self.keys
        if keys_S is not None:
            request = replace(request, keys=self._on(key.device, "keys", lambda: keys_S))
        if self.across_sequences:
            self._kept["value"].append(Moments.of(value))
            known = self._kept["value"][-1].variance if self.frozen is None else self.frozen.value_variance_KS[layer]
            request = replace(request, key_weights=known)
        reading, self.attention_path = read_attention(query, key, value, rule, request)
        for name in ("received", "by_distance", "entropy", "mixing", "weighted_mixing"):
            if (values := getattr(reading, name)) is not None:
                self._kept[name].append(values)
        self._keep_lock_rows(query, key)
        return reading.output

    def _keep_lock_rows(self, query_BHTD: Tensor, key_BKSD: Tensor) -> None:
        state_BTE, call = self._attention_call
        del self._attention_call
        some = slice(LOCK_SEQUENCES)
        positions_Q = self._kept["dominant"][-1].to(key_BKSD.device)
        queries_n = sampled_queries(self.length, key_BKSD.device)
        rows = LockInput(
            positions_Q=positions_Q,
            queries_n=queries_n,
            residual_BQE=self._kept["dominant_rows"][-1],
            state_BQE=state_BTE[some, positions_Q],
            query_BHnD=query_BHTD[some, :, queries_n],
            key_BKQD=key_BKSD[some, :, positions_Q],
            length=self.length,
            call=call,
        )
        self._kept["lock"].append(rows)

    def _leave_output_projection(self, module, args, output) -> None:
        aggregation_BTC = args[0].view(self.num_sequences, self.length, -1)
        norm_BT = torch.linalg.vector_norm(aggregation_BTC, dim=-1, dtype=_wide(output))
        self._kept["aggregation_norm"].append(norm_BT)
        self.aggregation_channels = aggregation_BTC.shape[-1]
        if self.across_sequences:
            self._kept["aggregation"].append(Moments.of(aggregation_BTC))
            self._kept["projected"].append(Moments.of(output.view(self.num_sequences, self.length, -1)))

    def _leave_block(self, layer: Layer, units: LayerUnits):
        def hook(module, args, output) -> None:
            self._read_residual(output[0] if isinstance(output, tuple) else output)
            self._read_units(layer.index, units)
            units.clear()

        return hook

    def _read_residual(self, hidden_BTE: Tensor) -> None:
        kept, row = self._kept, len(self._kept["dominant"])
        tokens = token_statistics(hidden_BTE.flatten(0, 1))
        for name in ("largest", "argmax", "energy", "kurtosis", "participation_ratio", "column_abs"):
            kept[name].append(getattr(tokens, name))
        kept["dom_ratio"].append(tokens.largest / tokens.mean_abs)
        if self.frozen is None:
            ratio_T = self._total(kept["dom_ratio"][-1].view(self.num_sequences, self.length))
            kept["dominant"].append(ratio_T.topk(NUM_LOCK_POSITIONS).indices)
        else:
            kept["dominant"].append(self.frozen.dominant_Q[row])
        # The first positions too: where nothing stands out, they are what a reader looks for.
        first_Q = self._on(hidden_BTE.device, "first", lambda: torch.arange(NUM_LOCK_POSITIONS))
        before_Q = kept["dominant"][max(row - 1, 0)].to(hidden_BTE.device)
        candidates_P = torch.cat([first_Q, before_Q, kept["dominant"][row]])
        kept["candidates"].append(candidates_P)
        kept["candidate_rows"].append(hidden_BTE[:, candidates_P])
        kept["dominant_rows"].append(kept["candidate_rows"][-1][:LOCK_SEQUENCES, -NUM_LOCK_POSITIONS:])
        if len(self.rank_index):
            kept["rank_tokens"].append(hidden_BTE.flatten(0, 1)[self.rank_index.to(hidden_BTE.device)])

    def _read_units(self, layer: int, units: LayerUnits) -> None:
        if not units.complete:
            raise RuntimeError(
                f"layer {layer} passed no neurons to its down projection: its row in the family table is wrong"
            )
        reading, candidates_P = units.read(), self._kept["candidates"][-1]
        self._kept["write"].append(reading.top_write)
        self._kept["write_unit"].append(reading.top_unit)
        tokens = candidates_P
        if self.num_sequences > 1:
            starts = self._on(
                candidates_P.device, "starts", lambda: torch.arange(self.num_sequences)[:, None] * self.length
            )
            tokens = (starts + candidates_P).flatten()
        chosen_BPU = units.at(tokens).unflatten(0, (self.num_sequences, -1))
        sums = {"unit_energy": reading.energy, "unit_activation": self._total(chosen_BPU)}
        sums["unit_square"] = self._total(chosen_BPU.square())
        if units.write_scale_N is not None:
            written_BPU = chosen_BPU * units.write_scale_N[tokens].view(self.num_sequences, -1, 1)
            sums["unit_written"], sums["unit_written_square"] = (
                self._total(written_BPU),
                self._total(written_BPU.square()),
            )
        self._kept["units"].append(sums)

    def statistics(self) -> Statistics:
        """Everything that was kept, put together; the reader is empty afterwards."""
        if self.silent_layers:
            raise RuntimeError(
                f"layers {sorted(self.silent_layers)} reported no attention: the row of family "
                f"{self.anatomy.family.name} is wrong"
            )
        kept, shape = self._kept, (-1, self.num_sequences, self.length)
        sums: dict[str, Tensor] = {}
        alpha_LBHS = stacked(kept.pop("received"))
        keys_S = torch.arange(self.length) if self.keys is None else self.keys
        alpha_LBHS /= (self.length - keys_S).to(alpha_LBHS.device)
        counted_LBHS = alpha_LBHS > SINK_THRESHOLD
        sums["received"], sums["sink_heads"] = self._total(alpha_LBHS, 1), self._total(counted_LBHS, 1)
        for name in ("entropy", "mixing"):
            if name in kept:
                value_LHT = self._total(stacked(kept.pop(name)), 1)
                sums[name], sums[f"head_{name}"] = value_LHT.mean(1), value_LHT.mean(2)
        if "weighted_mixing" in kept:
            sums["averaging_law"] = self._total(stacked(kept.pop("weighted_mixing")), 1).mean(1)
        sums["by_distance"] = self._total(stacked(kept["by_distance"]), 1)
        sums["second_moment"] = self._total(stacked(kept["aggregation_norm"]).square(), 1) / self.aggregation_channels
        state_ratio = stacked(kept["state_largest"]).to(kept["state_total"][0].dtype) / stacked(kept["state_total"])
        sums["dom_ratio_normed"] = self._total(state_ratio, 1) * self.anatomy.width

        largest_LBT, energy_LBT = (stacked(kept[name]).view(shape) for name in ("largest", "energy"))
        sums["top_energy_share"] = self._total(largest_LBT.square() / energy_LBT, 1)
        for name in ("dom_ratio", "participation_ratio", "kurtosis"):
            sums[name] = self._total(stacked(kept[name]).view(shape), 1)
        sums["dimension_total"] = stacked(kept["column_abs"])
        rows_LBPE = stacked(kept["candidate_rows"]).float()
        sums["dimension"], sums["dimension_abs"] = self._total(rows_LBPE, 1), self._total(rows_LBPE.abs(), 1)
        return Statistics(
            num_sequences=self.num_sequences,
            sums=sums,
            largest={
                "residual": self._largest(largest_LBT, stacked(kept["argmax"]).view(shape)),
                "write": self._largest(*(stacked(kept[name]).view(shape) for name in ("write", "write_unit"))),
            },
            moments={n: kept[n] for n in ("direction", "value", "aggregation", "projected") if n in kept},
            units=kept["units"],
            candidates=stacked(kept["candidates"]),
            sink_heads_BS=counted_LBHS.sum((0, 2)),
            lock_inputs=kept["lock"],
            rank_tokens=kept["rank_tokens"],
        )

    def _total(self, values: Tensor, dim: int = 0) -> Tensor:
        """Sum over sequences; of one sequence it is a view, since a launch costs as much as a short text's reading."""
        return values.select(dim, 0) if self.num_sequences == 1 else values.sum(dim)

    def _largest(self, values_LBT: Tensor, index_LBT: Tensor) -> tuple[Tensor, Tensor]:
        largest_LT, sequence_LT = values_LBT.max(1)
        return largest_LT, index_LBT.gather(1, sequence_LT[:, None]).squeeze(1)

    def _on(self, device: torch.device, name: str, make: Callable[[], Tensor]) -> Tensor:
        """A tensor that every layer needs, made once for each device: a copy from the host would make layers wait."""
        if (device, name) not in self._constants:
            self._constants[device, name] = make().to(device)
        return self._constants[device, name]


def distances(length: int) -> tuple[int, ...]:
    """How far back attention by distance is read: 0 to 4, then powers of two."""
    return tuple(d for d in (0, 1, 2, 3, 4, *(2**power for power in range(3, 40))) if d < length)


def _wide(values: Tensor) -> torch.dtype:
    """The dtype that sums over a tensor are held in."""
    return torch.promote_types(values.dtype, torch.float32)
