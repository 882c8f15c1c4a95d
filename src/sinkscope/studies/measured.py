"""What a study measured: everything that its claims and tables use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sinkscope.capture.replay import ConditionReading
from sinkscope.interventions.matching import TOLERANCE, UNTOUCHED
from sinkscope.measures.dimension_disparity import top_energy_share
from sinkscope.models.anatomy import Anatomy, Unit
from sinkscope.statistics import bootstrap_tail, resample_weights, weighted_means
from sinkscope.studies.conditions import Condition, Outcome
from sinkscope.studies.controls import Controls
from sinkscope.studies.evidence import Evidence
from sinkscope.studies.judging import LEVEL_ELSEWHERE
from sinkscope.studies.plan import Plan

CHECK_CONFIDENCE = 0.99
"""Of the interval in each layer: there are several layers, and most conditions do what they say."""
ROUNDING = 1e-10
"""A moment below this share of the energy is none."""
NO_VARIANCE = "the position has no variance across sequences: every sequence has the same token there"
NO_TARGET = "no position is free of a sink and has enough later queries"
NO_UNITS = f"no unit writes a massive dimension at the sink at {LEVEL_ELSEWHERE:g}x its level elsewhere"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The untouched model and the outcome of every condition, on the judging sequences."""

    plan: Plan
    anatomy: Anatomy
    evidence: Evidence
    reading: ConditionReading
    """Of the untouched model."""
    untouched: Outcome
    outcomes: dict[Condition, Outcome]
    """Empty where the choosing sequences show no sink."""
    minimal: tuple[Unit, ...]
    controls: Controls
    not_turned: str
    """Why the residual basis was not turned; empty where it was."""
    sink_varies: bool
    """Whether sequences have different tokens at the sink."""
    fresh_variance_NLT: np.ndarray | None
    """Of models drawn afresh; None where there is none, or nothing to compare with it."""

    def rise_B(
        self,
        name: str,
        factor: float | None = None,
        held: str | None = None,
        **levels: Any,
    ) -> np.ndarray:
        """How far the rate at each target rises over the untouched model's, by later queries, mean over targets."""
        rises = [
            self.outcomes[Condition(name, target, factor, held, **levels)].later_BS[:, target]
            - self.untouched.later_BS[:, target]
            for target in self.plan.targets
        ]
        return np.mean(rises, axis=0)

    def at_sink_B(self, condition: Condition | None = None) -> np.ndarray:
        """The rate at the sink by later queries, untouched or under a condition."""
        outcome = self.untouched if condition is None else self.outcomes[condition]
        return outcome.later_BS[:, self.plan.sink]

    @property
    def where(self) -> str:
        """What a mean over targets is a mean over."""
        return f"mean over positions {', '.join(map(str, self.plan.targets))}"

    def left_B2(self, removed: Condition) -> np.ndarray:
        """The rate at the sink before and under a condition: the second over the first is what it leaves."""
        return np.stack([self.at_sink_B(), self.at_sink_B(removed)], 1)

    def moments_over_untouched(self, condition: Condition) -> np.ndarray:
        """[3, L] batch variance, energy and squared mean at its target, over the untouched model's; NaN over what is
        there by rounding alone, as the variance of a token that is the same in every sequence."""
        before_3L = self.untouched.moments(condition.target)
        before_3L = np.where(before_3L > ROUNDING * before_3L[1], before_3L, np.nan)
        return self.outcomes[condition].moments(condition.target) / before_3L

    def missed(self, *conditions: Condition) -> str | None:
        """The manipulation check of one condition at one or more targets: the level that it did not bring about, if
        any.

        A variance over a few dozen sequences is known to a tenth or so. So a level counts as missed in a layer where
        the interval of what was found, over what was wanted, lies outside of the tolerance.
        """
        for row, moment in enumerate(("variance", "energy")):
            if (mixing := getattr(conditions[0], moment)) is None:
                continue
            found_BL = np.sum([self.outcomes[c].squares(c.target)[row] for c in conditions], 0)
            wanted_BL = np.sum([self._under(mixing, c.target).squares(c.target)[row] for c in conditions], 0)
            weights_RB, tail = resample_weights(len(found_BL)), bootstrap_tail(len(found_BL), CHECK_CONFIDENCE)
            ratio_RL = weighted_means(weights_RB, found_BL) / weighted_means(weights_RB, wanted_BL)
            low_L, high_L = np.quantile(ratio_RL, [tail, 1 - tail], axis=0)
            off_L = np.maximum(np.log(low_L), -np.log(high_L))
            if off_L.max() > np.log(1 + TOLERANCE):
                worst = int(off_L.argmax())
                ratio = found_BL[:, worst].mean() / wanted_BL[:, worst].mean()
                where = f"{ratio:.2f} of it in layer {self.plan.mixed[worst]}"
                return f"{conditions[0].label} misses its {moment}: {where}"
        return None

    def _under(self, mixing: str, target: int) -> Outcome:
        return self.untouched if mixing == UNTOUCHED else self.outcomes[Condition(mixing, target)]

    def top_shares(self, units: Sequence[Unit]) -> tuple[float, float]:
        """(top energy share of the units' output vectors, that of the median unit of their layers), means over
        units."""
        shares, medians = [], []
        for unit in units:
            layer = self.anatomy.layers[unit.layer]
            top_F = top_energy_share(layer.written_vectors(unit.expert).T)
            shares.append(float(top_F[unit.neuron]))
            medians.append(float(top_F.nanmedian()))  # units that write nothing have no share
        return float(np.mean(shares)), float(np.mean(medians))
