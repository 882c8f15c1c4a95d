"""A light reading of one pass, by sequence: what a study compares between conditions, and nothing more.

A trace reads all there is, once. A study runs the same batch under dozens of interventions, and of each it needs
numbers by sequence, for intervals. The untouched pass keeps what enters each block, so that a pass under an
intervention begins at the first layer that the intervention can touch.
Axes: L layers, B sequences, T positions, S keys, H heads, E width, M chosen dimensions, n units of one group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sinkscope.capture.attention_readers import read_attention
from sinkscope.capture.attention_request import AttentionRule, ReadingRequest
from sinkscope.capture.attention_tap import attention_tap
from sinkscope.capture.block_calls import entering, leaving
from sinkscope.capture.edits import suspend
from sinkscope.capture.neuron_tap import LayerUnits
from sinkscope.capture.overflow import check_finite
from sinkscope.capture.reading import evaluation_mode, input_device
from sinkscope.capture.sole_reader import in_this_thread
from sinkscope.measures.dimension_disparity import dom_ratio
from sinkscope.measures.sink_score import SINK_THRESHOLD, mean_received
from sinkscope.models.anatomy import Anatomy, Unit, anatomy_of, checked_units
from sinkscope.models.loading import bare_model

LOSS_TOKENS = 1024
"""Tokens whose logits are held at once."""


@dataclass(frozen=True, kw_only=True)
class ConditionReading:
    """What one pass gave, by layer and sequence, on the CPU."""

    sink_heads_LBS: Tensor
    """How many heads count each key as their sink."""
    received_LBS: Tensor
    """alpha, mean over heads."""
    entropy_LBT: Tensor
    mixing_LBT: Tensor
    """sum_j a_tj^2, mean over heads."""
    aggregation_norm_LBT: Tensor
    residual_norm_LBT: Tensor
    dom_ratio_LBT: Tensor
    dimensions_LBTM: Tensor
    dimensions: tuple[int, ...]
    units: dict[tuple[int, int | None], Tensor]
    """By (layer, expert): [B, T, n] activations of the units read, in the order of `neurons`."""
    neurons: dict[tuple[int, int | None], tuple[int, ...]]
    num_heads: int
    loss_B: Tensor | None = None
    """Mean next-token loss of each sequence, where it was asked for."""

    @property
    def rate_BS(self) -> Tensor:
        """Share of layers and heads that count each key as their sink, by sequence."""
        return self.sink_heads_LBS.sum(0, dtype=torch.float64) / (self.sink_heads_LBS.shape[0] * self.num_heads)

    def group_values(self, group: tuple[int, int | None], neurons: Sequence[int]) -> Tensor:
        """[B, T, n] activations of some of the units that were read."""
        places = [self.neurons[group].index(neuron) for neuron in neurons]
        return self.units[group][..., places]

    def unit_values(self, unit: Unit) -> Tensor:
        """[B, T] activation of one unit."""
        return self.group_values((unit.layer, unit.expert), [unit.neuron])[..., 0]

    def dimension_values(self, dimensions: Sequence[int]) -> Tensor:
        """[L, B, T, M] values of some of the dimensions that were read."""
        return self.dimensions_LBTM[..., [self.dimensions.index(dimension) for dimension in dimensions]]


LAYER_FIELDS = (
    *("sink_heads_LBS", "received_LBS", "entropy_LBT", "mixing_LBT", "aggregation_norm_LBT"),
    *("residual_norm_LBT", "dom_ratio_LBT", "dimensions_LBTM"),
)


@dataclass
class Replay:
    """One batch, read untouched and then under one condition after another, from the first layer that differs."""

    anatomy: Anatomy
    model: Any
    ids_BT: Tensor
    units: Collection[Unit] = ()
    dimensions: tuple[int, ...] = ()
    restarts: Collection[int] = (0,)
    """Layers that a pass may begin at: what enters them is kept."""
    loss: bool = False
    untouched: ConditionReading = field(init=False)
    num_layer_passes: int = 0
    """Blocks run so far, the measure of what a study costs."""

    def __post_init__(self) -> None:
        self._groups = checked_units(self.anatomy, self.units)
        self._calls: dict[int, tuple[tuple, dict]] = {}
        self._entering: dict[int, Tensor] = {}
        self.restarts = {0, *self.restarts}
        with contextlib.ExitStack() as stack:
            for layer in self.anatomy.layers:
                keep = in_this_thread(self._keep_call(layer.index))
                hook = layer.block.register_forward_pre_hook(keep, with_kwargs=True)
                stack.callback(hook.remove)
            self.untouched = self._read(None, loss=self.loss)

    def read(self, first_layer: int | None, *, loss: bool = False) -> ConditionReading:
        """The reading under the interventions that are on, the first of which acts in `first_layer`; None is none."""
        if first_layer is None:
            return self.untouched
        return self._read(max(layer for layer in self.restarts if layer <= first_layer), loss=loss)

    def _keep_call(self, layer: int):
        def hook(module, args, kwargs) -> None:
            hidden = entering(args, kwargs)
            rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
            self._calls[layer] = (args[1:], rest)
            if layer in self.restarts:
                self._entering[layer] = hidden

        return hook

    def _read(self, start: int | None, *, loss: bool) -> ConditionReading:
        reader = _LayerReader(self.anatomy, self._groups, self.dimensions)
        layers = self.anatomy.layers[start or 0 :]
        with torch.no_grad(), evaluation_mode(self.model), reader.reading(layers):
            if start is None:
                self.anatomy.decoder(input_ids=self.ids_BT.to(input_device(self.anatomy)), use_cache=False)
            else:
                hidden_BTE = self._entering[start]
                for layer in layers:
                    args, kwargs = self._calls[layer.index]
                    output = layer.block(hidden_BTE, *args, **kwargs)
                    hidden_BTE = leaving(output)
        self.num_layer_passes += len(layers)
        loss_B = next_token_loss(self.anatomy, self.model, reader.hidden_BTE, self.ids_BT) if loss else None
        prefix = None if start is None else self.untouched
        return reader.reading_after(prefix, start or 0, loss_B)


class _LayerReader:
    """Reduces each layer as it runs."""

    def __init__(self, anatomy: Anatomy, groups: dict, dimensions: tuple[int, ...]) -> None:
        self.anatomy, self.groups, self.dimensions = anatomy, groups, dimensions
        self.rows: dict[str, dict[int, Tensor]] = {name: {} for name in LAYER_FIELDS}
        self.units: dict[tuple[int, int | None], Tensor] = {}
        self.hidden_BTE = torch.empty(0)

    @contextlib.contextmanager
    def reading(self, layers):
        with contextlib.ExitStack() as stack:
            for layer in layers:
                units = LayerUnits(layer)
                experts = [expert for index, expert in self.groups if index == layer.index]
                handles = units.hooks() if experts else []
                aggregate = in_this_thread(self._aggregation(layer.index))
                leave = in_this_thread(self._block(layer.index, units, experts))
                handles.append(layer.output_projection.register_forward_pre_hook(aggregate))
                handles.append(layer.block.register_forward_hook(leave))
                for handle in handles:
                    stack.callback(handle.remove)
            stack.enter_context(attention_tap(self.anatomy, self._attention))
            yield

    def _attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        reading, _ = read_attention(query, key, value, rule, ReadingRequest())
        assert reading.entropy is not None
        assert reading.mixing is not None
        alpha_BHS = mean_received(reading.received)
        self.rows["sink_heads_LBS"][layer] = (alpha_BHS > SINK_THRESHOLD).sum(1)
        self.rows["received_LBS"][layer] = alpha_BHS.mean(1)
        self.rows["entropy_LBT"][layer] = reading.entropy.mean(1)
        self.rows["mixing_LBT"][layer] = reading.mixing.mean(1)
        return reading.output

    def _aggregation(self, layer: int):
        def hook(module, args) -> None:
            shape = self.rows["received_LBS"][layer].shape
            aggregation_BTC = args[0].reshape(*shape, -1)
            self.rows["aggregation_norm_LBT"][layer] = torch.linalg.vector_norm(aggregation_BTC.float(), dim=-1)

        return hook

    def _block(self, layer: int, units: LayerUnits, experts: list[int | None]):
        def hook(module, args, output) -> None:
            self.hidden_BTE = leaving(output)
            hidden_BTE = self.hidden_BTE.float()
            self.rows["residual_norm_LBT"][layer] = torch.linalg.vector_norm(hidden_BTE, dim=-1)
            self.rows["dom_ratio_LBT"][layer] = dom_ratio(hidden_BTE)
            self.rows["dimensions_LBTM"][layer] = hidden_BTE[..., list(self.dimensions)]
            for expert in experts:
                neurons = torch.tensor(self.groups[layer, expert], device=hidden_BTE.device)
                values = units.values(expert, neurons)
                self.units[layer, expert] = values.view(*hidden_BTE.shape[:2], -1).cpu()
            units.clear()

        return hook

    def reading_after(self, prefix: ConditionReading | None, start: int, loss_B: Tensor | None) -> ConditionReading:
        """The whole model's reading, the layers before `start` as they were."""
        num_layers = len(self.anatomy.layers)
        for name, rows in self.rows.items():
            if silent := sorted(set(range(start, num_layers)) - rows.keys()):
                raise RuntimeError(f"layer {silent[0]} reported no {name}")
        stacked = {name: torch.stack([rows[layer].cpu() for layer in sorted(rows)]) for name, rows in self.rows.items()}
        check_finite(self.anatomy.decoder, stacked["residual_norm_LBT"].amax(1), first_layer=start)
        if prefix is not None:
            stacked = {name: torch.cat([getattr(prefix, name)[:start], rows]) for name, rows in stacked.items()}
            return replace(prefix, **stacked, units=prefix.units | self.units, loss_B=loss_B)
        return ConditionReading(
            **stacked,
            dimensions=self.dimensions,
            units=self.units,
            neurons=self.groups,
            num_heads=self.anatomy.num_heads,
            loss_B=loss_B,
        )


