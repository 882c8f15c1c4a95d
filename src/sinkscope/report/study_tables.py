"""What a study lists beside its figures: the factorial, what conditions left alone, the minimal set, dimensions."""

from __future__ import annotations

from collections import defaultdict
from math import exp, log
from statistics import fmean

from sinkscope.report import html
from sinkscope.report.rate_figures import DOSED
from sinkscope.report.run import Run
from sinkscope.report.text import NO_VALUE, escaped, interval, number
from sinkscope.report.trace import unit_name


def massive_dimensions(run: Run) -> str:
    """The dimensions that dominate at the strongest key, layer by layer."""
    columns = ("layer", "dimension", "value", "magnitude", "ratio", "contrast")
    rows = [tuple(row[name] for name in columns) for row in run.rows("dimensions", position=run.strongest)]
    if not rows:
        return ""
    cut = f", {html.MAX_ROWS} of {len(rows)} rows" if len(rows) > html.MAX_ROWS else ""
    return (
        f"<details><summary>Massive dimensions at position {run.strongest}{cut}</summary>"
        '<p class="caption">Value and magnitude are means over sequences. Ratio: magnitude over the mean of all '
        "dimensions at the position. Contrast: over the same dimension at other positions. Layer -1 enters layer 0.</p>"
        f"{html.table(columns, rows[: html.MAX_ROWS])}</details>"
    )


def factorial(run: Run) -> str:
    """Whom the target sees, times the level of its variance, times that of its energy."""
    cells = [
        (
            row["mixing"],
            row["variance_of"] or NO_VALUE,
            row["energy_of"] or NO_VALUE,
            row["targets"],
            row["rise"],
            interval(row["low"], row["high"]),
            row["variance"],
            row["energy"],
            row["missed"] or "as named",
        )
        for row in run.rows("factorial")
    ]
    if not cells:
        return ""
    columns = ("sees", "variance of", "energy of", "at positions", "rise", "interval", "variance", "energy", "check")
    return (
        '<details open id="factorial"><summary>Mixing, variance and energy taken apart</summary>'
        '<p class="caption">Whom the token sees in the layers up to the birth, and at whose level its batch variance '
        "and its energy are. Rise of the sink rate by later queries; variance and energy over the untouched ones, "
        "geometric means over layers. What the check marks did not do what its name says, and supports nothing.</p>"
        f"{html.table(columns, cells)}</details>{_other_ways(run)}"
    )


def _other_ways(run: Run) -> str:
    """What else was done to the aggregation of a target, and what it did to its variance and energy."""
    rows = []
    for name in DOSED:
        effects = [row for row in run.rows("effects", condition=name, quantity="sink_rate_at_target") if row["factor"]]
        for factor in sorted({row["factor"] for row in effects}):
            rises = [row["difference"] for row in effects if row["factor"] == factor]
            did = run.rows("manipulation", condition=name, factor=factor)
            moments = [[row[moment] for row in did if row[moment]] for moment in ("variance", "energy", "squared_mean")]
            means = [fmean(map(log, own)) for own in moments if own]
            if len(means) == len(moments):
                rows.append((name, factor, fmean(rises), *map(exp, means)))
    if not rows:
        return ""
    return (
        "<details><summary>Other ways to raise the variance, or to leave it alone</summary>"
        '<p class="caption">Means over positions; variance, energy and squared mean over the untouched ones, geometric '
        "means over layers.</p>"
        f"{html.table(('condition', 'factor', 'rise', 'variance', 'energy', 'squared mean'), rows)}</details>"
    )


REFEREED = ("sink_rate_at_target", "entropy_at_target", "entropy_elsewhere", "mixing_at_target", "mixing_elsewhere")


def referee(run: Run) -> str:
    """What each condition left alone: attention of other tokens, and the sink with all norms held."""
    changes: dict[tuple, dict[str, str]] = defaultdict(dict)
    for row in run.rows("effects"):
        change = f"{number(row['difference'])} ({interval(row['low'], row['high'])})"
        changes[row["condition"], row["target"], row["factor"]][row["quantity"]] = change
    cells = [
        (condition, target, factor or NO_VALUE, *(found.get(quantity, NO_VALUE) for quantity in REFEREED))
        for (condition, target, factor), found in changes.items()
    ]
    if not cells:
        return ""
    columns = ("condition", "at position", "factor", *(quantity.replace("_", " ") for quantity in REFEREED))
    return (
        f"<details><summary>Attention at the target and elsewhere, {min(len(cells), html.MAX_ROWS)} of {len(cells)} "
        'conditions</summary><p class="caption">Change by each condition, with its 95 % interval; mixing is sum a^2. '
        "Elsewhere: mean over all other positions. clamp_norms holds the norm of every token after every layer at its "
        "untouched value. Every position is in the table attention_rows, norms by layer in the table norms.</p>"
        f"{html.table(columns, cells[: html.MAX_ROWS])}</details>"
    )


def minimal_set(run: Run) -> str:
    units = run.rows("minimal_set")
    if not units:
        return ""
    names = ", ".join(f"{unit_name(unit)} ({number(unit['share'])})" for unit in units)
    plural = "unit" if len(units) == 1 else "units"
    return f"<p>The minimal set has {len(units)} {plural}, as layer:neuron with the write share: {escaped(names)}.</p>"
