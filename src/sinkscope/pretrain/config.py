"""The configuration of a training run: one frozen object, filled from a preset, a YAML file and options.

A YAML file may hold three mappings, each of which leaves out what it doesn't change:

    preset: 30m                     what the others change; tiny without it
    model: {num_hidden_layers: 12}  the decoder's shape
    training: {steps: 20000, learning_rate: 0.002}

Unknown keys are refused. The whole configuration is written to the run folder, and a run is resumed only with an equal
one. torch is imported inside the functions: the command line reads this module for its options.
"""

from __future__ import annotations

import difflib
import json
import reprlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from sinkscope.errors import InputError
from sinkscope.measures.sink_score import LATER_QUERIES
from sinkscope.results.validated import LARGEST_FLOAT, NAME, Int, Maybe, read_yaml, shortened
from sinkscope.user_paths import user_path

if TYPE_CHECKING:
    from sinkscope.pretrain.decoder_config import DecoderConfig


LARGEST_COUNT = 1 << 31
OPTIMISERS = ("adamw", "muon")
SCHEDULES = ("cosine", "constant")
RECIPE = {
    "preset": Maybe(NAME),
    # Bounded here, because these modules are built one by one before the memory they need is known.
    "model": Maybe({name: Maybe(Int(1, 4096)) for name in ("num_hidden_layers", "num_attention_heads")}),
    "training": Maybe({}),
    "vocab_size": Maybe(Int(1, 1 << 26)),
}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tiny": dict(
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=192,
        max_position_embeddings=128,
    ),
    "30m": dict(vocab_size=50257, hidden_size=320, num_hidden_layers=12, num_attention_heads=5, intermediate_size=864),
    # The paper's: 12 layers of width 768 with the tied vocabulary of GPT-2 make 152 million.
    "152m": dict(
        vocab_size=50257, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072
    ),
    "1b": dict(
        vocab_size=50257,
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=8192,
        max_position_embeddings=2048,
        rope_theta=500000.0,
    ),
}
"""By name, the fields of DecoderConfig that differ from its defaults."""

