"""One self-contained HTML file from a run folder: the answer, the verdicts, the chain, the evidence, the method."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

from sinkscope.pages import html
from sinkscope.pages.figure import Figure
from sinkscope.pages.text import NO_VALUE, escaped, interval, isolated, number
from sinkscope.results.page_parts import method
from sinkscope.results.run import Run
from sinkscope.studies.claims import CLAIMS
from sinkscope.studies.figures import study_figures
from sinkscope.studies.judging import Step
from sinkscope.tracing import page as trace_page
from sinkscope.tracing.figures import chain_panels, unit_name
from sinkscope.tracing.maps import layer_curves, maps

# The links that each panel of the chain shows, from left to right.
PANEL_LINKS = (
    ("variance_discrepancy",),
    ("super_neurons",),
    ("channel_sparsity",),
    ("dimension_disparity", "directional_collapse"),
    ("sink",),
)
SECTIONS = {
    "creation": ("What makes a sink", "Each intervention changes one position of an ordinary sequence."),
    "necessity": ("What the sink needs", "Each removal takes one thing away and leaves the rest as it was."),
    "mediation": (
        "What carries the effect",
        "If an effect passes through a mediator, it disappears while the mediator is held at its untouched values.",
    ),
    "confounds": (
        "What else changes",
        "What each intervention changes besides the sink: entropy, mixing, norms and loss, after over before.",
    ),
    "histograms": (
        "Super neurons before and after",
        "The first units and conditions are drawn; the table holds all of them.",
    ),
}
WIDE = ("forest", "mediation-effects", "confounds")
"""Figures that take the whole width."""
METHOD = (
    "Claims, statistics, controls, thresholds and rules are the same for every model. Units and means are chosen on "
    "one set of sequences, and the claims are judged on another. Intervals are bootstrap intervals over sequences at a "
    "family-wise 95 % (Holm over the claims). A claim is undecided where its interval is too wide for either verdict, "
    "and not applicable where there is nothing to explain."
)


def write_page(run: Run, destination: Path) -> None:
    """Writes the page of a study."""
    panels, studied, maps_drawn = chain_panels(run), study_figures(run), [*maps(run), *layer_curves(run)]
    every = [*panels, *(figure for drawn in studied.values() for figure in drawn), *maps_drawn]
    counts = run.summary.get("counts")
    parts = [
        trace_page.page_header(run),
        verdict_table(run, [*(figure.id for figure in every), *(["factorial"] if run.rows("factorial") else [])]),
        f'<p id="counts" class="caption">{isolated(counts)}</p>' if counts else "",
        trace_page.navigation([(name, SECTIONS[name][0]) for name, drawn in studied.items() if drawn]),
        trace_page.chain(panels, lambda number, panel: _evidence(run, number), _arrows(run)),
    ]
    extras = {"necessity": carriers, "creation": factorial, "confounds": referee}
    for name, drawn in studied.items():
        if drawn:
            extra = extras[name](run) if name in extras else ""
            parts.append(
                html.section(name, *SECTIONS[name], drawn, wide=WIDE, extra=extra, is_small=name == "histograms")
            )
    parts += [trace_page.massive_dimensions(run), trace_page.maps_section(run, maps_drawn), method(run, METHOD)]
    html.write_glued(destination, trace_page.title(run), "".join([*parts, "</main>"]), every)


def figures(run: Run) -> list[Figure]:
    """All figures of the page."""
    drawn = [figure for own in study_figures(run).values() for figure in own]
    return [*chain_panels(run), *drawn, *maps(run), *layer_curves(run)]


def _evidence(run: Run, number: int) -> str:
    """The claims about a link, below its panel."""
    saved = {id: claim for id, claim in run.claims.items() if claim["link"] in PANEL_LINKS[number - 1]}
    claims = [html.evidence(claim) for claim in saved.values()]
    if not claims:
        return ""
    notes = [
        f'<p class="caption">The {id.replace("_", " ")}: {escaped(CLAIMS[id].interval_note)}</p>'
        for id, claim in saved.items()
        if claim["low"] is not None and id in CLAIMS and CLAIMS[id].interval_note
    ]
    return f'<ul class="evidence">{"".join(claims)}</ul>{"".join(notes)}'


def _arrows(run: Run) -> str:
    """The causal steps below the panels that they span."""
    cards = []
    for step in Step:
        first, last = step.first_panel, step.last_panel
        tested_by = [id for id, claim in CLAIMS.items() if claim.step is step and id in run.claims]
        claims = [html.evidence(run.claims[id]) for id in tested_by]
        if claims:
            cards.append(
                f'<section class="arrow" style="grid-column:{first}/{last + 1}">'
                f"<h3>{first} \N{RIGHTWARDS ARROW} {last} {step.label}</h3><ul>{''.join(claims)}</ul></section>"
            )
    return "".join(cards)


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


def verdict_table(run: Run, drawn: Sequence[str]) -> str:
    """The table of verdicts; a claim leads to the first of `drawn` that shows its evidence."""
    claims = list(run.claims.values())
    groups = (
        ("What is seen in the untouched model", [claim for claim in claims if claim["link"] != "causal"]),
        ("What causes what", [claim for claim in claims if claim["link"] == "causal"]),
    )
    body = "".join(
        f'<tr class="group"><th colspan="7" scope="rowgroup">{name}</th></tr>'
        + "".join(_verdict_row(claim, drawn) for claim in own)
        for name, own in groups
        if own
    )
    notes = [
        (claim["statement"], claim["control_name"] or NO_VALUE, claim["note"], claim["p_value"], claim["confidence"])
        for claim in claims
        if claim["note"] or claim["control_name"]
    ]
    listed = html.table(("claim", "control", "note", "p before Holm", "confidence of the interval"), notes)
    return (
        f"{html.tally([claim['verdict'] for claim in claims])}"
        '<table class="verdicts stacks" id="verdicts"><thead><tr><th scope="col">Verdict</th><th scope="col">Claim</th>'
        '<th scope="col" class="number">Effect</th><th scope="col" class="number">Interval</th>'
        '<th scope="col">Holds when</th><th scope="col" class="number">Control</th>'
        '<th scope="col" class="number">n</th></tr></thead>'
        f"<tbody>{body}</tbody></table>"
        + (f"<details><summary>Controls and notes</summary>{listed}</details>" if notes else "")
    )


def _evidence_of(claim: str, drawn: Sequence[str]) -> str | None:
    """The figure that shows a claim's evidence; doses have one for each position."""
    if claim not in CLAIMS:  # of a study saved before that claim went
        return None
    for name in CLAIMS[claim].figures:
        for id in drawn:
            if id == name or (name == "dose" and id.startswith("dose-")):
                return f"#{id}"
    return None


def _verdict_row(claim: dict[str, Any], drawn: Sequence[str]) -> str:
    interval_note = CLAIMS[claim["id"]].interval_note if claim["id"] in CLAIMS else ""
    note = f' title="{escaped(interval_note)}"' if interval_note else ""
    cells = (
        ("Effect", number(claim["effect"]), True),
        ("Interval", interval(claim["low"], claim["high"]), True),
        ("Holds when", html.rule(claim), False),
        ("Control", number(claim["control"]), True),
        ("n", number(claim["n"]), True),
    )
    return (
        f"<tr><td>{html.verdict(claim['verdict'])}</td>"
        f'<td title="{escaped(claim["id"])}">{html.linked(claim["statement"], _evidence_of(claim["id"], drawn))}</td>'
        + "".join(
            f'<td class="{"number" if is_number else ""}{" empty" if text == NO_VALUE else ""}" data-label="{label}"'
            f"{note if label == 'Interval' else ''}>{escaped(text)}</td>"
            for label, text, is_number in cells
        )
        + "</tr>"
    )
