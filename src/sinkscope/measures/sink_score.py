"""Attention received per key, and the sink rate over sequences, layers and heads.

Axes: B sequences, L layers, H heads, T query position, S key position. torch is imported inside the functions: options
are checked against these constants before it is known whether torch is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from jaxtyping import Bool, Float
    from torch import Tensor

RECEIVED_THRESHOLD = 0.3
"""Of one head: it counts a key as its sink when the key's mean attention received is above this (eps of Gu et al.)."""
MIN_SINK_RATE = 0.05
"""Of a position: it is a sink when at least this share of heads, layers and sequences count it as theirs."""
LATER_QUERIES = 16
"""Only keys with at least this many later queries can be sinks: with few queries a key looks like one by chance."""


def mean_received(
    received_sum: Float[Tensor, "... S"], positions: Tensor | None = None, length: int | None = None
) -> Tensor:
    """alpha_k = mean over queries i >= k of a_ik, from sums over queries; `positions` says which keys were recorded,
    if not all."""
    import torch

    if positions is None:
        length = received_sum.shape[-1]
        positions = torch.arange(length, device=received_sum.device)
    assert length is not None
    return received_sum / (length - positions)


def mean_received_later(received_sum: Float[Tensor, "... S"], own: Float[Tensor, "... S"]) -> Float[Tensor, "... S"]:
    """The mean over later queries alone, i > k: what a query makes of its own position is no sink; NaN for the last."""
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
    """Which keys are sinks, from the share of heads that count each; `keys` of `length` were recorded, if not all."""
    eligible = eligible_positions(rate.shape[-1] if length is None else length)
    return (rate >= MIN_SINK_RATE) & (eligible if keys is None else eligible[keys])


def sink_rate(alpha_BLHS: Float[Tensor, "B L H S"], threshold: float = RECEIVED_THRESHOLD) -> Float[Tensor, " S"]:
    """Mean over sequences, layers and heads of alpha > threshold."""
    return (alpha_BLHS > threshold).float().mean(dim=(0, 1, 2))
