"""From a preset's name, a YAML file and options to the configuration of a training run.

A YAML file may hold three mappings, each of which leaves out what it doesn't change:

    preset: 30m                     what the others change; tiny without it
    model: {num_hidden_layers: 12}  the decoder's shape
    training: {steps: 20000, learning_rate: 0.002}

Unknown keys are refused. torch is imported inside the functions: the command line reads this module before it.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from annotated_types import Interval

from sinkscope.errors import InputError
from sinkscope.pretrain.config import KEYS_OF_A_RUN, WHERE_TO_CORRECT, PretrainConfig, TrainingConfig
from sinkscope.results.validated import (
    Name,
    UnusableFileError,
    WrongValueError,
    checked,
    read_yaml,
    refused,
    shortened,
    strictly,
)
from sinkscope.user_paths import check_path, user_path

if TYPE_CHECKING:
    from sinkscope.pretrain.decoder_config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a YAML file says. The last three stand in the config.yaml of a run alone."""

    preset: Name | None = None
    model: dict[str, Any] | None = None
    training: dict[str, Any] | None = None
    vocab_size: Annotated[int, Interval(ge=1, le=1 << 26)] | None = None
    data: Any = None
    validation: Any = None


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


WITH_HEAD_NORM = ("head_norm", "first_norm", "head_norm_gate")
DESCRIBED = {"per_head": True, "offset": True}
"""The norm as the paper describes it: with a lambda and an offset for each head. A run has it if it states nothing
else."""


def resolve(
    config: str | Path,
    *,
    variant: str | None = None,
    data: Sequence[str],
    validation: Sequence[str] = (),
    training: Mapping[str, Any],
) -> PretrainConfig:
    """The configuration that a preset's name or a YAML file gives, changed by a variant and by training entries."""
    model, vocab_size, settings, is_of_run = _recipe(config)
    settings = changed(settings, training)
    is_stated = is_of_run and variant in (None, model.get("attention_variant"))
    if variant is not None:
        model["attention_variant"] = variant
    options = model.get("variant_options") or {}
    if model.get("attention_variant") in WITH_HEAD_NORM and isinstance(options, dict) and not is_stated:
        # Written out, because the configurations of older runs mean one lambda for all heads where they say nothing.
        model["variant_options"] = DESCRIBED | options
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


def preset(name: str) -> dict[str, Any]:
    """The fields of the preset called `name`."""
    if name not in PRESETS:
        raise InputError(
            f"There is no preset {name!r}. Choose one of {', '.join(PRESETS)} as `config`, or give a YAML file."
        )
    return dict(PRESETS[name])


def decoder_config(fields: Mapping[str, Any]) -> DecoderConfig:
    """The configuration with these fields, as they stand in a YAML file; unknown ones are refused."""
    from sinkscope.pretrain.decoder_config import DecoderConfig

    known = DecoderConfig.__annotations__.keys()
    if unknown := sorted(map(str, fields.keys() - known)):
        raise _unknown(unknown[0], known, "The model")
    try:
        return DecoderConfig(**fields)
    except TypeError as error:
        reason = str(error).rstrip(".")
        raise InputError(f"A value of the model has the wrong type: {reason}. Correct it below model.") from error


def changed(base: TrainingConfig, changes: Mapping[str, Any]) -> TrainingConfig:
    """The training with some entries changed; an unknown key, another type or a value out of range is refused."""
    kinds = get_type_hints(TrainingConfig)
    if unknown := [key for key in changes if key not in kinds]:
        raise _unknown(unknown[0], kinds, "The training configuration")
    values = {key: _as_float(value) if kinds[key] is float else value for key, value in changes.items()}
    try:
        return strictly(TrainingConfig, asdict(base) | values)
    except WrongValueError as error:
        raise InputError(f"`{error.where}` {error.wrong}. {WHERE_TO_CORRECT}") from error


def with_defaults(training: Mapping[str, Any]) -> dict[str, Any]:
    """The training section of a run's config.yaml; keys that older versions did not have get their defaults."""
    defaults = {field.name: field.default for field in fields(TrainingConfig) if field.default is not MISSING}
    return defaults | dict(training)


def read_recipe(path: Path) -> dict[str, Any]:
    """The entries of a configuration file, or of the config.yaml of a run; anything else is refused."""
    try:
        entries = checked(read_yaml(path) or {}, Recipe, path)
    except UnusableFileError as error:
        raise refused(path, error.reason, "Correct it, or give another `config`.") from error
    value = {name: entry for name, entry in entries.items() if entry is not None}
    if not value:
        raise InputError(
            f"{path.name} has none of the keys preset, model and training. "
            "Write what to change there, or give a preset as `config`."
        )
    unknown = sorted(value.keys() - {"preset", "model", "training"})
    if unknown and value.keys() != KEYS_OF_A_RUN:
        raise InputError(
            f"{path.name} may have the keys preset, model and training, not {shortened(', '.join(unknown))}. "
            "Move it below model or training, or leave it out."
        )
    return value


def _recipe(config: str | Path) -> tuple[dict[str, Any], int, TrainingConfig, bool]:
    """The model, the vocabulary's size and the training of a preset, of a file that changes one, or of a run; and
    whether it is that of a run."""
    config = str(check_path("config", config, expected=f"a preset ({', '.join(PRESETS)}) or a YAML file"))
    is_file = config.endswith((".yaml", ".yml"))
    file: dict[str, Any] = read_recipe(user_path(config)) if is_file else {"preset": config}
    name = file.get("preset", DEFAULT_PRESET)
    model = preset(name)
    vocab_size = model.pop("vocab_size")
    training = file.get("training", {})
    is_of_run = "vocab_size" in file
    if is_of_run:  # its config.yaml is complete, so the preset adds nothing
        model, vocab_size, training = {}, file["vocab_size"], with_defaults(training)
    return model | file.get("model", {}), vocab_size, changed(TRAINING_PRESETS[name], training), is_of_run


def _unknown(key: str, known: Iterable[str], owner: str) -> InputError:
    """The error for a key that is none of those known."""
    # As the option and the parameter are called; by letters alone variant_options is nearer.
    near = ["attention_variant"] if key == "variant" else difflib.get_close_matches(str(key), known, 1)
    advice = f"Write {near[0]}" if near else "Leave it out"
    return InputError(f"{owner} has no key {reprlib.repr(key)}. {advice}. The keys are: {', '.join(known)}.")


def _as_float(value: Any) -> Any:
    """YAML reads 1e-3, without a point, as text."""
    try:
        return value if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return value
