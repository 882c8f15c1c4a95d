"""Per-token and per-channel statistics against their definitions in float64, by torch and by the kernel.

Axes: N token, C channel.
"""

import math

import pytest
import torch
from torch import Tensor

from sinkscope.kernels import token_statistics as module
from sinkscope.kernels.token_statistics import TokenStatistics, WeightedLargest, token_statistics, weighted_largest
from sinkscope.measures.dimension_disparity import kurtosis, participation_ratio

# The definition gets the same rounded activations. A float32 sum of up to 16,384 terms in the order of a tree or of
# vector lanes is good to a few units of 2^-24 = 6e-8 per level, so 1e-6; ratios of fourth and squared second moments
# collect it four times over. 1e-5 leaves a margin of three.
TOLERANCE = dict(rtol=1e-5, atol=1e-6)
# Where the mean is a thousand times the spread, float32 keeps 24 - 10 bits of each deviation, 6e-5, and the kurtosis
# takes four of those; the promise is 1e-3.
PROMISE = dict(rtol=1e-3, atol=0.0)
SHAPES = [
    (1, 17, torch.bfloat16),
    (3, 48, torch.float32),
    (70, 100, torch.float16),
    (5, 1030, torch.float32),
]


def activations(num_tokens: int, num_channels: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Ordinary values, with one massive channel in every second token, as in a residual stream."""
    generator = torch.Generator().manual_seed(num_tokens * num_channels)
    x_NC = torch.randn(num_tokens, num_channels, generator=generator)
    x_NC[1::2, num_channels // 3] *= 1e4
    return x_NC.to(device, dtype)


def defined(x_NC: Tensor) -> TokenStatistics:
    x_NC = x_NC.double()
    magnitude_NC = x_NC.abs()
    return TokenStatistics(
        magnitude_NC.amax(1),
        magnitude_NC.argmax(1),
        x_NC.square().sum(1),
        magnitude_NC.mean(1),
        kurtosis(x_NC),
        participation_ratio(x_NC),
        magnitude_NC.sum(0),
    )


def by_kernel(x_NC: Tensor) -> TokenStatistics:
    stats_SN, places_N, channel_C = module._by_kernel(x_NC, None)
    return TokenStatistics(stats_SN[0], places_N, *stats_SN[1:], channel_C)


def weighted_by_kernel(x_NC: Tensor, weight_C: Tensor) -> WeightedLargest:
    stats_SN, places_N, channel_C = module._by_kernel(x_NC, weight_C)
    return WeightedLargest(stats_SN[0], places_N, channel_C)


PATHS = pytest.mark.parametrize("path", [token_statistics, by_kernel], ids=["torch", "triton"])
WEIGHTED = pytest.mark.parametrize("path", [weighted_largest, weighted_by_kernel], ids=["torch", "triton"])


def assert_same(found, expected, tolerance: dict[str, float] = TOLERANCE) -> None:
    assert found.largest_at.dtype == torch.int64
    for field, a, b in zip(found._fields, found, expected, strict=True):
        torch.testing.assert_close(
            a.double(), b.double(), **tolerance, equal_nan=True, msg=lambda text, field=field: f"{field}: {text}"
        )


@PATHS
@pytest.mark.parametrize(("num_tokens", "num_channels", "dtype"), SHAPES)
def test_every_statistic_is_its_definition(path, num_tokens, num_channels, dtype, device):
    x_NC = activations(num_tokens, num_channels, dtype, device)
    assert_same(path(x_NC), defined(x_NC))
    with pytest.raises(AssertionError):
        assert_same(path(x_NC), defined(x_NC * 1.1))


@WEIGHTED
@pytest.mark.parametrize(("num_tokens", "num_channels", "dtype"), SHAPES)
def test_the_largest_weighted_value_of_each_token_and_the_energy_of_each_channel(
    path, num_tokens, num_channels, dtype, device
):
    x_NC = activations(num_tokens, num_channels, dtype, device)
    weight_C = torch.rand(num_channels, generator=torch.Generator().manual_seed(1)).to(device)
    weighted_NC = (x_NC.double() * weight_C.double()).abs()
    energy_C = x_NC.double().square().sum(0)
    found = path(x_NC, weight_C)
    assert_same(found, WeightedLargest(weighted_NC.amax(1), weighted_NC.argmax(1), energy_C))
    assert not torch.allclose(found.largest.double(), x_NC.double().abs().amax(1), rtol=1e-3), "the weight counts"


@PATHS
def test_a_mean_that_outweighs_the_spread_keeps_its_kurtosis(path, device):
    x_NC = 1000 + activations(4, 256, torch.float32, device).clamp(-3, 3)
    assert_same(path(x_NC), defined(x_NC), PROMISE)


@PATHS
def test_constant_rows_rows_of_zeros_and_equal_largest_values(path, device):
    x_NC = torch.tensor([[2.0, 2.0, 2.0], [0.0, 0.0, 0.0], [1.0, -3.0, 3.0]], device=device)
    found = path(x_NC)
    assert found.kurtosis[0] == 0
    assert found.participation_ratio[0] == pytest.approx(3)
    assert math.isnan(found.kurtosis[1])
    assert math.isnan(found.participation_ratio[1])
    assert found.largest_at.tolist()[2] == 1


@PATHS
def test_not_a_number_is_seen_and_stays_in_its_row(path, device):
    x_NC = activations(3, 32, torch.float32, device)
    x_NC[1, 5] = float("nan")
    found = path(x_NC)
    for field in ("largest", "energy", "mean_abs"):
        assert getattr(found, field).isnan().tolist() == [False, True, False]


@PATHS
@pytest.mark.parametrize("size", [1e-15, 1e15])
def test_values_whose_fourth_powers_leave_the_range_of_float32(path, size, device):
    x_NC = activations(4, 64, torch.float32, device)
    for field in ("kurtosis", "participation_ratio"):
        found, expected = getattr(path(x_NC * size), field), getattr(defined(x_NC), field)
        torch.testing.assert_close(found.double(), expected, **TOLERANCE)


@PATHS
def test_no_tokens_and_rows_that_lie_apart(path, device):
    x_NC = activations(8, 48, torch.float32, device)
    assert path(x_NC[:0]).largest.shape == (0,)
    assert_same(path(x_NC[::2]), defined(x_NC[::2]))


def test_neurons_in_float64_are_left_as_they_were():
    neurons_NC = activations(4, 16, torch.float64, torch.device("cpu"))
    before_NC = neurons_NC.clone()
    found = weighted_largest(neurons_NC, torch.ones(16, dtype=torch.float64))
    assert torch.equal(neurons_NC, before_NC)
    torch.testing.assert_close(found.channel_energy, before_NC.square().sum(0))
