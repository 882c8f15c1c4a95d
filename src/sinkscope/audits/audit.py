"""audit(model, text): what in a model breaks when it is made cheaper, where, and what to do about it.

Calibration texts are read three times: to find the sinks, to find the ranges that static scales need, and, with a
backward pass, to predict the damage of every scheme in every module. The rest is measured on other texts: each scheme,
each scheme in each third of the layers, the modules with the largest predicted damage, and the remedies.
Axes: N texts, T positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from sinkscope.arguments import check_audit, check_choice
from sinkscope.audits.advice import Trial, needs_remedy, try_remedy
from sinkscope.audits.audit_result import AuditResult, Cell
from sinkscope.audits.by_torchao import TORCHAO_SCHEMES, torchao_damages
from sinkscope.audits.damage import Damage, damage
from sinkscope.audits.evaluation import Evaluation
from sinkscope.audits.remedies import TRIED_BY_AUDIT
from sinkscope.audits.schemes import SCHEMES, Scheme, layers_of
from sinkscope.audits.texts import texts_to_measure
from sinkscope.errors import InputError
from sinkscope.models.anatomy import anatomy_of
from sinkscope.models.loaded import ModelLike
from sinkscope.models.loading import LoadOptions, load
from sinkscope.models.prompts import Tokens
from sinkscope.models.weights import check_in_memory
from sinkscope.progress import Progress
from sinkscope.tracing.receipt import take_receipt

GROUPS = ("early", "middle", "late")
"""Thirds of the layers; with eleven schemes they make 33 cells."""
NUM_WORST_MODULES = 5
"""Modules that are measured one at a time: those with the largest predicted damage."""


def audit(
    model: ModelLike | None = None,
    text: Tokens | Path | None = None,
    *,
    schemes: Sequence[str] | None = None,
    bos: bool | None = None,
    length: int | None = None,
    num_sequences: int = 16,
    seed: int = 0,
    progress: Progress | None = None,
    **options: Unpack[LoadOptions],
) -> AuditResult:
    """The audit of a model on `num_sequences` held-out texts of `length` tokens, which come after 16 that
    calibrate.

        sinkscope.audit("HuggingFaceTB/SmolLM2-135M", "book.txt").advice

    `text` is a file, a list of texts or chats, or token ids; without one the model writes its own. `schemes` names
    those that are measured, all eleven by default. `length` is by default 128, or less where the model's context is
    short, so that a prefix fits. `bos=True` puts in front what the tokenizer puts before a text, or BOS, and
    `bos=False` leaves it out; by default a text begins as the tokenizer begins it. Further options go to `load`.
    """
    check_audit(length=length, num_sequences=num_sequences, seed=seed)
    for name in schemes or ():
        check_choice("schemes", name, SCHEMES)
    chosen = [SCHEMES[name] for name in schemes or SCHEMES]
    loaded = load(model, **options)
    check_in_memory(loaded.model, "An audit")
    batch = texts_to_measure(loaded, text, bos=bos, length=length, num_sequences=num_sequences, seed=seed)
    progress = progress or (lambda done, total: None)
    progress(0, _num_cells(chosen))
    evaluation = Evaluation(loaded=loaded, batch=batch, seed=seed)
    evaluation.check_finite()
    cells, trials, not_possible = _measure(evaluation, chosen, progress)
    with_torchao = {scheme.name for scheme in chosen}.issuperset(TORCHAO_SCHEMES)
    held_out = evaluation.held_out
    return AuditResult(
        loaded=loaded,
        receipt=take_receipt(loaded, held_out),
        batch=held_out,
        evaluation=evaluation,
        cells=tuple(cells),
        trials=tuple(trials),
        not_possible=not_possible,
        by_torchao=torchao_damages(evaluation) if with_torchao else None,
    )


def _num_cells(schemes: list[Scheme]) -> int:
    """How many are measured: each scheme in the model, its control and in each group of layers; and single modules."""
    return len(schemes) * (2 + len(GROUPS)) + NUM_WORST_MODULES


def _measure(
    evaluation: Evaluation, schemes: list[Scheme], progress: Progress
) -> tuple[list[Cell], list[Trial], dict[str, str]]:
    """(every cell, every remedy that was measured, why others are not possible)."""
    total, done = _num_cells(schemes), 0

    def step() -> None:
        nonlocal done
        done += 1
        progress(done, max(total, done))

    cells: list[Cell] = []
    losses_by_scheme: dict[str, np.ndarray] = {}
    for scheme in schemes:
        losses_NT = losses_by_scheme[scheme.name] = evaluation.losses(scheme)
        step()
        modules = scheme.modules(evaluation.model)
        control = evaluation.damage(scheme.control())
        step()
        whole = damage(losses_NT, evaluation.baseline, scheme)
        cells.append(_cell(evaluation, "model", "all", scheme, modules, whole, control.change))
        for group, part in layer_groups(evaluation.model, modules).items():
            cells.append(_cell(evaluation, "group", group, scheme, part, evaluation.damage(scheme, modules=part)))
            step()
    for module, scheme in _worst_modules(evaluation, schemes):
        alone = evaluation.damage(scheme, modules=[module])
        cells.append(_cell(evaluation, "module", module, scheme, [module], alone))
        step()

    costs = {cell.scheme: cell.measured for cell in cells if cell.level == "model"}
    pairs = []
    if evaluation.is_sink.any():  # a remedy acts on sinks, or on what they do to scales
        for remedy in TRIED_BY_AUDIT:
            costly = [SCHEMES[name] for name, cost in costs.items() if needs_remedy(cost)]
            pairs += [(remedy, scheme) for scheme in costly if remedy.is_for(scheme)]
    total += len(pairs)
    trials: list[Trial] = []
    not_possible: dict[str, str] = {}
    for remedy, scheme in pairs:
        if remedy.name not in not_possible:
            try:
                trial = try_remedy(evaluation, remedy, scheme, costs[scheme.name], losses_by_scheme[scheme.name])
            except InputError as error:
                trial = str(error)
            if isinstance(trial, str):
                not_possible[remedy.name] = trial
            else:
                trials.append(trial)
        step()
    return cells, trials, not_possible


def _cell(
    evaluation: Evaluation,
    level: str,
    place: str,
    scheme: Scheme,
    modules: list[str],
    measured: Damage,
    control: float | None = None,
) -> Cell:
    predicted = evaluation.prediction.damage(scheme, modules)
    return Cell(level=level, place=place, scheme=scheme.name, predicted=predicted, measured=measured, control=control)


def layer_groups(model: Any, modules: list[str]) -> dict[str, list[str]]:
    """The modules of each third of the layers."""
    layer_of, num_layers = layers_of(model), len(anatomy_of(model).layers)
    return {
        group: [name for name in modules if layer_of[name] * len(GROUPS) // num_layers == number]
        for number, group in enumerate(GROUPS)
    }


def _worst_modules(evaluation: Evaluation, schemes: list[Scheme]) -> Iterator[tuple[str, Scheme]]:
    """The modules with the largest predicted damage, each with the scheme that does it."""
    worst: dict[str, tuple[float, str]] = {}  # by module, the largest damage and its scheme
    names = {scheme.name for scheme in schemes}
    for (module, scheme), predicted in evaluation.prediction.damages.items():
        if scheme not in names:
            continue
        worst[module] = max(worst.get(module, (0.0, scheme)), (predicted, scheme))
    for module in sorted(worst, key=lambda name: -worst[name][0])[:NUM_WORST_MODULES]:
        yield module, SCHEMES[worst[module][1]]
