"""One self-contained HTML file from a run folder: the answer, the verdicts, the chain, the evidence, the method."""

from __future__ import annotations

from pathlib import Path

from sinkscope.pages import html
from sinkscope.pages.figure import Figure
from sinkscope.pages.text import escaped, isolated
from sinkscope.results.page_parts import method
from sinkscope.results.run import Run
from sinkscope.studies.figures import study_figures
from sinkscope.studies.page_tables import carriers, factorial, referee
from sinkscope.studies.verdicts import LAW_INTERVAL, verdict_table
from sinkscope.tracing import page as trace_page
from sinkscope.tracing.figures import chain_panels
from sinkscope.tracing.maps import layer_curves, maps

# The links that each panel of the chain shows, from left to right.
PANEL_LINKS = (
    ("variance_discrepancy",),
    ("super_neurons",),
    ("channel_sparsity",),
    ("dimension_disparity", "directional_collapse"),
    ("sink",),
)
# A causal step: its first and last panel, its name, and the claims that test it.
ARROWS = (
    (
        1,
        5,
        "An unmixed token becomes a sink",
        ("unmixing_creates_sink", "any_single_key_creates_sink", "unmixed_value_matters", "opening_removes_sink"),
    ),
    (
        1,
        5,
        "Variance or energy makes a sink",
        (
            "variance_is_what_matters",
            "variance_suffices",
            "energy_is_what_matters",
            "energy_suffices",
            "amplification_creates_sink",
            "dose_response",
        ),
    ),
    (1, 5, "Less variance removes it, or its mean is enough", ("equalising_removes_sink", "mean_suffices")),
    (1, 2, "The super neurons carry it", ("mediation_mask_super_neurons", "mediation_amplification_super_neurons")),
    (3, 5, "The sink needs their sparse output vectors", ("channel_sparsity_necessary",)),
    (4, 5, "The massive dimensions make a sink", ("dimensions_suffice",)),
    (1, 4, "The massive dimensions carry it", ("mediation_mask_dimensions", "mediation_amplification_dimensions")),
    (
        2,
        5,
        "Super neurons make the sink, and it needs them",
        ("super_neurons_necessary", "super_neurons_sufficient"),
    ),
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
        trace_page.chain(panels, lambda number, panel: _evidence(run, number, panel), _arrows(run)),
    ]
    extras = {"necessity": carriers, "creation": factorial, "confounds": referee}
    for name, drawn in studied.items():
        if drawn:
            extra = extras[name](run) if name in extras else ""
            parts.append(
                html.section(name, *SECTIONS[name], drawn, wide=WIDE, extra=extra, is_small=name == "histograms")
            )
    parts += [trace_page.massive_dimensions(run), trace_page.maps_section(run, maps_drawn), method(run, METHOD)]
    html.write_page(destination, trace_page.title(run), "".join([*parts, "</main>"]), every)


def figures(run: Run) -> list[Figure]:
    """All figures of the page."""
    drawn = [figure for own in study_figures(run).values() for figure in own]
    return [*chain_panels(run), *drawn, *maps(run), *layer_curves(run)]


def _evidence(run: Run, number: int, panel: Figure) -> str:
    """The claims about a link, below its panel."""
    claims = [html.evidence(claim) for claim in run.claims.values() if claim["link"] in PANEL_LINKS[number - 1]]
    if not claims:
        return ""
    law = ""
    if panel.id == "variance" and (run.claims.get("averaging_law") or {}).get("low") is not None:
        law = f'<p class="caption">The averaging law: {escaped(LAW_INTERVAL)}</p>'
    return f'<ul class="evidence">{"".join(claims)}</ul>{law}'


def _arrows(run: Run) -> str:
    """The causal steps below the panels that they span."""
    cards = []
    for first, last, label, ids in ARROWS:
        claims = [html.evidence(run.claims[id]) for id in ids if id in run.claims]
        if claims:
            cards.append(
                f'<section class="arrow" style="grid-column:{first}/{last + 1}">'
                f"<h3>{first} \N{RIGHTWARDS ARROW} {last} {label}</h3><ul>{''.join(claims)}</ul></section>"
            )
    return "".join(cards)
