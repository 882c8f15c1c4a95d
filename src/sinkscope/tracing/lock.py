"""The lock: do queries point towards the keys of a few positions, and how much of that do massive dimensions carry?

During the pass only a few rows of states, queries and keys are kept. Afterwards the model's own attention computes the
keys of these states once more, with the massive dimensions set to zero. This works for every family, whatever it does
between state and key (norms, biases, rotary embeddings).
Axes: A layers with attention, B sequences, H heads, K key-value heads, D head size, E width, Q lock positions, n
sampled queries.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sinkscope.measures.dimension_disparity import MASSIVE_RATIO
from sinkscope.models.anatomy import Anatomy, Layer
from sinkscope.models.sharded import unsharded
from sinkscope.processes import moved
from sinkscope.tracing.attention_hook import CausalMask, attention_hook, direct_call
from sinkscope.tracing.open_interventions import suspend

LOCK_SEQUENCES = 8
"""The lock is measured on the first sequences, this many at most."""
NUM_LOCK_POSITIONS = 4
"""The lock of a layer is measured at this many positions: those with the largest DomRatio before the layer."""


@dataclass(frozen=True, kw_only=True)
class LockInput:
    """The rows of one layer that its lock is computed from."""

    positions_Q: Tensor
    queries_n: Tensor
    residual_BQE: Tensor
    """What enters the layer at the lock positions."""
    state_BQE: Tensor
    """What enters attention there."""
    query_BHnD: Tensor
    key_BKQD: Tensor
    length: int
    call: tuple[tuple, dict[str, Any]]
    """The arguments of the attention call, without the state."""

    def joined(self, other: LockInput) -> LockInput:
        """The sequences of both, at most LOCK_SEQUENCES."""
        names = ("residual_BQE", "state_BQE", "query_BHnD", "key_BKQD")

        def of_both(name: str) -> Tensor:
            mine, theirs = getattr(self, name), getattr(other, name)
            return torch.cat([mine, theirs.to(mine.device)])[:LOCK_SEQUENCES]

        return replace(self, **{name: of_both(name) for name in names})


@torch.no_grad()
def read_lock(anatomy: Anatomy, inputs: list[LockInput]) -> tuple[Tensor, Tensor]:
    """([A, H, Q] share of later queries with q . k > 0, [A, H, Q] share of q . k that the massive dimensions carry).

    The second is 1 - sum q . k' / sum q . k over later queries and sequences, where k' is the key if the massive
    dimensions of the state are zero; NaN if no sequence has massive dimensions. Both are NaN at the last position.
    """
    positive, share = [], []
    with making_keys(anatomy) as key_of:
        for layer, recorded in zip(anatomy.attention_layers, inputs, strict=True):
            # Rows that another process recorded arrive on the CPU.
            weight = next(layer.attention.parameters())
            rows: LockInput = recorded if weight.is_meta else moved(recorded, weight.device)
            magnitude_BQE = rows.residual_BQE.abs()
            massive_BQE = magnitude_BQE >= MASSIVE_RATIO * magnitude_BQE.mean(-1, keepdim=True)
            edited_BQE = rows.state_BQE.masked_fill(massive_BQE.to(rows.state_BQE.device), 0)
            key_without_BKQD = key_of(layer, edited_BQE, rows.call, rows.positions_Q, rows.length)

            groups = rows.query_BHnD.shape[1] // rows.key_BKQD.shape[1]
            with_BHQD, without_BHQD = (
                key.float().repeat_interleave(groups, dim=1) for key in (rows.key_BKQD, key_without_BKQD)
            )
            query_BHnD, later_nQ = rows.query_BHnD.float(), later_queries(rows.queries_n, rows.positions_Q)
            agree_BHnQ = (torch.matmul(query_BHnD, with_BHQD.transpose(2, 3)) > 0) & later_nQ
            positive.append((agree_BHnQ.sum(2) / later_nQ.sum(0)).mean(0))
            query_sum_BHQD = torch.matmul(later_nQ.T.float(), query_BHnD)
            all_HQ, rest_HQ = ((query_sum_BHQD * key).sum((0, -1)) for key in (with_BHQD, without_BHQD))
            any_Q = massive_BQE.any(-1).any(0).to(all_HQ.device)
            share.append(torch.where(any_Q, 1 - rest_HQ / all_HQ, float("nan")))
    # Copied once all layers are queued on the GPU: a copy in each layer would make the next one wait.
    return torch.stack([of_layer.cpu() for of_layer in positive]), torch.stack([of_layer.cpu() for of_layer in share])


def later_queries(queries_n: Tensor, positions_Q: Tensor) -> Tensor:
    """[n, Q] which queries count for the key at each position: only later ones, since a token's query may agree with
    its own key without any lock."""
    return queries_n[:, None] > positions_Q


@contextlib.contextmanager
def making_keys(anatomy: Anatomy) -> Iterator[Callable[..., Tensor]]:
    """While open, `key_of(layer, state_BQE, call, positions_Q, length)` returns the keys [B, K, Q, D] that a layer's
    own attention computes from states at some positions."""
    key_of_layer: dict[int, Tensor] = {}

    def keep_key(layer: int, query: Tensor, key: Tensor, value: Tensor, rule) -> Tensor:
        key_of_layer[layer] = key
        # An aggregation of the right shape: only the key matters.
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])

    def key_of(layer: Layer, state_BQE: Tensor, call: Any, positions_Q: Tensor, length: int) -> Tensor:
        args, kwargs = _at_positions(call, positions_Q, length, len(state_BQE))
        # Calls forward directly: hooks that others put on the module are not meant for these few rows.
        with unsharded(layer.block), direct_call(anatomy, layer):
            layer.attention.forward(state_BQE, *args, **kwargs)
        return key_of_layer[layer.index]

    # An intervention that is on has acted on these rows during the pass, and must not act twice.
    with suspend(), attention_hook(anatomy, keep_key):
        yield key_of


def _at_positions(value: Any, positions_Q: Tensor, length: int, num_sequences: int) -> Any:
    """The arguments of an attention call for some positions of the first sequences alone: tensors are cut along the
    axis that has the length of the text (rotary embeddings, position ids), and the one before it."""
    if isinstance(value, CausalMask):
        return CausalMask(None)
    if isinstance(value, tuple | list):
        return type(value)(_at_positions(item, positions_Q, length, num_sequences) for item in value)
    if isinstance(value, dict):
        return {name: _at_positions(item, positions_Q, length, num_sequences) for name, item in value.items()}
    if isinstance(value, Tensor) and (axis := _length_axis(value, length)) is not None:
        value = value.index_select(axis, positions_Q.to(value.device))
        if axis and value.shape[axis - 1] != num_sequences:
            # Of several chunks the arguments of one are kept; without images they are alike in all sequences.
            value = value.narrow(axis - 1, 0, num_sequences if value.shape[axis - 1] > num_sequences else 1)
    return value


def _length_axis(value: Tensor, length: int) -> int | None:
    """The axis of an argument that has the length of the text; None if none has."""
    if value.ndim == 1:
        return 0 if value.shape[0] == length else None
    # Positions of text and images have three coordinates, and these come first: [3, B, T] and rotary [3, B, T, D].
    has_coordinates = value.ndim - value.is_floating_point() == 3 and value.shape[0] == 3
    axis = 2 if has_coordinates else 1
    return axis if value.ndim > axis and value.shape[axis] == length else None
