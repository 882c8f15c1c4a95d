"""Each sequence's own sinks, by token. A mean over sequences by position hides a sink that moves from text to text.

A token is a sink of its sequence by the rule for a batch, applied to that sequence alone: at least 5 % of layers and
heads give it more than 0.3 of the attention of the queries from it on, and it has 16 later queries.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from sinkscope.measures.sink_score import are_sinks, eligible_positions
from sinkscope.models.loading import LoadedModel
from sinkscope.tracing.observables import RECEIVED_BY_SEQUENCE, SINK_HEADS
from sinkscope.tracing.recorder import CHUNK_TOKENS, Recording, record

TOLD_SHARE = 0.1
"""A token is reported as a sink where it is one in at least this share of the sequences."""


@dataclass(frozen=True)
class SequenceSink:
    sequence: int
    position: int
    id: int
    rate: float
    mean_attention: float


@dataclass(frozen=True)
class TokenSink:
    """A token that is a sink within sequences."""

    id: int
    num_sequences: int
    """In which it is a sink."""
    num_with: int
    """In which it stands where it could be one."""
    positions: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Sequences:
    """What each key of each sequence receives. Lists are by sequence, each as long as it is."""

    ids: Sequence[Tensor]
    keys: Sequence[Tensor]
    """Positions that were recorded."""
    rates: Sequence[Tensor]
    """Share of layers and heads that count the key as a sink."""
    received: Sequence[Tensor]
    """Attention received, mean over the queries from the key on, layers and heads."""

    @cached_property
    def sinks(self) -> list[SequenceSink]:
        """Every sink of every sequence."""
        found = []
        for sequence, (ids, keys, rates, received) in enumerate(
            zip(self.ids, self.keys, self.rates, self.received, strict=True)
        ):
            is_sink = are_sinks(rates, len(ids), keys)
            for at in is_sink.nonzero().flatten().tolist():
                position = int(keys[at])
                found.append(
                    SequenceSink(sequence, position, int(ids[position]), float(rates[at]), float(received[at]))
                )
        return found

    def by_token(self, besides: Collection[int] = ()) -> list[TokenSink]:
        """Tokens that are sinks at other positions than these in some share of the sequences, most sequences first."""
        places: dict[int, list[SequenceSink]] = defaultdict(list)
        for sink in self.sinks:
            if sink.position not in besides:
                places[sink.id].append(sink)
        found = []
        for token, own in places.items():
            sequences = {sink.sequence for sink in own}
            if len(sequences) >= TOLD_SHARE * len(self.ids):
                positions = tuple(sorted({sink.position for sink in own}))
                found.append(TokenSink(token, len(sequences), self._num_with(token, besides), positions))
        return sorted(found, key=lambda each: (-each.num_sequences, each.id))

    def _num_with(self, token: int, besides: Collection[int]) -> int:
        return sum(
            any(
                position not in besides
                for position in ((ids == token) & eligible_positions(len(ids))).nonzero().flatten().tolist()
            )
            for ids in self.ids
        )


def read_sequences(loaded: LoadedModel, recording: Recording, chunk_tokens: int = CHUNK_TOKENS) -> Sequences | None:
    """The sequences of a recording; texts that it holds cut are read whole, those of one length together. None where
    the recording lacks what is needed."""
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
    found: dict[int, tuple[Tensor, ...]] = {}
    for recording, own in zip(recordings, numbers, strict=True):
        received_BS = recording[RECEIVED_BY_SEQUENCE.name].float().mean(0)
        rates_BS = recording.sequence_sink_rate
        for row, number in enumerate(own):
            found[number] = recording.batch.ids[row], recording.keys, rates_BS[row], received_BS[row]
    return Sequences(*(list(each) for each in zip(*(found[number] for number in sorted(found)), strict=True)))
