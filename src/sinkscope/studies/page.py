"""One self-contained HTML file from a run folder: the answer, the verdicts, the chain, the evidence, the method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sinkscope.pages import html
from sinkscope.pages.figure import Figure
from sinkscope.pages.html import header, write_page
from sinkscope.pages.text import escaped, interval, isolated, token_text
from sinkscope.results.run import Run
from sinkscope.studies.figures import study_figures
from sinkscope.studies.page_tables import carriers, factorial, massive_dimensions, referee
from sinkscope.studies.verdicts import LAW_INTERVAL, verdict_table
from sinkscope.tracing.figures import (
    NUM_POSITIONS_DRAWN,
    chain_panels,
    position_texts,
    shown_units,
    unit_name,
)
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
NUM_UNITS_LISTED = 8
WIDE = ("forest", "mediation-effects", "confounds", "map-attention-received")
"""Figures that take the whole width."""
METHOD = (
    "Claims, statistics, controls, thresholds and rules are the same for every model. Units and means are chosen on "
    "one set of sequences, and the claims are judged on another. Intervals are bootstrap intervals over sequences at a "
    "family-wise 95 % (Holm over the claims). A claim is undecided where its interval is too wide for either verdict, "
    "and not applicable where there is nothing to explain."
)


def write_study_page(run: Run, destination: Path) -> None:
    """Writes the page of a study, or of a trace."""
    panels = chain_panels(run)
    studied = study_figures(run) if run.kind == "study" else {}
    maps_drawn, curves = maps(run), layer_curves(run)
    every = [*panels, *(figure for figures in studied.values() for figure in figures), *maps_drawn, *curves]
    parts = [header(f"Attention sink of {run.model}", circumstances(run)), '<main id="main">']
    parts += [
        f'<p class="answer">{isolated(run.answer)}</p>',
        verdict_table(run, [*(figure.id for figure in every), *(["factorial"] if run.rows("factorial") else [])])
        if run.claims
        else _found(run),
        f'<p id="counts" class="caption">{isolated(counts)}</p>' if (counts := run.summary.get("counts")) else "",
        _nav(studied),
    ]
    parts += [_chain(run, panels)]
    for name, figures in studied.items():
        if figures:
            extra = {"necessity": carriers, "creation": factorial, "confounds": referee}.get(name, lambda run: "")(run)
            parts.append(_section(name, *SECTIONS[name], figures, run, extra))
    parts.append(massive_dimensions(run))
    parts.append(
        _section(
            "maps",
            "Maps",
            "All layers. positions.parquet and heads.parquet hold every value.",
            maps_drawn + curves,
            run,
        )
    )
    parts += [method(run, METHOD if run.claims else ""), "</main>"]
    write_page(destination, f"Attention sink of {run.model}", "".join(parts), every)


def study_page_figures(run: Run) -> list[Figure]:
    """All figures of the page of a study or of a trace."""
    studied = study_figures(run).values() if run.kind == "study" else ()
    return [*chain_panels(run), *(figure for own in studied for figure in own), *maps(run), *layer_curves(run)]


def circumstances(run: Run) -> str:
    """The family, its size, and the tokens that it ran on."""
    tokens, summary = run.summary["tokens"], run.summary
    bos = ", BOS first" if tokens["bos"] else ""
    many = "one sequence" if tokens["count"] == 1 else f"{tokens['count']} sequences"
    sequences = f"{many} of {tokens['length']} {tokens['kind']} tokens{bos}"
    return f"{summary['family']}, {summary['num_layers']} layers; {sequences}"


def _found(run: Run) -> str:
    """What a trace found, in place of verdicts: a trace changes nothing, so it cannot show causes."""
    texts = position_texts(run)
    sinks = [
        (
            row["position"],
            *([texts.get(row["position"], "")] if texts else []),
            row["rate"],
            interval(row["low"], row["high"]),
            row["num_layers"],
            row["mean_attention"],
        )
        for row in run.rows("sinks")
    ]
    text = (
        "A trace changes nothing in the model, so it gives no verdicts on causes. To test them: "
        f"sinkscope study {run.model}"
    )
    parts = [f'<p class="muted">{isolated(text)}</p>']
    if sinks:
        token = ("token",) if texts else ()
        parts.append(html.table(("sink at position", *token, "rate", "interval", "layers", "mean attention"), sinks))
    if hidden := run.summary.get("token_sinks"):
        parts.append(
            html.table(("sink within texts", "texts", "of those with it", "positions"), map(_token_sink, hidden))
        )
    found, cut = shown_units(run, NUM_UNITS_LISTED)
    units = [
        (unit_name(row), row["role"], row["dimension"], row["write"], row["write_share"], row["contrast"])
        for row in found
    ]
    if units:
        columns = ("layer:neuron", "role", "dimension", "write", "write share", "contrast")
        parts.append(html.table(columns, units) + (f'<p class="caption">{cut}</p>' if cut else ""))
    return "".join(parts)


def _token_sink(sink: dict[str, Any]) -> tuple:
    positions = ", ".join(map(str, sink["positions"][:8])) + (", ..." if len(sink["positions"]) > 8 else "")
    return token_text(sink["text"]), sink["num_sequences"], sink["num_with"], positions


def _nav(studied: dict[str, list[Figure]]) -> str:
    names = [("chain", "The chain"), *((name, SECTIONS[name][0]) for name, own in studied.items() if own)]
    names += [("maps", "Maps"), ("method", "Method")]
    return '<nav aria-label="Sections">' + "".join(f'<a href="#{id}">{name}</a>' for id, name in names) + "</nav>"


def _chain(run: Run, panels: Sequence[Figure]) -> str:
    cards = []
    for index, (panel, links) in enumerate(zip(panels, PANEL_LINKS, strict=True), start=1):
        claims = [html.evidence(claim) for claim in run.claims.values() if claim["link"] in links]
        evidence = f'<ul class="evidence">{"".join(claims)}</ul>' if claims else ""
        if evidence and panel.id == "variance" and (run.claims.get("averaging_law") or {}).get("low") is not None:
            evidence += f'<p class="caption">The averaging law: {escaped(LAW_INTERVAL)}</p>'
        cards.append(
            f'<article class="panel" id="{panel.id}"><h3>{index}. {escaped(panel.title)}</h3>'
            f'<p class="caption">{escaped(panel.caption)}</p>{html.plot(panel)}{evidence}'
            f"{html.tools(panel)}</article>"
        )
    for first, last, label, ids in ARROWS:
        claims = [html.evidence(run.claims[id]) for id in ids if id in run.claims]
        if claims:
            cards.append(
                f'<section class="arrow" style="grid-column:{first}/{last + 1}">'
                f"<h3>{first} \N{RIGHTWARDS ARROW} {last} {label}</h3><ul>{''.join(claims)}</ul></section>"
            )
    causes = " Below, each causal step spans the links that it connects." if run.claims else ""
    return (
        f'<h2 id="chain">The chain</h2><p class="caption">Read it from left to right.{causes} '
        '<button data-action="chain-png">PNG of the chain</button></p>'
        f'<div class="chain">{"".join(cards)}</div>'
    )


def _section(id: str, title: str, text: str, figures: Sequence[Figure], run: Run, extra: str = "") -> str:
    drawn = [
        html.figure(
            figure,
            wide=figure.id in WIDE,
            below=_tokens(run) if figure.id == "map-attention-received" else "",
        )
        for figure in figures
    ]
    size = " small" if id == "histograms" else ""
    return (
        f'<h2 id="{id}">{title}</h2><p class="caption">{text}</p>{extra}'
        f'<div class="figures{size}">{"".join(drawn)}</div>'
    )


def _tokens(run: Run) -> str:
    """The first sequence's tokens, each with its position and a bar as long as the attention it receives."""
    every = run.rows("tokens", sequence=0)
    first = every[:NUM_POSITIONS_DRAWN]
    if not first:
        return ""
    cut = f"The first {len(first)} of {len(every)} tokens" if len(first) < len(every) else "The tokens"
    of = "" if run.summary["tokens"]["count"] == 1 else " of the first sequence"
    items = "".join(
        f'<li style="--share:{row["attention_received"] or 0:.3f}"><span class="position">{row["position"]}</span>'
        f"{isolated(token_text(row['text']))}</li>"
        for row in first
    )
    caption = f'<p class="caption">{cut}{of}, each with a bar as long as the attention that it receives.</p>'
    return f'{caption}<ol class="tokens" aria-label="Tokens{of}">{items}</ol>'


def method(run: Run, text: str = "") -> str:
    """The last section: how the numbers were made, what was typed, where it ran and which files it wrote."""
    shown = f"<pre><code>{isolated(run.command)}</code></pre>" if run.command else ""
    return (
        f'<h2 id="method">Method</h2>{f"<p>{text}</p>" if text else ""}{shown}'
        + html.facts([*run.environment.items()])
        + f"<details open><summary>config.yaml</summary>{html.facts(run.config.items())}</details>"
        + f'<p class="muted">Files of this run: {escaped(", ".join(run.files))}</p>'
    )
