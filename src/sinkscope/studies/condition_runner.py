"""Which conditions a study has, how their interventions are made and calibrated, and their runs on the judging
sequences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from sinkscope.interventions.aggregation import AGGREGATION, BEFORE_NORM, CachedBatch, ChangeAggregation, cached_batch
from sinkscope.interventions.base import Intervention, Place, TokenPlace, together
from sinkscope.interventions.mask import edit_mask, mask_to_self
from sinkscope.interventions.matching import MatchMoments, Moments, ShiftMeanAlone, moments_under
from sinkscope.interventions.neurons import (
    ChangeNeurons,
    ClampNeurons,
    Mode,
    ablate_neurons,
    densify_neurons,
    transplant_neurons,
)
from sinkscope.interventions.plan import Plan
from sinkscope.interventions.residual import ClampDimensions, ClampNorms, set_dimensions
from sinkscope.models.anatomy import Neuron
from sinkscope.models.loaded import LoadedModel
from sinkscope.models.token_batches import TokenBatch
from sinkscope.studies.condition_result import ConditionResult, reduced
from sinkscope.studies.conditions import (
    BASELINE,
    CONDITIONS,
    DIMENSIONS,
    DOSE,
    FACTORS,
    MIXINGS,
    NORMS,
    RANDOM_OF,
    SEE_SELF,
    SUPER_NEURONS,
    Condition,
    draws,
    sides_of_norm,
)
from sinkscope.studies.controls import Controls
from sinkscope.tracing.open_interventions import open_interventions
from sinkscope.tracing.replay import Replay


class ConditionRunner:
    """The conditions of a study, in the order in which they run."""

    def __init__(
        self,
        loaded: LoadedModel,
        plan: Plan,
        calibration: TokenBatch,
        replay: Replay,
        minimal: Sequence[Neuron],
        writers: Sequence[Neuron],
        controls: Controls,
    ) -> None:
        self.loaded, self.plan, self.replay, self.controls = loaded, plan, replay, controls
        self.minimal, self.writers = minimal, writers
        self._calibration = calibration
        self._formulas: dict[Condition, ChangeAggregation] = {}
        """Kept, because calibration takes a pass and a condition with something held needs the same formula again."""
        self._levels: dict[tuple[str, int, bool], Mapping[int, Moments]] = {}
        """Variance and energy under a mixing at a position, on the calibration sequences; by layer."""

    @cached_property
    def calibration(self) -> CachedBatch:
        """The sequences that every condition is calibrated on."""
        return cached_batch(self.loaded.model, self._calibration, self.plan.layers)

    def all(self, *, sink_varies: bool) -> list[Condition]:
        """Every condition that applies to this model, in the order in which they run."""
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
        """Each condition on both sides of the norm on the aggregation, in models that have one."""
        for condition in conditions:
            for before_norm in sides_of_norm(self.replay.anatomy):
                yield replace(condition, before_norm=before_norm)

    def interventions(self, condition: Condition) -> list[Intervention]:
        """The interventions of a condition, calibrated."""
        if condition.levelled:
            return self._matched(condition)
        without_held = replace(condition, held=None)
        made = without_held.kind.make(self, without_held)
        baseline, where = self.replay.baseline, TokenPlace(positions=condition.target)
        neurons = {SUPER_NEURONS: self.plan.super_neurons, RANDOM_OF[SUPER_NEURONS]: self.controls.neurons}
        dimensions = {DIMENSIONS: self.plan.dimensions, RANDOM_OF[DIMENSIONS]: self.controls.dimensions}
        if condition.held in neurons:
            return [*made, ClampNeurons(self.loaded, neurons[condition.held], baseline, **where)]
        if condition.held in dimensions:
            return [*made, ClampDimensions(self.loaded, baseline, dimensions[condition.held], **where)]
        if condition.held == NORMS:  # of every token after every layer, so that only directions may change
            return [*made, ClampNorms(self.loaded, baseline)]
        return made

    # The entries of CONDITIONS call these to make their interventions.

    def mask_to_self(self, target: int) -> Intervention:
        return mask_to_self(self.loaded, target)

    def mask_but_self(self, target: int) -> Intervention:
        return edit_mask(self.loaded, target, "block", target)

    def attend_only(self, target: int, keys: Sequence[int]) -> Intervention:
        """In the early layers the target attends to these keys and no others."""
        return edit_mask(self.loaded, target, "only", keys, layers=self.plan.layers)

    def open_to_later(self) -> Intervention:
        length = self.replay.ids_BT.shape[1]
        return edit_mask(self.loaded, 0, "allow", range(length), layers=self.plan.layers)

    def shift_mean(self, condition: Condition) -> Intervention:
        """The mean is shifted, and the variance brought back to that of the baseline in every layer."""
        return ShiftMeanAlone(
            self.loaded,
            condition.target,
            condition.factor or 1.0,
            variance=self.level(BASELINE, condition.target, condition.before_norm),
            calibration=self.calibration,
            layers=self.plan.layers,
            before_norm=condition.before_norm,
        )

    def transplant_dimensions(self, dimensions: Sequence[int], target: int) -> Intervention:
        """Copies the sink's values of some dimensions to the target."""
        plan = self.plan
        return set_dimensions(
            self.loaded, dimensions, "transplant", source=plan.sink, positions=target, layers=plan.layers_with_disparity
        )

    def transplant_neurons(self, neurons: Sequence[Neuron], target: int) -> Intervention:
        """Copies the sink's activations of some neurons to the target."""
        return transplant_neurons(self.loaded, neurons, self.plan.sink, target)

    def ablate(self, neurons: Sequence[Neuron], positions: int | Sequence[int] | None = None) -> Intervention:
        return ablate_neurons(self.loaded, neurons, positions=positions)

    def set_to_mean(self, neurons: Sequence[Neuron]) -> Intervention:
        return ablate_neurons(self.loaded, neurons, "mean", calibration=self.calibration)

    def point_elsewhere(self, mode: Mode, draw: int | None) -> Intervention:
        """Points the minimal set's output vectors elsewhere, as one of the draws says."""
        return densify_neurons(self.loaded, self.minimal, mode, avoid=self.plan.dimensions, seed=draw or 0)

    def all_but(self, position: int) -> list[int]:
        """All other positions of a sequence."""
        return [other for other in range(self.replay.ids_BT.shape[1]) if other != position]

    def formula(self, condition: Condition) -> ChangeAggregation:
        """The formula on the aggregation that has the name of the condition."""
        if condition not in self._formulas:
            self._formulas[condition] = ChangeAggregation(
                self.loaded,
                condition.name,
                condition.target,
                1.0 if condition.factor is None else condition.factor,
                calibration=self.calibration,
                layers=self.plan.layers,
                before_norm=condition.before_norm,
            )
        return self._formulas[condition]

    def _matched(self, condition: Condition) -> list[Intervention]:
        """A mixing, with the variance or energy at the level of another."""
        mixing = condition.kind.make(self, condition)
        variance, energy = (
            None if of is None else self.level(of, condition.target, condition.before_norm)
            for of in (condition.variance, condition.energy)
        )
        # `nearest`: a level that cannot be met is approached, and the manipulation check then marks the condition.
        matched = MatchMoments(
            self.loaded,
            condition.target,
            variance=variance,
            energy=energy,
            calibration=self.calibration,
            nearest=True,
            layers=self.plan.layers,
            before_norm=condition.before_norm,
        )
        return [*mixing, matched]

    def level(self, mixing: str, target: int, before_norm: bool) -> Mapping[int, Moments]:
        if (key := (mixing, target, before_norm)) not in self._levels:
            made = CONDITIONS[mixing].make(self, Condition(mixing, target))
            on = BEFORE_NORM if before_norm else AGGREGATION
            place = Place(on=on, layers=tuple(self.plan.layers), positions=(target,))
            self._levels[key] = moments_under(made, self.loaded.model, self.calibration, place)
        return self._levels[key]

    def run(self, condition: Condition, *, loss: bool = True) -> ConditionResult:
        """The result of one condition on the judging sequences."""
        interventions = self.interventions(condition)
        formulas = [intervention for intervention in interventions if isinstance(intervention, ChangeAggregation)]
        cell = f"{condition.label}." if condition.levelled else ""
        first_position = min(intervention.first_position for intervention in interventions)
        changed_layers: set[int] = set()
        for intervention in interventions:
            if isinstance(intervention, ChangeNeurons):
                changed_layers.update(intervention.place.layers)
        with together(interventions) as first_layer:
            reading = self.replay.read(first_layer, first_position, changed_neurons=changed_layers, loss=loss)
            # Read while all interventions are on: a formula is calibrated with the others active below it.
            means = {}
            for formula in formulas:
                means |= {f"{cell}{name}": mean.numpy() for name, mean in formula.tensors().items()}
            acted_in: set[int] = set()
            for intervention in open_interventions(self.replay.anatomy.decoder):
                acted_in.update(intervention.acted_in)
        return replace(reduced(reading, self.plan), means=means, acted_in=tuple(sorted(acted_in)))


def _levelled(mixing: str, target: int) -> Iterator[Condition]:
    """The cells of the factorial for one mixing: it and the baseline, each with the variance or energy of the other.

    Four of each: the variance changes and the energy with it, the energy alone, the variance with the energy kept,
    both.
    """
    for name, other in ((mixing, BASELINE), (BASELINE, mixing)):
        for variance, energy in ((other, None), (None, other), (other, name), (other, other)):
            yield Condition(name, target, variance=variance, energy=energy)
