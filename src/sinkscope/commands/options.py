"""Options that several commands share, and what they do with them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from sinkscope.arguments import check_batch, whole_numbers
from sinkscope.errors import InputError
from sinkscope.runtime import check_placement

if TYPE_CHECKING:
    from sinkscope.capture.trace import Trace
    from sinkscope.models.loading import LoadedModel
    from sinkscope.results.run_folder import RunFolder

Model = Annotated[
    str | None,
    typer.Argument(
        help="Hugging Face name, local folder, .gguf file, training run (init:RUN: its first weights), or "
        "reference:softmax (the default) or reference:learned_sink, which come with the package.",
        show_default=False,
    ),
]
Tokens = Annotated[str, typer.Option(help="random (uniform ids), text:FILE or repeat:ID.")]
Bos = Annotated[
    bool | None,
    typer.Option("--bos/--no-bos", help="A BOS token at position 0, counted in the length.", show_default=False),
]
Length = Annotated[int, typer.Option(help="Tokens in each sequence.")]
NumSequences = Annotated[int, typer.Option(help="Sequences in the batch.")]
Seed = Annotated[int, typer.Option(help="Seed of random tokens.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hugging Face model.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16 or float64.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")]
DeviceMap = Annotated[str | None, typer.Option(help="How to spread a model over several devices, such as auto.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]
Out = Annotated[Path | None, typer.Option(help="Run folder to write; default runs/<model>-<time>.", show_default=False)]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the run folder if it is there.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print summary.json to standard output, and nothing else.")]

outputs = ExitStack()
"""The locks of the run folders that the command writes; the entry point gives them back."""


class ModelOptions(Protocol):
    """The part of a command's configuration that says which model is meant, and how it is loaded."""

    @property
    def model(self) -> str | None: ...
    @property
    def revision(self) -> str | None: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def device_map(self) -> str | None: ...
    @property
    def trust_remote_code(self) -> bool: ...


class BatchOptions(ModelOptions, Protocol):
    """The part that says which tokens a model reads, beside that."""

    @property
    def tokens(self) -> str: ...
    @property
    def length(self) -> int: ...
    @property
    def num_sequences(self) -> int: ...
    @property
    def seed(self) -> int: ...


def check_model_and_batch(options: BatchOptions) -> None:
    """Refuses what cannot work whatever the model is; needs no torch."""
    check_placement(options.dtype, options.device, options.device_map)
    check_batch(options.tokens, length=options.length, num_sequences=options.num_sequences, seed=options.seed)


def load_model(options: ModelOptions) -> LoadedModel:
    """The model that the options name, with a sign of life while it loads."""
    from sinkscope.pretrain import model_specs
    from sinkscope.report import terminal

    with terminal.working("loading the model"):
        return model_specs.load_model(
            options.model,
            revision=options.revision,
            dtype=options.dtype,
            device=options.device,
            device_map=options.device_map,
            trust_remote_code=options.trust_remote_code,
        )


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


def run_path(out: Path | None, model: str | None, overwrite: bool) -> Path:
    """Where the run goes; checked before any work, and ours until the command ends."""
    from datetime import datetime

    from sinkscope.models.reference import DEFAULT_MODEL
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
    """Around work that goes on after Ctrl-C, which then says how."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"sinkscope: what is finished is kept; {way_on}", file=sys.stderr)
        raise


def write_pictures(folder: RunFolder, trace: Trace) -> None:
    """Writes the picture and the page of a run whose tables are written, as far as what draws them is installed."""
    if importlib.util.find_spec("matplotlib") is not None:
        from sinkscope.report.figures import chain_figure

        chain_figure(trace.tables, trace.summary, folder.path / "chain.png")
    if importlib.util.find_spec("plotly") is not None:
        from sinkscope.report.page import write_study_page

        write_study_page(folder.path, folder.path / "report.html")


def integers(text: str, name: str, example: list[int]) -> list[int]:
    """Integers separated by commas, with ranges such as 0-3."""
    try:
        return whole_numbers(text)
    except ValueError:
        raise InputError(
            expected="whole numbers separated by commas", found=f"'{text}'", next_step=f"Give `{name}={example}`"
        ) from None
