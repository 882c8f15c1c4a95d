"""Bootstrap intervals: worked by hand where that is possible, and by simulated coverage."""

import numpy as np
import pytest

from sinkscope.statistics import bootstrap_mean_interval, seen_mean, weighted_means


def test_equal_samples_give_a_width_of_exactly_zero():
    values = np.full((7, 3), [0.1, 1e9, -1 / 3])
    low, high = bootstrap_mean_interval(values)
    np.testing.assert_array_equal(low, [0.1, 1e9, -1 / 3])
    np.testing.assert_array_equal(high, low)


def test_control_unequal_samples_give_a_width():
    low, high = bootstrap_mean_interval([0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.2])
    assert low == 0.1  # (6/7)^7 = 34 % of the resamples miss the odd sample
    assert high > low


def test_two_samples_worked_by_hand():
    # Of 0 and 1 a resample's mean is 0, 1/2 or 1 with probability 1/4, 1/2, 1/4: a 95 % interval spans everything, and
    # a 40 % interval (from the 30 % to the 70 % quantile) is the point 1/2.
    assert [float(end) for end in bootstrap_mean_interval([0.0, 1.0])] == [0.0, 1.0]
    assert [float(end) for end in bootstrap_mean_interval([0.0, 1.0], confidence=0.4)] == [0.5, 0.5]


def test_equals_resampling_by_index():
    """The same distribution as the textbook loop; 20,000 resamples put the ends within a few percent of the width."""
    values = np.random.default_rng(3).exponential(size=25)
    random = np.random.default_rng(4)
    means = values[random.integers(0, 25, size=(20_000, 25))].mean(axis=1)
    expected = np.quantile(means, [0.025, 0.975])
    found = np.array(bootstrap_mean_interval(values, num_resamples=20_000))
    width = expected[1] - expected[0]
    np.testing.assert_allclose(found, expected, atol=0.04 * width)
    # Control: resampling without the square root of N, the spread of single samples, is far outside that.
    assert np.abs(np.quantile(values, [0.025, 0.975]) - expected).max() > 0.5 * width


def coverage(confidence: float, num_samples: int = 60, true_mean: float = 0.3) -> float:
    samples = np.random.default_rng(0).binomial(1, 0.3, size=(num_samples, 4000)).astype(float)
    low, high = bootstrap_mean_interval(samples, confidence=confidence)
    return float(((low <= true_mean) & (true_mean <= high)).mean())


def test_coverage_by_simulation():
    # 4,000 simulated means have a standard error of 0.35 %; the percentile bootstrap itself covers one or two percent
    # less than it says at 60 samples, and proportions are discrete.
    assert 0.92 < coverage(0.95) < 0.97
    # Controls: a narrower interval covers less, and the wrong mean is not covered.
    assert coverage(0.5) < 0.6
    assert coverage(0.95, true_mean=0.6) < 0.05


def test_trailing_axes_keep_their_shape_and_chunks_change_nothing(monkeypatch):
    values = np.random.default_rng(1).normal(size=(8, 3, 5))
    low, high = bootstrap_mean_interval(values, num_resamples=200)
    assert low.shape == high.shape == (3, 5)
    assert (low < values.mean(axis=0)).all()
    assert (values.mean(axis=0) < high).all()
    one_low, one_high = bootstrap_mean_interval(values[:, 1, 2], num_resamples=200)
    np.testing.assert_allclose([low[1, 2], high[1, 2]], [one_low, one_high], rtol=1e-12)
    monkeypatch.setattr("sinkscope.statistics._MAX_MEANS", 400)  # two columns at a time
    np.testing.assert_allclose(bootstrap_mean_interval(values, num_resamples=200), (low, high), rtol=1e-12)


def test_quantile_is_numpys():
    from sinkscope.statistics import _quantile_of_sorted

    ordered = np.sort(np.random.default_rng(2).normal(size=(4, 11)), axis=1)
    for probability in (0.0, 0.025, 0.33, 0.5, 0.975, 1.0):
        expected = np.quantile(ordered, probability, axis=1)
        np.testing.assert_allclose(_quantile_of_sorted(ordered, probability), expected, rtol=1e-12)


def test_seed_decides():
    values = np.random.default_rng(5).normal(size=(10, 2))
    np.testing.assert_array_equal(bootstrap_mean_interval(values, seed=1), bootstrap_mean_interval(values, seed=1))
    assert not np.array_equal(bootstrap_mean_interval(values, seed=1), bootstrap_mean_interval(values, seed=2))


def test_one_sample_and_broken_columns_are_nan():
    assert np.isnan(bootstrap_mean_interval([3.0])).all()
    assert np.isnan(bootstrap_mean_interval(np.ones((1, 2)))).all()
    low, high = bootstrap_mean_interval([[1.0, np.nan, np.inf], [2.0, 2.0, 2.0]])
    np.testing.assert_array_equal(np.isnan(low), [False, True, True])
    np.testing.assert_array_equal(np.isnan(high), [False, True, True])


def test_an_empty_sample_is_left_out():
    values = np.random.default_rng(0).normal(size=12)
    some = np.array([*values, np.nan, np.nan])
    assert np.array_equal(bootstrap_mean_interval(some), bootstrap_mean_interval(values))
    assert seen_mean(some) == pytest.approx(values.mean())
    assert np.isnan(seen_mean(np.full(3, np.nan)))
    weights = np.array([[0.25, 0.25, 0.5], [0.0, 0.0, 1.0]])
    found = weighted_means(weights, np.array([[1.0, 2.0], [4.0, 3.0], [5.0, np.nan]]))
    np.testing.assert_array_equal(found, [[3.75, 2.5], [5.0, np.nan]])


def test_no_columns():
    low, _ = bootstrap_mean_interval(np.ones((3, 0)))
    assert low.shape == (0,)


@pytest.mark.parametrize("arguments", [{"values": []}, {"values": 1.0}, {"values": [1, 2], "confidence": 1.0}])
def test_refuses_what_has_no_interval(arguments):
    with pytest.raises(ValueError, match="expected"):
        bootstrap_mean_interval(arguments.pop("values"), **arguments)
