"""The command line. Each command is a file in `sinkscope.commands`; the work is imported only when a command runs."""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer

from sinkscope import __version__
from sinkscope.commands.bias import bias_command
from sinkscope.commands.compare import compare_command
from sinkscope.commands.fingerprint import fingerprint_command
from sinkscope.commands.intervene import intervene_command
from sinkscope.commands.models import models_command
from sinkscope.commands.pretrain import pretrain_command, tokenize_command
from sinkscope.commands.study import study_command
from sinkscope.commands.trace import trace_command
from sinkscope.errors import InputError

app = typer.Typer(
    name="sinkscope",
    help="Why language models pour their attention into the first token, shown link by link.\n\n"
    "Example: sinkscope trace gpt2 --bos",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    pass


app.command("study")(study_command)
app.command("trace")(trace_command)
app.command("intervene")(intervene_command)
app.command("tokenize")(tokenize_command)
app.command("pretrain")(pretrain_command)
app.command("compare")(compare_command)
app.command("bias")(bias_command)
app.command("fingerprint")(fingerprint_command)
app.command("models")(models_command)


OUT_OF_MEMORY = InputError(
    expected="memory for this model and these tokens",
    found="the device full",
    next_step="Give fewer or shorter sequences, a smaller --dtype or, to pretrain, a smaller --micro-batch-size",
)


def main() -> None:
    """Runs a command; input that cannot be honoured ends with a message and exit code 2, never a traceback."""
    # A termination must unwind the stack, so that no half-written folder stays behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        app(standalone_mode=True)
    except InputError as error:
        print(f"sinkscope: {error}", file=sys.stderr)
        sys.exit(2)
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        print(f"sinkscope: {OUT_OF_MEMORY}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("sinkscope: interrupted; no run was written", file=sys.stderr)
        sys.exit(130)


def _is_out_of_memory(error: Exception) -> bool:
    """By name and text: asking torch for its class would import it for every --help."""
    named = type(error).__name__ in ("OutOfMemoryError", "MemoryError")
    return named or "can't allocate memory" in str(error)
