"""When each link of the sink chain appears in training. The rules were fixed before any run was looked at.

A link appears at the first probe at which its observable, in the layer where it is largest, reaches its threshold and
stays there at every later probe of the run. Probes are some steps apart, so it truly appears between the probe
before and that one. What has not passed at the last probe has not appeared; what passes at step 0 was there before
training.
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
    """One link: `values` gives its observable by layer, or one number for the whole model; None if not measured."""

    name: str
    observable: str
    threshold: float
    values: Callable[[Probe], Sequence[float | None] | None]


def _by_layer(quantity: str) -> Callable[[Probe], Sequence[float | None] | None]:
    return lambda probe: probe["layers"].get(quantity)


def _over_elsewhere(probe: Probe) -> Sequence[float | None] | None:
    here, elsewhere = (probe["layers"].get(name) for name in ("dom_ratio", "dom_ratio_elsewhere"))
    if here is None or elsewhere is None:
        return None
    return [None if a is None or not b else a / b for a, b in zip(here, elsewhere, strict=True)]


# The thresholds are those of the study's claims. Its claim of a collapse also asks for 0.2 above other positions, which
# a probe does not measure.
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
    """The last probe at which it had not passed; None where it was there from the start."""
    layer: int | None
    """The layer that was largest at that step; None for a number of the whole model."""
    largest: float | None
    """The largest value in the run, passed or not."""


def appearances(probes: Iterable[Probe]) -> list[Appearance]:
    """When each link that was measured appeared, in the order of the chain, from one run's probes of one batch."""
    probes = sorted(probes, key=lambda probe: probe["step"])
    result = []
    for link in LINKS:
        read = [(probe, values) for probe in probes if (values := link.values(probe)) is not None]
        if read:
            result.append(_appearance(link, read))
    return result


def _appearance(link: Link, read: list[tuple[Probe, Sequence[float | None]]]) -> Appearance:
    tops = [max((value for value in values if value is not None), default=None) for _, values in read]
    passed = [top is not None and top >= link.threshold for top in tops]
    first = len(passed)
    while first and passed[first - 1]:
        first -= 1
    largest = max((top for top in tops if top is not None), default=None)
    before = read[first - 1][0]["step"] if first else None
    if first == len(passed):
        return Appearance(link, None, None, before, None, largest)
    probe, values = read[first]
    layer = list(values).index(tops[first]) if len(values) > 1 else None
    return Appearance(link, probe["step"], probe["tokens"], before, layer, largest)
