"""The numbers by sequence that the claims about the baseline are judged on, read in one pass.

Axes: L early layers, A layers after which the sink has massive dimensions, B sequences, T positions, K positions of
interest (the sink and the targets), Q the sink and the first target, N heads that have the sink, E width, M massive
dimensions, U neurons.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sinkscope.interventions.plan import Plan
from sinkscope.measures.dimension_disparity import direction_share
from sinkscope.models.anatomy import Anatomy
from sinkscope.studies.judging import LOCKED, gone
from sinkscope.tracing.attention_rule import sampled_queries
from sinkscope.tracing.layer_call import LayerCall, wide
from sinkscope.tracing.lock import later_queries, making_keys
from sinkscope.tracing.observables import HookPoint, Observable, averaging_law
from sinkscope.tracing.recorder import Recorder
from sinkscope.tracing.reducers import Rows, SelfJoining


@dataclass(frozen=True, kw_only=True)
class LinkValues:
    """Numbers by sequence. Their means over sequences are what claims compute their statistics from."""

    averaging_law_LBT: np.ndarray
    """sum_s a_ts^2 Var(v_s), mean over heads."""
    cosine_BAT: np.ndarray
    """Cosine between a sequence's state and those of the others, as the state enters the layer after each of A. As
    jackknife pseudo-values, so that their mean over sequences is the mean cosine over pairs."""
    direction_share_K: np.ndarray
    """Share of the residual's energy across sequences that one direction holds, mean over A."""
    lock_BQ3N: np.ndarray
    """q . k summed over later queries: as it is, without the direction that the sink's states share, and without the
    largest coordinate of that direction alone."""
    super_write_B: np.ndarray
    """Squared write of the super neurons into the massive dimensions at the sink, in the layers where these appear."""
    all_write_B: np.ndarray
    """The same of all neurons."""
    super_write_elsewhere_B: np.ndarray
    """The super neurons' squared write at the other positions, mean over them."""

    @property
    def gone_with_coordinate(self) -> float | None:
        """The share of q . k on the sink that is gone without the largest coordinate of its direction; None if no head
        has the sink."""
        return float(gone(self.lock_BQ3N[:, 0, [0, 2]].mean(0))) if self.lock_BQ3N.size else None

    @property
    def locked_on(self) -> str | None:
        """What heads read at the sink: a coordinate if it alone holds half of q . k, else a direction; None if no head
        has the sink."""
        share = self.gone_with_coordinate
        if share is None:
            return None
        return "coordinate" if share >= LOCKED else "direction"


def read_link_values(
    anatomy: Anatomy, model: Any, ids_BT: Tensor, plan: Plan, directions: Mapping[int, Tensor]
) -> LinkValues:
    """The values, from one pass of the baseline. `directions` [E] by layer are those that the sink's states share as
    they enter attention."""
    recording = Recorder(anatomy, _observables(plan)).read(model, ids_BT)
    shape = (ids_BT.shape[0], ids_BT.shape[1])

    def stacked(name: str, axis: int) -> np.ndarray:
        rows = [values.cpu() for values in recording.get(name, {}).values()]
        return (torch.stack(rows, axis) if rows else torch.empty(shape).unsqueeze(axis)[:, :0]).double().numpy()

    writes = [values.cpu() for values in recording.get("writes", {}).values()]
    super_write, all_write, elsewhere = sum(writes, torch.zeros(shape[0], 3)).double().numpy().T
    return LinkValues(
        averaging_law_LBT=stacked("averaging_law", 0),
        cosine_BAT=stacked("cosine", 1),
        direction_share_K=stacked("direction_share", 0).mean((0, 1)),
        lock_BQ3N=_lock(anatomy, recording.get("lock", {}), plan, directions),
        super_write_B=super_write,
        all_write_B=all_write,
        super_write_elsewhere_B=elsewhere,
    )


def _observables(plan: Plan) -> list[Observable]:
    def by_sequence(name: str, hook_point: HookPoint, value, layers, **others: Any) -> Observable:
        return Observable(name=name, hook_point=hook_point, value=value, reducer=Rows(), layers=layers, **others)

    return [
        by_sequence("averaging_law", HookPoint.ATTENTION, averaging_law, plan.layers, asks="averaging law"),
        by_sequence("cosine", HookPoint.ATTENTION_IN, _cosine, [layer + 1 for layer in plan.layers_with_disparity]),
        by_sequence(
            "direction_share",
            HookPoint.RESIDUAL_OUT,
            lambda call: _direction_share(call, plan),
            plan.layers_with_disparity,
        ),
        Observable(
            name="lock",
            hook_point=HookPoint.ATTENTION,
            value=lambda call: _lock_rows(call, [plan.sink, *plan.targets[:1]]),
            reducer=SelfJoining(),
            layers={layer for layer, _ in plan.sink_heads},
        ),
        by_sequence(
            "writes",
            HookPoint.NEURONS,
            lambda call: _writes(call, plan),
            {neuron.layer for neuron in plan.appearance_neurons},
        ),
    ]


