"""`train` and `pretrain`: open a run folder, new or stopped earlier, and train the run to its end.

A run is a folder. At its start it gets config.yaml and environment.json, and tokens/ if the data are text. While it
trains it gets metrics.jsonl, probes.jsonl, checkpoints/ and snapshots/; at the end model/, both logs as Parquet, and
last summary.json. A folder with summary.json is a complete run.
"""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

from sinkscope.atomic import CANNOT_GROW, explained, locked
from sinkscope.attention.variants import VARIANTS
from sinkscope.errors import InputError
from sinkscope.pretrain.config import PretrainConfig, TrainingOptions, is_begun, read_config
from sinkscope.pretrain.decoder import Decoder
from sinkscope.pretrain.metrics import (
    check_tracker,
    log_keys,
    read_first_rows,
    tracker,
)
from sinkscope.pretrain.parallel import Processes, processes
from sinkscope.pretrain.presets import resolve
from sinkscope.pretrain.runs import THEN, decoder_config_of_run, shards_of_run
from sinkscope.pretrain.tokenize import TokenizeConfig, tokenize
from sinkscope.pretrain.tokens import SPLITS, TokenShards, TokenStream, is_shards
from sinkscope.pretrain.training_run import TrainingRun
from sinkscope.progress import Say
from sinkscope.results.kinds import Scalar
from sinkscope.results.run_folder import RunFolder, run_folder
from sinkscope.results.validated import UnusableFileError, read_json
from sinkscope.runtime import environment
from sinkscope.user_paths import check_path, user_path

WRITTEN_LATER = (
    *("metrics.jsonl", "probes.jsonl", "metrics.parquet", "probes.parquet", "summary.json", "tensorboard/events.*"),
    *("checkpoints/step-*", "snapshots/step-*", "model", "report.html"),
)
"""What is written into the run folder after it was made, so that `overwrite` may remove it: what training adds, and the
page of `sinkscope report`."""


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
    """Trains the run in the folder `out` to its end and returns its summary.

    A run that was stopped continues from its newest checkpoint; of a complete one only the summary is read. Blocks are
    compiled on CUDA unless `compile` says otherwise. Every process of the group calls this, with the same arguments.
    """
    out = user_path(out)
    say = say if group.is_first else lambda text: None
    _check_trainable(config, group)
    compile = group.device.type == "cuda" if compile is None else compile
    with locked(out) if group.is_first else contextlib.nullcontext():
        if group.is_first:
            check_tracker(track)
            _open_run(config, out, overwrite, group, compile, say)
        group.from_first(None)  # the other processes wait here until the folder is there
        shards = shards_of_run(config, out)
        summary = group.from_first(_finished_summary(config, out, say) if group.is_first else None)
        if summary is not None:
            say(f"the run in {out} is complete; choose another folder to train again, or overwrite it")
            return summary
        if group.is_first:
            _note_changed_set_up(RunFolder(out), _environment(group, compile))
        model = Decoder(decoder_config_of_run(config, shards))
        with tracker(track if group.is_first else None, out, config.plain()) as send:
            run = TrainingRun(out, model, shards, config.training, group, compile=compile, say=say, track=send)
            say(_opening(run, config, shards, compile))
            with explained(out, only=CANNOT_GROW):
                return run.train()


def train(
    data: Path | str | Sequence[Path | str],
    out: Path | str,
    *,
    variant: str | None = None,
    config: str | Path = "tiny",
    validation: Path | str | Sequence[Path | str] = (),
    device: str = "auto",
    overwrite: bool = False,
    say: Say | None = None,
    **training: Unpack[TrainingOptions],
) -> Path:
    """Trains a decoder to the end of its run and returns the run's folder: `sinkscope pretrain` for Python.

        run = sinkscope.train("books/", "runs/gate", variant="gate", steps=1000)

    `data` is text, or folders of it, or token shards. `config` is a preset (tiny, 30m, 152m, 1b) or a YAML file, and
    `training` changes its entries, such as `steps=100`. `say` is called with each line of progress. A run that was
    stopped in `out` continues there.
    """
    data, validation = _sources("data", data), _sources("validation", validation)
    out = user_path(check_path("out", out))
    resolved = resolve(config, variant=variant, data=data, validation=validation, training=training)
    with processes("auto", device) as group:
        pretrain(resolved, out, group, overwrite=overwrite, say=say or (lambda text: None))
    return out


def _sources(name: str, value: Any) -> list[str]:
    """One path or several, as a list of text."""
    paths = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    return [str(check_path(name, path, expected="a path, or a list of them,")) for path in paths]


