"""What is asked for in words or numbers, such as `{"amplify": "10:4"}`, read by the table of kinds."""

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
    from sinkscope.models.anatomy import UnitLike

    ByKind = Mapping[str, "str | int | UnitLike | Sequence[str | int | UnitLike]"]
    """By kind: one of them or several, each as text such as 10:4, a position, or a unit."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Interventions of one kind that are asked for."""

    name: str
    values: tuple[tuple, ...]
    where: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """layers and heads, where they were chosen."""

    @property
    def kind(self) -> Kind:
        return KINDS[self.name]

    def positions(self) -> list[int]:
        """The positions that they act on."""
        return [] if self.kind.acts_at is None else [self.kind.acts_at(value) for value in self.values]

    def make(self, setting: Setting, *, control: bool) -> Sequence[Any]:
        """The interventions, or what stands in for them."""
        make = self.kind.control if control else self.kind.make
        where = {name: chosen for name, chosen in self.where.items() if name in self.kind.takes}
        return [] if make is None else make(setting, self.values, where)


def requests(
    asked: ByKind, *, layers: str | Sequence[int] | None = None, heads: str | Sequence[int] | None = None
) -> list[Request]:
    """What is asked for, by kind, as requests; refuses what cannot be parsed."""
    if not isinstance(asked, Mapping):
        raise InputError(
            f"Interventions are a dictionary by kind, such as {{'mask_to_self': 10}}, not {reprlib.repr(asked)}. "
            f"The kinds are {', '.join(KINDS)}."
        )
    if not asked:
        raise InputError(f"Give at least one intervention, such as `mask_to_self=10`. The kinds are {_named(KINDS)}.")
    if unknown := [name for name in asked if name not in KINDS]:
        raise InputError(
            f"There is no kind of intervention called {', '.join(unknown)}. The kinds are {', '.join(KINDS)}."
        )
    where = {}
    for option, chosen in (("layers", layers), ("heads", heads)):
        if chosen is None:
            continue
        if not any(option in KINDS[name].takes for name in asked):
            able = [name for name, kind in KINDS.items() if option in kind.takes]
            raise InputError(
                f"`{option}` cannot be chosen for {_named(asked)}. Leave `{option}` out, or use it with {_named(able)}."
            )
        where[option] = tuple(
            _read(chosen, option, "numbers such as 0-2,7", whole_numbers)
            if isinstance(chosen, str)
            else (chosen if isinstance(chosen, Iterable) else [chosen])
        )
    return [
        Request(
            name=name,
            values=tuple(
                _read(one, name, f"{KINDS[name].form}, such as {KINDS[name].example}", KINDS[name].read)
                for one in _several(given)
            ),
            where=where,
        )
        for name, given in asked.items()
    ]


def _several(given: Any) -> list:
    """What is asked for of one kind as a list: a text, a number or a unit alone is one of them."""
    is_unit = isinstance(given, tuple) and all(isinstance(part, int | None) for part in given)
    return [given] if is_unit or isinstance(given, str) or not isinstance(given, Iterable) else list(given)


def _written(given: Any) -> str:
    """As on a command line: text as it is, 10 of a position, 5:148 of a unit."""
    if isinstance(given, str | int):
        return str(given)
    if hasattr(given, "__index__"):  # an integer of numpy's or torch's
        return str(operator.index(given))
    unit = given if isinstance(given, tuple) else (given.layer, given.expert, given.neuron)
    return ":".join(str(part) for part in unit if part is not None)


def _read(given: Any, name: str, form: str, read: Callable[[str], Any]) -> Any:
    try:
        return read(_written(given))
    except (ValueError, AttributeError):  # the latter of what is no text, no number and no unit
        raise InputError(f"`{name}` cannot be {reprlib.repr(given)}. Write {form}.") from None


def _named(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
