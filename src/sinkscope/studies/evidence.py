"""The links as they stand in the untouched model, by sequence: what the reading claims of a study are judged on.

One pass. Axes: L layers up to birth, A layers with disparity, B sequences, T positions, C channels, E width, M massive
dimensions, U units.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sinkscope.capture.attention_readers import read_attention
from sinkscope.capture.attention_request import AttentionRule, ReadingRequest
from sinkscope.capture.attention_tap import attention_tap
from sinkscope.capture.block_calls import entering, leaving
from sinkscope.capture.neuron_tap import LayerUnits
from sinkscope.capture.reading import evaluation_mode, input_device
from sinkscope.capture.sole_reader import in_this_thread
from sinkscope.models.anatomy import Anatomy, Layer, Unit
from sinkscope.studies.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Numbers by sequence; a mean over sequences is a claim's statistic, or a part of it."""

    squared_deviation_LBT: np.ndarray
    """n / (n - 1) times the squared deviation of the aggregation from its mean, mean over channels: its mean over
    sequences is the variance."""
    averaging_law_LBT: np.ndarray
    """sum_s a_ts^2 Var(v_s), mean over heads."""
    cosine_BAT: np.ndarray
    """Pseudo-values of the mean cosine over pairs of sequences, of the state that enters the layer behind each one with
    disparity: their mean is the mean cosine."""
    super_write_B: np.ndarray
    """Squared write of the super neurons into the massive dimensions at the sink, over all birth layers."""
    all_write_B: np.ndarray
    """The same of all units."""
    super_write_elsewhere_B: np.ndarray
    """The super neurons' squared write at the other positions, mean over them."""


def read_evidence(anatomy: Anatomy, model: Any, ids_BT: Tensor, plan: Plan) -> Evidence:
    """The evidence of one untouched pass."""
    reader = _EvidenceReader(anatomy, tuple(ids_BT.shape), plan)
    with torch.no_grad(), evaluation_mode(model), reader.reading():
        anatomy.decoder(input_ids=ids_BT.to(input_device(anatomy)), use_cache=False)
    return reader.evidence()


class _EvidenceReader:
    def __init__(self, anatomy: Anatomy, shape: tuple[int, ...], plan: Plan) -> None:
        self.anatomy, self.plan = anatomy, plan
        self.num_sequences, self.length = shape
        self.deviation: dict[int, Tensor] = {}
        self.law: dict[int, Tensor] = {}
        self.cosine: dict[int, Tensor] = {}
        self.writes: list[tuple[Tensor, Tensor, Tensor]] = []

    @contextlib.contextmanager
    def reading(self):
        with contextlib.ExitStack() as stack:
            for layer in self.anatomy.layers:
                handles = []
                if layer.index in self.plan.layers:
                    aggregate = in_this_thread(self._aggregation(layer.index))
                    handles.append(layer.output_projection.register_forward_pre_hook(aggregate))
                if layer.index - 1 in self.plan.alive:
                    enter = in_this_thread(self._state(layer.index))
                    handles.append(layer.attention.register_forward_pre_hook(enter, with_kwargs=True))
                chosen = [unit for unit in self.plan.birth_units if unit.layer == layer.index]
                if chosen:
                    units = LayerUnits(layer)
                    handles += units.hooks()
                    leave = in_this_thread(self._units(layer, units, chosen))
                    handles.append(layer.block.register_forward_hook(leave))
                for handle in handles:
                    stack.callback(handle.remove)
            stack.enter_context(attention_tap(self.anatomy, self._attention))
            yield

    def _attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        weights = value.float().var(0).mean(-1) if layer in self.plan.layers else None
        reading, _ = read_attention(query, key, value, rule, ReadingRequest(key_weights=weights))
        if reading.weighted_mixing is not None:
            self.law[layer] = reading.weighted_mixing.mean(1).cpu()
        return reading.output

    def _aggregation(self, layer: int):
        def hook(module, args) -> None:
            aggregation_BTC = args[0].reshape(self.num_sequences, self.length, -1).float()
            squares = (aggregation_BTC - aggregation_BTC.mean(0)).square().mean(-1)
            self.deviation[layer] = squares.cpu() * (self.num_sequences / (self.num_sequences - 1))

        return hook

    def _state(self, layer: int):
        def hook(module, args, kwargs) -> None:
            unit_BTE = nn.functional.normalize(entering(args, kwargs).float(), dim=-1)
            one_BT = (unit_BTE != 0).any(-1)  # a state of zeros has no direction, and is left out
            others_BT = ((unit_BTE * unit_BTE.sum(0)).sum(-1) - 1) / (one_BT.sum(0) - 1)
            others_BT = others_BT.masked_fill(~one_BT, float("nan"))
            # Each pair of sequences stands in two of these means: a pseudo-value counts its sequence twice.
            self.cosine[layer - 1] = (2 * others_BT - others_BT.nanmean(0)).cpu()

        return hook

    def _units(self, layer: Layer, units: LayerUnits, chosen: list[Unit]):
        def hook(module, args, output) -> None:
            dimensions_M = torch.tensor(self.plan.dimensions)
            sink_tokens = torch.arange(self.num_sequences) * self.length + self.plan.sink
            here_BU = units.at(sink_tokens.to(leaving(output).device)).cpu()
            num_tokens = self.num_sequences * self.length
            scale_N = torch.ones(num_tokens) if units.write_scale_N is None else units.write_scale_N.cpu()
            written_U = layer.written_rows(dimensions_M).square().sum(0).cpu()
            every_write_B = (here_BU * scale_N[sink_tokens, None]).square() @ written_U
            write_BT = torch.zeros(self.num_sequences, self.length)
            for unit in chosen:
                values_N = units.values(unit.expert, torch.tensor([unit.neuron])).flatten().cpu() * scale_N
                vector_E = layer.written_vectors(unit.expert)[:, unit.neuron].cpu()
                write_BT += (values_N.square() * vector_E[dimensions_M].square().sum()).view_as(write_BT)
            here_B = write_BT[:, self.plan.sink]
            elsewhere_B = (write_BT.sum(1) - here_B) / (self.length - 1)
            self.writes.append((here_B, every_write_B, elsewhere_B))
            units.clear()

        return hook

    def evidence(self) -> Evidence:
        def stacked(layers: dict[int, Tensor], axis: int) -> np.ndarray:
            shape = (self.num_sequences, self.length)
            rows = [layers[layer] for layer in sorted(layers)]
            return (torch.stack(rows, axis) if rows else torch.empty(*shape).unsqueeze(axis)[:, :0]).double().numpy()

        sums = [torch.stack(column).sum(0) for column in zip(*self.writes, strict=True)]
        sums = sums or [torch.zeros(self.num_sequences)] * 3
        return Evidence(
            squared_deviation_LBT=stacked(self.deviation, 0),
            averaging_law_LBT=stacked(self.law, 0),
            cosine_BAT=stacked(self.cosine, 1),
            super_write_B=sums[0].double().numpy(),
            all_write_B=sums[1].double().numpy(),
            super_write_elsewhere_B=sums[2].double().numpy(),
        )
