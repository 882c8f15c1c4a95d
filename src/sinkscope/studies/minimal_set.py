"""The search for an inclusion-minimal set of units whose removal takes the sink away.

Some models write their sink with one unit; in others several back one another up, and taking the strongest changes
nothing. So units are taken in the order of their writes, twice as many each time; where all of them are not enough the
model without them is traced anew, since a backup may only have woken then. What is found is thinned out backwards
until no unit can be put back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sinkscope.models.anatomy import Anatomy, Unit

MAX_ROUNDS = 4
MAX_UNITS = 64

Remaining = Callable[[Sequence[Unit]], float]
"""Units removed -> the share of the sink rate that is left."""


def minimal_set(
    candidates: Sequence[Unit], remaining: Remaining, more: Callable[[Sequence[Unit]], Sequence[Unit]], target: float
) -> tuple[Unit, ...]:
    """Units whose removal leaves at most `target` of the sink rate, none of which can be spared; () where no such set
    was found.

    `more` gives further candidates of the model without some units.
    """
    ranked = list(dict.fromkeys(candidates))[:MAX_UNITS]
    taken: list[Unit] = []
    for _ in range(MAX_ROUNDS):
        size = len(taken) + 1
        while size < 2 * len(ranked):
            taken = ranked[:size]
            if remaining(taken) <= target:
                return _thinned(taken, remaining, target)
            size *= 2
        new = [unit for unit in more(taken) if unit not in ranked] if len(ranked) < MAX_UNITS and ranked else []
        if not new:
            return ()
        ranked = (ranked + new)[:MAX_UNITS]
    return ()


def _thinned(units: list[Unit], remaining: Remaining, target: float) -> tuple[Unit, ...]:
    """Backward elimination, weakest first, until no single unit can be put back."""
    while True:
        before = len(units)
        for unit in reversed(list(units)):
            fewer = [other for other in units if other != unit]
            if fewer and remaining(fewer) <= target:
                units = fewer
        if len(units) == before:
            return tuple(units)


def matched_units(anatomy: Anatomy, units: Sequence[Unit], excluded: Sequence[Unit], *, seed: int) -> list[Unit]:
    """As many other units, each of the same layer and expert and among those whose output vector's norm is nearest."""
    generator = torch.Generator().manual_seed(seed)
    drawn: list[Unit] = []
    for unit in units:
        weight_EF: Any = anatomy.layers[unit.layer].group_weight(unit.expert)
        norms = torch.linalg.vector_norm(weight_EF.float(), dim=0).cpu()
        distance = (norms / norms[unit.neuron]).log().abs()
        distance[[u.neuron for u in (*units, *excluded, *drawn) if u[:2] == unit[:2]]] = float("inf")
        nearest = distance.argsort()[: max(20, len(norms) // 20)]
        nearest = nearest[distance[nearest].isfinite()]
        if len(nearest):
            pick = nearest[int(torch.randint(len(nearest), (1,), generator=generator))]
            drawn.append(Unit(unit.layer, unit.expert, int(pick)))
    return drawn
