"""Does the state at a position have the same direction in every sequence? B sequences, T positions, E width.

A state of zeros has no direction. The mean is over pairs of sequences that both have one, and NaN if there is no pair.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor


def cosine_across_sequences(state_BTE: Float[Tensor, "B T E"]) -> Float[Tensor, " T"]:
    """Mean cosine over all pairs of different sequences, by position; NaN for a single sequence."""
    direction_BTE = torch.nn.functional.normalize(state_BTE, dim=-1)
    return cosine_from_sum(direction_BTE.sum(0), (state_BTE != 0).any(-1).sum(0))


def cosine_from_sum(unit_sum_TE: Float[Tensor, "T E"], num_T: Int64[Tensor, " T"]) -> Float[Tensor, " T"]:
    """The same from the sum of n unit vectors."""
    return cosine_from_length(unit_sum_TE.square().sum(-1), num_T)


def cosine_from_length(
    squared_length_T: Float[Tensor, "... T"], num_T: Int64[Tensor, "... T"]
) -> Float[Tensor, "... T"]:
    """The same from the squared length of that sum: |sum u|^2 = n + 2 sum over pairs of u . u'."""
    cosine_T = (squared_length_T - num_T) / (num_T * (num_T - 1))
    return cosine_T.masked_fill(num_T < 2, float("nan"))
