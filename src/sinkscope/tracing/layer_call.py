"""One layer while it runs. LayerCall holds its activations at each hook point (see HookPoint), and computes once what
several observables share. Passing holds what later layers need from earlier ones.

Axes: B sequences, T positions, N = B * T tokens, S recorded keys, H heads, K key-value heads, D head size, E width, C
channels of the value aggregation, U neurons, P positions of interest, Q lock positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sinkscope.kernels.token_statistics import TokenStatistics, token_dom_ratio, token_statistics
from sinkscope.measures.dimension_disparity import dom_ratio_turned
from sinkscope.measures.sink_score import RECEIVED_THRESHOLD, eligible_positions, mean_received, mean_received_later
from sinkscope.models.anatomy import Anatomy, Layer
from sinkscope.tracing.attention_rule import AttentionReading, AttentionRule, ReadingRequest, sampled_queries
from sinkscope.tracing.layer_neurons import LayerNeurons, NeuronWrites
from sinkscope.tracing.lock import LOCK_SEQUENCES, NUM_LOCK_POSITIONS, LockInput
from sinkscope.tracing.observables import RANK_TOKENS

NUM_TOP_POSITIONS = 8
"""How many positions of interest DomRatio picks in each layer; attention received picks as many."""
NUM_FIRST = 4
"""The first positions are of interest in every layer."""


class SurveyResult(NamedTuple):
    """What the survey found out about all sequences, for passes that see only some of them."""

    value_variance_KS: Mapping[int, Tensor]
    """By layer; empty for a batch of one sequence."""
    top_positions: Sequence[Tensor]
    """[2, Q] by row of the residual stream, the first entering layer 0: see `pick_positions`."""


@dataclass(kw_only=True)
class Passing:
    """One forward pass of some sequences, and what later layers need from earlier ones."""

    anatomy: Anatomy
    shape: tuple[int, int]
    """(sequences, positions)."""
    request: ReadingRequest
    weigh_mixing: bool = False
    """Whether squared attention is weighed by the variance of each key's value, for the averaging law. That takes
    several sequences."""
    survey: SurveyResult | None = None
    attention_path: str = ""
    received_T: Tensor | None = None
    """[T] attention received in the layers so far: mean over queries, summed over layers, heads and sequences."""
    positions_of_interest: dict[int, Tensor] = field(default_factory=dict)
    """[P] by layer that the residual stream leaves; -1 is what enters layer 0."""
    lock_residual: dict[int, Tensor] = field(default_factory=dict)
    """[B, Q, E] the residual stream at the lock positions, by the layer that it leaves."""
    largest: dict[int, Tensor] = field(default_factory=dict)
    """[T] by layer: the largest magnitude of the residual stream that leaves it, over sequences and dimensions."""

    @property
    def length(self) -> int:
        return self.shape[1]

    def keys(self, device: torch.device) -> Tensor:
        """[S] the recorded keys."""
        return every_position(self.length, device) if self.request.keys is None else self.request.keys.to(device)


class LayerCall:
    """One layer while it runs. Layer -1 is the residual stream that enters layer 0."""

    state: Tensor
    """[B, T, E] what enters attention."""
    query: Tensor
    key: Tensor
    value: Tensor
    """[B, H, T, D], [B, K, S, D] and [B, K, S, D], as attention gets them."""
    rule: AttentionRule
    attention: AttentionReading
    aggregation: Tensor
    """[B, T, C] the value aggregation of all heads, which enters the output projection."""
    before_norm: Tensor | None = None
    """[B, T, C] the same as it enters the norm on the aggregation; None where there is no norm."""
    projected: Tensor
    """[B, T, E] what leaves the output projection."""
    residual: Tensor
    """[B, T, E] the residual stream: at RESIDUAL_MID after attention or a mixer, later after the layer."""
    neurons: LayerNeurons

    def __init__(self, index: int, passing: Passing) -> None:
        self.index, self.passing = index, passing
        self.arguments: tuple[tuple, dict[str, Any]] = ((), {})
        """The arguments of the attention's call but for the state; the lock calls it again."""

    @property
    def layer(self) -> Layer:
        return self.passing.anatomy.layers[self.index]

    @cached_property
    def direction(self) -> Tensor:
        """[B, T, E] the state divided by its norm."""
        return nn.functional.normalize(wide(self.state), dim=-1)

    @cached_property
    def state_dom_ratio(self) -> Tensor:
        """[B, T] DomRatio of the state."""
        return token_dom_ratio(self.state.flatten(0, 1)).view(self.passing.shape)

    @property
    def sides(self) -> list[Tensor]:
        """The aggregation in float32: as it enters the output projection and, in models with a norm before that, as it
        enters the norm."""
        return [side.float() for side in (self.aggregation, self.before_norm) if side is not None]

    @cached_property
    def alpha(self) -> Tensor:
        """[B, H, S] attention received, mean over the queries from each key on."""
        received_BHS = self.attention.received
        return mean_received(received_BHS, self.passing.keys(received_BHS.device), self.passing.length)

    @cached_property
    def is_sink(self) -> Tensor:
        """[B, H, S] whether the head counts the key as a sink."""
        return self.alpha > RECEIVED_THRESHOLD

    @property
    def is_sink_later(self) -> Tensor:
        """[B, H, S] the same by later queries alone. An observable that uses it asks for `own weights`."""
        assert self.attention.own is not None
        return mean_received_later(self.attention.received, self.attention.own) > RECEIVED_THRESHOLD

    @property
    def sink_heads(self) -> Tensor:
        """[B, S] how many heads count the key as a sink."""
        return self.is_sink.sum(1, dtype=torch.int32)

    @property
    def second_moment(self) -> Tensor:
        """[B, T] mean over channels of the squared value aggregation."""
        # A norm reads the tensor once and stores no square of its size.
        dtype = torch.promote_types(self.aggregation.dtype, torch.float32)
        squares_BT = torch.linalg.vector_norm(self.aggregation, dim=-1, dtype=dtype).square()
        return squares_BT / self.aggregation.shape[-1]

    @cached_property
    def lock_rows(self) -> LockInput:
        """The rows that the lock of this layer is computed from, at the positions of interest before the layer."""
        if self.index - 1 not in self.passing.positions_of_interest:
            raise RuntimeError(f"The block of layer {self.index - 1} did not run. {blame(self.passing.anatomy)}")
        positions_Q = self.passing.positions_of_interest[self.index - 1][:NUM_LOCK_POSITIONS].to(self.state.device)
        queries_n = sampled_queries(self.passing.length, self.state.device)
        few = slice(LOCK_SEQUENCES)
        return LockInput(
            positions_Q=positions_Q,
            queries_n=queries_n,
            residual_BQE=self.passing.lock_residual.pop(self.index - 1),
            state_BQE=self.state[few].index_select(1, positions_Q),
            query_BHnD=self.query[few].index_select(2, queries_n),
            key_BKQD=self.key[few].index_select(2, positions_Q),
            length=self.passing.length,
            call=self.arguments,
        )

    @cached_property
    def tokens(self) -> TokenStatistics:
        """Statistics of the residual stream: [B, T] of each token, and [E] of each dimension (the last field)."""
        statistics = token_statistics(self.residual.flatten(0, 1))
        of_tokens = {name: getattr(statistics, name).view(self.passing.shape) for name in statistics._fields[:-1]}
        return statistics._replace(**of_tokens)

    @property
    def largest(self) -> Tensor:
        """[T] largest magnitude of the residual in any sequence."""
        # If no observable has needed the statistics, the largest magnitude alone is cheaper.
        has_statistics = "tokens" in self.__dict__
        return self.tokens.largest.amax(0) if has_statistics else self.residual.abs().amax((0, 2))

    @cached_property
    def dom_ratio(self) -> Tensor:
        """[B, T] DomRatio of the residual: max |h| / mean |h| of each token."""
        return self.tokens.largest / self.tokens.mean_abs

    @cached_property
    def positions_of_interest(self) -> Tensor:
        """[P] the positions recorded in full: the top 8 by DomRatio, the top 8 by attention received, the previous
        layer's top 8 by DomRatio, and positions 0 to 3. A position may be among them twice."""
        passing, device = self.passing, self.residual.device
        if passing.survey is not None:
            top_positions = passing.survey.top_positions[self.index + 1].to(device)
        else:
            ratio_T = self.dom_ratio.nansum(0)  # a token of zeros has no ratio
            received_T = ratio_T if passing.received_T is None else passing.received_T.to(device)
            top_positions = pick_positions(ratio_T, received_T)
        before_P = passing.positions_of_interest.get(self.index - 1, top_positions[0]).to(device)
        first_F = every_position(passing.length, device)[:NUM_FIRST]
        return torch.cat([top_positions.flatten(), before_P[: top_positions.shape[1]], first_F])

    @cached_property
    def rows_of_interest(self) -> Tensor:
        """[B, P, E] the residual there."""
        return wide(self.residual.index_select(1, self.positions_of_interest))

    @property
    def dom_ratio_turned(self) -> Tensor:
        """[B, T] the DomRatio there in another basis; NaN elsewhere."""
        # A position may be of interest twice. Both of its rows are the same, so it does not matter which copy stays.
        ratio_BT = self.rows_of_interest.new_full(self.passing.shape, float("nan"))
        return ratio_BT.index_copy(1, self.positions_of_interest, dom_ratio_turned(self.rows_of_interest))

    @cached_property
    def rank_tokens(self) -> Tensor:
        """[N, E] the states that the effective rank is computed from."""
        return self.residual.flatten(0, 1)[rank_index(*self.passing.shape, self.residual.device)]

    @cached_property
    def writes(self) -> NeuronWrites:
        """The largest write of each token, [B, T], and the energy of each neuron, [U]."""
        largest_N, largest_at_N, energy_U = self.neurons.writes()
        return NeuronWrites(largest_N.view(self.passing.shape), largest_at_N.view(self.passing.shape), energy_U)

    @cached_property
    def tokens_of_interest(self) -> Tensor:
        """[B * P] the positions of interest of each sequence, as indices into the N tokens of the batch."""
        num_sequences, length = self.passing.shape
        first_B = every_position(num_sequences * length, self.positions_of_interest.device)[::length]
        if num_sequences == 1:
            return self.positions_of_interest
        return (first_B[:, None] + self.positions_of_interest).flatten()

    @cached_property
    def activations_of_interest(self) -> Tensor:
        """[B, P, U] activation of every neuron at the positions of interest."""
        rows = self.neurons.at(self.tokens_of_interest)
        return wide(rows.unflatten(0, (self.passing.shape[0], -1)))

    @cached_property
    def writes_of_interest(self) -> Tensor:
        """[B, P, U] what the residual stream gets of it: scaled by the post-norm where there is one."""
        scale_N = self.neurons.write_scale_N
        if scale_N is None:
            return self.activations_of_interest
        num_sequences, num_positions, _ = self.activations_of_interest.shape
        return self.activations_of_interest * scale_N[self.tokens_of_interest].view(num_sequences, num_positions, 1)

    def let_go(self, *names: str) -> None:
        """Drops activations that no later hook point may read."""
        for name in names:
            self.__dict__.pop(name, None)


