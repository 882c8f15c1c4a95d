"""Which interventions are on, model by model, and two kinds of change that a hook on a module cannot make: which keys a
query may see, and the neurons of experts.

`sinkscope.interventions` imports tracing, so what tracing must know of interventions stands here. It is kept by model,
not by call, so that interventions may be closed in any order. An open intervention changes the model for every pass.
The thread or task that opened it owns the model meanwhile: others may neither read nor change it.
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
    """A change of the keys that some queries of a layer may see."""

    queries: tuple[int, ...]
    mode: Literal["only", "allow", "block"]
    """only: the queries see these keys alone. allow: these too, even later ones. block: all that they saw but these."""
    keys: tuple[int, ...]
    heads: tuple[int, ...] | None = None
    """None for all, as for sequences."""
    sequences: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class ExpertChange:
    """A change of some neurons of one expert at every token of a pass, routed to the expert or not."""

    expert: int
    neurons: tuple[int, ...]
    new_values: Callable[[Tensor], Tensor]
    """Takes the current activations [N, n], routing weight included, and returns the new ones."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenIntervention:
    """An intervention that is on."""

    name: str
    decoder: nn.Module
    layers: tuple[int, ...]
    """The layers it must act in, in every pass."""
    by_sequence: bool
    """Whether it depends on which sequence of the batch it acts on."""
    intervention: Any
    """The object of `sinkscope.interventions`."""
    depth: int
    """See `suspend`."""
    owner: tuple[int, int]
    acted_in: set[int] = field(default_factory=set)
    """Layers in which it has acted so far."""

    def acted(self, layer: int) -> None:
        """Records that it acted in a layer."""
        self.acted_in.add(layer)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Entry:
    """A change of one module, and the depth at which it was opened."""

    change: Any
    layer: int
    acted: Callable[[int], None]
    depth: int


_open: list[OpenIntervention] = []
"""The open interventions of all models, in the order in which they were opened."""
_mask_changes: WeakKeyDictionary[nn.Module, list[_Entry]] = WeakKeyDictionary()
_expert_changes: WeakKeyDictionary[nn.Module, list[_Entry]] = WeakKeyDictionary()
_depth: ContextVar[int] = ContextVar("sinkscope_depth", default=0)


class OwnHook:
    """A hook of ours on one module. A copy of the module copies its hooks too, and there this one does nothing."""

    def __init__(self, function: Callable, module: nn.Module, *, at_depth: int | None = None) -> None:
        """`at_depth`: act at this depth alone, so not while interventions are suspended."""
        self.function, self.module, self.at_depth = function, module, at_depth

    def __call__(self, called: nn.Module, *others: Any) -> Any:
        acts = called is self.module and self.at_depth in (None, depth())
        return self.function(called, *others) if acts else None

    def __reduce__(self) -> tuple:
        return SilentHook, ()


class SilentHook:
    """What a pickled copy has in place of an OwnHook."""

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
    """The interventions that act now: on one model, or on any that this thread or task owns."""
    acting = [intervention for intervention in _open if intervention.depth == depth()]
    if decoder is None:
        return [intervention for intervention in acting if intervention.owner == owner()]
    return [intervention for intervention in acting if intervention.decoder is decoder]


def any_open(decoder: nn.Module) -> bool:
    """Whether an intervention on the model is open, suspended or not."""
    return any(intervention.decoder is decoder for intervention in _open)


@contextlib.contextmanager
def opened(intervention: OpenIntervention) -> Iterator[None]:
    """While open, the intervention is on."""
    _open.append(intervention)
    try:
        yield
    finally:
        _open.remove(intervention)


def check_owner(model: nn.Module) -> None:
    """Refuses a model on which another thread or task has an intervention open: a reading would be of the changed model
    without saying so."""
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
    """Refuses the result of a pass in which an intervention did not act in all of its layers."""
    for intervention in open_interventions(decoder):
        if silent := sorted(set(intervention.layers) - intervention.acted_in):
            raise InputError(
                f"{intervention.name} did not act in layer {silent[0]}: this model's forward pass goes around the "
                "module that it changes, so nothing was changed there. Call the model as it was loaded, without a "
                "compiled, traced or overridden forward."
            )


def mask_changes(attention: nn.Module) -> tuple[MaskChange, ...]:
    """The changes that act now on the mask of one attention. Asking counts as acting, so only the attention itself may
    ask."""
    return _acting_on(_mask_changes, attention)


def expert_changes(experts: Any) -> tuple[ExpertChange, ...]:
    """The changes that act now on one module of experts."""
    return _acting_on(_expert_changes, experts)


def _acting_on(registry: WeakKeyDictionary[nn.Module, list[_Entry]], module: nn.Module) -> tuple:
    acting = [entry for entry in registry.get(module, ()) if entry.depth == depth()]
    for entry in acting:
        entry.acted(entry.layer)
    return tuple(entry.change for entry in acting)


def depth() -> int:
    """How many suspensions we are in. An intervention acts only at the depth at which it was opened."""
    return _depth.get()


def check_is_object(model: object) -> None:
    """Refuses a model given by name while an intervention is on: loading it would give a new object, which the
    intervention does not change."""
    acting = open_interventions()
    if acting and (model is None or isinstance(model, str | Path)):
        given = "no model is given" if model is None else f"{str(model)!r} is only a name"
        raise InputError(
            f"{acting[-1].name} is on and acts on a model object, but {given}. Load it first, model = "
            "sinkscope.load(...), and give that to both."
        )


def check_indices(what: str, chosen: Iterable[int] | None, count: int) -> None:
    """Refuses indices of layers, heads, positions or sequences that the model or the text does not have."""
    if wrong := sorted({index for index in chosen or () if not 0 <= index < count}):
        longer = ", or give a longer text" if what == "position" else ""
        raise InputError(f"There is no {what} {', '.join(map(str, wrong))}. Choose from 0 to {count - 1}{longer}.")


def check_chunks(num_chunks: int) -> None:
    """Refuses to split a batch while an intervention acts on numbered sequences of it."""
    if num_chunks > 1 and (name := _by_sequence()):
        raise InputError(
            f"{name} acts on numbered sequences, so the whole batch must fit in one chunk, but it takes {num_chunks}. "
            "Take fewer or shorter sequences, or raise `chunk_tokens`."
        )


def check_one_pass(num_lengths: int) -> None:
    """Refuses texts of several lengths, which are read one length at a time, while an intervention acts on numbered
    sequences."""
    if num_lengths > 1 and (name := _by_sequence()):
        raise InputError(
            f"{name} acts on numbered sequences, so all texts must have one length, but there are {num_lengths}. Cut "
            "the texts to one length."
        )


def _by_sequence() -> str | None:
    """The name of an intervention that is on and acts on numbered sequences; None if there is none."""
    return next((intervention.name for intervention in open_interventions() if intervention.by_sequence), None)


@contextlib.contextmanager
def suspend() -> Iterator[None]:
    """While open, only interventions that are opened inside act: so the baseline can be read meanwhile."""
    token = _depth.set(depth() + 1)
    try:
        yield
    finally:
        _depth.reset(token)


def changing_mask(
    attentions: dict[int, nn.Module], change: MaskChange, acted: Callable[[int], None]
) -> contextlib.AbstractContextManager:
    """While open, changes the masks of some attentions, by layer. `acted` is called with the layer at every use."""
    return _adding(_mask_changes, attentions, change, acted)


def changing_experts(layer: int, experts: nn.Module, change: ExpertChange) -> contextlib.AbstractContextManager:
    """While open, readings of these experts' neurons include the change. The pass itself is changed by a hook."""
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
