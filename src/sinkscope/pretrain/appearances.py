"""When each link of the sink chain appears in training. The rules were fixed before any run was looked at.

A link appears at the first probe at which its observable, in the layer where it is largest, reaches its threshold and
from which it stays there until the last probe. Probes are some steps apart, so the true step lies between the probe
before and this one. A link below its threshold at the last probe has not appeared. One that is above it from step 0 on
was there before training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sinkscope.measures.sink_score import MIN_SINK_RATE
from sinkscope.measures.thresholds import COSINE, DOM_RATIO, LEVEL_ELSEWHERE, TOP_SHARE, VARIANCE_RATIO

Probe = Mapping[str, Any]
"""A row of probes.jsonl."""


@dataclass(frozen=True)
class Link:
    """One link of the chain, and the rule by which it appears."""

    name: str
    observable: str
    threshold: float
    values: Callable[[Probe], Sequence[float | None] | None]
    """The observable by layer, or one number for the whole model; None if the probe did not measure it."""


def _by_layer(quantity: str) -> Callable[[Probe], Sequence[float | None] | None]:
    return lambda probe: probe["layers"].get(quantity)


def _over_elsewhere(probe: Probe) -> Sequence[float | None] | None:
    here, elsewhere = (probe["layers"].get(name) for name in ("dom_ratio", "dom_ratio_elsewhere"))
    if here is None or elsewhere is None:
        return None
    return [None if a is None or not b else a / b for a, b in zip(here, elsewhere, strict=True)]


# The thresholds are those of the study's claims. Its claim of directional collapse also asks for a cosine that is 0.2
# above other positions', which a probe does not measure.
LINKS = (
    Link(
        "variance discrepancy",
        "variance of the value aggregation at position 0 over the later half's",
        VARIANCE_RATIO,
        _by_layer("variance_ratio"),
    ),
    Link(
        "super neuron",
        "largest write of a neuron at the sink over its median at other positions",
        LEVEL_ELSEWHERE,
        _by_layer("write_contrast"),
    ),
    Link(
        "channel sparsity",
        "energy share of the top dimension in that neuron's output vector",
        TOP_SHARE,
        _by_layer("top_share"),
    ),
    Link("dimension disparity", "DomRatio at the sink over that elsewhere", DOM_RATIO, _over_elsewhere),
    Link(
        "directional collapse",
        "mean cosine of the sink's state over pairs of sequences",
        COSINE,
        _by_layer("cosine"),
    ),
    Link(
        "sink in a layer",
        "share of a layer's heads and sequences that count the position as a sink",
        MIN_SINK_RATE,
        _by_layer("sink_rate"),
    ),
    Link(
        "sink in the model",
        "share of all heads and sequences that count the position as a sink",
        MIN_SINK_RATE,
        lambda probe: [probe["whole"]["sink_rate"]],
    ),
)


@dataclass(frozen=True)
class Appearance:
    """When a link appeared in one run, on one batch; `step` is None where it did not."""

    link: Link
    step: int | None
    tokens: int | None
    step_before: int | None
    """The last probe below the threshold; None if the first one was above it already."""
    layer: int | None
    """The layer with the largest value at `step`; None for a number of the whole model."""
    largest: float | None
    """The largest value in the whole run, above the threshold or not."""


def appearances(probes: Iterable[Probe]) -> list[Appearance]:
    """When each link that was measured appeared, in the order of the chain, from one run's probes of one batch."""
    probes = sorted(probes, key=lambda probe: probe["step"])
    result = []
    for link in LINKS:
        measured = []
        for probe in probes:
            values = link.values(probe)
            if values is not None:
                measured.append((probe, values))
        if measured:
            result.append(_appearance(link, measured))
    return result


def _appearance(link: Link, measured: list[tuple[Probe, Sequence[float | None]]]) -> Appearance:
    """When one link appeared, from (probe, values by layer) in the order of steps."""
    tops = [_largest(values) for _, values in measured]
    is_above = [top is not None and top >= link.threshold for top in tops]
    # Back from the last probe, as long as the link is above its threshold.
    first = len(is_above)
    while first and is_above[first - 1]:
        first -= 1
    largest = _largest(tops)
    step_before = measured[first - 1][0]["step"] if first else None
    if first == len(is_above):
        return Appearance(link, None, None, step_before, None, largest)
    probe, values = measured[first]
    layer = list(values).index(tops[first]) if len(values) > 1 else None
    return Appearance(link, probe["step"], probe["tokens"], step_before, layer, largest)


def _largest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
