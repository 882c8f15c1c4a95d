"""How far the residual stream contracts to one direction, after each attention and each feed-forward.

A site is a place in the residual stream: site 0 enters the first layer, 2 l + 1 lies after the attention of layer l and
2 l + 2 after its feed-forward. In parallel blocks, where both read the same input, the site between them is the input
plus what attention adds. At each site the states of the last position are kept. The other positions are only summed, so
that memory does not grow with the length.

Axes: S sites, N sequences, T positions, P positions of the curves, E width, C channels of the value aggregation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from sinkscope.measures.contraction import pairwise_cosine, principal, split_half_cosine
from sinkscope.measures.directional_collapse import cosine_from_sum
from sinkscope.tracing.layer_call import LayerCall, wide
from sinkscope.tracing.observables import HookPoint, Observable
from sinkscope.tracing.recorder import Recorder
from sinkscope.tracing.reducers import Cosine, Moments, Rows

NUM_CURVE_POSITIONS = 64
"""At most so many positions of a curve; in longer sequences closer together at the start, where variance falls fast."""


@dataclass(frozen=True)
class Contraction:
    """The contraction of one model on one batch.

    `inter` is the cosine between sequences at the last position, `intra` that between the positions of a sequence. Both
    have one value for each sequence, whose mean is the mean cosine over pairs.
    """

    inter_SN: np.ndarray
    intra_SN: np.ndarray
    alignment_S: np.ndarray
    """|cosine| of the mean state with the top principal direction, of unit states at the last position."""
    top_share_S: np.ndarray
    """That direction's share of the energy."""
    split_half_S: np.ndarray
    mean_state_SE: np.ndarray
    """The mean of the unit states at the last position."""
    positions_P: np.ndarray
    inter_by_position: np.ndarray
    """[L + 1, P] mean cosine between sequences in the stream that enters layer 0 and after each layer."""
    value_variance: np.ndarray
    """[L, P] variance across sequences of the value aggregation, averaged over channels."""


def contraction_observables(length: int) -> list[Observable]:
    """The observables that `contraction` needs."""
    positions_P = curve_positions(length)
    sites = [("", HookPoint.RESIDUAL_OUT), ("_mid", HookPoint.RESIDUAL_MID)]
    return [
        *(
            Observable(
                name=f"last{suffix}",
                hook_point=hook_point,
                value=lambda call: _directions(call)[:, -1].cpu(),
                reducer=Rows(),
                axes="LBE",
                meaning="The unit state at the last position",
            )
            for suffix, hook_point in sites
        ),
        *(
            Observable(
                name=f"intra{suffix}",
                hook_point=hook_point,
                value=_intra,
                reducer=Rows(),
                axes="LB",
                meaning="Mean cosine of the states of a sequence over pairs of positions",
            )
            for suffix, hook_point in sites
        ),
        Observable(
            name="inter",
            hook_point=HookPoint.RESIDUAL_OUT,
            value=lambda call: _directions(call)[:, positions_P],
            reducer=Cosine(),
            axes="LT",
            meaning="Mean cosine of the states at a position over pairs of sequences",
        ),
        Observable(
            name="value_variance",
            hook_point=HookPoint.AGGREGATION,
            value=lambda call: call.aggregation[:, positions_P].double(),
            reducer=Moments(),
            axes="LT",
            meaning="Variance of the value aggregation across sequences, mean over channels",
        ),
    ]


def contraction(recorder: Recorder, length: int) -> Contraction:
    """The contraction over all passes that the recorder listened to."""
    results = recorder.results()
    layers = range(len(recorder.anatomy.layers))
    sites = [(name, layer) for layer in layers for name in ("_mid", "")]
    last = [results[f"last{name}"][layer] for name, layer in [("", -1), *sites]]
    intra = [results[f"intra{name}"][layer] for name, layer in [("", -1), *sites]]
    directions = [principal(rows_NE) for rows_NE in last]
    return Contraction(
        inter_SN=np.stack([pairwise_cosine(rows_NE).numpy() for rows_NE in last]),
        intra_SN=np.stack([values_N.cpu().numpy() for values_N in intra]),
        alignment_S=np.array([direction.alignment for direction in directions]),
        top_share_S=np.array([direction.share for direction in directions]),
        split_half_S=np.array([split_half_cosine(rows_NE) for rows_NE in last]),
        mean_state_SE=np.stack([rows_NE.double().mean(0).numpy() for rows_NE in last]),
        positions_P=curve_positions(length).numpy(),
        inter_by_position=torch.stack([values_P.cpu() for values_P in results["inter"].values()]).double().numpy(),
        value_variance=torch.stack([values_P.cpu() for values_P in results["value_variance"].values()]).numpy(),
    )


def _directions(call: LayerCall) -> Tensor:
    return nn.functional.normalize(wide(call.residual), dim=-1)


def _intra(call: LayerCall) -> Tensor:
    unit_BTE = _directions(call)
    return cosine_from_sum(unit_BTE.sum(1).double(), (unit_BTE != 0).any(-1).sum(1))


def curve_positions(length: int) -> Tensor:
    """[P] every position of a short sequence; of a longer one the first, the last, and others evenly in log."""
    if length <= NUM_CURVE_POSITIONS:
        return torch.arange(length)
    return torch.logspace(0, np.log10(length), NUM_CURVE_POSITIONS, dtype=torch.float64).round().long().unique() - 1
