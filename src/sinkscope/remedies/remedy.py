"""remedy(model, text): a model that 8 bits harm less, by a rotation, a prefix in the cache or unplugged super neurons.

Each remedy that is asked for is measured on its own, beside its control, and then all of them together: the loss in 16
bits, and under 8-bit activations with one scale a tensor, static and dynamic.
Axes: N texts, T positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from sinkscope.arguments import check_audit, check_remedies
from sinkscope.models.loading import LoadedModel, load
from sinkscope.models.rotation import rotate
from sinkscope.models.token_batches import TokenBatch
from sinkscope.remedies.advice import NEGLIGIBLE, check_plain
from sinkscope.remedies.audit import CALIBRATION, Progress, texts_to_measure
from sinkscope.remedies.damage import Damage, damage, input_ranges, losses, scheme_losses
from sinkscope.remedies.prefix import SinkPrefix, other_prefix, sink_prefix
from sinkscope.remedies.schemes import SCHEMES
from sinkscope.remedies.unplug import other_units, super_neurons, unplug

MEASURED = ("activations-8-static", "activations-8-dynamic")
PLAIN = "16 bits"
WORTH_IT = 0.5
"""A remedy helps if it wins back at least this share of the damage."""


@dataclass(frozen=True, kw_only=True)
class Treated:
    """A model with what was done to it."""

    name: str
    model: Any
    prefix: SinkPrefix | None = None
    is_control: bool = False


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The losses [N, T - 1] of one treated model, in 16 bits and under each scheme."""

    name: str
    is_control: bool
    losses: dict[str, np.ndarray]

    def mean(self, scheme: str) -> float:
        return float(self.losses[scheme].mean())


@dataclass(frozen=True, kw_only=True, repr=False)
class Remedied:
    """The remedied model, and what was measured of it and of the original."""

    loaded: LoadedModel
    """The remedied model under the original's name, with its tokenizer."""
    prefix: SinkPrefix | None
    units: tuple[Any, ...]
    readings: tuple[Measured, ...]
    """Of the original first, then of each remedy and its control, last of all remedies together."""
    num_tokens: tuple[int, int]
    """Held-out texts, and tokens of each."""
    needless: tuple[str, ...] = ()
    """What was asked for and left out: the model has nothing that it could act on."""

    @property
    def original(self) -> Measured:
        return self.readings[0]

    def harm(self, scheme: str) -> Damage:
        """What the scheme costs the original."""
        return damage(self.original.losses[scheme], self.original.losses[PLAIN])

    def shares(self, reading: Measured) -> dict[str, float]:
        """By scheme that does harm, the share of it that is won back, what the remedy itself costs included."""
        harmful = [scheme for scheme in MEASURED if self.harm(scheme).change >= NEGLIGIBLE]
        won = {scheme: self.original.mean(scheme) - reading.mean(scheme) for scheme in harmful}
        return {} if reading is self.original else {name: won[name] / self.harm(name).change for name in harmful}

    def cost(self, reading: Measured) -> float:
        """The relative change of the loss in 16 bits."""
        return reading.mean(PLAIN) / self.original.mean(PLAIN) - 1

    def verdict(self, reading: Measured) -> str:
        """Whether a remedy helps, in a sentence."""
        shares = self.shares(reading)
        if not shares:
            return f"{reading.name}: not needed, 8 bits cost less than {NEGLIGIBLE} nats a token"
        said = ", ".join(f"{share:.0%} of {scheme}" for scheme, share in shares.items())
        helps = "helps" if min(shares.values()) >= WORTH_IT else "does not help"
        return f"{reading.name}: {helps}, wins back {said}; the loss in 16 bits changes by {self.cost(reading):+.2%}"

    @cached_property
    def summary(self) -> dict[str, Any]:
        rows = []
        for reading in self.readings:
            for scheme in (PLAIN, *MEASURED):
                change = damage(reading.losses[scheme], self.original.losses[PLAIN])
                row = {"model": reading.name, "control": reading.is_control, "scheme": scheme}
                row |= {"loss": reading.mean(scheme), "change": change.change, "low": change.low, "high": change.high}
                rows.append(row | {"won_back": self.shares(reading).get(scheme)})
        return {
            "model": self.loaded.name,
            "num_texts": self.num_tokens[0],
            "length": self.num_tokens[1],
            "prefix": None if self.prefix is None else list(self.prefix.ids),
            "units": [str(unit) for unit in self.units],
            "verdicts": self.verdicts,
            "losses": rows,
        }

    @property
    def verdicts(self) -> list[str]:
        return [*self.needless, *(self.verdict(reading) for reading in self.readings[1:])]

    def __repr__(self) -> str:
        return "Remedied(" + "; ".join(self.verdicts) + ")"


