"""What a command writes: the run folder, its options, the machine it ran on, the page and the pictures.

A run's folder is checked and locked before any work. Of several processes the first one writes.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sinkscope import processes
from sinkscope.errors import InputError

if TYPE_CHECKING:
    from sinkscope.models.loaded import LoadedModel
    from sinkscope.results.result import Result
    from sinkscope.results.run_folder import RunFolder

locked_runs = ExitStack()
"""The locks of the run folders that the command writes; `main` releases them."""


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


def write_config(folder: RunFolder, *configurations: Any, **others: Any) -> None:
    """Writes config.yaml: the options of the run, and the command as it was typed."""
    options: dict[str, Any] = {}
    for configuration in configurations:
        options |= asdict(configuration)
    folder.write_yaml("config.yaml", {**options, **others, "command": command_text()})


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

    from sinkscope.atomic import locked
    from sinkscope.names import DEFAULT_MODEL
    from sinkscope.results.run_folder import check_output, default_run_path, is_training_run
    from sinkscope.user_paths import user_path

    path = default_run_path(model or DEFAULT_MODEL, datetime.now()) if out is None else user_path(out)
    locked_runs.enter_context(locked(path))
    if is_training_run(path):
        raise InputError(
            f"{path} is a training run, which cannot be made again in minutes. Choose another `out`, or remove the "
            "training run yourself."
        )
    check_output(path, overwrite)
    return path


@contextmanager
def finished_parts_are_kept(way_on: str) -> Iterator[None]:
    """Around work that can be resumed: Ctrl-C then says how, in place of `INTERRUPTED`."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"what is finished is kept; {way_on}") from None


def write_page(folder: RunFolder) -> Result:
    """Writes the page of a run whose tables are written, and returns the result that they hold."""
    from sinkscope.results.saved import load_result

    result = load_result(folder.path)
    result.report(folder.path / "report.html", overwrite=True)
    return result


def write_pictures(folder: RunFolder) -> None:
    """Writes the page, and the picture of the chain if matplotlib is installed."""
    from sinkscope.pages.drawn import can_draw

    result = write_page(folder)
    if can_draw():
        result.plot().savefig(folder.path / "chain.png", dpi=110, metadata={"Software": "sinkscope"})
