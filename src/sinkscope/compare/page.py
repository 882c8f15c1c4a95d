"""`compare`: runs side by side in one page.

Studies and traces are named by letters and compared by verdicts, numbers and curves. Training runs are grouped into
variants; their section of the page, and its figures, come from the room `pretrain`, through the registry of kinds.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from sinkscope.errors import InputError
from sinkscope.names import is_reference, reference_run, run_path
from sinkscope.pages import html
from sinkscope.pages.figure import Figure, axis, line, log_axis
from sinkscope.pages.text import NO_VALUE, visible
from sinkscope.results.kinds import kinds
from sinkscope.results.run import Run, is_run, read_run
from sinkscope.results.run_folder import check_output, check_page, is_training_run, run_folder, tables_path
from sinkscope.tracing.figures import dose_curve, sink_rates
from sinkscope.tracing.maps import head_map
from sinkscope.user_paths import user_path

COMPARED = ("study", "trace")
"""Kinds of runs that stand beside each other, and beside training runs."""
MOST_RUNS = 26
"""Studies and traces are named by letters; training runs by their variant."""
DISTINGUISHING = ("kind", "length", "count", "seed", "dtype", "revision", "keys", "weight_hash")
"""Facts that are added to equal labels where they differ."""
LABELS = {"kind": "tokens", "count": "sequences", "weight_hash": "weights"}
"""Some of these facts in the words of the commands."""
Labelled = Sequence[tuple[str, Run]]


def compare(runs: Sequence[str], out: Path, *, run_of: Callable[[str], Path], overwrite: bool = False) -> str:
    """Writes the page that compares runs, and returns their answers, one per line.

    A name that is not a run folder is a model, which `run_of` studies first. A model that comes with the package is
    compared as a training run too. The tables of training runs are written beside the page.
    """
    out = user_path(out)
    _check(runs, out, overwrite)
    folders = [reference_run(name) for name in runs if is_reference(name)]
    folders += [user_path(name) if is_run(user_path(name)) else run_of(name) for name in runs]
    return write_comparison_page(folders, out, overwrite=overwrite)


def _check(runs: Sequence[str], out: Path, overwrite: bool) -> None:
    """Refuses what cannot be compared or written, before a model is studied, which takes minutes."""
    training = [name for name in runs if is_training_run(user_path(name))]
    others = [name for name in runs if name not in training]
    if len(runs) < 2:
        raise InputError(f"A comparison needs two runs or more, not {len(runs)}. Give folders of runs, or models.")
    if len(others) > MOST_RUNS:
        raise InputError(
            f"{len(others)} runs are too many: at most {MOST_RUNS} studies and traces can be compared. Leave some out."
        )
    paths = [run_path(name).resolve() for name in runs]
    for index, name in enumerate(runs):
        if paths[index] in paths[:index]:
            raise InputError(f"{name} was given twice. Leave one of them out, or give another run.")
    trained = [name for name in runs if is_reference(name)] + training
    if len(trained) == 1:
        untrained = ", ".join(name for name in runs if name not in trained)
        raise InputError(
            f"{trained[0]} is a training run, and {untrained} is not, so they cannot be compared. "
            f"Give a second folder that sinkscope pretrain wrote, or leave {trained[0]} out."
        )
    check_page(out, overwrite)
    if out.suffix != ".html":  # the folder of the tables has the page's name without its suffix
        raise InputError(f"The name of the page, {out}, must end in .html. Give `out='{out.with_suffix('.html')}'`.")
    if trained:
        check_output(tables_path(out), overwrite)


def _with_distinct_labels(runs: Sequence[Run]) -> list[Run]:
    """The same runs. Equal labels get the facts in which their runs differ, or else the names of their folders."""
    result = []
    for run, folder in zip(runs, _folder_names(runs), strict=True):
        same_label = [other for other in runs if other.label == run.label]
        if len(same_label) == 1:
            result.append(run)
            continue
        facts = [_facts(other) for other in same_label]
        entries = []
        for name, value, values in zip(DISTINGUISHING, _facts(run), zip(*facts, strict=True), strict=True):
            if len(set(values)) > 1:
                entries.append(f"{LABELS.get(name, name)} {value[:8]}")
        if facts.count(_facts(run)) > 1:
            entries.append(f"in {folder}")
        result.append(replace(run, given_label=", ".join([run.label, *entries])))
    return result


def _facts(run: Run) -> tuple[str, ...]:
    """The values of DISTINGUISHING for a run, as text."""
    facts = {**run.config, **run.environment, **run.summary["tokens"]}
    return tuple(str(facts.get(name)) for name in DISTINGUISHING)


def _folder_names(runs: Sequence[Run]) -> list[str]:
    """The folder of each run, by as many of its last parts as no other run's folder ends with."""
    # For a/b/c: (c), (b, c), (a, b, c).
    endings = []
    for run in runs:
        parts = run.path.resolve().parts
        endings.append([parts[-count:] for count in range(1, len(parts) + 1)])
    counts = Counter(itertools.chain.from_iterable(endings))
    names = []
    for of_run in endings:
        shortest = next((ending for ending in of_run if counts[ending] == 1), of_run[-1])
        names.append(str(Path(*shortest)))
    return names


