"""From what was asked for to a finished run: the resolved configuration, the run folder, tokens, model, training."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sinkscope.errors import InputError
from sinkscope.pretrain.decoder import Decoder
from sinkscope.pretrain.decoder_config import DecoderConfig
from sinkscope.pretrain.metrics_log import log_keys, read_first_rows
from sinkscope.pretrain.parallel import Processes
from sinkscope.pretrain.presets import decoder_config, preset
from sinkscope.pretrain.token_shards import SPLITS, TokenShards, is_shards, open_shards
from sinkscope.pretrain.token_stream import TokenStream
from sinkscope.pretrain.tokenizing import TokenizeConfig, load_tokenizer, tokenize
from sinkscope.pretrain.trackers import check_tracker, tracker
from sinkscope.pretrain.training_config import TRAINING_PRESETS, TrainingConfig, changed, read_recipe, with_defaults
from sinkscope.pretrain.training_run import Say, TrainingRun
from sinkscope.results.atomic import DISK_FULL, explained, locked
from sinkscope.results.run_folder import is_training_run, run_folder
from sinkscope.results.validated import NAME, Int, Maybe, checked, read_json, read_yaml
from sinkscope.runtime import environment
from sinkscope.user_paths import user_path

DEFAULT_PRESET = "tiny"
WRITTEN_LATER = (
    *("metrics.jsonl", "probes.jsonl", "metrics.parquet", "probes.parquet", "summary.json", "tensorboard/events.*"),
    *("checkpoints/step-*", "snapshots/step-*", "model"),
)
"""What training adds to the run folder."""


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """What one training run was asked to do; written to config.yaml."""

    data: list[str]
    validation: list[str]
    model: dict[str, Any]
    """Fields of the decoder's configuration; `vocab_size` only where it was asked for, else the data decides."""
    vocab_size: int
    """Of the BPE that is trained where the data are texts."""
    training: TrainingConfig

    def plain(self) -> dict[str, Any]:
        """The configuration in the types that JSON and YAML have."""
        return json.loads(json.dumps(asdict(self)))


KEYS_OF_A_RUN = {field.name for field in dataclasses.fields(PretrainConfig)}


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
    vocab_size = model.pop("vocab_size", DecoderConfig.vocab_size)
    training = file.get("training", {})
    if "vocab_size" in file:  # a run's, which is complete: what a preset has and it has not was not there
        model, vocab_size, training = {}, file["vocab_size"], with_defaults(training)
    return model | file.get("model", {}), vocab_size, changed(TRAINING_PRESETS[name], training, "training")


def initial_configuration(run: Path) -> tuple[DecoderConfig, Path]:
    """The configuration, with its seed, that a run's first weights are drawn from, and the folder of its tokenizer.

    The size of the vocabulary is read from an exported model, which travels with the run, else from the data.
    """
    saved = _saved_configuration(run)
    if not saved:
        raise InputError(
            expected=f"a training run in {run}",
            found=_instead_of_a_run(run),
            next_step="Give a folder that sinkscope pretrain wrote",
        )
    for folder in (run / "model", *sorted(run.glob("snapshots/step-????????"))):
        if (file := folder / "config.json").is_file():
            token = Maybe(Int())
            shape = {"vocab_size": Int(1), "bos_token_id": token, "eos_token_id": token}
            known = {name: value for name, value in read_json(file, shape).items() if name in shape}
            return decoder_config(saved["model"] | known), folder
    checked(saved, {"data": [NAME], "validation": [NAME], "vocab_size": Int(1)}, run / "config.yaml")
    training = changed(TRAINING_PRESETS[DEFAULT_PRESET], saved["training"], "training")
    config = PretrainConfig(**saved | {"training": training})
    shards = _shards(config, run)
    return _decoder_config(config, shards), shards.path


def pretrain(
    config: PretrainConfig,
    out: Path,
    group: Processes,
    *,
    compile: bool | None = None,
    overwrite: bool = False,
    track: str | None = None,
    say: Say,
) -> dict[str, Any]:
    """The summary of a run in the folder `out`, trained to its end; a run that was stopped goes on where it was.

    Blocks are compiled on CUDA unless `compile` says otherwise. Every process of the group calls it.
    """
    out = user_path(out)
    say = say if group.is_first else lambda text: None
    config.training.rows(group.rank, group.num_processes)
    compile = group.device.type == "cuda" if compile is None else compile
    with locked(out) if group.is_first else contextlib.nullcontext():
        return _pretrain(config, out, group, compile, overwrite, track, say)


def _pretrain(
    config: PretrainConfig, out: Path, group: Processes, compile: bool, overwrite: bool, track: str | None, say: Say
) -> dict[str, Any]:
    if group.is_first:
        check_tracker(track)
        _open_run(config, out, overwrite, group, compile, say)
    group.from_first(None)
    shards = _shards(config, out)
    summary = group.from_first(_finished_summary(config, out, say) if group.is_first else None)
    if summary is not None:
        say(f"the run in {out} is complete; choose another folder with --out, or --overwrite it")
        return summary
    model = Decoder(_decoder_config(config, shards))
    with tracker(track if group.is_first else None, out, config.plain()) as send:
        run = TrainingRun(out, model, shards, config.training, group, compile=compile, say=say, track=send)
        say(_opening(run, config, shards, compile))
        with explained(out, only=DISK_FULL):
            return run.train()


