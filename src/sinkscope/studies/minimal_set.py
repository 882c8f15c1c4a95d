"""The search for an inclusion-minimal set of units whose removal takes the sink away.

Some models write their sink with one unit; in others several back one another up, and taking the strongest changes
nothing. So units are taken in the order of their writes, twice as many each time; where all of them are not enough the
model without them is traced anew, since a backup may only have woken then. What is found is thinned out backwards
until no unit can be put back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sinkscope.models.anatomy import Unit

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
