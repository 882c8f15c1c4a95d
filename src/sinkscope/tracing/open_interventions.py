"""Which interventions are on, model by model, and what they change where a hook on a module is not enough: which keys
a query may see, and the neurons of experts.

Interventions belong to a higher layer of the package. What tracing must know of them is kept here, by model and not by
call, so that they may be closed in any order. An open intervention changes the model for every pass. The thread or
task that opened it owns the model meanwhile: another one's reading or intervention is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from sinkscope.errors import InputError


@dataclass(frozen=True, kw_only=True)
class MaskChange:
    """A change of the keys that some queries of one attention may see."""

    queries: tuple[int, ...]
    mode: Literal["only", "allow", "block"]
    """The queries see these keys only; these too, later ones included; or all they saw but these."""
    keys: tuple[int, ...]
    heads: tuple[int, ...] | None = None
    sequences: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class ExpertChange:
    """A change of some neurons of one expert, for every token of a pass, routed there or not."""

    expert: int
    neurons: tuple[int, ...]
    new_values: Callable[[Tensor], Tensor]
    """[N, n] current activations, routing weight included -> what they become."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenIntervention:
    """An intervention that is on."""

    name: str
    decoder: nn.Module
    layers: tuple[int, ...]
    """Where it must act in every pass."""
    by_sequence: bool
    """Whether it depends on the number of a sequence within the batch that runs."""
    intervention: Any
    """The object itself, for the layer above."""
    depth: int
    owner: tuple[int, int]
    acted_in: set[int] = field(default_factory=set)
    """Layers in which it has acted so far."""

    def acted(self, layer: int) -> None:
        """Notes that it acted in a layer."""
        self.acted_in.add(layer)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Entry:
    """A change of one module of one layer, opened at some depth."""

    change: Any
    layer: int
    acted: Callable[[int], None]
    depth: int


_open: list[OpenIntervention] = []
"""In the order in which they were opened, of all models."""
_mask_changes: WeakKeyDictionary[nn.Module, list[_Entry]] = WeakKeyDictionary()
_expert_changes: WeakKeyDictionary[nn.Module, list[_Entry]] = WeakKeyDictionary()
_depth: ContextVar[int] = ContextVar("sinkscope_depth", default=0)


class OwnHook:
    """A hook of an intervention on one module. A copy of the module takes it along, and there it does nothing."""

    def __init__(self, function: Callable, module: nn.Module, *, at_depth: int | None = None) -> None:
        """With `at_depth` it is silent while interventions are suspended."""
        self.function, self.module, self.at_depth = function, module, at_depth

    def __call__(self, called: nn.Module, *others: Any) -> Any:
        acts = called is self.module and self.at_depth in (None, depth())
        return self.function(called, *others) if acts else None

    def __reduce__(self) -> tuple:
        return SilentHook, ()


class SilentHook:
    """What a copy has in place of an intervention's hook."""

    def __call__(self, *call: Any) -> None:
        pass


