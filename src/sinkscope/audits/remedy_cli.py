"""sinkscope remedy: a model that 8 bits harm less, with what was done and what it costs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from sinkscope.arguments import check_remedies
from sinkscope.audits.cli import AuditOptions
from sinkscope.cli_options import ModelOptions
from sinkscope.cli_output import Output, run_environment, write_request


@dataclass(frozen=True, kw_only=True)
class RemedyOptions:
    """What is done to a model."""

    rotate: Annotated[bool, typer.Option("--rotate", help="Turn the residual stream, norm gains folded in.")] = False
    prefix: Annotated[
        bool, typer.Option("--prefix", help="Write the cache that the model's own sink tokens leave.")
    ] = False
    unplug: Annotated[bool, typer.Option("--unplug", help="Take the super neurons out of the weights.")] = False
    exempt: Annotated[bool, typer.Option("--exempt", help="List the few modules that should stay in 16 bits.")] = False
    scales: Annotated[
        bool, typer.Option("--scales", help="Write static scales that clip where the loss depends on it least.")
    ] = False

    def __post_init__(self) -> None:
        check_remedies(**asdict(self))


def remedy_command(asked: RemedyOptions, texts: AuditOptions, source: ModelOptions, output: Output) -> None:
    """Write a model that 8-bit activations harm less.

    Its card gives the loss before and after, and how the folder is loaded in transformers. Remedies can be combined;
    each is also measured alone, beside a control.

    Example: sinkscope remedy HuggingFaceTB/SmolLM2-135M --exempt --prefix --text book.txt --out smollm2-remedied
    """
    path = output.path(source.model)
    from sinkscope.audits.remedy import remedy
    from sinkscope.pages import progress, terminal
    from sinkscope.results.run_folder import run_folder

    loaded = source.load()
    with progress.bars() as work:
        result = remedy(loaded, **asdict(texts), **asdict(asked), work=work)
    with progress.working("writing the model"), run_folder(path, output.overwrite) as folder:
        write_request(folder, source, texts, asked)
        folder.write_json("environment.json", run_environment(loaded))
        result.write(folder)
    output.show(path, lambda: terminal.show_remedied(result, path))
