"""Options that several commands share, how a configuration becomes options, and what commands do with them.

A command is a function of frozen configurations. Their fields are its options: type, default and, as typer's
annotation, help. What was filled in is written to config.yaml.
"""

from __future__ import annotations

import importlib.util
import inspect
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from sinkscope import processes
from sinkscope.arguments import check_batch, whole_numbers
from sinkscope.errors import InputError
from sinkscope.runtime import check_placement

if TYPE_CHECKING:
    from sinkscope.capture.trace import Trace
    from sinkscope.models.loading import LoadedModel
    from sinkscope.results.run_folder import RunFolder

Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16 or float64.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]
Length = Annotated[int, typer.Option(help="Tokens in each sequence.")]
NumSequences = Annotated[int, typer.Option(help="Sequences in the batch.")]
Seed = Annotated[int, typer.Option(help="Seed of random tokens.")]
Bos = Annotated[
    bool | None,
    typer.Option("--bos/--no-bos", help="A BOS token at position 0, counted in the length.", show_default=False),
]

outputs = ExitStack()
"""The locks of the run folders that the command writes; `main` releases them."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model is used, and how it is loaded."""

    model: Annotated[
        str | None,
        typer.Argument(
            help="Hugging Face name, local folder, .gguf file, training run (init:RUN: its first weights), or one that "
            "comes with the package: reference:softmax (the default), reference:head_norm, reference:learned_sink.",
            show_default=False,
        ),
    ] = None
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hugging Face model.")] = None
    dtype: Dtype = "auto"
    device: Device = "auto"
    device_map: Annotated[
        str | None, typer.Option(help="How to spread a model over several devices, such as auto.")
    ] = None
    trust_remote_code: TrustRemoteCode = False

    def __post_init__(self) -> None:
        check_placement(self.dtype, self.device, self.device_map)

    def load(self) -> LoadedModel:
        """The model; shows that it is being loaded."""
        from sinkscope.models.loading import load
        from sinkscope.report import progress

        bound_memory_of(self.device)
        named = asdict(self)
        with progress.working("loading the model"):
            return load(named.pop("model"), **named)


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """Which tokens a model reads."""

    tokens: Annotated[
        str, typer.Option(help="random (uniform ids), text:FILE (text:- for standard input) or repeat:ID.")
    ] = "random"
    length: Length = 64
    num_sequences: NumSequences = 32
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_batch(**asdict(self))


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Texts that a model reads in place of a batch, and how sequences begin."""

    prompt: Annotated[
        list[str] | None,
        typer.Option(
            help="A text to read, of at least 2 tokens, in place of a batch; may be repeated.",
            show_default=False,
        ),
    ] = None
    bos: Bos = None

    def check(self, tokens: BatchOptions, *, calibrates: bool = False) -> None:
        """Refuses a batch beside texts; where something is `calibrates`, --tokens says on what."""
        if not self.prompt:
            return
        spare = {field.name for field in fields(tokens) if getattr(tokens, field.name) != field.default}
        if spare := spare - ({"tokens", "seed"} if calibrates else set()):
            name = sorted(spare)[0]
            raise InputError(
                expected=f"`prompt` without `{name}`: a text brings its own tokens",
                found=f"`{name}={getattr(tokens, name)!r}`",
                next_step=f"Leave `{name}` or `prompt` out",
            )


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where a run goes, and how it is printed."""

    out: Annotated[
        Path | None, typer.Option(help="Run folder to write; default runs/<model>-<time>.", show_default=False)
    ] = None
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run folder if it is there.")] = False
    as_json: Annotated[
        bool, typer.Option("--json", help="Print summary.json to standard output, and nothing else.")
    ] = False

    def path(self, model: str | None) -> Path:
        """Where the run goes; checked before any work."""
        return run_path(self.out, model, self.overwrite)

    def show(self, path: Path, show: Callable[[], None]) -> None:
        """Prints the summary of a run that is written, or calls what shows it to a person."""
        if self.as_json:
            print((path / "summary.json").read_text(encoding="utf-8"), end="")
        else:
            show()


def bound_memory_of(device: str) -> None:
    """Where the work is done on the CPU, running out of memory is from here on an error that can be reported."""
    from sinkscope.memory import bound_memory
    from sinkscope.runtime import resolve_device

    if resolve_device(device).type == "cpu":
        bound_memory()


