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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.capture.attention_readers import read_attention
from sinkscope.capture.attention_request import AttentionRule, ReadingRequest, distances, sampled_queries
from sinkscope.capture.attention_tap import attention_tap
from sinkscope.capture.block_calls import entering, leaving
from sinkscope.capture.layer_statistics import (
    Moments,
    Statistics,
    joined,
    largest_over_sequences,
    stacked,
    stacked_together,
)
from sinkscope.capture.lock import LOCK_SEQUENCES, LockInput
from sinkscope.capture.neuron_tap import LayerUnits
from sinkscope.capture.side_stream import SideStream
from sinkscope.capture.sole_reader import in_this_thread
from sinkscope.kernels.standout import add_received, candidates, joined_candidates
from sinkscope.kernels.token_means import token_dom_ratio, token_mean_square
from sinkscope.kernels.token_statistics import token_statistics
from sinkscope.measures.sink_score import SINK_THRESHOLD, eligible_positions
from sinkscope.models.anatomy import Anatomy

NUM_LOCK_POSITIONS = 4
"""Positions of the largest DomRatio before a layer at which its lock is read."""
LAYER_NAMES = (
    *("received", "by_distance", "entropy", "mixing", "weighted_mixing", "second_moment"),
    *("state_ratio", "write", "write_unit"),
)
RESIDUAL_NAMES = (
    *("largest", "argmax", "energy", "mean_abs", "kurtosis", "participation_ratio", "column_abs"),
    "candidate_rows",
)
TOKEN_NAMES = (
    *("largest", "energy", "mean_abs", "kurtosis", "participation_ratio", "state_ratio", "second_moment", "write"),
    *("argmax", "write_unit"),
)
"""Those of both that hold one number a token."""
UNIT_NAMES = ("unit_energy", "unit_rows", "unit_scale")


@dataclass(frozen=True)
class Frozen:
    """What a first round over all chunks found."""

    value_variance_KS: list[Tensor]
    """By layer; empty for a batch of one sequence."""
    pointed_at_2Q: list[Tensor]
    """What `_point_at` picked, for the stream entering layer 0 and for each layer."""


