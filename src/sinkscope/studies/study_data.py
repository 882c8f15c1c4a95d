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
    """Where there is no minimal set: the neurons that write most strongly along the sink's direction, as many as it
    took on the choosing sequences to remove the sink."""
    controls: Controls
    not_turned: str
    """Why the residual basis was not turned; empty where it was."""
    sink_varies: bool
    """Whether sequences have different tokens at the sink."""
    tokens_differ: bool
    """Whether the last token, which is put elsewhere, is another one than the sink's."""
    fresh_deviation_NLBST: np.ndarray | None
    """Squared deviation in the same architecture before training, from `fresh`; None if no such model fits on this
    machine, or there is nothing to compare with it."""

    @property
    def sides(self) -> tuple[bool, ...]:
        """The sides of a norm on the aggregation, as values of `before_norm`."""
        return sides_of_norm(self.anatomy)

    @property
    def largest_rate(self) -> float:
        """The highest sink rate of one sequence at the sink or a target, in any condition."""
        rates = [result.later_BS[:, condition.target] for condition, result in self.results.items()]
        return float(np.max([self.baseline.rate_BS[:, self.plan.sink], *rates]))

    @property
    def squared_deviation_LBST(self) -> np.ndarray:
        """Of the aggregation in the early layers, on each side of its norm. Its mean over sequences is the variance."""
        return self.reading.squares_LBS2T[self.plan.layers, :, :, 0].double().numpy()

    def at_targets(
        self, name: str, factor: float | None = None, held: str | None = None, **more: Any
    ) -> list[Condition]:
        """The conditions of one kind at every target where it was run."""
        every = [Condition(name, target, factor, held, **more) for target in self.plan.targets]
        return [condition for condition in every if condition in self.results]

    @property
    def removed(self) -> tuple[Neuron, ...]:
        """The neurons that were removed together: the minimal set or, where there is none, the writers."""
        return self.minimal or self.writers

    @property
    def removal(self) -> Condition:
        """Their removal."""
        return Condition("ablate_minimal_set" if self.minimal else "ablate_writers", self.plan.sink)

    @property
    def by_target(self) -> dict[Condition, list[Condition]]:
        """Conditions that differ only in their target, by the one at the first target. Random sets are left out."""
        groups: dict[Condition, list[Condition]] = defaultdict(list)
        for condition in self.results:
            if condition.number is None:
                first = self.plan.sink if condition.target == self.plan.sink else self.plan.targets[0]
                groups[replace(condition, target=first)].append(condition)
        return groups

    def risen_B(self, conditions: Sequence[Condition]) -> np.ndarray:
        """[B] the rise of the sink rate over the baseline's at the position that a condition acts on, counted over
        later queries, mean over conditions."""
        rises = [self.results[c].later_BS[:, c.target] - self.baseline.later_BS[:, c.target] for c in conditions]
        return np.mean(rises, axis=0)

    def rise_B(self, name: str, factor: float | None = None, held: str | None = None, **more: Any) -> np.ndarray:
        """[B] the same of one kind of condition at every target, for a claim: its manipulation check must pass."""
        conditions = self.at_targets(name, factor, held, **more)
        self.supports(*conditions)
        return self.risen_B(conditions)

    def at_sink_B(self, condition: Condition | None = None) -> np.ndarray:
        """[B] the rate at the sink, counted over later queries, in the baseline or under a condition. The condition's
        manipulation check must pass."""
        if condition is None:
            return self.baseline.later_BS[:, self.plan.sink]
        self.supports(condition)
        return self.results[condition].later_BS[:, self.plan.sink]

    def supports(self, *conditions: Condition) -> None:
        """Raises MarkedError if a condition, at one or more targets, failed its manipulation check."""
        failure = missed(self, *conditions)
        if failure:
            raise MarkedError(failure)

    @property
    def where(self) -> str:
        """For notes: which positions a mean over targets is over."""
        return f"mean over positions {', '.join(map(str, self.plan.targets))}"

    def left_B2(self, removed: Condition) -> np.ndarray:
        """[B, 2] the rate at the sink in the baseline and under a condition. The second over the first is the share of
        the sink that is left."""
        return np.stack([self.at_sink_B(), self.at_sink_B(removed)], 1)

    def left_by(self, name: str, position: int, before_norm: bool = False) -> float | None:
        """The share of the sink that a condition at some position leaves; None if not run or its check failed."""
        before = self.at_sink_B().mean()
        condition = Condition(name, position, before_norm=before_norm)
        if condition not in self.results:
            return None
        return control_unless_marked(lambda: float(self.at_sink_B(condition).mean() / before))

    def left_BS2(self, name: str) -> np.ndarray:
        """[B, S, 2] as `left_B2`, of a condition at the sink on each side of the norm on the aggregation."""
        sink = self.plan.sink
        return np.stack([self.left_B2(Condition(name, sink, before_norm=side)) for side in self.sides], 1)

    def by_side(self, values: np.ndarray) -> str:
        """For notes: the number on each side of the norm, of values [B, S], or [B, S, 2] whose second over first
        counts. Empty in models without a norm on the aggregation."""
        means = values.mean(0)
        numbers = means[:, 1] / means[:, 0] if means.ndim > 1 else means
        if len(numbers) == 1:
            return ""
        after, before = numbers
        return f"after the norm {after:.3g}, before it {before:.3g}"

    def moments_over_baseline(self, condition: Condition, before_norm: bool) -> np.ndarray:
        """[3, L] variance, energy and squared mean at the target, over those of the baseline. NaN where the baseline
        has none but for rounding, such as the variance of a token that is the same in every sequence."""
        before_3L = self.baseline.moments(condition.target, before_norm)
        before_3L = np.where(before_3L > ROUNDING * before_3L[1], before_3L, np.nan)
        return self.results[condition].moments(condition.target, before_norm) / before_3L

    def times_the_variance(self, name: str, factor: float) -> float:
        """The variance under a condition over that of the baseline, geometric mean over targets and layers acted on."""
        ratios_KL = [self.moments_over_baseline(c, c.before_norm)[0] for c in self.at_targets(name, factor)]
        return float(np.exp(np.log(np.array(ratios_KL)[:, : len(self.plan.layers)]).mean()))

    def top_shares(self, neurons: Sequence[Neuron]) -> tuple[float, float]:
        """(largest share of energy in one dimension of the neurons' output vectors, the same of the median neuron of
        their layers), means over the neurons."""
        from sinkscope.measures.dimension_disparity import top_energy_share

        shares, medians = [], []
        for neuron in neurons:
            layer = self.anatomy.layers[neuron.layer]
            top_F = top_energy_share(layer.written_vectors(neuron.expert).T)
            shares.append(float(top_F[neuron.neuron]))
            medians.append(float(top_F.nanmedian()))  # neurons that write nothing have no share
        return float(np.mean(shares)), float(np.mean(medians))
