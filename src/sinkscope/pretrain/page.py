"""Training runs: the section of a comparison page, and the page of one run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinkscope.pages import html
from sinkscope.pages.figure import Figure
from sinkscope.pages.text import NO_VALUE, interval, number
from sinkscope.pretrain.appearances import LINKS
from sinkscope.pretrain.comparison import TrainingComparison
from sinkscope.pretrain.figures import BATCHES, appearance_figures, median_tokens, ratio_text, training_figures
from sinkscope.pretrain.schemas import RATIOS
from sinkscope.results.run_folder import run_folder, tables_path

if TYPE_CHECKING:
    from markupsafe import Markup

Row = dict[str, Any]
COLUMNS = {
    "validation_loss": "final validation loss",
    "tokens_ratio": "tokens to the baseline's loss",
    "seconds_ratio": "seconds to the baseline's loss",
    "sink_rate": "sink rate",
    "dom_ratio": "DomRatio",
    "effective_rank": "effective rank",
    "tokens_per_second": "tokens/s",
}


def write_page(comparison: TrainingComparison, destination: Path) -> None:
    """Writes the page of one training run, which stands alone in the comparison."""
    (run,) = comparison.runs
    context = _shared_context(comparison)
    html.write_page(
        destination,
        "pretrain/page.html",
        f"Training of {run.name}",
        context["curves"] + context["appearances"],
        f"{run.variant}, seed {run.seed}; {run.config['training']['steps']:,} steps",
        run=run,
        file_name=_log_with,
        **context,
    )


def figures(comparison: TrainingComparison) -> list[Figure]:
    """All figures of the page."""
    return training_figures(comparison) + appearance_figures(comparison)


def write_page_beside(comparison: TrainingComparison, destination: Path, *, overwrite: bool) -> None:
    """Writes the page of several training runs, and their tables beside it."""
    count = len(comparison.tables["training_runs"]["run"])
    title = f"Comparison of {count} training run{'' if count == 1 else 's'}"
    with run_folder(tables_path(destination), overwrite) as folder:
        comparison.write(folder)
        section_html, section_figures = section(comparison, tables_path(destination))
        subtitle = ", ".join(comparison.variants)
        # Inside the block: a page that cannot be written leaves no tables either.
        html.write_page(destination, "pretrain/comparison.html", title, section_figures, subtitle, section=section_html)


def section(comparison: TrainingComparison, tables: Path) -> tuple[Markup, list[Figure]]:
    """The HTML of the section of a page beside the folder `tables`, and the figures that the page must draw."""
    context = _shared_context(comparison)
    section_html = html.render(
        "pretrain/section.html",
        quantities=list(COLUMNS.values()),
        variants=[_variant_row(comparison, variant) for variant in comparison.variants],
        runs=_runs(comparison, tables.parent),
        folder=tables.name,
        file_name=lambda table: f"{tables.name}/{table}.parquet",
        **context,
    )
    return section_html, context["curves"] + context["appearances"]


def _shared_context(comparison: TrainingComparison) -> dict[str, Any]:
    """What the templates of one run and of several runs both use."""
    return {
        "comparison": comparison,
        "curves": training_figures(comparison),
        "appearances": appearance_figures(comparison),
        "appearance_tables": _appearance_tables(comparison),
        "links": LINKS,
    }


def _log_with(table: str) -> str:
    """The log in the run's folder that a table of the page is made from; the tables of one run are not written."""
    return "metrics.jsonl" if table == "losses" else "probes.jsonl"


def _mean(row: Row) -> str:
    if row["quantity"] == "sink_rate":
        return f"{100 * row['mean']:.1f} %"
    if row["quantity"] == "tokens_per_second":
        return number(round(row["mean"]))
    return f"{row['mean']:.4f}" if row["quantity"] == "validation_loss" else number(row["mean"])


def _variant_row(comparison: TrainingComparison, variant: str) -> dict[str, Any]:
    """A variant as a row of the first table: each quantity at the end, with its interval over seeds."""
    cells = {}
    for quantity, label in COLUMNS.items():
        row = comparison.of(variant, quantity)
        if row is not None and quantity in RATIOS and variant == comparison.baseline:
            cells[label] = "1", ""  # the baseline's ratio to itself
        else:
            cells[label] = _cell(row)
    return {"name": variant, "num_seeds": len(comparison.rows("training_runs", variant=variant)), "cells": cells}


def _cell(row: Row | None) -> tuple[str, str]:
    """A value and its interval, which is empty where there is none."""
    if row is None:
        return NO_VALUE, ""
    if row["quantity"] in RATIOS:
        if row["bound"] == ">" or row["mean"] is None:
            return f"{ratio_text(row)} ({row['num_reached']} of {row['num_seeds']} seeds reached it)", ""
        text = ratio_text(row)
    else:
        text = _mean(row)
    if row["low"] is None:
        return text, ""
    if row["quantity"] == "sink_rate":
        # Student's interval may reach below 0, which no rate does.
        ends = f"{100 * max(0.0, row['low']):.1f} to {100 * row['high']:.1f}"
    elif row["quantity"] == "validation_loss":
        ends = f"{row['low']:.4f} to {row['high']:.4f}"
    else:
        ends = interval(row["low"], row["high"])
    return text, ends


def _appearance_tables(comparison: TrainingComparison) -> dict[str, list[tuple]]:
    """By batch: links as rows, variants as columns, with the tokens at which a link appears, and in how many seeds."""
    tables = {}
    for batch, name in BATCHES.items():
        if not comparison.rows("births", batch=batch):
            continue
        entries = []
        for link in LINKS:
            cells = []
            for variant in comparison.variants:
                rows = comparison.rows("births", variant=variant, batch=batch, link=link.name)
                cells.append(_appearance_cell(rows) if rows else NO_VALUE)
            entries.append((link.name, f"at least {link.threshold:g}", *cells))
        tables[name] = entries
    return tables


def _appearance_cell(rows: list[Row]) -> str:
    """When a link appeared in the middle seed, and in how many seeds if not in all."""
    num_appeared = sum(row["tokens"] is not None for row in rows)
    if not num_appeared:
        return "did not appear"
    median = median_tokens(rows)
    if median is None:
        text = "later than the end"
    elif median == 0:
        text = "from the start"
    else:
        text = _tokens(median)
    return text if num_appeared == len(rows) else f"{text} ({num_appeared} of {len(rows)} seeds)"


def _tokens(count: int) -> str:
    for size, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g} {name}"
    return str(count)


def _runs(comparison: TrainingComparison, beside: Path) -> list[tuple]:
    """A row for each run; its name leads to its own page, where there is one."""
    rows = comparison.rows("training_runs")
    names = [html.to_run(run.name, run.path, beside) for run in comparison.runs]
    return [
        (
            name,
            row["variant"],
            str(row["seed"]),
            _tokens(row["tokens"]),
            row["elapsed_s"],
            f"{row['validation_loss']:.4f}",
            f"{row['bound']} {number(row['tokens_ratio'])}".strip(),
            "yes" if row["is_paired"] else "no",
        )
        # A saved comparison does not know where its runs are.
        for name, row in zip(names or [row["run"] for row in rows], rows, strict=True)
    ]
