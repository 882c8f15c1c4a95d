"""Preference and contraction against plain float64 definitions, numbers worked out by hand, and controls that fail."""

import itertools
import math

import numpy as np
import pytest
import torch

from sinkscope.measures.contraction import pairwise_cosine, principal, split_half_cosine
from sinkscope.measures.token_preference import (
    prediction_ratio,
    prediction_surprise,
    probability_ratio,
    uniform_entropy,
)
from sinkscope.statistics import rank_correlation, share_interval


def unit_states(num_states: int, width: int, push: float = 0.5, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(num_states, width, generator=generator, dtype=torch.float64)
    states[:, 0] += push * width**0.5
    return torch.nn.functional.normalize(states, dim=-1)


def mean_over_pairs(unit_NE: torch.Tensor) -> float:
    pairs = itertools.combinations(range(len(unit_NE)), 2)
    return float(np.mean([float(unit_NE[a] @ unit_NE[b]) for a, b in pairs]))


def test_pairwise_cosine_is_the_mean_over_pairs_and_spreads_as_the_jackknife_does():
    unit_NE = unit_states(40, 6)
    values = pairwise_cosine(unit_NE).numpy()
    assert values.mean() == pytest.approx(mean_over_pairs(unit_NE), abs=1e-14)
    without = [mean_over_pairs(torch.cat([unit_NE[:n], unit_NE[n + 1 :]])) for n in range(40)]
    jackknife = math.sqrt(39 / 40 * sum((value - np.mean(without)) ** 2 for value in without))
    assert values.std(ddof=1) / math.sqrt(40) == pytest.approx(jackknife, rel=0.06)
    # Control: the mean cosines to the others, resampled as they are, would give half the error.
    halved = (values + values.mean()) / 2
    assert halved.std(ddof=1) / math.sqrt(40) < 0.6 * jackknife


def test_the_interval_of_pairwise_cosine_covers_what_many_states_give():
    truth = pairwise_cosine(unit_states(20_000, 6)).mean()
    hits = 0
    for seed in range(200):
        values = pairwise_cosine(unit_states(64, 6, seed=seed + 1)).numpy()
        hits += abs(values.mean() - truth) < 1.96 * values.std(ddof=1) / 8
    assert 180 <= hits <= 199


@pytest.mark.parametrize("shape", [(5, 12), (30, 12), (12, 12)])
def test_principal_direction_equals_the_decomposition_of_all_states(shape):
    unit_NE = unit_states(*shape)
    _, values, directions = torch.linalg.svd(unit_NE, full_matrices=False)
    mean = unit_NE.mean(0)
    found = principal(unit_NE.float())
    assert found.alignment == pytest.approx(float((mean @ directions[0]).abs() / mean.norm()), abs=1e-6)
    assert found.share == pytest.approx(float(values[0] ** 2 / values.square().sum()), abs=1e-6)


def test_split_halves_agree_where_there_is_a_direction_and_only_there():
    pushed, free = unit_states(400, 50, push=1.0), unit_states(400, 50, push=0.0)
    even, odd = pushed[::2].mean(0), pushed[1::2].mean(0)
    assert split_half_cosine(pushed) == pytest.approx(float(even @ odd / even.norm() / odd.norm()), abs=1e-12)
    assert split_half_cosine(pushed) > 0.95
    assert abs(split_half_cosine(free)) < 0.5


def test_preference_by_hand():
    predicted = torch.tensor([3, 3, 3, 1, 0, 3])  # even: 3 3 0, odd: 3 1 3; each half prefers 3
    assert prediction_ratio(predicted, 10).tolist() == [10, 10, 10, 0, 0, 10]
    shares = [4 / 6, 1 / 6, 1 / 6]
    assert float(prediction_surprise(predicted).mean()) == pytest.approx(-sum(p * math.log(p) for p in shares))
    probability = torch.tensor([[0.2, 0.8], [0.6, 0.4], [0.3, 0.7], [0.1, 0.9]])
    # Even sequences prefer token 1 (0.75), odd ones too (0.65).
    assert probability_ratio(probability).tolist() == pytest.approx([1.6, 0.8, 1.4, 1.8], abs=1e-6)


def test_without_preference_the_ratio_is_one_and_counting_where_it_was_chosen_is_not():
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(50, (4000, 40), generator=generator)
    honest = np.mean([prediction_ratio(row, 50).mean() for row in draws])
    assert honest == pytest.approx(1, abs=0.1)
    selected = np.mean([50 * float(row.bincount(minlength=50).max()) / 40 for row in draws])
    assert selected > 3


@pytest.mark.parametrize(("num_sequences", "vocabulary"), [(4, 3), (5, 2), (3, 7), (6, 1)])
def test_uniform_entropy_is_the_mean_over_all_outcomes(num_sequences, vocabulary):
    outcomes = itertools.product(range(vocabulary), repeat=num_sequences)
    expected = np.mean([float(prediction_surprise(torch.tensor(outcome)).mean()) for outcome in outcomes])
    assert uniform_entropy(num_sequences, vocabulary) == pytest.approx(expected, abs=1e-12)


def test_rank_correlation_with_ties_by_hand():
    # Ranks 1, 2.5, 2.5, 4 and 2, 1, 3, 4, centred: -1.5 0 0 1.5 and -0.5 -1.5 0.5 1.5.
    assert rank_correlation(np.array([1, 5, 5, 9]), np.array([2, 1, 3, 8])) == pytest.approx(3 / math.sqrt(4.5 * 5))
    x = np.random.default_rng(0).normal(size=100)
    assert rank_correlation(x, np.exp(x)) == pytest.approx(1)
    assert rank_correlation(x, -x) == pytest.approx(-1)
    assert math.isnan(rank_correlation(x, np.zeros(100)))


def test_share_interval_of_nothing_is_not_nothing():
    assert share_interval(0.0, 10) == pytest.approx((0, 0.2775), abs=1e-4)
    assert share_interval(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)
