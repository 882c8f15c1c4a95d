"""How far a few dimensions dominate a token's residual stream. E width, N tokens, P positions, B states.

For a token of zeros every ratio is 0 / 0, NaN, which tables write as null.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope.measures.spectrum import eigenvalues

MASSIVE_RATIO = 10.0
"""A dimension is massive at a position if its mean magnitude is this many times the mean over dimensions there. A
Gaussian token stays under 7 at any width in use, so chance alone does not reach it."""
MASSIVE_CONTRAST = 3.0
"""It must also be this many times its own magnitude at the other positions: a dimension that is large everywhere marks
no token."""
MASSIVE_ACTIVATION = 100.0
MASSIVE_ACTIVATION_RATIO = 1000.0
"""A massive activation is above MASSIVE_ACTIVATION, and above this many times the median magnitude (Sun et al.). The
first bound depends on the scale of the model, so this count is never used alone."""


def dom_ratio(h: Float[Tensor, "... E"]) -> Float[Tensor, "..."]:
    """max_j |h_j| / mean_j |h_j|."""
    magnitude = h.abs()
    return magnitude.amax(-1) / magnitude.mean(-1)


def dom_ratio_turned(h: Float[Tensor, "... E"]) -> Float[Tensor, "..."]:
    """The DomRatio of the vector in another orthonormal basis, always the same one.

    Random signs and then a Hartley transform (real minus imaginary part of a Fourier transform) spread one coordinate
    over all of them, in E log E steps; a random rotation matrix would take E^2.
    """
    spectrum = torch.fft.fft(h * _signs(h.shape[-1], h.device), norm="ortho")
    return dom_ratio(spectrum.real - spectrum.imag)


@lru_cache(maxsize=64)
def _signs(width: int, device: torch.device) -> Tensor:
    """[E] random signs. Kept per device: a copy from the host would make every layer wait for the one before."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(0, 2, (width,), generator=generator) * 2 - 1).to(device)


def direction_share(x_BE: Float[Tensor, "... B E"]) -> Float[Tensor, "..."]:
    """Energy share of the top direction of B states: the largest eigenvalue of their Gram matrix over its trace. It is
    the same in every basis. The states are not centred, so it is 1 if all are multiples of one vector."""
    return direction_share_of_gram(x_BE @ x_BE.mT)


def direction_share_of_gram(gram_BB: Float[Tensor, "... B B"]) -> Float[Tensor, "..."]:
    """The same from the Gram matrix."""
    return torch.linalg.matrix_norm(gram_BB, ord=2) / gram_BB.diagonal(dim1=-2, dim2=-1).sum(-1)


def participation_ratio(h: Float[Tensor, "... E"]) -> Float[Tensor, "..."]:
    """(sum h^2)^2 / sum h^4: how many dimensions share the energy."""
    return scaled_participation(_in_units_of_largest(h))


def scaled_participation(h: Float[Tensor, "... E"]) -> Float[Tensor, "..."]:
    """The same of a vector whose largest magnitude is 1."""
    return _energy_and_participation(h.square())[1]


def top_energy_share(h: Float[Tensor, "... E"]) -> Float[Tensor, "..."]:
    """Share of the energy in the largest dimension."""
    return _in_units_of_largest(h).square_().sum(-1).reciprocal()


def kurtosis(h: Float[Tensor, "... E"]) -> Float[Tensor, "..."]:
    """Pearson's kurtosis over dimensions (3 for a Gaussian); 0 where the vector is constant and not zero.

    E sum c^4 / (sum c^2)^2 of the centred vector c: the width over how many dimensions share its energy.
    """
    return scaled_kurtosis_(_in_units_of_largest(h))


def scaled_kurtosis_(h: Float[Tensor, "... E"]) -> Float[Tensor, "..."]:
    """The same of a vector whose largest magnitude is 1. It is overwritten."""
    h -= h.mean(-1, keepdim=True)
    energy, participation = _energy_and_participation(h.square_())
    # What is below this is the rounding of the mean: the vector is constant.
    rounding = 8 * h.shape[-1] * torch.finfo(h.dtype).eps ** 2
    return (h.shape[-1] / participation).masked_fill(energy <= rounding, 0)


