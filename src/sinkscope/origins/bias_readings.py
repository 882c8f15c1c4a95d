"""All that is read of a configuration or a model, before it becomes tables."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sinkscope.models.loading import LoadedModel
from sinkscope.models.token_batches import TokenBatch
from sinkscope.origins.bias_reading import Agreement, BiasReading


@dataclass(frozen=True)
class Controlled:
    """One model under a control: each quantity by sequence, and whether it still prefers the same tokens."""

    values: dict[str, np.ndarray]
    agreement: Agreement


@dataclass(frozen=True)
class Checkpoint:
    """One later model of a training run."""

    name: str
    step: int | None
    reading: BiasReading
    agreement: Agreement
    """With the model at the beginning."""
    other_seeds: list[float]
    """The same with beginnings drawn from other seeds, which it must exceed to mean anything."""


@dataclass(frozen=True, kw_only=True)
class BiasReadings:
    """Every reading of a configuration or a model."""

    name: str
    model: LoadedModel
    """The model, or the first that was drawn."""
    batch: TokenBatch
    seeds: tuple[int | None, ...]
    """None alone for a model that has weights."""
    untouched: list[BiasReading]
    """One for each seed."""
    controls: dict[str, list[Controlled]]
    refused: dict[str, str]
    """Controls that the family cannot honour, with the reason."""
    checkpoints: list[Checkpoint]

    @property
    def vocabulary(self) -> int:
        return self.untouched[0].group_probability_GV.shape[1]
