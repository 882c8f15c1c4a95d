"""trace(model, batch): the whole sink chain of a causal language model in one pass, and what was found in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor
from transformers import PreTrainedModel

from sinkscope.capture.findings import NEEDED, Findings
from sinkscope.capture.observables import EFFECTIVE_RANK, Observable, resolved
from sinkscope.capture.recorder import CHUNK_TOKENS, Progress, Recording, evaluation_mode, record
from sinkscope.capture.summary import story, trace_summary
from sinkscope.capture.tables import recorded_tables, trace_tables
from sinkscope.capture.trace_schemas import TRACE_TABLES, schema_with
from sinkscope.models.loading import LoadedModel, load
from sinkscope.models.token_batches import TokenBatch, given_batch
from sinkscope.results.result import Result, view
from sinkscope.results.run_folder import RunFolder
from sinkscope.results.tables import Schema

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class Trace(Result):
    """A recording, what was found in it, and both as tables."""

    headline = ("sinks", "position", "rate", "low", "high", "num_layers", "mean_attention")
    recording: Recording

    @cached_property
    def findings(self) -> Findings:
        return Findings(self.recording)

    @cached_property
    def tables(self) -> Mapping[str, Mapping]:
        """Columns by table: sinks, positions, neurons, dimensions, heads, layers, distances. If the findings lack an
        observable, only the tables that the observables fill."""
        return trace_tables(self.findings) if self.has_findings else recorded_tables(self.recording)

    @property
    def has_findings(self) -> bool:
        """Whether all that the findings need was recorded."""
        return self.recording.by_layer.keys() >= NEEDED

    @cached_property
    def summary(self) -> dict:
        return trace_summary(self.findings)

    @cached_property
    def story(self) -> str:
        if self.has_findings:
            return story(self.findings)
        return f"A recording of {self.recording.model_name}: {', '.join(self.recording.by_layer)}."

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

    def plot(self) -> Figure:
        """The chain from left to right as a matplotlib figure. Needs the extra `report`."""
        return view().chain_figure(self.tables, self.summary)

    def write(self, folder: RunFolder) -> None:
        if self.has_findings:
            super().write(folder)
        else:
            self.write_tables(folder)


def trace(
    model: LoadedModel | PreTrainedModel | str,
    batch: TokenBatch | Tensor,
    *,
    observables: Iterable[Observable | str] | None = None,
    keys: Sequence[int] | None = None,
    effective_rank: bool = True,
    chunk_tokens: int = CHUNK_TOKENS,
    progress: Progress | None = None,
) -> Trace:
    """The sink chain of a model on a batch of tokens.

    `observables` says what to record, by name or as records of your own; by default all of CHAIN. `keys` restricts
    attention to chosen key positions. `effective_rank=False` leaves out the only number that needs a decomposition.
    Batches of more than `chunk_tokens` tokens are run in chunks, whose statistics join exactly.
    """
    loaded = load(model)
    batch = batch if isinstance(batch, TokenBatch) else given_batch(batch, model=loaded.model)
    wanted = [o for o in resolved(observables) if effective_rank or o is not EFFECTIVE_RANK]
    result = Trace(record(loaded, batch, wanted, keys=keys, chunk_tokens=chunk_tokens, progress=progress))
    if result.has_findings:
        # What still needs the model's weights is found now, so that later changes to the model don't change the trace.
        with evaluation_mode(loaded.model):
            _ = result.findings.lock, result.findings.movers
    return result
