"""How far a few dimensions dominate a token's residual. E is the width, N tokens.

A token of zeros has no ratio: every one of them is NaN there, which means empty.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope.measures.spectrum import eigenvalues

MASSIVE_RATIO = 10.0
"""A dimension is massive at a position when its mean magnitude is this many times the position's mean over dimensions
... A Gaussian token stays under 7 at any width in use, so chance alone never reaches it."""
MASSIVE_CONTRAST = 3.0
"""... and this many times the same dimension's magnitude at the other positions: a dimension that is large everywhere
marks no token."""
MASSIVE_ACTIVATION = 100.0
MASSIVE_ACTIVATION_RATIO = 1000.0
"""A massive activation exceeds the first and the second times the median magnitude (Sun et al.); not scale-free, so
never read alone."""


def dom_ratio(h: Float[Tensor, "... E"]) -> Float[Tensor, "..."]:
    """max_j |h_j| / mean_j |h_j|."""
    return h.abs().amax(-1) / h.abs().mean(-1)


def participation_ratio(h: Float[Tensor, "... E"]) -> Float[Tensor, "..."]:
    """(sum h^2)^2 / sum h^4: how many dimensions share the energy."""
    h = _in_units_of_largest(h)
    square = h.square()
    return square.sum(-1).square() / square.square().sum(-1)


def top_energy_share(h: Float[Tensor, "... E"]) -> Float[Tensor, "..."]:
    """Share of the energy in the largest dimension."""
    energy = _in_units_of_largest(h).square()
    return energy.amax(-1) / energy.sum(-1)


def kurtosis(h: Float[Tensor, "... E"]) -> Float[Tensor, "..."]:
    """Pearson's kurtosis over dimensions (3 for a Gaussian); 0 where the vector is constant and not zero."""
    constant = (h == h[..., :1]).all(-1) & (h[..., 0] != 0)
    h = _in_units_of_largest(h)
    centred = h - h.mean(-1, keepdim=True)
    square = centred.square()
    value = square.square().mean(-1) / square.mean(-1).square()
    return value.masked_fill(constant, 0)


def _in_units_of_largest(h: Tensor) -> Tensor:
    """The vector over its largest magnitude, so that fourth powers stay in range; NaN for a zero vector."""
    return h / h.abs().amax(-1, keepdim=True)


def num_massive_activations(h: Float[Tensor, "... E"], median: Float[Tensor, ""]) -> Tensor:
    """How many dimensions of each token exceed 100 and 1000 times the median magnitude of the hidden state."""
    magnitude = h.abs()
    return ((magnitude > MASSIVE_ACTIVATION) & (magnitude > MASSIVE_ACTIVATION_RATIO * median)).sum(-1)


def massive_dimensions(
    magnitude_PE: Float[Tensor, "P E"], elsewhere_PE: Float[Tensor, "P E"]
) -> tuple[Bool[Tensor, "P E"], Float[Tensor, "P E"], Float[Tensor, "P E"]]:
    """(massive or not, ratio to the position's mean, contrast to other positions) from mean magnitudes here and
    elsewhere."""
    ratio = magnitude_PE / magnitude_PE.mean(-1, keepdim=True)
    contrast = magnitude_PE / elsewhere_PE
    return (ratio >= MASSIVE_RATIO) & (contrast >= MASSIVE_CONTRAST), ratio, contrast


def effective_rank(x_NE: Float[Tensor, "N E"], fell_back: Callable[[str], None] = lambda note: None) -> float:
    """exp of the entropy of the normalised singular values (Roy and Vetterli), of the tokens as they are, not centred.

    From the smaller Gram matrix in float64, two to four times faster than a decomposition of the tokens. Directions
    that squaring loses lie 1e-7 below a massive one and weigh as little: beside a dimension 1e9 times the others the
    result is right to 1e-4. `fell_back` as in `eigenvalues`.
    """
    x_NE = x_NE.double()
    gram = x_NE.T @ x_NE if x_NE.shape[0] > x_NE.shape[1] else x_NE @ x_NE.T
    energies = eigenvalues(gram, fell_back)
    rounding = len(gram) * torch.finfo(gram.dtype).eps * energies[-1]
    values = energies.where(energies > rounding, 0).sqrt()
    weights = values / values.sum()
    return float(torch.exp(torch.special.entr(weights).sum()))