def write_comparison_page(folders: Sequence[Path], destination: Path, *, overwrite: bool = False) -> str:
    """Writes one page with the runs in these folders side by side, and returns their answers, one per line."""
    trained = [folder for folder in folders if is_training_run(folder)]
    others = _with_distinct_labels([read_run(folder, of=COMPARED) for folder in folders if folder not in trained])
    runs = [(_letter(index), run) for index, run in enumerate(others)]
    answers = [visible(f"{letter} {run.label}: {run.answer}") for letter, run in runs]
    if not trained:
        _write(destination, _title(others, 0), runs)
        return "\n".join(answers)
    # By name, because no product imports another.
    comparison = import_module(kinds()["training"].load).load(trained)
    with run_folder(tables_path(destination), overwrite) as folder:
        comparison.write(folder)
        section, section_figures = comparison.section(tables_path(destination))
        # Inside the block: a page that cannot be written leaves no tables either.
        _write(destination, _title(others, len(trained)), runs, list(comparison.variants), section, section_figures)
    return "\n".join([comparison.story, *answers, f"Tables: {tables_path(destination)}"])


def _write(
    destination: Path,
    title: str,
    runs: Labelled,
    variants: Sequence[str] = (),
    trained: str = "",
    trained_figures: Sequence[Figure] = (),
) -> None:
    """Writes the page; `trained` is the section of the training runs as HTML."""
    figures = _reading_figures(runs) if runs else []
    names = dict.fromkeys([*(run.model for _, run in runs), *variants])
    html.write_page(
        destination,
        "compare/page.html",
        title,
        [*figures, *trained_figures],
        ", ".join(names),
        trained=trained,
        runs=runs,
        cards=_cards(runs, destination.parent),
        judged=[(letter, run) for letter, run in runs if run.claims],
        statements={id: claim["statement"] for _, run in runs for id, claim in run.claims.items()},
        numbers=_numbers(runs),
        own_figures=figures,
    )


def _title(runs: Sequence[Run], num_trained: int) -> str:
    """What is compared: how many studies, traces and training runs."""
    kinds = [run.kind for run in runs]
    counts = [
        (kinds.count("study"), "study", "studies"),
        (kinds.count("trace"), "trace", "traces"),
        (num_trained, "training run", "training runs"),
    ]
    return f"Comparison of {' and '.join(f'{n} {one if n == 1 else many}' for n, one, many in counts if n)}"


def _letter(index: int) -> str:
    return chr(ord("A") + index)


