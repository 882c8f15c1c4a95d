"""Variance of the value aggregation by position, and what averaging independent values predicts for it.

Axes: B sequences, T query position, S key position, H heads, D head size, C channels.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def value_variance(aggregation_BTC: Float[Tensor, "B T C"]) -> Float[Tensor, " T"]:
    """Variance across sequences (unbiased) of each channel, averaged over channels; NaN for a single sequence."""
    return aggregation_BTC.var(dim=0, correction=1).mean(-1)


def squared_deviation(aggregation_BTC: Float[Tensor, "B T C"]) -> Float[Tensor, "B T"]:
    """n / (n - 1) times each sequence's squared deviation from the mean over sequences, averaged over channels. Its
    mean over sequences is the variance. NaN for a single sequence."""
    count = len(aggregation_BTC)
    unbiased = count / (count - 1) if count > 1 else float("nan")
    return (aggregation_BTC - aggregation_BTC.mean(0)).square().mean(-1) * unbiased


def second_moment(aggregation_BTC: Float[Tensor, "B T C"]) -> Float[Tensor, " T"]:
    """E[o^2] by position, which is reported if there is no variance across sequences."""
    return aggregation_BTC.square().mean(dim=(0, 2))


def averaging_law(
    attention_BHTS: Float[Tensor, "B H T S"], value_BHSD: Float[Tensor, "B H S D"]
) -> Float[Tensor, " T"]:
    """sum_s E[a_ts^2] Var(v_s), averaged over heads: the variance left after averaging independent values.

    This is the definition. It holds attention whole, so tracing computes the same number tile by tile.
    """
    variance_HS = value_BHSD.var(dim=0, correction=1).mean(-1)
    return (
        torch.einsum("bhts,hs->t", attention_BHTS.square(), variance_HS)
        / attention_BHTS.shape[0]
        / variance_HS.shape[0]
    )


def variance_ratio(variance_T: Float[Tensor, "... T"]) -> Float[Tensor, "..."]:
    """Variance at position 0 over its mean over the later half of the positions."""
    length = variance_T.shape[-1]
    return variance_T[..., 0] / variance_T[..., length - length // 2 :].mean(-1)


def log_r_squared(observed_T: Float[Tensor, "... T"], predicted_T: Float[Tensor, "... T"]) -> Float[Tensor, "..."]:
    """R^2 of log predicted for log observed, 1 - residual / total. Nothing is fitted, so it may be negative."""
    observed, predicted = observed_T.log(), predicted_T.log()
    residual = (observed - predicted).square().sum(-1)
    total = (observed - observed.mean(-1, keepdim=True)).square().sum(-1)
    return 1 - residual / total
