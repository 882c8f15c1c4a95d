"""The rules on where massive dimensions appear and which of them carry a sink, on tables written by hand."""

import pytest
import torch

from sinkscope.tracing.disparity import UNKNOWN, Row, carrying, changes_of, layers_before, layers_of, layers_with

RATES = [0.0, 0.0, 0.0, 0.8, 0.9, 0.9]
MASSIVE, WEAK = 7, 3


def rows(*ratios: dict[int, float]) -> list[Row]:
    """One row for the stream that enters layer 0 and one after each layer, with the ratios of their dimensions."""
    return [Row(frozenset(d for d, ratio in row.items() if ratio >= 10), row) for row in ratios]


BIG, SMALL = {MASSIVE: 90.0}, {WEAK: 12.0}
BOTH = BIG | SMALL
APPEARANCES = {
    "one": (rows({}, {}, {}, *[BIG] * 4), RATES, [2], [], 3),
    "a weak one before": (rows({}, SMALL, SMALL, *[BOTH] * 4), RATES, [2], [], 3),
    "the same, weak before": (rows({}, {MASSIVE: 12.0}, {MASSIVE: 12.0}, *[BIG] * 4), RATES, [2], [], 3),
    "a growth of less than half": (rows({}, {}, {}, {MASSIVE: 50.0}, *[BIG] * 3), RATES, [2], [], 3),
    "in two steps": (rows({}, {}, SMALL, *[BOTH] * 4), [0, 0, 0.2, 0.8, 0.9, 0.9], [1, 2], [], 3),
    "one after the sink": (rows({}, {}, {}, {}, {}, *[BIG] * 2), RATES, [], [], 3),
    "one in the last layer": (rows({}, {}, {}, *[BIG] * 3, BOTH), RATES, [2], [], 3),
    "gone and back": (rows({}, BIG, BIG, {}, *[BIG] * 3), [0, 0.8, 0.8, 0, 0.9, 0.9], [0, 3], [2], 4),
    "gone and back beside a weak one": (
        *(rows(SMALL, BOTH, BOTH, SMALL, *[BOTH] * 3), [0, 0.8, 0.8, 0, 0.9, 0.9]),
        *([0, 3], [2], 4),
    ),
    "from the embeddings": (rows(*[BIG] * 7), [0.9] * 6, [-1], [], 1),
    "one dimension hands the sink on": (rows(SMALL, *[BIG] * 6), [0.7, 0.9, 0.9, 0.9, 0.9, 0.9], [-1, 0], [], 1),
    "no sink": (rows({}, SMALL, SMALL, *[BOTH] * 4), [0.0] * 6, [0, 2], [], 3),
    "layers without attention": (rows({}, {}, {}, *[BIG] * 4), [0, torch.nan, 0, torch.nan, 0.9, 0.9], [2], [], 3),
    "not recorded where it appears": (rows({}, {}, {}, {UNKNOWN: 90.0}, *[BIG] * 3), RATES, [2], [], 3),
    "not recorded where it stands": (rows({}, {}, {}, BIG, {UNKNOWN: 90.0}, *[BIG] * 2), RATES, [2], [], 3),
}


@pytest.mark.parametrize("name", APPEARANCES)
def test_what_carries_a_sink(name):
    given, rates, appears_in, disappears_in, end = APPEARANCES[name]
    rate_L, changes = torch.tensor(rates), changes_of(given)
    carry = carrying(changes, rate_L)
    assert layers_of(changes, carry) == (appears_in, disappears_in)
    assert {change.dimension for change in carry} <= {MASSIVE, WEAK}
    assert layers_before(appears_in, rate_L, parallel=False) == range(end)
    # Attention beside the feed-forward reads what the layers before it wrote.
    in_layers = any(layer >= 0 for layer in appears_in)
    assert layers_before(appears_in, rate_L, parallel=True) == range(max(1, end - in_layers))


def test_disparity_stands_from_each_appearance_to_the_next_disappearance():
    assert layers_with([-1, 4, 6], [2, 8], 10) == [0, 1, 4, 5, 6, 7]
    assert layers_with([], [], 10) == []
