"""Kendall's tau of many columns against the definition over all pairs, and against scipy's."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sinkscope.origins import kendall
from sinkscope.origins.kendall import kendall_tau_columns
from sinkscope.statistics import kendall_tau

# Two square roots and two quotients of exact integers: a few units in the last place of numbers up to 1.
TOLERANCE = 1e-12


@pytest.fixture(autouse=True, params=["c", "numpy"])
def way(request, monkeypatch):
    """Every test counts by the kernel in C, and as a machine without a compiler does."""
    if request.param == "numpy":
        monkeypatch.setattr(kendall, "runs_in_c", lambda *_: False)
    elif not kendall.runs_in_c(torch.zeros(1)):
        pytest.skip("KENDALL'S KERNEL IN C NOT CHECKED: no compiler")
    return request.param


def samples(num_samples, num_columns, *, levels=None, dtype=torch.float32, seed=0):
    """Correlated columns; with `levels`, rounded to so many values, so that there are ties in one and in both."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, num_columns, generator=generator, dtype=torch.float64)
    y = 0.4 * x + torch.randn(num_samples, num_columns, generator=generator, dtype=torch.float64)
    if levels is not None:
        x, y = (x * levels / 4).round(), (y * levels / 7).round()
    return x.to(dtype), y.to(dtype)


def by_definition(x, y):
    return [kendall_tau(a.double().numpy(), b.double().numpy()) for a, b in zip(x.T, y.T, strict=True)]


@pytest.mark.parametrize("num_samples", [2, 3, 31, 32, 33, 63, 64, 65, 200])
@pytest.mark.parametrize("levels", [None, 3, 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_to_the_definition(num_samples, levels, dtype):
    x, y = samples(num_samples, 7, levels=levels, dtype=dtype)
    np.testing.assert_allclose(kendall_tau_columns(x, y).numpy(), by_definition(x, y), atol=TOLERANCE, rtol=0)


def test_equal_to_scipy():
    stats = pytest.importorskip("scipy.stats", reason="KENDALL NOT CHECKED AGAINST SCIPY: it is not installed")
    for levels in (None, 5):
        x, y = samples(2000, 6, levels=levels)
        expected = [stats.kendalltau(a.numpy(), b.numpy()).statistic for a, b in zip(x.T, y.T, strict=True)]
        np.testing.assert_allclose(kendall_tau_columns(x, y).numpy(), expected, atol=TOLERANCE, rtol=0)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(-4, 4), st.integers(-4, 4)), min_size=2, max_size=150),
    st.sampled_from([1.0, 1e-44, 1e37]),
)
def test_any_ties(pairs, unit):
    """Of both signs, near zero and near the largest float32 as well."""
    stats = pytest.importorskip("scipy.stats", reason="KENDALL NOT CHECKED AGAINST SCIPY: it is not installed")
    x, y = (torch.tensor(values, dtype=torch.float32)[:, None] * unit for values in zip(*pairs, strict=True))
    expected = stats.kendalltau(x[:, 0].double().numpy(), y[:, 0].double().numpy()).statistic
    found = [kendall_tau_columns(*inputs).item() for inputs in ((x, y), (x.double(), y.double()))]
    np.testing.assert_allclose(found, [expected, expected], atol=TOLERANCE, rtol=0)


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(finite, finite), min_size=2, max_size=100))
def test_any_floats(pairs):
    stats = pytest.importorskip("scipy.stats", reason="KENDALL NOT CHECKED AGAINST SCIPY: it is not installed")
    x, y = (torch.tensor(values, dtype=torch.float32)[:, None] for values in zip(*pairs, strict=True))
    expected = stats.kendalltau(x[:, 0].double().numpy(), y[:, 0].double().numpy()).statistic
    np.testing.assert_allclose(kendall_tau_columns(x, y).item(), expected, atol=TOLERANCE, rtol=0)


def test_by_hand():
    x = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    # Of six pairs only (3, 4) is discordant: (5 - 1) / 6.
    assert kendall_tau_columns(x, torch.tensor([[1.0], [2.0], [4.0], [3.0]])).item() == pytest.approx(4 / 6)
    # One pair is tied in y, none discordant: 5 / sqrt(6 * 5).
    assert kendall_tau_columns(x, torch.tensor([[1.0], [2.0], [3.0], [3.0]])).item() == pytest.approx(5 / 30**0.5)


def test_extremes():
    x = torch.tensor([[-0.0, 1e-45], [0.0, 0.0], [3e38, -1e-45], [-3e38, -3e38]])
    assert kendall_tau_columns(x, x).tolist() == [1.0, 1.0]
    # The two zeros are one value: of the six pairs one is tied in x.
    line = torch.tensor([[2.0], [1.0], [3.0], [0.0]])
    assert kendall_tau_columns(x[:, :1], line).item() == pytest.approx(5 / 30**0.5)
    assert torch.isnan(kendall_tau_columns(torch.ones(5, 1), torch.randn(5, 1))).all()
    assert kendall_tau_columns(torch.ones(5, 0), torch.ones(5, 0)).shape == (0,)


@pytest.mark.parametrize("num_samples", [40_000, 70_000])
def test_many_samples_keep_their_exactness(num_samples):
    """Pairs no longer fit 32 bits, nor places 16; a reversed order has every pair discordant."""
    up = torch.arange(num_samples, dtype=torch.float32)[:, None]
    assert kendall_tau_columns(up, -up).item() == pytest.approx(-1.0, abs=TOLERANCE)
    swapped = up.clone()
    swapped[[0, num_samples - 1]] = swapped[[num_samples - 1, 0]]
    pairs = num_samples * (num_samples - 1) // 2
    discordant = 2 * (num_samples - 2) + 1
    assert kendall_tau_columns(up, swapped).item() == pytest.approx(1 - 2 * discordant / pairs, abs=TOLERANCE)


def test_many_samples_are_equal_to_scipy():
    stats = pytest.importorskip("scipy.stats", reason="KENDALL NOT CHECKED AGAINST SCIPY: it is not installed")
    for levels in (None, 300):
        x, y = samples(70_000, 1, levels=levels)
        expected = stats.kendalltau(x[:, 0].numpy(), y[:, 0].numpy()).statistic
        np.testing.assert_allclose(kendall_tau_columns(x, y).item(), expected, atol=TOLERANCE, rtol=0)


def test_a_control_one_swapped_pair_shows():
    x, y = samples(500, 3)
    before = kendall_tau_columns(x, y)
    order = y[:, 1].argsort()
    y[order[[250, 251]], 1] = y[order[[251, 250]], 1]
    after = kendall_tau_columns(x, y)
    assert after[1] != before[1]
    assert after[[0, 2]].tolist() == before[[0, 2]].tolist()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_numbers_that_have_no_order_are_refused(bad):
    x, y = samples(10, 2)
    x[3, 1] = bad
    with pytest.raises(ValueError, match="finite"):
        kendall_tau_columns(x, y)
