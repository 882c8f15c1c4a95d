"""What a study measured: everything that its claims and tables use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sinkscope.capture.replay import ConditionReading
from sinkscope.measures.dimension_disparity import top_energy_share
from sinkscope.models.anatomy import Anatomy, Unit
from sinkscope.studies.conditions import Condition, Outcome
from sinkscope.studies.controls import Controls
from sinkscope.studies.evidence import Evidence
from sinkscope.studies.judging import LEVEL_ELSEWHERE
from sinkscope.studies.plan import Plan

NO_VARIANCE = "the position has no variance across sequences: every sequence has the same token there"
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
    sink_varies: bool
    """Whether sequences have different tokens at the sink."""
    fresh_variance_NLT: np.ndarray | None
    """Of models drawn afresh; None where there is none, or nothing to compare with it."""

    def rise_B(self, name: str, factor: float | None = None, held: str | None = None) -> np.ndarray:
        """How far the rate at each target rises over the untouched model's, mean over targets."""
        rises = [
            self.outcomes[Condition(name, target, factor, held)].rate_BS[:, target] - self.untouched.rate_BS[:, target]
            for target in self.plan.targets
        ]
        return np.mean(rises, axis=0)

    def at_sink_B(self, condition: Condition | None = None) -> np.ndarray:
        """The rate at the sink, untouched or under a condition."""
        outcome = self.untouched if condition is None else self.outcomes[condition]
        return outcome.rate_BS[:, self.plan.sink]

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
