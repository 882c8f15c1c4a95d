"""What every intervention is: a context manager that changes a model's forward pass and leaves the model as it was.

An intervention says where it acts (layers, positions, heads, sequences) and what it acts on (the mask, the value
aggregation, neurons, residual dimensions). Those that are on at the same time compose, unless two of them would set
the same thing: that is refused when the second is entered. One that is calibrated on a batch of its own is calibrated
with the others on, whichever was entered first.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from sinkscope.errors import InputError
from sinkscope.models.anatomy import Anatomy, Layer, anatomy_of
from sinkscope.models.loaded import Model, bare_model
from sinkscope.tracing.block_states import entering
from sinkscope.tracing.open_interventions import (
    OpenIntervention,
    OwnHook,
    check_acted,
    check_indices,
    depth,
    open_interventions,
    opened,
    owner,
)
from sinkscope.tracing.receipt import check_reading
from sinkscope.tracing.restored import restored
from sinkscope.tracing.single_reader import everything_eager, single_reader

Acted = Callable[[int], None]
"""Records that an intervention acted in a layer."""
Indices = tuple[int, ...] | None
"""Some of them, or None for all."""


class AttentionPlace(TypedDict, total=False):
    """Where an intervention on attention acts; what is left out is all of them."""

    layers: int | Sequence[int] | None
    heads: int | Sequence[int] | None
    sequences: int | Sequence[int] | None


class AggregationPlace(AttentionPlace, total=False):
    before_norm: bool
    """Whether it acts on what enters the norm on the aggregation, in models that have one."""


class TokenPlace(TypedDict, total=False):
    """At which tokens an intervention acts; what is left out is all of them."""

    positions: int | Sequence[int] | None
    sequences: int | Sequence[int] | None


class ResidualPlace(TokenPlace, total=False):
    layers: int | Sequence[int] | None


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where an intervention acts, and on what of it."""

    on: str
    """mask, aggregation, aggregation before its norm, neurons, output vectors or residual stream."""
    layers: tuple[int, ...]
    positions: Indices = None
    heads: Indices = None
    sequences: Indices = None
    items: frozenset | None = None
    """The neurons or dimensions; None for all."""

    def overlaps(self, other: Place) -> bool:
        """Whether two places share a number that both would set."""
        pairs = [(self.layers, other.layers), (self.positions, other.positions), (self.heads, other.heads)]
        pairs += [(self.sequences, other.sequences), (self.items, other.items)]
        return self.on == other.on and all(
            mine is None or theirs is None or not set(mine).isdisjoint(theirs) for mine, theirs in pairs
        )


_gathering: ContextVar[bool] = ContextVar("sinkscope_gathering_interventions", default=False)


