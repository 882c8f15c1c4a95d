"""Per-token and per-channel statistics against their definition in float64, by every path, with controls.

Axes: N token, C channel.
"""

import math

import pytest
import torch
from torch import Tensor

from sinkscope.errors import InputError
from sinkscope.kernels import token_statistics as module
from sinkscope.kernels.compiled import runs_in_c
from sinkscope.kernels.token_statistics import TokenStatistics, token_statistics, token_statistics_plain

# The definition gets the same rounded activations. A float32 sum of up to 16,384 terms in the order of a tree or of
# vector lanes is good to a few units of 2^-24 = 6e-8 per level, so 1e-6; ratios of fourth and squared second moments
# collect it four times over. 1e-5 leaves a margin of three.
TOLERANCE = dict(rtol=1e-5, atol=1e-6)
# Where the mean is a thousand times the spread, float32 keeps 24 - 10 bits of each deviation, 6e-5, and the kurtosis
# takes four of those; the promise is 1e-3.
PROMISE = dict(rtol=1e-3, atol=0.0)
PATHS = (
    "torch",
    pytest.param("c", marks=pytest.mark.skipif(not runs_in_c(torch.zeros(1)), reason="NOT CHECKED IN C: no compiler")),
    "triton",
)
# What is not computed, with and without moments.
ABSENT = {
    True: {"column_energy"},
    False: {"energy", "mean_abs", "kurtosis", "participation_ratio", "column_abs"},
}


