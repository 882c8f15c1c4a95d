"""Options that several commands share, and how a configuration becomes options.

A command is a function of frozen configurations. Their fields are its options: type, default and, as typer's
annotation, help.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from sinkscope.arguments import check_batch, whole_numbers
from sinkscope.errors import INTERRUPTED, InputError
from sinkscope.runtime import check_placement

if TYPE_CHECKING:
    from sinkscope.models.loaded import LoadedModel

Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16 or float64.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]
Length = Annotated[int, typer.Option(help="Tokens in each sequence.")]
NumSequences = Annotated[int, typer.Option(help="Sequences in the batch.")]
Seed = Annotated[int, typer.Option(help="Seed of random tokens.")]
Bos = Annotated[
    bool | None,
    typer.Option(
        "--bos/--no-bos",
        help="Begin each text with what the tokenizer puts before it, or with BOS if that is nothing; counted in the "
        "length. Without either option a text begins as the tokenizer begins it.",
        show_default=False,
    ),
]


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
        from sinkscope.pages import progress

        bound_memory_of(self.device)
        named = asdict(self)
        with progress.working("loading the model"):
            return load(named.pop("model"), **named)


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """Which tokens a model reads."""

    tokens: Annotated[
        str, typer.Option(help="random (uniform ids), text:FILE (text:- for standard input) or repeat:ID (one token).")
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
                f"`prompt` brings its own tokens, so `{name}={getattr(tokens, name)!r}` cannot be given beside it. "
                f"Leave `{name}` or `prompt` out."
            )


def bound_memory_of(device: str) -> None:
    """Where the work is done on the CPU, running out of memory is from here on an error that can be reported."""
    from sinkscope.memory import bound_memory
    from sinkscope.runtime import resolve_device

    if resolve_device(device).type == "cpu":
        bound_memory()


def command(run: Callable[..., None]) -> Callable[..., None]:
    """A function for typer, whose parameters are the fields of the configurations that `run` takes."""
    kinds = {name: kind for name, kind in get_type_hints(run).items() if name != "return"}
    options = []
    for kind in kinds.values():
        options += [_as_option(field) for field in inspect.signature(kind, eval_str=True).parameters.values()]

    def filled(**values: Any) -> None:
        try:
            configurations = {}
            for name, kind in kinds.items():
                configurations[name] = kind(**{field.name: values[field.name] for field in fields(kind)})
            run(**configurations)
        except KeyboardInterrupt as interrupt:
            # Said here: typer turns it into exit code 130 without a word.
            print(f"sinkscope: {str(interrupt) or INTERRUPTED}", file=sys.stderr)
            raise

    # Typer reads the options from these.
    filled.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    filled.__annotations__ = {option.name: option.annotation for option in options}
    filled.__doc__ = run.__doc__
    return filled


def _as_option(field: inspect.Parameter) -> inspect.Parameter:
    """A field as typer's option. Configurations of the library, which do not know typer, give their help as text."""
    kind, *annotations = get_args(field.annotation)
    if not annotations or not isinstance(annotations[0], str):
        return field
    several = kind == Sequence[str]
    option = typer.Option(
        help=f"{annotations[0]}{'; may be repeated' * several}.", show_default=bool(field.default) and not several
    )
    return field.replace(annotation=Annotated[list[str] if several else kind, option])


def integers(text: str, name: str, example: list[int]) -> list[int]:
    """Integers separated by commas, with ranges such as 0-3."""
    try:
        return whole_numbers(text)
    except ValueError:
        raise InputError(
            f"`{name}` cannot be '{text}'. Give whole numbers separated by commas, such as `{name}={example}`."
        ) from None