class Intervention(contextlib.AbstractContextManager):
    """One change of a model's forward pass, on while its block runs."""

    name = "intervention"
    holds_a_batch = False
    """Whether it holds the values of one batch, and so cannot act on the batch that others are calibrated on."""
    calibrated_on: str | None = None
    """Where its means come from, in words; None where it needs none."""
    needs: tuple[int, ...] | None = None
    """The positions that a text must have for this to act as on a longer one; None: it reads the whole text."""

    def __init__(self, model: Model, place: Place) -> None:
        owner = bare_model(model)
        self.anatomy: Anatomy = anatomy_of(owner)
        check_reading(owner, self.anatomy)
        layers = _checked_layers(self.anatomy, place.layers)
        chosen = (place.positions, place.heads, place.sequences, place.items)
        # Without any position, head, sequence or item it acts nowhere, and its layers are not even hooked.
        self.place = replace(place, layers=() if any(some is not None and not some for some in chosen) else layers)
        check_indices("head", place.heads, self.anatomy.num_heads)
        for indices, what in ((place.positions, "position"), (place.sequences, "sequence")):
            if indices and min(indices) < 0:
                raise InputError(f"There is no {what} {min(indices)}: the first one is 0.")
        self._opened: list[contextlib.ExitStack] = []

    def __repr__(self) -> str:
        place = self.place
        mode, factor = getattr(self, "mode", None), getattr(self, "factor", 1.0)
        how = [f"by {mode}"] * (mode is not None) + [f"factor {factor:g}"] * (factor != 1.0)
        where = [_listed("layer", place.layers)]
        for what, chosen in (("position", place.positions), ("head", place.heads), ("sequence", place.sequences)):
            where += [] if chosen is None else [_listed(what, chosen)]
        if place.items is not None:
            what = "dimension" if place.on == "residual stream" else "neuron"
            where.append(f"{len(place.items)} {what}{'' if len(place.items) == 1 else 's'}")
        text = f"{' '.join([self.name, *how])} on the {place.on}: {', '.join(where)}"
        return text if self.calibrated_on is None else f"{text}\ncalibrated on {self.calibrated_on}"

    @property
    def first_layer(self) -> int | None:
        """The first layer whose output can differ; None for an intervention on nothing."""
        return min(self.place.layers, default=None)

    @property
    def first_position(self) -> int:
        """The first position that it acts on: in a causal model those before it stay as they are."""
        return min(self.place.positions or (0,))

    @property
    def by_sequence(self) -> bool:
        """Whether what it does to a sequence depends on the sequence's number in the batch."""
        return self.place.sequences is not None

    def calibrate(self) -> None:
        """Reads what it needs to know of the model from a calibration batch, with the others on as they are now."""

    def layers(self) -> list[Layer]:
        return [self.anatomy.layers[index] for index in self.place.layers]

    def opening(self, stack: contextlib.ExitStack, acted: Acted) -> None:
        """Registers hooks and enters contexts; everything is undone by the stack. `acted` is called with the layer
        whenever the intervention acts in one."""
        raise NotImplementedError

    def __enter__(self):
        decoder = self.anatomy.decoder
        with single_reader(decoder):  # refuses while another thread reads the model
            pass
        for other in active(self.anatomy):
            if other.place.overlaps(self.place):
                raise InputError(
                    f"Both {other.name} and {self.name} set the {self.place.on} at the same place. Leave one of them "
                    "out, or move it to other layers, positions, heads or sequences."
                )
        intervention = OpenIntervention(
            name=self.name,
            decoder=decoder,
            layers=self.place.layers,
            by_sequence=self.by_sequence,
            intervention=self,
            depth=depth(),
            owner=owner(),
        )
        with contextlib.ExitStack() as stack:
            stack.enter_context(restored(self.name, self.anatomy))
            stack.enter_context(everything_eager())
            stack.enter_context(opened(intervention))
            if self.place.positions is not None:
                hook_on(stack, decoder, _refuse_cache, with_kwargs=True)
            hook_on(stack, decoder, lambda module, args, output: check_acted(decoder), after=True)
            self.opening(stack, intervention.acted)
            _calibrate()
            self._opened.append(stack.pop_all())
        return self

    def __exit__(self, *exception):
        if not self._opened:
            raise InputError(f"{self.name} is not open, so it cannot be closed. Open it first: with {self.name}(...):")
        result = self._opened.pop().__exit__(*exception)
        _calibrate()
        return result


