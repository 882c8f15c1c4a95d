"""Which conditions a study has, how their interventions are made and calibrated, and their runs on the judging
sequences."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from sinkscope.interventions.aggregation import (
    AGGREGATION,
    BEFORE_NORM,
    CachedBatch,
    ChangeAggregation,
    SetAggregation,
    cached_batch,
    mean_aggregations,
)
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
from sinkscope.models.token_batches import TokenBatch, context_length
from sinkscope.studies.condition_result import ConditionResult, reduced
from sinkscope.studies.conditions import (
    AT_SINK,
    BASELINE,
    CONDITIONS,
    CONTROLS_OF,
    DIMENSIONS,
    DOSE,
    ELSEWHERE,
    FACTORS,
    MAX_ALONE,
    MAX_SINGLE_LAYERS,
    MEANS,
    MIXINGS,
    NORMS,
    RANDOM_DIMENSIONS,
    SEE_SELF,
    SHIFT,
    SUPER_NEURONS,
    WRITTEN_ELSEWHERE,
    Condition,
    draws,
    sides_of_norm,
)
from sinkscope.studies.controls import Controls
from sinkscope.tracing.open_interventions import open_interventions
from sinkscope.tracing.replay import Replay

JUDGED = (
    (SEE_SELF, BASELINE, None),
    (SEE_SELF, BASELINE, SEE_SELF),
    (BASELINE, SEE_SELF, None),
    (BASELINE, None, SEE_SELF),
)
"""The cells of the factorial that claims rest on: (mixing, level of the variance, level of the energy)."""


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

    def all(self, *, sink_varies: bool, for_tables: bool = True) -> list[Condition]:
        """Every condition that applies to this model, in the order in which they run. Without `for_tables`, those alone
        on which claims rest."""
        sink, targets = self.plan.sink, self.plan.targets
        conditions = [*self._of_tokens()]
        for target in targets:
            conditions += self._at_target(target)
        if for_tables and targets:
            conditions += self._for_tables(targets[0])
        if sink == 0:
            conditions += [Condition("open_to_later", sink)]
        if for_tables and sink_varies:
            equalised = (Condition("equalise_variance", position) for position in (sink, *targets[:1]))
            conditions += self._both_sides(equalised)
        if for_tables:
            removed = (Condition(name, sink) for name in ("remove_mean", "remove_deviation", "remove_energy"))
            conditions += self._both_sides(removed)
        if self.removed:
            conditions += self._removals(for_tables)
        return conditions

    def decisive(self) -> list[Condition]:
        """Those alone on which the mechanism and the removal of the neurons are decided."""
        without = ("mask_to_self", "transplant_super_neurons", *(f"transplant_{how}" for how in WRITTEN_ELSEWHERE))
        every = self.all(sink_varies=False, for_tables=False)
        return [condition for condition in every if condition.name not in without]

    def _of_tokens(self) -> Iterator[Condition]:
        """Whether it is the token or its place that counts."""
        sink = self.plan.sink
        yield Condition("other_token", sink)
        for target in self.plan.targets:
            yield Condition("move_token", target)
            yield Condition("other_token", target)
        if self.shift:
            yield Condition("shift_positions", sink)

    def _at_target(self, target: int) -> Iterator[Condition]:
        """What claims rest on, at each target."""
        plan = self.plan
        yield Condition("mask_to_self", target)
        yield Condition("mask_but_self", target)
        yield Condition(SEE_SELF, target)
        yield from self._both_sides(c for c in _levelled(SEE_SELF, target) if (c.name, c.variance, c.energy) in JUDGED)
        yield Condition("mean_of_itself", target)
        if target == plan.targets[0]:  # controls
            yield from self._both_sides([Condition(SEE_SELF, target, energy=BASELINE)])
            yield Condition("mean_of_ordinary", target)
        if plan.super_neurons:
            yield Condition("transplant_super_neurons", target)
            yield from (Condition(f"transplant_{how}", target) for how in WRITTEN_ELSEWHERE)
            for what in (SUPER_NEURONS, *CONTROLS_OF[SUPER_NEURONS]):
                yield Condition("mask_to_self", target, held=what)

    def _for_tables(self, target: int) -> Iterator[Condition]:
        """What else is asked at the first target, for tables and figures."""
        plan = self.plan
        yield from (Condition(mixing, target) for mixing in MIXINGS[1:])
        for cell in self._both_sides(_levelled(SEE_SELF, target)):
            if (cell.name, cell.variance, cell.energy) not in (*JUDGED, (SEE_SELF, None, BASELINE)):
                yield cell
        means = ("mean_of_previous", "mean_of_two", "mean_of_sink", "no_aggregation")
        yield from (Condition(name, target) for name in means)
        layers = plan.layers[:MAX_SINGLE_LAYERS]
        yield from (Condition("see_self_in_layer", target, number=layer) for layer in layers)
        yield from self._both_sides(Condition("amplify_variance", target, factor) for factor in FACTORS)
        yield from self._both_sides([Condition("shift_mean", target, DOSE)])  # amplification's control, side by side
        yield from (Condition(name, target, DOSE) for name in ("scale_norm", "swap_deviation", "random_direction"))
        if plan.dimensions:
            yield Condition("transplant_dimensions", target)
            yield Condition("transplant_random_dimensions", target)
            for what in (DIMENSIONS, RANDOM_DIMENSIONS):
                yield Condition("mask_to_self", target, held=what)
                yield Condition("amplify_variance", target, DOSE, held=what)
        if plan.super_neurons:
            for what in (SUPER_NEURONS, *CONTROLS_OF[SUPER_NEURONS]):
                yield Condition("amplify_variance", target, DOSE, held=what)
        yield Condition("mask_to_self", target, held=NORMS)
        yield Condition("amplify_variance", target, DOSE, held=NORMS)

    def _removals(self, for_tables: bool) -> Iterator[Condition]:
        """The removal of the minimal set or of the writers, and its controls."""
        sink = self.plan.sink
        removal = f"ablate_{self.removed_are}"
        yield Condition(removal, sink)
        yield from (draw for how in WRITTEN_ELSEWHERE for draw in draws(f"ablate_{how}", sink))
        yield from (Condition("random_set", sink, number=number) for number in range(len(self.controls.sets)))
        if not for_tables:
            return
        yield from (Condition(f"{removal}{where}", sink) for where in (AT_SINK, ELSEWHERE))
        if self.minimal:
            if len(self.minimal) > 1:
                alone = range(min(MAX_ALONE, len(self.minimal)))
                yield from (Condition("ablate_alone", sink, number=number) for number in alone)
            yield Condition("mean_minimal_set", sink)
            for name in ("densify", "move", "turn"):
                yield from draws(f"{name}_minimal_set", sink)

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
        dimensions = {DIMENSIONS: self.plan.dimensions, RANDOM_DIMENSIONS: self.controls.dimensions}
        if condition.held in (SUPER_NEURONS, *CONTROLS_OF[SUPER_NEURONS]):
            clamp = ClampNeurons(self.loaded, self.plan.super_neurons, baseline, **where)
            if condition.held == SUPER_NEURONS:
                return [*made, clamp]
            how = WRITTEN_ELSEWHERE[CONTROLS_OF[SUPER_NEURONS].index(condition.held)]
            return [*made, clamp.elsewhere(how, self.draw(condition.target))]
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

    def swapped(self, target: int) -> Tensor:
        """[B, T] the judging sequences with the tokens of the sink and of the target exchanged."""
        places = list(range(self.replay.ids_BT.shape[1]))
        places[self.plan.sink], places[target] = target, self.plan.sink
        return self.replay.ids_BT[:, places]

    def with_other_token(self, position: int) -> Tensor:
        """[B, T] the judging sequences with their last token, which hardly any query sees, at this position too."""
        ids_BT = self.replay.ids_BT.clone()
        ids_BT[:, position] = ids_BT[:, -1]
        return ids_BT

    @cached_property
    def shift(self) -> int:
        """By how much position ids can be shifted; 0 where the model takes none."""
        length, decoder = self.replay.ids_BT.shape[1], self.replay.anatomy.decoder
        if "position_ids" not in inspect.signature(decoder.forward).parameters:
            return 0
        most = context_length(self.loaded.model)
        return SHIFT if most is None else max(0, min(SHIFT, most - length))

    def shifted_positions(self) -> dict[str, Tensor]:
        """The judging sequences, counted from a later position on."""
        ids_BT = self.replay.ids_BT
        return {"ids_BT": ids_BT, "position_ids": torch.arange(ids_BT.shape[1])[None] + self.shift}

    def attend_only(self, target: int, keys: Sequence[int], layers: Sequence[int] | None = None) -> Intervention:
        """In the early layers, or in some of them, the target attends to these keys and no others."""
        return edit_mask(self.loaded, target, "only", keys, layers=self.plan.layers if layers is None else layers)

    def open_to_later(self) -> Intervention:
        length = self.replay.ids_BT.shape[1]
        return edit_mask(self.loaded, 0, "allow", range(length), layers=self.plan.layers)

    def set_to_mean_under(self, condition: Condition) -> Intervention:
        """The aggregation of the target at its mean under a mixing, in the early layers."""
        mixing = Condition(MEANS[condition.name], condition.target)
        return SetAggregation(self.loaded, condition.target, self._means(mixing.kind.make(self, mixing), mixing.target))

    def set_to_mean_of_sink(self, target: int) -> Intervention:
        return SetAggregation(self.loaded, target, self._means([], self.plan.sink))

    def set_to_zero(self, target: int) -> Intervention:
        means = self._means([], target)
        return SetAggregation(self.loaded, target, {layer: torch.zeros_like(mean) for layer, mean in means.items()})

    def _means(self, mixing: list[Intervention], position: int) -> dict[int, Tensor]:
        """By early layer, the mean of the aggregation at a position over the calibration sequences."""
        place = Place(on=AGGREGATION, layers=tuple(self.plan.layers), positions=(position,))
        return mean_aggregations(self.loaded.model, self.calibration, place, mixing)

    def draw(self, target: int) -> int:
        """Which direction is drawn at a target: another one at each."""
        return self.plan.targets.index(target)

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

    def transplant_neurons(self, neurons: Sequence[Neuron], target: int) -> ChangeNeurons:
        """Copies the sink's activations of some neurons to the target."""
        return transplant_neurons(self.loaded, neurons, self.plan.sink, target)

    @property
    def removed(self) -> Sequence[Neuron]:
        """The neurons that are removed together: the minimal set or, where there is none, the writers."""
        return self.minimal or self.writers

    @property
    def removed_are(self) -> str:
        return "minimal_set" if self.minimal else "writers"

    def ablate(self, neurons: Sequence[Neuron], positions: int | Sequence[int] | None = None) -> ChangeNeurons:
        return ablate_neurons(self.loaded, neurons, positions=positions)

    def set_to_mean(self, neurons: Sequence[Neuron]) -> Intervention:
        return ablate_neurons(self.loaded, neurons, "mean", calibration=self.calibration)

    def point_elsewhere(self, mode: Mode, draw: int | None) -> Intervention:
        """Points the minimal set's output vectors elsewhere, as one of the draws says."""
        return densify_neurons(self.loaded, self.minimal, mode, avoid=self.plan.dimensions, seed=draw or 0)

    def where(self, where: str, position: int) -> int | list[int] | None:
        """The positions at which neurons are removed: the sink alone, all but the sink, or all (None)."""
        if not where:
            return None
        others = [other for other in range(self.replay.ids_BT.shape[1]) if other != position]
        return position if where == AT_SINK else others

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
        if condition.kind.inputs is not None:
            return reduced(self.replay.read_tokens(**condition.kind.inputs(self, condition)), self.plan)
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
