"""The page of a study, from its run folder: the answer, the verdicts, the chain with its evidence, and the method."""

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
from sinkscope.studies.conditions import in_words
from sinkscope.studies.figures import study_figures
from sinkscope.studies.judging import Step
from sinkscope.studies.schemas import BACK_UP, NEEDED
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
    "creation": (
        "What makes a sink",
        "Each intervention changes a single position, one that is an ordinary token in the baseline (the model as it "
        "is).",
    ),
    "necessity": ("What the sink needs", "Each removal takes one thing away from the sink and leaves everything else."),
    "mediation": (
        "What carries the effect",
        "If an effect passes through neurons or dimensions, it disappears while these are held at their baseline "
        "values.",
    ),
    "confounds": (
        "What else changes",
        "What each intervention changes besides the sink: entropy and mixing of attention, norms, and loss.",
    ),
    "text": (
        "What the sink is for",
        "What is lost on text without the sink, and whether the heads that have it do anything there.",
    ),
    "histograms": (
        "Activations of super neurons",
        "The first neurons and conditions are shown; the table has all of them.",
    ),
}
PASSED = "passed"
"""What the page shows where a condition passed its manipulation check."""
MOMENTS = {"variance": "variance", "energy": "energy", "squared_mean": "squared mean", "mean_share": "|mu| / |o|"}
"""Columns of the tables `factorial` and `manipulation`, with their names on the page."""
BESIDE_SINK = ("sink_rate_at_target", "entropy_at_target", "entropy_elsewhere", "mixing_at_target", "mixing_elsewhere")


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
            "About the model as it is": [claim for claim in claims if claim["link"] != "causal"],
            "About cause and effect, by interventions": [claim for claim in claims if claim["link"] == "causal"],
        },
        notes=_notes(run),
        study_sections=[(name, *SECTIONS[name], own) for name, own in studied.items() if own],
        evidence=_evidence(run, shown["panels"]),
        steps=_steps(run),
        writers=writers(run),
        factorial=factorial,
        single_layers=[
            (row["layer"], row["target"], row["rise"], interval(row["low"], row["high"]))
            for row in run.rows("single_layers")
        ],
        other_ways=_other_ways(run),
        moments=list(MOMENTS.values()),
        beside_sink=_beside_sink(run),
        quantities=[quantity.replace("_", " ") for quantity in BESIDE_SINK],
        **shown,
    )


def figures(run: Run) -> list[Figure]:
    """All figures of the page."""
    drawn = [figure for own in study_figures(run).values() for figure in own]
    return [*chain_panels(run), *drawn, *maps(run), *layer_curves(run)]


def _shown_claim(claim: dict[str, Any], places: Sequence[str]) -> dict[str, Any]:
    """A claim as a row of the table of verdicts, with a link to the first of `places` that shows its evidence."""
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
    """A link to the figure that shows a claim's evidence."""
    if claim not in CLAIMS:  # in a study that was saved when the claim still existed
        return None
    for name in CLAIMS[claim].figures:
        for id in drawn:
            if id == name or (name == "dose" and id.startswith("dose-")):  # one figure for each position
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
            f"Interval of {id.replace('_', ' ')}: {CLAIMS[id].interval_note}"
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
    """Which keys the target attends to, by the level of its variance, by the level of its energy."""
    return [
        (
            in_words(row["mixing"]),
            in_words(row["variance_of"]) if row["variance_of"] else NO_VALUE,
            in_words(row["energy_of"]) if row["energy_of"] else NO_VALUE,
            row["entering"],
            row["targets"],
            row["rise"],
            interval(row["low"], row["high"]),
            *(row[moment] for moment in MOMENTS),
            row["missed"] or PASSED,
        )
        for row in run.rows("factorial")
    ]


def _other_ways(run: Run) -> list[tuple]:
    """What every condition outside of the factorial did to the aggregation at its target, and to the sink rate
    there."""
    cells = {row["mixing"] for row in run.rows("factorial")}
    effects = run.rows("effects", quantity="sink_rate_at_target")
    changes = {(row["condition"], row["factor"], row["target"]): row["difference"] for row in effects}
    by_condition = defaultdict(list)
    for row in run.rows("manipulation"):
        if row["condition"].split("+")[0] not in cells:
            by_condition[row["condition"], row["factor"], row["target"], row["entering"]].append(row)
    rows = []
    for (name, factor, target, entering), layers in by_condition.items():
        means = []
        for moment in MOMENTS:
            ratios = [row[moment] for row in layers if (row[moment] or 0) > 0]
            means.append(exp(fmean(map(log, ratios))) if ratios else NO_VALUE)
        change = changes.get((name, factor, target), NO_VALUE)
        check = layers[0]["missed"] or PASSED
        rows.append((in_words(name), target, factor or NO_VALUE, change, entering, *means, check))
    return rows


def _beside_sink(run: Run) -> list[tuple]:
    """By condition: the change of the sink rate and of the attention, at the target and elsewhere."""
    changes: dict[tuple, dict[str, str]] = defaultdict(dict)
    for row in run.rows("effects"):
        change = f"{number(row['difference'])} ({interval(row['low'], row['high'])})"
        changes[row["condition"], row["target"], row["factor"]][row["quantity"]] = change
    return [
        (
            in_words(condition),
            target,
            factor or NO_VALUE,
            *(by_quantity.get(quantity, NO_VALUE) for quantity in BESIDE_SINK),
        )
        for (condition, target, factor), by_quantity in changes.items()
    ]


def writers(run: Run) -> str:
    """In words: the minimal set or, where there is none, the neurons that write along the sink's direction."""
    minimal_set, along_direction = run.rows("minimal_set"), run.summary.get("writers")
    if along_direction:
        names = ", ".join(map(neuron_name, along_direction))
        return (
            f"The {len(along_direction)} neurons that write most strongly along the sink's direction, as layer:neuron: "
            f"{names}."
        )
    if not minimal_set:
        return ""
    names = ", ".join(f"{neuron_name(neuron)} ({number(neuron['share'])})" for neuron in minimal_set)
    neurons = "neuron" if len(minimal_set) == 1 else "neurons"
    text = f"The minimal set has {len(minimal_set)} {neurons}, as layer:neuron (share of the layer's write): {names}."
    roles: dict[str, list[str]] = defaultdict(list)
    for neuron in minimal_set:
        if neuron.get("role"):
            roles[neuron["role"]].append(neuron_name(neuron))
    if len(minimal_set) == 1 or not roles:
        return text
    needed, back_ups = (", ".join(roles[role]) or "none" for role in (NEEDED, BACK_UP))
    return f"{text} Needed, as less than half of the sink is left without each alone: {needed}. Back-ups: {back_ups}."
