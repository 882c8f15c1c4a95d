"""The commands `sinkscope tokenize` and `sinkscope pretrain`. torch is imported only when one of them runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from sinkscope.arguments import TRACKERS, VARIANTS, check_choice
from sinkscope.cli_options import bound_memory_of, integers
from sinkscope.pretrain.config import TrainingConfig, is_begun
from sinkscope.pretrain.presets import resolve
from sinkscope.pretrain.text_sources import DATA, VALIDATION, TokenizeConfig, check_sources
from sinkscope.processes import is_one_of_several, number
from sinkscope.runtime import check_placement
from sinkscope.user_paths import user_path

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the folder if it is there.")]


@dataclass(frozen=True, kw_only=True)
class TokenizeOutput:
    """Where the shards go."""

    out: Annotated[Path, typer.Option(help="Folder to write: shards, manifest.json and the tokenizer.")]
    overwrite: Overwrite = False


def tokenize_command(config: TokenizeConfig, output: TokenizeOutput) -> None:
    """Turn text into token shards, for pretrain.

    Trains a byte-level BPE on the text, encodes it, and holds some documents out.

    Example: sinkscope tokenize --data books/ --out tokens --vocab-size 8192
    """
    config.check()
    from sinkscope.pretrain.tokenize import count_text, tokenize

    shards = tokenize(config, output.out, overwrite=output.overwrite, progress=_say)
    sizes = {split: shards.num_tokens(split) for split in ("train", "validation")}
    counts = [f"{count_text(size)} {split} tokens" for split, size in sizes.items()]
    share = sizes["validation"] / sum(sizes.values())
    print(f"{', '.join(counts)} ({share:.2%} held out), vocabulary {shards.vocab_size}: {output.out}")


@dataclass(frozen=True, kw_only=True)
class PretrainOptions:
    """What is trained, on which data, and where."""

    data: Annotated[Sequence[str], f"{DATA}; or one folder of token shards"]
    out: Annotated[Path, typer.Option(help="Run folder; a run that was stopped there continues.")]
    config: Annotated[
        str, typer.Option(help="Preset (tiny, 30m, 152m, 1b), a YAML file, or the config.yaml of a run.")
    ] = "tiny"
    variant: Annotated[
        str | None, typer.Option(help="Attention: softmax, head_norm, gate, sigmoid, ...", show_default=False)
    ] = None
    validation: Annotated[Sequence[str], VALIDATION] = ()
    snapshots: Annotated[
        str | None,
        typer.Option(
            "--keep", help="Steps after which to keep the weights for good, such as 0,100,1000.", show_default=False
        ),
    ] = None
    parallel: Annotated[str, typer.Option(help="auto, single, ddp or fsdp; the last two under torchrun.")] = "auto"
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto"
    compile: Annotated[
        bool | None,
        typer.Option("--compile/--no-compile", help="Compile the blocks; by default on CUDA.", show_default=False),
    ] = None
    track: Annotated[
        str | None, typer.Option(help="Also log to trackio, wandb or tensorboard.", show_default=False)
    ] = None
    overwrite: Overwrite = False

    def __post_init__(self) -> None:
        check_placement("auto", self.device)
        is_one_of_several(self.parallel)
        for name, choices in (("variant", VARIANTS), ("track", TRACKERS)):
            if (value := getattr(self, name)) is not None:
                check_choice(name, value, choices)


def _training_options() -> list[tuple[str, Any, None]]:
    """Every field of TrainingConfig as an option that may be left out."""
    described, options = get_type_hints(TrainingConfig, include_extras=True), []
    for name, kind in get_type_hints(TrainingConfig).items():
        if name != "snapshots":  # PretrainOptions has it, as text
            kind = str if get_origin(kind) is Literal else kind  # a wrong one is refused in our own words
            options.append((name, Annotated[kind | None, get_args(described[name])[-1]], None))
    return options


TrainingFlags = make_dataclass("TrainingFlags", _training_options(), frozen=True, kw_only=True)


def pretrain_command(options: PretrainOptions, training: TrainingFlags) -> None:  # type: ignore[valid-type]
    """Train a small decoder and watch its sink appear.

    Options that are not given come from --config.

    Example: sinkscope pretrain --variant head_norm --config tiny --data text.txt --out runs/tiny
    """
    changes = {name: value for name, value in asdict(training).items() if value is not None}
    if options.snapshots is not None:
        changes["snapshots"] = integers(options.snapshots, "snapshots", [0, 100, 1000])
    from sinkscope.pretrain.tokens import is_shards
    from sinkscope.results.run_folder import check_output

    # Checked before torch is imported. A run that resumes has its tokens and no longer needs the texts.
    if not is_begun(user_path(options.out), overwrite=options.overwrite):
        if not is_shards(options.data):
            check_sources([*options.data, *options.validation])
        check_output(options.out, options.overwrite)
    config = resolve(
        options.config, variant=options.variant, data=options.data, validation=options.validation, training=changes
    )
    from transformers.utils import logging

    from sinkscope.pretrain.parallel import processes
    from sinkscope.pretrain.train import pretrain

    bound_memory_of(options.device)
    logging.disable_progress_bar()  # transformers would show one for every file that is saved
    try:
        with processes(options.parallel, options.device) as group:
            pretrain(
                config,
                options.out,
                group,
                compile=options.compile,
                overwrite=options.overwrite,
                track=options.track,
                say=_say,
            )
    except KeyboardInterrupt:
        if number("RANK") == 0:  # under torchrun every process is interrupted; one of them says so
            _say("sinkscope: interrupted; the same command continues from the newest checkpoint")
        sys.exit(130)


def _say(text: str) -> None:
    from sinkscope.pages.text import say

    say(text, error=True)