def read_condition(
    anatomy: Anatomy | None,
    model: Any,
    ids_BT: Tensor,
    *,
    units: Collection[Unit] = (),
    dimensions: tuple[int, ...] = (),
) -> ConditionReading:
    """An untouched reading of a batch, whatever interventions are on."""
    owner = bare_model(model)
    with suspend():
        return Replay(anatomy or anatomy_of(owner), owner, ids_BT, units, dimensions).untouched


@torch.no_grad()
def next_token_loss(anatomy: Anatomy, model: Any, hidden_BTE: Tensor, ids_BT: Tensor) -> Tensor:
    """[B] mean loss of each sequence, from what leaves the last block."""
    head, softcap = model.get_output_embeddings(), getattr(model.config, "final_logit_softcapping", None)
    norm, project = (
        anatomy.decoder.get_submodule(anatomy.family.final_norm),
        getattr(anatomy.decoder, "project_out", None),
    )
    num_sequences, length = ids_BT.shape
    losses = []
    for rows in range(0, num_sequences, max(1, LOSS_TOKENS // length)):
        chunk = slice(rows, rows + max(1, LOSS_TOKENS // length))
        state = norm(hidden_BTE[chunk, :-1])
        logits = head(state if project is None else project(state)).float()
        if softcap is not None:
            logits = (logits / softcap).tanh() * softcap
        targets = ids_BT[chunk, 1:].to(logits.device)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        losses.append(loss.view_as(targets).mean(1).cpu())
    return torch.cat(losses)
