"""Interventions written as words or numbers, such as `{"amplify": "10:4"}`, read with the table of kinds."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sinkscope.arguments import whole_numbers
from sinkscope.errors import InputError
from sinkscope.interventions.kinds import KINDS, Kind, Setting

if TYPE_CHECKING:
    from sinkscope.models.anatomy import NeuronLike

    ByKind = Mapping[str, "str | int | NeuronLike | Sequence[str | int | NeuronLike]"]
    """By kind, one intervention or several: a text such as 10:4, a position, or a neuron."""


@dataclass(frozen=True, kw_only=True)
class InterventionSpec:
    """Which interventions of one kind to make."""

    name: str
    values: tuple[tuple, ...]
    texts: tuple[str, ...]
    """The same as on the command line, such as 10:4."""
    where: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """layers and heads, where they were chosen."""

    @property
    def kind(self) -> Kind:
        return KINDS[self.name]

    def positions(self) -> list[int]:
        """The positions that they act on."""
        return [] if self.kind.acts_at is None else [self.kind.acts_at(value) for value in self.values]

    def neurons(self) -> list[Any]:
        """The neurons that they act on, (layer, expert, neuron) each."""
        return [value[0] for value in self.values] if self.kind.names_neuron else []

    def make(self, setting: Setting, *, control: bool) -> Sequence[Any]:
        """The interventions or, with `control`, those of the control."""
        make = self.kind.control if control else self.kind.make
        where = {name: chosen for name, chosen in self.where.items() if name in self.kind.takes}
        return [] if make is None else make(setting, self.values, where)


def read_specs(
    by_kind: ByKind, *, layers: str | Sequence[int] | None = None, heads: str | Sequence[int] | None = None
) -> list[InterventionSpec]:
    """What to make of each kind; refuses what cannot be parsed."""
    if not isinstance(by_kind, Mapping):
        raise InputError(
            f"Interventions are a dictionary by kind, such as {{'mask_to_self': 10}}, not {reprlib.repr(by_kind)}. "
            f"The kinds are {', '.join(KINDS)}."
        )
    if not by_kind:
        raise InputError(f"Give at least one intervention, such as `mask_to_self=10`. The kinds are {_named(KINDS)}.")
    if unknown := [name for name in by_kind if name not in KINDS]:
        raise InputError(
            f"There is no kind of intervention called {', '.join(unknown)}. The kinds are {', '.join(KINDS)}."
        )
    where = {}
    for option, chosen in (("layers", layers), ("heads", heads)):
        if chosen is not None:
            where[option] = _numbers(option, chosen, by_kind)
    specs = []
    for name, interventions in by_kind.items():
        kind = KINDS[name]
        form = f"{kind.form}, such as {kind.example}"
        several = _several(interventions)
        values = tuple(_read(one, name, form, kind.read) for one in several)
        specs.append(InterventionSpec(name=name, values=values, texts=tuple(map(_written, several)), where=where))
    return specs


def _numbers(option: str, chosen: str | Sequence[int], by_kind: ByKind) -> tuple[int, ...]:
    """The chosen layers or heads; refused where no kind takes them."""
    if not any(option in KINDS[name].takes for name in by_kind):
        able = [name for name, kind in KINDS.items() if option in kind.takes]
        raise InputError(
            f"`{option}` cannot be chosen for {_named(by_kind)}. Leave `{option}` out, or use it with {_named(able)}."
        )
    if isinstance(chosen, str):
        return tuple(_read(chosen, option, "numbers such as 0-2,7", whole_numbers))
    return tuple(chosen if isinstance(chosen, Iterable) else [chosen])


def _several(interventions: Any) -> list:
    """The interventions of one kind as a list: a text, a number or a neuron alone is one of them."""
    is_neuron = isinstance(interventions, tuple) and all(isinstance(part, int | None) for part in interventions)
    if is_neuron or isinstance(interventions, str) or not isinstance(interventions, Iterable):
        return [interventions]
    return list(interventions)


def _written(value: Any) -> str:
    """As on a command line: text as it is, 10 of a position, 5:148 of a neuron."""
    if isinstance(value, str | int):
        return str(value)
    if hasattr(value, "__index__"):  # an integer of numpy's or torch's
        return str(operator.index(value))
    neuron = value if isinstance(value, tuple) else (value.layer, value.expert, value.neuron)
    return ":".join(str(part) for part in neuron if part is not None)


def _read(value: Any, name: str, form: str, read: Callable[[str], Any]) -> Any:
    try:
        return read(_written(value))
    except (ValueError, AttributeError):  # AttributeError: neither a text nor a number nor a neuron
        raise InputError(f"`{name}` cannot be {reprlib.repr(value)}. Write {form}.") from None


def _named(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
