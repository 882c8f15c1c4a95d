"""Alignment, the default method of a fingerprint: do the hidden dimensions of two models correspond one by one?

Two models that began with the same weights use dimension 7 for the same thing. Two others have no reason to. Initial
weights come from the same distribution in every dimension, and training treats all dimensions alike. So a model from
another seed is equally likely with its dimensions in any other order, and permuting the suspect's dimensions at random
gives unrelated models of the same shape *with the suspect's own training*. The null distribution is therefore exact for
trained models too. Two models may also react alike to the same inputs; the permuted one does so as well, and this
cancels. A permutation of dimensions is called a renaming here.

    ranks       R: of each dimension over the sequences, centred. A massive dimension counts as much as any other
    whitened    W = R (R^T R)^(-1/2): what many dimensions share is not counted many times
    stacked     W of the last layer's states above W of the embeddings, since a renaming permutes both
    centred     each sequence's mean over the dimensions is subtracted; D = W_a^T W_b
    alignment   trace(D) / (|W_a| |W_b|), the correlation of the two tables: 1 for a model with itself, 0 on average
                for unrelated models
    z           trace(D) / sqrt(sum D^2 / (E - 1)): mean 0 and variance 1 over all renamings (Hoeffding 1951)

N sequences, or twice as many where both states are stacked; E dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.measures.spectrum import eigenvectors
from sinkscope.statistics import average_ranks, bootstrap_mean_interval, student_t_tail

FEWEST_DIMENSIONS = 16
"""With fewer dimensions there are too few renamings for a verdict."""
SMALLEST_SHARE = 1e-10
"""Principal directions with less of the largest one's variance than this are rounding errors, and left out."""


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """How far the dimensions of two models correspond; NaN if too few dimensions vary."""

    effect: float
    low: float
    high: float
    """`low` and `high` are the ends of the 95 % bootstrap interval over dimensions."""
    z: float
    p: float
    """One-sided, of z under Student's t with E - 1 degrees of freedom, whose tails are longer than a normal's if there
    are few dimensions."""
    num_dimensions: int


def alignment_table(states_NE: Tensor, embeddings_NE: Tensor | None) -> Tensor:
    """The table to align: the whitened ranks of both states of a signature, one above the other."""
    return torch.cat([whitened_ranks(table) for table in (states_NE, embeddings_NE) if table is not None])


def whitened_ranks(states_NE: Float[Tensor, "N E"]) -> Float[Tensor, "N E"]:
    """The ranks of each dimension over the sequences (ties share their mean), centred and whitened, in float64.

    A constant dimension is a column of zeros. Symmetric whitening is the one that commutes with renaming dimensions.
    """
    columns = states_NE.cpu().numpy().T
    ranks_NE = torch.from_numpy(np.stack([average_ranks(column) for column in columns], axis=1))
    ranks_NE -= ranks_NE.mean(0)
    scale_E = ranks_NE.norm(dim=0)
    ranks_NE /= torch.where(scale_E > 0, scale_E, 1.0)
    tall = ranks_NE.shape[0] >= ranks_NE.shape[1]
    # The smaller of the two second moments: both have the same eigenvalues.
    values, vectors = eigenvectors(ranks_NE.T @ ranks_NE if tall else ranks_NE @ ranks_NE.T)
    counted = values > SMALLEST_SHARE * values[-1].clamp(min=torch.finfo(torch.float64).tiny)
    root = vectors[:, counted] * values[counted].rsqrt() @ vectors[:, counted].T
    white_NE = ranks_NE @ root if tall else root @ ranks_NE
    return white_NE * (scale_E > 0)  # a constant dimension exactly, not up to rounding


def alignment(base_NE: Float[Tensor, "N E"], suspect_NE: Float[Tensor, "N E"]) -> Alignment:
    """The alignment of two models from their tables on the same sequences."""
    varies_E = (base_NE != 0).any(0) & (suspect_NE != 0).any(0)
    num_dimensions = int(varies_E.sum())
    if num_dimensions < FEWEST_DIMENSIONS:
        nan = float("nan")
        return Alignment(effect=nan, low=nan, high=nan, z=nan, p=nan, num_dimensions=num_dimensions)
    base_NE, suspect_NE = (_centred(states[:, varies_E]) for states in (base_NE, suspect_NE))
    products_EE = base_NE.T @ suspect_NE
    diagonal_E = products_EE.diagonal()
    scale = float(base_NE.norm() * suspect_NE.norm())
    low, high = (float(end) for end in bootstrap_mean_interval((diagonal_E * (num_dimensions / scale)).numpy()))
    z = float(diagonal_E.sum() / _spread(products_EE))
    return Alignment(
        effect=float(diagonal_E.sum()) / scale,
        low=low,
        high=high,
        z=z,
        p=student_t_tail(z, num_dimensions - 1),
        num_dimensions=num_dimensions,
    )


def _centred(whitened_NE: Tensor) -> Tensor:
    return whitened_NE - whitened_NE.mean(1, keepdim=True)


def _spread(products_EE: Tensor) -> Tensor:
    """The standard deviation of the trace over all renamings; rows and columns of the products have mean 0."""
    return (products_EE.square().sum() / (len(products_EE) - 1)).sqrt()
