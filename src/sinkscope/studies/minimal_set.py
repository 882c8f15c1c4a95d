"""The search for the neurons that write the sink: an inclusion-minimal set whose removal takes it away.

Some models write their sink with one neuron. In others several neurons can replace each other, and removing the
strongest changes nothing. So neurons are removed in the order of their writes, twice as many each time. If all of them
are not enough, the model without them is traced again, because other neurons may take over only then. The set is then
thinned out, weakest neuron first, until no neuron can be put back.

If no such set is found, many neurons may write the sink together, along one direction. Then the neurons that write most
strongly along it are removed, as many as it takes. They are not thinned out, because which of several dozen could be
put back depends on the sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from sinkscope import processes
from sinkscope.interventions.base import together
from sinkscope.interventions.neurons import ablate_neurons
from sinkscope.interventions.plan import Plan, candidate_neurons
from sinkscope.models.anatomy import DENSE, Neuron, anatomy_of
from sinkscope.models.loaded import LoadedModel
from sinkscope.models.token_batches import TokenBatch
from sinkscope.results.parts import Parts
from sinkscope.studies.conditions import MAX_NEURONS
from sinkscope.studies.judging import QUARTER
from sinkscope.tracing.replay import ConditionReading, Replay
from sinkscope.tracing.trace import trace

NUM_SEARCHING = 16
"""How many of the choosing sequences the search runs on."""
SEARCH_TARGETS = (0.8 * QUARTER, QUARTER)
"""Shares of the sink that the set may leave: the first if possible, else the second. A set right at the threshold of
the claim, a quarter, would fail it on other sequences half of the time."""
MAX_ROUNDS = 4
"""How often the model is traced again for further candidates, at most."""

Remaining = Callable[[Sequence[Neuron]], float]
"""Neurons removed -> the share of the sink rate that is left."""


def minimal_set(
    candidates: Sequence[Neuron],
    remaining: Remaining,
    more: Callable[[Sequence[Neuron]], Sequence[Neuron]],
    target: float,
) -> tuple[Neuron, ...]:
    """Neurons whose removal leaves at most `target` of the sink rate, none of which can be put back; () if there are
    none.

    `candidates` are ranked, strongest first. `more` gives further ones, of the model without some neurons.
    """
    ranked = tuple(dict.fromkeys(candidates))[:MAX_NEURONS]
    first = 1
    for _ in range(MAX_ROUNDS):
        neurons = shortest(ranked, remaining, target, first)
        if neurons:
            return _thinned(neurons, remaining, target)
        new: list[Neuron] = []
        if 0 < len(ranked) < MAX_NEURONS:
            new = [neuron for neuron in more(ranked) if neuron not in ranked]
        if not new:
            return ()
        first = len(ranked) + 1  # all sets up to the old candidates have been tried
        ranked = (*ranked, *new)[:MAX_NEURONS]
    return ()


def shortest(ranked: tuple[Neuron, ...], remaining: Remaining, target: float, first: int = 1) -> tuple[Neuron, ...]:
    """The first neurons whose removal leaves at most `target` of the sink rate, as many as `first` or 2, 4, 8 ... times
    that; () if even all of them leave more."""
    size = first
    while size < 2 * len(ranked):
        if remaining(ranked[:size]) <= target:
            return ranked[:size]
        size *= 2
    return ()


def _thinned(neurons: tuple[Neuron, ...], remaining: Remaining, target: float) -> tuple[Neuron, ...]:
    """Backward elimination, weakest first, until no single neuron can be put back."""
    while True:
        before = len(neurons)
        for neuron in reversed(neurons):
            fewer = tuple(other for other in neurons if other != neuron)
            if fewer and remaining(fewer) <= target:
                neurons = fewer
        if len(neurons) == before:
            return neurons


def find_minimal_set(loaded: LoadedModel, plan: Plan, choosing: TokenBatch, parts: Parts) -> tuple[Neuron, ...]:
    """The minimal set of a model, found on the choosing sequences; kept as a finished part, because the search is
    long."""

    def searched() -> tuple[Neuron, ...]:
        search = _Search(loaded, plan, choosing, plan.candidates)
        if search.before == 0:
            return ()
        for target in SEARCH_TARGETS:
            neurons = minimal_set(plan.candidates, search.remaining, search.more, target)
            if neurons:
                return neurons
        return ()

    return _kept_neurons(parts, "minimal-set", searched)


def find_writers(loaded: LoadedModel, plan: Plan, choosing: TokenBatch, parts: Parts) -> tuple[Neuron, ...]:
    """As many of the plan's writers as take the sink away, or all of them if they are not enough."""

    def searched() -> tuple[Neuron, ...]:
        search = _Search(loaded, plan, choosing, plan.writers)
        if search.before == 0:
            return plan.writers
        return shortest(plan.writers, search.remaining, SEARCH_TARGETS[0]) or plan.writers

    return _kept_neurons(parts, "writers", searched)


def _kept_neurons(parts: Parts, name: str, searched: Callable[[], tuple[Neuron, ...]]) -> tuple[Neuron, ...]:
    """What the search finds, or found before an interruption."""

    def rows() -> dict[str, np.ndarray]:
        neurons = [
            [neuron.layer, DENSE if neuron.expert is None else neuron.expert, neuron.neuron] for neuron in searched()
        ]
        return {"neurons": np.array(neurons, dtype=np.int64).reshape(-1, 3)}

    kept = parts.kept(name, ("neurons",), rows)
    assert kept is not None
    return tuple(Neuron(row[0], None if row[1] == DENSE else row[1], row[2]) for row in kept["neurons"].tolist())


class _Search:
    """What is left of the sink without some neurons, on the choosing sequences. No set is tried twice.

    Under torchrun all processes use the numbers of the first: they might otherwise differ by rounding, and processes
    that continue with different sets would wait for one another forever.
    """

    def __init__(self, loaded: LoadedModel, plan: Plan, choosing: TokenBatch, neurons: Sequence[Neuron]) -> None:
        self.loaded, self.sink = loaded, plan.sink
        self.batch = replace(choosing, ids=choosing.ids[:NUM_SEARCHING])
        self._restarts = {neuron.layer for neuron in neurons}
        self.before = processes.from_first(lambda: self._rate(self.replay.baseline))
        self._left: dict[frozenset[Neuron], float] = {}

    @cached_property
    def replay(self) -> Replay:
        model = self.loaded.model
        return Replay(anatomy_of(model), model, self.batch.ids, restarts=self._restarts)

    def remaining(self, neurons: Sequence[Neuron]) -> float:
        """The share of the sink rate that is left without some neurons."""
        removed = frozenset(neurons)
        if removed not in self._left:
            self._left[removed] = processes.from_first(lambda: self._without(neurons)) / self.before
        return self._left[removed]

    def _without(self, neurons: Sequence[Neuron]) -> float:
        with together([ablate_neurons(self.loaded, neurons)]) as first_layer:
            return self._rate(self.replay.read(first_layer))

    def _rate(self, reading: ConditionReading) -> float:
        return float(reading.later_rate_BS[:, self.sink].mean())

    def more(self, neurons: Sequence[Neuron]) -> list[Neuron]:
        """The candidates of the model without some neurons."""
        with ablate_neurons(self.loaded, neurons):
            findings = trace(self.loaded, self.batch, effective_rank=False).findings
        return processes.from_first(lambda: candidate_neurons(findings, self.sink))
