"""What is measured of a model on random sequences: preferred tokens, contraction of states, agreement of two models.

Axes: N sequences, V vocabulary, G groups of sequences, K preferred tokens that are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sinkscope import processes
from sinkscope.arguments import BIAS_SEQUENCES
from sinkscope.errors import InputError
from sinkscope.initial_bias.contraction import Contraction, contraction, contraction_observables
from sinkscope.measures.token_preference import (
    prediction_ratio,
    prediction_surprise,
    probability_ratio,
    uniform_entropy,
)
from sinkscope.models.anatomy import anatomy_of, check_every_layer, input_device
from sinkscope.models.loaded import LoadedModel
from sinkscope.models.token_batches import TokenBatch
from sinkscope.statistics import bootstrap_mean_interval, bootstrap_tail, rank_correlation
from sinkscope.tracing.overflow import overflow
from sinkscope.tracing.recorder import Recorder
from sinkscope.tracing.single_reader import evaluation_mode

NUM_PREFERRED = 10
NUM_GROUPS = BIAS_SEQUENCES
"""Groups of sequences. A jackknife that leaves out two at a time gives the error of a rank correlation."""
CHUNK_TOKENS = 1 << 14
MOST_PROBABILITIES = 1 << 29
"""Next-token probabilities of one model held at once, 2 GiB: sequences times vocabulary."""


class Agreement(NamedTuple):
    """How far two models prefer the same tokens."""

    correlation: float
    """Of the ranks of their mean next-token probabilities."""
    values: np.ndarray
    """Jackknife values with that mean, from which its interval over sequences is taken."""


@dataclass(frozen=True)
class BiasMeasurement:
    """What was measured of one model on one batch of random tokens."""

    name: str
    values: dict[str, np.ndarray]
    """By quantity, one value for each sequence; the quantity is their mean."""
    group_probability_GV: np.ndarray
    """Mean next-token probabilities of each group of sequences."""
    preferred_K: np.ndarray
    """The tokens that are most probable on average, most probable first."""
    predicted_share_K: np.ndarray
    """Share of sequences in which each is the most likely next token."""
    contraction: Contraction

    @cached_property
    def ceiling(self) -> Agreement:
        """The agreement of the model with itself on other sequences: no other model can be expected to agree more."""
        return agreement(self, self)

    @property
    def probability_V(self) -> np.ndarray:
        """Mean next-token probabilities: what the model prefers whatever it reads."""
        return self.group_probability_GV.mean(0)


@dataclass(frozen=True)
class ControlResult:
    """One model under a control: each quantity by sequence, and how far it still prefers the same tokens."""

    values: dict[str, np.ndarray]
    agreement: Agreement


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint along the training of the model."""

    name: str
    step: int | None
    measurement: BiasMeasurement
    agreement: Agreement
    """With the initial weights."""
    other_seeds: list[float]
    """The same with initial weights from other seeds; an agreement no larger than these means nothing."""


@dataclass(frozen=True, kw_only=True)
class BiasMeasurements:
    """All that was measured of a configuration or a model."""

    name: str
    model: LoadedModel
    """The model, or the first that was drawn from the configuration."""
    batch: TokenBatch
    seeds: tuple[int | None, ...]
    """(None,) for a model that had weights already."""
    baseline: list[BiasMeasurement]
    """One for each seed."""
    controls: dict[str, list[ControlResult]]
    refused: dict[str, str]
    """Controls that the family cannot honour, with the reason."""
    checkpoints: list[Checkpoint]

    @property
    def vocabulary(self) -> int:
        return self.baseline[0].group_probability_GV.shape[1]


