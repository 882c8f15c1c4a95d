"""How far states contract to one direction. N states, E width. A state of zeros has no direction and is left out."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.measures.spectrum import eigenvectors


def pairwise_cosine(unit_NE: Float[Tensor, "N E"]) -> Float[Tensor, " N"]:
    """[N] values whose mean is the mean cosine over all pairs, and whose spread gives that mean's error.

    With h_n the mean cosine of state n to the others, the mean over pairs is m = mean h. Returned is m + 2 (h_n - m):
    a state stands in both places of a pair, so resampling h itself would halve the interval.
    """
    unit_NE, one_N = unit_NE.double(), (unit_NE != 0).any(-1)
    others_NE = unit_NE.sum(0) - unit_NE
    mean_N = (unit_NE * others_NE).sum(-1) / (one_N.sum() - 1)
    mean_N = mean_N.masked_fill(~one_N, float("nan"))
    return 2 * mean_N - mean_N.nanmean()


class Principal(NamedTuple):
    """The top principal direction of unit vectors, not centred."""

    alignment: float
    """|cosine| of the mean with the direction."""
    share: float
    """The direction's share of the energy: 1 if all vectors lie on one line, 1 / E if they point everywhere alike."""


def principal(unit_NE: Float[Tensor, "N E"]) -> Principal:
    """The mean's alignment with the top principal direction, and the direction's share of the energy.

    Computed from the smaller of the two Gram matrices. Squaring costs precision in small directions, not in the top.
    """
    unit_NE = unit_NE.double()
    num_states, width = unit_NE.shape
    if num_states <= width:
        energies, vectors = eigenvectors(unit_NE @ unit_NE.T)
        direction_E = unit_NE.T @ vectors[:, -1]
    else:
        energies, vectors = eigenvectors(unit_NE.T @ unit_NE)
        direction_E = vectors[:, -1]
    mean_E = unit_NE.mean(0)
    cosine = torch.nn.functional.cosine_similarity(mean_E, direction_E, dim=0)
    return Principal(float(cosine.abs()), float(energies[-1] / energies.sum()))


def split_half_cosine(unit_NE: Float[Tensor, "N E"]) -> float:
    """Cosine between the means of two halves of the states: near 1 if any states give the same mean direction."""
    unit_NE = unit_NE.double()
    return float(torch.nn.functional.cosine_similarity(unit_NE[::2].mean(0), unit_NE[1::2].mean(0), dim=0))