DEFAULT_PRESET = "tiny"


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How a decoder is trained: each field with its help. Counts of steps are counts of updates."""

    steps: Annotated[int, "Updates"]
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

    evaluate_every: Annotated[int, "Steps between held-out losses"]
    evaluation_sequences: Annotated[int, "Sequences in a held-out loss"] = 64
    probe_every: Annotated[int, "Steps between probes of the six observables; 0: none"]
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
                raise _wrong(f"`{name}` of at least 0", getattr(self, name))
        if self.skipped_targets >= self.sequence_length:
            raise _wrong(f"`skipped_targets` below `sequence_length={self.sequence_length}`", self.skipped_targets)
        if self.seed >= 2**63:
            raise _wrong("`seed` below 2^63", self.seed)
        for name, value in asdict(self).items():
            if isinstance(value, float) and not abs(value) <= LARGEST_FLOAT:
                raise _wrong(f"a finite number for `{name}`", value)
        for name in ("learning_rate", "clip", "epsilon"):
            if getattr(self, name) <= 0:
                raise _wrong(f"`{name}` above 0", getattr(self, name))
        for name in ("decay_share", "final_learning_rate_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise _wrong(f"`{name}` between 0 and 1", getattr(self, name))
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise _wrong(f"`{name}` from 0 to below 1", getattr(self, name))
        for name, choices in (("optimiser", OPTIMISERS), ("schedule", SCHEDULES)):
            if getattr(self, name) not in choices:
                raise _wrong(f"`{name}` as one of {', '.join(choices)}", repr(getattr(self, name)))
        if self.micro_batch_size is not None:
            _check_count(self, "micro_batch_size", 1)
        length = min(self.probe_length, self.sequence_length)
        if self.probe_every and length <= LATER_QUERIES:
            raise _wrong(f"more than {LATER_QUERIES} tokens to probe, or `probe_every=0`", length)
        if outside := [step for step in self.snapshots if not 0 <= step <= self.steps]:
            raise _wrong(f"`snapshots` at steps from 0 to {self.steps}", outside[0])

    def is_due(self, interval: int, step: int) -> bool:
        """Whether a task of every `interval` steps, and of the last one, is due after `step`; 0 means never."""
        return interval > 0 and (step % interval == 0 or step == self.steps)

    def rows(self, rank: int, num_processes: int) -> list[slice]:
        """The rows of each batch that a process works on, one slice for each of its forward passes."""
        if self.batch_size % num_processes:
            raise _wrong(f"`batch_size` divisible by the number of processes, {num_processes}", self.batch_size)
        share = self.batch_size // num_processes
        micro = min(self.micro_batch_size or share, share)
        if share % micro:
            raise _wrong(f"`micro_batch_size` that divides the {share} sequences of a process", micro)
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
    evaluate_every: int
    evaluation_sequences: int
    probe_every: int
    probe_length: int
    probe_sequences: int
    checkpoint_every: int
    keep_checkpoints: int
    snapshots: tuple[int, ...]


def changed(base: Any, changes: Mapping[str, Any], what: str) -> Any:
    """A frozen configuration with some entries changed; an unknown key or a value of another type is refused."""
    known = {field.name: getattr(base, field.name) for field in fields(base)}
    # YAML reads 1e-3, without a point, as text.
    changes = {key: _as_float(value) if isinstance(known.get(key), float) else value for key, value in changes.items()}
    optional = {field.name for field in fields(base) if "None" in str(field.type)}
    for key, value in changes.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            raise InputError(
                expected=f"a key of the {what} configuration: {', '.join(known)}",
                found=reprlib.repr(key),
                next_step=f"Write {near[0]}" if near else "Leave it out",
            )
        if not _same_kind(known[key], value) and not (value is None and key in optional):
            raise InputError(
                expected=f"{key} like {known[key]!r}",
                found=reprlib.repr(value),
                next_step=f"Correct {key} in `config`",
            )
    return replace(base, **{key: tuple(value) if isinstance(value, list) else value for key, value in changes.items()})


def with_defaults(training: Mapping[str, Any]) -> dict[str, Any]:
    """The training section of a run's config.yaml; keys that older versions did not have get their defaults."""
    defaults = {field.name: field.default for field in fields(TrainingConfig) if field.default is not MISSING}
    return defaults | dict(training)


def read_recipe(path: Path, keys_of_a_run: Set[str]) -> dict[str, Any]:
    """The entries of a configuration file, or of the config.yaml of a run; anything else is refused."""
    found = read_yaml(path, Maybe(RECIPE)) or {}
    value = {name: entry for name, entry in found.items() if entry is not None}
    unknown = sorted(value.keys() - {"preset", "model", "training"})
    if unknown and value.keys() != keys_of_a_run:
        raise InputError(
            expected="the keys preset, model and training",
            found=f"{shortened(', '.join(unknown))} in {path.name}",
            next_step="Move it below model or training, or leave it out",
        )
    return value