def command(run: Callable[..., None]) -> Callable[..., None]:
    """A function for typer, whose parameters are the fields of the configurations that `run` takes."""
    kinds = {name: kind for name, kind in get_type_hints(run).items() if name != "return"}
    parameters = [inspect.signature(kind, eval_str=True).parameters.values() for kind in kinds.values()]
    options = [_described(field) for each in parameters for field in each]

    def filled(**values: Any) -> None:
        given = {name: {field.name: values[field.name] for field in fields(kind)} for name, kind in kinds.items()}
        run(**{name: kind(**given[name]) for name, kind in kinds.items()})

    filled.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    filled.__annotations__ = {option.name: option.annotation for option in options}
    filled.__doc__ = run.__doc__
    return filled


def _described(field: inspect.Parameter) -> inspect.Parameter:
    """A field as typer's option; the library's own configurations give their help as plain text."""
    kind, *described = get_args(field.annotation)
    if not described or not isinstance(described[0], str):
        return field
    several = kind == Sequence[str]
    option = typer.Option(
        help=f"{described[0]}{'; may be repeated' * several}.", show_default=bool(field.default) and not several
    )
    return field.replace(annotation=Annotated[list[str] if several else kind, option])


def write_request(folder: RunFolder, *configurations: Any, **others: Any) -> None:
    """Writes config.yaml: what was asked for, and the command that asked."""
    asked = {name: value for each in configurations for name, value in asdict(each).items()}
    folder.write_yaml("config.yaml", {**asked, **others, "command": command_text()})


def command_text() -> str:
    """The command that is running, as it can be typed again."""
    return shlex.join(["sinkscope", *sys.argv[1:]])


def run_environment(loaded: LoadedModel, **others: Any) -> dict:
    """environment.json of a run with a model."""
    from sinkscope.runtime import environment

    return environment(
        device=next(loaded.model.parameters()).device,
        model=loaded.name,
        dtype=loaded.dtype,
        model_revision=loaded.revision,
        weight_hash=loaded.weight_hash,
        trust_remote_code=loaded.trust_remote_code,
        **others,
    )


def first_process_writes() -> None:
    """Ends the other processes of torchrun, which have done their share."""
    if processes.rank() > 0:
        raise typer.Exit


def run_path(out: Path | None, model: str | None, overwrite: bool) -> Path:
    """Where the run goes; checked before any work, and locked until the command ends."""
    return processes.from_first(lambda: _checked_run_path(out, model, overwrite))


def _checked_run_path(out: Path | None, model: str | None, overwrite: bool) -> Path:
    from datetime import datetime

    from sinkscope.models.names import DEFAULT_MODEL
    from sinkscope.results.atomic import locked
    from sinkscope.results.run_folder import check_output, default_run_path, is_training_run
    from sinkscope.user_paths import user_path

    path = default_run_path(model or DEFAULT_MODEL, datetime.now()) if out is None else user_path(out)
    outputs.enter_context(locked(path))
    if is_training_run(path):
        raise InputError(
            expected=f"a folder for this run at {path}",
            found="a training run, which cannot be made again in minutes",
            next_step="Choose another `out`, or remove the training run yourself",
        )
    check_output(path, overwrite)
    return path


@contextmanager
def finished_parts_are_kept(way_on: str) -> Iterator[None]:
    """Around work that can be resumed: on Ctrl-C it prints how."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"sinkscope: what is finished is kept; {way_on}", file=sys.stderr)
        raise


def write_pictures(folder: RunFolder, trace: Trace) -> None:
    """Writes the picture and the page of a run whose tables are written, if matplotlib and plotly are installed."""
    from sinkscope.report.picture import can_draw

    if can_draw():
        trace.plot().savefig(folder.path / "chain.png", dpi=110, metadata={"Software": "sinkscope"})
    if importlib.util.find_spec("plotly") is not None:
        from sinkscope.report.result import write_page_of_run

        write_page_of_run(folder.path, folder.path / "report.html")


def integers(text: str, name: str, example: list[int]) -> list[int]:
    """Integers separated by commas, with ranges such as 0-3."""
    try:
        return whole_numbers(text)
    except ValueError:
        raise InputError(
            expected="whole numbers separated by commas", found=f"'{text}'", next_step=f"Give `{name}={example}`"
        ) from None