def _check_trainable(config: PretrainConfig, group: Processes) -> None:
    """Refuses combinations of settings that no single setting shows to be wrong."""
    passes = config.training.rows(group.rank, group.num_processes)
    variant = config.model.get("attention_variant", "softmax")
    if VARIANTS[variant].whole_batch and passes != [slice(0, max(2, config.training.batch_size))]:
        raise InputError(
            f"{variant} uses the variance over sequences, so the whole batch, of two sequences or more, must be in one "
            f"forward pass. This run would have {group.num_processes} x {len(passes)} passes of "
            f"{passes[0].stop - passes[0].start}. Leave `micro_batch_size` out, and use one process."
        )
    if config.validation and is_shards(config.data):
        raise InputError(
            "Token shards hold their own held-out text, so `validation` does nothing beside them. "
            f"Leave {', '.join(config.validation)} out here, and give it to `sinkscope tokenize`."
        )


def _open_run(config: PretrainConfig, out: Path, overwrite: bool, group: Processes, compile: bool, say: Say) -> None:
    """Makes the run folder with all that training needs, or checks that the existing one has the same configuration.

    Texts are tokenized into it once. The folder appears only if the run can be trained.
    """
    if is_begun(out, overwrite=overwrite) and not overwrite:
        if differences := _differences(read_config(out).plain(), config.plain()):
            raise InputError(
                f"The run in {out} was started with another configuration: {'; '.join(differences[:3])}. "
                "Choose another `out`, or replace the run with `overwrite=True`."
            )
        shards_of_run(config, out).verify()
        return
    with run_folder(out, overwrite, later=WRITTEN_LATER) as folder:
        folder.write_yaml("config.yaml", config.plain())
        folder.write_json("environment.json", _environment(group, compile))
        if not is_shards(config.data):
            texts = TokenizeConfig(
                data=tuple(config.data), validation=tuple(config.validation), vocab_size=config.vocab_size
            )
            tokenize(texts, folder.path / "tokens", progress=say)
        shards = shards_of_run(config, folder.path)
        shards.verify()
        # Called for what they refuse: a vocabulary that is too small, and a split shorter than one sequence.
        decoder_config_of_run(config, shards)
        settings = config.training
        for split in SPLITS:
            TokenStream(shards, split, length=settings.sequence_length, batch_size=settings.batch_size, seed=0)


def _environment(group: Processes, compile: bool) -> dict[str, Any]:
    return environment(
        device=group.device,
        precision="bfloat16 autocast" if group.device.type == "cuda" else "float32",
        compiled=compile,
        parallel=group.mode,
        num_processes=group.num_processes,
    )


def _note_changed_set_up(folder: RunFolder, now: dict[str, Any]) -> None:
    """Adds to environment.json what has changed since the run last stopped, as "old, then new"."""
    saved = read_json(folder.path / "environment.json", dict[str, Scalar])
    changes = {}
    for name, value in now.items():
        if name in saved and name != "started_at":
            newest = str(saved[name]).split(THEN)[-1]
            if newest != str(value):
                changes[name] = f"{saved[name]}{THEN}{value}"
    if changes:
        folder.write_json("environment.json", saved | changes)


def _finished_summary(config: PretrainConfig, out: Path, say: Say) -> dict[str, Any] | None:
    """The summary of a complete run, whose logs are checked to be whole; None if there is more to do."""
    file = out / "summary.json"
    if not file.is_file():
        return None
    try:
        summary = read_json(file, dict[str, Any])
    except UnusableFileError as error:
        say(f"{file} is damaged ({error.reason}); writing the end of the run again")
        return None
    for name, keys in log_keys(config.training, config.training.steps).items():
        read_first_rows(out / name, keys)
    return summary


def _differences(saved: Any, now: Any, path: str = "") -> list[str]:
    """What differs between two configurations, one line an entry, such as "training.steps 100 there, 200 now"."""
    if not (isinstance(saved, dict) and isinstance(now, dict)):
        return [] if saved == now else [f"{path} {reprlib.repr(saved)} there, {reprlib.repr(now)} now"]
    lines = []
    for key in now | saved:
        lines += _differences(saved.get(key), now.get(key), f"{path}.{key}" if path else str(key))
    return lines


def _opening(run: TrainingRun, config: PretrainConfig, shards: TokenShards, compile: bool) -> str:
    """The line that is printed before training: what is trained, on how much text, and on what."""
    settings, group = config.training, run.group
    num_tokens = shards.num_tokens("train")
    num_trained = settings.steps * settings.batch_size * settings.sequence_length
    return (
        f"{config.model.get('attention_variant', 'softmax')}, {run.num_parameters / 1e6:,.1f} M parameters; "
        f"{settings.steps} steps of {settings.batch_size} x {settings.sequence_length} tokens, "
        f"{num_trained / num_tokens:.2f} epochs of {num_tokens / 1e6:,.1f} M; "
        f"{group.device.type} x {group.num_processes} ({group.mode}), "
        f"{'bfloat16 autocast' if group.device.type == 'cuda' else 'float32'}, "
        f"{'blocks compiled' if compile else 'eager'}, {settings.optimiser}"
    )
