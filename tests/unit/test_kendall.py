"""Kendall's tau of many columns against the definition over all pairs, and against scipy's."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkscope.origins import kendall
from sinkscope.origins.kendall import kendall_tau_columns
from sinkscope.statistics import kendall_tau

# Two square roots and two quotients of exact integers: a few units in the last place of numbers up to 1.
TOLERANCE = 1e-12


def samples(num_samples, num_columns, *, levels=None, dtype=torch.float32, seed=0):
    """Correlated columns; with `levels`, rounded to so many values, so that there are ties in one and in both."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, num_columns, generator=generator, dtype=torch.float64)
    y = 0.4 * x + torch.randn(num_samples, num_columns, generator=generator, dtype=torch.float64)
    if levels is not None:
        x, y = (x * levels / 4).round(), (y * levels / 7).round()
    return x.to(dtype), y.to(dtype)


@pytest.mark.parametrize("num_samples", [2, 3, 63, 64, 65, 200])
@pytest.mark.parametrize("levels", [None, 3, 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("count", ["_agreement_by_sorting", "_agreement_by_pairs"])
def test_equal_to_the_definition(num_samples, levels, dtype, count, monkeypatch):
    monkeypatch.setattr(kendall, "_agreement_by_sorting", getattr(kendall, count))
    monkeypatch.setattr(kendall, "PAIRS_AT_ONCE", 1000)  # several blocks of rows
    monkeypatch.setattr(kendall, "COLUMNS", 3)  # several groups of columns, the last one short
    x, y = samples(num_samples, 7, levels=levels, dtype=dtype)
    expected = [kendall_tau(a.double().numpy(), b.double().numpy()) for a, b in zip(x.T, y.T, strict=True)]
    np.testing.assert_allclose(kendall_tau_columns(x, y).numpy(), expected, atol=TOLERANCE, rtol=0)


def test_equal_to_scipy():
    stats = pytest.importorskip("scipy.stats", reason="KENDALL NOT CHECKED AGAINST SCIPY: it is not installed")
    for levels in (None, 5):
        x, y = samples(2000, 6, levels=levels)
        expected = [stats.kendalltau(a.numpy(), b.numpy()).statistic for a, b in zip(x.T, y.T, strict=True)]
        np.testing.assert_allclose(kendall_tau_columns(x, y).numpy(), expected, atol=TOLERANCE, rtol=0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-4, 4), st.integers(-4, 4)), min_size=2, max_size=150))
def test_any_ties(pairs):
    x, y = (torch.tensor(values, dtype=torch.float32)[:, None] for values in zip(*pairs, strict=True))
    expected = kendall_tau(x[:, 0].double().numpy(), y[:, 0].double().numpy())
    np.testing.assert_allclose(kendall_tau_columns(x, y).numpy(), [expected], atol=TOLERANCE, rtol=0)


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


def test_many_samples_keep_their_exactness():
    """Above 2^15 samples, places no longer fit 16 bits; a reversed order has every pair discordant."""
    up = torch.arange(40_000, dtype=torch.float32)[:, None]
    assert kendall_tau_columns(up, -up).item() == -1.0
    swapped = up.clone()
    swapped[[0, 39_999]] = swapped[[39_999, 0]]
    pairs = 40_000 * 39_999 // 2
    discordant = 2 * 39_998 + 1
    assert kendall_tau_columns(up, swapped).item() == pytest.approx(1 - 2 * discordant / pairs, abs=TOLERANCE)


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
