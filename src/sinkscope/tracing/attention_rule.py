"""How a layer's attention turns scores into weights (AttentionRule), what to record of it (ReadingRequest), and what
was recorded (AttentionReading).

Axes: B batch, H query heads, K key-value heads, T query position, S key position, D head size, n sampled queries, P
chosen keys, R distances.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from sinkscope.tracing.open_interventions import MaskChange

SAMPLED_QUERIES = 256
"""Attention by distance and the lock are measured at this many evenly spaced queries at most."""


@dataclass(frozen=True, kw_only=True)
class AttentionReading:
    """What was recorded of one layer's attention; None if not requested."""

    output: Tensor
    """[B, T, H, D] value aggregation."""
    received: Tensor
    """[B, H, S] attention on each key, summed over the queries from the key on; [B, H, P] for chosen keys."""
    by_distance: Tensor
    """[B, H, R] attention on the key at each distance back, mean over `sampled_queries`."""
    entropy: Tensor | None
    """[B, H, T] -sum_s a log a of each query."""
    mixing: Tensor | None
    """[B, H, T] sum_s a^2 of each query."""
    weighted_mixing: Tensor | None
    """[B, H, T] sum_s a^2 w_s, with the key weights w of the request."""
    own: Tensor | None = None
    """[B, H, T] attention of each query on its own position."""


@dataclass(frozen=True, kw_only=True)
class AttentionRule:
    """How one layer computes attention weights from queries and keys."""

    scaling: float
    window: int | None = None
    """A query sees itself and the window - 1 keys before it; None for all earlier keys."""
    softcap: float | None = None
    sink_logits: Tensor | None = None
    """[H] learned sinks: logits that take part in the softmax but have no key or value."""
    mask_changes: tuple[MaskChange, ...] = ()
    """Queries that see other keys than the causal mask allows; `read_attention` applies these changes."""
    sigmoid_bias: float | None = None
    """If given, a weight is sigmoid(score + bias), and there is no softmax."""

    def weights(self, scores_BHTS: Tensor, seen: Tensor) -> Tensor:
        """[B, H, T, S] attention weights, from the scaled products of queries and keys; 0 unless `seen`."""
        if self.softcap is not None:
            scores_BHTS = (scores_BHTS / self.softcap).tanh() * self.softcap
        scores_BHTS = scores_BHTS.masked_fill(~seen, -torch.inf)
        if self.sigmoid_bias is not None:
            return (scores_BHTS + self.sigmoid_bias).sigmoid()
        if self.sink_logits is None:
            return scores_BHTS.softmax(-1)
        sinks_BHT1 = self.sink_logits.to(scores_BHTS)[:, None, None].expand(*scores_BHTS.shape[:3], 1)
        return torch.cat([scores_BHTS, sinks_BHT1], -1).softmax(-1)[..., :-1]


@dataclass(frozen=True, kw_only=True)
class ReadingRequest:
    """What to record of a layer's attention."""

    keys: Tensor | None = None
    """[P] chosen key positions. None for every key; then entropy, mixing and the like are recorded too."""
    distances: tuple[int, ...] = ()
    key_weights: Tensor | None = None
    """[K, S] weights of `weighted_mixing`."""
    own: bool = False


@lru_cache(maxsize=64)
def sampled_queries(length: int, device: torch.device) -> Tensor:
    """[n] the queries, in order, at which attention by distance and the lock are measured; all of them in a short text.

    Kept per device: a copy from the host would make every layer wait for the one before.
    """
    return torch.linspace(0, length - 1, min(length, SAMPLED_QUERIES)).long().to(device)


def distances(length: int) -> tuple[int, ...]:
    """The distances at which attention by distance is measured: 0 to 4, then powers of two."""
    return tuple(d for d in (0, 1, 2, 3, 4, *(2**power for power in range(3, 40))) if d < length)


@lru_cache(maxsize=64)
def distance_tensor(distances: tuple[int, ...], device: torch.device) -> Tensor:
    """[R] the distances, kept per device for the same reason."""
    return torch.tensor(distances, dtype=torch.long, device=device)
