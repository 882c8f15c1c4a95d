"""A condition is one thing done to the model while the judging sequences run; it is the key of its result. What those
of one name have in common is an entry of CONDITIONS: what makes their interventions, their check, and their label.

The factorial takes apart what a token that sees only itself differs in from one that averages: whom it sees (a mixing,
in the layers up to the birth), the batch variance of its aggregation and its energy, each of which can be brought to
the level that it has under another mixing. At the sink the mirror of it: position 0 opened to later keys.

No torch, which claims and pages do without: what an entry calls to make interventions are methods of the runner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from sinkscope.interventions.base import Intervention
    from sinkscope.models.anatomy import Anatomy

BASELINE = "untouched"
"""The name of the model as it is, in tables and in the place of whom a target attends to."""
FACTORS = (1.5, 2.0, 4.0, 8.0)
"""Doses of amplification beside 1; claims and their controls are judged at the largest."""
DOSE = FACTORS[-1]
SEE_SELF, SEE_PREVIOUS, SEE_FAR, SEE_TWO = MIXINGS = ("see_self", "see_previous", "see_far", "see_self_and_previous")
"""Whom a target sees instead of all before it: itself, exactly one other key, or itself and the one before."""
SUPER_NEURONS, DIMENSIONS, NORMS = "super_neurons", "dimensions", "norms"
RANDOM_OF = {SUPER_NEURONS: "random_units", DIMENSIONS: "random_dimensions"}
"""What can be held at its baseline values, and as many matched random ones."""

NUM_RANDOM_SETS = 20
MAX_NEURONS = 64
"""Neurons that are searched for those that carry the sink."""
NUM_DRAWS = 4
"""Of each way to point the minimal set's vectors elsewhere: one alone may keep, or lose, what is read by chance."""
TURNED_BASIS = "turn_basis"
"""A copy of the model whose residual basis is turned, with all that writes and reads it."""


@dataclass(frozen=True)
class Condition:
    """One thing done to the model while the judging sequences run."""

    name: str
    target: int
    """The position acted on."""
    factor: float | None = None
    held: str | None = None
    """What is held at its baseline values meanwhile."""
    number: int | None = None
    """Which of several random sets, or of the draws after the first."""
    variance: str | None = None
    energy: str | None = None
    """The mixing at whose level the batch variance or the energy of the aggregation is; None where it is left alone."""
    before_norm: bool = False
    """Whether it acts on what enters the norm on the aggregation, in models that have one."""

    @property
    def kind(self) -> ConditionKind:
        return CONDITIONS[self.name]

    @property
    def levelled(self) -> bool:
        """Whether a moment is brought to the level of another mixing."""
        return self.variance is not None or self.energy is not None

    @property
    def label(self) -> str:
        """What is done, in a word."""
        held = [] if self.held is None else [f"clamp_{self.held}"]
        levels = {"variance_of": self.variance, "energy_of": self.energy}
        side = ["before_norm"] if self.before_norm else []
        return "+".join([*held, self.name, *(f"{what}_{of}" for what, of in levels.items() if of is not None), *side])

    @property
    def part(self) -> str:
        """The name of its finished part."""
        numbers = (self.target, None if self.factor is None else f"{self.factor:g}", self.number)
        return "-".join([self.label, *(str(number) for number in numbers if number is not None)])


def sides_of_norm(anatomy: Anatomy) -> tuple[bool, ...]:
    """Whether before the norm on the aggregation: after it alone, and in models that have one before it too."""
    return (False,) if anatomy.layers[0].aggregation_norm is None else (False, True)


def draws(name: str, sink: int) -> list[Condition]:
    """The minimal set's vectors pointed elsewhere, by each draw."""
    return [Condition(f"{name}_minimal_set", sink, number=number or None) for number in range(NUM_DRAWS)]


class Expected(NamedTuple):
    """What must have come about, in the layers acted on, by sequence: only the ratio of the means counts."""

    what: str
    rule: Literal["equal", "at most", "at least"]
    actual_BL: np.ndarray
    expected_BL: np.ndarray


@dataclass(frozen=True, kw_only=True)
class AtTarget:
    """What a condition did at its target, by sequence and layer acted on, beside the baseline."""

    factor: float
    variance_BL: np.ndarray
    """Squared deviation of the aggregation, whose mean over sequences is the variance."""
    energy_BL: np.ndarray
    weights_BL: np.ndarray
    """sum a^2 of the attention: 1 where it goes to one key."""
    own_weight_BL: np.ndarray
    """The part of it that the target's own key has."""
    later_variance_BL: np.ndarray
    """The variance of the later half of positions, under the condition too."""
    baseline_variance_BL: np.ndarray
    baseline_energy_BL: np.ndarray
    baseline_weights_BL: np.ndarray


