"""Rows at some positions, by one launch, against index_select."""

import pytest
import torch

from sinkscope.kernels.gather_rows import gather_rows, triton_gather_rows


def picks(device):
    """A state, queries as models hand them over (heads behind positions in memory), and a key-value head's worth."""
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(1, 40, 300, generator=generator)
    query = torch.randn(1, 40, 6, 8, generator=generator).transpose(1, 2).bfloat16()
    key = torch.randn(1, 2, 40, 8, generator=generator)
    positions, queries = torch.tensor([39, 0, 7, 7]), torch.arange(0, 40, 3)
    found = [(state, positions), (query, queries), (key, positions)]
    return [(x.to(device), index.to(device)) for x, index in found]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_equal_to_index_select(number, device):
    chosen = picks(device)[:number]
    for found, (x, index) in zip(triton_gather_rows(*chosen), chosen, strict=True):
        assert torch.equal(found, x.index_select(-2, index))
        assert found.is_contiguous()
    # Control: the next positions' rows are others.
    assert not torch.equal(triton_gather_rows(*chosen)[0], chosen[0][0].index_select(-2, (chosen[0][1] + 1) % 40))


def test_rows_of_a_matrix_that_lie_apart(device):
    x = torch.randn(30, 20, device=device)[::2, 3:13]
    index = torch.tensor([14, 2], device=device)
    assert torch.equal(triton_gather_rows((x, index))[0], x[index])


def test_nothing_chosen(device):
    x, index = torch.randn(30, 20, device=device), torch.empty(0, dtype=torch.long, device=device)
    assert triton_gather_rows((x, index))[0].shape == (0, 20)


def test_several_sequences_are_gathered_by_torch():
    x, index = torch.randn(3, 5, 30, 4), torch.tensor([29, 1])
    assert torch.equal(gather_rows((x, index))[0], x[:, :, index])
