"""Prints how kept runs ended, one row each, and draws their sink and disparity through training.

    python lab/experiments/kept_probes.py lab/results/explorations
    python lab/experiments/kept_probes.py lab/results/reference --figure lab/reference-pair.png

Sink rate, on random tokens: the share of heads and sequences that count a key as their sink, at the key that the probe
describes. DomRatio, of the largest layer, is read at that key and at the other positions. Runs that were stopped show
their last evaluation and probe. A star after sequences x tokens: the loss leaves out the first target of each
(`skipped_targets`). The figure needs matplotlib.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from kept_results import read_results

from sinkscope.atomic import whole_file
from sinkscope.errors import InputError

HEADS = (
    *("run", "variant", "layers x width", "text", "sequences x tokens", "learning rate", "weight decay", "steps"),
    *("loss", "at step", "sink rate", "at key", "DomRatio there", "elsewhere", "super neurons", "at step"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kept", type=Path, help="folder with results-*.jsonl.xz")
    parser.add_argument("--figure", type=Path, help="PNG to write")
    options = parser.parse_args()
    try:
        results = read_results(options.kept)
        print("\n".join(table(results)))
        if options.figure:
            draw(results, options.figure)
    except InputError as error:
        print(f"kept_probes: {error}", file=sys.stderr)
        sys.exit(2)


def table(results: list[dict[str, Any]]) -> list[str]:
    """Markdown: a row for each run."""
    rows = [f"| {' | '.join(cells(result))} |" for result in results]
    return [f"| {' | '.join(HEADS)} |", "| --- | --- | --- | --- |" + " ---: |" * (len(HEADS) - 4), *rows]


def cells(result: dict[str, Any]) -> list[str]:
    """What was trained, and how it ended."""
    config, run = result["config"], result["run"]
    model, training = config["model"], config["training"]
    evaluation, probe = result["metrics"][-1], probes(result, "random")[-1]
    steps = f"{training['steps']:,}" if result["summary"] else f"stopped, of {training['steps']:,}"
    whole, layers = probe["whole"], probe["layers"]
    return [
        run["stage"].removeprefix("explore-"),
        run["variant"],
        f"{model['num_hidden_layers']} x {model['hidden_size']}",
        config["data"][0],
        f"{training['batch_size']} x {training['sequence_length']:,}{' *' if training.get('skipped_targets') else ''}",
        f"{training['learning_rate']:g}",
        f"{training['weight_decay']:g}",
        steps,
        f"{evaluation['validation_loss']:.3f}",
        f"{evaluation['step']:,}",
        f"{whole['sink_rate']:.1%}",
        str(whole["sink_position"]),
        f"{largest(layers['dom_ratio']):.1f}",
        f"{largest(layers['dom_ratio_elsewhere']):.1f}",
        str(whole["num_super_neurons"]),
        f"{probe['step']:,}",
    ]


def probes(result: dict[str, Any], batch: str) -> list[dict[str, Any]]:
    """The probes of a run on one of its batches, in order."""
    found = [probe for probe in result["probes"] if probe["batch"] == batch]
    if not found or not result["metrics"]:
        raise InputError(
            f"A run of {result['run']['variant']} has no held-out losses or probes. Train with --probe-every."
        )
    return found


def largest(values: list[float | None]) -> float:
    return max(value for value in values if value is not None)


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Sink rate, DomRatio and held-out loss over steps; line styles differ, so that it reads without colour."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.4), layout="constrained")
    sink, dom_ratio, loss = figure.subplots(1, 3)
    for result, style in zip(results, ("-", "--", ":", "-.") * len(results), strict=False):
        label, course = result["run"]["variant"], probes(result, "random")
        steps = [probe["step"] for probe in course]
        line = sink.plot(steps, [100 * probe["whole"]["sink_rate"] for probe in course], style, label=label)[0]
        look = {"color": line.get_color(), "linestyle": style}
        at_sink, elsewhere = (
            [largest(probe["layers"][name]) for probe in course] for name in ("dom_ratio", "dom_ratio_elsewhere")
        )
        dom_ratio.plot(steps, at_sink, label=f"{label}, at the strongest key", **look)
        dom_ratio.plot(steps, elsewhere, label=f"{label}, elsewhere", **look, lw=0.8, marker=".", ms=3)
        evaluated = result["metrics"]
        losses = [row["validation_loss"] for row in evaluated]
        loss.plot([row["step"] for row in evaluated], losses, label=label, **look)
    sink.set(title="Sink rate, per cent, random tokens", xlabel="step", ylim=(0, None))
    dom_ratio.set(title="DomRatio, largest layer, random tokens", xlabel="step", ylim=(0, None))
    loss.set(title="Held-out loss", xlabel="step")
    for panel in (sink, dom_ratio, loss):
        panel.legend(fontsize=7)
        panel.tick_params(labelsize=8)
    with whole_file(path) as partial:
        figure.savefig(partial, format="png", dpi=90, metadata={"Software": "sinkscope"})


if __name__ == "__main__":
    main()