def activations(num_tokens: int, num_channels: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Ordinary values, with one massive channel in every second token, as in a residual stream."""
    generator = torch.Generator().manual_seed(num_tokens * num_channels)
    x_NC = torch.randn(num_tokens, num_channels, generator=generator)
    x_NC[1::2, num_channels // 3] *= 1e4
    return x_NC.to(device, dtype)


def assert_same(found: TokenStatistics, expected: TokenStatistics, tolerance: dict[str, float] = TOLERANCE) -> None:
    assert found.argmax.dtype == torch.int64
    for field, a, b in zip(found._fields, found, expected, strict=True):
        if a is None:
            continue
        torch.testing.assert_close(
            a.double(), b.double(), **tolerance, msg=lambda text, field=field: f"{field}: {text}"
        )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_channels", "dtype"),
    [
        (1, 1, torch.float32),
        (1, 17, torch.bfloat16),
        (70, 16, torch.bfloat16),  # several programs of several tiles
        (17, 64, torch.float32),
        (67, 67, torch.float16),
        (130, 576, torch.bfloat16),
        (5, 1024, torch.float32),
        (5, 1536, torch.bfloat16),
        (3, 2048, torch.float32),
        (2, 16384, torch.bfloat16),
        (2, 16384, torch.float32),
    ],
)
def test_matches_definition(num_tokens, num_channels, dtype, weighted, path, device) -> None:
    x_NC = activations(num_tokens, num_channels, dtype, device)
    weight_C = torch.randn(num_channels, generator=torch.Generator().manual_seed(0)).to(device) if weighted else None
    for moments in (True, False):
        found = token_statistics(x_NC, weight_C, path=path, moments=moments)
        assert {field for field, value in found._asdict().items() if value is None} == ABSENT[moments]
        assert_same(found, token_statistics_plain(x_NC, weight_C))


def test_control_dropping_the_weight_is_seen(device) -> None:
    x_NC = activations(17, 64, torch.float32, device)
    weight_C = torch.linspace(0, 2, 64, device=device)
    found = token_statistics(x_NC, path="triton")
    for field in ("largest", "energy", "mean_abs", "kurtosis", "participation_ratio"):
        wrong, right = getattr(found, field), getattr(token_statistics_plain(x_NC, weight_C), field)
        assert ((wrong - right) / right).abs().max() > 0.1, field


def test_definition_by_hand() -> None:
    found = token_statistics_plain(torch.tensor([[3.0, -4.0, 0.0, 1.0]]), torch.tensor([1.0, 1.0, 5.0, 0.0]))
    # y = 3, -4, 0, 0: mean -1/4, squared deviations 169/16, 225/16, 1/16, 1/16 with mean 99/16.
    assert found.largest.item() == 4
    assert found.argmax.item() == 1
    assert found.energy.item() == 25
    assert found.mean_abs.item() == 7 / 4
    fourth = (169**2 + 225**2 + 2) / 4
    assert math.isclose(found.kurtosis.item(), fourth / 99**2, rel_tol=1e-12)
    assert math.isclose(found.participation_ratio.item(), 625 / (81 + 256), rel_tol=1e-12)
    assert found.column_abs.tolist() == [3, 4, 0, 1]
    assert found.column_energy.tolist() == [9, 16, 0, 1]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("num_channels", [300, 1300])  # within one warp and over two
def test_rows_that_are_hard_for_power_sums(num_channels, path, device) -> None:
    x_NC = activations(6, num_channels, torch.float32, device)
    x_NC[0] = 0
    x_NC[1] = 7.3
    x_NC[2] = 100 + x_NC[2] / 10
    x_NC[3] *= 1e-16  # fourth powers vanish in float32
    x_NC[4] *= 1e12  # and overflow
    x_NC[5] = 50 + torch.randn(num_channels, generator=torch.Generator().manual_seed(1)).to(device) / 20
    found, expected = token_statistics(x_NC, path=path), token_statistics_plain(x_NC)
    for field in ("largest", "energy", "mean_abs", "kurtosis", "participation_ratio"):
        torch.testing.assert_close(getattr(found, field).double(), getattr(expected, field), **PROMISE, msg=field)
    assert found.kurtosis[:2].tolist() == [0, 0]
    assert found.participation_ratio[0].item() == 0
    # Control: the textbook formula in float32 misses the promise on the row with a large mean.
    mean, second, third, fourth = (x_NC[5].pow(power).mean() for power in (1, 2, 3, 4))
    textbook = (fourth - 4 * mean * third + 6 * mean**2 * second - 3 * mean**4) / (second - mean**2) ** 2
    assert abs(textbook.item() / expected.kurtosis[5].item() - 1) > 0.01


@pytest.mark.parametrize("path", [path for path in PATHS if path != "triton"])  # whose promise ends at 1e-37
@pytest.mark.parametrize("unit", [1e-42, 1e-39, 1e-30, 1e30, 1e37])
def test_numbers_at_the_edge_of_float32(unit, path) -> None:
    x_NC = (torch.randn(3, 600, generator=torch.Generator().manual_seed(0)) + 1) * unit
    found, expected = token_statistics(x_NC, path=path), token_statistics_plain(x_NC)
    for field in ("largest", "kurtosis", "participation_ratio"):
        torch.testing.assert_close(getattr(found, field).double(), getattr(expected, field), **PROMISE, msg=field)


@pytest.mark.parametrize("path", PATHS)
def test_argmax_is_the_first_of_equals(path, device) -> None:
    x_NC = torch.ones(4, 1100, dtype=torch.bfloat16, device=device)
    x_NC[1, [40, 41, 1050]] = -2
    x_NC[2, [1030, 1090]] = 3
    x_NC[3] = 0
    assert token_statistics(x_NC, path=path).argmax.tolist() == [0, 40, 1030, 0]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("moments", [True, False])
def test_nan_and_infinity_reach_the_reader(moments, path, device) -> None:
    x_NC = activations(4, 70, torch.float32, device)
    x_NC[1, 5] = math.nan
    x_NC[2, 6] = math.inf
    found = token_statistics(x_NC, path=path, moments=moments)
    assert found.largest.isnan().tolist() == [False, True, False, False]
    assert found.largest[2].isinf()
    assert found.argmax[2] == 6
    if moments:
        assert found.energy.isnan().tolist() == [False, True, False, False]
        assert found.energy[2].isinf()
        assert found.kurtosis.isnan().tolist() == [False, True, True, False]


@pytest.mark.parametrize("path", PATHS)
def test_strided_rows(path, device) -> None:
    x_NC = activations(19, 200, torch.float32, device)[::2, 3:103]
    for moments in (True, False):
        assert_same(token_statistics(x_NC, moments=moments, path=path), token_statistics_plain(x_NC))


@pytest.mark.skipif(not runs_in_c(torch.zeros(1)), reason="NOT CHECKED IN C: no compiler")
def test_a_massive_token_leaves_the_others_their_digits() -> None:
    x_NC = torch.rand(500, 9, generator=torch.Generator().manual_seed(0))
    x_NC[7] = 1e6
    others_C = token_statistics(x_NC, path="c").column_abs - 1e6
    expected_C = x_NC.double().sum(0) - 1e6
    torch.testing.assert_close(others_C, expected_C, rtol=1e-9, atol=0)
    assert (x_NC.sum(0) - 1e6).double().sub(expected_C).abs().max() > 1e-3  # control: a sum in float32


@pytest.mark.parametrize("path", PATHS)
def test_no_tokens(path, device) -> None:
    found = token_statistics(torch.zeros(0, 33, device=device), path=path)
    assert [tuple(value.shape) for value in found if value is not None] == [(0,)] * 6 + [(33,)]
    assert found.column_abs.eq(0).all()


def test_float64_stays_float64() -> None:
    x_NC = activations(9, 50, torch.float64, torch.device("cpu"))
    found = token_statistics(x_NC)
    assert found.kurtosis.dtype == torch.float64
    # 2^-53 over sums of 50 terms.
    assert_same(found, token_statistics_plain(x_NC), dict(rtol=1e-12, atol=0.0))


def test_tiles_of_the_torch_path_add_up(monkeypatch) -> None:
    x_NC = activations(50, 64, torch.float32, torch.device("cpu"))
    monkeypatch.setattr(module, "TILE_ELEMENTS", 7 * 64)
    assert_same(token_statistics(x_NC, path="torch"), token_statistics_plain(x_NC))


@pytest.mark.parametrize(
    ("x_NC", "weight_C", "path"),
    [
        (torch.zeros(2, 3, 4), None, "auto"),
        (torch.zeros(2, 3, dtype=torch.int64), None, "auto"),
        (torch.zeros(3, 2).mT, None, "auto"),
        (torch.zeros(2, 0), None, "auto"),
        (torch.zeros(2, 3), torch.zeros(2), "auto"),
        (torch.zeros(2, 3, dtype=torch.float64), None, "triton"),
    ],
)
def test_refuses_what_it_cannot_honour(x_NC, weight_C, path) -> None:
    with pytest.raises(InputError):
        token_statistics(x_NC, weight_C, path=path)
