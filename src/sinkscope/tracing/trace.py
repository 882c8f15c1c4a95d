"""trace(model, batch): records the whole sink chain of a causal language model in one pass, and says what it shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from sinkscope.errors import InputError
from sinkscope.measures.sink_score import LATER_QUERIES, MIN_SINK_RATE
from sinkscope.models.loaded import ModelLike
from sinkscope.models.loading import load
from sinkscope.models.prompts import Tokens, as_batch
from sinkscope.models.sharded import from_rank_0, is_sharded, is_tensor_parallel, whole_copy
from sinkscope.models.token_batches import token_batch
from sinkscope.progress import Progress
from sinkscope.results.result import Result
from sinkscope.results.run_folder import RunFolder
from sinkscope.results.tables import Schema
from sinkscope.tracing.findings import NEEDED, Findings
from sinkscope.tracing.observables import CHAIN, EFFECTIVE_RANK, TABLE_OF_AXES, Observable, resolved
from sinkscope.tracing.open_interventions import check_is_object, check_one_pass
from sinkscope.tracing.receipt import Receipt, beginnings_in_words, described, take_receipt
from sinkscope.tracing.recorder import CHUNK_TOKENS, Recording, record
from sinkscope.tracing.schemas import TRACE_TABLES, schema_with
from sinkscope.tracing.sequences import Sequences, TokenSink, read_sequences
from sinkscope.tracing.single_reader import evaluation_mode
from sinkscope.tracing.tables import recorded_tables, sequence_tables, trace_tables

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, repr=False)
class Trace(Result):
    """A recording, the findings in it, and both as tables."""

    kind = "trace"
    recording: Recording
    sequences: Sequences | None = None
    """What each key of each sequence receives; None if the observables for it were not recorded."""
    tokenizer: PreTrainedTokenizerBase | None = None
    receipt: Receipt | None = None

    @cached_property
    def findings(self) -> Findings:
        return Findings(self.recording)

    @cached_property
    def tables(self) -> Mapping[str, Mapping]:
        """Columns by table: sinks, positions, neurons, dimensions, heads, layers, distances, tokens, sequence_sinks. If
        the findings lack an observable, only the tables that the recorded observables fill."""
        tables = trace_tables(self.findings) if self.has_findings else recorded_tables(self.recording)
        return tables if self.sequences is None else {**tables, **sequence_tables(self.sequences, self.token_text)}

    def token_text(self, token: int) -> str:
        """A token as the tokenizer writes it; its id without a tokenizer. -1 - n is the n-th token of an image."""
        if token < 0:
            return f"<image_{-1 - token}>"
        return str(token) if self.tokenizer is None else str(self.tokenizer.decode([token]))

    @cached_property
    def token_sinks(self) -> list[TokenSink]:
        """The tokens of a text that are sinks in some sequences, at positions that are no sink on average; empty for
        random tokens."""
        if self.sequences is None or self.recording.batch.kind not in ("text", "given"):
            return []
        return self.sequences.by_token([sink.position for sink in self.findings.sinks])

    @property
    def has_findings(self) -> bool:
        """Whether all observables that the findings need were recorded."""
        return self.recording.by_layer.keys() >= NEEDED

    @property
    def lacking(self) -> list[str]:
        """Observables that the page of a trace needs and that were not recorded."""
        recorded = {observable.name for observable in self.recording.observables}
        on_page = [o.name for o in CHAIN if o.name in NEEDED or o.axes in TABLE_OF_AXES or o.asks == "distances"]
        return [name for name in on_page if name not in recorded]

    @cached_property
    def summary(self) -> dict:
        """The object written as summary.json. What is unknown or does not apply is null."""
        summary = trace_summary(self.findings)
        if hidden := [{**asdict(sink), "text": self.token_text(sink.id)} for sink in self.token_sinks]:
            summary["token_sinks"] = hidden
        return {**summary, "story": self.story, **described(self.receipt)}

    @cached_property
    def story(self) -> str:
        """What the trace shows, in a few sentences."""
        if self.has_findings:
            hidden = hidden_sinks(self.token_sinks, self.token_text)
            return story(self.findings) + hidden + self.beginnings
        return f"A recording of {self.recording.model_name}: {', '.join(self.recording.by_layer)}."

    @property
    def beginnings(self) -> str:
        """A warning about BOS tokens, if one is due; mostly empty."""
        # A short text has no rate (NaN, which compares as False), so nothing is said about a lack of sinks.
        return beginnings_in_words(self.receipt, lacks_sink=self.findings.strongest[1] < MIN_SINK_RATE)

    @cached_property
    def schemas(self) -> tuple[Schema, ...]:
        """The schemas of the tables, with the columns that this trace has."""
        schemas = []
        for schema in TRACE_TABLES:
            if schema.name in self.tables:
                declared = schema_with(schema, self.recording.observables)
                columns = [column for column in declared.columns if column.name in self.tables[schema.name]]
                schemas.append(replace(declared, columns=tuple(columns)))
        return tuple(schemas)

    def write(self, folder: RunFolder) -> None:
        if self.has_findings:
            super().write(folder)
        elif not self.tables:
            raise InputError(
                f"There is no table to save: none has a column for {', '.join(self.recording.by_layer)}. Read that "
                "from `recording`, or leave `observables` out."
            )
        else:
            self.write_tables(folder)


def trace(
    model: ModelLike,
    batch: Tokens | None = None,
    *,
    observables: Iterable[Observable | str] | None = None,
    keys: Sequence[int] | None = None,
    effective_rank: bool = True,
    chunk_tokens: int = CHUNK_TOKENS,
    progress: Progress | None = None,
) -> Trace:
    """The sink chain of a model on a batch of tokens, a text, a chat, a list of these, or ids. Without a batch, random
    tokens are read, as `token_batch` draws them.

        result = sinkscope.trace(model, "The cat sat on the mat.")
        result.story, result.findings.sinks, result.table("heads")

    `observables`: what to record, by name or as records of your own; all of CHAIN by default. `keys`: record attention
    on these key positions alone. `effective_rank=False` leaves out the one number that needs a decomposition. Batches
    of more than `chunk_tokens` tokens are run in chunks, and joining them is exact.
    """
    check_is_object(model)
    loaded = load(model)
    batch = token_batch(loaded) if batch is None else as_batch(loaded, batch, with_images=True)
    if is_sharded(loaded.model):
        batch = from_rank_0(batch)
        if is_tensor_parallel(loaded.model):
            loaded = replace(loaded, model=whole_copy(loaded.model))
    selected = [o for o in resolved(observables) if effective_rank or o is not EFFECTIVE_RANK]
    check_one_pass(len({len(ids) for ids in batch.whole}))
    recording = record(loaded, batch, selected, keys=keys, chunk_tokens=chunk_tokens, progress=progress)
    sequences = read_sequences(loaded, recording, chunk_tokens)
    receipt = take_receipt(loaded, batch, recording.comparison)
    result = Trace(recording, sequences, loaded.tokenizer, receipt)
    if result.has_findings:
        # Findings are computed when first asked for. Those that read the model's weights are computed now, so that the
        # trace stays the same if the model is changed afterwards.
        with evaluation_mode(loaded.model):
            _ = result.findings.lock, result.findings.moving_neurons, result.findings.output_channel_norms
    return result


NUM_NAMED = 3
"""How many tokens the sentence on hidden sinks names."""


def trace_summary(findings: Findings) -> dict:
    """The findings as they stand in summary.json. Keys stay as they are: saved runs have them."""
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
                "birth_layers": findings.disparity_layers[sink.position][0],
                "erasure_layers": findings.disparity_layers[sink.position][1],
            }
            for sink in findings.sinks
        ],
        "birth_layers": findings.appears_in,
        "erasure_layers": findings.disappears_in,
        "massive_dimensions": findings.massive_dimensions,
        "super_neurons": [
            {
                "layer": neuron.layer,
                "expert": neuron.expert,
                "neuron": neuron.neuron,
                "dimension": neuron.dimension,
                "activation": neuron.activation,
                "write_share": neuron.write_share,
                "role": neuron.role,
            }
            for neuron in findings.super_neurons
            if neuron.position == findings.focus[0]
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
    """What was found, in one sentence."""
    sinks = findings.sinks
    position, rate = findings.strongest
    among = ""
    if (keys := _chosen_keys(findings)) is not None:
        among = f" among the recorded keys ({', '.join(map(str, keys[:8]))}{', ...' if len(keys) > 8 else ''})"
    if math.isnan(rate):
        return _too_short(findings, among)
    if not sinks:
        text = f"No sink{among}: at most {rate:.1%} of heads have a sink at one position ({position})"
        text += f", and a sink needs {100 * MIN_SINK_RATE:g} %"
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
    carried_by = {change.dimension for change in findings.carried_by[position]}
    dimensions = [dimension for dimension in findings.massive_dimensions if dimension in carried_by]
    if not dimensions:
        number = ", ".join(map(str, findings.massive_dimensions[:3]))
        return (
            f"{text}; dimensions stand out there ({number}), but only behind heads that have the sink already."
            + _cut(findings)
        )
    appears_in = ["the embeddings" if layer < 0 else f"layer {layer}" for layer in findings.appears_in]
    text += f"; disparity appears in {' and '.join(appears_in)}"
    disappears_in = [f"layer {layer}" for layer in findings.disappears_in]
    text += f", disappears in {' and '.join(disappears_in)}" if disappears_in else ""
    named = ", ".join(map(str, dimensions[:3]))
    text += f", in dimension {named}" if len(dimensions) == 1 else f", mostly in dimensions {named}"
    writers = [
        neuron
        for neuron in findings.super_neurons
        if neuron.role == "writes" and neuron.position == position and neuron.dimension in dimensions
    ]
    # A later layer may write more without the sink needing it, so the neuron that first wrote the disparity is named.
    first = [neuron for layer in findings.appears_in for neuron in writers if neuron.layer == layer]
    if writers:
        neuron = (first or writers)[0]
        expert = "" if neuron.expert is None else f", expert {neuron.expert}"
        share = f"{neuron.write_share:.0%} of that layer's write"
        verb = "first written" if first else "mostly written"
        text += f", {verb} by neuron {neuron.neuron} of layer {neuron.layer}{expert} ({share})"
    return text + "." + _cut(findings)


def hidden_sinks(sinks: Sequence[TokenSink], text_of: Callable[[int], str]) -> str:
    """A sentence on tokens that are sinks within some texts but not on average by position; empty without any."""
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
    """The story of sequences so short that no key has the later queries that a sink needs."""
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
    """A sentence saying that only the beginnings of texts of unequal length are read by position; else empty."""
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
