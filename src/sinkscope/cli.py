"""The command line. Options become one frozen configuration per command; the work is imported only when a command
runs."""

from __future__ import annotations

import importlib.util
import json
import signal
import sys
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from sinkscope.errors import InputError
from sinkscope.pretrain_commands import pretrain_command, tokenize_command

app = typer.Typer(
    name="sinkscope",
    help="Why language models pour their attention into the first token, shown link by link.\n\n"
    "Example: sinkscope trace gpt2 --bos",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("tokenize")(tokenize_command)
app.command("pretrain")(pretrain_command)

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        help="Hugging Face name, local folder or .gguf file; without it a tiny random model.", show_default=False
    ),
]


@dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """What one trace was asked to do; written to config.yaml."""

    model: str | None
    revision: str | None
    dtype: str
    device: str
    device_map: str | None
    trust_remote_code: bool
    tokens: str
    bos: bool | None
    length: int
    num_sequences: int
    seed: int
    keys: str | None
    effective_rank: bool


@app.command("trace")
def trace_command(
    model: ModelArgument = None,
    tokens: Annotated[str, typer.Option(help="random (uniform ids), text:FILE or repeat:ID.")] = "random",
    bos: Annotated[
        bool | None,
        typer.Option("--bos/--no-bos", help="A BOS token at position 0, counted in the length.", show_default=False),
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens in each sequence.")] = 64,
    num_sequences: Annotated[int, typer.Option(help="Sequences in the batch.")] = 32,
    seed: Annotated[int, typer.Option(help="Seed of random tokens.")] = 0,
    keys: Annotated[
        str | None, typer.Option(help="Read chosen key positions only, such as 0,10: O(length) each.")
    ] = None,
    effective_rank: Annotated[
        bool, typer.Option("--effective-rank/--no-effective-rank", help="Effective rank, by a decomposition.")
    ] = True,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hugging Face model.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16 or float64.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    device_map: Annotated[
        str | None, typer.Option(help="How to spread a model over several devices, such as auto.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Run folder to write; default runs/<model>-<time>.", show_default=False)
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run folder if it is there.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print summary.json to standard output, and nothing else.")
    ] = False,
) -> None:
    """Show the whole sink chain of a model, read in one forward pass.

    Example: sinkscope trace HuggingFaceTB/SmolLM2-135M --length 64 --num-sequences 32
    """
    config = TraceConfig(
        model=model,
        revision=revision,
        dtype=dtype,
        device=device,
        device_map=device_map,
        trust_remote_code=trust_remote_code,
        tokens=tokens,
        bos=bos,
        length=length,
        num_sequences=num_sequences,
        seed=seed,
        keys=keys,
        effective_rank=effective_rank,
    )
    key_positions = _key_positions(keys)
    from sinkscope.results.run_folder import check_output, default_run_path, run_folder

    path = out or default_run_path(model or "default", datetime.now())
    check_output(path, overwrite)
    from sinkscope.capture.trace import trace
    from sinkscope.models.token_batches import token_batch
    from sinkscope.report import terminal
    from sinkscope.runtime import environment

    with terminal.working("loading the model"):
        loaded = _load(config)
    batch = token_batch(loaded, tokens, bos=bos, length=length, num_sequences=num_sequences, seed=seed)
    with terminal.progress("forward passes") as progress:
        result = trace(loaded, batch, keys=key_positions, effective_rank=effective_rank, progress=progress)
    with terminal.working("finding sinks, dimensions and neurons"), run_folder(path, overwrite) as folder:
        folder.write_yaml("config.yaml", asdict(config))
        folder.write_json(
            "environment.json",
            environment(
                device=next(loaded.model.parameters()).device,
                model=loaded.name,
                dtype=loaded.dtype,
                attention_path=result.reading.attention_path,
                model_revision=loaded.revision,
                weight_hash=loaded.weight_hash,
                trust_remote_code=loaded.trust_remote_code,
                elapsed_s=result.reading.elapsed_s,
            ),
        )
        result.write(folder)
        if importlib.util.find_spec("matplotlib") is not None:
            from sinkscope.report.figures import chain_figure

            chain_figure(result.tables, result.summary, folder.path / "chain.png")
    if as_json:
        print((path / "summary.json").read_text(encoding="utf-8"), end="")
    else:
        terminal.show_trace(result, loaded, path)


@app.command("models")
def models_command(
    name: Annotated[
        str | None, typer.Argument(help="A family of the table, or a model to look into.", show_default=False)
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON to standard output, and nothing else.")] = False,
) -> None:
    """List the families that are supported, or show where one model keeps its parts.

    Example: sinkscope models gpt2
    """
    from sinkscope.models.anatomy import FAMILIES, anatomy_of
    from sinkscope.models.loading import load
    from sinkscope.report import terminal

    rows = [family.row() for family in FAMILIES if name in (None, family.name)]
    if rows:
        print(json.dumps(rows, indent=2)) if as_json else terminal.show_families(rows)
        return
    with terminal.working("loading the model"):
        parts = anatomy_of(load(name, trust_remote_code=trust_remote_code).model).row()
    print(json.dumps(parts, indent=2)) if as_json else terminal.show_anatomy(name or "", parts)


def main() -> None:
    """Runs a command; input that cannot be honoured ends with a message and exit code 2, never a traceback."""
    # A termination must unwind the stack, so that no half-written folder stays behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        app(standalone_mode=True)
    except InputError as error:
        print(f"sinkscope: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("sinkscope: interrupted; nothing was written", file=sys.stderr)
        sys.exit(130)


def _load(config: TraceConfig):
    from sinkscope.models.loading import load

    return load(
        config.model,
        revision=config.revision,
        dtype=config.dtype,
        device=config.device,
        device_map=config.device_map,
        trust_remote_code=config.trust_remote_code,
    )


def _key_positions(keys: str | None) -> list[int] | None:
    if keys is None:
        return None
    try:
        return [int(key) for key in keys.split(",")]
    except ValueError:
        raise InputError(
            expected="key positions separated by commas", found=f"'{keys}'", next_step="Give --keys 0,10"
        ) from None