TOLERANCE = 0.1
"""Farther off than this is a miss."""
OPENED = 0.5
"""A position that was opened to later keys averages where at most this share of its sum a^2 is left."""
ROUNDING = 1e-10
"""A moment below this share of the energy is none."""


@dataclass(frozen=True, kw_only=True)
class ConditionKind:
    """What all conditions of one name have in common."""

    name: str
    make: Callable[[Any, Condition], list[Intervention]]
    """From the `ConditionRunner`, whose methods make one each."""
    check: Callable[[AtTarget], list[Expected]] = lambda at: []
    """What must have come about at the target; nothing where a value is set outright."""
    label: str = ""
    """What is done, in words; the name says it where there are none."""
    shown_in: tuple[str, ...] = ()
    """Which of the figures and tables that show some kinds only show this one."""


def _attends_to_itself(at: AtTarget) -> list[Expected]:
    return [Expected("sight of itself alone", "at least", at.own_weight_BL, at.weights_BL)]


def _not_to_itself(at: AtTarget) -> list[Expected]:
    return [Expected("blindness to itself", "at most", at.own_weight_BL, TOLERANCE * at.weights_BL)]


def _to_one_other(at: AtTarget) -> list[Expected]:
    one_key = Expected("sight of one key", "at least", at.weights_BL, np.ones_like(at.weights_BL))
    return [*_not_to_itself(at), one_key]


def _to_two(at: AtTarget) -> list[Expected]:
    return [Expected("sight of two keys", "at least", at.weights_BL, np.full_like(at.weights_BL, 0.5))]


def _averages(at: AtTarget) -> list[Expected]:
    return [Expected("averaging", "at most", at.weights_BL, OPENED * at.baseline_weights_BL)]


# Of what is scaled the first layer alone is checked: further up it acts on what it changed below.


def _variance_scaled(at: AtTarget) -> list[Expected]:
    expected_BL = at.factor**2 * at.baseline_variance_BL[:, :1]
    return [Expected("variance", "equal", at.variance_BL[:, :1], expected_BL)]


def _energy_scaled(at: AtTarget) -> list[Expected]:
    expected_BL = at.factor**2 * at.baseline_energy_BL[:, :1]
    return [Expected("energy", "equal", at.energy_BL[:, :1], expected_BL)]


def _variance_kept(at: AtTarget) -> list[Expected]:
    return [Expected("variance", "equal", at.variance_BL, at.baseline_variance_BL)]


def _variance_of_later(at: AtTarget) -> list[Expected]:
    return [Expected("variance", "at most", at.variance_BL, at.later_variance_BL)]


def _no_mean(at: AtTarget) -> list[Expected]:
    expected_BL = at.variance_BL + ROUNDING * at.baseline_energy_BL
    return [Expected("mean of 0", "at most", at.energy_BL, expected_BL)]


def _no_variance(at: AtTarget) -> list[Expected]:
    return [Expected("variance of 0", "at most", at.variance_BL, TOLERANCE * at.energy_BL)]


def _formula(runner: Any, condition: Condition) -> list[Intervention]:
    return [runner.formula(condition)]


def _by_another_model(runner: Any, condition: Condition) -> list[Intervention]:
    raise NotImplementedError(f"{condition.name} is a copy of the model, which no intervention makes")


