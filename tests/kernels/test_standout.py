"""The kernels that find positions that stand out, against sorting in Python."""

import pytest
import torch

from sinkscope.kernels import standout
from sinkscope.kernels.standout import NUM_POINTED_AT, add_received, candidates, triton_add_received, triton_candidates


def by_sorting(values) -> list[int]:
    """Positions of the largest values, of equal ones the first."""
    return sorted(range(len(values)), key=lambda t: (-values[t], t))[:NUM_POINTED_AT]


def signals(batch, length, device):
    generator = torch.Generator().manual_seed(length)
    largest_BT, mean_abs_BT = torch.rand(2, batch, length, generator=generator).add(0.1).to(device)
    return largest_BT, mean_abs_BT, torch.rand(length, generator=generator).to(device)


def by_kernel(largest_N, mean_abs_N, length, received_T, before_P):
    assert len(largest_N) == length
    return triton_candidates(largest_N, mean_abs_N, received_T, before_P)


@pytest.mark.parametrize(
    ("find", "batch", "length"),
    [(candidates, 1, 17), (candidates, 3, 100), (by_kernel, 1, 17), (by_kernel, 1, 5000)],
)
def test_candidates_are_the_positions_of_the_largest_values(find, batch, length, device):
    largest_BT, mean_abs_BT, received_T = signals(batch, length, device)
    ratio = by_sorting((largest_BT / mean_abs_BT).sum(0).tolist())
    received = by_sorting(received_T.tolist())
    before_P = torch.arange(28, device=device) + 1
    tokens = largest_BT.flatten(), mean_abs_BT.flatten(), length
    found = find(*tokens, received_T, before_P)
    assert found.tolist() == [*ratio, *received, *range(1, 9), 0, 1, 2, 3]
    assert find(*tokens, None, None).tolist() == [*ratio, *ratio, *ratio, 0, 1, 2, 3]
    assert ratio != received  # or the two signals could have been exchanged unseen


def test_of_equal_values_the_first_position_is_taken(device):
    largest_N = torch.ones(40, device=device)
    largest_N[[9, 30]] = 5.0
    found = triton_candidates(largest_N, torch.ones_like(largest_N), torch.zeros(40, device=device), None)
    assert found[:16].tolist() == [9, 30, 0, 1, 2, 3, 4, 5, *range(8)]


@pytest.mark.parametrize("find", [candidates, by_kernel])
def test_nan_counts_as_the_largest(find, device):
    largest_BT, mean_abs_BT, received_T = signals(1, 50, device)
    largest_BT[0, 20] = mean_abs_BT[0, 20] = 0.0
    assert find(largest_BT[0], mean_abs_BT[0], 50, received_T, None)[0].item() == 20


@pytest.mark.parametrize("keys", [None, [0, 10, 130]])
def test_received_is_added_at_the_keys_read(keys, device):
    keys_S = torch.arange(200, device=device) if keys is None else torch.tensor(keys, device=device)
    received_BHS = torch.rand(2, 3, len(keys_S), device=device)
    weight_S = torch.rand(len(keys_S), device=device)
    before_T = torch.rand(200, device=device)
    expected_T = before_T.double().clone()
    for place, key in enumerate(keys_S.tolist()):
        expected_T[key] += received_BHS[:, :, place].double().sum() * weight_S[place].double()
    for add in (add_received, triton_add_received):
        so_far_T = before_T.clone()
        add(so_far_T, received_BHS, weight_S, keys_S)
        torch.testing.assert_close(so_far_T.double(), expected_T, rtol=1e-6, atol=0)
        assert not torch.allclose(so_far_T, before_T)


def test_kernels_are_for_float32_on_cuda():
    assert not standout._has_kernel(torch.zeros(1))
