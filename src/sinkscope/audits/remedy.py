"""remedy(model, text): makes a model 8-bit-safe by a rotation, a prefix in the cache, unplugged super neurons, a list
of modules that stay in 16 bits, or better static scales.

Each remedy is measured alone, beside its control, and then all of them together: the loss in 16 bits, and with 8-bit
activations that share one scale per tensor, static and dynamic.
Axes: N texts, T positions.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from sinkscope.arguments import check_audit, check_remedies
from sinkscope.audits.evaluation import Evaluation, ModelSetup
from sinkscope.audits.remedies import BY_OPTION
from sinkscope.audits.remedy_result import BASELINE, MEASURED, SIXTEEN_BITS, ModelLosses, RemedyResult
from sinkscope.audits.schemes import linear_scheme
from sinkscope.audits.texts import texts_to_measure
from sinkscope.models.loaded import ModelLike
from sinkscope.models.loading import load
from sinkscope.models.prompts import Tokens
from sinkscope.models.weights import check_in_memory
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
    its own. `bos` and `length` are as for `audit`. `work` is called with the name of each long part, and what it
    returns is called with the progress of that part.
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
    schemes = [linear_scheme(name) for name in MEASURED]
    evaluation = Evaluation(loaded=loaded, batch=batch, schemes=tuple(schemes), seed=seed, work=begin)
    evaluation.check_finite()
    remedies = {name: remedy for name, remedy in BY_OPTION.items() if chosen[name]}

    baseline = remedied = ModelSetup(model=loaded.model)
    to_measure = [_ToMeasure(BASELINE, baseline)]
    # Each remedy alone, beside its control.
    not_needed: dict[str, str] = {}
    setups = {name: remedy.apply(evaluation, schemes, baseline) for name, remedy in remedies.items()}
    for name, setup in setups.items():
        remedy = remedies[name]
        if isinstance(setup, str):
            not_needed[name] = f"{name}: nothing to do, {setup}"
            continue
        remedied, control = setup, remedy.control(evaluation, schemes)
        acts_on = tuple(scheme.name for scheme in schemes if remedy.acts_on(scheme))
        to_measure.append(_ToMeasure(name, setup, acts_on))
        to_measure.append(_ToMeasure(remedy.control_is, control, acts_on, is_control=True))

    # All together. Scales that do not help alone may help beside the others.
    if len(remedies) - len(not_needed.keys() - {"scales"}) > 1:
        remedied = baseline
        for name, remedy in remedies.items():
            setup = remedy.apply(evaluation, schemes, remedied)
            if not isinstance(setup, str):
                remedied = setup
                not_needed.pop(name, None)
            elif name not in not_needed:
                not_needed[name] = f"{name}: nothing to do beside the others, {setup}"
        to_measure.append(_ToMeasure("all together", remedied))

    measurements: list[ModelLosses] = []
    step = begin("models measured")
    step(0, len(to_measure))
    for name, setup, acts_on, is_control in to_measure:
        losses = {SIXTEEN_BITS: evaluation.losses(None, setup)}
        losses |= {scheme.name: evaluation.losses(scheme, setup) for scheme in schemes}
        measurements.append(ModelLosses(name=name, is_control=is_control, acts_on=acts_on, losses=losses))
        step(len(measurements), len(to_measure))
    return RemedyResult(
        loaded=replace(loaded, model=remedied.model),
        receipt=take_receipt(loaded, evaluation.held_out),
        prefix=remedied.prefix,
        neurons=remedied.neurons,
        modules_in_16_bits=remedied.modules_in_16_bits,
        ranges=remedied.ranges,
        measurements=tuple(measurements),
        num_tokens=tuple(evaluation.held_out.ids.shape),  # type: ignore[arg-type]
        source=batch.source,
        not_needed=tuple(not_needed.values()),
    )


class _ToMeasure(NamedTuple):
    """A model to measure, and the schemes against which what was done to it can help."""

    name: str
    setup: ModelSetup
    acts_on: tuple[str, ...] = MEASURED
    is_control: bool = False
