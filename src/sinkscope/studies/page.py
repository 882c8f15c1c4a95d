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
from sinkscope.pages.text import NO_VALUE, interval, number
from sinkscope.results.run import Run
from sinkscope.studies.claims import CLAIMS
from sinkscope.studies.figures import study_figures
from sinkscope.studies.judging import Step
from sinkscope.tracing import page as trace_page
from sinkscope.tracing.figures import chain_panels, neuron_name
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
        "The first neurons and conditions are drawn; the table holds all of them.",
    ),
}
AS_NAMED = "as named"
MOMENTS = {"variance": "variance", "energy": "energy", "squared_mean": "squared mean", "mean_share": "|mu| / |o|"}
"""Columns of the manipulation check, with their names on the page."""
REFEREED = ("sink_rate_at_target", "entropy_at_target", "entropy_elsewhere", "mixing_at_target", "mixing_elsewhere")


def write_page(run: Run, destination: Path) -> None:
    """Writes the page of a study."""
    shown, studied = trace_page.shared(run), study_figures(run)
    drawn = [*shown["panels"], *(figure for own in studied.values() for figure in own), *shown["all_maps"]]
    factorial = _factorial(run)
    places = [figure.id for figure in drawn]
    if factorial:
        places.append("factorial")
    claims = [_shown_claim(claim, places) for claim in run.claims.values()]
    html.write_page(
        destination,
        "studies/page.html",
        trace_page.title(run),
        drawn,
        run.circumstances,
        claim_groups={
            "What is seen in the untouched model": [claim for claim in claims if claim["link"] != "causal"],
            "What causes what": [claim for claim in claims if claim["link"] == "causal"],
        },
        notes=_notes(run),
        study_sections=[(name, *SECTIONS[name], own) for name, own in studied.items() if own],
        evidence=_evidence(run, shown["panels"]),
        steps=_steps(run),
        carriers=carriers(run),
        factorial=factorial,
        other_ways=_other_ways(run),
        moments=list(MOMENTS.values()),
        refereed=_refereed(run),
        quantities=[quantity.replace("_", " ") for quantity in REFEREED],
        **shown,
    )


def figures(run: Run) -> list[Figure]:
    """All figures of the page."""
    drawn = [figure for own in study_figures(run).values() for figure in own]
    return [*chain_panels(run), *drawn, *maps(run), *layer_curves(run)]


def _shown_claim(claim: dict[str, Any], places: Sequence[str]) -> dict[str, Any]:
    """A claim as a row of the table of verdicts; it leads to the first of `places` that shows its evidence."""
    return {
        **claim,
        "leads_to": _evidence_of(claim["id"], places),
        "interval_note": CLAIMS[claim["id"]].interval_note if claim["id"] in CLAIMS else "",
        "holds_when": _rule(claim),
    }


def _rule(claim: dict[str, Any]) -> str:
    """The condition under which the claim holds, such as low >= 0.05; a dash if no number was judged."""
    if claim["threshold"] is None:
        return NO_VALUE
    text = claim["rule"].replace("threshold", f"{claim['threshold']:g}")
    return text.replace(">=", "\N{GREATER-THAN OR EQUAL TO}").replace("<=", "\N{LESS-THAN OR EQUAL TO}")


def _evidence_of(claim: str, drawn: Sequence[str]) -> str | None:
    """The figure that shows a claim's evidence; doses have one for each position."""
    if claim not in CLAIMS:  # of a study saved before that claim went
        return None
    for name in CLAIMS[claim].figures:
        for id in drawn:
            if id == name or (name == "dose" and id.startswith("dose-")):
                return f"#{id}"
    return None


def _notes(run: Run) -> list[tuple]:
    """Claims that have a control or a note."""
    return [
        (claim["statement"], claim["control_name"] or NO_VALUE, claim["note"], claim["p_value"], claim["confidence"])
        for claim in run.claims.values()
        if claim["note"] or claim["control_name"]
    ]


def _evidence(run: Run, panels: Sequence[Figure]) -> dict[str, dict[str, list]]:
    """By panel: the claims about its links, and how their intervals are to be read."""
    evidence = {}
    for panel, links in zip(panels, PANEL_LINKS, strict=True):
        saved = {id: claim for id, claim in run.claims.items() if claim["link"] in links}
        notes = [
            f"The {id.replace('_', ' ')}: {CLAIMS[id].interval_note}"
            for id, claim in saved.items()
            if claim["low"] is not None and id in CLAIMS and CLAIMS[id].interval_note
        ]
        evidence[panel.id] = {"claims": list(saved.values()), "notes": notes}
    return evidence


def _steps(run: Run) -> list[tuple[Step, list[dict[str, Any]]]]:
    """The causal steps, each with the claims that test it."""
    steps = []
    for step in Step:
        tested_by = [run.claims[id] for id, claim in CLAIMS.items() if claim.step is step and id in run.claims]
        if tested_by:
            steps.append((step, tested_by))
    return steps


def _factorial(run: Run) -> list[tuple]:
    """Whom the target sees, times the level of its variance, times that of its energy."""
    return [
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


def _other_ways(run: Run) -> list[tuple]:
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
    return rows


def _refereed(run: Run) -> list[tuple]:
    """What each condition left alone: attention of other tokens, and the sink with all norms held."""
    changes: dict[tuple, dict[str, str]] = defaultdict(dict)
    for row in run.rows("effects"):
        change = f"{number(row['difference'])} ({interval(row['low'], row['high'])})"
        changes[row["condition"], row["target"], row["factor"]][row["quantity"]] = change
    return [
        (condition, target, factor or NO_VALUE, *(found.get(quantity, NO_VALUE) for quantity in REFEREED))
        for (condition, target, factor), found in changes.items()
    ]


def carriers(run: Run) -> str:
    """The minimal set or, where there is none, the writers along the sink's direction."""
    neurons, writers = run.rows("minimal_set"), run.summary.get("writers")
    if writers:
        names = ", ".join(map(neuron_name, writers))
        return f"The {len(writers)} neurons that write most along the sink's direction, as layer:neuron: {names}."
    if not neurons:
        return ""
    names = ", ".join(f"{neuron_name(neuron)} ({number(neuron['share'])})" for neuron in neurons)
    plural = "neuron" if len(neurons) == 1 else "neurons"
    return f"The minimal set has {len(neurons)} {plural}, as layer:neuron with the write share: {names}."
