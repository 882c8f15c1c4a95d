"""sinkscope compare: runs side by side in one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def compare_command(
    runs: Annotated[
        list[str],
        typer.Argument(
            help="Run folders of studies, traces or training; or models, which are studied.", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Option(help="Page to write.")] = Path("comparison.html"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the page if it is there.")] = False,
) -> None:
    """Put runs side by side in one page.

    Example: sinkscope compare runs/gpt2-20260301-120000 runs/smollm2-20260301-121500
    """
    from sinkscope.commands.study import study_run
    from sinkscope.report.comparison import compare

    compare(runs, out, overwrite=overwrite, run_of=study_run)
    print(f"Page: {out}")
