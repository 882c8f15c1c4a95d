"""Training runs: the section of a comparison page, and the page of one run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sinkscope.pages import html
from sinkscope.pages.figure import Figure
from sinkscope.pages.text import NO_VALUE, escaped, interval, isolated, number
from sinkscope.pretrain.births import LINKS
from sinkscope.pretrain.comparison import TrainingComparison
from sinkscope.pretrain.figures import BATCHES, birth_figures, median_birth, ratio_text, training_figures
from sinkscope.pretrain.schemas import RATIOS
from sinkscope.results.run_folder import run_folder, tables_path

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
    courses, births = training_figures(comparison), birth_figures(comparison)
    title = f"Training of {run.name}"
    notes = "".join(f"<li>{isolated(note)}</li>" for note in comparison.notes)
    training = run.config["training"]
    circumstances = f"{run.variant}, seed {run.seed}; {training['steps']:,} steps"
    parts = [
        html.header(title, circumstances),
        f'<main id="main"><p class="answer">{isolated(comparison.story)}</p>',
        f'<ul class="caption">{notes}</ul>' if notes else "",
        _drawn(courses, _log_with),
        f"<h2>Birth of the links</h2>{_drawn(births, _log_with)}{_births(comparison)}" if births else "",
        f'<h2 id="method">Method</h2>{_birth_rules()}<h3>Model</h3>{html.facts(run.config["model"].items())}',
        f"<h3>Training</h3>{html.facts(training.items())}<h3>Environment</h3>{html.facts(run.environment.items())}",
        "</main>",
    ]
    html.write_glued(destination, title, "".join(parts), courses + births)


def figures(comparison: TrainingComparison) -> list[Figure]:
    """All figures of the page."""
    return training_figures(comparison) + birth_figures(comparison)


def write_page_beside(comparison: TrainingComparison, destination: Path, *, overwrite: bool) -> None:
    """Writes the page of several training runs, and their tables beside it."""
    count = len(comparison.tables["training_runs"]["run"])
    title = f"Comparison of {count} training run{'' if count == 1 else 's'}"
    with run_folder(tables_path(destination), overwrite) as folder:
        comparison.write(folder)
        part, drawn = section(comparison, tables_path(destination))
        body = f'{html.header(title, ", ".join(comparison.variants))}<main id="main">{part}</main>'
        # Inside the block: a page that cannot be written leaves no tables either.
        html.write_glued(destination, title, body, drawn)


def section(comparison: TrainingComparison, tables: Path) -> tuple[str, list[Figure]]:
    """The HTML of the section of a page beside the folder `tables`, and the figures that the page must draw."""
    courses, births = training_figures(comparison), birth_figures(comparison)

    def file_name(table: str) -> str:
        return f"{tables.name}/{table}.parquet"

    notes = "".join(f"<li>{isolated(note)}</li>" for note in comparison.notes)
    parts = [
        f'<p class="answer">{isolated(comparison.story)}</p>',
        _variants(comparison),
        f'<ul class="caption">{notes}</ul>' if notes else "",
        _drawn(courses, file_name),
        f"<h2>Birth of the links</h2>{_drawn(births, file_name)}{_births(comparison)}" if births else "",
        f"<h2>Runs</h2>{_runs(comparison, tables.parent)}",
        _method(comparison, tables.name),
    ]
    return "".join(parts), courses + births


def _log_with(table: str) -> str:
    """The log of a run from which this table of its page is made."""
    return "metrics.jsonl" if table == "losses" else "probes.jsonl"


def _drawn(figures: list[Figure], file_name: html.FileName) -> str:
    return f'<div class="figures">{"".join(html.figure(figure, file_name) for figure in figures)}</div>'


def _mean(row: Row) -> str:
    if row["quantity"] == "sink_rate":
        return f"{100 * row['mean']:.1f} %"
    if row["quantity"] == "tokens_per_second":
        return number(round(row["mean"]))
    return f"{row['mean']:.4f}" if row["quantity"] == "validation_loss" else number(row["mean"])


def _variants(comparison: TrainingComparison) -> str:
    """Variants as rows: what each reached, with its interval over seeds."""
    body = []
    for variant in comparison.variants:
        cells = []
        for quantity, label in COLUMNS.items():
            row = comparison.of(variant, quantity)
            is_one = variant == comparison.baseline and quantity in RATIOS
            cells.append(f'<td data-label="{escaped(label)}">{"1" if is_one and row else _cell(row)}</td>')
        seeds = len(comparison.rows("training_runs", variant=variant))
        name = f"{isolated(variant)}{' (baseline)' if variant == comparison.baseline else ''}"
        body.append(f'<tr><th scope="row">{name}</th><td data-label="seeds">{seeds}</td>{"".join(cells)}</tr>')
    head = "".join(f'<th scope="col">{escaped(label)}</th>' for label in ("variant", "seeds", *COLUMNS.values()))
    return (
        '<div class="scroll" tabindex="0"><table class="verdicts stacks" id="variants">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _cell(row: Row | None) -> str:
    if row is None:
        return NO_VALUE
    if row["quantity"] in RATIOS:
        if row["bound"] == ">" or row["mean"] is None:
            return escaped(f"{ratio_text(row)} ({row['num_reached']} of {row['num_seeds']} seeds reached it)")
        text = ratio_text(row)
    else:
        text = _mean(row)
    if row["low"] is None:
        return escaped(text)
    if row["quantity"] == "sink_rate":
        ends = f"{100 * max(0.0, row['low']):.1f} to {100 * row['high']:.1f}"
    elif row["quantity"] == "validation_loss":
        ends = f"{row['low']:.4f} to {row['high']:.4f}"
    else:
        ends = interval(row["low"], row["high"])
    return f'{escaped(text)} <span class="muted ends">({escaped(ends)})</span>'


def _births(comparison: TrainingComparison) -> str:
    """Links as rows, variants as columns: the tokens at birth, and in how many seeds."""
    parts = []
    for batch, name in BATCHES.items():
        if not comparison.rows("births", batch=batch):
            continue
        entries = []
        for link in LINKS:
            cells = []
            for variant in comparison.variants:
                rows = comparison.rows("births", variant=variant, batch=batch, link=link.name)
                cells.append(_birth_cell(rows) if rows else NO_VALUE)
            entries.append((link.name, f"at least {link.threshold:g}", *cells))
        columns = ("link", "threshold", *comparison.variants)
        parts.append(f"<h3>Training tokens at birth, on {escaped(name)}</h3>{html.table(columns, entries)}")
    return "".join(parts)


def _birth_cell(rows: list[Row]) -> str:
    born = [row for row in rows if row["tokens"] is not None]
    if not born:
        return "not born"
    median = median_birth(rows)
    tokens = "later than the end" if median is None else "from the start" if median == 0 else _tokens(median)
    return tokens if len(born) == len(rows) else f"{tokens} ({len(born)} of {len(rows)} seeds)"


def _tokens(count: int) -> str:
    for size, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g} {name}"
    return str(count)


def _runs(comparison: TrainingComparison, beside: Path) -> str:
    """A row for each run; its name leads to its own page, where there is one."""
    columns = ("run", "variant", "seed", "tokens", "seconds", "validation loss", "ratio of tokens", "paired")
    rows = comparison.rows("training_runs")
    names = [html.to_run(run.name, run.path, beside) for run in comparison.runs]
    return html.table(
        columns,
        [
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
        ],
    )


def _method(comparison: TrainingComparison, tables_folder: str) -> str:
    return (
        "<h2>Method</h2><p>Runs that differ only in their seed are replicas of a variant. Validation losses are not "
        "smoothed; between two evaluations they are interpolated on a straight line in tokens. A run reaches "
        f"{isolated(comparison.baseline)}'s final loss (that of the same seed) where its line first falls to it. "
        "Ratios are taken seed by seed. Their mean is geometric; their interval is Student's t of the logarithms. "
        "Seconds include evaluation, probes and compilation. Sink rate, DomRatio and effective rank are means over "
        f"layers at the last probe of held-out text.</p>{_birth_rules()}"
        f'<p class="caption">All tables: <code>{escaped(tables_folder)}/</code></p>'
    )


def _birth_rules() -> str:
    rules = "".join(
        f"<li>{escaped(link.name)}: {escaped(link.observable)}, at least {link.threshold:g}</li>" for link in LINKS
    )
    return (
        "<p>A link is born at the first probe at which its observable, in the layer where it is largest, reaches its "
        f"threshold and stays there to the end of the run:</p><ul>{rules}</ul>"
    )
