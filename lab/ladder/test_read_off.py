"""The token multiplier, on curves of which it is known."""

from __future__ import annotations

import math

import pytest
from read_off import Curve, multiplier

ENDS = (40, 60, 80, 100)


def curve(faster: float) -> Curve:
    """Loss as a straight line in the logarithm of the tokens, reached with `faster` times fewer of them."""
    return [(tokens, 3 - 0.2 * math.log(tokens * faster)) for tokens in ENDS]


@pytest.mark.parametrize("faster", [0.7, 0.95, 1.0, 1.08, 1.5])
@pytest.mark.parametrize("end", [-1, -2, -3])
def test_the_multiplier_is_how_many_times_fewer_tokens(faster, end):
    assert multiplier(curve(1), curve(faster), end) == pytest.approx(faster)


def test_between_ends_it_follows_the_line_of_its_part():
    baseline = [(40, 3.0), (60, 2.5), (80, 2.2), (100, 2.0)]
    arm = [(40, 2.9), (60, 2.4), (80, 1.8), (100, 1.5)]
    tokens = math.exp(math.log(60) + (0.4 / 0.6) * math.log(80 / 60))
    assert multiplier(baseline, arm) == pytest.approx(100 / tokens)
