"""Every condition that a study runs the judging sequences under, and what it keeps of each.

A condition is named, has a target position and perhaps a factor, and is reduced at once to numbers by sequence. Its
outcome is a finished part: a study that was interrupted reads it back instead of running it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sinkscope.capture.replay import ConditionReading, Replay
from sinkscope.interventions.aggregation import AggregationEdit
from sinkscope.interventions.base import Intervention, together
from sinkscope.interventions.mask import edit_mask, mask_to_self
from sinkscope.interventions.neurons import (
    ClampNeurons,
    ablate_neurons,
    densify_neurons,
    matched_units,
    transplant_neurons,
)
from sinkscope.interventions.residual import ClampDimensions, set_dimensions
from sinkscope.models.anatomy import Unit
from sinkscope.models.loading import LoadedModel
from sinkscope.models.token_batches import TokenBatch
from sinkscope.studies.plan import Plan

FACTORS = (1.5, 2.0, 4.0, 8.0)
"""Doses of amplification beside 1; claims and their controls are judged at the largest."""
DOSE = FACTORS[-1]
NUM_RANDOM_SETS = 20


@dataclass(frozen=True)
class Condition:
    """One thing done to the model while the judging sequences run."""

    name: str
    make: Callable[[], Sequence[Intervention]]
    """Builds the interventions, calibration included; called only where the outcome is not there yet."""
    target: int | None = None
    factor: float | None = None
    number: int | None = None
    """Which of several random sets."""

    @property
    def key(self) -> str:
        parts = (self.name, self.target, None if self.factor is None else f"{self.factor:g}", self.number)
        return "-".join(str(part) for part in parts if part is not None)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a condition left, by sequence."""

    rate_BS: np.ndarray
    """Sink rate of every position."""
    at: dict[str, np.ndarray]
    """[B] by quantity: `<quantity>_at_<position>`, means over layers, and the loss."""
    units_BTn: np.ndarray
    """Activations of the super neurons."""
    means: dict[str, np.ndarray] = field(default_factory=dict)
    """The calibration means that it was made with."""

    def tensors(self) -> dict[str, np.ndarray]:
        named = {f"{kind}.{k}": v for kind in ("at", "means") for k, v in getattr(self, kind).items()}
        return {"rate_BS": self.rate_BS, "units_BTn": self.units_BTn, **named}

    @classmethod
    def of_tensors(cls, tensors: dict[str, np.ndarray]) -> Outcome:
        at, means = (
            {name.removeprefix(kind): value for name, value in tensors.items() if name.startswith(kind)}
            for kind in ("at.", "means.")
        )
        return cls(rate_BS=tensors["rate_BS"], units_BTn=tensors["units_BTn"], at=at, means=means)


QUANTITIES = {
    "entropy": "entropy_LBT",
    "mixing": "mixing_LBT",
    "aggregation_norm": "aggregation_norm_LBT",
    "residual_norm": "residual_norm_LBT",
    "dom_ratio": "dom_ratio_LBT",
    "received": "received_LBS",
}


def reduced(reading: ConditionReading, plan: Plan) -> Outcome:
    """The outcome that a reading leaves."""
    places = (plan.sink, *plan.targets)
    at = {
        f"{quantity}_at_{position}": getattr(reading, name)[:, :, position].double().nanmean(0).numpy()
        for quantity, name in QUANTITIES.items()
        for position in places
    }
    if reading.loss_B is not None:
        at["loss"] = reading.loss_B.double().numpy()
    units = [reading.unit_values(unit).float().numpy() for unit in plan.super_neurons]
    shape = (*reading.rate_BS.shape, 0)
    return Outcome(
        rate_BS=reading.rate_BS.numpy(), at=at, units_BTn=np.stack(units, -1) if units else np.zeros(shape, np.float32)
    )


