"""How a manipulation check comes out: what came about, compared with what must have (`checks.Expected`).

A few dozen sequences give the variance in one layer to within 5 to 15 %, so the estimate of a single layer cannot tell
whether it is off by 10 %. The estimate over all layers can. A check fails if

- the root mean square over layers of log(actual / expected), minus what sampling adds to it, is above log 1.1, and so
  is the lower end of its one-sided 95 % interval: layers share their sequences, and so are off together by chance; or
- in one layer the whole 99 % interval of actual / expected is more than 10 % off.

Axes: B sequences, L layers acted on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sinkscope.interventions.checks import TOLERANCE, Expected, PassAtTarget
from sinkscope.statistics import bootstrap_tail, resample_weights, weighted_means

if TYPE_CHECKING:
    from sinkscope.tracing.replay import ConditionReading

CONFIDENCE = 0.99
"""Of the interval in a single layer. Higher than 95 %, because several layers are tested."""
FARTHEST = np.log(1e6)
"""No ratio counts as farther off than this, so that 0 / x or x / 0 in one layer leaves the mean finite."""


def miss(expected: Expected, layers: Sequence[int] | None = None) -> str | None:
    """How far off what came about is; None where it is what was expected. `layers` are the numbers of those acted on,
    by default from 0 on."""
    limits = {"equal": (-FARTHEST, FARTHEST), "at most": (0.0, FARTHEST), "at least": (-FARTHEST, 0.0)}[expected.rule]
    actual_BL = expected.actual_BL
    expected_BL = np.broadcast_to(expected.expected_BL, actual_BL.shape)

    def off(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.nan_to_num(np.clip(np.log(actual / expected), *limits))  # 0 / 0 is not off

    off_L = off(actual_BL.mean(0), expected_BL.mean(0))
    if len(actual_BL) == 1:  # nothing to resample
        proven_L, by_chance, spread = np.abs(off_L), 0.0, 0.0
    else:
        weights_RB, tail = resample_weights(len(actual_BL)), bootstrap_tail(len(actual_BL), CONFIDENCE)
        off_RL = off(weighted_means(weights_RB, actual_BL), weighted_means(weights_RB, expected_BL))
        low_L, high_L = np.quantile(off_RL, [tail, 1 - tail], axis=0)
        proven_L, by_chance = np.maximum(low_L, -high_L), off_RL.var(0)
        mean_square_R = (off_RL**2).mean(1)
        spread = float(np.median(mean_square_R) - np.quantile(mean_square_R, 0.05))
    # With few sequences each layer is off by chance. The square of that, estimated by resampling, is taken off.
    mean_square = float(np.mean(off_L**2 - by_chance))
    if mean_square - spread > np.log(1 + TOLERANCE) ** 2:
        return f"off by a factor of {np.exp(mean_square**0.5):.2f}, root mean square over layers"
    if proven_L.max() > np.log(1 + TOLERANCE):
        worst = int(proven_L.argmax())
        layer = worst if layers is None else layers[worst]
        return f"{np.exp(off_L[worst]):.2f} times what it should be in layer {layer}"
    return None


def pass_at(reading: ConditionReading, position: int, layers: Sequence[int], *, before_norm: bool) -> PassAtTarget:
    """What a reading shows at a position in some layers, on one side of the norm on the aggregation."""
    chosen = list(layers)
    squares_LB2T = reading.squares_LBS2T[chosen, :, int(before_norm)].double()
    length = squares_LB2T.shape[-1]
    later_LB = squares_LB2T[:, :, 0, length - length // 2 :].mean(-1)
    return PassAtTarget(
        variance_BL=squares_LB2T[:, :, 0, position].numpy().T,
        energy_BL=squares_LB2T[:, :, 1, position].numpy().T,
        weights_BL=reading.mixing_LBT[chosen, :, position].double().numpy().T,
        own_weight_BL=reading.own_mixing_LBT[chosen, :, position].double().numpy().T,
        later_variance_BL=later_LB.numpy().T,
    )


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """How one intervention fared."""

    intervention: str
    """As on the command line, such as amplify 10:4."""
    passed: bool | None
    """None where it was not checked."""
    text: str
    """A sentence for people."""


def check_result(intervention: str, expected: Sequence[Expected], layers: Sequence[int]) -> CheckResult:
    """The result of a check: what came about, compared with all that was expected."""
    if not expected:
        return not_checked(intervention, "no number that is read shows what it does")
    num_sequences, needed = len(expected[0].actual_BL), max(one.min_sequences for one in expected)
    if num_sequences < needed:
        have = "one sequence was" if num_sequences == 1 else f"{num_sequences} were"
        return not_checked(intervention, f"that needs {needed} sequences or more, and {have} read")
    for one in expected:
        if missed := miss(one, layers):
            text = f"{intervention} failed its check. Expected: {one.claim}. Measured: {missed}."
            return CheckResult(intervention=intervention, passed=False, text=text)
    claims = " and ".join(one.claim for one in expected)
    return CheckResult(intervention=intervention, passed=True, text=f"{intervention} passed its check: {claims}.")


def not_checked(intervention: str, why: str) -> CheckResult:
    """The result where an intervention could not be checked."""
    return CheckResult(intervention=intervention, passed=None, text=f"{intervention} was not checked: {why}.")
