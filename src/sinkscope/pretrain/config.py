"""The configuration of a training run, one frozen object with its checks.

It is written to the run folder whole, and a run is resumed only with an equal one. This file imports no torch: the
command line makes its options from the fields.
"""

from __future__ import annotations

import json
import reprlib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypedDict

from sinkscope.errors import InputError
from sinkscope.measures.sink_score import LATER_QUERIES
from sinkscope.results.validated import LARGEST_FLOAT, UnusableFileError, read_yaml

LARGEST_COUNT = 1 << 31
OPTIMISERS = ("adamw", "muon")
SCHEDULES = ("cosine", "constant")
WHERE_TO_CORRECT = "Correct it in `config`, or where it was given."


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How a decoder is trained: each field with its help. Counts of steps are counts of updates."""

    steps: Annotated[int, "Updates in all"]
    batch_size: Annotated[int, "Sequences in an update, over all processes"]
    micro_batch_size: Annotated[
        int | None, "Sequences in one forward pass of one process; by default its whole share of the batch"
    ] = None
    sequence_length: Annotated[int, "Tokens in a sequence"]
    skipped_targets: Annotated[
        int, "First targets of each window that the loss leaves out; with 1, position 0 predicts nothing"
    ] = 0
    seed: Annotated[int, "Seed of the initial weights and of the order of the data"] = 0

    learning_rate: Annotated[float, "Peak learning rate"]
    schedule: Annotated[str, "cosine or constant"] = "cosine"
    warmup_steps: Annotated[int, "Steps of linear warm-up"]
    decay_share: Annotated[float, "Share of the steps, at the end, in which the constant schedule falls"] = 0.2
    final_learning_rate_share: Annotated[float, "Learning rate at the end, as a share of the peak"] = 0.1
    optimiser: Annotated[str, "adamw or muon"] = "adamw"
    weight_decay: Annotated[float, "Weight decay of matrices"] = 0.1
    beta1: Annotated[float, "Decay of the optimiser's mean of gradients"] = 0.9
    beta2: Annotated[float, "Decay of the optimiser's mean of squared gradients"] = 0.95
    epsilon: Annotated[float, "Added to the optimiser's divisor"] = 1e-8
    clip: Annotated[float, "Largest norm of the gradient of all parameters together"] = 1.0
    deterministic: Annotated[
        bool, "On a GPU, add up gradients in one order, so that a run comes out the same to the bit; slower"
    ] = False

    evaluate_every: Annotated[int, "Steps between held-out losses"]
    evaluation_sequences: Annotated[int, "Sequences in a held-out loss"] = 64
    probe_every: Annotated[int, "Steps between probes of the chain; 0 for none"]
    probe_length: Annotated[int, "Tokens in a probed sequence"] = 64
    probe_sequences: Annotated[int, "Sequences in a probe"] = 32
    checkpoint_every: Annotated[int, "Steps between checkpoints"]
    keep_checkpoints: Annotated[int, "Newest checkpoints to keep; two, in case one is damaged"] = 2
    snapshots: Annotated[tuple[int, ...], "Steps whose weights are kept for good, as models that can be loaded"] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "snapshots", tuple(sorted(set(self.snapshots))))
        for name in ("steps", "batch_size", "sequence_length", "evaluation_sequences", "keep_checkpoints"):
            _check_count(self, name, 1)
        for name in ("evaluate_every", "checkpoint_every", "probe_length", "probe_sequences"):
            _check_count(self, name, 1)
        for name in ("warmup_steps", "probe_every", "skipped_targets"):
            _check_count(self, name, 0)
        for name in ("seed", "weight_decay"):
            if getattr(self, name) < 0:
                raise _wrong(name, "at least 0", getattr(self, name))
        if self.skipped_targets >= self.sequence_length:
            raise _wrong("skipped_targets", f"below `sequence_length={self.sequence_length}`", self.skipped_targets)
        if self.seed >= 2**63:
            raise _wrong("seed", "below 2^63", self.seed)
        for name, value in asdict(self).items():
            if isinstance(value, float) and not abs(value) <= LARGEST_FLOAT:
                raise _wrong(name, "a finite number", value)
        for name in ("learning_rate", "clip", "epsilon"):
            if getattr(self, name) <= 0:
                raise _wrong(name, "above 0", getattr(self, name))
        for name in ("decay_share", "final_learning_rate_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise _wrong(name, "between 0 and 1", getattr(self, name))
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise _wrong(name, "from 0 to below 1", getattr(self, name))
        for name, choices in (("optimiser", OPTIMISERS), ("schedule", SCHEDULES)):
            if getattr(self, name) not in choices:
                raise _wrong(name, f"one of {', '.join(choices)}", repr(getattr(self, name)))
        if self.micro_batch_size is not None:
            _check_count(self, "micro_batch_size", 1)
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
    schedule: str
    warmup_steps: int
    decay_share: float
    final_learning_rate_share: float
    optimiser: str
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

    data: list[str]
    validation: list[str]
    model: dict[str, Any]
    """Fields of the decoder's configuration; `vocab_size` only where it was asked for, else the data decides."""
    vocab_size: int
    """Vocabulary of the BPE, which is trained if the data are texts."""
    training: TrainingConfig

    def plain(self) -> dict[str, Any]:
        """The configuration in the types that JSON and YAML have."""
        return json.loads(json.dumps(asdict(self)))


KEYS_OF_A_RUN = {field.name for field in fields(PretrainConfig)}


def is_begun(run: Path, *, overwrite: bool) -> bool:
    """Whether the folder holds a training run that can go on, by its config.yaml.

    One with checkpoints and another config.yaml is refused, unless it is to be overwritten: the file can be put back.
    """
    try:
        found = read_yaml(run / "config.yaml", {"model": {}, "training": {}})
        wrong = [f"it has an unknown key {reprlib.repr(key)}" for key in found if key not in KEYS_OF_A_RUN]
        wrong += [f"it has no key {key!r}" for key in sorted(KEYS_OF_A_RUN - found.keys())]
    except UnusableFileError as error:
        wrong = [error.reason]
    if wrong and not overwrite and any((run / "checkpoints").glob("step-*")):
        raise InputError(
            f"The checkpoints in {run} are whole, but its config.yaml is not the one that the run began with: "
            f"{wrong[0]}. Put it back."
        )
    return not wrong


def check_probe_length(length: int, advice: str) -> None:
    """Refuses sequences in which no key has the later queries that it takes to be judged."""
    if length <= LATER_QUERIES:
        raise InputError(f"A probe needs more than {LATER_QUERIES} tokens in a sequence, not {length}. {advice}")


def _check_count(config: TrainingConfig, name: str, least: int) -> None:
    if getattr(config, name) < least:
        raise _wrong(name, f"at least {least}", getattr(config, name))
    if getattr(config, name) > LARGEST_COUNT:
        raise _wrong(name, f"at most {LARGEST_COUNT}", reprlib.repr(getattr(config, name)))


def _wrong(name: str, allowed: str, value: object) -> InputError:
    return InputError(f"`{name}` must be {allowed}, not {value}. {WHERE_TO_CORRECT}")
