"""sinkscope remedy: make a model 8-bit-safe, with what was done and what it costs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from sinkscope.arguments import check_remedies
from sinkscope.audits.cli import AuditOptions
from sinkscope.cli_options import ModelOptions
from sinkscope.cli_output import Output, run_environment, write_request

if TYPE_CHECKING:
    from pathlib import Path

    from sinkscope.audits.remedy_result import RemedyResult


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
    """Make a model safe for 8-bit activations.

    Its card gives the loss before and after, and how the folder is loaded in transformers. Remedies can be combined;
    each is also measured alone, beside a control.

    Example: sinkscope remedy HuggingFaceTB/SmolLM2-135M --exempt --prefix --text book.txt --out smollm2-remedied
    """
    path = output.path(source.model)
    from sinkscope.audits.remedy import remedy
    from sinkscope.pages import progress
    from sinkscope.results.run_folder import run_folder

    loaded = source.load()
    with progress.bars() as work:
        result = remedy(loaded, **asdict(texts), **asdict(asked), work=work)
    with progress.working("writing the model"), run_folder(path, output.overwrite) as folder:
        write_request(folder, source, texts, asked)
        folder.write_json("environment.json", run_environment(loaded))
        result.write(folder)
    output.show(path, lambda: show(result, path))


def show(result: RemedyResult, path: Path) -> None:
    """The losses before and after, in 16 bits and in 8, and whether each remedy helps."""
    from sinkscope.audits.schemes import SCHEMES, scheme_in_words
    from sinkscope.audits.texts import held_out_in_words
    from sinkscope.pages.terminal import Terminal, ends

    out = Terminal()
    out.say(f"{result.loaded.name}, {held_out_in_words(*result.num_tokens, result.source)}")
    rows = [
        (
            row["model"] + " (control)" * row["control"],
            scheme_in_words(row["scheme"]) if row["scheme"] in SCHEMES else row["scheme"],
            f"{row['loss']:.4f}",
            f"{row['change']:+.4f}",
            ends(row["low"], row["high"]),
        )
        for row in result.summary["losses"]
    ]
    columns = ("model", "scheme", "loss", "change", "95 %")
    out.table("loss in nats a token, and its change from the original in 16 bits", columns, rows, limit=len(rows))
    for verdict in result.verdicts:
        out.say(verdict)
    out.say(f"Written to {path}")
