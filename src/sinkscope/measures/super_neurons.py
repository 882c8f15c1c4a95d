"""How much each neuron writes into the massive dimensions, and how sparse output vectors are.

A neuron's write into a dimension is its activation times the entry of its output vector there.
Axes: E width, U neurons, M massive dimensions.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.measures.dimension_disparity import kurtosis, participation_ratio, top_energy_share


def write_share(mean_square_U: Float[Tensor, " U"], output_MU: Float[Tensor, "M U"]) -> Float[Tensor, " U"]:
    """Each neuron's share of the squared write into the massive dimensions, from E[n^2] and the output vectors' entries
    there."""
    energy = mean_square_U * output_MU.square().sum(0)
    return energy / energy.sum().clamp(min=torch.finfo(energy.dtype).tiny)


class ChannelSparsity(NamedTuple):
    """How far a neuron's output vector is concentrated on few dimensions. [U] each; NaN for a vector of zeros."""

    max_over_median: Tensor
    """NaN where more than half of the entries are zero."""
    top_share: Tensor
    participation_ratio: Tensor
    kurtosis: Tensor


def channel_sparsity(output_EU: Float[Tensor, "E U"]) -> ChannelSparsity:
    """Sparsity of output vectors W_down[:, j]."""
    vectors = output_EU.T
    magnitude = vectors.abs()
    median = magnitude.quantile(0.5, dim=-1)
    return ChannelSparsity(
        max_over_median=(magnitude.amax(-1) / median).masked_fill(median == 0, float("nan")),
        top_share=top_energy_share(vectors),
        participation_ratio=participation_ratio(vectors),
        kurtosis=kurtosis(vectors),
    )
