"""The manipulation check: whether a condition did what its name says, on the judging sequences.

A check compares what was found at the target, layer by layer, with what the name asks for. A few dozen sequences know
the variance of one layer to 5 or 15 % only, so that no estimate of a single layer can tell a miss of 10 %; that over
all layers can. A condition is marked where

- the root mean square over its layers of log(found / asked for), less what sampling adds to it, is above log 1.1; or
- in one layer even the 99 % interval of found / asked for lies outside of 10 %.

What sets a value outright (units and dimensions removed, written or held, output vectors changed) has nothing to miss,
and no check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeVar

import numpy as np

from sinkscope.statistics import bootstrap_tail, resample_weights, weighted_means
from sinkscope.studies import conditions as run
from sinkscope.studies.judging import Empty

if TYPE_CHECKING:
    from sinkscope.interventions.plan import Plan
    from sinkscope.studies.outcome import Outcome

TOLERANCE = 0.1
"""Farther off than this is a miss."""
CONFIDENCE = 0.99
"""Of the interval in a single layer: there are several layers, and most conditions do what they say."""
OPENED = 0.5
"""A position that was opened to later keys averages where at most this share of its sum a^2 is left."""
ROUNDING = 1e-10
"""A moment below this share of the energy is none."""
FARTHEST = np.log(1e6)
"""No ratio counts as farther off than this: nothing over something would be infinitely so."""


T = TypeVar("T")


class MarkedError(Exception):
    """A condition that did not do what its name says was to support something."""


def unless_marked(found: Callable[[], T]) -> T | Empty:
    """What is judged; nothing where a condition that it rests on is marked."""
    try:
        return found()
    except MarkedError as marked:
        return Empty(str(marked))


def control_unless_marked(control: Callable[[], float]) -> float | None:
    """The number of a control; None likewise."""
    found = unless_marked(control)
    return None if isinstance(found, Empty) else found


class Ran(Protocol):
    """The outcomes that are checked, as a study's `Measured` has them."""

    @property
    def plan(self) -> Plan: ...
    @property
    def untouched(self) -> Outcome: ...
    @property
    def outcomes(self) -> dict[run.Condition, Outcome]: ...


class Asked(NamedTuple):
    """What a name asks for, in the layers acted on, by sequence: only the ratio of the means counts."""

    what: str
    rule: Literal["equal", "at most", "at least"]
    found_BL: np.ndarray
    wanted_BL: np.ndarray


def missed(study: Ran, *conditions: run.Condition) -> str | None:
    """What one condition, at one or more targets, did not bring about; None where it did what its name says."""
    for checks in zip(*(asked(study, condition) for condition in conditions), strict=True):
        found_BL, wanted_BL = (np.sum([getattr(check, of) for check in checks], 0) for of in ("found_BL", "wanted_BL"))
        if miss := _miss(checks[0].rule, found_BL, wanted_BL):
            return f"{conditions[0].label} misses its {checks[0].what}: {miss}"
    return None


def asked(study: Ran, condition: run.Condition) -> Iterator[Asked]:
    """What the name of a condition asks for; nothing where it sets a value outright."""
    outcome, target, side = study.outcomes[condition], condition.target, condition.before_norm
    untouched = study.untouched.squares(target, side)
    acted_on = slice(len(study.plan.layers))
    if condition.levelled:
        for row, moment in enumerate(("variance", "energy")):
            if (mixing := getattr(condition, moment)) is not None:
                level = study.untouched if mixing == run.UNTOUCHED else study.outcomes[run.Condition(mixing, target)]
                wanted_BL = level.squares(target, side)[row]
                yield Asked(moment, "equal", outcome.squares(target, side)[row], wanted_BL)
        return
    variance_BL, energy_BL = outcome.squares(target, side)[..., acted_on]
    mixing_BL, own_BL = outcome.weights(target)
    factor = (condition.factor or 1.0) ** 2
    match condition.name:
        case "amplify_variance":  # further up it acts on what it changed below
            yield Asked("variance", "equal", variance_BL[:, :1], factor * untouched[0, :, :1])
        case "scale_norm":
            yield Asked("energy", "equal", energy_BL[:, :1], factor * untouched[1, :, :1])
        case "shift_mean":
            yield Asked("variance", "equal", variance_BL, untouched[0, :, acted_on])
        case "equalise_variance":
            yield Asked("variance", "at most", variance_BL, outcome.later_squares(side)[0, :, acted_on])
        case "remove_mean":
            yield Asked("mean of 0", "at most", energy_BL, variance_BL + ROUNDING * untouched[1, :, acted_on])
        case "remove_deviation":
            yield Asked("variance of 0", "at most", variance_BL, TOLERANCE * energy_BL)
        case "mask_to_self" | run.SEE_SELF:
            yield Asked("sight of itself alone", "at least", own_BL, mixing_BL)
        case "mask_but_self":
            yield Asked("blindness to itself", "at most", own_BL, TOLERANCE * mixing_BL)
        case run.SEE_PREVIOUS | run.SEE_FAR:
            yield Asked("blindness to itself", "at most", own_BL, TOLERANCE * mixing_BL)
            yield Asked("sight of one key", "at least", mixing_BL, np.ones_like(mixing_BL))
        case run.SEE_TWO:
            yield Asked("sight of two keys", "at least", mixing_BL, np.full_like(mixing_BL, 0.5))
        case "open_to_later":
            yield Asked("averaging", "at most", mixing_BL, OPENED * study.untouched.weights(target)[0])


def _miss(rule: str, found_BL: np.ndarray, wanted_BL: np.ndarray) -> str | None:
    limits = {"equal": (-FARTHEST, FARTHEST), "at most": (0.0, FARTHEST), "at least": (-FARTHEST, 0.0)}[rule]

    def off(found: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.nan_to_num(np.clip(np.log(found / wanted), *limits))  # nothing, of nothing, is as asked for

    weights_RB, tail = resample_weights(len(found_BL)), bootstrap_tail(len(found_BL), CONFIDENCE)
    off_L = off(found_BL.mean(0), wanted_BL.mean(0))
    off_RL = off(weighted_means(weights_RB, found_BL), weighted_means(weights_RB, wanted_BL))
    low_L, high_L = np.quantile(off_RL, [tail, 1 - tail], axis=0)
    proven_L = np.maximum(low_L, -high_L)
    mean_square = float(np.mean(off_L**2 - off_RL.var(0)))
    if mean_square > np.log(1 + TOLERANCE) ** 2:
        return f"off by a factor of {np.exp(mean_square**0.5):.2f}, root mean square over layers"
    if proven_L.max() > np.log(1 + TOLERANCE):
        layer = int(proven_L.argmax())
        return f"{np.exp(off_L[layer]):.2f} of it in layer {layer}"
    return None
