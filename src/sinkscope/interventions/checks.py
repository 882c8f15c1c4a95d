"""Manipulation checks: whether an intervention did what its name says.

A check is a function of what one pass shows at the position acted on (`AtTarget`). It says what must have come about
there (`Expected`), and `check_results.miss` compares that with what did. The kinds of interventions (`kinds.KINDS`)
and the conditions of a study (`studies.conditions.CONDITIONS`) name the same functions of this file.

Interventions that set values outright have no check: neurons and dimensions that are removed, copied or held, and
output vectors that are changed. Neither torch nor numpy is imported: the command line's help does without.
Axes: B sequences, L layers acted on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np

TOLERANCE = 0.1
"""A check fails if what it compares is off by more than this share."""
OPENED = 0.5
"""Position 0, opened to later keys, counts as averaging if at most this share of its sum a^2 is left."""
ROUNDING = 1e-10
"""A variance or squared mean below this share of the energy is rounding error."""
HIDDEN = 1e-6
"""A key that is hidden has at most this share of sum a^2, by rounding. Were a tenth allowed, a token that spreads its
attention evenly over more than ten keys would pass with nothing done."""
MIN_SEQUENCES = 8
"""Over fewer sequences a variance, or a mean that was calibrated on others, is mostly chance."""


@dataclass(frozen=True, kw_only=True)
class PassAtTarget:
    """What one pass shows at the position acted on, [B, L] each."""

    variance_BL: np.ndarray
    """Squared deviation of the aggregation, whose mean over sequences is the batch variance."""
    energy_BL: np.ndarray
    weights_BL: np.ndarray
    """sum a^2 of the attention, mean over heads: 1 where it goes to one key."""
    own_weight_BL: np.ndarray
    """The part of it that the position's own key has."""
    later_variance_BL: np.ndarray
    """The squared deviation of the later half of positions."""


@dataclass(frozen=True, kw_only=True)
class AtTarget:
    """What came about where an intervention acts, beside what was there without it."""

    position: int
    under: PassAtTarget
    """With the intervention on, and those that are on together with it."""
    baseline: PassAtTarget
    """In the model as it is."""
    read_without: Callable[[], PassAtTarget] | None = None
    """Reads a pass under the other interventions alone; None where there are no others."""
    factor: float = 1.0
    keys: tuple[int, ...] = ()
    """Those that a mask names."""

    @cached_property
    def without(self) -> PassAtTarget:
        """Under the other interventions alone: what this one found."""
        return self.baseline if self.read_without is None else self.read_without()


class Expected(NamedTuple):
    """One thing that must have come about, by sequence: only the ratio of the means counts. So an expected 0 is written
    as a small share of something, as in `no_mean`."""

    what: str
    """In a noun, such as variance."""
    claim: str
    """In a clause, such as: its variance is that of the baseline."""
    rule: Literal["equal", "at most", "at least"]
    actual_BL: np.ndarray
    expected_BL: np.ndarray | float
    min_sequences: int = 1
    """With fewer it cannot be told."""


Check = Callable[[AtTarget], list[Expected]]


# Who attends to whom.


def attends_only_to_itself(at: AtTarget) -> list[Expected]:
    # Compared with all of its sum a^2 and not with 1: a learned sink takes a part of the attention too.
    under = at.under
    claim = "the token attends only to itself"
    return [Expected("attention to itself alone", claim, "at least", under.own_weight_BL, under.weights_BL)]


def not_to_itself(at: AtTarget) -> list[Expected]:
    under = at.under
    claim = "the token does not attend to itself"
    expected_BL = HIDDEN * under.weights_BL
    return [Expected("no attention to itself", claim, "at most", under.own_weight_BL, expected_BL)]


def to_one_other(at: AtTarget) -> list[Expected]:
    weights_BL = at.under.weights_BL
    claim = "all of its attention goes to one key"
    one_key = Expected("attention to one key alone", claim, "at least", weights_BL, 1.0)
    return [*not_to_itself(at), one_key]


