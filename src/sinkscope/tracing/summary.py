"""A trace in one JSON object and in one sentence."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from sinkscope.measures.sink_score import LATER_QUERIES, SINK_RATE
from sinkscope.tracing.findings import Findings
from sinkscope.tracing.sequences import TokenSink

NUM_NAMED = 3
"""Tokens that a sentence names."""


def trace_summary(findings: Findings) -> dict:
    """What was found, for summary.json."""
    recording = findings.recording
    position, rate = findings.strongest
    at_sink, elsewhere = findings.dom_ratio_at(position)
    ranks, ranks_without_sink = findings.effective_ranks
    fallbacks = [f"layer {layer}: {note}" for layer, note in sorted(findings.fallbacks.items())]
    return {
        "model": recording.model_name,
        "family": recording.anatomy.family.name,
        "num_layers": recording.num_layers,
        "tokens": recording.batch.describe(),
        "keys": _chosen_keys(findings),
        "sink_rate": rate,
        "sinks": [
            {
                "position": sink.position,
                "rate": sink.rate,
                "low": sink.low,
                "high": sink.high,
                "layers": sink.layers,
                "mean_attention": sink.mean_attention,
                "birth_layers": findings.births[sink.position][0],
                "erasure_layers": findings.births[sink.position][1],
            }
            for sink in findings.sinks
        ],
        "birth_layers": findings.birth_layers,
        "erasure_layers": findings.erasure_layers,
        "massive_dimensions": findings.massive_dimensions,
        "super_neurons": [
            {
                "layer": unit.layer,
                "expert": unit.expert,
                "neuron": unit.neuron,
                "dimension": unit.dimension,
                "activation": unit.activation,
                "write_share": unit.write_share,
                "role": unit.role,
            }
            for unit in findings.super_neurons
            if unit.position == findings.focus[0]
        ],
        "variance_ratio": _list(findings.variance_ratio),
        "dom_ratio": {
            "position": position,
            "sink": at_sink.tolist() if findings.sinks else None,
            "elsewhere": elsewhere.tolist(),
        },
        "effective_rank": ranks,
        "effective_rank_without_sink": ranks_without_sink,
        **({"fallbacks": fallbacks} if fallbacks else {}),
    }


def story(findings: Findings) -> str:
    """One sentence that says what was found."""
    sinks = findings.sinks
    position, rate = findings.strongest
    among = ""
    if (keys := _chosen_keys(findings)) is not None:
        among = f" among the recorded keys ({', '.join(map(str, keys[:8]))}{', ...' if len(keys) > 8 else ''})"
    if math.isnan(rate):
        return _too_short(findings, among)
    if not sinks:
        text = f"No sink{among}: at most {rate:.1%} of heads have a sink at one position ({position})"
        text += f", and a sink needs {100 * SINK_RATE:g} %"
        if findings.massive_dimensions:
            places = ", ".join(map(str, findings.focus[:5]))
            text += f", though a few dimensions dominate at position {places}"
        return text + "." + _cut(findings)
    if len(sinks) == 1:
        text = f"Position {position} is a sink for {rate:.1%} of heads{among}"
    else:
        named = [f"{sink.position} ({sink.rate:.1%} of heads)" for sink in sinks[:3]]
        last = f"{len(sinks) - 3} more" if len(sinks) > 3 else named.pop()
        text = f"Positions {', '.join(named)} and {last} are sinks{among}"
    if not findings.massive_dimensions:
        return text + ", with no dimension disparity behind it." + _cut(findings)
    dimensions = ", ".join(map(str, findings.massive_dimensions[:3]))
    born = ["the embeddings" if layer < 0 else f"layer {layer}" for layer in findings.birth_layers]
    text += f"; disparity is born in {' and '.join(born)}" if born else ""
    erased = [f"layer {layer}" for layer in findings.erasure_layers]
    text += f", erased in {' and '.join(erased)}" if erased else ""
    text += (
        f", in dimension {dimensions}"
        if len(findings.massive_dimensions) == 1
        else f", foremost in dimensions {dimensions}"
    )
    writers = [unit for unit in findings.super_neurons if unit.role == "writes" and unit.position == findings.focus[0]]
    # A later layer may write more, and the sink not need it: what begins the disparity comes first.
    first = [unit for layer in findings.birth_layers for unit in writers if unit.layer == layer]
    if writers:
        unit = (first or writers)[0]
        expert = "" if unit.expert is None else f", expert {unit.expert}"
        share = f"{unit.write_share:.0%} of that layer's write"
        verb = "begun" if first else "written most"
        text += f", {verb} by neuron {unit.neuron} of layer {unit.layer}{expert} ({share})"
    return text + "." + _cut(findings)


def hidden_sinks(sinks: Sequence[TokenSink], text_of: Callable[[int], str]) -> str:
    """The sentence that warns of sinks within texts that a mean by position does not show; empty without any."""
    if not sinks:
        return ""
    named = []
    for sink in sinks[:NUM_NAMED]:
        first, last = sink.positions[0], sink.positions[-1]
        where = f"position {first}" if first == last else f"positions {first} to {last}"
        of = f"{sink.num_sequences} of the {sink.num_with} texts with it" if sink.num_with > 1 else "the text with it"
        named.append(f"'{text_of(sink.id)}' in {of} ({where})")
    more = f" and {len(sinks) - NUM_NAMED} more" if len(sinks) > NUM_NAMED else ""
    return f" Within the texts there are sinks that the mean by position hides: {', '.join(named)}{more}."


def _too_short(findings: Findings, among: str) -> str:
    """For sequences in which no key has the later queries that a sink needs."""
    recording = findings.recording
    received_S = recording["received"].mean((0, 1))
    is_last_S = recording.keys == recording.batch.length - 1  # it has no query but its own
    key = int(received_S.masked_fill(is_last_S, -1).argmax())
    share = f"{float(received_S[key]):.2f} of each query's on average"
    return (
        f"Sinks are not judged: a key needs {LATER_QUERIES} later queries, and there are {recording.batch.length} "
        f"tokens. Position {int(recording.keys[key])} receives the most attention{among}, {share}."
        f"{_cut(findings)}"
    )


def _cut(findings: Findings) -> str:
    """Says that by position only the beginnings of texts of unequal length are read."""
    batch = findings.recording.batch
    if not batch.whole:
        return ""
    return f" By position, the first {batch.length} tokens of each text are read, as many as the shortest has."


def _chosen_keys(findings: Findings) -> list[int] | None:
    """The recorded keys; None if all were."""
    keys = findings.recording.keys.tolist()
    return keys if len(keys) < findings.recording.batch.length else None


def _list(values: Tensor | None) -> list | None:
    return None if values is None else values.tolist()
