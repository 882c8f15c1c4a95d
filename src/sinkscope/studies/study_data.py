"""The data of a study: the baseline and the result of every condition, from which claims and tables are made.

Axes: B sequences, L layers, S sides of a norm on the aggregation, T positions, K targets, F neurons.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sinkscope.interventions.checks import ROUNDING
from sinkscope.measures.thresholds import LEVEL_ELSEWHERE
from sinkscope.studies.checks import MarkedError, control_unless_marked, missed
from sinkscope.studies.conditions import Condition, sides_of_norm

if TYPE_CHECKING:
    from sinkscope.interventions.plan import Plan
    from sinkscope.models.anatomy import Anatomy, Neuron
    from sinkscope.studies.condition_result import ConditionResult
    from sinkscope.studies.controls import Controls
    from sinkscope.studies.link_values import LinkValues
    from sinkscope.tracing.replay import ConditionReading

NO_VARIANCE = "every sequence has the same token at the sink, so nothing varies there"
NO_TARGET = "there is no position to act on: each one is a sink or has too few later queries"
NO_NEURONS = f"no neuron writes a massive dimension {LEVEL_ELSEWHERE:g}x as strongly at the sink as elsewhere"


@dataclass(frozen=True, kw_only=True)
class StudyData:
    """The baseline and the result of every condition, on the judging sequences."""

    plan: Plan
    anatomy: Anatomy
    link_values: LinkValues
    reading: ConditionReading
    """Of the baseline."""
    baseline: ConditionResult
    results: dict[Condition, ConditionResult]
    """Empty where the choosing sequences show no sink."""
    minimal: tuple[Neuron, ...]
    writers: tuple[Neuron, ...]
    """Where there is no minimal set: those that write most along the sink's direction, as many as it took on the
    choosing sequences."""
    controls: Controls
    not_turned: str
    """Why the residual basis was not turned; empty where it was."""
    sink_varies: bool
    """Whether sequences have different tokens at the sink."""
    fresh_variance_NLST: np.ndarray | None
    """Of models drawn afresh; None where there is none, or nothing to compare with it."""

    @property
    def sides(self) -> tuple[bool, ...]:
        """Those of the norm on the aggregation."""
        return sides_of_norm(self.anatomy)

    @property
    def squared_deviation_LBST(self) -> np.ndarray:
        """Of the aggregation in the layers up to the birth, on each side of its norm: the mean over sequences is the
        batch variance."""
        return self.reading.squares_LBS2T[self.plan.layers, :, :, 0].double().numpy()

    def at_targets(
        self, name: str, factor: float | None = None, held: str | None = None, **more: Any
    ) -> list[Condition]:
        """A condition at every target."""
        return [Condition(name, target, factor, held, **more) for target in self.plan.targets]

    @property
    def by_target(self) -> dict[Condition, list[Condition]]:
        """Conditions that differ in their target alone, by the first of them; random sets apart."""
        groups: dict[Condition, list[Condition]] = defaultdict(list)
        for condition in self.results:
            if condition.number is None:
                at_sink = condition.target == self.plan.sink
                groups[replace(condition, target=self.plan.sink if at_sink else self.plan.targets[0])].append(condition)
        return groups

    def risen_B(self, conditions: Sequence[Condition]) -> np.ndarray:
        """How far the rate rises over the baseline's where each acts, by later queries, mean over them."""
        rises = [self.results[c].later_BS[:, c.target] - self.baseline.later_BS[:, c.target] for c in conditions]
        return np.mean(rises, axis=0)

    def rise_B(self, name: str, factor: float | None = None, held: str | None = None, **more: Any) -> np.ndarray:
        """The same of one condition at every target, as support of a claim."""
        conditions = self.at_targets(name, factor, held, **more)
        self.supports(*conditions)
        return self.risen_B(conditions)

    def at_sink_B(self, condition: Condition | None = None) -> np.ndarray:
        """The rate at the sink by later queries, in the baseline or under a condition, as support of a claim."""
        if condition is None:
            return self.baseline.later_BS[:, self.plan.sink]
        self.supports(condition)
        return self.results[condition].later_BS[:, self.plan.sink]

    def supports(self, *conditions: Condition) -> None:
        """Refuses a condition, at one or more targets, that did not do what its name says."""
        if miss := missed(self, *conditions):
            raise MarkedError(miss)

    @property
    def where(self) -> str:
        """What a mean over targets is a mean over."""
        return f"mean over positions {', '.join(map(str, self.plan.targets))}"

    def left_B2(self, removed: Condition) -> np.ndarray:
        """The rate at the sink before and under a condition: the second over the first is what it leaves."""
        return np.stack([self.at_sink_B(), self.at_sink_B(removed)], 1)

    def left_by(self, name: str, position: int, before_norm: bool = False) -> float | None:
        """What a condition at some position leaves of the sink, as a control; None where it is marked."""
        before, condition = self.at_sink_B().mean(), Condition(name, position, before_norm=before_norm)
        return control_unless_marked(lambda: float(self.at_sink_B(condition).mean() / before))

    def left_BS2(self, name: str) -> np.ndarray:
        """The same of a condition at the sink, on each side of the norm on the aggregation."""
        sink = self.plan.sink
        return np.stack([self.left_B2(Condition(name, sink, before_norm=side)) for side in self.sides], 1)

    def by_side(self, values: np.ndarray) -> str:
        """Numbers on each side, [B, S] or two [B, S, 2] whose ratio counts, in words; nothing where there is one."""
        means = values.mean(0)
        shares = means[:, 1] / means[:, 0] if means.ndim > 1 else means
        words = ("after the norm", "before it")[: len(shares)]
        said = [f"{where} {share:.3g}" for where, share in zip(words, shares, strict=True)]
        return ", ".join(said) if said[1:] else ""

    def moments_over_untouched(self, condition: Condition, before_norm: bool) -> np.ndarray:
        """[3, L] batch variance, energy and squared mean at its target, over the baseline's; NaN over what is
        there by rounding alone, as the variance of a token that is the same in every sequence."""
        before_3L = self.baseline.moments(condition.target, before_norm)
        before_3L = np.where(before_3L > ROUNDING * before_3L[1], before_3L, np.nan)
        return self.results[condition].moments(condition.target, before_norm) / before_3L

    def times_the_variance(self, name: str, factor: float) -> float:
        """The batch variance under a condition over the baseline's, geometric mean over targets and the layers
        acted on."""
        ratios_KL = [self.moments_over_untouched(c, c.before_norm)[0] for c in self.at_targets(name, factor)]
        return float(np.exp(np.log(np.array(ratios_KL)[:, : len(self.plan.layers)]).mean()))

    def top_shares(self, neurons: Sequence[Neuron]) -> tuple[float, float]:
        """(top energy share of the neurons' output vectors, that of the median neuron of their layers), means over
        neurons."""
        from sinkscope.measures.dimension_disparity import top_energy_share

        shares, medians = [], []
        for neuron in neurons:
            layer = self.anatomy.layers[neuron.layer]
            top_F = top_energy_share(layer.written_vectors(neuron.expert).T)
            shares.append(float(top_F[neuron.neuron]))
            medians.append(float(top_F.nanmedian()))  # neurons that write nothing have no share
        return float(np.mean(shares)), float(np.mean(medians))
