"""The result of a condition: numbers by sequence, reduced at once from what its pass recorded.

Each result is kept as a finished part, so that an interrupted study need not run the condition again.

Axes: B sequences, T and S positions, L layers, K places (the sink and the targets), P the same and the mean of all
other positions, Q quantities, n super neurons.
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
"""What is kept at the sink and the targets, as a mean over layers; with the attribute of `ConditionReading`."""
ROWS = {name: QUANTITIES[name] for name in ("entropy", "mixing")}
"""What is kept of the attention of every query position, likewise."""
ARRAYS = ("rate_BS", "later_BS", "at_QKB", "rows_QBT", "norm_LPB", "squares_S2PBL", "weights_2KBL", "neurons_BTn")
STORED = (*ARRAYS, "places", "acted_in")
"""What the part of every result holds; some hold more."""


@dataclass(frozen=True, kw_only=True)
class ConditionResult:
    """The numbers of one condition, by sequence."""

    rate_BS: np.ndarray
    """Sink rate of every position by its published definition, over the key's own query and all later ones."""
    later_BS: np.ndarray
    """Sink rate over later queries only. Interventions are judged on it, because a mask can set the weight of a key's
    own query to 1."""
    places: tuple[int, ...]
    """The sink and the targets."""
    at_QKB: np.ndarray
    """Each of QUANTITIES at each place."""
    rows_QBT: np.ndarray
    """Each of ROWS at every position."""
    norm_LPB: np.ndarray
    """Norm of the residual after each layer, at each place and, last, as a mean over all other positions."""
    squares_S2PBL: np.ndarray
    """Squared deviation and energy of the aggregation in the early layers, at each place and, last, as a mean over the
    later half of positions: as it enters the output projection (S = 0) and the norm before it, if there is one."""
    weights_2KBL: np.ndarray
    """sum a^2 of the attention at each place in these layers, and the own key's part of it."""
    neurons_BTn: np.ndarray
    """Activations of the super neurons."""
    loss_B: np.ndarray | None = None
    """None where it was not recorded."""
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
        """[3, L] variance, energy and squared mean of the aggregation at the sink or a target."""
        variance_L, energy_L = self.squares(position, before_norm).mean(1)
        return np.stack([variance_L, energy_L, energy_L - variance_L * (1 - 1 / len(self.rate_BS))])

    def squares(self, position: int, before_norm: bool = False) -> np.ndarray:
        """[2, B, L] squared deviation and energy, whose means over sequences are the first two moments."""
        return self.squares_S2PBL[int(before_norm), :, self.places.index(position)]

    def later_squares(self, before_norm: bool = False) -> np.ndarray:
        """[2, B, L] the same as a mean over the later half of positions."""
        return self.squares_S2PBL[int(before_norm), :, -1]

    def weights(self, position: int) -> np.ndarray:
        """[2, B, L] sum a^2 and the own key's part of it, at the sink or a target."""
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
    """The result of a condition, from what its pass recorded."""
    places = (plan.sink, *plan.targets)
    at = [getattr(reading, name)[..., list(places)].double().nanmean(0).numpy().T for name in QUANTITIES.values()]
    neurons = [reading.neuron_values(neuron).float().numpy() for neuron in plan.super_neurons]
    norm_LTB = reading.residual_norm_LBT.float().numpy().swapaxes(1, 2)
    length = norm_LTB.shape[1]
    elsewhere = np.setdiff1d(np.arange(length), places)
    squares_LBS2T = reading.squares_LBS2T[plan.layers].double()
    later_LBS2 = squares_LBS2T[..., length - length // 2 :].mean(-1, keepdim=True)
    squares_LBS2P = torch.cat([squares_LBS2T[..., list(places)], later_LBS2], -1)
    both_weights = (reading.mixing_LBT, reading.own_mixing_LBT)
    weights = [weights_LBT[plan.layers][..., list(places)] for weights_LBT in both_weights]
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
