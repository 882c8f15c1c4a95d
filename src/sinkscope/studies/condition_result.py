"""The result of a condition, which a study keeps: its reading, reduced at once to numbers by sequence.

A result is a finished part: a study that was interrupted reads it back instead of running its condition again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from sinkscope.interventions.plan import Plan
from sinkscope.tracing.replay import ConditionReading

QUANTITIES = {
    "entropy": "entropy_LBT",
    "mixing": "mixing_LBT",
    "aggregation_norm": "aggregation_norm_LBT",
    "residual_norm": "residual_norm_LBT",
    "dom_ratio": "dom_ratio_LBT",
    "received": "received_LBS",
}
"""What is kept at the sink and at the targets, means over layers, by where a reading has it."""
ROWS = {name: QUANTITIES[name] for name in ("entropy", "mixing")}
"""What is kept of every position's row of attention, means over layers, by where a reading has it."""
ARRAYS = ("rate_BS", "later_BS", "at_QKB", "rows_QBT", "norm_LPB", "squares_S2PBL", "weights_2KBL", "neurons_BTn")
STORED = (*ARRAYS, "places", "acted_in")
"""Of every result, and what its part holds at least."""


@dataclass(frozen=True, kw_only=True)
class ConditionResult:
    """The numbers of one condition, by sequence."""

    rate_BS: np.ndarray
    """Sink rate of every position, as it is published: over all queries from the key on."""
    later_BS: np.ndarray
    """The same over later queries alone, which interventions are judged on."""
    places: tuple[int, ...]
    """The sink and the targets."""
    at_QKB: np.ndarray
    """Each of QUANTITIES at each place."""
    rows_QBT: np.ndarray
    """Each of ROWS at every position."""
    norm_LPB: np.ndarray
    """Norm of the residual after each layer, at each place and, last, as a mean over all other positions."""
    squares_S2PBL: np.ndarray
    """Squared deviation and energy of the aggregation at each place and, last, as a mean over the later half of
    positions, in the layers up to the birth: as it enters the output projection and the norm before it, if any."""
    weights_2KBL: np.ndarray
    """Mixing of the attention at each place in those layers, and the part of it that its own key has."""
    neurons_BTn: np.ndarray
    """Activations of the super neurons."""
    loss_B: np.ndarray | None = None
    """Where it was recorded."""
    acted_in: tuple[int, ...] = ()
    """The layers in which its interventions acted."""
    means: dict[str, np.ndarray] = field(default_factory=dict)
    """The calibration means that it was made with."""

    def at(self, quantity: str, position: int) -> np.ndarray:
        """[B] a quantity at the sink or a target."""
        return self.at_QKB[list(QUANTITIES).index(quantity), self.places.index(position)]

    def outside(self, quantity: str, position: int) -> np.ndarray:
        """[B] one of ROWS, mean over all positions but one."""
        return np.delete(self.rows_QBT[list(ROWS).index(quantity)], position, axis=1).mean(1)

    def moments(self, position: int, before_norm: bool = False) -> np.ndarray:
        """[3, L] batch variance, energy and squared mean of the aggregation at the sink or a target."""
        variance_L, energy_L = self.squares(position, before_norm).mean(1)
        return np.stack([variance_L, energy_L, energy_L - variance_L * (1 - 1 / len(self.rate_BS))])

    def squares(self, position: int, before_norm: bool = False) -> np.ndarray:
        """[2, B, L] what the first two are means of."""
        return self.squares_S2PBL[int(before_norm), :, self.places.index(position)]

    def later_squares(self, before_norm: bool = False) -> np.ndarray:
        """[2, B, L] the same as a mean over the later half of positions."""
        return self.squares_S2PBL[int(before_norm), :, -1]

    def weights(self, position: int) -> np.ndarray:
        """[2, B, L] mixing and its own key's part of it, at the sink or a target."""
        return self.weights_2KBL[:, self.places.index(position)]

    def tensors(self) -> dict[str, np.ndarray]:
        """What is written to a part."""
        tensors = {name: getattr(self, name) for name in ARRAYS}
        if self.loss_B is not None:
            tensors["loss_B"] = self.loss_B
        tensors |= {name: np.array(getattr(self, name), dtype=np.int64) for name in ("places", "acted_in")}
        return {**tensors, **{f"means.{k}": v for k, v in self.means.items()}}

    @classmethod
    def of_tensors(cls, tensors: dict[str, np.ndarray]) -> ConditionResult:
        return cls(
            **{name: tensors[name] for name in ARRAYS},
            places=tuple(tensors["places"].tolist()),
            acted_in=tuple(tensors["acted_in"].tolist()),
            loss_B=tensors.get("loss_B"),
            means={k.removeprefix("means."): v for k, v in tensors.items() if k.startswith("means.")},
        )


def reduced(reading: ConditionReading, plan: Plan) -> ConditionResult:
    """The result, reduced from a reading."""
    places = (plan.sink, *plan.targets)
    at = [getattr(reading, name)[..., list(places)].double().nanmean(0).numpy().T for name in QUANTITIES.values()]
    neurons = [reading.neuron_values(neuron).float().numpy() for neuron in plan.super_neurons]
    norm_LTB = reading.residual_norm_LBT.float().numpy().swapaxes(1, 2)
    length = norm_LTB.shape[1]
    elsewhere = np.setdiff1d(np.arange(length), places)
    squares_LBS2T = reading.squares_LBS2T[plan.factorial_layers].double()
    later_LBS2 = squares_LBS2T[..., length - length // 2 :].mean(-1, keepdim=True)
    squares_LBS2P = torch.cat([squares_LBS2T[..., list(places)], later_LBS2], -1)
    both_weights = (reading.mixing_LBT, reading.own_mixing_LBT)
    weights = [weights_LBT[plan.factorial_layers][..., list(places)] for weights_LBT in both_weights]
    return ConditionResult(
        rate_BS=reading.rate_BS.numpy(),
        later_BS=reading.later_rate_BS.numpy(),
        places=places,
        at_QKB=np.stack(at),
        rows_QBT=np.stack([getattr(reading, name).double().nanmean(0).float().numpy() for name in ROWS.values()]),
        norm_LPB=np.concatenate([norm_LTB[:, places], norm_LTB[:, elsewhere].mean(1, keepdims=True)], 1),
        squares_S2PBL=squares_LBS2P.permute(2, 3, 4, 1, 0).numpy(),
        weights_2KBL=torch.stack(weights).double().permute(0, 3, 2, 1).numpy(),
        neurons_BTn=np.stack(neurons, -1) if neurons else np.zeros((*reading.rate_BS.shape, 0), np.float32),
        loss_B=None if reading.loss_B is None else reading.loss_B.double().numpy(),
    )
