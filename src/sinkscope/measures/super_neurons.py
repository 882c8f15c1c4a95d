"""Feed-forward neurons that write the massive dimensions, and how sparse their output vectors are.

A neuron's write into dimension c is its activation times its output vector's entry there. E width, U neurons.
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
    """How far few dimensions carry a neuron's output vector; one value per neuron, NaN for a vector of zeros."""

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