def _refuse_cache(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """A pass that continues a cache begins at another position than 0, so its positions would be miscounted."""
    cache = kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise InputError(
            "An intervention acts on positions of the whole text, but this pass continues a cache of "
            f"{cache.get_seq_length()} tokens. Give use_cache=False to generate()."
        )


def hook_on(
    stack: contextlib.ExitStack, module: Any, function: Callable, *, after: bool = False, with_kwargs: bool = False
) -> None:
    """Calls a function before or after a module, as torch's hooks do, until the stack is closed. It is silent while
    interventions are suspended, and on a copy of the module, which takes the hooks of its original along."""
    hook = OwnHook(function, module, at_depth=depth())
    register = module.register_forward_hook if after else module.register_forward_pre_hook
    stack.callback(register(hook, with_kwargs=with_kwargs).remove)


def _calibrate() -> None:
    """Calibrates every intervention that is on, with the others on. Inside a calibration the others act as they are."""
    if depth() == 0 and not _gathering.get():
        for entry in open_interventions():
            entry.intervention.calibrate()


@contextlib.contextmanager
def _gathered() -> Iterator[None]:
    """While open, interventions that are entered or left wait for one another to be calibrated."""
    token = _gathering.set(True)
    try:
        yield
    finally:
        _gathering.reset(token)


@contextlib.contextmanager
def together(interventions: Iterable[Intervention]) -> Iterator[int | None]:
    """All of them at once; yields the first layer that any of them touches, None where there are none."""
    stack = contextlib.ExitStack()
    try:
        with _gathered():
            entered = [stack.enter_context(intervention) for intervention in interventions]
        _calibrate()
        yield min((i.first_layer for i in entered if i.first_layer is not None), default=None)
    finally:
        with _gathered():
            stack.close()
        _calibrate()


class BatchShape:
    """[B, T] of the text that is running: some families flatten tokens before the modules that interventions hook."""

    def __init__(self, layer: Layer, stack: contextlib.ExitStack) -> None:
        self.value: tuple[int, int] | None = None
        hook_on(stack, layer.block, self._note, with_kwargs=True)

    def _note(self, module, args, kwargs) -> None:
        num_batch, length, _ = entering(args, kwargs).shape
        self.value = (num_batch, length)

    def unflatten(self, x: Tensor, place: Place) -> Tensor:
        """[B, T, ...] view; checks that the place lies within the text."""
        assert self.value is not None
        check_text(place, *self.value)
        return x.reshape(*self.value, x.shape[-1])


def check_text(place: Place, num_batch: int, length: int) -> None:
    """Refuses a place that does not lie within the text that is running."""
    check_indices("position", place.positions, length)
    check_indices("sequence", place.sequences, num_batch)


def check_held(held: Tensor, now: Tensor) -> None:
    """Refuses values [B, T, ...] that were recorded on a batch of another shape than the one that is running."""
    if held.shape[:2] != now.shape[:2]:
        raise InputError(
            f"The clamp was made from a batch of {held.shape[0]} x {held.shape[1]} tokens, but the model runs on "
            f"{now.shape[0]} x {now.shape[1]}. Make it from the batch that the model runs, and trace it in one chunk."
        )


def indices(chosen: Indices, device: torch.device) -> slice | Tensor:
    """A selector of the chosen indices along an axis."""
    return slice(None) if chosen is None else torch.tensor(chosen, dtype=torch.long, device=device)


def active(anatomy: Anatomy) -> list[Intervention]:
    """The interventions on this model that act now, in the order in which they were entered."""
    return [entry.intervention for entry in open_interventions(anatomy.decoder)]


def _listed(what: str, chosen: Sequence[int]) -> str:
    """Indices in words: as a range where they are one; of many, the first."""
    if not chosen:
        return f"no {what}"
    if len(chosen) > 2 and tuple(chosen) == tuple(range(chosen[0], chosen[0] + len(chosen))):
        return f"{what}s {chosen[0]} to {chosen[-1]}"
    more = f" and {len(chosen) - 8} more" if len(chosen) > 8 else ""
    return f"{what}{'' if len(chosen) == 1 else 's'} {', '.join(map(str, chosen[:8]))}{more}"


def as_indices(chosen: int | Sequence[int] | None) -> Indices:
    """One index, several, or None for all, as a tuple."""
    if chosen is None:
        return None
    several: list[Any] = list(chosen) if isinstance(chosen, Iterable) and not isinstance(chosen, str) else [chosen]
    if wrong := [index for index in several if isinstance(index, bool) or not hasattr(index, "__index__")]:
        raise InputError(
            f"{wrong[0]!r} is not a whole number. Give one or several, counted from 0, such as 10 or [10, 12]."
        )
    return tuple(dict.fromkeys(map(operator.index, several)))


def one_index(position: int) -> int:
    """The position of an intervention that acts on one alone."""
    chosen = as_indices(position) or ()
    if len(chosen) != 1:
        raise InputError(
            f"This intervention acts on one position, not {position!r}. Open one for each: they act together."
        )
    return chosen[0]


def all_layers(model: Model, layers: int | Sequence[int] | None) -> tuple[int, ...]:
    """The chosen layers, or all of them."""
    chosen = as_indices(layers)
    return tuple(range(len(anatomy_of(bare_model(model)).layers))) if chosen is None else chosen


def layers_with_attention(model: Model, layers: int | Sequence[int] | None) -> tuple[int, ...]:
    """The chosen layers, or all of those with attention; refuses a layer of a hybrid without."""
    with_attention = [layer.index for layer in anatomy_of(bare_model(model)).attention_layers]
    chosen = as_indices(layers)
    if chosen is None:
        return tuple(with_attention)
    num_layers = len(anatomy_of(bare_model(model)).layers)
    if lacking := [layer for layer in chosen if 0 <= layer < num_layers and layer not in with_attention]:
        raise InputError(
            f"Layer {lacking[0]} has no attention. Choose among layers {', '.join(map(str, with_attention))}."
        )
    return chosen


def _checked_layers(anatomy: Anatomy, layers: tuple[int, ...]) -> tuple[int, ...]:
    check_indices("layer", layers, len(anatomy.layers))
    return tuple(sorted(set(layers)))
