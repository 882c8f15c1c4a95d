"""Whether a position's normalised state is one direction whatever the sequence. B sequences, T positions, E width."""

import torch
from jaxtyping import Float
from torch import Tensor


def cosine_across_sequences(state_BTE: Float[Tensor, "B T E"]) -> Float[Tensor, " T"]:
    """Mean cosine over all pairs of different sequences, by position; NaN for a single sequence."""
    unit = torch.nn.functional.normalize(state_BTE, dim=-1)
    return cosine_from_sum(unit.sum(0), state_BTE.shape[0])


def cosine_from_sum(unit_sum_TE: Float[Tensor, "T E"], num_sequences: int) -> Float[Tensor, " T"]:
    """The same from the sum of the unit vectors: |sum u|^2 = B + 2 sum over pairs of u . u'."""
    if num_sequences < 2:
        return torch.full(unit_sum_TE.shape[:-1], float("nan"))
    return (unit_sum_TE.square().sum(-1) - num_sequences) / (num_sequences * (num_sequences - 1))
