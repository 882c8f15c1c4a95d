"""How far a model prefers some tokens, whatever it reads. N sequences, V tokens of the vocabulary.

Each measure is given as one value for each sequence, and its mean is the measure: so the interval of a mean applies.
"""

import math

import torch
from jaxtyping import Float, Int64
from torch import Tensor


def prediction_ratio(predicted_N: Int64[Tensor, " N"], vocabulary: int) -> Float[Tensor, " N"]:
    """[N] V if a sequence's most likely next token is the preferred one, else 0.

    The mean is the share of the preferred token over 1 / V, its share in a model without preference. The preferred
    token is the most often predicted one in one half of the sequences, and is counted in the other half, both ways
    round: counted where it was chosen, the commonest of few predictions would be common by selection.
    """
    values_N = torch.empty(len(predicted_N), dtype=torch.float64)
    for counted, choosing in _halves():
        token = predicted_N[choosing].bincount(minlength=vocabulary).argmax()
        values_N[counted] = vocabulary * (predicted_N[counted] == token).double()
    return values_N


def probability_ratio(probability_NV: Float[Tensor, "N V"]) -> Float[Tensor, " N"]:
    """[N] V times a sequence's probability of the preferred token, the most probable one in the other half."""
    values_N = torch.empty(len(probability_NV), dtype=torch.float64)
    for counted, choosing in _halves():
        token = probability_NV[choosing].mean(0).argmax()
        values_N[counted] = probability_NV.shape[1] * probability_NV[counted, token].double()
    return values_N


def prediction_surprise(predicted_N: Int64[Tensor, " N"]) -> Float[Tensor, " N"]:
    """[N] -log of the share of sequences with the same prediction. The mean is the entropy of the histogram."""
    _, inverse_N, count = predicted_N.unique(return_inverse=True, return_counts=True)
    return -(count[inverse_N].double() / len(predicted_N)).log()


def uniform_entropy(num_sequences: int, vocabulary: int) -> float:
    """The expected entropy of the histogram of N predictions that are uniform over V tokens.

    A prediction shares its token with j of the others, j binomial: E[H] = log N - sum_j P(j) log(j + 1).
    """
    j = torch.arange(num_sequences, dtype=torch.float64)
    others = num_sequences - 1
    choose = math.lgamma(others + 1) - (j + 1).lgamma() - (others - j + 1).lgamma()
    # xlogy gives 0 log 0 = 0, for a vocabulary of one token.
    log_pmf = (
        choose
        - j * math.log(vocabulary)
        + torch.special.xlogy(others - j, torch.tensor(1 - 1 / vocabulary, dtype=torch.float64))
    )
    return math.log(num_sequences) - float((log_pmf.exp() * (j + 1).log()).sum())


def _halves() -> tuple[tuple[slice, slice], tuple[slice, slice]]:
    """(every other sequence, the rest), both ways round."""
    even, odd = slice(0, None, 2), slice(1, None, 2)
    return (even, odd), (odd, even)
