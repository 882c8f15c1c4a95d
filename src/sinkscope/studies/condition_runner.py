"""Runs every condition of a study on the judging sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from sinkscope.interventions.aggregation import AGGREGATION, BEFORE_NORM, AggregationEdit, KeptBatch, kept_batch
from sinkscope.interventions.base import Intervention, Place, TokenPlace, together
from sinkscope.interventions.mask import edit_mask, mask_to_self
from sinkscope.interventions.matching import MatchMoments, Moments, ShiftMeanAlone, moments_under
from sinkscope.interventions.neurons import (
    ClampNeurons,
    Mode,
    NeuronEdit,
    ablate_neurons,
    densify_neurons,
    transplant_neurons,
)
from sinkscope.interventions.plan import Plan
from sinkscope.interventions.residual import ClampDimensions, ClampNorms, set_dimensions
from sinkscope.models.anatomy import Unit
from sinkscope.models.loading import LoadedModel
from sinkscope.models.token_batches import TokenBatch
from sinkscope.studies.conditions import (
    DIMENSIONS,
    DOSE,
    FACTORS,
    MIXINGS,
    NORMS,
    RANDOM_OF,
    SEE_FAR,
    SEE_PREVIOUS,
    SEE_SELF,
    SEE_TWO,
    SUPER_NEURONS,
    UNTOUCHED,
    Condition,
    draws,
    sides_of_norm,
)
from sinkscope.studies.controls import Controls
from sinkscope.studies.outcome import Outcome, reduced
from sinkscope.tracing.replay import Replay


class ConditionRunner:
    """The conditions of a study, in the order in which they run."""

    def __init__(
        self,
        loaded: LoadedModel,
        plan: Plan,
        calibration: TokenBatch,
        replay: Replay,
        minimal: Sequence[Unit],
        writers: Sequence[Unit],
        controls: Controls,
    ) -> None:
        self.loaded, self.plan, self.replay, self.controls = loaded, plan, replay, controls
        self.minimal, self.writers = minimal, writers
        self._calibration = calibration
        self._edits: dict[Condition, AggregationEdit] = {}
        """A calibration takes a pass, and conditions with something held use those of other conditions."""
        self._levels: dict[tuple[str, int, bool], Mapping[int, Moments]] = {}
        """Of a mixing at a position, on the calibration sequences."""

    @cached_property
    def calibration(self) -> KeptBatch:
        """The sequences that every condition is calibrated on."""
        return kept_batch(self.loaded.model, self._calibration, self.plan.mixed)

    def all(self, *, sink_varies: bool) -> list[Condition]:
        """Every condition that has meaning for this model."""
        sink, targets = self.plan.sink, self.plan.targets
        conditions = [condition for target in targets for condition in self._at_target(target)]
        if sink == 0:
            conditions += [Condition("open_to_later", sink)]
            conditions += self._both_sides(_levelled("open_to_later", sink)) if sink_varies else []
        if sink_varies:
            equalised = (Condition("equalise_variance", position) for position in (sink, *targets[:1]))
            conditions += self._both_sides(equalised)
        removed = (Condition(name, sink) for name in ("remove_mean", "remove_deviation", "remove_energy"))
        conditions += self._both_sides(removed)
        if self.minimal:
            names = ("ablate", "mean", "densify", "move", "turn")
            conditions += [Condition(f"{name}_minimal_set", sink) for name in names]
            conditions += [draw for name in names[2:] for draw in draws(name, sink)[1:]]
        if self.writers:
            conditions += [Condition(f"ablate_writers{where}", sink) for where in ("", "_at_sink", "_elsewhere")]
        conditions += [Condition("random_set", sink, number=number) for number in range(len(self.controls.sets))]
        return conditions

    def _at_target(self, target: int) -> Iterator[Condition]:
        plan = self.plan
        yield Condition("mask_to_self", target)
        yield Condition("mask_but_self", target)
        yield from (Condition(mixing, target) for mixing in MIXINGS)
        yield from self._both_sides(_levelled(SEE_SELF, target))
        if target == plan.targets[0]:
            for mixing in MIXINGS[1:]:
                yield from (c for c in _levelled(mixing, target) if c.name == mixing)
        yield from self._both_sides(Condition("amplify_variance", target, factor) for factor in FACTORS)
        yield Condition("scale_norm", target, DOSE)
        yield from self._both_sides([Condition("shift_mean", target, DOSE)])  # amplification's control, side by side
        for other in ("swap_deviation", "random_direction"):
            yield Condition(other, target, DOSE)
        if plan.dimensions:
            yield Condition("transplant_dimensions", target)
            yield Condition("transplant_random_dimensions", target)
        if plan.super_neurons:
            yield Condition("transplant_super_neurons", target)
            yield Condition("transplant_random_set", target)
        for held, there in ((SUPER_NEURONS, plan.super_neurons), (DIMENSIONS, plan.dimensions)):
            if there:
                for what in (held, RANDOM_OF[held]):
                    yield Condition("mask_to_self", target, held=what)
                    yield Condition("amplify_variance", target, DOSE, held=what)
        if target == plan.targets[0]:
            yield Condition("mask_to_self", target, held=NORMS)
            yield Condition("amplify_variance", target, DOSE, held=NORMS)

    def _both_sides(self, conditions: Iterable[Condition]) -> Iterator[Condition]:
        """The same on each side of the norm on the aggregation, in models that have one."""
        for condition in conditions:
            for before_norm in sides_of_norm(self.replay.anatomy):
                yield replace(condition, before_norm=before_norm)

    def interventions(self, condition: Condition) -> list[Intervention]:
        """What the condition does to the model, calibration included."""
        if condition.levelled:
            return self._matched(condition)
        free = replace(condition, held=None)
        made = MAKERS[condition.name](self, condition) if condition.name in MAKERS else self._edit(free)
        untouched, where = self.replay.untouched, TokenPlace(positions=condition.target)
        units = {SUPER_NEURONS: self.plan.super_neurons, RANDOM_OF[SUPER_NEURONS]: self.controls.units}
        dimensions = {DIMENSIONS: self.plan.dimensions, RANDOM_OF[DIMENSIONS]: self.controls.dimensions}
        if condition.held in units:
            return [made, ClampNeurons(self.loaded, units[condition.held], untouched, **where)]
        if condition.held in dimensions:
            return [made, ClampDimensions(self.loaded, untouched, dimensions[condition.held], **where)]
        if condition.held == NORMS:  # of every token after every layer: directions alone may change
            return [made, ClampNorms(self.loaded, untouched)]
        return [made]

    def _edit(self, condition: Condition) -> AggregationEdit:
        if condition not in self._edits:
            self._edits[condition] = AggregationEdit(
                self.loaded,
                condition.name,
                condition.target,
                1.0 if condition.factor is None else condition.factor,
                calibration=self.calibration,
                layers=self.plan.layers,
                before_norm=condition.before_norm,
            )
        return self._edits[condition]

    def _matched(self, condition: Condition) -> list[Intervention]:
        """A mixing with its moments at the level of another."""
        mixing = [] if condition.name == UNTOUCHED else [MAKERS[condition.name](self, condition)]
        variance, energy = (
            None if of is None else self.level(of, condition.target, condition.before_norm)
            for of in (condition.variance, condition.energy)
        )
        # What cannot be met shows in the check.
        matched = MatchMoments(
            self.loaded,
            condition.target,
            variance=variance,
            energy=energy,
            calibration=self.calibration,
            nearest=True,
            layers=self.plan.mixed,
            before_norm=condition.before_norm,
        )
        return [*mixing, matched]

    def level(self, mixing: str, target: int, before_norm: bool) -> Mapping[int, Moments]:
        if (key := (mixing, target, before_norm)) not in self._levels:
            made = UNTOUCHED if mixing == UNTOUCHED else MAKERS[mixing](self, Condition(mixing, target))
            on = BEFORE_NORM if before_norm else AGGREGATION
            place = Place(on=on, layers=tuple(self.plan.mixed), positions=(target,))
            self._levels[key] = moments_under(made, self.loaded.model, self.calibration, place)
        return self._levels[key]

    def run(self, condition: Condition, *, loss: bool = True) -> Outcome:
        """The outcome of one condition on the judging sequences."""
        interventions = self.interventions(condition)
        edits = [edit for edit in interventions if isinstance(edit, AggregationEdit)]
        cell = f"{condition.label}." if condition.levelled else ""
        first_position = min(each.first_position for each in interventions)
        edited = {layer for each in interventions if isinstance(each, NeuronEdit) for layer in each.place.layers}
        with together(interventions) as first_layer:
            reading = self.replay.read(first_layer, first_position, edited_units=edited, loss=loss)
            # Of what is on together: alone they would be calibrated to other means.
            means = {f"{cell}{name}": mean.numpy() for edit in edits for name, mean in edit.tensors().items()}
        return replace(reduced(reading, self.plan), means=means)


def _levelled(mixing: str, target: int) -> Iterator[Condition]:
    """A mixing and the untouched model, each with the variance, the energy or both of the other.

    The variance is brought there twice: with the energy that follows from it, and with its own energy kept.
    """
    for name, other in ((mixing, UNTOUCHED), (UNTOUCHED, mixing)):
        for variance, energy in ((other, None), (None, other), (other, name), (other, other)):
            yield Condition(name, target, variance=variance, energy=energy)


def _elsewhere(mode: Mode) -> Callable[[ConditionRunner, Condition], Intervention]:
    def make(study: ConditionRunner, c: Condition) -> Intervention:
        return densify_neurons(study.loaded, study.minimal, mode, avoid=study.plan.dimensions, seed=c.number or 0)

    return make


def _seeing(*back: int) -> Callable[[ConditionRunner, Condition], Intervention]:
    """The target sees the keys so far back and no others, in layers up to the birth."""

    def make(study: ConditionRunner, c: Condition) -> Intervention:
        return edit_mask(study.loaded, c.target, "only", [c.target - b for b in back], layers=study.plan.mixed)

    return make


def _see_far(study: ConditionRunner, c: Condition) -> Intervention:
    far = 1 if study.plan.sink != 1 else 2
    return edit_mask(study.loaded, c.target, "only", far, layers=study.plan.mixed)


def _open_to_later(study: ConditionRunner, c: Condition) -> Intervention:
    return edit_mask(study.loaded, 0, "allow", range(study.replay.ids_BT.shape[1]), layers=study.plan.mixed)


def _shift_mean(study: ConditionRunner, c: Condition) -> Intervention:
    """With the variance of the untouched model in every layer: the mean alone is moved."""
    level = study.level(UNTOUCHED, c.target, c.before_norm)
    return ShiftMeanAlone(
        study.loaded,
        c.target,
        c.factor or 1.0,
        variance=level,
        calibration=study.calibration,
        layers=study.plan.layers,
        before_norm=c.before_norm,
    )


def _transplant_dimensions(study: ConditionRunner, target: int, dimensions: Sequence[int]) -> Intervention:
    plan = study.plan
    return set_dimensions(study.loaded, dimensions, "transplant", source=plan.sink, positions=target, layers=plan.alive)


MAKERS: dict[str, Callable[[ConditionRunner, Condition], Intervention]] = {
    "mask_to_self": lambda study, c: mask_to_self(study.loaded, c.target),
    "mask_but_self": lambda study, c: edit_mask(study.loaded, c.target, "block", c.target),
    SEE_SELF: _seeing(0),
    SEE_PREVIOUS: _seeing(1),
    SEE_FAR: _see_far,
    SEE_TWO: _seeing(0, 1),
    "open_to_later": _open_to_later,
    "shift_mean": _shift_mean,
    "transplant_dimensions": lambda study, c: _transplant_dimensions(study, c.target, study.plan.dimensions),
    "transplant_random_dimensions": lambda study, c: _transplant_dimensions(study, c.target, study.controls.dimensions),
    "transplant_super_neurons": lambda study, c: transplant_neurons(
        study.loaded, study.plan.super_neurons, study.plan.sink, c.target
    ),
    "transplant_random_set": lambda study, c: transplant_neurons(
        study.loaded, study.controls.units, study.plan.sink, c.target
    ),
    "ablate_minimal_set": lambda study, c: ablate_neurons(study.loaded, study.minimal),
    "mean_minimal_set": lambda study, c: ablate_neurons(
        study.loaded, study.minimal, "mean", calibration=study.calibration
    ),
    "ablate_writers": lambda study, c: ablate_neurons(study.loaded, study.writers),
    "ablate_writers_at_sink": lambda study, c: ablate_neurons(study.loaded, study.writers, positions=c.target),
    "ablate_writers_elsewhere": lambda study, c: ablate_neurons(
        study.loaded, study.writers, positions=[p for p in range(study.replay.ids_BT.shape[1]) if p != c.target]
    ),
    "densify_minimal_set": _elsewhere("spread"),
    "move_minimal_set": _elsewhere("move"),
    "turn_minimal_set": _elsewhere("turn"),
    "random_set": lambda study, c: ablate_neurons(study.loaded, study.controls.sets[c.number or 0]),
}
"""Conditions that are more than a formula on the aggregation."""