def pick_positions(dom_ratio_T: Tensor, received_T: Tensor) -> Tensor:
    """[2, Q] the positions with the largest DomRatio, and those with the most attention received."""
    num_top = min(NUM_TOP_POSITIONS, len(dom_ratio_T))
    return torch.stack([dom_ratio_T, received_T.to(dom_ratio_T)]).topk(num_top, dim=1).indices


def with_received(before_T: Tensor | None, alpha_BHS: Tensor, keys_S: Tensor | None, length: int) -> Tensor:
    """[T] attention received up to a layer: `before_T`, plus what keys receive in this layer, summed over heads and
    sequences. Keys with too few later queries count as 0. `keys_S`: which keys were recorded, if not all."""
    device = alpha_BHS.device
    received_S = alpha_BHS.sum((0, 1))
    if keys_S is not None:
        received_S = received_S.new_zeros(length).index_add(0, keys_S.to(device), received_S)
    received_T = received_S * eligible_positions(length, device)
    return received_T if before_T is None else before_T.to(device) + received_T


@lru_cache(maxsize=64)
def every_position(length: int, device: torch.device) -> Tensor:
    """[T] all positions. Kept per device, since every layer needs them."""
    return torch.arange(length, device=device)


@lru_cache(maxsize=64)
def rank_index(num_sequences: int, length: int, device: torch.device) -> Tensor:
    """[N] indices of the tokens that the effective rank is computed from: the first tokens of the batch, or evenly
    spaced ones of its first sequence if that alone has more.

    Kept per device: a copy from the host would make every layer wait for the one before.
    """
    if length > RANK_TOKENS:
        return torch.linspace(0, length - 1, RANK_TOKENS).long().to(device)
    return torch.arange(min(RANK_TOKENS, num_sequences * length), device=device)


def value_variance(value_BKSD: Tensor) -> Tensor:
    """[K, S] variance across sequences of each key's value, mean over channels."""
    value_BKSD = wide(value_BKSD)
    squares_KSD = (value_BKSD - value_BKSD.mean(0)).square_().sum(0)  # on a CPU, torch.var is slow along the first axis
    return squares_KSD.mean(-1) / (len(value_BKSD) - 1)


def blame(anatomy: Anatomy) -> str:
    """Where to look if a module does not run as its family should."""
    return f"Check the entry {anatomy.family.name} in sinkscope/models/families.py."


def wide(values: Tensor) -> Tensor:
    """The values in float32; float64 stays as it is."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