def measure_bias(loaded: LoadedModel, batch: TokenBatch) -> BiasMeasurement:
    """The preference and the contraction of a model on a batch of random tokens, shared among processes."""
    anatomy = anatomy_of(loaded.model)
    check_every_layer(anatomy, "The bias of a model")
    _check_size(batch, vocabulary_of(loaded))
    recorder = Recorder(anatomy, contraction_observables(batch.length), joinable=True)
    parts = []
    # Only the last position is needed of the logits, which are the largest tensor.
    for ids_BT in processes.share(batch.ids).split(max(1, CHUNK_TOKENS // batch.length)):
        with evaluation_mode(loaded.model), torch.no_grad(), recorder.listening(tuple(ids_BT.shape)):
            logits = loaded.model(ids_BT.to(input_device(anatomy)), logits_to_keep=1, use_cache=False).logits
        parts.append(logits[:, -1].float().softmax(-1).cpu())
    probability_NV = torch.cat([part for share in processes.gathered(parts) for part in share])
    recorder.join_processes()
    states = contraction(recorder, batch.length)
    if not torch.isfinite(probability_NV).all():
        raise overflow(loaded.model, "in the logits at the last position")
    if not np.isfinite(states.top_share_S).all():
        raise InputError(f"The states of {loaded.name} are all 0, so they have no direction. Are its weights all 0?")
    predicted_N = probability_NV.argmax(-1)
    values = _preference(probability_NV, predicted_N) | {
        "inter_cosine": states.inter_SN[-1],
        "intra_cosine": states.intra_SN[-1],
    }
    preferred_K = probability_NV.mean(0).topk(min(NUM_PREFERRED, probability_NV.shape[1])).indices
    return BiasMeasurement(
        name=loaded.name,
        values=values,
        group_probability_GV=np.stack([group.mean(0).numpy() for group in probability_NV.tensor_split(NUM_GROUPS)]),
        preferred_K=preferred_K.numpy(),
        predicted_share_K=(predicted_N[:, None] == preferred_K).double().mean(0).numpy(),
        contraction=states,
    )


def vocabulary_of(loaded: LoadedModel) -> int:
    """The number of tokens in a model's output."""
    head: Any = loaded.model.get_output_embeddings()
    return head.weight.shape[0]


def _check_size(batch: TokenBatch, vocabulary: int) -> None:
    most = MOST_PROBABILITIES // vocabulary
    if not BIAS_SEQUENCES <= batch.num_sequences <= most:
        raise InputError(
            f"`num_sequences={batch.num_sequences}` must be from {BIAS_SEQUENCES} to {most} "
            f"for a vocabulary of {vocabulary} tokens. "
            f"Give `num_sequences={min(most, max(BIAS_SEQUENCES, batch.num_sequences))}`."
        )


def _preference(probability_NV: Tensor, predicted_N: Tensor) -> dict[str, np.ndarray]:
    """The quantities of the table bias that come from predictions, by sequence."""
    num_sequences, vocabulary = probability_NV.shape
    surprise_N = prediction_surprise(predicted_N)
    values = {
        "prediction_ratio": prediction_ratio(predicted_N, vocabulary),
        "probability_ratio": probability_ratio(probability_NV),
        "entropy": surprise_N,
        "entropy_deficit": uniform_entropy(num_sequences, vocabulary) - surprise_N,
    }
    return {name: value.numpy() for name, value in values.items()}


def sample_interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ends of the 95 % interval of the mean over the first axis; NaN for fewer than 5 values."""
    if len(values) < 5:
        return np.full(values.shape[1:], np.nan), np.full(values.shape[1:], np.nan)
    confidence = 1 - 2 * bootstrap_tail(len(values), 0.95)
    # Fewer resamples of many values, which take memory and need less: their tails are short.
    num_resamples = 10_000 if len(values) <= 256 else 2000
    return bootstrap_mean_interval(values, confidence=confidence, num_resamples=num_resamples)


def agreement(one: BiasMeasurement, other: BiasMeasurement) -> Agreement:
    """`preference_correlation` with its error, by a jackknife that leaves out each pair of groups of sequences in turn.

    Only the spread of the jackknife's pseudo-values is used, around the correlation of all sequences: fewer sequences
    give a lower correlation, which would shift their mean.
    """
    correlation = preference_correlation(one, other)
    left_out = np.array([preference_correlation(one, other, left_out=pair) for pair in range(NUM_GROUPS // 2)])
    return Agreement(correlation, correlation - (len(left_out) - 1) * (left_out - left_out.mean()))


def preference_correlation(one: BiasMeasurement, other: BiasMeasurement, left_out: int | None = None) -> float:
    """The rank correlation of two models' mean next-token probabilities, each over different sequences.

    Two models may react alike to a sequence without preferring any token, so they are compared on different ones: the
    even groups of one model with the odd groups of the other, and the other way round. A model compared with itself in
    this way gives the ceiling. `left_out` is a pair of groups, one even and one odd.
    """
    pairs = np.arange(NUM_GROUPS).reshape(-1, 2)
    if left_out is not None:
        pairs = np.delete(pairs, left_out, 0)
    even_one, odd_one = (one.group_probability_GV[pairs[:, half]].mean(0) for half in (0, 1))
    even_other, odd_other = (other.group_probability_GV[pairs[:, half]].mean(0) for half in (0, 1))
    return (rank_correlation(even_one, odd_other) + rank_correlation(odd_one, even_other)) / 2
