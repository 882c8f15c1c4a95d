"""The page of a finished run, whatever its kind, from the files in its folder alone. Only training needs torch."""

from __future__ import annotations

from pathlib import Path

from sinkscope.initial_bias.page import write_bias_page
from sinkscope.names import run_path
from sinkscope.results.run import Run, read_run
from sinkscope.results.run_folder import is_training_run
from sinkscope.studies.page import write_study_page


def write_page_of_run(name: str | Path, out: Path) -> str:
    """Writes the page, and returns the run's answer. reference:NAME stands for its training run."""
    folder = run_path(name)
    if is_training_run(folder):
        from sinkscope.pretrain.comparison import compare_training
        from sinkscope.pretrain.page import write_training_run_page

        write_training_run_page(trained := compare_training([folder]), out)
        return trained.story
    run = read_run(folder)
    write_page_of(run, out)
    return run.answer


def write_page_of(run: Run, out: Path) -> None:
    """Writes the page of a study, a trace or a bias."""
    (write_bias_page if run.kind == "bias" else write_study_page)(run, out)
