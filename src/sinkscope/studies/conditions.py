"""The conditions of a study: one intervention, or several together, under which the judging sequences are read.

A `Condition` is the key of its result. What all conditions of one name share is an entry of CONDITIONS: how their
interventions are made, what must then be true at the target, and their label.

A token that attends only to itself differs from an ordinary one in three ways: which keys it attends to, the variance
of its value aggregation across sequences, and the energy (mean square) of it. The factorial changes each without the
others. Which keys the token attends to in the early layers is called its mixing; variance and energy can each be
brought to the level that they have under another mixing. Position 0 is tested the other way round: it is opened to
later keys. Whether it is the token or the place that counts is told by moving tokens.

The early layers are those up to the last one where massive dimensions that carry the sink appear or, if none do, those
before the first with the sink: `Plan.layers`, for all interventions alike.

This file imports no torch, because claims and pages read it: the entries make interventions through methods of
`ConditionRunner`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sinkscope.interventions import checks

if TYPE_CHECKING:
    from sinkscope.interventions.base import Intervention
    from sinkscope.models.anatomy import Anatomy

BASELINE = "untouched"
"""What tables of saved runs call the baseline, as a condition and as a mixing."""
FACTORS = (1.5, 2.0, 4.0, 8.0)
"""By how much amplification multiplies a token's deviation from its mean; claims are judged at the largest factor."""
DOSE = FACTORS[-1]
SEE_SELF, SEE_PREVIOUS, SEE_FAR, SEE_TWO = MIXINGS = ("see_self", "see_previous", "see_far", "see_self_and_previous")
"""Which keys a target attends to, where it is not all earlier ones: itself, exactly one other key, or itself and the
previous one."""
MEANS = {
    "mean_of_itself": SEE_SELF,
    "mean_of_previous": SEE_PREVIOUS,
    "mean_of_two": SEE_TWO,
    "mean_of_ordinary": BASELINE,
}
"""The conditions that set the aggregation of the target to a mean over sequences, and the mixing of that mean."""
SUPER_NEURONS, DIMENSIONS, NORMS = "super_neurons", "dimensions", "norms"
RANDOM_DIMENSIONS = "random_dimensions"
TURNED, PERMUTED = WRITTEN_ELSEWHERE = ("turn", "permute")
"""How the control of a change of neurons writes it elsewhere: along their output vectors turned by a random rotation,
or with their coordinates in a random order."""
CONTROLS_OF = {
    SUPER_NEURONS: tuple(f"{SUPER_NEURONS}_{how}" for how in WRITTEN_ELSEWHERE),
    DIMENSIONS: (RANDOM_DIMENSIONS,),
}
"""What can be held at its baseline values, and what is held for its controls: the same change of the neurons, written
elsewhere, or as many matched random dimensions."""

NUM_RANDOM_SETS = 10
MAX_NEURONS = 64
"""How many neurons at most are removed together in the search for those that write the sink."""
NUM_DRAWS = 3
"""How often a direction is drawn: by chance, a single draw may be one that keys read."""
MAX_ALONE = 8
"""How many neurons of the minimal set are also removed alone."""
MAX_SINGLE_LAYERS = 12
"""In how many layers, the first ones, the mask is tried alone."""
SHIFT = 100
"""By how much position ids are shifted, as far as the context allows."""
AT_SINK, ELSEWHERE = "_at_sink", "_elsewhere"
"""Where alone a set of neurons is removed."""
TURNED_BASIS = "turn_basis"
"""A copy of the model whose residual basis is rotated, together with all weights that write and read it."""


