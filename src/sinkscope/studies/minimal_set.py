"""The search for an inclusion-minimal set of units whose removal takes the sink away.

Some models write their sink with one unit. In others several units can replace each other, and removing the strongest
changes nothing. So units are removed in the order of their writes, twice as many each time. If all of them are not
enough, the model without them is traced again, since other units may take over only then. The set is then thinned out,
weakest unit first, until no unit can be put back.

Where no such set is found, a crowd may write the sink, along one direction: then the units that write most along it are
removed, as many as it takes. They are not thinned out: which of several dozen can be spared depends on the sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from sinkscope import processes
from sinkscope.interventions.base import together
from sinkscope.interventions.neurons import ablate_neurons
from sinkscope.interventions.plan import Plan, candidate_units
from sinkscope.models.anatomy import DENSE, Unit, anatomy_of
from sinkscope.models.loading import LoadedModel
from sinkscope.models.token_batches import TokenBatch
from sinkscope.results.parts import Parts
from sinkscope.studies.conditions import MAX_UNITS
from sinkscope.studies.judging import QUARTER
from sinkscope.tracing.replay import ConditionReading, Replay
from sinkscope.tracing.trace import trace

NUM_SEARCHING = 16
"""Choosing sequences that the search runs on."""
SEARCH_TARGETS = (0.8 * QUARTER, QUARTER)
"""Shares of the sink that the set may leave: the first if possible, else the second. A set right at the threshold
would fail it on other sequences half of the time."""
MAX_ROUNDS = 4

Remaining = Callable[[Sequence[Unit]], float]
"""Units removed -> the share of the sink rate that is left."""


def minimal_set(
    candidates: Sequence[Unit], remaining: Remaining, more: Callable[[Sequence[Unit]], Sequence[Unit]], target: float
) -> tuple[Unit, ...]:
    """Units whose removal leaves at most `target` of the sink rate, none of which can be spared; () where no such set
    was found.

    `more` gives further candidates of the model without some units.
    """
    ranked, first = tuple(dict.fromkeys(candidates))[:MAX_UNITS], 1
    for _ in range(MAX_ROUNDS):
        if units := shortest(ranked, remaining, target, first):
            return _thinned(units, remaining, target)
        new = [unit for unit in more(ranked) if unit not in ranked] if 0 < len(ranked) < MAX_UNITS else []
        if not new:
            return ()
        ranked, first = (*ranked, *new)[:MAX_UNITS], len(ranked) + 1
    return ()


def shortest(ranked: tuple[Unit, ...], remaining: Remaining, target: float, first: int = 1) -> tuple[Unit, ...]:
    """The first units, as many as `first` or 2, 4, 8 times that, whose removal leaves at most `target` of the sink
    rate; () where all leave more."""
    size = first
    while size < 2 * len(ranked):
        if remaining(ranked[:size]) <= target:
            return ranked[:size]
        size *= 2
    return ()


def _thinned(units: tuple[Unit, ...], remaining: Remaining, target: float) -> tuple[Unit, ...]:
    """Backward elimination, weakest first, until no single unit can be put back."""
    while True:
        before = len(units)
        for unit in reversed(units):
            fewer = tuple(other for other in units if other != unit)
            if fewer and remaining(fewer) <= target:
                units = fewer
        if len(units) == before:
            return units


def find_minimal_set(loaded: LoadedModel, plan: Plan, choosing: TokenBatch, parts: Parts) -> tuple[Unit, ...]:
    """The minimal set of a model, found on choosing sequences; kept as a part, since the search is long."""

    def searched() -> tuple[Unit, ...]:
        search = _Search(loaded, plan, choosing, plan.candidates)
        for target in SEARCH_TARGETS if search.before > 0 else ():
            if units := minimal_set(plan.candidates, search.remaining, search.more, target):
                return units
        return ()

    return _kept_units(parts, "minimal-set", searched)


def find_writers(loaded: LoadedModel, plan: Plan, choosing: TokenBatch, parts: Parts) -> tuple[Unit, ...]:
    """As many of the plan's writers as it takes, and all where they are not enough."""

    def searched() -> tuple[Unit, ...]:
        search = _Search(loaded, plan, choosing, plan.writers)
        enough = shortest(plan.writers, search.remaining, SEARCH_TARGETS[0]) if search.before > 0 else ()
        return enough or plan.writers

    return _kept_units(parts, "writers", searched)


def _kept_units(parts: Parts, name: str, searched: Callable[[], tuple[Unit, ...]]) -> tuple[Unit, ...]:
    def rows() -> dict[str, np.ndarray]:
        units = [[unit.layer, DENSE if unit.expert is None else unit.expert, unit.neuron] for unit in searched()]
        return {"units": np.array(units, dtype=np.int64).reshape(-1, 3)}

    kept = parts.kept(name, ("units",), rows)
    assert kept is not None
    return tuple(Unit(row[0], None if row[1] == DENSE else row[1], row[2]) for row in kept["units"].tolist())


class _Search:
    """The sink without some of the units, on choosing sequences; each set is tried once.

    Under torchrun the first process tries it for all, and says which units come next: rounding must not send them
    different ways.
    """

    def __init__(self, loaded: LoadedModel, plan: Plan, choosing: TokenBatch, units: Sequence[Unit]) -> None:
        self.loaded, self.sink = loaded, plan.sink
        self.batch = replace(choosing, ids=choosing.ids[:NUM_SEARCHING])
        self._restarts = {unit.layer for unit in units}
        self.before = processes.from_first(lambda: self._rate(self.replay.untouched))
        self._left: dict[frozenset[Unit], float] = {}

    @cached_property
    def replay(self) -> Replay:
        model = self.loaded.model
        return Replay(anatomy_of(model), model, self.batch.ids, restarts=self._restarts)

    def remaining(self, units: Sequence[Unit]) -> float:
        """The share of the sink rate that is left without units."""
        if (removed := frozenset(units)) not in self._left:
            self._left[removed] = processes.from_first(lambda: self._without(units)) / self.before
        return self._left[removed]

    def _without(self, units: Sequence[Unit]) -> float:
        with together([ablate_neurons(self.loaded, units)]) as first_layer:
            return self._rate(self.replay.read(first_layer))

    def _rate(self, reading: ConditionReading) -> float:
        return float(reading.later_rate_BS[:, self.sink].mean())

    def more(self, units: Sequence[Unit]) -> list[Unit]:
        """Candidates of the model without units."""
        with ablate_neurons(self.loaded, units):
            findings = trace(self.loaded, self.batch, effective_rank=False).findings
        return processes.from_first(lambda: candidate_units(findings, self.sink))
