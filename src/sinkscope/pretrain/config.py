"""The configuration of a training run, one frozen object with its checks.

It is written to the run folder whole, and a run is resumed only with an equal one. This file imports no torch: the
command line makes its options from the fields.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from annotated_types import Interval

from sinkscope.errors import InputError
from sinkscope.measures.sink_score import LATER_QUERIES
from sinkscope.pretrain.text_sources import LARGEST_VOCABULARY
from sinkscope.results.validated import LARGEST_FLOAT, Name, UnusableFileError, read_yaml, strictly

LARGEST_COUNT = 1 << 31
WHERE_TO_CORRECT = "Correct it in `config`, or where it was given."

Count = Annotated[int, Interval(ge=1, le=LARGEST_COUNT)]
CountOr0 = Annotated[int, Interval(ge=0, le=LARGEST_COUNT)]
Above0 = Annotated[float, Interval(gt=0, le=LARGEST_FLOAT)]
Share = Annotated[float, Interval(ge=0, le=1)]
Decay = Annotated[float, Interval(ge=0, lt=1)]


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How a decoder is trained: each field with its range and its help. Counts of steps are counts of updates.

    pydantic checks types and ranges in `changed` and `read_config`; __post_init__, what two fields say together.
    """

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False}  # noqa: RUF012

    steps: Annotated[Count, "Updates in all"]
    batch_size: Annotated[Count, "Sequences in an update, over all processes"]
    micro_batch_size: Annotated[
        Count | None, "Sequences in one forward pass of one process; by default its whole share of the batch"
    ] = None
    sequence_length: Annotated[Count, "Tokens in a sequence"]
    skipped_targets: Annotated[
        CountOr0, "First targets of each window that the loss leaves out; with 1, position 0 predicts nothing"
    ] = 0
    seed: Annotated[int, Interval(ge=0, lt=2**63), "Seed of the initial weights and of the order of the data"] = 0

    learning_rate: Annotated[Above0, "Peak learning rate"]
    schedule: Annotated[Literal["cosine", "constant"], "cosine or constant"] = "cosine"
    warmup_steps: Annotated[CountOr0, "Steps of linear warm-up"]
    decay_share: Annotated[Share, "Share of the steps, at the end, in which the constant schedule falls"] = 0.2
    final_learning_rate_share: Annotated[Share, "Learning rate at the end, as a share of the peak"] = 0.1
    optimiser: Annotated[Literal["adamw", "muon"], "adamw or muon"] = "adamw"
    weight_decay: Annotated[float, Interval(ge=0, le=LARGEST_FLOAT), "Weight decay of matrices"] = 0.1
    beta1: Annotated[Decay, "Decay of the optimiser's mean of gradients"] = 0.9
    beta2: Annotated[Decay, "Decay of the optimiser's mean of squared gradients"] = 0.95
    epsilon: Annotated[Above0, "Added to the optimiser's divisor"] = 1e-8
    clip: Annotated[Above0, "Largest norm of the gradient of all parameters together"] = 1.0
    deterministic: Annotated[
        bool, "On a GPU, add up gradients in one order, so that a run comes out the same to the bit; slower"
    ] = False

    evaluate_every: Annotated[Count, "Steps between held-out losses"]
    evaluation_sequences: Annotated[Count, "Sequences in a held-out loss"] = 64
    probe_every: Annotated[CountOr0, "Steps between probes of the chain; 0 for none"]
    probe_length: Annotated[Count, "Tokens in a probed sequence"] = 64
    probe_sequences: Annotated[Count, "Sequences in a probe"] = 32
    checkpoint_every: Annotated[Count, "Steps between checkpoints"]
    keep_checkpoints: Annotated[Count, "Newest checkpoints to keep; two, in case one is damaged"] = 2
    snapshots: Annotated[tuple[int, ...], "Steps whose weights are kept for good, as models that can be loaded"] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "snapshots", tuple(sorted(set(self.snapshots))))
        if self.skipped_targets >= self.sequence_length:
            raise _wrong("skipped_targets", f"below `sequence_length={self.sequence_length}`", self.skipped_targets)
        if self.probe_every:
            length = min(self.probe_length, self.sequence_length)
            check_probe_length(length, "Raise `probe_length` and `sequence_length`, or give `probe_every=0`.")
        if outside := [step for step in self.snapshots if not 0 <= step <= self.steps]:
            raise _wrong("snapshots", f"steps from 0 to {self.steps}", outside[0])

    def is_due(self, interval: int, step: int) -> bool:
        """Whether a task of every `interval` steps, and of the last one, is due after `step`; 0 means never."""
        return interval > 0 and (step % interval == 0 or step == self.steps)

    def rows(self, rank: int, num_processes: int) -> list[slice]:
        """The rows of each batch that a process works on, one slice for each of its forward passes."""
        if self.batch_size % num_processes:
            raise _wrong("batch_size", f"divisible by the {num_processes} processes", self.batch_size)
        share = self.batch_size // num_processes
        micro = min(self.micro_batch_size or share, share)
        if share % micro:
            raise _wrong("micro_batch_size", f"a divisor of the {share} sequences of a process", micro)
        return [slice(start, start + micro) for start in range(rank * share, (rank + 1) * share, micro)]


