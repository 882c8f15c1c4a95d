"""The search for an inclusion-minimal set of units whose removal takes the sink away.

Some models write their sink with one unit. In others several units can replace each other, and removing the strongest
changes nothing. So units are removed in the order of their writes, twice as many each time. If all of them are not
enough, the model without them is traced again, since other units may take over only then. The set is then thinned out,
weakest unit first, until no unit can be put back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from sinkscope.capture.replay import Replay
from sinkscope.capture.trace import trace
from sinkscope.interventions.base import together
from sinkscope.interventions.neurons import ablate_neurons
from sinkscope.models.anatomy import DENSE, Unit, anatomy_of
from sinkscope.models.loading import LoadedModel
from sinkscope.models.token_batches import TokenBatch
from sinkscope.results.parts import Parts
from sinkscope.studies.judging import QUARTER
from sinkscope.studies.plan import Plan, candidate_units

NUM_SEARCHING = 16
"""Choosing sequences that the search runs on."""
SEARCH_TARGETS = (0.8 * QUARTER, QUARTER)
"""Shares of the sink that the set may leave: the first if possible, else the second. A set right at the threshold
would fail it on other sequences half of the time."""
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


def find_minimal_set(loaded: LoadedModel, plan: Plan, choosing: TokenBatch, parts: Parts) -> tuple[Unit, ...]:
    """The minimal set of a model, found on choosing sequences; kept as a part, since the search is long."""

    def searched() -> dict[str, np.ndarray]:
        rows = [
            [unit.layer, DENSE if unit.expert is None else unit.expert, unit.neuron]
            for unit in _searched(loaded, plan, choosing)
        ]
        return {"units": np.array(rows, dtype=np.int64).reshape(-1, 3)}

    kept = parts.kept("minimal-set", ("units",), searched)
    assert kept is not None
    return tuple(Unit(row[0], None if row[1] == DENSE else row[1], row[2]) for row in kept["units"].tolist())


def _searched(loaded: LoadedModel, plan: Plan, choosing: TokenBatch) -> tuple[Unit, ...]:
    batch = replace(choosing, ids=choosing.ids[:NUM_SEARCHING])
    restarts = {unit.layer for unit in plan.candidates}
    replay = Replay(anatomy_of(loaded.model), loaded.model, batch.ids, restarts=restarts)
    before = float(replay.untouched.later_rate_BS[:, plan.sink].mean())
    left: dict[frozenset[Unit], float] = {}

    def remaining(units: Sequence[Unit]) -> float:
        if (removed := frozenset(units)) not in left:
            with together([ablate_neurons(loaded, units)]) as first_layer:
                left[removed] = float(replay.read(first_layer).later_rate_BS[:, plan.sink].mean()) / before
        return left[removed]

    def more(units: Sequence[Unit]) -> list[Unit]:
        with ablate_neurons(loaded, units):
            found = trace(loaded, batch, effective_rank=False).findings
        return candidate_units(found, plan.sink)

    units: tuple[Unit, ...] = ()
    for target in SEARCH_TARGETS if before > 0 else ():
        units = units or minimal_set(plan.candidates, remaining, more, target)
    return units
