"""Agreement of pairs: kernel and definition against counts by hand and a loop over pairs."""

import itertools

import pytest
import torch

from sinkscope.kernels import pair_agreement as agreement
from sinkscope.kernels.pair_agreement import pair_agreement_plain, triton_pair_agreement


def pair_by_pair(x, y):
    """[3] of one column, as counting on paper would go."""
    signs = [
        (int(a > b) - int(a < b), int(c > d) - int(c < d))
        for (a, c), (b, d) in itertools.combinations(zip(x.tolist(), y.tolist(), strict=True), 2)
    ]
    return [sum(s * t for s, t in signs), sum(s * s for s, _ in signs), sum(t * t for _, t in signs)]


def samples(num_samples, num_columns, *, levels, dtype, device):
    generator = torch.Generator().manual_seed(num_samples)
    x, y = torch.randn(2, num_samples, num_columns, generator=generator)
    if levels is not None:
        x, y = (x * levels).round(), (y * levels).round()
    return x.to(device, dtype), y.to(device, dtype)


@pytest.mark.parametrize("count", [pair_agreement_plain, triton_pair_agreement])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("levels", [None, 1])
@pytest.mark.parametrize("num_samples", [1, 2, 3, 32, 33, 64, 65, 100])
def test_equal_to_counting_pair_by_pair(count, dtype, levels, num_samples, device, monkeypatch):
    monkeypatch.setattr(agreement, "PAIRS_AT_ONCE", 500)  # several blocks of rows
    x, y = samples(num_samples, 3, levels=levels, dtype=dtype, device=device)
    found = count(x, y)
    assert found.dtype == torch.int64
    assert found.T.tolist() == [pair_by_pair(a, b) for a, b in zip(x.T, y.T, strict=True)]


@pytest.mark.parametrize("count", [pair_agreement_plain, triton_pair_agreement])
def test_by_hand(count, device):
    # Of six pairs, one is tied in y and one in x; of the others (1, 3) with (2, 1) alone disagrees.
    x = torch.tensor([[1.0], [2.0], [3.0], [3.0]], device=device)
    y = torch.tensor([[3.0], [1.0], [3.0], [4.0]], device=device)
    assert count(x, y)[:, 0].tolist() == [2, 5, 5]
    assert count(x[:, :0], y[:, :0]).shape == (3, 0)


@pytest.mark.parametrize("count", [pair_agreement_plain, triton_pair_agreement])
def test_the_smallest_differences_count(count, device):
    x = torch.tensor([[0.0], [1e-45], [-1e-45], [-0.0]], device=device)
    assert count(x, x)[:, 0].tolist() == [5, 5, 5]


def test_a_control_one_swapped_pair_shows(device):
    x, y = samples(90, 2, levels=None, dtype=torch.float32, device=device)
    before = triton_pair_agreement(x, y)
    order = y[:, 1].argsort()
    y[order[[40, 41]], 1] = y[order[[41, 40]], 1]
    change = triton_pair_agreement(x, y) - before
    assert change[0].abs().tolist() == [0, 2]
    assert change[1:].abs().sum() == 0
