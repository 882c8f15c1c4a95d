"""What interventions change where a hook on a module is not enough: who may attend to whom, and the units of experts.

Interventions belong to a higher layer of the package. What capture must know of them is kept here, in context
variables, so that two threads don't see each other's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from sinkscope.errors import InputError


@dataclass(frozen=True, kw_only=True)
class RowEdit:
    """A change of the keys that some queries of one attention may see."""

    queries: tuple[int, ...]
    mode: Literal["only", "allow", "block"]
    """The queries see these keys only; these too, later ones included; or all they saw but these."""
    keys: tuple[int, ...]
    heads: tuple[int, ...] | None = None
    sequences: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class ExpertEdit:
    """A change of some units of one expert, for every token of a pass, routed there or not."""

    expert: int
    neurons: tuple[int, ...]
    new_values: Callable[[Tensor], Tensor]
    """[N, n] current activations, routing weight included -> what they become."""


_row_edits: ContextVar[dict[int, tuple[RowEdit, ...]] | None] = ContextVar("sinkscope_row_edits", default=None)
_expert_edits: ContextVar[dict[int, tuple[ExpertEdit, ...]] | None] = ContextVar("sinkscope_expert_edits", default=None)
_by_sequence: ContextVar[str | None] = ContextVar("sinkscope_by_sequence", default=None)
_acting: ContextVar[tuple[str, ...]] = ContextVar("sinkscope_acting", default=())
"""The names of the interventions that are on."""
_depth: ContextVar[int] = ContextVar("sinkscope_edits_depth", default=0)


def row_edits(attention: object) -> tuple[RowEdit, ...]:
    """The edits of one attention module that are on now."""
    return (_row_edits.get() or {}).get(id(attention), ())


def expert_edits(experts: object) -> tuple[ExpertEdit, ...]:
    """The edits of one module of experts that are on now."""
    return (_expert_edits.get() or {}).get(id(experts), ())


def depth() -> int:
    """How many times interventions are suspended: what was opened at another depth does not act."""
    return _depth.get()


@contextlib.contextmanager
def going_by_sequence(name: str) -> Iterator[None]:
    """Says that an intervention depends on the number of a sequence within the batch that runs."""
    token = _by_sequence.set(name)
    try:
        yield
    finally:
        _by_sequence.reset(token)


@contextlib.contextmanager
def acting(name: str) -> Iterator[None]:
    """Says that an intervention is on."""
    token = _acting.set((*_acting.get(), name))
    try:
        yield
    finally:
        _acting.reset(token)


def check_is_object(model: object) -> None:
    """Refuses a model by its name while an intervention is on: it acts on a model object, not on what is loaded
    anew."""
    if (names := _acting.get()) and (model is None or isinstance(model, str | Path)):
        raise InputError(
            expected="a model object, since an intervention is on",
            found=f"{'no model' if model is None else repr(str(model))} beside {names[-1]}",
            next_step="Load it first, model = sinkscope.load(...), and give that to both",
        )


def check_chunks(num_chunks: int) -> None:
    """Refuses to split a batch whose sequences an intervention tells apart."""
    if num_chunks > 1:
        _refuse_by_sequence(
            "the whole batch in one chunk",
            f"{num_chunks} chunks",
            "Take fewer or shorter sequences, or raise `chunk_tokens`",
        )


def check_one_pass(num_lengths: int) -> None:
    """Refuses to read texts of each length by themselves where an intervention tells the sequences apart."""
    if num_lengths > 1:
        _refuse_by_sequence("texts of one length", f"{num_lengths} lengths", "Cut the texts to one length")


def _refuse_by_sequence(expected: str, found: str, next_step: str) -> None:
    if (name := _by_sequence.get()) is not None:
        raise InputError(
            expected=f"{expected}, since {name} acts on numbered sequences", found=found, next_step=next_step
        )


@contextlib.contextmanager
def suspend() -> Iterator[None]:
    """While open, no intervention acts but those that are entered inside: the model runs for a reading of its own."""
    with contextlib.ExitStack() as stack:
        inside: dict[ContextVar[Any], Any] = {
            _depth: depth() + 1,
            _row_edits: {},
            _expert_edits: {},
            _by_sequence: None,
            _acting: (),
        }
        for variable, value in inside.items():
            stack.callback(variable.reset, variable.set(value))
        yield


def editing_rows(edits: dict[int, list[RowEdit]]) -> contextlib.AbstractContextManager:
    """Adds edits to each attention named by its id."""
    return _adding(_row_edits, edits)


def editing_experts(edits: dict[int, list[ExpertEdit]]) -> contextlib.AbstractContextManager:
    """Adds edits to each module of experts named by its id."""
    return _adding(_expert_edits, edits)


@contextlib.contextmanager
def _adding(variable: ContextVar, edits: dict[int, list]) -> Iterator[None]:
    before = variable.get() or {}
    token = variable.set(before | {key: (*before.get(key, ()), *added) for key, added in edits.items()})
    try:
        yield
    finally:
        variable.reset(token)
