"""Attention received per key, and the sink rate over sequences, layers and heads.

Axes: B sequences, L layers, H heads, T query position, S key position. torch is imported inside the functions: the
command line checks options against these constants before it imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from jaxtyping import Bool, Float
    from torch import Tensor

RECEIVED_THRESHOLD = 0.3
"""A head counts a key as a sink if the attention that the key receives from it is above this (eps of Gu et al.)."""
MIN_SINK_RATE = 0.05
"""A position is a sink if at least this share of sequences, layers and heads count it as one."""
LATER_QUERIES = 16
"""A key needs this many later queries to be judged. With few queries a key may look like a sink by chance."""


def mean_received(
    received_sum: Float[Tensor, "... S"], positions: Tensor | None = None, length: int | None = None
) -> Tensor:
    """Attention received, alpha_k = mean over queries i >= k of a_ik, from the sums over queries. `positions`: which
    keys were recorded, if not all."""
    import torch

    if positions is None:
        length = received_sum.shape[-1]
        positions = torch.arange(length, device=received_sum.device)
    assert length is not None
    return received_sum / (length - positions)


def mean_received_later(received_sum: Float[Tensor, "... S"], own: Float[Tensor, "... S"]) -> Float[Tensor, "... S"]:
    """The mean over later queries alone, i > k: a query's attention on its own position is none; NaN for the last."""
    import torch

    length = received_sum.shape[-1]
    return (received_sum - own) / (length - 1 - torch.arange(length, device=own.device))


def eligible_positions(length: int, device: torch.device | None = None) -> Bool[Tensor, " S"]:
    """Which keys have enough later queries to be sinks."""
    import torch

    return torch.arange(length, device=device) < length - LATER_QUERIES


def are_sinks(
    rate: Float[Tensor, "... S"], length: int | None = None, keys: Tensor | None = None
) -> Bool[Tensor, "... S"]:
    """Which keys are sinks, from their sink rates. `keys`: which positions of `length` were recorded, if not all."""
    eligible = eligible_positions(rate.shape[-1] if length is None else length)
    return (rate >= MIN_SINK_RATE) & (eligible if keys is None else eligible[keys])


def sink_rate(alpha_BLHS: Float[Tensor, "B L H S"], threshold: float = RECEIVED_THRESHOLD) -> Float[Tensor, " S"]:
    """Mean over sequences, layers and heads of alpha > threshold."""
    return (alpha_BLHS > threshold).float().mean(dim=(0, 1, 2))