def _as_float(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def _same_kind(example: Any, value: Any) -> bool:
    if isinstance(value, bool) or isinstance(example, bool):
        return isinstance(value, bool) and isinstance(example, bool)
    if example is None:
        return isinstance(value, int)
    if isinstance(example, tuple):
        return isinstance(value, list | tuple) and all(type(item) is int for item in value)
    if isinstance(example, int):
        return isinstance(value, int)
    return isinstance(value, type(example))


def _check_count(config: TrainingConfig, name: str, least: int) -> None:
    if getattr(config, name) < least:
        raise _wrong(f"`{name}` of at least {least}", getattr(config, name))
    if getattr(config, name) > LARGEST_COUNT:
        raise _wrong(f"`{name}` of at most {LARGEST_COUNT}", reprlib.repr(getattr(config, name)))


def _wrong(expected: str, found: object) -> InputError:
    return InputError(expected=expected, found=str(found), next_step="Correct it in `config`, or where it was given")


# Learning rates are those usual for the size; batches hold 2^11, 2^16, 2^19 and 2^20 tokens.
TRAINING_PRESETS: dict[str, TrainingConfig] = {
    "tiny": TrainingConfig(
        steps=200,
        batch_size=16,
        sequence_length=128,
        learning_rate=3e-3,
        warmup_steps=20,
        evaluate_every=50,
        evaluation_sequences=32,
        probe_every=100,
        probe_sequences=16,
        checkpoint_every=100,
    ),
    "30m": TrainingConfig(
        steps=4000,
        batch_size=128,
        sequence_length=512,
        learning_rate=2e-3,
        warmup_steps=200,
        evaluate_every=250,
        evaluation_sequences=256,
        probe_every=500,
        checkpoint_every=500,
    ),
    "152m": TrainingConfig(
        steps=38000,
        batch_size=512,
        micro_batch_size=64,
        sequence_length=1024,
        learning_rate=1e-3,
        warmup_steps=1000,
        evaluate_every=500,
        evaluation_sequences=512,
        probe_every=250,
        checkpoint_every=1000,
    ),
    "1b": TrainingConfig(
        steps=20000,
        batch_size=512,
        micro_batch_size=8,
        sequence_length=2048,
        learning_rate=4e-4,
        warmup_steps=1000,
        evaluate_every=500,
        evaluation_sequences=256,
        probe_every=250,
        checkpoint_every=500,
    ),
}


def preset(name: str) -> dict[str, Any]:
    """The fields of the preset called `name`."""
    if name not in PRESETS:
        raise InputError(
            expected=f"a preset: {', '.join(PRESETS)}",
            found=repr(name),
            next_step="Choose one as `config`, or give a YAML file",
        )
    return dict(PRESETS[name])


def decoder_config(fields: Mapping[str, Any]) -> DecoderConfig:
    """The configuration with these fields, as they stand in a YAML file; unknown ones are refused."""
    from sinkscope.pretrain.decoder_config import DecoderConfig

    known = DecoderConfig.__annotations__.keys()
    if unknown := fields.keys() - known:
        raise InputError(
            expected=f"fields of a model: {', '.join(known)}",
            found=", ".join(sorted(map(str, unknown))),
            next_step="Remove them from the configuration",
        )
    try:
        return DecoderConfig(**fields)
    except TypeError as error:
        raise InputError(
            expected="values of the right type for the model", found=str(error), next_step="Correct them below model"
        ) from error


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


def resolve(
    config: str,
    *,
    variant: str | None = None,
    data: Sequence[str],
    validation: Sequence[str] = (),
    training: Mapping[str, Any],
) -> PretrainConfig:
    """The configuration that a preset's name or a YAML file gives, changed by a variant and by training entries."""
    model, vocab_size, settings = _recipe(config)
    settings = changed(settings, {key: value for key, value in training.items() if value is not None}, "training")
    if variant is not None:
        model["attention_variant"] = variant
    if training.get("seed") is not None or "seed" not in model:
        model["seed"] = settings.seed
    vocab_size = model.get("vocab_size", vocab_size)
    if type(length := model.get("max_position_embeddings", 0)) is int:  # else refused below
        model["max_position_embeddings"] = max(settings.sequence_length, length)
    import torch  # here: what could be judged without it has been

    from sinkscope.pretrain.decoder import Decoder

    with torch.device("meta"):  # refuses a shape or a variant that cannot be, at no cost
        Decoder(decoder_config(model | {"vocab_size": vocab_size}))
    return PretrainConfig(
        data=list(data), validation=list(validation), model=model, vocab_size=vocab_size, training=settings
    )


def _recipe(config: str) -> tuple[dict[str, Any], int, TrainingConfig]:
    """The model, the vocabulary's size and the training of a preset, of a file that changes one, or of a run."""
    is_file = config.endswith((".yaml", ".yml"))
    file: dict[str, Any] = read_recipe(user_path(config), KEYS_OF_A_RUN) if is_file else {"preset": config}
    name = file.get("preset", DEFAULT_PRESET)
    model = preset(name)
    vocab_size = model.pop("vocab_size")
    training = file.get("training", {})
    if "vocab_size" in file:  # config.yaml of a run: it is complete, so the preset adds nothing
        model, vocab_size, training = {}, file["vocab_size"], with_defaults(training)
    return model | file.get("model", {}), vocab_size, changed(TRAINING_PRESETS[name], training, "training")