REMAINING_FIGURE, MOVED_FIGURE, FACTORIAL_TABLE = "remaining", "moved", "factorial"
"""What shows some kinds only."""
_KINDS = (
    ConditionKind(name=BASELINE, make=lambda run, c: [], shown_in=(FACTORIAL_TABLE,)),
    ConditionKind(name="mask_to_self", make=lambda run, c: [run.mask_to_self(c.target)], check=_attends_to_itself),
    ConditionKind(name="mask_but_self", make=lambda run, c: [run.mask_but_self(c.target)], check=_not_to_itself),
    ConditionKind(
        name=SEE_SELF,
        make=lambda run, c: [run.attend_only(c.target, [c.target])],
        check=_attends_to_itself,
        shown_in=(FACTORIAL_TABLE,),
    ),
    ConditionKind(
        name=SEE_PREVIOUS,
        make=lambda run, c: [run.attend_only(c.target, [c.target - 1])],
        check=_to_one_other,
        shown_in=(FACTORIAL_TABLE,),
    ),
    ConditionKind(
        name=SEE_FAR,
        make=lambda run, c: [run.attend_only(c.target, [1 if run.plan.sink != 1 else 2])],
        check=_to_one_other,
        shown_in=(FACTORIAL_TABLE,),
    ),
    ConditionKind(
        name=SEE_TWO,
        make=lambda run, c: [run.attend_only(c.target, [c.target, c.target - 1])],
        check=_to_two,
        shown_in=(FACTORIAL_TABLE,),
    ),
    ConditionKind(
        name="open_to_later",
        make=lambda run, c: [run.open_to_later()],
        check=_averages,
        label="opened to later positions",
        shown_in=(FACTORIAL_TABLE, REMAINING_FIGURE),
    ),
    ConditionKind(name="amplify_variance", make=_formula, check=_variance_scaled),
    ConditionKind(name="scale_norm", make=_formula, check=_energy_scaled, label="the aggregation scaled"),
    ConditionKind(name="shift_mean", make=lambda run, c: [run.shift_mean(c)], check=_variance_kept),
    ConditionKind(name="swap_deviation", make=_formula, label="another sequence's deviation"),
    ConditionKind(name="random_direction", make=_formula, label="a random direction"),
    ConditionKind(
        name="transplant_dimensions",
        make=lambda run, c: [run.transplant_dimensions(run.plan.dimensions, c.target)],
    ),
    ConditionKind(
        name="transplant_random_dimensions",
        make=lambda run, c: [run.transplant_dimensions(run.controls.dimensions, c.target)],
    ),
    ConditionKind(
        name="transplant_super_neurons",
        make=lambda run, c: [run.transplant_neurons(run.plan.super_neurons, c.target)],
    ),
    ConditionKind(
        name="transplant_random_set",
        make=lambda run, c: [run.transplant_neurons(run.controls.neurons, c.target)],
    ),
    ConditionKind(
        name="equalise_variance",
        make=_formula,
        check=_variance_of_later,
        label="variance equalised",
        shown_in=(REMAINING_FIGURE, MOVED_FIGURE),
    ),
    ConditionKind(
        name="remove_mean",
        make=_formula,
        check=_no_mean,
        label="mean removed",
        shown_in=(REMAINING_FIGURE,),
    ),
    ConditionKind(
        name="remove_deviation",
        make=_formula,
        check=_no_variance,
        label="deviation removed",
        shown_in=(REMAINING_FIGURE,),
    ),
    ConditionKind(
        name="remove_energy",
        make=_formula,
        label="energy removed",
        shown_in=(REMAINING_FIGURE,),
    ),
    ConditionKind(
        name="ablate_minimal_set",
        make=lambda run, c: [run.ablate(run.minimal)],
        label="minimal set removed",
        shown_in=(REMAINING_FIGURE, MOVED_FIGURE),
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
        label="minimal set densified",
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
        label="minimal set turned",
        shown_in=(REMAINING_FIGURE,),
    ),
    ConditionKind(
        name=TURNED_BASIS,
        make=_by_another_model,
        label="the whole basis turned",
        shown_in=(REMAINING_FIGURE,),
    ),
    ConditionKind(
        name="ablate_writers",
        make=lambda run, c: [run.ablate(run.writers)],
        label="writers along its direction removed",
        shown_in=(REMAINING_FIGURE, MOVED_FIGURE),
    ),
    ConditionKind(
        name="ablate_writers_at_sink",
        make=lambda run, c: [run.ablate(run.writers, positions=c.target)],
        label="the writers removed at the sink alone",
        shown_in=(REMAINING_FIGURE,),
    ),
    ConditionKind(
        name="ablate_writers_elsewhere",
        make=lambda run, c: [run.ablate(run.writers, positions=run.all_but(c.target))],
        label="the writers removed elsewhere",
        shown_in=(REMAINING_FIGURE,),
    ),
    ConditionKind(name="random_set", make=lambda run, c: [run.ablate(run.controls.sets[c.number or 0])]),
)
CONDITIONS: dict[str, ConditionKind] = {kind.name: kind for kind in _KINDS}
"""By name. A saved study may have conditions that are no longer here."""


def labels_in(figure: str) -> dict[str, str]:
    """The labels of the kinds that a figure shows, by name."""
    return {name: kind.label for name, kind in CONDITIONS.items() if figure in kind.shown_in}
