"""trace(model, batch): the whole sink chain of a causal language model, read in one pass, with what was found in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor
from transformers import PreTrainedModel

from sinkscope.capture.findings import Findings
from sinkscope.capture.reading import CHUNK_TOKENS, Progress, Reading, evaluation_mode, read_model
from sinkscope.capture.summary import story, trace_summary
from sinkscope.capture.trace_tables import trace_tables
from sinkscope.models.loading import LoadedModel, load
from sinkscope.models.token_batches import TokenBatch, given_batch
from sinkscope.results.run_folder import RunFolder
from sinkscope.results.trace_schemas import TRACE_TABLES


@dataclass(frozen=True)
class Trace:
    """A reading, what was found in it, and both as tables."""

    reading: Reading

    @cached_property
    def findings(self) -> Findings:
        return Findings(self.reading.cpu())

    @cached_property
    def tables(self) -> dict[str, Mapping]:
        """Columns by table: sinks, positions, neurons, dimensions, heads, layers, distances."""
        return trace_tables(self.findings)

    @cached_property
    def summary(self) -> dict:
        return trace_summary(self.findings)

    @property
    def story(self) -> str:
        return story(self.findings)

    def write(self, folder: RunFolder) -> None:
        """Writes the summary and every table into an open run folder."""
        folder.write_json("summary.json", self.summary)
        for schema in TRACE_TABLES:
            folder.write_table(schema, self.tables[schema.name])


def trace(
    model: LoadedModel | PreTrainedModel | str,
    batch: TokenBatch | Tensor,
    *,
    keys: Sequence[int] | None = None,
    effective_rank: bool = True,
    chunk_tokens: int = CHUNK_TOKENS,
    progress: Progress | None = None,
) -> Trace:
    """The sink chain of a model on a batch of tokens.

    `keys` reads chosen key positions only, `effective_rank=False` leaves out the one part that needs a decomposition,
    and batches of more than `chunk_tokens` tokens are read in chunks whose statistics merge exactly.
    """
    loaded = load(model)
    batch = batch if isinstance(batch, TokenBatch) else given_batch(batch, model=loaded.model)
    result = Trace(
        read_model(
            loaded, batch, keys=keys, effective_rank=effective_rank, chunk_tokens=chunk_tokens, progress=progress
        )
    )
    # What still needs the model's weights is found now, so that later changes to the model don't change the trace.
    with evaluation_mode(loaded.model):
        _ = result.findings.lock, result.findings.movers
    return result
