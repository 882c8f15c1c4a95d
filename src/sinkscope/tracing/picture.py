"""The picture of the chain, drawn from the tables of a run alone, so that it can be drawn again from the files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from sinkscope.measures.sink_score import RECEIVED_THRESHOLD
from sinkscope.pages.drawn import drawing_class
from sinkscope.pages.figure import floats
from sinkscope.results.run import appearance_layers, before_the_sink, curve_layers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUM_POSITIONS_SHOWN = 64
LAYER_LOOK = {"label": "median of its layer", "hatch": "//"}


def picture(tables: Mapping[str, Mapping], summary: Mapping) -> Figure:
    """The sink chain from left to right as one picture: variance, neurons, output vectors, dimensions, attention.

    Needs matplotlib (the extra `report`). Line styles and markers differ, so that it can be read without colour.
    """
    figure = drawing_class()(figsize=(20, 4.2), layout="constrained")
    panels = figure.subplots(1, 5)
    positions = {name: np.asarray(values) for name, values in tables["positions"].items()}
    layers = {name: floats(values) for name, values in tables["layers"].items()}
    shown = min(NUM_POSITIONS_SHOWN, summary["tokens"]["length"])
    _variance(panels[0], positions, curve_layers(summary), shown)
    _writes(panels[1], positions, summary, shown)
    _output_vectors(panels[2], tables["neurons"], summary["dom_ratio"]["position"])
    _dom_ratio(panels[3], layers)
    _attention(panels[4], positions, summary["num_layers"], shown)
    for number, panel in enumerate(panels, start=1):
        panel.set_title(f"{number}. {panel.get_title()}", fontsize=10)
        panel.tick_params(labelsize=8)
    # parse_math off: a model's name is text, and a stray dollar sign in it must not be read as a formula.
    figure.suptitle(f"{summary['model']}: {summary['story']}", fontsize=11, parse_math=False, wrap=True)
    return figure


def _layer_rows(positions: Mapping[str, np.ndarray], layer: int, name: str, shown: int) -> np.ndarray:
    return floats(positions[name][positions["layer"] == layer][:shown])


def _variance(panel, positions, layers: list[int], shown: int) -> None:
    # One sequence, or tokens that are the same in all, have no variance across sequences: their energy is shown.
    has_variance = bool((floats(positions["value_variance"]) > 0).any())
    column = "value_variance" if has_variance else "second_moment"
    panel.set_title("Value variance by position" if has_variance else "Energy by position (no variance)")
    for layer in layers:
        line = panel.plot(_layer_rows(positions, layer, column, shown), marker=".", ms=3, label=f"layer {layer}")
        if has_variance:
            law = _layer_rows(positions, layer, "averaging_law", shown)
            panel.plot(law, linestyle="--", color=line[0].get_color(), label=f"averaging law, layer {layer}")
    panel.set(xlabel="position", yscale="log")
    panel.legend(fontsize=7)


def _writes(panel, positions, summary, shown: int) -> None:
    panel.set_title("Largest neuron write by position")
    of_neurons = sorted({neuron["layer"] for neuron in summary.get("super_neurons") or ()})[:2]
    layers = appearance_layers(summary) or of_neurons or [before_the_sink(summary)]
    for layer, marker in zip(layers[:3], "osv", strict=False):
        panel.plot(
            _layer_rows(positions, layer, "largest_write", shown), marker=marker, ms=3, lw=0.8, label=f"layer {layer}"
        )
    panel.set(xlabel="position", yscale="log")
    panel.legend(fontsize=7)


def _output_vectors(panel, neurons, position: int) -> None:
    panel.set_title("Energy in an output vector's top dimension")
    shown = [row for row, at in enumerate(neurons["position"]) if at == position][:6]
    places, names = np.arange(len(shown)), [f"{neurons['layer'][row]}:{neurons['neuron'][row]}" for row in shown]
    for shift, column, look in ((-0.2, "top_share", {"label": "super neuron"}), (0.2, "layer_top_share", LAYER_LOOK)):
        panel.bar(places + shift, floats([neurons[column][row] for row in shown]), 0.4, **look)
    panel.set_xticks(places, names, rotation=30)
    panel.set(xlabel="layer:neuron", ylim=(0, 1))
    if shown:
        panel.legend(fontsize=7)
    else:
        panel.text(0.5, 0.5, "no super neurons", ha="center", transform=panel.transAxes)


def _dom_ratio(panel, layers) -> None:
    panel.set_title("DomRatio by layer")
    panel.plot(layers["layer"], layers["dom_ratio_sink"], marker="o", ms=3, label="sink")
    panel.plot(layers["layer"], layers["dom_ratio_elsewhere"], marker="x", ms=3, linestyle="--", label="elsewhere")
    panel.set(xlabel="layer", yscale="log")
    panel.legend(fontsize=7)


def _attention(panel, positions, num_layers: int, shown: int) -> None:
    panel.set_title("Attention received, mean over heads")
    received = floats(positions["attention_received"]).reshape(num_layers, -1)[:, :shown]
    image = panel.imshow(
        received,
        aspect="auto",
        origin="lower",
        cmap="viridis",
        vmin=0,
        vmax=max(RECEIVED_THRESHOLD, np.nanmax(received)),
    )
    panel.set(xlabel="key position", ylabel="layer")
    panel.figure.colorbar(image, ax=panel)
