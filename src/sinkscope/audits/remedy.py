"""remedy(model, text): makes a model 8-bit-safe by a rotation, a prefix in the cache, unplugged super neurons, a list
of modules that stay in 16 bits, or better static scales.

Each remedy that is asked for is measured on its own, beside its control, and then all of them together: the loss in 16
bits, and under 8-bit activations with one scale a tensor, static and dynamic.
Axes: N texts, T positions.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from sinkscope.arguments import check_audit, check_remedies
from sinkscope.audits.remedies import BY_OPTION, Setting, Treated
from sinkscope.audits.remedy_result import MEASURED, PLAIN, Measured, RemedyResult
from sinkscope.audits.schemes import SCHEMES
from sinkscope.audits.texts import texts_to_measure
from sinkscope.models.checkpoint_checks import check_in_memory
from sinkscope.models.loaded import ModelLike
from sinkscope.models.loading import load
from sinkscope.models.prompts import Tokens
from sinkscope.progress import Work
from sinkscope.tracing.receipt import take_receipt


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
    chosen = {"unplug": unplug, "rotate": rotate, "prefix": prefix, "exempt": exempt, "scales": scales}
    check_remedies(**chosen)
    check_audit(length=length, num_sequences=num_sequences, seed=seed)
    loaded = load(model)
    check_in_memory(loaded.model, "A remedy")
    batch = texts_to_measure(
        loaded, text, bos=bos, length=length, num_sequences=num_sequences, seed=seed, prefix=prefix
    )
    begin = work or (lambda what: lambda done, total: None)
    setting = Setting(loaded=loaded, batch=batch, seed=seed, work=begin)
    setting.check_plain()
    remedies = {name: remedy for name, remedy in BY_OPTION.items() if chosen[name]}
    schemes = [SCHEMES[name] for name in MEASURED]

    original = last = Treated(model=loaded.model)
    to_measure = [_ToMeasure("original", original)]
    needless: dict[str, str] = {}
    alone = {name: remedy.apply(setting, schemes, original) for name, remedy in remedies.items()}
    for name, treated in alone.items():
        remedy = remedies[name]
        if isinstance(treated, str):
            needless[name] = f"{name}: nothing to do, {treated}"
            continue
        last, control = treated, remedy.control(setting, schemes)
        acts_on = tuple(scheme.name for scheme in schemes if remedy.acts_on(scheme))
        to_measure.append(_ToMeasure(name, treated, acts_on))
        to_measure.append(_ToMeasure(remedy.control_is, control, acts_on, is_control=True))
    # Scales that do not help alone may help beside the others.
    if len(remedies) - len(needless.keys() - {"scales"}) > 1:
        last = original
        for name, remedy in remedies.items():
            treated = remedy.apply(setting, schemes, last)
            if not isinstance(treated, str):
                last = treated
                needless.pop(name, None)
            elif name not in needless:
                needless[name] = f"{name}: nothing to do beside the others, {treated}"
        to_measure.append(_ToMeasure("all together", last))

    readings: list[Measured] = []
    step = begin("models measured")
    step(0, len(to_measure))
    for each in to_measure:
        losses = {PLAIN: setting.losses(None, each.treated)}
        losses |= {scheme.name: setting.losses(scheme, each.treated) for scheme in schemes}
        readings.append(Measured(name=each.name, is_control=each.is_control, acts_on=each.acts_on, losses=losses))
        step(len(readings), len(to_measure))
    return RemedyResult(
        loaded=replace(loaded, model=last.model),
        receipt=take_receipt(loaded, setting.held_out),
        prefix=last.prefix,
        neurons=last.neurons,
        exempted=last.exempted,
        ranges=last.ranges,
        readings=tuple(readings),
        num_tokens=tuple(setting.held_out.ids.shape),  # type: ignore[arg-type]
        source=batch.source,
        needless=tuple(needless.values()),
    )


class _ToMeasure(NamedTuple):
    """One model to measure, and the schemes that what was done to it can help against."""

    name: str
    treated: Treated
    acts_on: tuple[str, ...] = MEASURED
    is_control: bool = False