def remedy(
    model: Any,
    text: Any = None,
    *,
    rotate: bool = False,
    prefix: bool = False,
    unplug: bool = False,
    length: int = 128,
    num_sequences: int = 16,
    seed: int = 0,
    progress: Progress | None = None,
) -> Remedied:
    """A model with one remedy or several, measured on `num_sequences` held-out texts of `length` tokens.

    `text` is a file, or token ids [texts, positions], of which the first 8 calibrate; without one the model writes
    its own.
    """
    check_remedies(rotate=rotate, prefix=prefix, unplug=unplug)
    check_audit(length=length, num_sequences=num_sequences, seed=seed)
    loaded = load(model)
    batch = texts_to_measure(loaded, text, length, num_sequences, seed)
    calibration, held_out = (replace(batch, ids=ids) for ids in (batch.ids[:CALIBRATION], batch.ids[CALIBRATION:]))
    units = super_neurons(loaded, calibration) if unplug else ()
    check_plain(loaded.model, held_out.ids)
    treated = [Treated(name="original", model=loaded.model)]
    if unplug:
        treated += _unplugged(loaded, units, seed)
    if rotate:
        treated.append(Treated(name="rotate", model=_rotated(loaded.model, seed)))
    found = sink_prefix(loaded, calibration) if prefix else None
    if found is not None and found.ids:
        treated.append(Treated(name="prefix", model=loaded.model, prefix=found))
        other = other_prefix(loaded, found, seed=seed)
        treated.append(Treated(name="random prefix", model=loaded.model, prefix=other, is_control=True))
    if len([each for each in treated if not each.is_control]) > 2:
        together = _together(loaded, calibration, rotate=rotate, prefix=prefix, units=units, seed=seed)
        treated.append(together)
        found = together.prefix
    needless = ["unplug: nothing to do, no super neuron writes a sink"] if unplug and not units else []
    needless += ["prefix: nothing to do, no token is a sink"] if found is not None and not found.ids else []
    readings = []
    for number, each in enumerate(treated):
        readings.append(_reading(each, calibration, held_out))
        if progress is not None:
            progress(number + 1, len(treated))
    last = [each for each in treated if not each.is_control][-1]
    return Remedied(
        loaded=replace(loaded, model=last.model),
        prefix=found if found is not None and found.ids else None,
        units=units,
        readings=tuple(readings),
        num_tokens=tuple(held_out.ids.shape),  # type: ignore[arg-type]
        needless=tuple(needless),
    )


def _unplugged(loaded: LoadedModel, units: tuple[Any, ...], seed: int) -> list[Treated]:
    if not units:
        return []
    others = other_units(loaded.model, units, seed=seed)
    return [
        Treated(name="unplug", model=unplug(loaded.model, units)),
        Treated(name="random units unplugged", model=unplug(loaded.model, others), is_control=True),
    ]


def _rotated(model: Any, seed: int) -> Any:
    return rotate(model, seed=seed)


def _together(
    loaded: LoadedModel, calibration: TokenBatch, *, rotate: bool, prefix: bool, units: tuple[Any, ...], seed: int
) -> Treated:
    model = unplug(loaded.model, units) if units else loaded.model
    model = _rotated(model, seed) if rotate else model
    found = sink_prefix(replace(loaded, model=model), calibration) if prefix else None
    return Treated(name="all together", model=model, prefix=found if found is not None and found.ids else None)


def _reading(each: Treated, calibration: TokenBatch, held_out: TokenBatch) -> Measured:
    """The losses of a treated model. A text that follows a prefix has no BOS of its own, so no loss counts the token
    after BOS."""
    start, cache = int(held_out.bos), None if each.prefix is None else each.prefix.cache
    begin = start if cache is not None else 0
    ids_NT = held_out.ids[:, begin:]
    ranges = input_ranges(each.model, calibration.ids[:, begin:], prefix=cache)
    found = {PLAIN: losses(each.model, ids_NT, prefix=cache)}
    for name in MEASURED:
        found[name] = scheme_losses(each.model, SCHEMES[name], ids_NT, ranges=ranges, prefix=cache)
    return Measured(
        name=each.name,
        is_control=each.is_control,
        losses={name: loss_NT[:, start - begin :] for name, loss_NT in found.items()},
    )
