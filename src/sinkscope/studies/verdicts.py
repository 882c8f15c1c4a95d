"""The table of a study's verdicts, each of which leads to the figure that shows its evidence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sinkscope.pages import html
from sinkscope.pages.text import NO_VALUE, escaped, interval, number
from sinkscope.results.run import Run

MEDIATORS = ("super_neurons", "dimensions")
# Where each claim's evidence is drawn: the first of these that is on the page.
EVIDENCE = {
    "variance_discrepancy": ("variance",),
    "averaging_law": ("variance",),
    "super_neurons": ("writes",),
    "channel_sparsity": ("output-vectors",),
    "dimension_disparity": ("dom-ratio",),
    "directional_collapse": ("dom-ratio",),
    "lock": ("heads-lock-share", "received"),
    "sink": ("received",),
    "amplification_creates_sink": ("dose", "forest"),
    "dose_response": ("dose", "forest"),
    "unmixing_creates_sink": ("created", "forest"),
    **dict.fromkeys(
        (
            *("any_single_key_creates_sink", "unmixed_value_matters", "variance_is_what_matters", "variance_suffices"),
            *("energy_is_what_matters", "energy_suffices"),
        ),
        ("factorial", "forest"),
    ),
    **dict.fromkeys(
        (
            *("opening_removes_sink", "equalising_removes_sink", "mean_suffices", "super_neurons_necessary"),
            *("writers_necessary", "channel_sparsity_necessary"),
        ),
        ("remaining", "forest"),
    ),
    "super_neurons_sufficient": ("forest",),
    "dimensions_suffice": ("forest",),
    **{f"mediation_{by}_{held}": ("mediation-effects",) for by in ("mask", "amplification") for held in MEDIATORS},
}
LAW_INTERVAL = (
    "the interval is moved so that the effect is its median. A resample repeats sequences, so its variances scatter "
    "more and its R^2 falls in nearly every one. The effect is low for the same reason: holding is harder to reach "
    "than it should be, never easier."
)


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
    wanted = EVIDENCE.get(claim, ())
    found = (id for name in wanted for id in drawn if id == name or (name == "dose" and id.startswith("dose-")))
    return next((f"#{id}" for id in found), None)


def _verdict_row(claim: dict[str, Any], drawn: Sequence[str]) -> str:
    note = f' title="{escaped(LAW_INTERVAL)}"' if claim["id"] == "averaging_law" else ""
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
