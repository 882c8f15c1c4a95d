"""The command `sinkscope compare`: runs side by side in one page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """What is compared, and where the page goes."""

    runs: Annotated[
        list[str],
        typer.Argument(
            help="Run folders of studies, traces or training; or models, which are studied first.", show_default=False
        ),
    ]
    out: Annotated[Path, typer.Option(help="Page to write.")] = Path("comparison.html")
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the page if it is there.")] = False


def compare_command(options: CompareOptions) -> None:
    """Put runs side by side in one page.

    Training runs that differ only in their seed are replicas of a variant. The baseline is softmax or, without one, the
    first run's variant. Tables of training runs are written beside the page. A model is studied first, which takes
    minutes on a CPU. For the models that come with the package, both their training and a study are shown.

    Example: sinkscope compare reference:softmax reference:head_norm reference:learned_sink
    """
    from sinkscope.compare.page import compare
    from sinkscope.pages.text import say
    from sinkscope.studies.cli import study_run

    say(compare(options.runs, options.out, overwrite=options.overwrite, run_of=study_run))
    say(f"Page: {options.out}")
