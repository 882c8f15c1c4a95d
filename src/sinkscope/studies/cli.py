"""sinkscope study: the command, its options, and what it prints."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from sinkscope.arguments import check_choice, check_study
from sinkscope.cli_options import BatchOptions, ModelOptions
from sinkscope.cli_output import (
    Output,
    finished_parts_are_kept,
    first_process_writes,
    run_environment,
    run_path,
    write_config,
    write_pictures,
)
from sinkscope.errors import InputError

if TYPE_CHECKING:
    from sinkscope.studies.study import Study

BOS = {"auto": None, "yes": True, "no": False}
CHOICES = (*BOS, "both")


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """How the sequences of a study begin."""

    bos: Annotated[
        str,
        typer.Option(
            help="Begin with what the tokenizer puts before a text, or with BOS if it puts nothing: yes, no, both (two "
            "studies side by side), or auto: text begins as the tokenizer begins it, random tokens with nothing."
        ),
    ] = "auto"
    text: Annotated[
        str | None,
        typer.Option(
            help="Text file on which the claims that decide are judged too; one of 60 kB ships with the package.",
            show_default=False,
        ),
    ] = None

    def __post_init__(self) -> None:
        check_choice("bos", self.bos, CHOICES)


class ValueOfBos(TyperCommand):
    """Refuses --no-bos, and --bos without a value, which are right in other commands: a study can have both."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for option, value in pairwise([*args, "--"]):
            choices = ", ".join(CHOICES)
            if option == "--no-bos":
                raise InputError(f"A study has no --no-bos: `bos` takes a value ({choices}). Give `bos=False`.")
            if option == "--bos" and value.startswith("--"):
                raise InputError(f"`bos` needs a value ({choices}). Give, for example, `bos=True`.")
        return super().parse_args(ctx, args)


def study_command(asked: StudyOptions, tokens: BatchOptions, source: ModelOptions, output: Output) -> None:
    """Test which mechanism makes the attention sink of a model: its token, its place, no averaging, or variance.

    Interventions with controls decide 14 claims, and a report is written to the run folder. Claims are judged on
    the given sequences; 96 others choose what is tested and calibrate it. An interrupted study resumes when the same
    command is given again with the same --out.

    Example: sinkscope study HuggingFaceTB/SmolLM2-135M --out runs/smollm2
    """
    check_study(tokens.length, tokens.num_sequences)
    path = output.path(source.model)
    runs, page = _both(path, asked, output.overwrite) if asked.bos == "both" else ({path: asked}, None)
    with finished_parts_are_kept(f"the same command with --out {path} goes on"):
        _study(source, tokens, runs, page, output)
    if output.as_json:
        texts = [(run / "summary.json").read_text(encoding="utf-8") for run in runs]
        print(texts[0] if page is None else f"[{', '.join(texts)}]")


def _both(path: Path, asked: StudyOptions, overwrite: bool) -> tuple[dict[Path, StudyOptions], Path]:
    """The run folders of the studies with and without BOS, and the page that compares them. Checked before any work."""
    from sinkscope.results.run_folder import check_page

    names = {"bos": "yes", "no-bos": "no"}  # in this order, a model that has no BOS is refused at once
    runs = {
        path.with_name(f"{path.name}-{name}"): StudyOptions(bos=choice, text=asked.text)
        for name, choice in names.items()
    }
    for run in runs:
        run_path(run, None, overwrite)
    page = path.with_name(f"{path.name}.html")
    check_page(page, overwrite)
    return runs, page


def study_run(model: str) -> Path:
    """Studies a model with every option at its default; returns the run folder."""
    path = run_path(None, model, overwrite=False)
    command = shlex.join(["sinkscope", "study", model, "--out", str(path)])
    with finished_parts_are_kept(f"{command} goes on, and {path} can be compared"):
        _study(ModelOptions(model=model), BatchOptions(), {path: StudyOptions()}, None, Output())
    return path


def _study(
    source: ModelOptions, tokens: BatchOptions, runs: dict[Path, StudyOptions], page: Path | None, output: Output
) -> None:
    """Studies one model, with BOS, without, or both. No run is written before all studies are done, so that an
    interrupted command can be given again as it is."""
    from sinkscope import __version__, processes
    from sinkscope.pages import progress
    from sinkscope.results.parts import Parts
    from sinkscope.results.run_folder import run_folder
    from sinkscope.studies.study import study

    loaded = source.load()
    identity = asdict(source) | asdict(tokens) | {"weights": loaded.weight_hash, "version": __version__}
    parts = {path: Parts(path, identity | asdict(asked)) for path, asked in runs.items()}
    results: dict[Path, Study] = {}
    for path, asked in runs.items():
        if processes.count() > 1:  # one process makes it only when needed: a refused run must change nothing
            processes.from_first(parts[path].prepare)
        with progress.bar(f"conditions of {loaded.name}") as move:
            results[path] = study(
                loaded, bos=BOS[asked.bos], text=asked.text, **asdict(tokens), parts=parts[path], progress=move
            )
    first_process_writes()
    for path, result in results.items():
        with progress.working("writing tables and the report"), run_folder(path, output.overwrite) as folder:
            write_config(folder, source, tokens, runs[path])
            attention = result.trace.recording.attention_path
            folder.write_json("environment.json", run_environment(loaded, attention_path=attention))
            result.write(folder)
            write_pictures(folder)
        if not output.as_json:
            show(result, path)
    if page is not None:
        from sinkscope.compare.page import write_comparison_page

        write_comparison_page(list(runs), page)
        if not output.as_json:
            print(f"Side by side: {page}")
    for each in parts.values():
        each.discard()


def show(study: Study, path: Path) -> None:
    """The answer in a sentence, the verdicts as a table, and how many there are of each."""
    from sinkscope.pages.terminal import Terminal

    out = Terminal()
    out.say(study.verdict, style="bold")
    rows = []
    for judgement in study.judgements:
        interval = "" if judgement.low is None else f"{judgement.low:.3g} to {judgement.high:.3g}"
        effect = "" if judgement.effect is None else f"{judgement.effect:.3g}"
        control = "" if judgement.control is None else f"{judgement.control:.3g}"
        rows.append((judgement.id.replace("_", " "), judgement.verdict, effect, interval, control))
    out.table("claims", ("claim", "verdict", "effect", "interval", "control"), rows, limit=len(rows))
    if study.counts:
        out.say(study.counts)
    out.say_where(path)
