"""The sequences that an intervention reads to learn a mean, or values, of the model before it acts."""

from __future__ import annotations

from typing import Any

from sinkscope.models.given_ids import given_batch
from sinkscope.models.loaded import Model, bare_model
from sinkscope.models.prompts import check_one_length
from sinkscope.models.token_batches import TokenBatch, context_length, token_batch

MIN_CALIBRATION = 64
"""Sequences that a mean needs at least, and that are drawn where a user gives none."""
DRAWN_LENGTH, DRAWN_SEED = 64, 1
"""Of the sequences that are drawn: the least number of tokens, and a seed other than the one with which `token_batch`
draws the sequences that are judged."""


def batch_of(model: Model, source: Any) -> TokenBatch:
    """A batch as it is, or a user's ids as a batch."""
    batch = source if isinstance(source, TokenBatch) else given_batch(source, model=model)
    check_one_length(batch, "interventions are calibrated by position")
    return batch


def calibration_of(model: Model, source: Any, position: int = 0) -> tuple[TokenBatch, str]:
    """The calibration batch, and a description of it: the user's batch or, for None, random sequences that have the
    position in their earlier half."""
    if source is not None:
        batch = batch_of(model, source)
        return batch, f"{batch.num_sequences} sequences of {batch.length} {batch.kind} tokens"
    length, most = max(DRAWN_LENGTH, 2 * (position + 1)), context_length(bare_model(model))
    length = length if most is None else min(length, most)
    batch = token_batch(model, num_sequences=MIN_CALIBRATION, length=length, seed=DRAWN_SEED)
    return batch, f"{MIN_CALIBRATION} sequences of {length} random tokens, drawn for it"
