"""The commands tokenize and pretrain. The work is imported only when one of them runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from sinkscope.errors import InputError
from sinkscope.runtime import check_placement

Sources = Annotated[
    list[str],
    typer.Option("--data", help="Text files or folders, hf:NAME, or one folder of token shards. May be repeated."),
]
HeldOut = Annotated[
    list[str] | None,
    typer.Option("--validation", help="Texts to hold out; else a share of the documents is.", show_default=False),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the folder if it is there.")]


def tokenize_command(
    data: Sources,
    out: Annotated[Path, typer.Option(help="Folder to write: shards, manifest.json and the tokenizer.")],
    validation: HeldOut = None,
    validation_share: Annotated[float, typer.Option(help="Share of the documents to hold out.")] = 0.01,
    vocab_size: Annotated[int, typer.Option(help="Tokens of the byte-level BPE that is trained.")] = 8192,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or name of a tokenizer to use instead.", show_default=False)
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Stop after so many training tokens.", show_default=False)
    ] = None,
    shard_tokens: Annotated[int, typer.Option(help="Tokens of a shard.")] = 1 << 27,
    overwrite: Overwrite = False,
) -> None:
    """Turn text into token shards: train a byte-level BPE, encode, hold documents out.

    Example: sinkscope tokenize --data books/ --out tokens --vocab-size 8192
    """
    from sinkscope.pretrain.tokenizing import TokenizeConfig, tokenize

    config = TokenizeConfig(
        data=tuple(data),
        validation=tuple(validation or ()),
        validation_share=validation_share,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        max_tokens=max_tokens,
        shard_tokens=shard_tokens,
    )
    shards = tokenize(config, out, overwrite=overwrite, progress=_say)
    counts = [f"{shards.num_tokens(split):,} {split} tokens" for split in ("train", "validation")]
    print(f"{', '.join(counts)}, vocabulary {shards.vocab_size}: {out}")


def pretrain_command(
    data: Sources,
    out: Annotated[Path, typer.Option(help="Run folder; a run that was stopped there goes on.")],
    config: Annotated[
        str, typer.Option(help="Preset (tiny, 30m, 152m, 1b), a YAML file, or the config.yaml of a run.")
    ] = "tiny",
    variant: Annotated[
        str | None, typer.Option(help="Attention: softmax, head_norm, gate, sigmoid, ...", show_default=False)
    ] = None,
    validation: HeldOut = None,
    steps: Annotated[int | None, typer.Option(help="Updates.", show_default=False)] = None,
    batch_size: Annotated[int | None, typer.Option(help="Sequences in an update.", show_default=False)] = None,
    micro_batch_size: Annotated[
        int | None, typer.Option(help="Sequences in a forward pass of one process.", show_default=False)
    ] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens of a sequence.", show_default=False)] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak learning rate.", show_default=False)] = None,
    schedule: Annotated[str | None, typer.Option(help="cosine or constant.", show_default=False)] = None,
    warmup_steps: Annotated[int | None, typer.Option(help="Steps of linear warm-up.", show_default=False)] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Weight decay of matrices.", show_default=False)] = None,
    optimiser: Annotated[str | None, typer.Option(help="adamw or muon.", show_default=False)] = None,
    seed: Annotated[int | None, typer.Option(help="Of the weights and the order of data.", show_default=False)] = None,
    evaluate_every: Annotated[
        int | None, typer.Option(help="Steps between held-out losses.", show_default=False)
    ] = None,
    probe_every: Annotated[int | None, typer.Option(help="Steps between probes; 0: none.", show_default=False)] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Steps between checkpoints.", show_default=False)] = None,
    keep: Annotated[
        str | None, typer.Option(help="Steps whose weights are kept, such as 0,100,1000.", show_default=False)
    ] = None,
    parallel: Annotated[str, typer.Option(help="auto, single, ddp or fsdp; the last two under torchrun.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    compile: Annotated[
        bool | None,
        typer.Option("--compile/--no-compile", help="Compile the blocks; default on CUDA.", show_default=False),
    ] = None,
    track: Annotated[
        str | None, typer.Option(help="Also log to trackio, wandb or tensorboard.", show_default=False)
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Train a small decoder from scratch and watch the sink being born.

    Example: sinkscope pretrain --variant head_norm --config tiny --data text.txt --out runs/tiny
    """
    snapshots = _steps(keep)
    check_placement("auto", device)
    from sinkscope.results.run_folder import check_output, is_training_run

    if not is_training_run(out):
        check_output(out, overwrite)
    from transformers.utils import logging

    from sinkscope.pretrain.parallel import processes
    from sinkscope.pretrain.run_setup import pretrain, resolve

    training = {
        "steps": steps,
        "batch_size": batch_size,
        "micro_batch_size": micro_batch_size,
        "sequence_length": sequence_length,
        "learning_rate": learning_rate,
        "schedule": schedule,
        "warmup_steps": warmup_steps,
        "weight_decay": weight_decay,
        "optimiser": optimiser,
        "seed": seed,
        "evaluate_every": evaluate_every,
        "probe_every": probe_every,
        "checkpoint_every": checkpoint_every,
        "snapshots": snapshots,
    }
    resolved = resolve(config, variant=variant, data=data, validation=validation or (), training=training)
    logging.disable_progress_bar()  # a bar for every file that is saved
    try:
        with processes(parallel, device) as group:
            pretrain(resolved, out, group, compile=compile, overwrite=overwrite, track=track, say=_say)
    except KeyboardInterrupt:
        _say("sinkscope: interrupted; the same command goes on from the newest checkpoint")
        sys.exit(130)


def _say(text: str) -> None:
    from sinkscope.report.text import say

    say(text, error=True)


def _steps(keep: str | None) -> list[int] | None:
    if keep is None:
        return None
    try:
        return [int(step) for step in keep.split(",")]
    except ValueError:
        raise InputError(
            expected="steps separated by commas", found=f"'{keep}'", next_step="Give --keep 0,100,1000"
        ) from None