def owner() -> tuple[int, int]:
    """This thread, and its asynchronous task if it runs one."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs here
        task = None
    return threading.get_ident(), id(task) if task is not None else 0


def open_interventions(decoder: nn.Module | None = None) -> list[OpenIntervention]:
    """Those that act now, on one model or on any that this thread or task works with."""
    acting = [intervention for intervention in _open if intervention.depth == depth()]
    if decoder is None:
        return [intervention for intervention in acting if intervention.owner == owner()]
    return [intervention for intervention in acting if intervention.decoder is decoder]


def any_open(decoder: nn.Module) -> bool:
    """Whether an intervention on the model is open, suspended or not."""
    return any(intervention.decoder is decoder for intervention in _open)


@contextlib.contextmanager
def opened(intervention: OpenIntervention) -> Iterator[None]:
    """While open, the intervention is among those that are on."""
    _open.append(intervention)
    try:
        yield
    finally:
        _open.remove(intervention)


def check_owner(model: nn.Module) -> None:
    """Refuses a model that another thread or task has changed by an intervention: what is read of it would be of the
    changed model, without a word."""
    strangers = [intervention for intervention in _open if intervention.owner != owner()]
    if not strangers:
        return
    modules = set(model.modules())
    for intervention in strangers:
        if intervention.decoder in modules or model in set(intervention.decoder.modules()):
            raise InputError(
                f"Another thread or task has {intervention.name} open on this model. Wait until it is closed, or load "
                "the model a second time."
            )


def check_acted(decoder: nn.Module) -> None:
    """Refuses the result of a pass in which an intervention did not act in every layer that it names."""
    for intervention in open_interventions(decoder):
        if silent := sorted(set(intervention.layers) - intervention.acted_in):
            raise InputError(
                f"{intervention.name} did not act in layer {silent[0]}: this model's forward pass goes around the "
                "module that it changes, so nothing was changed there. Call the model as it was loaded, without a "
                "compiled, traced or overridden forward."
            )


def mask_changes(attention: nn.Module) -> tuple[MaskChange, ...]:
    """What is changed now of the mask of one attention, for the attention that is about to use them."""
    return _acting_on(_mask_changes, attention)


def expert_changes(experts: Any) -> tuple[ExpertChange, ...]:
    """What is changed now of one module of experts."""
    return _acting_on(_expert_changes, experts)


def _acting_on(registry: WeakKeyDictionary[nn.Module, list[_Entry]], module: nn.Module) -> tuple:
    acting = [entry for entry in registry.get(module, ()) if entry.depth == depth()]
    for entry in acting:
        entry.acted(entry.layer)
    return tuple(entry.change for entry in acting)


def depth() -> int:
    """How many times interventions are suspended: what was opened at another depth does not act."""
    return _depth.get()


def check_is_object(model: object) -> None:
    """Refuses a model by its name while an intervention is on: it acts on a model object, not on what is loaded
    anew."""
    acting = open_interventions()
    if acting and (model is None or isinstance(model, str | Path)):
        given = "no model is given" if model is None else f"{str(model)!r} is only a name"
        raise InputError(
            f"{acting[-1].name} is on and acts on a model object, but {given}. Load it first, model = "
            "sinkscope.load(...), and give that to both."
        )


def check_indices(what: str, chosen: Iterable[int] | None, count: int) -> None:
    """Refuses layers, heads, positions or sequences that the model or the text does not have."""
    if wrong := sorted({index for index in chosen or () if not 0 <= index < count}):
        longer = ", or give a longer text" if what == "position" else ""
        raise InputError(f"There is no {what} {', '.join(map(str, wrong))}. Choose from 0 to {count - 1}{longer}.")


def check_chunks(num_chunks: int) -> None:
    """Refuses to split a batch whose sequences an intervention tells apart."""
    if num_chunks > 1 and (name := _by_sequence()):
        raise InputError(
            f"{name} acts on numbered sequences, so the whole batch must fit in one chunk, but it takes {num_chunks}. "
            "Take fewer or shorter sequences, or raise `chunk_tokens`."
        )


def check_one_pass(num_lengths: int) -> None:
    """Refuses to read texts of each length by themselves where an intervention tells the sequences apart."""
    if num_lengths > 1 and (name := _by_sequence()):
        raise InputError(
            f"{name} acts on numbered sequences, so all texts must have one length, but there are {num_lengths}. Cut "
            "the texts to one length."
        )


def _by_sequence() -> str | None:
    """The name of an intervention that is on and tells sequences apart."""
    return next((intervention.name for intervention in open_interventions() if intervention.by_sequence), None)


@contextlib.contextmanager
def suspend() -> Iterator[None]:
    """While open, no intervention acts but those that are entered inside: the model runs for a reading of its own."""
    token = _depth.set(depth() + 1)
    try:
        yield
    finally:
        _depth.reset(token)


def changing_mask(
    attentions: dict[int, nn.Module], change: MaskChange, acted: Callable[[int], None]
) -> contextlib.AbstractContextManager:
    """Adds a change to the attention of some layers; `acted` is called with the layer when it is used."""
    return _adding(_mask_changes, attentions, change, acted)


def changing_experts(layer: int, experts: nn.Module, change: ExpertChange) -> contextlib.AbstractContextManager:
    """Adds a change to the experts of a layer, for readings: what acts on the pass is a hook on them."""
    return _adding(_expert_changes, {layer: experts}, change, lambda layer: None)


@contextlib.contextmanager
def _adding(
    registry: WeakKeyDictionary[nn.Module, list[_Entry]],
    modules: dict[int, nn.Module],
    change: Any,
    acted: Callable[[int], None],
) -> Iterator[None]:
    added = [
        (module, _Entry(change=change, layer=layer, acted=acted, depth=depth())) for layer, module in modules.items()
    ]
    for module, entry in added:
        registry.setdefault(module, []).append(entry)
    try:
        yield
    finally:
        for module, entry in added:
            registry[module].remove(entry)