def _cards(runs: Labelled, beside: Path) -> list[tuple[str, Run, html.Link, str]]:
    """By run: its letter, the run, its name that leads to its own page as seen from this one's folder, its folder."""
    folders = _folder_names([run for _, run in runs])
    return [
        (letter, run, html.to_run(run.label, run.path, beside), folder)
        for (letter, run), folder in zip(runs, folders, strict=True)
    ]


def _numbers(runs: Labelled) -> list[tuple]:
    """The main numbers of each run, as a row of the table."""
    entries = []
    for letter, run in runs:
        dom_ratio = run.summary["dom_ratio"]
        entries.append(
            (
                f"{letter} {run.label}",
                run.summary["sink_rate"],
                run.strongest,
                (run.summary.get("mechanism") or NO_VALUE).replace("_", " "),
                ", ".join(map(str, run.summary["birth_layers"])) or NO_VALUE,
                ", ".join(map(str, run.summary["massive_dimensions"][:4])) or NO_VALUE,
                _largest(dom_ratio.get("sink")),
                _largest(dom_ratio["elsewhere"]),
                _largest(run.tables["layers"]["variance_ratio"]),
            )
        )
    return entries


def _largest(values: Sequence[float | None] | None) -> float | None:
    """The largest value; None if there is none, as without a sink."""
    return max((value for value in values or () if value is not None), default=None)


def _overlay(
    id: str, title: str, caption: str, sources: tuple[str, ...], series: list[tuple], x_title: str, **options: Any
) -> Figure:
    """Curves of several runs in one figure: `series` holds (name, x, y, look)."""
    y_axis = log_axis("", *(y for _, _, y, _ in series)) if options.get("logarithmic") else axis("", rangemode="tozero")
    return Figure(
        id,
        title,
        caption,
        sources,
        [line(x, y, name, look) for name, x, y, look in series],
        {"xaxis": axis(x_title), "yaxis": y_axis},
        ("run", x_title, title.lower()),
        [(name, *pair) for name, x, y, _ in series for pair in zip(x, y, strict=True)],
    )


def _reading_figures(runs: Labelled) -> list[Figure]:
    named = [(f"{letter} {run.label}", run, look) for look, (letter, run) in enumerate(runs)]
    rates = [(name, *sink_rates(run)[:2], look) for name, run, look in named]
    sources = tuple(dict.fromkeys("rates" if "rates" in run.tables else "positions" for _, run in runs))
    figures = [_overlay("rates", "Sink rate by position", "Of the baseline models.", sources, rates, "key position")]
    by_layer = (
        ("dom_ratio_sink", "DomRatio at the sink", "Runs without a sink have no curve.", True),
        ("variance_ratio", "Variance ratio", "Value variance at position 0 over the later half.", True),
        ("effective_rank", "Effective rank", "Of up to 1,024 tokens.", False),
    )
    for column, title, caption, logarithmic in by_layer:
        series = []
        for name, run, look in named:
            layers = run.tables["layers"]
            if any(value is not None for value in layers[column]):
                series.append((name, layers["layer"], layers[column], look))
        if series:
            id = f"layers-{column.replace('_', '-')}"  # training runs on the same page have an effective rank too
            figures.append(_overlay(id, title, caption, ("layers",), series, "layer", logarithmic=logarithmic))
    doses = []
    for name, run, look in named:
        targets = {row["target"] for row in run.rows("rates", condition="amplify_variance")} - {None}
        for target in sorted(targets)[:1]:
            curve = dose_curve(run, "amplify_variance", target)
            factors, rates_at_target = [row["factor"] for row in curve], [row["rate"] for row in curve]
            doses.append((f"{name} @{target}", factors, rates_at_target, look))
    if doses:
        caption = "Sink rate at the target by factor of amplification; the first target of each run."
        figures.append(_overlay("dose", "Dose and response", caption, ("rates",), doses, "factor"))
    for letter, run in runs:
        map_of_run = head_map(run, "sink_rate", f"{letter} {run.label}: sink rate by head", f"heads-{letter}")
        figures.append(map_of_run)
    return figures
