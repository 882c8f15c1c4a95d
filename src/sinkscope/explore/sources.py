"""What a tab of the live page can look at: a model that reads prompts, or a finished trace.

A tab keeps its own state (prompt, interventions, opened token) and sends all of it with each request, so tabs cannot
mix and nothing is lost when one is closed. The server keeps the models and the last few results.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Interval, MaxLen

from sinkscope.arguments import check_choice
from sinkscope.errors import InputError
from sinkscope.explore.text_result import OBSERVABLES, QUANTITIES, TextResult, from_run, from_trace, window
from sinkscope.interventions.intervene import Baseline, read_prompt
from sinkscope.interventions.specs import read_specs
from sinkscope.interventions.tested_trace import with_neurons_removed
from sinkscope.models.loaded import LoadedModel
from sinkscope.results.validated import WrongValueError, strictly

MOST_CHARACTERS = 20_000
"""The longest prompt that a request may hold."""
MOST_TOKENS = 2048
"""The longest prompt that is read: what a CPU does while someone waits. Longer texts are for `sinkscope trace`."""
MOST_INTERVENTIONS = 16
"""The most interventions in one request."""
CACHE_SIZE = 16
"""How many results are kept, so that undo costs nothing."""
Short = Annotated[str, MaxLen(200)]
Index = Annotated[int, Interval(ge=0, lt=2**31)]
Interventions = tuple[tuple[Short, Short], ...]
"""Interventions as (kind, its text on the command line), such as ("mask_to_self", "10"), in the order they were
added."""


@dataclass(frozen=True, kw_only=True)
class TabState:
    """The state of a tab, as it comes with each request."""

    source: Index
    prompt: Annotated[str, MaxLen(MOST_CHARACTERS)]
    interventions: Annotated[Interventions, MaxLen(MOST_INTERVENTIONS)]
    position: Index | None = None
    start: Index
    quantity: str

    @classmethod
    def of(cls, value: Any, num_sources: int) -> TabState:
        """From parsed JSON. Refuses what the page would not send."""
        try:
            state = strictly(cls, value)
        except WrongValueError as error:
            place = f"`{error.where}`" if error.where else "The request"
            raise InputError(f"{place} {error.wrong}. Reload the page.") from error
        if state.source >= num_sources:
            raise InputError(f"`source` must be below {num_sources}, not {state.source}. Reload the page.")
        check_choice("quantity", state.quantity, QUANTITIES)
        return state


class LiveModel:
    """A model that reads prompts, under interventions. Not for several threads: interventions change the model
    itself."""

    is_live = True

    def __init__(self, loaded: LoadedModel, python: str, *, bos: bool | None = None) -> None:
        """`python` is the expression that loads the model, as a person would type it."""
        self.loaded, self.name, self._python, self._bos = loaded, loaded.name, python, bos
        self._baseline = lru_cache(CACHE_SIZE)(self._read_prompt)
        self._result = lru_cache(CACHE_SIZE)(self._read)

    def view(self, state: TabState) -> dict[str, Any]:
        """What the page draws."""
        before = self._result(state.prompt, ())
        now = self._result(state.prompt, state.interventions)
        return {
            **window(now, before if state.interventions else None, state.start, state.position, state.quantity),
            "python": self.python(state.prompt, state.interventions),
        }

    def python(self, prompt: str, interventions: Interventions) -> str:
        """The lines of Python that give the same numbers, for the page."""
        lines = ["import sinkscope", f"model = {self._python}"]
        bos = "" if self._bos is None else f", bos={self._bos}"
        if interventions:
            lines.append(
                f"result = sinkscope.intervene(model, {_by_kind(interventions)!r}, prompt={prompt!r}{bos}).after"
            )
        elif bos:
            lines.insert(1, "from sinkscope.models.prompts import prompt_batch")
            lines.append(f"result = sinkscope.trace(model, prompt_batch(model, [{prompt!r}]{bos}))")
        else:
            lines.append(f"result = sinkscope.trace(model, {prompt!r})")
        return "\n".join(lines)

    def _read_prompt(self, prompt: str) -> Baseline:
        baseline = read_prompt(self.loaded, prompt, bos=self._bos, observables=OBSERVABLES)
        if baseline.batch.length > MOST_TOKENS:
            raise InputError(
                f"The prompt has {baseline.batch.length:,} tokens, and at most {MOST_TOKENS:,} are read here. "
                "Give a shorter one, or trace it and open the run: sinkscope explore RUN."
            )
        return baseline

    def _read(self, prompt: str, interventions: Interventions) -> TextResult:
        baseline = self._baseline(prompt)
        if not interventions:
            return from_trace(with_neurons_removed(self.loaded, baseline.trace))
        under = baseline.under(baseline.make(read_specs(_by_kind(interventions))))
        return from_trace(under, self._result(prompt, ()))


class FinishedTrace:
    """A trace that was written before, however long."""

    is_live = False

    def __init__(self, folder: Path) -> None:
        self.name, self._result = folder.name, from_run(folder)

    def view(self, state: TabState) -> dict[str, Any]:
        """What the page draws."""
        if state.interventions:
            raise InputError("A finished trace cannot be intervened on. Explore the model itself.")
        return {**window(self._result, None, state.start, state.position, state.quantity), "python": None}


Source = LiveModel | FinishedTrace


def _by_kind(interventions: Interventions) -> dict[str, list[str]]:
    """The interventions as `sinkscope.intervene` takes them: kind -> texts."""
    texts: dict[str, list[str]] = defaultdict(list)
    for kind, text in interventions:
        texts[kind].append(text)
    return dict(texts)