def to_two(at: AtTarget) -> list[Expected]:
    # Of all ways to spread attention over two keys, halves have the least sum a^2: 1/4 + 1/4.
    weights_BL = at.under.weights_BL
    claim = "all of its attention goes to two keys"
    return [Expected("attention to two keys alone", claim, "at least", weights_BL, 0.5)]


def averages(at: AtTarget) -> list[Expected]:
    claim = "its attention is spread over several keys"
    expected_BL = OPENED * at.without.weights_BL
    return [Expected("averaging", claim, "at most", at.under.weights_BL, expected_BL)]


def only_the_named_keys(at: AtTarget) -> list[Expected]:
    """Its own key is all that a pass tells apart: nothing is expected where others are named beside it."""
    if at.keys == (at.position,):
        return attends_only_to_itself(at)
    return [] if at.position in at.keys else not_to_itself(at)


def not_the_named_keys(at: AtTarget) -> list[Expected]:
    """Likewise: whether other keys than its own are hidden shows in no number that is read."""
    return not_to_itself(at) if at.position in at.keys else []


# Moments of the value aggregation. Amplification and scaling are checked in the first layer alone: in later layers the
# aggregation that they multiply has already changed, so no factor of what it was is to be expected there.


def variance_scaled(at: AtTarget) -> list[Expected]:
    scale = at.factor**2
    claim = f"its variance is {scale:g} times what it was, in the first layer acted on"
    actual_BL, before_BL = at.under.variance_BL[:, :1], at.without.variance_BL[:, :1]
    return [Expected("variance", claim, "equal", actual_BL, scale * before_BL, MIN_SEQUENCES)]


def energy_scaled(at: AtTarget) -> list[Expected]:
    scale = at.factor**2
    claim = f"its energy is {scale:g} times what it was, in the first layer acted on"
    return [Expected("energy", claim, "equal", at.under.energy_BL[:, :1], scale * at.without.energy_BL[:, :1])]


def variance_kept(at: AtTarget) -> list[Expected]:
    claim = "its variance is that of the baseline"
    return [Expected("variance", claim, "equal", at.under.variance_BL, at.baseline.variance_BL, MIN_SEQUENCES)]


def variance_kept_at_first(at: AtTarget) -> list[Expected]:
    claim = "its variance is what it was, in the first layer acted on"
    actual_BL, before_BL = at.under.variance_BL[:, :1], at.without.variance_BL[:, :1]
    return [Expected("variance", claim, "equal", actual_BL, before_BL, MIN_SEQUENCES)]


def energy_kept(at: AtTarget) -> list[Expected]:
    claim = "its energy is that of the baseline"
    return [Expected("energy", claim, "equal", at.under.energy_BL, at.baseline.energy_BL, MIN_SEQUENCES)]


def both_kept(at: AtTarget) -> list[Expected]:
    return [*variance_kept(at), *energy_kept(at)]


def variance_of_later(at: AtTarget) -> list[Expected]:
    claim = "its variance is at most that of later positions"
    under = at.under
    return [Expected("variance", claim, "at most", under.variance_BL, under.later_variance_BL, MIN_SEQUENCES)]


def no_mean(at: AtTarget) -> list[Expected]:
    # The energy is that of the variance; a token that never varies is left with rounding errors.
    expected_BL = at.under.variance_BL + ROUNDING * at.baseline.energy_BL
    return [Expected("mean of 0", "its mean is 0", "at most", at.under.energy_BL, expected_BL, MIN_SEQUENCES)]


def no_variance(at: AtTarget) -> list[Expected]:
    expected_BL = TOLERANCE * at.under.energy_BL
    return [Expected("variance of 0", "its variance is 0", "at most", at.under.variance_BL, expected_BL, MIN_SEQUENCES)]
