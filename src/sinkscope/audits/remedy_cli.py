"""The command `sinkscope remedy`: makes a model 8-bit-safe, and prints how much each remedy recovers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from sinkscope.arguments import check_remedies
from sinkscope.audits.cli import AuditOptions
from sinkscope.cli_options import ModelOptions
from sinkscope.cli_output import Output, run_environment, write_config

if TYPE_CHECKING:
    from pathlib import Path

    from sinkscope.audits.remedy_result import RemedyResult


@dataclass(frozen=True, kw_only=True)
class RemedyOptions:
    """Which remedies are applied."""

    rotate: Annotated[
        bool, typer.Option("--rotate", help="Rotate the residual stream at random; the logits stay the same.")
    ] = False
    prefix: Annotated[
        bool, typer.Option("--prefix", help="Write the cache of the model's own sink tokens, to put before every text.")
    ] = False
    unplug: Annotated[
        bool, typer.Option("--unplug", help="Set to zero what the super neurons behind the sinks write.")
    ] = False
    exempt: Annotated[bool, typer.Option("--exempt", help="List the few modules to leave in 16 bits.")] = False
    scales: Annotated[
        bool,
        typer.Option(
            "--scales", help="Find static scales that clip large values where the loss hardly depends on them."
        ),
    ] = False

    def __post_init__(self) -> None:
        check_remedies(**asdict(self))


def remedy_command(remedies: RemedyOptions, texts: AuditOptions, source: ModelOptions, output: Output) -> None:
    """Make a model safe for 8-bit activations.

    Remedies can be combined; each is also measured alone, beside a control. The run folder loads in transformers, and
    its README.md has the losses before and after.

    Example: sinkscope remedy HuggingFaceTB/SmolLM2-135M --exempt --prefix --text book.txt --out smollm2-remedied
    """
    path = output.path(source.model)
    from sinkscope.audits.remedy import remedy
    from sinkscope.pages import progress
    from sinkscope.results.run_folder import run_folder

    loaded = source.load()
    with progress.bars() as work:
        result = remedy(loaded, **asdict(texts), **asdict(remedies), work=work)
    with progress.working("writing the model"), run_folder(path, output.overwrite) as folder:
        write_config(folder, source, texts, remedies)
        folder.write_json("environment.json", run_environment(loaded))
        result.write(folder)
    output.show(path, lambda: show(result, path))


def show(result: RemedyResult, path: Path) -> None:
    """Prints the losses before and after, in 16 bits and in 8, and whether each remedy helps."""
    from sinkscope.audits.texts import held_out_in_words
    from sinkscope.pages.terminal import Terminal, ends

    out = Terminal()
    out.say(f"{result.loaded.name}, {held_out_in_words(*result.num_tokens, result.source)}")
    rows = [
        (
            row["model"] + " (control)" * row["control"],
            row["scheme"],
            f"{row['loss']:.4f}",
            f"{row['change']:+.4f}",
            ends(row["low"], row["high"]),
        )
        for row in result.summary["losses"]
    ]
    columns = ("model", "scheme", "loss", "change", "95 % interval")
    out.table("loss in nats a token, and its change from the baseline in 16 bits", columns, rows, limit=len(rows))
    for verdict in result.verdicts:
        out.say(verdict)
    out.say(f"Written to {path}")
