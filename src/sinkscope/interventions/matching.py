"""Brings the moments of the value aggregation at one position to a level: that of the baseline, or of another
intervention.

Over sequences, with mu the mean of o, d = o - mu, and everything a mean over channels:

    V   batch variance, the unbiased variance of d
    E   energy, the mean of o^2, which is mu^2 + V (n - 1) / n

The aggregation becomes a mu + c u + s d. s brings the variance to its level. Energy that is missing then is made up
along u, a random unit direction at right angles to mu that is the same in every sequence: so neither the variance nor
the part along mu changes. Energy that is too much is taken from the mean. What the mean does not have cannot be taken:
a variance that is more than the whole energy asked for is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from sinkscope.errors import InputError
from sinkscope.interventions.aggregation import AggregationHook, ChangeAggregation, no_variance, run_with_aggregations
from sinkscope.interventions.base import AggregationPlace, Intervention, Model, Place
from sinkscope.interventions.formulas import FORMULAS
from sinkscope.measures.value_variance import second_moment, value_variance
from sinkscope.models.anatomy import Layer
from sinkscope.models.token_batches import TokenBatch
from sinkscope.tracing.layer_call import wide

BASELINE = "baseline"
TOLERANCE = 0.1
"""A level counts as met within this share of it."""


class Moments(NamedTuple):
    """Of the aggregation at one position and layer, means over channels."""

    variance: float
    energy: float


Level = str | Intervention | Sequence[Intervention] | Mapping[int, Moments]
"""The baseline, the model with these interventions on and no others, or the measured moments by layer."""


class MatchMoments(ChangeAggregation):
    """The batch variance, the energy, or both, at the level that they have elsewhere."""

    def __init__(
        self,
        model: Model,
        position: int,
        *,
        variance: Level | None = None,
        energy: Level | None = None,
        calibration: TokenBatch | None = None,
        nearest: bool = False,
        **where: Unpack[AggregationPlace],
    ) -> None:
        """`nearest`: comes as near as it can where a level cannot be met, instead of refusing."""
        if variance is None and energy is None:
            raise InputError(
                "There is no level to match. Give one, such as 'baseline', as `variance`, `energy` or both."
            )
        self._levels, self._nearest = (variance, energy), nearest
        kinds = [kind for kind, level in (("variance", variance), ("energy", energy)) if level is not None]
        super().__init__(model, f"match_{'_and_'.join(kinds)}", position, calibration=calibration, **where)

    def prepare(self) -> None:
        """The levels, by layer; None for a moment that is left alone."""
        variance, energy = (
            None if level is None else moments_under(level, self._model, self._batch, self.place)
            for level in self._levels
        )
        self.levels: dict[int, tuple[float | None, float | None]] = {
            layer: (
                None if variance is None else variance[layer].variance,
                None if energy is None else energy[layer].energy,
            )
            for layer in self.place.layers
        }

    def formula(self, old_BC: Tensor, layer: int) -> Tensor:
        calibration = self.calibrated[layer]
        variance, energy = self.levels[layer]
        deviation_BC, mean_C = old_BC - calibration.mean_C, calibration.mean_C
        if variance is not None:
            current = float(value_variance(calibration.deviations_BC[:, None]))
            if current == 0 < variance and not self._nearest:
                raise no_variance(f"at position {self.position} of layer {layer}")
            deviation_BC = deviation_BC * (0.0 if current == 0 else (variance / current) ** 0.5)
        if energy is not None:
            mean_C = self._mean_of_energy(energy, layer, variance)
        return mean_C + deviation_BC

    def _mean_of_energy(self, energy: float, layer: int, variance: float | None) -> Tensor:
        """The mean that brings the energy to its level."""
        calibration = self.calibrated[layer]
        mean_C, count = calibration.mean_C, len(calibration.deviations_BC)
        if variance is None:
            of_deviation = float(calibration.deviations_BC.square().mean())
        else:
            of_deviation = variance * (count - 1) / count
        of_mean = float(mean_C.square().mean())
        missing = energy - of_deviation - of_mean
        if missing >= 0:
            # Along a random direction at right angles to the mean: the variance and the part along the mean stay.
            draws = torch.randn(len(mean_C), generator=torch.Generator().manual_seed(layer)).to(mean_C)
            across_C = draws - mean_C * (draws @ mean_C / (mean_C @ mean_C)).nan_to_num()
            return mean_C + across_C * (missing / across_C.square().mean()).sqrt()
        if of_deviation > (1 + TOLERANCE) * energy and not self._nearest:
            raise InputError(
                f"At position {self.position} of layer {layer} the energy cannot be {energy:.3g}, since the deviation "
                f"alone has {of_deviation:.3g}. Match the variance too (`match_moments={self.position}`), or choose "
                "other layers."
            )
        return mean_C * max(0.0, 1 + missing / of_mean) ** 0.5


class ShiftMeanAlone(MatchMoments):
    """`shift_mean` with the batch variance at a level, as near as it can be: what is shifted in one layer changes the
    variance of the next."""

    def __init__(
        self,
        model: Model,
        position: int,
        factor: float,
        *,
        variance: Level,
        calibration: TokenBatch | None = None,
        **where: Unpack[AggregationPlace],
    ) -> None:
        super().__init__(model, position, variance=variance, calibration=calibration, nearest=True, **where)
        self.name, self.factor = "shift_mean", factor

    def formula(self, old_BC: Tensor, layer: int) -> Tensor:
        return FORMULAS[self.name](super().formula(old_BC, layer), self.calibrated[layer], self.factor, layer)


def match_moments(
    model: Model,
    position: int,
    *,
    variance: Level | None = None,
    energy: Level | None = None,
    calibration: TokenBatch | None = None,
    **where: Unpack[AggregationPlace],
) -> MatchMoments:
    """The batch variance and the energy of the aggregation at `position`, each at its level; None leaves one to follow.

    A level is "baseline", or an intervention (or several): the moments at the position with those on and no others.
    `where` takes layers, heads and sequences, all of them by default, and before_norm: on what enters the norm on the
    aggregation, in models that have one. Without a calibration, one of random tokens is drawn.
    """
    return MatchMoments(model, position, variance=variance, energy=energy, calibration=calibration, **where)


def match_variance(
    model: Model,
    position: int,
    to: Level = BASELINE,
    *,
    calibration: TokenBatch | None = None,
    **where: Unpack[AggregationPlace],
) -> MatchMoments:
    """The batch variance of the aggregation at `position` brought to the level `to`; its mean is left alone.

    `where` is as for `match_moments`.
    """
    return MatchMoments(model, position, variance=to, calibration=calibration, **where)


def match_energy(
    model: Model,
    position: int,
    to: Level = BASELINE,
    *,
    calibration: TokenBatch | None = None,
    **where: Unpack[AggregationPlace],
) -> MatchMoments:
    """The energy of the aggregation at `position` brought to the level `to`; its variance is left alone.

    `where` is as for `match_moments`.
    """
    return MatchMoments(model, position, energy=to, calibration=calibration, **where)


def moments_under(level: Level, model: torch.nn.Module, calibration: TokenBatch, place: Place) -> Mapping[int, Moments]:
    """By layer, the moments at a place's position on a calibration batch, with a level's interventions on and no
    others."""
    if isinstance(level, Mapping):
        return level
    if isinstance(level, str) and level != BASELINE:
        raise InputError(f"A level is 'baseline', an intervention or several, not {level!r}.")
    if isinstance(level, str):
        others = []
    elif isinstance(level, Intervention):
        others = [level]
    else:
        others = level
    moments: dict[int, Moments] = {}

    def reading(layer: Layer) -> AggregationHook:
        def read(aggregation_BTC: Tensor, chosen: slice | Tensor) -> None:
            assert place.positions is not None
            o_B1C = wide(aggregation_BTC[:, place.positions][..., chosen])
            moments[layer.index] = Moments(float(value_variance(o_B1C)), float(second_moment(o_B1C)))

        return read

    run_with_aggregations(model, calibration, place, others, reading)
    return moments
