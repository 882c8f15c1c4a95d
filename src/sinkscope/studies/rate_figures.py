"""The figures of a study's sink rates: by position, after an intervention or a removal, and by dose."""

from __future__ import annotations

from typing import Any

from sinkscope.measures.sink_score import SINK_RATE
from sinkscope.pages.figure import Figure, axis, level, levels, line
from sinkscope.pages.text import percent
from sinkscope.results.run import Run
from sinkscope.tracing.figures import IDENTITIES, dose_curve, is_drawn

NUM_TARGETS = 4
MOVED = ("equalise_variance", "ablate_minimal_set", "ablate_writers", "densify_minimal_set")
DOSED = (*IDENTITIES, "swap_deviation", "random_direction")


def targets(run: Run) -> list[int]:
    """The positions that a mask or amplification acted on."""
    pairs = set(zip(run.tables["rates"]["condition"], run.tables["rates"]["target"], strict=True))
    acted = {target for condition, target in pairs if condition in ("mask_to_self", "amplify_variance")}
    return sorted(target for target in acted if target is not None)


def _rates_figure(run: Run, id: str, title: str, caption: str, wanted: list[tuple[str, int | None]]) -> Figure | None:
    """Sink rate at every position, untouched and under each of the wanted (condition, target)."""
    series: dict[str, list[dict]] = {}
    acted_on = [target for _, target in wanted]
    for condition, target in [("untouched", None), *wanted]:
        for row in strongest_doses(run.rows("rates", condition=condition, target=target)):
            if is_drawn(run, row["position"], *acted_on):
                series.setdefault(condition_name(row), []).append(row)
    if len(series) < 2:
        return None
    ordered = {name: sorted(own, key=lambda row: row["position"]) for name, own in series.items()}
    return Figure(
        id,
        title,
        caption,
        ("rates",),
        [
            line(
                [row["position"] for row in own],
                [row["rate"] for row in own],
                name,
                5 if name == "untouched" else look,
                low=[row["low"] for row in own],
                high=[row["high"] for row in own],
            )
            for look, (name, own) in enumerate(ordered.items(), start=-1)
        ],
        {
            "xaxis": axis("key position"),
            "yaxis": axis("sink rate", rangemode="tozero"),
            **levels(level(SINK_RATE, f"a sink: {percent(SINK_RATE)}")),
        },
        ("condition", "position", "rate", "low", "high"),
        [(name, row["position"], row["rate"], row["low"], row["high"]) for name, own in ordered.items() for row in own],
        340,
    )


def created(run: Run) -> Figure | None:
    """Sink rates after acting on one position."""
    found = targets(run)
    if not found:
        return None
    target = 10 if 10 in found else found[0]
    return _rates_figure(
        run,
        "created",
        f"Sinks after acting on position {target}",
        "Sink rate at every position, with amplification at its largest factor. Usually the old sink stays.",
        [("mask_to_self", target), ("amplify_variance", target)],
    )


def moved(run: Run) -> Figure | None:
    """Sink rates after each removal."""
    done = dict.fromkeys(zip(run.tables["rates"]["condition"], run.tables["rates"]["target"], strict=True))
    return _rates_figure(
        run,
        "moved",
        "Where the sink went",
        "Sink rate at every position after each removal. The sink may be gone, weaker, or somewhere else.",
        [pair for pair in done if pair[0] in MOVED and pair[1] not in targets(run)],
    )


def dose_response(run: Run) -> list[Figure]:
    """The sink rate by factor, a figure for each of the first targets."""
    figures = []
    for target in targets(run)[:NUM_TARGETS]:
        traces, listed = [], []
        for look, condition in enumerate(DOSED):
            own = dose_curve(run, condition, target)
            if own:
                x, y, low, high = ([row[name] for row in own] for name in ("factor", "rate", "low", "high"))
                traces.append(line(x, y, _in_words(condition), look, low=low, high=high))
                listed += [(condition, *values) for values in zip(x, y, low, high, strict=True)]
        if traces:
            figures.append(
                Figure(
                    f"dose-{target}",
                    f"Dose and response at position {target}",
                    "Sink rate there by factor: amplified variance, and controls that change as much in other ways, at "
                    "the largest factor alone.",
                    ("rates",),
                    traces,
                    {
                        "xaxis": axis(
                            "factor", type="log", tickvals=[1, 1.5, 2, 4, 8], ticktext=["1", "1.5", "2", "4", "8"]
                        ),
                        "yaxis": axis("sink rate", rangemode="tozero"),
                    },
                    ("condition", "factor", "rate", "low", "high"),
                    listed,
                    340,
                )
            )
    return figures


def condition_name(row: dict[str, Any]) -> str:
    """What was done, where and how strongly: amplify variance @10 x4."""
    target = "" if row["target"] is None else f" @{row['target']}"
    factor = "" if row.get("factor") is None else f" \N{MULTIPLICATION SIGN}{row['factor']:g}"
    return _in_words(row["condition"]) + target + factor


def _in_words(condition: str) -> str:
    return condition.replace("_", " ").replace("+", " + ")


def strongest_doses(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of each condition, target and quantity at its largest factor."""
    strongest: dict[tuple, dict[str, Any]] = {}
    for row in entries:
        key = (row["condition"], row["target"], row.get("quantity"), row.get("position"))
        kept = strongest.get(key)
        if kept is None or (row["factor"] or 0) > (kept["factor"] or 0):
            strongest[key] = row
    return list(strongest.values())
