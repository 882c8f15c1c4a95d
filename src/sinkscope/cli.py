"""The command line. Each command is a file `cli.py` in its folder; the work is imported only when a command runs."""

from __future__ import annotations

import ast
import atexit
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from functools import cache
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from sinkscope import __version__, processes
from sinkscope import cli_options as options
from sinkscope import cli_output as output
from sinkscope.atomic import CANNOT_GROW
from sinkscope.audits.cli import audit_command
from sinkscope.audits.remedy_cli import remedy_command
from sinkscope.compare.cli import compare_command
from sinkscope.errors import INTERRUPTED, InputError
from sinkscope.explore.cli import explore_command
from sinkscope.fingerprints.cli import fingerprint_command
from sinkscope.initial_bias.cli import bias_command
from sinkscope.interventions.cli import intervene_command
from sinkscope.memory import is_out_of_memory
from sinkscope.models.cli import models_command
from sinkscope.pages.text import escape_what_cannot_be_printed, say, visible
from sinkscope.pretrain.cli import pretrain_command, tokenize_command
from sinkscope.results.cli import report_command
from sinkscope.studies.cli import ValueOfBos, study_command
from sinkscope.tracing.cli import trace_command


class InGroups(TyperGroup):
    """Lists its commands by what they are for, each with the whole first sentence of its help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.commands[name]
            sentence = command.help.partition("\n\n")[0]
            groups.setdefault(command.rich_help_panel, []).append((name, sentence))
        for group, rows in groups.items():
            with formatter.section(group):
                formatter.write_dl(rows, col_max=12)


app = typer.Typer(
    name="sinkscope",
    cls=InGroups,
    help="Why language models pour their attention into the first token, shown link by link.\n\n"
    "Example: sinkscope trace gpt2 --bos",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _show_version(is_asked_for: bool) -> None:
    if is_asked_for:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    pass


app.command("trace", rich_help_panel="Look")(options.command(trace_command))
app.command("explore", rich_help_panel="Look")(options.command(explore_command))
app.command("compare", rich_help_panel="Look")(options.command(compare_command))
app.command("report", rich_help_panel="Look")(options.command(report_command))
app.command("models", rich_help_panel="Look")(options.command(models_command))
app.command("study", rich_help_panel="Prove", cls=ValueOfBos)(options.command(study_command))
app.command("intervene", rich_help_panel="Prove")(options.command(intervene_command))
app.command("audit", rich_help_panel="Quantise")(options.command(audit_command))
app.command("remedy", rich_help_panel="Quantise")(options.command(remedy_command))
app.command("tokenize", rich_help_panel="Train")(options.command(tokenize_command))
app.command("pretrain", rich_help_panel="Train")(options.command(pretrain_command))
app.command("bias", rich_help_panel="Origins")(options.command(bias_command))
app.command("fingerprint", rich_help_panel="Origins")(options.command(fingerprint_command))


SHARED = ("trace", "study", "fingerprint", "bias")
"""Commands whose work the processes of torchrun share; `pretrain` has its own way."""
OUT_OF_MEMORY = InputError(
    "The device has no memory left for this model and these tokens. Give fewer or shorter sequences, a smaller `dtype` "
    "or, to pretrain, a smaller `micro_batch_size`."
)


def main() -> None:
    """Runs a command; input that cannot be honoured ends with a message and exit code 2, never a traceback."""
    escape_what_cannot_be_printed()
    # A termination must unwind the stack, so that no half-written folder stays behind.
    signal.signal(signal.SIGTERM, _end_once)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in the background
        signal.signal(signal.SIGINT, _end_once)
    shares = next(iter(sys.argv[1:]), "") in SHARED
    try:
        with (
            output.locked_runs,
            processes.joined() if shares else nullcontext(),
            _silenced() if processes.rank() > 0 else nullcontext(),
        ):
            try:
                command_line()()
            finally:
                sys.stdout.flush()  # here, not by the interpreter as it ends, so that a failure is reported
        return
    except Exception as error:
        # Memory first: code that reads strangers' files takes any error for a damaged file.
        refused = OUT_OF_MEMORY if is_out_of_memory(error) else error
        if isinstance(refused, OSError) and refused.errno in CANNOT_GROW:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing more is printed
            reason, remedy = os.strerror(refused.errno), CANNOT_GROW[refused.errno]
            refused = InputError(f"Cannot write the output: {reason}. {remedy}, or print to another place.")
        if isinstance(refused, FileNotFoundError) and "No usable temporary directory" in str(refused):  # of tempfile
            refused = InputError("No temporary file can be written. Free some space, or name a folder in TMPDIR.")
        if not isinstance(refused, InputError):
            raise
    except KeyboardInterrupt:  # outside a command, such as while its options are read
        print(f"sinkscope: {INTERRUPTED}", file=sys.stderr)
        sys.exit(130)
    _refuse(refused)  # here the error is gone, and with it the frames that filled the memory


def _end_once(number: int, frame: object) -> NoReturn:
    """The first Ctrl-C or termination ends the command; more would end in a traceback while it tidies up and leaves."""
    for ending in (signal.SIGINT, signal.SIGTERM):
        # Not SIG_IGN yet: for a signal that has already arrived, Python would print a traceback. SIG_IGN is set last,
        # at exit, because Python drops its own handlers before it ends.
        signal.signal(ending, _do_nothing)
        atexit.register(signal.signal, ending, signal.SIG_IGN)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


def _do_nothing(number: int, frame: object) -> None:
    """The handler of a second signal."""


@contextmanager
def _silenced() -> Iterator[None]:
    """While open, nothing is printed: of several processes the first one speaks. An error that leaves it is printed."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


@cache
def command_line() -> Any:
    """The application as a click group: `commands` by name, each with its `params`."""
    return typer.main.get_command(app)


def _refuse(error: InputError) -> NoReturn:
    """Prints the message, with options in place of parameters, and ends with exit code 2."""
    # The group itself has no option that takes a value, so the command's name comes first.
    command = command_line().commands.get(next(iter(sys.argv[1:]), ""))
    say(f"sinkscope: {in_options(visible(str(error)), command.params if command else ())}", error=True)
    sys.exit(2)


def in_options(text: str, parameters: Iterable[Any]) -> str:
    """`text` with the parameters that it names in backticks written as options of the command that has them."""
    by_name = {parameter.name: parameter for parameter in parameters}

    def typed(match: re.Match) -> str:
        name, value = match.groups()
        return _as_typed(by_name[name], value) if name in by_name else match[0]

    return re.sub(r"`([a-z_][a-z_0-9]*)(?:=([^`]+))?`", typed, text)


def _as_typed(parameter: Any, text: str | None) -> str:
    """A parameter, with or without a value as Python writes it, as it is typed on a command line."""
    is_argument = parameter.param_type_name == "argument"
    flag = parameter.name.upper() if is_argument else parameter.opts[0]
    if text is None:
        return flag
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):  # a stand-in, such as N
        value = text
    if isinstance(value, bool):
        if parameter.is_flag:
            return flag if value else next(iter(parameter.secondary_opts), f"no {flag}")
        value = "yes" if value else "no"
    elif isinstance(value, list | tuple):
        value = ",".join(map(str, value))
    typed = shlex.quote(str(value))
    return typed if is_argument else f"{flag} {typed}"
