"""remedy(model, text): a model that 8 bits harm less, by a rotation, a prefix in the cache, unplugged super neurons, a
list of modules that stay in 16 bits, or better static scales.

Each remedy that is asked for is measured on its own, beside its control, and then all of them together: the loss in 16
bits, and under 8-bit activations with one scale a tensor, static and dynamic.
Axes: N texts, T positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sinkscope.arguments import CALIBRATION, check_audit, check_remedies
from sinkscope.audits.advice import check_plain, other_modules
from sinkscope.audits.damage import Prefix, losses, scheme_losses
from sinkscope.audits.prediction import predict
from sinkscope.audits.prefix import SinkPrefix, other_prefix, sink_prefix
from sinkscope.audits.remedy_result import MEASURED, PLAIN, Measured, RemedyResult
from sinkscope.audits.schemes import SCHEMES, linear_layers
from sinkscope.audits.static_scales import STATIC, Ranges, better_ranges, least_error_ranges
from sinkscope.audits.texts import texts_to_measure
from sinkscope.audits.unplug import super_neurons, unplug
from sinkscope.interventions.neurons import matched_units
from sinkscope.models import rotation
from sinkscope.models.anatomy import anatomy_of
from sinkscope.models.loaded import ModelLike
from sinkscope.models.loading import LoadedModel, load
from sinkscope.models.prompts import Tokens
from sinkscope.models.token_batches import TokenBatch
from sinkscope.progress import Work
from sinkscope.tracing.receipt import take_receipt


@dataclass(frozen=True, kw_only=True)
class Treated:
    """A model with what was done to it."""

    name: str
    model: Any
    prefix: SinkPrefix | None = None
    exempted: Sequence[str] = ()
    """Modules that stay in 16 bits."""
    ranges: Ranges | None = None
    """Of static scales; those of the least squared error without it."""
    acts_on: tuple[str, ...] = MEASURED
    is_control: bool = False


def remedy(
    model: ModelLike,
    text: Tokens | Path | None = None,
    *,
    rotate: bool = False,
    prefix: bool = False,
    unplug: bool = False,
    exempt: bool = False,
    scales: bool = False,
    bos: bool | None = None,
    length: int | None = None,
    num_sequences: int = 16,
    seed: int = 0,
    work: Work | None = None,
) -> RemedyResult:
    """A model with one remedy or several, measured on `num_sequences` held-out texts of `length` tokens.

    `text` is a file, or token ids [texts, positions], of which the first 16 calibrate; without one the model writes
    its own. `bos` and `length` are as for `audit`. `work` is given the name of each long part, and returns what is
    told its progress.
    """
    check_remedies(rotate=rotate, prefix=prefix, unplug=unplug, exempt=exempt, scales=scales)
    check_audit(length=length, num_sequences=num_sequences, seed=seed)
    loaded = load(model)
    batch = texts_to_measure(
        loaded, text, bos=bos, length=length, num_sequences=num_sequences, seed=seed, prefix=prefix
    )
    calibration, held_out = (replace(batch, ids=ids) for ids in (batch.ids[:CALIBRATION], batch.ids[CALIBRATION:]))
    check_plain(loaded.model, batch.ids)
    begin = work or (lambda what: lambda done, total: None)
    units = super_neurons(loaded, calibration) if unplug else ()
    # Before the searches, which take minutes: a model that cannot be rotated is refused at once.
    rotated = [Treated(name="rotate", model=rotation.rotate(loaded.model, seed=seed))] if rotate else []
    found = sink_prefix(loaded, calibration, progress=begin("prefixes tried")) if prefix else None
    blamed = _blamed(loaded.model, calibration, seed, begin) if exempt else None
    rescaled = _rescaled(loaded.model, calibration, seed, begin) if scales else []
    treated = [
        Treated(name="original", model=loaded.model),
        *_unplugged(loaded, units, seed),
        *rotated,
        *_prefixed(loaded, found, seed),
        *_exempted(loaded.model, blamed or (), seed),
        *rescaled,
    ]
    acting = [each.name for each in treated[1:] if not each.is_control]
    if len(acting) + (scales and not rescaled) > 1:  # scales that do not help alone may help beside the others
        together = _together(
            loaded,
            calibration,
            rotate=rotate,
            units=units,
            prefix=found,
            blamed=blamed,
            scales=scales,
            seed=seed,
            begin=begin,
        )
        treated.append(together)
        found = together.prefix
    last = [each for each in treated if not each.is_control][-1]
    needless = ["unplug: nothing to do, no super neuron writes a sink"] if unplug and not units else []
    if found is not None and not found.ids:
        beside = " beside the others" if "prefix" in acting else ""
        needless.append(f"prefix: nothing to do{beside}, {found.why_none}")
    needless += ["exempt: nothing to do, no module is predicted to do harm"] if exempt and not blamed else []
    if scales and last.ranges is None:
        beside = " beside the others" if rescaled else ""
        needless.append(f"scales: nothing to do{beside}, those of the least squared error do as well")
    readings: list[Measured] = []
    step = begin("models measured")
    step(0, len(treated))
    for each in treated:
        readings.append(_reading(each, calibration, held_out))
        step(len(readings), len(treated))
    return RemedyResult(
        loaded=replace(loaded, model=last.model),
        receipt=take_receipt(loaded, held_out),
        prefix=found if found is not None and found.ids else None,
        units=units,
        exempted=tuple(last.exempted),
        ranges=last.ranges,
        readings=tuple(readings),
        num_tokens=tuple(held_out.ids.shape),  # type: ignore[arg-type]
        source=held_out.source,
        needless=tuple(needless),
    )


def _unplugged(loaded: LoadedModel, units: tuple[Any, ...], seed: int) -> list[Treated]:
    if not units:
        return []
    others = matched_units(anatomy_of(loaded.model), units, (), seed=seed)
    return [
        Treated(name="unplug", model=unplug(loaded.model, units)),
        Treated(name="random units unplugged", model=unplug(loaded.model, others), is_control=True),
    ]


def _prefixed(loaded: LoadedModel, found: SinkPrefix | None, seed: int) -> list[Treated]:
    if found is None or not found.ids:
        return []
    other = other_prefix(loaded, found, seed=seed)
    return [
        Treated(name="prefix", model=loaded.model, prefix=found),
        Treated(name="random prefix", model=loaded.model, prefix=other, is_control=True),
    ]


def _exempted(model: Any, blamed: Sequence[str], seed: int) -> list[Treated]:
    if not blamed:
        return []
    others = other_modules(list(linear_layers(model)), blamed, seed=seed)
    return [
        Treated(name="exempt", model=model, exempted=blamed),
        Treated(name="random modules exempt", model=model, exempted=others, is_control=True),
    ]


def _rescaled(model: Any, calibration: TokenBatch, seed: int, begin: Work) -> list[Treated]:
    by_error, better = _better_ranges(model, calibration, None, (), seed, begin)
    if better == by_error:
        return []
    names = list(by_error)
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(seed)).tolist()
    shares = [better[names[number]] / by_error[names[number]] for number in order]
    others = {name: share * by_error[name] for name, share in zip(names, shares, strict=True)}
    return [
        Treated(name="scales", model=model, ranges=better, acts_on=(STATIC.name,)),
        Treated(
            name="the same changes of range in other modules",
            model=model,
            ranges=others,
            acts_on=(STATIC.name,),
            is_control=True,
        ),
    ]


def _better_ranges(
    model: Any, calibration: TokenBatch, prefix: SinkPrefix | None, exempted: Sequence[str], seed: int, begin: Work
) -> tuple[Ranges, Ranges]:
    step = begin("texts that set static scales")
    step(0, calibration.num_sequences)
    ids_NT, cache = _after_prefix(calibration, prefix)
    modules = [name for name in linear_layers(model) if name not in exempted]
    return better_ranges(model, ids_NT, modules=modules, prefix=cache, seed=seed, progress=step)


def _blamed(model: Any, calibration: TokenBatch, seed: int, begin: Work) -> list[str]:
    """The modules that hold most of what both schemes are predicted to cost, as one list."""
    step = begin("texts that blame modules")
    step(0, calibration.num_sequences)
    no_sinks = torch.zeros(calibration.ids.shape, dtype=torch.bool)  # readings tell of them; damages need none
    ranges = least_error_ranges(model, calibration.ids)
    prediction = predict(model, calibration.ids, ranges=ranges, is_sink=no_sinks, seed=seed, progress=step)
    return prediction.blamed(list(linear_layers(model)), *(SCHEMES[name] for name in MEASURED))


def _together(
    loaded: LoadedModel,
    calibration: TokenBatch,
    *,
    rotate: bool,
    units: tuple[Any, ...],
    prefix: SinkPrefix | None,
    blamed: Sequence[str] | None,
    scales: bool,
    seed: int,
    begin: Work,
) -> Treated:
    """All remedies in one model. Prefix and modules are those of the original, found again where the model is
    another."""
    model = unplug(loaded.model, units) if units else loaded.model
    model = rotation.rotate(model, seed=seed) if rotate else model
    if model is not loaded.model:
        if prefix is not None:
            step = begin("prefixes tried beside the other remedies")
            prefix = sink_prefix(replace(loaded, model=model), calibration, progress=step)
        blamed = None if blamed is None else _blamed(model, calibration, seed, begin)
    exempted, ranges = blamed or (), None
    if scales:
        by_error, better = _better_ranges(model, calibration, prefix, exempted, seed, begin)
        ranges = None if better == by_error else better
    return Treated(name="all together", model=model, prefix=prefix, exempted=exempted, ranges=ranges)


def _after_prefix(batch: TokenBatch, prefix: SinkPrefix | None) -> tuple[Tensor, Prefix | None]:
    """The texts as they are read after a prefix, if there is one, without a BOS of their own; and its cache."""
    if prefix is None or not prefix.ids:
        return batch.ids, None
    return batch.ids[:, len(batch.leading_ids) :], prefix.cache


def _reading(each: Treated, calibration: TokenBatch, held_out: TokenBatch) -> Measured:
    """The losses of a treated model. A text that follows a prefix has no BOS of its own, so no loss counts the token
    after BOS."""
    ids_NT, cache = _after_prefix(held_out, each.prefix)
    ranges = each.ranges or least_error_ranges(each.model, _after_prefix(calibration, each.prefix)[0], prefix=cache)
    uncounted = len(held_out.leading_ids) if cache is None else 0
    found = {PLAIN: losses(each.model, ids_NT, prefix=cache)}
    modules = [name for name in linear_layers(each.model) if name not in each.exempted]
    for name in MEASURED:
        found[name] = scheme_losses(each.model, SCHEMES[name], ids_NT, modules=modules, ranges=ranges, prefix=cache)
    return Measured(
        name=each.name,
        is_control=each.is_control,
        acts_on=each.acts_on,
        losses={name: loss_NT[:, uncounted:] for name, loss_NT in found.items()},
    )
