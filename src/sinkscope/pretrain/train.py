"""pretrain(config, out): opens a run folder, or the one that was stopped there, and trains the run to its end.

A run is a folder: config.yaml, environment.json, metrics.jsonl and probes.jsonl while it goes on, checkpoints/,
snapshots/, and at the end model/, the tables and summary.json, whose presence says that the run is complete.
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
from sinkscope.pretrain.config import PretrainConfig, TrainingOptions, is_begun
from sinkscope.pretrain.decoder import Decoder
from sinkscope.pretrain.metrics import (
    check_tracker,
    log_keys,
    read_first_rows,
    tracker,
)
from sinkscope.pretrain.parallel import Processes, processes
from sinkscope.pretrain.presets import resolve
from sinkscope.pretrain.runs import THEN, decoder_config_of_run, saved_configuration, shards_of_run
from sinkscope.pretrain.tokenize import TokenizeConfig, tokenize
from sinkscope.pretrain.tokens import SPLITS, TokenShards, TokenStream, is_shards
from sinkscope.pretrain.training_run import TrainingRun
from sinkscope.progress import Say
from sinkscope.results.run_folder import RunFolder, run_folder
from sinkscope.results.validated import SCALAR, Each, UnusableFileError, read_json
from sinkscope.runtime import environment
from sinkscope.user_paths import check_path, user_path

WRITTEN_LATER = (
    *("metrics.jsonl", "probes.jsonl", "metrics.parquet", "probes.parquet", "summary.json", "tensorboard/events.*"),
    *("checkpoints/step-*", "snapshots/step-*", "model", "report.html"),
)
"""What training adds to the run folder, and the page that `sinkscope report` writes there."""


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
    _check(config, group)
    compile = group.device.type == "cuda" if compile is None else compile
    with locked(out) if group.is_first else contextlib.nullcontext():
        if group.is_first:
            check_tracker(track)
            _open_run(config, out, overwrite, group, compile, say)
        group.from_first(None)
        shards = shards_of_run(config, out)
        summary = group.from_first(_finished_summary(config, out, say) if group.is_first else None)
        if summary is not None:
            say(f"the run in {out} is complete; choose another folder to train again, or overwrite it")
            return summary
        if group.is_first:
            _note_another_set_up(RunFolder(out), _environment(group, compile))
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
    """The folder of a training run, trained to its end: `sinkscope pretrain` for Python.

        run = sinkscope.train("books/", "runs/gate", variant="gate", steps=1000)

    `data` is text, or folders of it, or token shards; `config` a preset (tiny, 30m, 152m, 1b) or a YAML file;
    `training` changes its entries, such as `steps=100`. `say` is called with each line of progress. A run that was
    stopped goes on.
    """
    texts = {name: _sources(name, given) for name, given in (("data", data), ("validation", validation))}
    out = user_path(check_path("out", out))
    resolved = resolve(config, variant=variant, **texts, training=training)
    with processes("auto", device) as group:
        pretrain(resolved, out, group, overwrite=overwrite, say=say or (lambda text: None))
    return out


def _sources(name: str, given: Any) -> list[str]:
    """Paths as text, given as one or as several."""
    several = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    return [str(check_path(name, source, expected="a path, or a list of them,")) for source in several]


def _check(config: PretrainConfig, group: Processes) -> None:
    """Refuses what cannot be trained, or not as it is asked for."""
    passes = config.training.rows(group.rank, group.num_processes)
    variant = config.model.get("attention_variant", "softmax")
    if VARIANTS[variant].whole_batch and passes != [slice(0, max(2, config.training.batch_size))]:
        raise InputError(
            f"{variant} goes by the variance of two or more sequences, all in one pass of one process. "
            f"This run would have {group.num_processes} x {len(passes)} passes of {passes[0].stop - passes[0].start}. "
            "Leave `micro_batch_size` out, and use one process."
        )
    if config.validation and is_shards(config.data):
        raise InputError(
            f"Token shards hold their own held-out text, so {', '.join(config.validation)} cannot be `validation`. "
            "Leave it out, or give it to `sinkscope tokenize`."
        )


def _open_run(config: PretrainConfig, out: Path, overwrite: bool, group: Processes, compile: bool, say: Say) -> None:
    """Makes the run folder with all that training needs, or checks that the existing one has the same configuration.

    Texts are tokenized into it once. What cannot be trained is refused before the folder appears.
    """
    if is_begun(out, overwrite=overwrite) and not overwrite:
        if differences := _differences(saved_configuration(out), config.plain()):
            raise InputError(
                f"The run in {out} began with another configuration: {'; '.join(differences[:3])}. "
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


def _note_another_set_up(folder: RunFolder, now: dict[str, Any]) -> None:
    """Adds to environment.json what is another when a run goes on; of a new run nothing is."""
    before = read_json(folder.path / "environment.json", Each(SCALAR))
    others = {
        name: f"{before[name]}{THEN}{value}"
        for name, value in now.items()
        if name in before and name != "started_at" and str(before[name]).split(THEN)[-1] != str(value)
    }
    if others:
        folder.write_json("environment.json", before | others)


def _finished_summary(config: PretrainConfig, out: Path, say: Say) -> dict[str, Any] | None:
    """The summary of a run that is complete, with all of its rows; None where there is more to do."""
    file = out / "summary.json"
    if not file.is_file():
        return None
    try:
        summary = read_json(file, {})
    except UnusableFileError as error:
        say(f"{file} is damaged ({error.reason}); the end of the run is written again")
        return None
    for name, keys in log_keys(config.training, config.training.steps).items():
        read_first_rows(out / name, keys)
    return summary


def _differences(found: Any, expected: Any, where: str = "") -> list[str]:
    if isinstance(found, dict) and isinstance(expected, dict):
        keys = [*expected, *(key for key in found if key not in expected)]
        return [
            line
            for key in keys
            for line in _differences(found.get(key), expected.get(key), f"{where}.{key}" if where else str(key))
        ]
    return [] if found == expected else [f"{where} {reprlib.repr(found)} there, {reprlib.repr(expected)} now"]


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