class Conditions:
    """The conditions of a study, in the order in which they run."""

    def __init__(
        self, loaded: LoadedModel, plan: Plan, calibration: TokenBatch, replay: Replay, minimal: Sequence[Unit]
    ) -> None:
        self.loaded, self.plan, self.calibration, self.replay, self.minimal = loaded, plan, calibration, replay, minimal
        self._edits: dict[tuple[str, int, float], AggregationEdit] = {}
        """By formula, position and factor: a calibration takes a pass, and clamps use those of other conditions."""

    def all(self, *, sink_varies: bool) -> list[Condition]:
        """Every condition that has meaning for this model."""
        plan = self.plan
        conditions = [c for target in plan.targets for c in self._at_target(target)]
        conditions += [Condition("open_to_later", self._open, plan.sink)] if plan.sink == 0 else []
        if sink_varies:
            conditions += [self._aggregation("equalise_variance", plan.sink)]
            conditions += [self._aggregation("equalise_variance", target) for target in plan.targets[:1]]
        conditions += [
            self._aggregation(name, plan.sink) for name in ("remove_mean", "remove_deviation", "remove_energy")
        ]
        if self.minimal:
            units, model = self.minimal, self.loaded
            conditions += [
                Condition("ablate_minimal_set", lambda: [ablate_neurons(model, units)], plan.sink),
                Condition(
                    "mean_minimal_set",
                    lambda: [ablate_neurons(model, units, "mean", calibration=self.calibration)],
                    plan.sink,
                ),
                Condition("densify_minimal_set", lambda: [densify_neurons(model, units)], plan.sink),
                *(
                    Condition("random_set", lambda n=number: [self._random_set(n)], plan.sink, None, number)
                    for number in range(NUM_RANDOM_SETS)
                ),
            ]
        return conditions

    def _at_target(self, target: int) -> Iterator[Condition]:
        plan, model = self.plan, self.loaded
        yield Condition("mask_to_self", lambda: [mask_to_self(model, target)], target)
        yield Condition("mask_but_self", lambda: [edit_mask(model, target, "block", target)], target)
        for factor in FACTORS:
            yield self._aggregation("amplify_variance", target, factor)
        for control in ("scale_norm", "shift_mean", "swap_deviation", "random_direction"):
            yield self._aggregation(control, target, DOSE)
        if plan.dimensions:
            moved = dict(source=plan.sink, positions=target, layers=list(plan.alive))
            yield Condition(
                "transplant_dimensions",
                lambda: [set_dimensions(model, plan.dimensions, "transplant", **moved)],  # type: ignore[arg-type]
                target,
            )
        if plan.super_neurons:
            units, others = plan.super_neurons, self._matched(plan.super_neurons, seed=0)
            yield Condition(
                "transplant_super_neurons", lambda: [transplant_neurons(model, units, plan.sink, target)], target
            )
            yield Condition(
                "transplant_random_set", lambda: [transplant_neurons(model, others, plan.sink, target)], target
            )
        for name, clamp in self._clamps(target):
            yield Condition(f"{name}+mask_to_self", lambda held=clamp: [held(), mask_to_self(model, target)], target)
            amplify = self._aggregation("amplify_variance", target, DOSE)
            yield Condition(f"{name}+amplify_variance", lambda held=clamp, a=amplify: [*a.make(), held()], target, DOSE)

    def _clamps(self, target: int) -> Iterable[tuple[str, Callable[[], Intervention]]]:
        plan, untouched = self.plan, self.replay.untouched
        if plan.super_neurons:
            yield (
                "clamp_super_neurons",
                lambda: ClampNeurons(self.loaded, plan.super_neurons, untouched, positions=target),
            )
        if plan.dimensions:
            yield "clamp_dimensions", lambda: ClampDimensions(self.loaded, untouched, plan.dimensions, positions=target)

    def _aggregation(self, formula: str, position: int, factor: float = 1.0) -> Condition:
        def make() -> list[Intervention]:
            key = (formula, position, factor)
            if key not in self._edits:
                self._edits[key] = AggregationEdit(
                    self.loaded, *key, calibration=self.calibration, layers=self.plan.layers
                )
            return [self._edits[key]]

        return Condition(formula, make, position, factor if factor != 1.0 else None)

    def _open(self) -> list[Intervention]:
        return [edit_mask(self.loaded, 0, "allow", range(self.replay.ids_BT.shape[1]))]

    def _random_set(self, number: int) -> Intervention:
        return ablate_neurons(self.loaded, self._matched(self.minimal, seed=1 + number))

    def _matched(self, units: Sequence[Unit], *, seed: int) -> list[Unit]:
        excluded = (*self.plan.candidates, *self.minimal, *self.plan.super_neurons)
        return matched_units(self.replay.anatomy, units, excluded, seed=seed)

    def run(self, condition: Condition, *, loss: bool = True) -> Outcome:
        """The outcome of one condition on the judging sequences."""
        interventions: Any = condition.make()
        edits = [edit for edit in interventions if isinstance(edit, AggregationEdit)]
        means = {name: mean.numpy() for edit in edits for name, mean in edit.tensors().items()}
        with together(interventions) as first_layer:
            reading = self.replay.read(first_layer, loss=loss)
        return replace(reduced(reading, self.plan), means=means)