class TrainingOptions(TypedDict, total=False):
    """The fields of TrainingConfig as keyword arguments of `train`."""

    # Written again: no type checker takes a TypedDict from a dataclass. A test holds the two equal.
    steps: int
    batch_size: int
    micro_batch_size: int | None
    sequence_length: int
    skipped_targets: int
    seed: int
    learning_rate: float
    schedule: Literal["cosine", "constant"]
    warmup_steps: int
    decay_share: float
    final_learning_rate_share: float
    optimiser: Literal["adamw", "muon"]
    weight_decay: float
    beta1: float
    beta2: float
    epsilon: float
    clip: float
    deterministic: bool
    evaluate_every: int
    evaluation_sequences: int
    probe_every: int
    probe_length: int
    probe_sequences: int
    checkpoint_every: int
    keep_checkpoints: int
    snapshots: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """What one training run was asked to do; written to config.yaml."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    data: list[Name]
    validation: list[Name]
    model: dict[str, Any]
    """Fields of the decoder's configuration; `vocab_size` only where it was asked for, else the data decides."""
    vocab_size: Annotated[int, Interval(ge=1, le=LARGEST_VOCABULARY)]
    """Vocabulary of the BPE, which is trained if the data are texts."""
    training: TrainingConfig

    def plain(self) -> dict[str, Any]:
        """The configuration in the types that JSON and YAML have."""
        return json.loads(json.dumps(asdict(self)))


KEYS_OF_A_RUN = {field.name for field in fields(PretrainConfig)}


def read_config(run: Path) -> PretrainConfig:
    """What the training run in a folder was asked to do; what an older version did not write gets its default."""
    return strictly(PretrainConfig, read_yaml(run / "config.yaml", PretrainConfig))


def is_begun(run: Path, *, overwrite: bool) -> bool:
    """Whether the folder holds a training run that can go on, by its config.yaml.

    One with checkpoints and another config.yaml is refused, unless it is to be overwritten: the file can be put back.
    """
    try:
        read_config(run)
    except UnusableFileError as error:
        if not overwrite and any((run / "checkpoints").glob("step-*")):
            raise InputError(
                f"The checkpoints in {run} are whole, but its config.yaml is not the one that the run began with: "
                f"{error.reason}. Put it back."
            ) from error
        return False
    return True


def check_probe_length(length: int, advice: str) -> None:
    """Refuses sequences in which no key has the later queries that it takes to be judged."""
    if length <= LATER_QUERIES:
        raise InputError(f"A probe needs more than {LATER_QUERIES} tokens in a sequence, not {length}. {advice}")


def _wrong(name: str, allowed: str, value: object) -> InputError:
    return InputError(f"`{name}` must be {allowed}, not {value}. {WHERE_TO_CORRECT}")
