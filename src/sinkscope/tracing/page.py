"""The page of a trace: what it shows, the five panels of the chain, maps of all layers, and the method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sinkscope.measures.sink_score import LATER_QUERIES
from sinkscope.pages import html
from sinkscope.pages.figure import Figure
from sinkscope.pages.text import interval, token_text
from sinkscope.results.run import Run
from sinkscope.tracing.figures import NUM_POSITIONS_DRAWN, chain_panels, neuron_name, position_texts, shown_neurons
from sinkscope.tracing.maps import layer_curves, maps

NUM_NEURONS_LISTED = 8
"""Most super neurons in the table of the page."""


def write_page(run: Run, destination: Path) -> None:
    """Writes the page of a trace."""
    parts, texts = shared(run), position_texts(run)
    token = ("token",) if texts else ()
    neurons, neurons_cut = shown_neurons(run, NUM_NEURONS_LISTED)
    html.write_page(
        destination,
        "tracing/page.html",
        title(run),
        [*parts["panels"], *parts["all_maps"]],
        run.circumstances,
        sink_columns=(
            "sink at position",
            *token,
            "rate",
            "interval",
            "a sink",
            "in sequences",
            "layers",
            "mean attention",
        ),
        sinks=[_sink(row, texts) for row in run.rows("sinks")],
        token_sinks=[_token_sink(sink) for sink in run.summary.get("token_sinks") or ()],
        neurons=[
            (neuron_name(row), row["role"], row["dimension"], row["write"], row["write_share"], row["contrast"])
            for row in neurons
        ],
        neurons_cut=neurons_cut,
        **parts,
    )


def figures(run: Run) -> list[Figure]:
    """All figures of the page."""
    return [*chain_panels(run), *maps(run), *layer_curves(run)]


def title(run: Run) -> str:
    """The title of the page of a trace or of a study."""
    return f"Attention sink of {run.model}"


def shared(run: Run) -> dict[str, Any]:
    """What the template of a study's page needs too."""
    dimensions = run.rows("dimensions", position=run.strongest)
    tokens = [_where_judged(row, run) for row in run.rows("tokens", sequence=0)]
    return {
        "run": run,
        "panels": chain_panels(run),
        "all_maps": [*maps(run), *layer_curves(run)],
        "dimensions": [
            tuple(row[name] for name in ("layer", "dimension", "value", "magnitude", "ratio", "contrast"))
            for row in dimensions
        ],
        "tokens": tokens[:NUM_POSITIONS_DRAWN],
        "num_tokens": len(tokens),
    }


def _where_judged(row: dict[str, Any], run: Run) -> dict[str, Any]:
    """A token of the first sequence, without a bar where too few queries follow for it to be judged: they would make
    the last tokens the longest bars."""
    length = run.summary["tokens"]["length"]
    is_late = length > LATER_QUERIES and row["position"] >= length - LATER_QUERIES
    return {**row, "attention_received": None} if is_late else row


def _sink(row: dict[str, Any], texts: dict[int, str]) -> tuple:
    """A row of the table of sinks, with the token where the page knows the tokens."""
    token = [texts.get(row["position"], "")] if texts else []
    ends = interval(row["low"], row["high"])
    certainty = {"sink": "yes", "in some": "in some sequences"}.get(row["certainty"], "maybe")
    return (
        *(row["position"], *token, row["rate"], ends, certainty),
        *(f"{row['in_sequences']} of {row['num_sequences']}", row["num_layers"], row["mean_attention"]),
    )


def _token_sink(sink: dict[str, Any]) -> tuple:
    """A row of the table of tokens that are sinks within texts."""
    positions = ", ".join(map(str, sink["positions"][:8])) + (", ..." if len(sink["positions"]) > 8 else "")
    return token_text(sink["text"]), sink["num_sequences"], sink["num_with"], positions
