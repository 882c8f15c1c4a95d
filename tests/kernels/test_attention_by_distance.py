"""The kernel that reads attention at chosen distances, against its definition in float64."""

import pytest
import torch

from sinkscope.kernels.attention_by_distance import attention_by_distance, attention_by_distance_plain

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(length, head_size, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    # Heads last in memory and then transposed, as projections leave them.
    query, key = (torch.randn(2, length, heads, head_size, generator=generator).transpose(1, 2) for heads in (6, 2))
    scores = query.double() @ key.double().repeat_interleave(3, 1).transpose(-1, -2) * head_size**-0.5
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    lse = scores.masked_fill(future, -torch.inf).logsumexp(-1).float()
    return query.to(DEVICE, dtype), key.to(DEVICE, dtype), lse.to(DEVICE)


@pytest.mark.parametrize("length", [1, 17, 130])
@pytest.mark.parametrize("head_size", [16, 80])
@pytest.mark.parametrize("window", [None, 5])
def test_equals_the_definition(length, head_size, window):
    query, key, lse = inputs(length, head_size)
    queries = torch.arange(0, length, 2, device=DEVICE)
    distances = torch.tensor([d for d in (0, 1, 4, 64) if d <= queries[-1]], device=DEVICE)
    options = {"scaling": head_size**-0.5, "window": window}
    result = attention_by_distance(query, key, lse, queries, distances, **options)
    expected = attention_by_distance_plain(query, key, lse, queries, distances, **options)
    # Sums of up to 80 products and one exponential in float32: a few units in the last place of numbers below 1.
    torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=0)
    if length > 64:
        other = attention_by_distance_plain(query, key, lse, queries, distances, scaling=1.0, window=window)
        assert (result.double() - other).abs().max() > 1e-2


def test_bfloat16_reads_the_rounded_inputs():
    query, key, lse = inputs(67, 64, torch.bfloat16)
    queries, distances = torch.arange(67, device=DEVICE), torch.tensor([0, 3], device=DEVICE)
    result = attention_by_distance(query, key, lse, queries, distances, scaling=0.125)
    expected = attention_by_distance_plain(query, key, lse, queries, distances, scaling=0.125)
    torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=1e-4)
