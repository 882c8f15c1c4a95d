"""What a study lists beside its figures: the factorial, what conditions left alone, the minimal set, dimensions."""

from __future__ import annotations

from collections import defaultdict
from math import exp, log
from statistics import fmean

from sinkscope.pages import html
from sinkscope.pages.text import NO_VALUE, escaped, interval, number
from sinkscope.results.run import Run
from sinkscope.tracing.figures import unit_name


def factorial(run: Run) -> str:
    """Whom the target sees, times the level of its variance, times that of its energy."""
    cells = [
        (
            row["mixing"],
            row["variance_of"] or NO_VALUE,
            row["energy_of"] or NO_VALUE,
            row["entering"],
            row["targets"],
            row["rise"],
            interval(row["low"], row["high"]),
            *(row[moment] for moment in MOMENTS),
            row["missed"] or AS_NAMED,
        )
        for row in run.rows("factorial")
    ]
    if not cells:
        return ""
    names = ("sees", "variance of", "energy of", "entering", "at positions", "rise", "interval")
    columns = (*names, *MOMENTS.values(), "check")
    return (
        '<details open id="factorial"><summary>Mixing, variance and energy taken apart</summary>'
        '<p class="caption">Whom the token sees in the layers up to the birth, and at whose level its batch variance '
        "and its energy are, where the aggregation enters the output projection or a norm before it. Rise of the sink "
        "rate by later queries; variance and what follows it over the untouched ones, geometric means over layers. "
        f"{MARKED}</p>"
        f"{html.table(columns, cells)}</details>{_other_ways(run)}"
    )


AS_NAMED = "as named"
MARKED = (
    "The last column marks a condition that did not do what its name says: off by more than 10 % (root mean square "
    "over layers, less what sampling adds), or in one layer with its whole 99 % interval. It supports nothing: a claim "
    "that needs it is not applicable."
)
MOMENTS = {"variance": "variance", "energy": "energy", "squared_mean": "squared mean", "mean_share": "|mu| / |o|"}
"""Columns of the manipulation check, with their names on the page."""


def _other_ways(run: Run) -> str:
    """What every condition outside of the factorial did to the aggregation where it acts, beside its effect."""
    cells = {row["mixing"] for row in run.rows("factorial")}
    effects = run.rows("effects", quantity="sink_rate_at_target")
    changes = {(row["condition"], row["factor"], row["target"]): row["difference"] for row in effects}
    did = defaultdict(list)
    for row in run.rows("manipulation"):
        if row["condition"].split("+")[0] not in cells:
            did[row["condition"], row["factor"], row["target"], row["entering"]].append(row)
    rows = []
    for (name, factor, target, entering), own in did.items():
        seen = [[row[moment] for row in own if (row[moment] or 0) > 0] for moment in MOMENTS]
        means = [exp(fmean(map(log, values))) if values else NO_VALUE for values in seen]
        change = changes.get((name, factor, target), NO_VALUE)
        rows.append((name, target, factor or NO_VALUE, change, entering, *means, own[0]["missed"] or AS_NAMED))
    if not rows:
        return ""
    names = ("condition", "at position", "factor", "change of the rate", "entering")
    columns = (*names, *MOMENTS.values(), "check")
    return (
        "<details><summary>What the other conditions did to the aggregation</summary>"
        '<p class="caption">Variance and what follows it where each acts, over the untouched ones, geometric means '
        "over layers. Scaling, a random direction and another sequence's deviation are "
        "other ways to raise the variance; the shift of the mean must leave the variance as it is. "
        f"{MARKED}</p>"
        f"{html.table(columns, rows[: html.MAX_ROWS])}</details>"
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


def carriers(run: Run) -> str:
    """The minimal set or, where there is none, the writers along the sink's direction."""
    units, writers = run.rows("minimal_set"), run.summary.get("writers")
    if writers:
        names = ", ".join(map(unit_name, writers))
        return f"<p>The {len(writers)} units that write most along the sink's direction, as layer:neuron: {names}.</p>"
    if not units:
        return ""
    names = ", ".join(f"{unit_name(unit)} ({number(unit['share'])})" for unit in units)
    plural = "unit" if len(units) == 1 else "units"
    return f"<p>The minimal set has {len(units)} {plural}, as layer:neuron with the write share: {escaped(names)}.</p>"