@dataclass(frozen=True)
class Condition:
    """One intervention, or several together, under which the judging sequences are read."""

    name: str
    """Which entry of CONDITIONS it is."""
    target: int
    """The position acted on."""
    factor: float | None = None
    held: str | None = None
    """What is held at its baseline values meanwhile: SUPER_NEURONS, DIMENSIONS, a control of these, or NORMS."""
    number: int | None = None
    """Which of several random sets, of the draws after the first, of the layers, or of the neurons of the set."""
    variance: str | None = None
    """The mixing to whose level the variance of the aggregation is brought; None where it is left alone."""
    energy: str | None = None
    """Likewise for its energy."""
    before_norm: bool = False
    """Whether it acts before the norm on the aggregation, in models that have one, and not after it."""

    @property
    def kind(self) -> ConditionKind:
        return CONDITIONS[self.name]

    @property
    def levelled(self) -> bool:
        """Whether variance or energy is brought to the level of another mixing."""
        return self.variance is not None or self.energy is not None

    @property
    def label(self) -> str:
        """Its name in tables, such as see_self+variance_of_untouched; `in_words` reads it."""
        held = [] if self.held is None else [f"clamp_{self.held}"]
        levels = {"variance_of": self.variance, "energy_of": self.energy}
        side = ["before_norm"] if self.before_norm else []
        return "+".join([*held, self.name, *(f"{what}_{of}" for what, of in levels.items() if of is not None), *side])

    @property
    def part(self) -> str:
        """The name under which its result is kept until the study is finished."""
        numbers = (self.target, None if self.factor is None else f"{self.factor:g}", self.number)
        return "-".join([self.label, *(str(number) for number in numbers if number is not None)])


def sides_of_norm(anatomy: Anatomy) -> tuple[bool, ...]:
    """Where interventions on the aggregation act, as values of `before_norm`: both in models with a norm on it."""
    return (False,) if anatomy.layers[0].aggregation_norm is None else (False, True)


def draws(name: str, sink: int) -> list[Condition]:
    """The conditions at the sink that are drawn several times; the first draw has no number."""
    return [Condition(name, sink, number=number or None) for number in range(NUM_DRAWS)]


@dataclass(frozen=True, kw_only=True)
class ConditionKind:
    """What all conditions of one name have in common."""

    name: str
    make: Callable[[Any, Condition], list[Intervention]] = lambda run, c: []
    """(`ConditionRunner`, condition) -> its interventions."""
    inputs: Callable[[Any, Condition], dict[str, Any]] | None = None
    """(`ConditionRunner`, condition) -> what the model reads instead of the judging sequences: ids_BT, and other inputs
    of the decoder."""
    check: checks.Check = lambda at: []
    """What must be true at the target: a function of `interventions.checks`. Empty for interventions that set values
    outright, which cannot miss."""
    label: str
    """What is done, in words, for pages."""
    shown_in: tuple[str, ...] = ()
    """Those of REMAINING_FIGURE, MOVED_FIGURE and FACTORIAL_TABLE that show it."""


def _formula(runner: Any, condition: Condition) -> list[Intervention]:
    return [runner.formula(condition)]


def _by_another_model(runner: Any, condition: Condition) -> list[Intervention]:
    raise NotImplementedError(f"{condition.name} is a copy of the model, which no intervention makes")