class ForwardReader:
    """The statistics of every layer for one chunk of sequences. Layer -1 is the residual stream that enters layer 0."""

    def __init__(
        self,
        anatomy: Anatomy,
        shape: tuple[int, int],
        *,
        keys: Tensor | None,
        across_sequences: bool,
        rank_index: Tensor,
        chunked: bool = False,
        frozen: Frozen | None = None,
    ) -> None:
        self.anatomy = anatomy
        self.num_sequences, self.length = shape
        self.keys = keys
        self.across_sequences = across_sequences
        """Whether the whole batch, of which this may be a chunk, has more than one sequence."""
        self.chunked = chunked
        self.frozen = frozen
        self._side = SideStream(self.num_sequences * self.length)
        self.request = ReadingRequest(keys=keys, distances=distances(self.length), beside=self._side.beside)
        self.rank_index = rank_index
        """Tokens of this chunk that the effective rank is taken over."""
        self.attention_path = ""
        self._received_T: Tensor | None = None
        """Attention received so far, summed over layers, heads and sequences."""
        self._sink_heads_BS: Tensor | None = None
        """[B, S] how many heads of all layers so far count each key as their sink."""
        self._kept: dict[str, dict[int, Any]] = defaultdict(dict)
        """Reduced tensors by name and layer; of the residual also that entering layer 0."""
        self._calls: dict[int, tuple[Tensor, tuple[tuple, dict[str, Any]]]] = {}
        """The state that enters the attention that is about to run, and the call's other arguments."""
        self._constants: dict[tuple[torch.device, str], Tensor] = {}

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Opens every tap."""
        with contextlib.ExitStack() as stack:
            first = self.anatomy.layers[0].block.register_forward_pre_hook(
                in_this_thread(self._enter_first_block), with_kwargs=True
            )
            stack.callback(first.remove)
            for layer in self.anatomy.layers:
                units = LayerUnits(layer)
                enter, project, leave = map(
                    in_this_thread,
                    (
                        self._enter_attention(layer.index),
                        self._leave_output_projection(layer.index),
                        self._leave_block(layer.index, units),
                    ),
                )
                handles = [
                    layer.attention.register_forward_pre_hook(enter, with_kwargs=True),
                    layer.output_projection.register_forward_hook(project),
                    layer.block.register_forward_hook(leave),
                    *units.hooks(),
                ]
                for handle in handles:
                    stack.callback(handle.remove)
            stack.enter_context(attention_tap(self.anatomy, self._on_attention))
            yield

    def _enter_first_block(self, module, args, kwargs) -> None:
        hidden_BTE = entering(args, kwargs)
        self._on(hidden_BTE.device, "keys", self._keys)  # while the device has little else to do
        self._read_residual(-1, hidden_BTE)

    def _enter_attention(self, layer: int):
        def hook(module, args, kwargs) -> None:
            state_BTE = entering(args, kwargs)
            if self.across_sequences:
                direction = Moments.of(nn.functional.normalize(state_BTE.float(), dim=-1), keep_mean=self.chunked)
                self._kept["direction"][layer] = direction
            with self._side.beside(state_BTE):
                self._kept["state_ratio"][layer] = token_dom_ratio(state_BTE.flatten(0, 1))
            rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
            self._calls[layer] = (state_BTE, (args[1:], rest))

        return hook

    def _on_attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        request = self.request
        if request.keys is not None and request.keys.device != key.device:
            request = self.request = replace(request, keys=self._on(key.device, "keys", self._keys))
        if self.across_sequences:
            moments = Moments.of(value, keep_mean=self.chunked)
            self._kept["value"][layer] = moments
            known = moments.variance if self.frozen is None else self.frozen.value_variance_KS[layer]
            request = replace(request, key_weights=known)
        self._side.join()
        reading, self.attention_path = read_attention(query, key, value, rule, request)
        for name in ("received", "by_distance", "entropy", "mixing", "weighted_mixing"):
            if (values := getattr(reading, name)) is not None:
                self._kept[name][layer] = values
        with self._side.beside(query, key):
            self._add_received(reading.received)
            self._keep_lock_rows(layer, query, key)
        return reading.output

    def _add_received(self, received_BHS: Tensor) -> None:
        """Adds to the attention received so far, as a mean over queries and only where a key has enough of them."""
        device = received_BHS.device
        before = received_BHS.new_zeros(self.length) if self._received_T is None else self._received_T
        self._received_T = before.to(device)
        weight_S, keys_S = self._on(device, "weight", self._received_weight), self._on(device, "keys", self._keys)
        add_received(self._received_T, received_BHS, weight_S, keys_S)

    def _keep_lock_rows(self, layer: int, query_BHTD: Tensor, key_BKSD: Tensor) -> None:
        if layer not in self._calls:
            stray = min(set(range(len(self.anatomy.layers))) - self._kept["lock"].keys(), default=layer)
            raise RuntimeError(f"layer {stray} attends outside the module named for it: {self._blame()}")
        if layer - 1 not in self._kept["candidates"]:
            raise RuntimeError(f"the block of layer {layer - 1} reported nothing: {self._blame()}")
        state_BTE, call = self._calls.pop(layer)
        if self.num_sequences > LOCK_SEQUENCES:
            state_BTE, query_BHTD, key_BKSD = (x[:LOCK_SEQUENCES] for x in (state_BTE, query_BHTD, key_BKSD))
        positions_Q = self._kept["candidates"][layer - 1][:NUM_LOCK_POSITIONS].to(key_BKSD.device)
        queries_n = sampled_queries(self.length, key_BKSD.device)
        self._kept["lock"][layer] = LockInput(
            positions_Q=positions_Q,
            queries_n=queries_n,
            residual_BQE=self._kept["lock_residual"].pop(layer - 1),
            state_BQE=state_BTE.index_select(1, positions_Q),
            query_BHnD=query_BHTD.index_select(2, queries_n),
            key_BKQD=key_BKSD.index_select(2, positions_Q),
            length=self.length,
            call=call,
        )

    def _leave_output_projection(self, layer: int):
        def hook(module, args, output) -> None:
            aggregation_NC = args[0].flatten(0, -2)
            with self._side.beside(aggregation_NC):
                self._kept["second_moment"][layer] = token_mean_square(aggregation_NC)
            if self.across_sequences:
                aggregation_BTC, output_BTE = (x.view(self.num_sequences, self.length, -1) for x in (args[0], output))
                for name, x in (("aggregation", aggregation_BTC), ("projected", output_BTE)):
                    self._kept[name][layer] = Moments.of(x, keep_mean=self.chunked)

        return hook

    def _leave_block(self, layer: int, units: LayerUnits):
        def hook(module, args, output) -> None:
            hidden_BTE = leaving(output)
            with self._side.beside(hidden_BTE, *units.tensors()):
                self._read_residual(layer, hidden_BTE)
                self._read_units(layer, units)
                units.clear()
                if self.num_sequences > 1:
                    self._reduce_layer(layer)

        return hook

    def _read_residual(self, layer: int, hidden_BTE: Tensor) -> None:
        kept = self._kept
        tokens = token_statistics(hidden_BTE.flatten(0, 1))
        for name in ("largest", "argmax", "energy", "mean_abs", "kurtosis", "participation_ratio", "column_abs"):
            kept[name][layer] = getattr(tokens, name)
        kept["candidates"][layer] = self._candidates(layer, tokens.largest, kept["mean_abs"][layer])
        kept["candidate_rows"][layer] = hidden_BTE.index_select(1, kept["candidates"][layer])
        rows_BQE = kept["candidate_rows"][layer][:, :NUM_LOCK_POSITIONS]
        # Of many sequences a copy, since a view would keep the rows of all of them alive.
        few = self.num_sequences <= LOCK_SEQUENCES
        kept["lock_residual"][layer] = rows_BQE if few else rows_BQE[:LOCK_SEQUENCES].clone()
        if self.rank_index.shape[0]:
            kept["rank_tokens"][layer] = hidden_BTE.flatten(0, 1)[self.rank_index.to(hidden_BTE.device)]
        if layer < 0 and self.num_sequences > 1:
            self._reduce_residual(layer)

    def _candidates(self, layer: int, largest_N: Tensor, mean_abs_N: Tensor) -> Tensor:
        """[P] the positions of the layer that are kept in full."""
        before_P = None if layer < 0 else self._kept["candidates"][layer - 1].to(largest_N.device)
        if self.frozen is not None:
            return joined_candidates(self.frozen.pointed_at_2Q[layer + 1].to(largest_N.device), before_P)
        received_T = None if self._received_T is None else self._received_T.to(largest_N.device)
        mean_abs_N = mean_abs_N.clamp(min=torch.finfo(mean_abs_N.dtype).tiny)  # a token of zeros stands out nowhere
        return candidates(largest_N, mean_abs_N, self.length, received_T, before_P)

    def _read_units(self, layer: int, units: LayerUnits) -> None:
        if not units.complete:
            raise RuntimeError(f"layer {layer} passed no neurons to its down projection: {self._blame()}")
        reading, candidates_P = units.read(), self._kept["candidates"][layer]
        self._kept["write"][layer], self._kept["write_unit"][layer] = reading.top_write, reading.top_unit
        tokens = candidates_P
        if self.num_sequences > 1:
            first_B1 = self._on(candidates_P.device, "first tokens", self._first_tokens)
            tokens = (first_B1 + candidates_P).flatten()
        self._kept["unit_energy"][layer], self._kept["unit_rows"][layer] = reading.energy, units.at(tokens)
        if units.write_scale_N is not None:
            self._kept["unit_scale"][layer] = units.write_scale_N[tokens]

    def _reduce_layer(self, layer: int) -> None:
        """Sums a layer's tensors over sequences at once, since several sequences would leave several times as much.

        For a single sequence nothing is to be summed, and all layers are done together at the end.
        """
        self._check_complete([layer])
        self._reduce_residual(layer)
        raw = {name: self._kept[name].pop(layer)[None] for name in LAYER_NAMES if layer in self._kept[name]}
        self._kept["layer_sums"][layer] = self._layer_sums(raw)
        self._reduce_units([layer])

    def _reduce_residual(self, layer: int) -> None:
        raw = {name: self._kept[name].pop(layer)[None] for name in RESIDUAL_NAMES}
        self._kept["residual_sums"][layer] = self._residual_sums(raw)

    def _reduce_units(self, layers: list[int]) -> None:
        """Sums over sequences of the units of layers that have equally many of them."""
        kept = self._kept
        raw = {name: stacked({layer: kept[name].pop(layer) for layer in layers}) for name in UNIT_NAMES if kept[name]}
        rows_lBPU = raw["unit_rows"].float().unflatten(1, (self.num_sequences, -1))
        sums = {"unit_energy": raw["unit_energy"], "unit_activation": self._total(rows_lBPU, 1)}
        exact = raw["unit_energy"].dtype  # squares at some positions are taken away from the energy of all tokens
        sums["unit_square"] = self._total(rows_lBPU.to(exact).square(), 1)
        if "unit_scale" in raw:
            written_lBPU = rows_lBPU * raw["unit_scale"].view(*rows_lBPU.shape[:3], 1)
            sums["unit_written"] = self._total(written_lBPU, 1)
            sums["unit_written_square"] = self._total(written_lBPU.to(exact).square(), 1)
        by_layer = {name: values.unbind() for name, values in sums.items()}
        for number, layer in enumerate(layers):
            kept["units"][layer] = {name: values[number] for name, values in by_layer.items()}

    def _layer_sums(self, raw: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sums over sequences of some layers, from what was kept of them, [l, B, ...] by name."""
        shape = (-1, self.num_sequences, self.length)
        alpha_lBHS = raw["received"] / self._on(raw["received"].device, "num queries", self._num_queries)
        counted_lBHS = alpha_lBHS > SINK_THRESHOLD
        sums = {"received": self._total(alpha_lBHS, 1), "sink_heads": counted_lBHS.sum(1, dtype=torch.int32)}
        sink_heads_BS = counted_lBHS.sum((0, 2))
        before = self._sink_heads_BS
        self._sink_heads_BS = sink_heads_BS if before is None else before.to(sink_heads_BS.device) + sink_heads_BS
        for name in ("entropy", "mixing"):
            if name in raw:
                value_lHT = self._total(raw[name], 1)
                sums[name], sums[f"head_{name}"] = value_lHT.mean(1), value_lHT.mean(2)
        if "weighted_mixing" in raw:
            sums["averaging_law"] = self._total(raw["weighted_mixing"], 1).mean(1)
        sums["by_distance"] = self._total(raw["by_distance"], 1)
        sums["second_moment"] = self._total(raw["second_moment"].view(shape), 1)
        # A state of zeros has no ratio (0 / 0) and is left out.
        ratio_lBT = raw["state_ratio"].view(shape)
        sums["num_states"] = self._total(~ratio_lBT.isnan(), 1).long()
        sums["dom_ratio_normed"] = self._total(ratio_lBT.nan_to_num(nan=0.0), 1)
        write = largest_over_sequences(raw["write"].view(shape), raw["write_unit"].view(shape))
        sums["largest_write"], sums["largest_write_unit"] = write
        return sums

    def _residual_sums(self, raw: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same of the residual stream."""
        shape = (-1, self.num_sequences, self.length)
        largest_lBT, argmax_lBT, energy_lBT, mean_abs_lBT = (
            raw[name].view(shape) for name in ("largest", "argmax", "energy", "mean_abs")
        )
        # A state of zeros has no ratio (0 / 0) and is left out.
        zero_lBT = largest_lBT == 0
        sums = {"num_residuals": self._total(~zero_lBT, 1).long()}
        ratios = {name: raw[name].view(shape) for name in ("participation_ratio", "kurtosis")}
        ratios |= {"dom_ratio": largest_lBT / mean_abs_lBT, "top_energy_share": largest_lBT.square() / energy_lBT}
        for name, ratio_lBT in ratios.items():
            sums[name] = self._total(ratio_lBT.masked_fill(zero_lBT, 0), 1)
        sums["dimension_total"] = raw["column_abs"]
        rows_lBPE = raw["candidate_rows"].float()
        sums["dimension"], sums["dimension_abs"] = self._total(rows_lBPE, 1), self._total(rows_lBPE.abs(), 1)
        largest = largest_over_sequences(largest_lBT, argmax_lBT)
        sums["largest_residual"], sums["largest_residual_dimension"] = largest
        return sums

    def statistics(self) -> Statistics:
        """Everything that was kept, put together; the reader is empty afterwards."""
        self._side.join()
        layers = [layer.index for layer in self.anatomy.layers]
        if self.num_sequences > 1:
            if silent := sorted(set(layers) - self._kept["layer_sums"].keys()):
                raise RuntimeError(f"the block of layers {silent} reported nothing: {self._blame()}")
            layer_sums, residual_sums = (joined(self._kept[name]) for name in ("layer_sums", "residual_sums"))
        else:
            self._check_complete(layers)
            raw = stacked_together({name: self._kept.pop(name) for name in TOKEN_NAMES})
            rest = [name for name in (*LAYER_NAMES, *RESIDUAL_NAMES) if name in self._kept]
            raw |= {name: stacked(self._kept.pop(name)) for name in rest}
            layer_sums, residual_sums = self._layer_sums(raw), self._residual_sums(raw)
            alike = len({rows.shape for rows in self._kept["unit_rows"].values()}) == 1
            for together in [layers] if alike else [[layer] for layer in layers]:
                self._reduce_units(together)
        sums, kept = layer_sums | residual_sums, self._kept
        assert self._sink_heads_BS is not None
        pairs = {"residual": "dimension", "write": "unit"}
        largest = {name: (sums.pop(f"largest_{name}"), sums.pop(f"largest_{name}_{at}")) for name, at in pairs.items()}
        across = ("direction", "value", "aggregation", "projected")
        return Statistics(
            num_sequences=self.num_sequences,
            sums=sums,
            largest=largest,
            moments={name: list(kept[name].values()) for name in across if name in kept},
            units=list(kept["units"].values()),
            candidates=stacked(kept["candidates"]),
            sink_heads_BS=self._sink_heads_BS,
            lock_inputs=list(kept["lock"].values()),
            rank_tokens=list(kept["rank_tokens"].values()),
        )

    def _check_complete(self, layers: Iterable[int]) -> None:
        """A part that stayed silent in some layer must not pass unseen: later layers would slide into its place."""
        parts = {
            "lock": "attention",
            "second_moment": "output projection",
            "candidates": "block",
            "unit_rows": "neurons",
        }
        for name, part in parts.items():
            if silent := sorted(set(layers) - self._kept[name].keys()):
                raise RuntimeError(f"the {part} of layers {silent} reported nothing: {self._blame()}")

    def _blame(self) -> str:
        return f"the row of family {self.anatomy.family.name} in the family table is wrong"

    def _total(self, values: Tensor, dim: int = 0) -> Tensor:
        """Sum over sequences; of one sequence it is a view, since a launch costs as much as a short text's reading."""
        return values.select(dim, 0) if self.num_sequences == 1 else values.sum(dim)

    def _keys(self, device: torch.device) -> Tensor:
        return torch.arange(self.length, device=device) if self.keys is None else self.keys.to(device)

    def _num_queries(self, device: torch.device) -> Tensor:
        """[S] how many queries see each key that is read."""
        return self.length - self._on(device, "keys", self._keys)

    def _first_tokens(self, device: torch.device) -> Tensor:
        return torch.arange(self.num_sequences, device=device)[:, None] * self.length

    def _received_weight(self, device: torch.device) -> Tensor:
        """[S] what makes a sum over queries a mean, and 0 for keys with too few of them."""
        keys_S = self._on(device, "keys", self._keys)
        return eligible_positions(self.length, device)[keys_S] / self._on(device, "num queries", self._num_queries)

    def _on(self, device: torch.device, name: str, make: Callable[[torch.device], Tensor]) -> Tensor:
        """A tensor that every layer needs, made once on each device: a copy from the host makes the host wait until the
        device has done all that was asked before."""
        if (device, name) not in self._constants:
            self._constants[device, name] = make(device)
        return self._constants[device, name]
