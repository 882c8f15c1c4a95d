"""A condition is one thing done to the model while the judging sequences run; it is the key of its result.

The factorial takes apart what a token that sees only itself differs in from one that averages: whom it sees (a mixing,
in the layers up to the birth), the batch variance of its aggregation and its energy, each of which can be brought to
the level that it has under another mixing. At the sink the mirror of it: position 0 opened to later keys.

No torch: claims and pages name conditions too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sinkscope.models.anatomy import Anatomy

UNTOUCHED = "untouched"
"""The model as it is, in the place of a mixing."""
FACTORS = (1.5, 2.0, 4.0, 8.0)
"""Doses of amplification beside 1; claims and their controls are judged at the largest."""
DOSE = FACTORS[-1]
SEE_SELF, SEE_PREVIOUS, SEE_FAR, SEE_TWO = MIXINGS = ("see_self", "see_previous", "see_far", "see_self_and_previous")
"""Whom a target sees instead of all before it: itself, exactly one other key, or itself and the one before."""
SUPER_NEURONS, DIMENSIONS, NORMS = "super_neurons", "dimensions", "norms"
RANDOM_OF = {SUPER_NEURONS: "random_units", DIMENSIONS: "random_dimensions"}
"""What can be held at its untouched values, and as many matched random ones."""

NUM_RANDOM_SETS = 20
MAX_UNITS = 64
"""Units that are searched for those that carry the sink."""
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
    """What is held at its untouched values meanwhile."""
    number: int | None = None
    """Which of several random sets, or of the draws after the first."""
    variance: str | None = None
    energy: str | None = None
    """The mixing at whose level the batch variance or the energy of the aggregation is; None where it is left alone."""
    before_norm: bool = False
    """Whether it acts on what enters the norm on the aggregation, in models that have one."""

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
