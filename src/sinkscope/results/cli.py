"""The command `sinkscope report`: writes the page of a finished run again, from its files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from sinkscope.names import is_reference
from sinkscope.user_paths import user_path


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Which run, and where its page goes."""

    run: Annotated[
        str,
        typer.Argument(
            help="Folder of a run that a sinkscope command wrote; reference:NAME for the training of that model.",
            show_default=False,
        ),
    ]
    out: Annotated[
        Path | None,
        typer.Option(help="Page to write; default report.html in the run's folder, or here for reference:NAME."),
    ] = None
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the page if it is there.")] = False


def report_command(options: ReportOptions) -> None:
    """Write the page of one run.

    The page of a training run shows its losses, its sink and when each link appeared.

    Example: sinkscope report runs/tiny --overwrite
    """
    from sinkscope.pages.text import say
    from sinkscope.results.run_folder import check_page
    from sinkscope.results.saved import write_page_of_run

    beside = Path() if is_reference(options.run) else user_path(options.run)
    out = beside / "report.html" if options.out is None else user_path(options.out)
    check_page(out, options.overwrite)
    say(write_page_of_run(options.run, out))
    say(f"Page: {out}")
