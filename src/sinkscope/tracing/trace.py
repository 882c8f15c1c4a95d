"""trace(model, batch): the whole sink chain of a causal language model in one pass, and what was found in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from sinkscope.errors import InputError
from sinkscope.measures.sink_score import SINK_RATE
from sinkscope.models.anatomy import anatomy_of
from sinkscope.models.loaded import ModelLike
from sinkscope.models.loading import load
from sinkscope.models.prompts import Tokens, as_batch
from sinkscope.models.token_batches import token_batch
from sinkscope.progress import Progress
from sinkscope.results.result import Result
from sinkscope.results.run_folder import RunFolder
from sinkscope.results.tables import Schema
from sinkscope.tracing.edits import check_is_object, check_one_pass
from sinkscope.tracing.findings import NEEDED, Findings
from sinkscope.tracing.observables import CHAIN, EFFECTIVE_RANK, TABLE_OF_AXES, Observable, resolved
from sinkscope.tracing.receipt import Receipt, beginnings_in_words, check_reading, described, take_receipt
from sinkscope.tracing.recorder import CHUNK_TOKENS, Recording, record
from sinkscope.tracing.schemas import TRACE_TABLES, schema_with
from sinkscope.tracing.sequences import Sequences, TokenSink, read_sequences
from sinkscope.tracing.sole_reader import evaluation_mode
from sinkscope.tracing.summary import hidden_sinks, story, trace_summary
from sinkscope.tracing.tables import recorded_tables, sequence_tables, trace_tables

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, repr=False)
class Trace(Result):
    """A recording, what was found in it, and both as tables."""

    kind = "trace"
    recording: Recording
    sequences: Sequences | None = None
    """What each key of each sequence receives; None where the observables were not recorded."""
    tokenizer: PreTrainedTokenizerBase | None = None
    receipt: Receipt | None = None

    @cached_property
    def findings(self) -> Findings:
        return Findings(self.recording)

    @cached_property
    def tables(self) -> Mapping[str, Mapping]:
        """Columns by table: sinks, positions, neurons, dimensions, heads, layers, distances, tokens, sequence_sinks. If
        the findings lack an observable, only the tables that the observables fill."""
        found = trace_tables(self.findings) if self.has_findings else recorded_tables(self.recording)
        return found if self.sequences is None else {**found, **sequence_tables(self.sequences, self.token_text)}

    def token_text(self, token: int) -> str:
        """A token as the tokenizer writes it; its id where there is no tokenizer."""
        return str(token) if self.tokenizer is None else str(self.tokenizer.decode([token]))

    @cached_property
    def token_sinks(self) -> list[TokenSink]:
        """Of text, the tokens that are sinks within sequences at positions that are none on average."""
        if self.sequences is None or self.recording.batch.kind not in ("text", "given"):
            return []
        return self.sequences.by_token([sink.position for sink in self.findings.sinks])

    @property
    def has_findings(self) -> bool:
        """Whether all that the findings need was recorded."""
        return self.recording.by_layer.keys() >= NEEDED

    @property
    def lacking(self) -> list[str]:
        """Observables that the page of a trace draws and that were not recorded."""
        recorded = {observable.name for observable in self.recording.observables}
        drawn = [o.name for o in CHAIN if o.name in NEEDED or o.axes in TABLE_OF_AXES or o.asks == "distances"]
        return [name for name in drawn if name not in recorded]

    @cached_property
    def summary(self) -> dict:
        """The object written as summary.json. Unknown or not applicable is null."""
        hidden = [{**asdict(sink), "text": self.token_text(sink.id)} for sink in self.token_sinks]
        found = {**trace_summary(self.findings), **({"token_sinks": hidden} if hidden else {}), "story": self.story}
        return {**found, **described(self.receipt)}

    @cached_property
    def story(self) -> str:
        if self.has_findings:
            hidden = hidden_sinks(self.token_sinks, self.token_text)
            return story(self.findings) + hidden + self.beginnings
        return f"A recording of {self.recording.model_name}: {', '.join(self.recording.by_layer)}."

    @property
    def beginnings(self) -> str:
        """What must be known of how the texts begin; mostly nothing."""
        # Of a short text nothing is said of sinks: its rate is NaN.
        return beginnings_in_words(self.receipt, lacks_sink=self.findings.strongest[1] < SINK_RATE)

    @cached_property
    def schemas(self) -> tuple[Schema, ...]:
        """Of the tables, with the columns that this trace has."""
        found = []
        for schema in TRACE_TABLES:
            if schema.name in self.tables:
                declared = schema_with(schema, self.recording.observables)
                kept = [column for column in declared.columns if column.name in self.tables[schema.name]]
                found.append(replace(declared, columns=tuple(kept)))
        return tuple(found)

    def write(self, folder: RunFolder) -> None:
        if self.has_findings:
            super().write(folder)
        elif not self.tables:
            raise InputError(
                expected="an observable that fills a table, or all of them",
                found=", ".join(self.recording.by_layer),
                next_step="Take these from `recording`, or leave `observables` out",
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
    """The sink chain of a model on what it reads: a batch of tokens, a text, a chat, a list of them, or ids;
    without one on random tokens, as `token_batch` draws them.

        found = sinkscope.trace(model, "The cat sat on the mat.")
        found.story, found.findings.sinks, found.table("heads")

    `observables` says what to record, by name or as records of your own; by default all of CHAIN. `keys` restricts
    attention to chosen key positions. `effective_rank=False` leaves out the only number that needs a decomposition.
    Batches of more than `chunk_tokens` tokens are run in chunks, whose statistics join exactly.
    """
    check_is_object(model)
    loaded = load(model)
    batch = token_batch(loaded) if batch is None else as_batch(loaded, batch)
    wanted = [o for o in resolved(observables) if effective_rank or o is not EFFECTIVE_RANK]
    check_one_pass(len({len(ids) for ids in batch.whole}))
    check_reading(loaded.model, anatomy_of(loaded.model))
    recording = record(loaded, batch, wanted, keys=keys, chunk_tokens=chunk_tokens, progress=progress)
    sequences = read_sequences(loaded, recording, chunk_tokens)
    result = Trace(recording, sequences, loaded.tokenizer, take_receipt(loaded, batch))
    if result.has_findings:
        # What still needs the model's weights is found now, so that later changes to the model don't change the trace.
        with evaluation_mode(loaded.model):
            _ = result.findings.lock, result.findings.movers, result.findings.output_channel_norms
    return result
