"""Feed-forward variants: SwiGLU, and SwiGLU whose down projection cannot be channel-sparse.

Axes: E width, F neurons.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from sinkscope.errors import InputError

LARGEST_TO_MEDIAN = 4.0
"""Bound on max / median of |output vector|. Normal entries reach it at 2.7 standard deviations."""


class SwiGLU(nn.Module):
    """W_down (silu(W_gate x) * W_up x)."""

    def __init__(self, width: int, num_neurons: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, num_neurons, bias=False)
        self.up_proj = nn.Linear(width, num_neurons, bias=False)
        self.down_proj = self.build_down_projection(width, num_neurons)
        self.act_fn = nn.SiLU()  # a module, as the families have it, so that it can be swapped

    def build_down_projection(self, width: int, num_neurons: int) -> nn.Module:
        return nn.Linear(num_neurons, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class BoundedSwiGLU(SwiGLU):
    """SwiGLU with a `BoundedLinear` as its down projection."""

    def build_down_projection(self, width: int, num_neurons: int) -> nn.Module:
        return BoundedLinear(num_neurons, width)


class BoundedLinear(nn.Module):
    """A linear map whose every output vector w_j = W[:, j] keeps max |w| <= c median |w|, c = LARGEST_TO_MEDIAN.

    At least half of a vector's E entries reach its median m, and none passes c m. So the largest entry has at most
    2 c^2 / E of the energy, the participation ratio is at least E / (2 c^2), and a vector that is zero in more than
    half of its dimensions is zero in all. (A fixed orthogonal mixing behind a free matrix promises none of this: the
    matrix can learn to undo it.)
    """

    acts_by_weight_alone = True
    """What the anatomy asks of a projection that is no plain Linear."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.raw_weight = nn.Parameter(torch.empty(num_outputs, num_inputs))

    @property
    def weight(self) -> Tensor:
        """[E, F] the weights that act: the free ones, clipped per output vector."""
        limit_F = LARGEST_TO_MEDIAN * self.raw_weight.abs().median(0).values
        return torch.clamp(self.raw_weight, -limit_F, limit_F)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


FEED_FORWARD_VARIANTS: Mapping[str, type[SwiGLU]] = {"swiglu": SwiGLU, "bounded_swiglu": BoundedSwiGLU}


def build_feed_forward(name: str, width: int, num_neurons: int) -> SwiGLU:
    """The feed-forward called `name`."""
    if name not in FEED_FORWARD_VARIANTS:
        raise InputError(
            expected=f"a feed-forward variant: {', '.join(FEED_FORWARD_VARIANTS)}",
            found=repr(name),
            next_step="Change feed_forward_variant in the configuration",
        )
    return FEED_FORWARD_VARIANTS[name](width, num_neurons)
