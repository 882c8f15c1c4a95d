"""trace(model, batch): records the whole sink chain of a causal language model in one pass, and says what it shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from sinkscope.errors import InputError
from sinkscope.measures.sink_score import MIN_SINK_RATE
from sinkscope.models.loaded import ModelLike
from sinkscope.models.loading import load
from sinkscope.models.prompts import Tokens, as_batch
from sinkscope.models.sharded import from_rank_0, is_sharded, is_tensor_parallel, whole_copy
from sinkscope.models.token_batches import token_batch
from sinkscope.progress import Progress
from sinkscope.results.result import Result
from sinkscope.results.run_folder import RunFolder
from sinkscope.results.tables import Schema
from sinkscope.tracing.findings import NEEDED, Findings, Sink
from sinkscope.tracing.observables import CHAIN, EFFECTIVE_RANK, TABLE_OF_AXES, Observable, resolved
from sinkscope.tracing.open_interventions import check_is_object, check_one_pass
from sinkscope.tracing.receipt import Receipt, beginnings_in_words, described, take_receipt
from sinkscope.tracing.recorder import CHUNK_TOKENS, Recording, record
from sinkscope.tracing.removal import NamedNeuron, Rate, Removal
from sinkscope.tracing.schemas import TRACE_TABLES, schema_with
from sinkscope.tracing.sequences import Sequences, TokenSink, read_sequences
from sinkscope.tracing.single_reader import evaluation_mode
from sinkscope.tracing.story import chosen_keys, hidden_sinks, shared_token, story
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
    removal: Removal | None = None
    """What is left of the sinks without the neurons that write them; None if that was not tested."""

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
        summary = trace_summary(self.findings, self.removal, self.token_text)
        if hidden := [{**asdict(sink), "text": self.token_text(sink.id)} for sink in self.token_sinks]:
            summary["token_sinks"] = hidden
        return {**summary, "story": self.story, **described(self.receipt)}

    @cached_property
    def story(self) -> str:
        """What the trace shows, in a few sentences."""
        if self.has_findings:
            hidden = hidden_sinks(self.token_sinks, self.token_text)
            return story(self.findings, self.token_text, self.removal) + hidden + self.beginnings
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
    """The sink chain of a model on a batch, from one forward pass; nothing is tested. See `interventions.tested_trace`,
    the public function, for the arguments."""
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
            findings = result.findings
            _ = findings.lock, findings.moving_neurons, findings.named_neurons, findings.output_channel_norms
    return result


def trace_summary(findings: Findings, removal: Removal | None, text_of: Callable[[int], str]) -> dict:
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
        **({"attention_layers": recording.attention_layers} if recording.anatomy.is_hybrid else {}),
        "tokens": recording.batch.describe(),
        "keys": chosen_keys(findings),
        "sink_rate": rate,
        "sinks": [_sink(findings, sink, removal, text_of) for sink in findings.sinks],
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


def _sink(findings: Findings, sink: Sink, removal: Removal | None, text_of: Callable[[int], str]) -> dict:
    """A sink as it stands in summary.json."""
    batch, position = findings.recording.batch, sink.position
    appears_in, disappears_in = findings.disparity_layers[position]
    token = shared_token(batch, position)
    return {
        "position": position,
        "token": None if token is None else text_of(token),
        "rate": sink.rate,
        "low": sink.low,
        "high": sink.high,
        "certainty": sink.certainty(batch.num_sequences),
        "num_sequences": len(sink.sequences),
        "rate_in_these": sink.rate_there,
        "layers": sink.layers,
        "mean_attention": sink.mean_attention,
        "birth_layers": appears_in,
        "erasure_layers": disappears_in,
        "writers": _neurons(findings.named_neurons[position][0]),
        "erasers": _neurons(findings.named_neurons[position][1]),
        "rate_without_writers": None if removal is None else _interval(removal.without_neurons[position]),
        "rate_without_random": None if removal is None else _interval(removal.without_random[position]),
    }


def _interval(rate: Rate) -> dict[str, float | None]:
    return {name: None if math.isnan(value) else value for name, value in rate._asdict().items()}


def _neurons(neurons: Sequence[NamedNeuron]) -> list[dict]:
    return [asdict(neuron) for neuron in neurons]


def _list(values: Tensor | None) -> list | None:
    """The values of all layers, None for those without; None if there are none."""
    return None if values is None else [None if math.isnan(value) else value for value in values.tolist()]
