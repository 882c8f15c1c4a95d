"""The sinks of each sequence by itself, and which tokens they are. The mean over sequences by position, which a trace
reports first, hides a sink that stands at another position in each text.

A token is a sink of its sequence by the same rule: at least 5 % of layers and heads give it more than 0.3 of the
attention of the queries from it on, and it has at least 16 later queries.
Axes: B sequences, S recorded keys.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from sinkscope.measures.sink_score import are_sinks, eligible_positions
from sinkscope.models.loaded import LoadedModel
from sinkscope.tracing.observables import RECEIVED_BY_SEQUENCE, SINK_HEADS
from sinkscope.tracing.recorder import CHUNK_TOKENS, Recording, record

REPORTED_SHARE = 0.1
"""A token is reported if it is a sink in at least this share of the sequences."""


@dataclass(frozen=True)
class SequenceSink:
    """A sink of one sequence."""

    sequence: int
    position: int
    id: int
    """Of the token."""
    rate: float
    """Share of layers and heads that count the position as a sink."""
    mean_attention: float
    """Attention received, mean over the queries from it on, layers and heads."""


@dataclass(frozen=True)
class TokenSink:
    """A token that is a sink in some sequences."""

    id: int
    num_sequences: int
    """The sequences in which it is a sink."""
    num_with: int
    """The sequences that have it at a position where it could be one."""
    positions: tuple[int, ...]
    """Where it is a sink, in any of them."""


@dataclass(frozen=True, eq=False)
class Sequences:
    """What each key of each sequence receives: one tensor for each sequence, as long as it has recorded keys."""

    ids: Sequence[Tensor]
    """The tokens, all of them; -1 - n for the n-th token of an image."""
    keys: Sequence[Tensor]
    """The positions of the recorded keys."""
    rates: Sequence[Tensor]
    """Share of layers and heads that count the key as a sink."""
    received: Sequence[Tensor]
    """Attention received, mean over the queries from the key on, layers and heads."""

    @cached_property
    def sinks(self) -> list[SequenceSink]:
        """Every sink of every sequence."""
        sinks = []
        of_sequences = zip(self.ids, self.keys, self.rates, self.received, strict=True)
        for sequence, (ids, keys, rates, received) in enumerate(of_sequences):
            for key in are_sinks(rates, len(ids), keys).nonzero().flatten().tolist():
                position = int(keys[key])
                sinks.append(
                    SequenceSink(sequence, position, int(ids[position]), float(rates[key]), float(received[key]))
                )
        return sinks

    def by_token(self, besides: Collection[int] = ()) -> list[TokenSink]:
        """The tokens that are sinks in at least REPORTED_SHARE of the sequences, most sequences first. `besides`:
        positions that don't count, such as those that are sinks on average."""
        sinks_of: dict[int, list[SequenceSink]] = defaultdict(list)
        for sink in self.sinks:
            if sink.position not in besides:
                sinks_of[sink.id].append(sink)
        tokens = []
        for token, sinks in sinks_of.items():
            num_sequences = len({sink.sequence for sink in sinks})
            if num_sequences >= REPORTED_SHARE * len(self.ids):
                positions = tuple(sorted({sink.position for sink in sinks}))
                tokens.append(TokenSink(token, num_sequences, self._num_with(token, besides), positions))
        return sorted(tokens, key=lambda token: (-token.num_sequences, token.id))

    def _num_with(self, token: int, besides: Collection[int]) -> int:
        """How many sequences have the token at a position where it could be a sink."""
        count = 0
        for ids in self.ids:
            positions = ((ids == token) & eligible_positions(len(ids))).nonzero().flatten().tolist()
            count += any(position not in besides for position in positions)
        return count


def read_sequences(loaded: LoadedModel, recording: Recording, chunk_tokens: int = CHUNK_TOKENS) -> Sequences | None:
    """The sequences of a recording; None if it lacks the observables for them.

    Of texts of unequal length a recording holds the beginnings alone. So they are read once more, whole, those of one
    length together.
    """
    if not {SINK_HEADS.name, RECEIVED_BY_SEQUENCE.name} <= recording.by_layer.keys():
        return None
    batch = recording.batch
    if not batch.whole:
        return _of_recording([recording], [range(batch.num_sequences)])
    groups: dict[int, list[int]] = defaultdict(list)
    for number, ids in enumerate(batch.whole):
        groups[len(ids)].append(number)
    keys = None if len(recording.keys) == batch.length else recording.keys.tolist()
    recordings = [
        record(
            loaded,
            replace(batch, ids=torch.stack([batch.whole[number] for number in numbers]), whole=()),
            [SINK_HEADS, RECEIVED_BY_SEQUENCE],
            keys=keys,
            chunk_tokens=chunk_tokens,
        )
        for numbers in groups.values()
    ]
    return _of_recording(recordings, list(groups.values()))


def _of_recording(recordings: Sequence[Recording], numbers: Sequence[Sequence[int]]) -> Sequences:
    """The sequences of several recordings, in the order of their numbers in the batch."""
    by_number: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
    for recording, numbers_in_it in zip(recordings, numbers, strict=True):
        received_BS = recording.of_attention(RECEIVED_BY_SEQUENCE.name).float().mean(0)
        rates_BS, ids_BT = recording.sequence_sink_rate, recording.batch.told_apart
        for row, number in enumerate(numbers_in_it):
            by_number[number] = ids_BT[row], recording.keys, rates_BS[row], received_BS[row]
    ids, keys, rates, received = zip(*(by_number[number] for number in sorted(by_number)), strict=True)
    return Sequences(ids, keys, rates, received)