def _energy_and_participation(square: Tensor) -> tuple[Tensor, Tensor]:
    """(sum h^2, (sum h^2)^2 / sum h^4), from h^2."""
    energy = square.sum(-1)
    return energy, (energy / torch.linalg.vector_norm(square, dim=-1)).square()


def _in_units_of_largest(h: Tensor) -> Tensor:
    """A copy of the vector over its largest magnitude, so that fourth powers stay in range; NaN for a zero vector."""
    return h / torch.maximum(h.amax(-1, keepdim=True), -h.amin(-1, keepdim=True))


def num_massive_activations(h: Float[Tensor, "... E"], median: Float[Tensor, "..."]) -> Tensor:
    """How many dimensions of each token have |h| > 100 and |h| > 1000 times the median magnitude of the layer."""
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


def median_magnitude(h: Float[Tensor, "..."]) -> Float[Tensor, ""]:
    """The median of |h|; of an even number of values the lower one of the middle two."""
    magnitude = h.abs().float().flatten()
    if magnitude.is_cuda:
        return magnitude.median()
    middle = (len(magnitude) - 1) // 2
    magnitude.numpy().partition(middle)  # in place; numpy's is vectorised, ten times faster than torch's on a CPU
    return magnitude[middle]


def effective_rank(x_NE: Float[Tensor, "N E"], fell_back: Callable[[str], None] = lambda note: None) -> float:
    """exp of the entropy of the normalised singular values (Roy and Vetterli), of the tokens as they are, not centred.

    Computed from the smaller Gram matrix in float64, two to four times faster than a decomposition of the tokens.
    Squaring loses directions that lie 1e-7 below a massive one, but these weigh as little: beside a dimension 1e9 times
    the others the result is right to 1e-4. `fell_back` as in `eigenvalues`.
    """
    return effective_ranks(x_NE, torch.zeros(len(x_NE), dtype=torch.bool, device=x_NE.device), fell_back)[0]


def effective_ranks(
    x_NE: Float[Tensor, "N E"], apart_N: Bool[Tensor, " N"], fell_back: Callable[[str], None] = lambda note: None
) -> tuple[float, float]:
    """(effective rank of all tokens, that of the tokens without those marked in `apart_N`), from one Gram matrix."""
    has_apart = bool(apart_N.any())
    if x_NE.shape[0] > x_NE.shape[1]:
        rest_nE, apart_nE = x_NE[~apart_N].double(), x_NE[apart_N].double()
        rest = _upper_gram(rest_nE.T)
        # The Gram matrix of the rest is computed first, and the others are added. Subtracting massive tokens from the
        # whole would leave nothing but their rounding.
        whole = rest + apart_nE.T @ apart_nE
    else:
        whole = _upper_gram(x_NE.double())
        rest = whole[~apart_N][:, ~apart_N] if has_apart else whole
    rank = _rank_of_gram(whole, fell_back)
    return rank, _rank_of_gram(rest, fell_back) if has_apart else rank


def _upper_gram(x_nm: Float[Tensor, "n m"]) -> Float[Tensor, "n n"]:
    """x x^T without its lower left quarter, a quarter of the products: `eigenvalues` reads the upper half alone."""
    half = len(x_nm) // 2
    gram = x_nm.new_zeros(len(x_nm), len(x_nm))
    torch.mm(x_nm[:half], x_nm.T, out=gram[:half])
    torch.mm(x_nm[half:], x_nm[half:].T, out=gram[half:, half:])
    return gram


def _rank_of_gram(gram: Float[Tensor, "n n"], fell_back: Callable[[str], None]) -> float:
    """The effective rank of vectors, from their Gram matrix."""
    energies = eigenvalues(gram, fell_back)
    rounding = len(gram) * torch.finfo(gram.dtype).eps * energies[-1]
    values = energies.where(energies > rounding, 0).sqrt()
    weights = values / values.sum()
    return float(torch.exp(torch.special.entr(weights).sum()))