def _cosine(call: LayerCall) -> Tensor:
    """[B, T] jackknife pseudo-values of the mean cosine between sequences; NaN for a state of zeros, which has none."""
    direction_BTE = call.direction  # of length 1, or zero
    has_direction_BT = (direction_BTE != 0).any(-1)
    # The sum over all sequences counts a sequence's cosine with itself, which is 1.
    cosine_BT = ((direction_BTE * direction_BTE.sum(0)).sum(-1) - 1) / (has_direction_BT.sum(0) - 1)
    cosine_BT = cosine_BT.masked_fill(~has_direction_BT, float("nan"))
    # Each pair of sequences is in the means of both, so a pseudo-value counts its sequence twice.
    return 2 * cosine_BT - cosine_BT.nanmean(0)


def _direction_share(call: LayerCall, plan: Plan) -> Tensor:
    """[1, K] a number of all sequences together."""
    states_KBE = wide(call.residual[:, [plan.sink, *plan.targets]]).transpose(0, 1)
    return direction_share(states_KBE)[None]


def _lock_rows(call: LayerCall, positions: list[int]) -> tuple[Any, ...]:
    """What the lock needs of a layer: what its keys at some positions are made of, these keys, and the sum of the
    queries after each position."""
    positions_Q = torch.tensor(positions, device=call.state.device)
    queries_n = sampled_queries(call.passing.length, call.state.device)
    later_nQ = later_queries(queries_n, positions_Q)
    query_sum_BHQD = later_nQ.T.float() @ call.query.index_select(2, queries_n).float()
    made_of = call.state.index_select(1, positions_Q), call.arguments, positions_Q, call.passing.length
    return made_of, call.key.index_select(2, positions_Q), query_sum_BHQD


@torch.no_grad()
def _lock(
    anatomy: Anatomy, rows: Mapping[int, tuple[Any, ...]], plan: Plan, directions: Mapping[int, Tensor]
) -> np.ndarray:
    """[B, Q, 3, N] as `LinkValues.lock_BQ3N` says."""
    by_layer = []
    with making_keys(anatomy) as key_of:
        for index, ((state_BQE, *call), key_BKQD, query_sum_BHQD) in rows.items():
            direction_E = directions[index].to(state_BQE)
            without_BQE = state_BQE - (state_BQE @ direction_E)[..., None] * direction_E
            others_BQE = state_BQE.clone()
            others_BQE[..., direction_E.abs().argmax()] = 0
            keys = key_BKQD, *(key_of(anatomy.layers[index], rest, *call) for rest in (without_BQE, others_BQE))
            groups = query_sum_BHQD.shape[1] // key_BKQD.shape[1]
            # A sum over queries of q . k is (sum of q) . k, so no row of attention is made.
            agree = [(query_sum_BHQD * key.float().repeat_interleave(groups, dim=1)).sum(-1) for key in keys]
            heads = [head for layer, head in plan.sink_heads if layer == index]
            by_layer.append(torch.stack(agree, 1)[:, :, heads].cpu().double().permute(0, 3, 1, 2))
    return torch.cat(by_layer, -1).numpy() if by_layer else np.empty((0, 0, 3, 0))


def _writes(call: LayerCall, plan: Plan) -> Tensor:
    """[B, 3] squared writes into the massive dimensions: of the super neurons at the sink, of all neurons there, and of
    the super neurons at the other positions, mean over them."""
    layer, neurons, (num_sequences, length) = call.layer, call.neurons, call.passing.shape
    dimensions_M = torch.tensor(plan.dimensions)
    sink_tokens = torch.arange(num_sequences) * length + plan.sink
    here_BU = neurons.at(sink_tokens.to(call.residual.device)).float().cpu()
    scale_N = torch.ones(num_sequences * length) if neurons.write_scale_N is None else neurons.write_scale_N.cpu()
    written_U = layer.written_rows(dimensions_M).square().sum(0).cpu()
    every_write_B = (here_BU * scale_N[sink_tokens, None]).square() @ written_U
    write_BT = torch.zeros(num_sequences, length)
    for neuron in plan.appearance_neurons:
        if neuron.layer == call.index:
            values_N = neurons.values(neuron.expert, torch.tensor([neuron.neuron])).flatten().cpu() * scale_N
            vector_E = layer.written_vectors(neuron.expert)[:, neuron.neuron].cpu()
            write_BT += (values_N.square() * vector_E[dimensions_M].square().sum()).view_as(write_BT)
    here_B = write_BT[:, plan.sink]
    return torch.stack([here_B, every_write_B, (write_BT.sum(1) - here_B) / (length - 1)], dim=1)
