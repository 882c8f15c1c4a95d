"""Manipulation checks: what misses by more than 10 % is marked, what only looks so by chance is not."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sinkscope.interventions.check_results import miss
from sinkscope.interventions.checks import Expected
from sinkscope.studies.checks import missed
from sinkscope.studies.conditions import Condition, in_words

B, L, SINK, TARGET = 32, 6, 0, 10


def level(*by_layer: float) -> np.ndarray:
    """[B, L] the same in every sequence."""
    return np.tile(np.array(by_layer), (B, 1))


def miss_of(rule: Any, actual_BL: np.ndarray, expected_BL: np.ndarray) -> str | None:
    return miss(Expected("variance", "its variance is 1", rule, actual_BL, expected_BL))


def test_a_miss_by_hand():
    ones = level(*[1.0] * L)
    assert miss_of("equal", 1.05 * ones, ones) is None
    assert miss_of("equal", 1.2 * ones, ones) == "off by a factor of 1.20, root mean square over layers"
    assert miss_of("equal", ones / 1.2, ones) == "off by a factor of 1.20, root mean square over layers"
    # Up in one layer and down in the next: their mean is right, the condition is not.
    assert miss_of("equal", level(1.2, 1 / 1.2, 1.2, 1 / 1.2), level(1, 1, 1, 1)) is not None
    # log(1.3)^2 / 12 = 0.0057 is below log(1.1)^2 = 0.0091, but this layer is surely off.
    assert miss_of("equal", level(*[1.0] * 4, 1.3, *[1.0] * 7), level(*[1.0] * 12)) == (
        "1.30 times what it should be in layer 4"
    )
    assert miss_of("at most", 0.2 * ones, ones) is None
    assert miss_of("at least", 0.2 * ones, ones) is not None
    assert miss_of("at most", 1.2 * ones, ones) is not None
    assert miss_of("equal", 0 * ones, ones) is not None
    assert miss_of("equal", 0 * ones, 0 * ones) is None
    # One sequence, which has nothing to resample, and layers that do not begin at 0.
    assert miss_of("equal", 1.05 * ones[:1], ones[:1]) is None
    assert miss_of("equal", 1.2 * ones[:1], ones[:1]) == "off by a factor of 1.20, root mean square over layers"
    one_off = Expected("variance", "its variance is 1", "equal", level(1, 1.3, *[1] * 10), level(*[1] * 12))
    assert miss(one_off, range(3, 15)) == "1.30 times what it should be in layer 4"


def test_chance_alone_seldom_marks_and_a_fifth_off_seldom_passes():
    """Squared deviations of 24 free dimensions, 32 sequences: a ratio of variances is known to 7 % in each layer."""
    random, marked = np.random.default_rng(0), {1.0: 0, 1.25: 0}
    single = 0
    for _ in range(100):
        found, wanted = (random.chisquare(24, (B, L)) for _ in range(2))
        for factor in marked:
            marked[factor] += miss_of("equal", factor * found, wanted) is not None
        single += np.abs(np.log(found.mean(0) / wanted.mean(0))).max() > np.log(1.1)
    assert marked[1.0] <= 5
    assert marked[1.25] >= 90
    # The control: the estimate of the worst layer would mark most honest conditions.
    assert single > 40


BASELINE = dict(variance=1.0, energy=3.0, mixing=0.2, own=0.05)
DONE: dict[Condition, dict[str, float]] = {
    Condition("amplify_variance", TARGET, 8.0): dict(variance=64.0),
    Condition("scale_norm", TARGET, 8.0): dict(energy=192.0),
    Condition("shift_mean", TARGET, 8.0): dict(energy=90.0),
    Condition("equalise_variance", TARGET): dict(variance=0.3),
    Condition("remove_mean", TARGET): dict(energy=1.0),
    Condition("remove_deviation", TARGET): dict(variance=0.0, energy=2.0),
    Condition("mask_to_self", TARGET): dict(mixing=0.7, own=0.7),  # the rest of the attention is a learned sink's
    Condition("see_self", TARGET): dict(mixing=1.0, own=1.0),
    Condition("mask_but_self", TARGET): dict(own=0.0),
    Condition("see_previous", TARGET): dict(mixing=1.0, own=0.0),
    Condition("see_far", TARGET): dict(mixing=1.0, own=0.0),
    Condition("see_self_and_previous", TARGET): dict(mixing=0.6, own=0.3),
    Condition("open_to_later", SINK): dict(mixing=0.1, own=0.01),
    Condition("untouched", TARGET, variance="see_self"): dict(variance=4.0),
    Condition("untouched", TARGET, energy="see_self", before_norm=True): dict(energy=9.0),
}
"""What each name asks for. The later half has a variance of 0.3, a token that sees only itself 4 and an energy of 9."""
SEEN = dict(variance=4.0, energy=9.0, mixing=1.0, own=1.0)


def result(numbers: dict[str, float]) -> Any:
    full = {name: level(*[value] * L) for name, value in (BASELINE | numbers).items()}
    return SimpleNamespace(
        squares=lambda position, before_norm: np.stack([full["variance"], full["energy"]]),
        later_squares=lambda before_norm: np.stack([level(*[0.3] * L)] * 2),
        weights=lambda position: np.stack([full["mixing"], full["own"]]),
    )


def test_without_its_mean_a_token_that_never_varies_has_nothing_left_but_rounding():
    condition = Condition("remove_mean", TARGET)
    found = {condition: result({"variance": 1e-19, "energy": 1e-13})}
    study: Any = SimpleNamespace(plan=SimpleNamespace(layers=range(L)), baseline=result({}), results=found)
    assert missed(study, condition) is None


@pytest.mark.parametrize("condition", DONE, ids=lambda condition: condition.label)
def test_a_condition_is_held_to_its_name(condition):
    def study(numbers: dict[str, float]) -> Any:
        return SimpleNamespace(
            plan=SimpleNamespace(layers=range(L)),
            baseline=result({"mixing": 1.0, "own": 1.0} if condition.target == SINK else {}),
            results={Condition("see_self", TARGET): result(SEEN), condition: result(numbers)},
        )

    assert missed(study(DONE[condition]), condition) is None
    # The control: nothing was done, or for what leaves the variance alone, something was.
    nothing = {"variance": 2.0} if condition.name == "shift_mean" else {}
    nothing |= {"mixing": 1.0, "own": 1.0} if condition.target == SINK else {}
    assert (missed(study(nothing), condition) or "").startswith(
        f"{in_words(condition.label)}: failed its manipulation check ("
    )
