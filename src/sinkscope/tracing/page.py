"""The page of a trace: what it found, the five panels of the chain, maps of all layers, and the method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sinkscope.pages import html
from sinkscope.pages.figure import Figure
from sinkscope.pages.html import header
from sinkscope.pages.text import escaped, interval, isolated, token_text
from sinkscope.results.page_parts import method
from sinkscope.results.run import Run
from sinkscope.tracing.figures import NUM_POSITIONS_DRAWN, chain_panels, position_texts, shown_units, unit_name
from sinkscope.tracing.maps import layer_curves, maps

NUM_UNITS_LISTED = 8


def write_page(run: Run, destination: Path) -> None:
    """Writes the page of a trace."""
    panels, drawn = chain_panels(run), [*maps(run), *layer_curves(run)]
    parts = [
        page_header(run),
        _found(run),
        navigation([]),
        chain(panels),
        massive_dimensions(run),
        maps_section(run, drawn),
        method(run),
        "</main>",
    ]
    html.write_glued(destination, title(run), "".join(parts), [*panels, *drawn])


def figures(run: Run) -> list[Figure]:
    """All figures of the page."""
    return [*chain_panels(run), *maps(run), *layer_curves(run)]


def title(run: Run) -> str:
    """The title of the page of a trace or of a study."""
    return f"Attention sink of {run.model}"


def page_header(run: Run) -> str:
    """What the page begins with: of what model it is, on which tokens, and the answer."""
    return f'{header(title(run), run.circumstances)}<main id="main"><p class="answer">{isolated(run.answer)}</p>'


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


def navigation(sections: Sequence[tuple[str, str]]) -> str:
    """Links to the sections of the page: those that a trace has, and between them those given by id and title."""
    names = [("chain", "The chain"), *sections, ("maps", "Maps"), ("method", "Method")]
    return '<nav aria-label="Sections">' + "".join(f'<a href="#{id}">{name}</a>' for id, name in names) + "</nav>"


def chain(panels: Sequence[Figure], evidence: Callable[[int, Figure], str] | None = None, arrows: str = "") -> str:
    """The panels from left to right; a study adds the evidence below each panel, by its number, and causal arrows."""
    cards = [
        f'<article class="panel" id="{panel.id}"><h3>{number}. {escaped(panel.title)}</h3>'
        f'<p class="caption">{escaped(panel.caption)}</p>{html.plot(panel)}'
        f"{evidence(number, panel) if evidence else ''}{html.tools(panel)}</article>"
        for number, panel in enumerate(panels, start=1)
    ]
    causes = " Below, each causal step spans the links that it connects." if evidence else ""
    return (
        f'<h2 id="chain">The chain</h2><p class="caption">Read it from left to right.{causes} '
        '<button data-action="chain-png">PNG of the chain</button></p>'
        f'<div class="chain">{"".join(cards)}{arrows}</div>'
    )


def maps_section(run: Run, drawn: Sequence[Figure]) -> str:
    """The maps and curves over all layers."""
    text = "All layers. positions.parquet and heads.parquet hold every value."
    attention = "map-attention-received"
    return html.section("maps", "Maps", text, drawn, wide=(attention,), below={attention: _tokens(run)})


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