REMAINING_FIGURE, MOVED_FIGURE, FACTORIAL_TABLE = "remaining", "moved", "factorial"
"""Figures and tables that show some conditions only."""
_DIRECTIONS = {TURNED: "random directions", PERMUTED: "the same vectors with their coordinates in random order"}
_KINDS = (
    ConditionKind(name=BASELINE, make=lambda run, c: [], label="baseline", shown_in=(FACTORIAL_TABLE,)),
    ConditionKind(
        name="move_token",
        inputs=lambda run, c: {"ids_BT": run.swapped(c.target)},
        label="the sink's token moved here, and the token from here to the sink's place",
    ),
    ConditionKind(
        name="other_token",
        inputs=lambda run, c: {"ids_BT": run.with_other_token(c.target)},
        label="another token at this position",
        shown_in=(REMAINING_FIGURE, MOVED_FIGURE),
    ),
    ConditionKind(
        name="shift_positions",
        inputs=lambda run, c: run.shifted_positions(),
        label="all position ids shifted",
        shown_in=(REMAINING_FIGURE,),
    ),
    ConditionKind(
        name="mask_to_self",
        make=lambda run, c: [run.mask_to_self(c.target)],
        check=checks.attends_only_to_itself,
        label="attending only to itself in all layers",
    ),
    ConditionKind(
        name="mask_but_self",
        make=lambda run, c: [run.mask_but_self(c.target)],
        check=checks.not_to_itself,
        label="attending to all but itself in all layers",
    ),
    ConditionKind(
        name=SEE_SELF,
        make=lambda run, c: [run.attend_only(c.target, [c.target])],
        check=checks.attends_only_to_itself,
        label="attending only to itself",
        shown_in=(FACTORIAL_TABLE,),
    ),
    ConditionKind(
        name=SEE_PREVIOUS,
        make=lambda run, c: [run.attend_only(c.target, [c.target - 1])],
        check=checks.to_one_other,
        label="attending only to the previous key",
        shown_in=(FACTORIAL_TABLE,),
    ),
    ConditionKind(
        name=SEE_FAR,
        make=lambda run, c: [run.attend_only(c.target, [1 if run.plan.sink != 1 else 2])],
        check=checks.to_one_other,
        label="attending only to a distant key",
        shown_in=(FACTORIAL_TABLE,),
    ),
    ConditionKind(
        name=SEE_TWO,
        make=lambda run, c: [run.attend_only(c.target, [c.target, c.target - 1])],
        check=checks.to_two,
        label="attending to itself and the previous key",
        shown_in=(FACTORIAL_TABLE,),
    ),
    ConditionKind(
        name="see_self_in_layer",
        make=lambda run, c: [run.attend_only(c.target, [c.target], layers=[c.number])],
        label="attending only to itself in one layer",
    ),
    *(
        ConditionKind(name=name, make=lambda run, c: [run.set_to_mean_under(c)], label=label)
        for name, label in (
            ("mean_of_itself", "aggregation set to the mean of a token that attends only to itself"),
            ("mean_of_previous", "aggregation set to the mean of one that attends only to the previous key"),
            ("mean_of_two", "aggregation set to the mean of one that attends to itself and the previous key"),
            ("mean_of_ordinary", "aggregation set to the mean of an ordinary token"),
        )
    ),
    ConditionKind(
        name="mean_of_sink",
        make=lambda run, c: [run.set_to_mean_of_sink(c.target)],
        label="aggregation set to the mean at the sink",
    ),
    ConditionKind(
        name="no_aggregation", make=lambda run, c: [run.set_to_zero(c.target)], label="aggregation set to zero"
    ),
    ConditionKind(
        name="open_to_later",
        make=lambda run, c: [run.open_to_later()],
        check=checks.averages,
        label="position 0 opened to later keys",
        shown_in=(FACTORIAL_TABLE, REMAINING_FIGURE),
    ),
    ConditionKind(name="amplify_variance", make=_formula, check=checks.variance_scaled, label="variance amplified"),
    ConditionKind(name="scale_norm", make=_formula, check=checks.energy_scaled, label="aggregation scaled"),
    ConditionKind(
        name="shift_mean", make=lambda run, c: [run.shift_mean(c)], check=checks.variance_kept, label="mean shifted"
    ),
    ConditionKind(name="swap_deviation", make=_formula, label="another sequence's deviation added"),
    ConditionKind(name="random_direction", make=_formula, label="a random deviation added"),
    ConditionKind(
        name="transplant_dimensions",
        make=lambda run, c: [run.transplant_dimensions(run.plan.dimensions, c.target)],
        label="the sink's massive dimensions copied",
    ),
    ConditionKind(
        name="transplant_random_dimensions",
        make=lambda run, c: [run.transplant_dimensions(run.controls.dimensions, c.target)],
        label="random dimensions copied",
    ),
    ConditionKind(
        name="transplant_super_neurons",
        make=lambda run, c: [run.transplant_neurons(run.plan.super_neurons, c.target)],
        label="the sink's super neurons copied",
    ),
    *(
        ConditionKind(
            name=f"transplant_{how}",
            make=lambda run, c, how=how: [
                run.transplant_neurons(run.plan.super_neurons, c.target).elsewhere(how, run.draw(c.target))
            ],
            label=f"the same activations, written along {direction}",
        )
        for how, direction in _DIRECTIONS.items()
    ),
    ConditionKind(
        name="equalise_variance",
        make=_formula,
        check=checks.variance_of_later,
        label="variance lowered to that of later positions",
        shown_in=(REMAINING_FIGURE, MOVED_FIGURE),
    ),
    ConditionKind(
        name="remove_mean",
        make=_formula,
        check=checks.no_mean,
        label="mean removed",
        shown_in=(REMAINING_FIGURE,),
    ),
    ConditionKind(
        name="remove_deviation",
        make=_formula,
        check=checks.no_variance,
        label="deviation removed, mean kept",
        shown_in=(REMAINING_FIGURE,),
    ),
    ConditionKind(
        name="remove_energy",
        make=_formula,
        label="energy lowered to that of later positions",
        shown_in=(REMAINING_FIGURE,),
    ),
    ConditionKind(
        name="mean_minimal_set",
        make=lambda run, c: [run.set_to_mean(run.minimal)],
        label="minimal set at its mean",
        shown_in=(REMAINING_FIGURE,),
    ),
    ConditionKind(
        name="densify_minimal_set",
        make=lambda run, c: [run.point_elsewhere("spread", c.number)],
        label="minimal set spread over all dimensions",
        shown_in=(REMAINING_FIGURE, MOVED_FIGURE),
    ),
    ConditionKind(
        name="move_minimal_set",
        make=lambda run, c: [run.point_elsewhere("move", c.number)],
        label="minimal set moved to another dimension",
        shown_in=(REMAINING_FIGURE,),
    ),
    ConditionKind(
        name="turn_minimal_set",
        make=lambda run, c: [run.point_elsewhere("turn", c.number)],
        label="minimal set turned to a random direction",
        shown_in=(REMAINING_FIGURE,),
    ),
    ConditionKind(
        name=TURNED_BASIS,
        make=_by_another_model,
        label="the whole residual basis turned",
        shown_in=(REMAINING_FIGURE,),
    ),
    *(
        ConditionKind(
            name=f"ablate_{what}{where}",
            make=lambda run, c, where=where: [run.ablate(run.removed, positions=run.where(where, c.target))],
            label=f"{words} removed{at}",
            shown_in=(REMAINING_FIGURE,) if where else (REMAINING_FIGURE, MOVED_FIGURE),
        )
        for what, words in (("minimal_set", "minimal set"), ("writers", "writers along the sink's direction"))
        for where, at in (("", ""), (AT_SINK, " at the sink alone"), (ELSEWHERE, " at all other positions"))
    ),
    ConditionKind(
        name="ablate_alone",
        make=lambda run, c: [run.ablate([run.minimal[c.number]])],
        label="one neuron of the minimal set removed",
    ),
    *(
        ConditionKind(
            name=f"ablate_{how}",
            make=lambda run, c, how=how: [run.ablate(run.removed).elsewhere(how, c.number or 0)],
            label=f"what these neurons write removed along {direction}",
            shown_in=(REMAINING_FIGURE,),
        )
        for how, direction in _DIRECTIONS.items()
    ),
    ConditionKind(
        name="random_set",
        make=lambda run, c: [run.ablate(run.controls.sets[c.number or 0])],
        label="random neurons removed",
    ),
)
CONDITIONS: dict[str, ConditionKind] = {kind.name: kind for kind in _KINDS}
"""By name. A saved study may have conditions that are no longer here."""


