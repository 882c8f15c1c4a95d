"""What a trace shows, in a few sentences. What was not tested by removing it is told as observed, never as a cause."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from sinkscope.measures.sink_score import LATER_QUERIES, MIN_SINK_RATE
from sinkscope.models.token_batches import TokenBatch
from sinkscope.tracing.findings import Findings, Sink
from sinkscope.tracing.removal import Removal, in_words
from sinkscope.tracing.sequences import TokenSink

NUM_NAMED = 3
"""How many sinks, dimensions, neurons or tokens a sentence names."""


def story(findings: Findings, text_of: Callable[[int], str], removal: Removal | None) -> str:
    """What was found: the sinks, what stands out at the foremost of them, and what is left without its neurons."""
    among = ""
    if (keys := chosen_keys(findings)) is not None:
        among = f" among the recorded keys ({_listed(map(str, keys), 8)})"
    position, rate = findings.strongest
    if math.isnan(rate):
        return _too_short(findings, among)
    if not findings.sinks:
        text = f"No sink{among}: at most {rate:.1%} of heads have a sink at one position ({position})"
        text += f", and a sink needs {100 * MIN_SINK_RATE:g} %"
        if findings.massive_dimensions:
            text += f", though a few dimensions dominate at position {', '.join(map(str, findings.focus[:5]))}"
        return f"{text}.{_cut(findings)}"
    foremost = findings.sinks[0].position
    dimensions = {change.dimension for change in findings.carried_by[foremost]}
    text = _sinks(findings, text_of, among) + _dimensions(findings, foremost)
    named, _ = findings.named_neurons[foremost]
    if named:
        if removal is not None:
            text += f" {in_words(removal, foremost, named, several=len(dimensions) > 1)}"
        else:
            neuron = named[0]
            expert = "" if neuron.expert is None else f", expert {neuron.expert},"
            what = "them" if len(dimensions) > 1 else "it"
            text += (
                f" Neuron {neuron.neuron} of layer {neuron.layer}{expert} writes {what} most; whether the sink needs "
            )
            text += "that neuron was not tested."
    return text + _cut(findings)


def _sinks(findings: Findings, text_of: Callable[[int], str], among: str) -> str:
    """The sinks: first those that are certain, then those that may be, then those of some sequences only."""
    batch = findings.recording.batch
    by_certainty: dict[str, list[Sink]] = {"sink": [], "maybe": [], "in some": []}
    for sink in findings.sinks:
        by_certainty[sink.certainty(batch.num_sequences)].append(sink)

    def place(sink: Sink) -> str:
        token = shared_token(batch, sink.position)
        text = "" if token is None or text_of(token) == str(token) else f" ({text_of(token)!r})"
        return f"{sink.position}{text}"

    sentences = []
    if certain := by_certainty["sink"]:
        if len(certain) == 1:
            sentences.append(f"Position {place(certain[0])} is a sink for {certain[0].rate:.1%} of heads{among}.")
        else:
            named = [f"{place(sink)} for {sink.rate:.1%} of heads" for sink in certain]
            sentences.append(f"Sinks{among} are position {_listed(named, NUM_NAMED)}.")
    if maybe := by_certainty["maybe"]:
        named = [f"{place(sink)} ({sink.rate:.1%} of heads, {sink.low:.1%} to {sink.high:.1%})" for sink in maybe]
        sentences.append(f"Perhaps a sink{'' if certain else among}: position {_listed(named, NUM_NAMED)}.")
    if in_some := by_certainty["in some"]:
        named = [
            f"{place(sink)} in {len(sink.sequences)} of {batch.num_sequences} ({sink.rate_there:.1%} of heads there)"
            for sink in in_some
        ]
        sentences.append(f"A sink in some sequences only{among}: position {_listed(named, NUM_NAMED)}.")
    return " ".join(sentences)


def _dimensions(findings: Findings, position: int) -> str:
    """What stands out at a sink, and from which layer on."""
    massive = findings.massive_dimensions_at(position)
    if not massive:
        return " No dimension of the residual stands out there."
    carried_by = {change.dimension for change in findings.carried_by[position]}
    dimensions = [dimension for dimension in massive if dimension in carried_by]
    several = len(dimensions or massive) > 1
    named = f"{'Dimensions' if several else 'Dimension'} {_listed(map(str, dimensions or massive), NUM_NAMED)}"
    stand = "stand" if several else "stands"
    if not dimensions:
        return f" {named} of the residual {stand} out there, but only behind heads that have the sink already."
    appears_in, disappears_in = findings.disparity_layers[position]
    text = f" {named} of the residual {stand} out there: appearing in {_layers(appears_in)}"
    return f"{text}, disappearing in {_layers(disappears_in)}." if disappears_in else f"{text}."


def hidden_sinks(sinks: Sequence[TokenSink], text_of: Callable[[int], str]) -> str:
    """A sentence on tokens that are sinks within some texts but not on average by position; empty without any."""
    if not sinks:
        return ""
    named = []
    for sink in sinks:
        first, last = sink.positions[0], sink.positions[-1]
        where = f"position {first}" if first == last else f"positions {first} to {last}"
        of = f"{sink.num_sequences} of the {sink.num_with} texts with it" if sink.num_with > 1 else "the text with it"
        named.append(f"'{text_of(sink.id)}' in {of} ({where})")
    return f" Within the texts there are sinks that the mean by position hides: {_listed(named, NUM_NAMED)}."


def shared_token(batch: TokenBatch, position: int) -> int | None:
    """The token that all sequences have at a position; None if they differ."""
    ids_B = batch.told_apart[:, position]
    return int(ids_B[0]) if bool((ids_B == ids_B[0]).all()) else None


def chosen_keys(findings: Findings) -> list[int] | None:
    """The recorded keys; None if all were."""
    keys = findings.recording.keys.tolist()
    return keys if len(keys) < findings.recording.batch.length else None


def _listed(items, most: int) -> str:
    """The first of some names, and how many more there are."""
    names = list(items)
    more = [f"{len(names) - most} more"] if len(names) > most else []
    names = names[:most] + more
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _layers(layers: Sequence[int]) -> str:
    """Layers in words; layer -1 are the embeddings."""
    numbers = [str(layer) for layer in layers if layer >= 0]
    names = ["the embeddings"] if -1 in layers else []
    if numbers:
        names.append(f"layer{'s' * (len(numbers) > 1)} {_listed(numbers, NUM_NAMED)}")
    return " and ".join(names)


def _too_short(findings: Findings, among: str) -> str:
    """The story of sequences so short that no key has the later queries that a sink needs. The last keys have so few
    queries that each receives much, so the first half is looked at."""
    recording, length = findings.recording, findings.recording.batch.length
    received_S = recording.of_attention("received").mean((0, 1))
    key = int(received_S.masked_fill(recording.keys >= max(1, length // 2), -1).argmax())
    share = f"{float(received_S[key]):.2f} of each query's on average"
    return (
        f"Sinks are not judged: a key needs {LATER_QUERIES} later queries, and there are {length} tokens. Of the first "
        f"half, position {int(recording.keys[key])} receives the most attention{among}, {share}.{_cut(findings)}"
    )


def _cut(findings: Findings) -> str:
    """A sentence saying that only the beginnings of texts of unequal length are read by position; else empty."""
    batch = findings.recording.batch
    if not batch.whole:
        return ""
    return f" By position, the first {batch.length} tokens of each text are read, as many as the shortest has."