def _open_run(config: PretrainConfig, out: Path, overwrite: bool, group: Processes, compile: bool, say: Say) -> None:
    """Makes the run folder with all that training needs, or sees that the one there has the same configuration.

    Texts are tokenized into it once. What cannot be trained is refused before the folder is there.
    """
    if is_training_run(out) and not overwrite:
        if differences := _differences(_saved_configuration(out), config.plain()):
            raise InputError(
                expected=f"the configuration that the run in {out} began with",
                found="; ".join(differences[:3]),
                next_step="Choose another folder with --out, or replace the run with --overwrite",
            )
        _shards(config, out).verify()
        return
    with run_folder(out, overwrite, later=WRITTEN_LATER) as folder:
        folder.write_yaml("config.yaml", config.plain())
        precision = "bfloat16 autocast" if group.device.type == "cuda" else "float32"
        folder.write_json(
            "environment.json",
            environment(
                device=group.device,
                precision=precision,
                compiled=compile,
                parallel=group.mode,
                num_processes=group.num_processes,
            ),
        )
        if not is_shards(config.data):
            texts = TokenizeConfig(
                data=tuple(config.data), validation=tuple(config.validation), vocab_size=config.vocab_size
            )
            tokenize(texts, folder.path / "tokens", progress=say)
        shards = _shards(config, folder.path)
        shards.verify()
        _decoder_config(config, shards)
        settings = config.training
        for split in SPLITS:
            TokenStream(shards, split, length=settings.sequence_length, batch_size=settings.batch_size, seed=0)


def _finished_summary(config: PretrainConfig, out: Path, say: Say) -> dict[str, Any] | None:
    """The summary of a run that is complete, with all of its rows; None where there is more to do."""
    file = out / "summary.json"
    if not file.is_file():
        return None
    try:
        summary = read_json(file, {})
    except InputError as error:
        say(f"{file} is damaged ({error.found}); the end of the run is written again")
        return None
    for name, keys in log_keys(config.training, config.training.steps).items():
        read_first_rows(out / name, keys)
    return summary


def _saved_configuration(run: Path) -> dict[str, Any]:
    """What config.yaml of a training run holds; empty where it is of another command or version, or not there."""
    if not is_training_run(run):
        return {}
    saved = read_yaml(run / "config.yaml")
    return saved | {"training": with_defaults(saved["training"])} if saved.keys() == KEYS_OF_A_RUN else {}


def _instead_of_a_run(folder: Path) -> str:
    if is_training_run(folder):
        return "one that another version of sinkscope wrote"
    return "no config.yaml of one" if folder.is_dir() else "no such folder"


def _differences(found: Any, expected: Any, where: str = "") -> list[str]:
    if isinstance(found, dict) and isinstance(expected, dict):
        keys = [*expected, *(key for key in found if key not in expected)]
        return [
            line
            for key in keys
            for line in _differences(found.get(key), expected.get(key), f"{where}.{key}" if where else str(key))
        ]
    return [] if found == expected else [f"{where} {reprlib.repr(found)} there, {reprlib.repr(expected)} now"]


def _shards(config: PretrainConfig, run: Path) -> TokenShards:
    """The shards that the data are, or that were made of the texts."""
    return open_shards(user_path(config.data[0]) if is_shards(config.data) else run / "tokens")


def _decoder_config(config: PretrainConfig, shards: TokenShards) -> DecoderConfig:
    vocab_size = config.model.get("vocab_size", shards.vocab_size)
    if vocab_size < shards.vocab_size:
        raise InputError(
            expected=f"a vocabulary of at least {shards.vocab_size} tokens, those of the data",
            found=f"vocab_size {vocab_size} in the model's configuration",
            next_step="Leave vocab_size out of the model's configuration, or tokenize the data with a smaller one",
        )
    end = load_tokenizer(shards.path).eos_token_id
    return decoder_config(config.model | {"vocab_size": vocab_size, "bos_token_id": end, "eos_token_id": end})


def _opening(run: TrainingRun, config: PretrainConfig, shards: TokenShards, compile: bool) -> str:
    settings, group = config.training, run.group
    num_tokens, wanted = shards.num_tokens("train"), settings.steps * settings.batch_size * settings.sequence_length
    return (
        f"{config.model.get('attention_variant', 'softmax')}, {run.num_parameters / 1e6:,.1f} M parameters; "
        f"{settings.steps} steps of {settings.batch_size} x {settings.sequence_length} tokens, "
        f"{wanted / num_tokens:.2f} epochs of {num_tokens / 1e6:,.1f} M; "
        f"{group.device.type} x {group.num_processes} ({group.mode}), "
        f"{'bfloat16 autocast' if group.device.type == 'cuda' else 'float32'}, "
        f"{'blocks compiled' if compile else 'eager'}, {settings.optimiser}"
    )