def labels_in(figure: str) -> dict[str, str]:
    """The labels of the conditions that a figure shows, by name."""
    return {name: kind.label for name, kind in CONDITIONS.items() if figure in kind.shown_in}


def in_words(label: str) -> str:
    """A condition's name in tables, such as see_self+variance_of_untouched, in words for a page."""
    words = []
    for part in label.split("+"):
        if part.startswith("clamp_"):
            words.append(f"{_HELD_IN_WORDS.get(part.removeprefix('clamp_'), part)} held")
        elif part == "before_norm":
            words.append("before the norm")
        elif part in CONDITIONS:
            words.append(CONDITIONS[part].label)
        else:
            moment, of, mixing = part.partition("_of_")
            # A part that this version doesn't know, of a run that was saved by another one, keeps its name.
            known = of and mixing in CONDITIONS
            words.append(f"{moment} of {CONDITIONS[mixing].label}" if known else part.replace("_", " "))
    return ", ".join(words)


_HELD_IN_WORDS = {
    SUPER_NEURONS: "super neurons",
    **{f"{SUPER_NEURONS}_{how}": f"super neurons, along {direction}," for how, direction in _DIRECTIONS.items()},
    "random_units": "random neurons",  # of saved studies
    DIMENSIONS: "massive dimensions",
    RANDOM_DIMENSIONS: "random dimensions",
    NORMS: "all norms",
}
