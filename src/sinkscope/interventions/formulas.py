"""The formulas for a new value aggregation o at one position.

With mu the mean of o over a calibration batch, d = o - mu a sequence's deviation and f the factor:

    amplify_variance   mu + f d        = o + (f - 1) d
    scale_norm         f o
    shift_mean         o + (1 - f) mu      the only thing in which the first two differ
    swap_deviation     o + (f - 1) d'      d' the deviation of a calibration sequence, another one in each layer
    random_direction   o + (f - 1) |d| u   u a random unit vector, drawn per sequence and layer
    equalise_variance  mu + s d            s brings the variance at the position down to that of the later half
    remove_mean        d
    remove_deviation   mu
    remove_energy      r o                 r brings |o|^2 to its mean over the later half

Axes: B sequences, T positions, C channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sinkscope.measures.value_variance import value_variance
from sinkscope.tracing.layer_call import wide

ROUNDING = 1e-10
"""A variance that is this share of the squared mean is that of sums in float32."""


@dataclass(frozen=True, kw_only=True)
class LayerCalibration:
    """What the intervention needs to know in one layer, from the calibration batch."""

    mean_C: Tensor
    deviations_BC: Tensor
    later: Tensor
    """What the formula needs of the later half of positions, 0 where it needs nothing."""

    @property
    def varies(self) -> bool:
        """Whether sequences differ there, by more than rounding does."""
        return bool(self.deviations_BC.square().mean() > ROUNDING * self.mean_C.square().mean())

    @classmethod
    def of(cls, aggregation_BTC: Tensor, position: int, later: Callable[[Tensor], Tensor] | None) -> LayerCalibration:
        chosen_BC = wide(aggregation_BTC[:, position])
        half_BTC = aggregation_BTC[:, aggregation_BTC.shape[1] - aggregation_BTC.shape[1] // 2 :]
        mean_C = chosen_BC.mean(0)
        return cls(
            mean_C=mean_C,
            deviations_BC=chosen_BC - mean_C,
            later=later(half_BTC.to(chosen_BC)) if later else torch.zeros(()),
        )


Formula = Callable[[Tensor, LayerCalibration, float, int], Tensor]
"""(o [B, C], calibration, factor, layer) -> the new o."""


def _amplify(o, calibration, factor, layer):
    return o + (factor - 1) * (o - calibration.mean_C)  # in this form a factor of 1 changes no bit


def _scale(o, calibration, factor, layer):
    return factor * o


def _shift(o, calibration, factor, layer):
    return o + (1 - factor) * calibration.mean_C


def _swap(o, calibration, factor, layer):
    # Another step in each layer, from 1 to n - 1: no sequence keeps its partner, and none is its own while calibrating.
    num_seen = len(calibration.deviations_BC)
    partners = (torch.arange(len(o), device=o.device) + 1 + 7 * layer % (num_seen - 1)) % num_seen
    return o + (factor - 1) * calibration.deviations_BC[partners]


def _random(o, calibration, factor, layer):
    generator = torch.Generator().manual_seed(layer)
    direction = torch.nn.functional.normalize(torch.randn(o.shape, generator=generator), dim=-1).to(o)
    deviation = torch.linalg.vector_norm(o - calibration.mean_C, dim=-1, keepdim=True)
    return o + (factor - 1) * deviation * direction


def _equalise(o, calibration, factor, layer):
    variance = value_variance(calibration.deviations_BC[:, None])[0]
    shrink = (calibration.later / variance.clamp(min=torch.finfo(torch.float32).tiny)).sqrt().clamp(max=1.0)
    return calibration.mean_C + shrink * (o - calibration.mean_C)


def _remove_mean(o, calibration, factor, layer):
    return o - calibration.mean_C


def _remove_deviation(o, calibration, factor, layer):
    return calibration.mean_C.expand_as(o)


def _remove_energy(o, calibration, factor, layer):
    energy = o.square().sum(-1, keepdim=True)
    scale = (calibration.later / energy.clamp(min=torch.finfo(torch.float32).tiny)).sqrt()
    return o * scale.masked_fill(energy == 0, 0)  # an aggregation of zeros, as of a token of zeros, stays one


FORMULAS: dict[str, Formula] = {
    "amplify_variance": _amplify,
    "scale_norm": _scale,
    "shift_mean": _shift,
    "swap_deviation": _swap,
    "random_direction": _random,
    "equalise_variance": _equalise,
    "remove_mean": _remove_mean,
    "remove_deviation": _remove_deviation,
    "remove_energy": _remove_energy,
}

LATER: dict[str, Callable[[Tensor], Tensor]] = {
    "equalise_variance": lambda later_BTC: value_variance(later_BTC).mean(),
    "remove_energy": lambda later_BTC: later_BTC.square().sum(-1).mean(),
}
"""What a formula needs of the later half of positions: variance across sequences, mean over channels; |o|^2."""

OF_DEVIATION = ("amplify_variance", "swap_deviation", "random_direction")
"""Formulas that enlarge a deviation, and change nothing where there is none."""
