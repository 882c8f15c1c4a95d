"""sinkscope report: the page of a finished run, written again from its files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from sinkscope.user_paths import user_path


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Which run, and where its page goes."""

    run: Annotated[
        str,
        typer.Argument(
            help="Folder of a training run, a study, a trace or a bias; reference:NAME for the training of that model.",
            show_default=False,
        ),
    ]
    out: Annotated[Path, typer.Option(help="Page to write.")] = Path("report.html")
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the page if it is there.")] = False


def report_command(asked: ReportOptions) -> None:
    """Write the page of one run: of training, its losses, its sink and when each link was born.

    Example: sinkscope report runs/tiny --out tiny.html
    """
    from sinkscope.report.result import write_page_of_run
    from sinkscope.report.text import say
    from sinkscope.results.run_folder import check_page

    out = user_path(asked.out)
    check_page(out, asked.overwrite)
    say(write_page_of_run(asked.run, out))
    say(f"Page: {asked.out}")
