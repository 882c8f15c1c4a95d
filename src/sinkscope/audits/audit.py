"""audit(model, text): what in a model breaks when it is made cheaper, where, and what to do about it.

Passes over a few texts see and predict: one finds the sinks, one the ranges that static scales need, and one, with its
backward pass, predicts the damage of every scheme in every module. The rest is measured on other texts: each scheme,
each scheme in each third of the layers, the modules that the prediction blames, and the remedies.
Axes: N texts, T positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from sinkscope.arguments import check_audit, check_choice
from sinkscope.audits.advice import Trial, needs_remedy, tried
from sinkscope.audits.audit_result import AuditResult, Cell
from sinkscope.audits.by_torchao import TORCHAO_SCHEMES, torchao_damages
from sinkscope.audits.damage import Damage, damage
from sinkscope.audits.remedies import TRIED_BY_AUDIT, Setting
from sinkscope.audits.schemes import SCHEMES, Scheme, layers_of
from sinkscope.audits.texts import texts_to_measure
from sinkscope.errors import InputError
from sinkscope.models.anatomy import anatomy_of
from sinkscope.models.checkpoint_checks import check_in_memory
from sinkscope.models.loaded import ModelLike
from sinkscope.models.loading import LoadOptions, load
from sinkscope.models.prompts import Tokens
from sinkscope.progress import Progress
from sinkscope.tracing.receipt import take_receipt

GROUPS = ("early", "middle", "late")
"""Thirds of the layers; with eleven schemes they make 33 cells."""
NUM_BLAMED = 5
"""Modules that are measured one at a time."""


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
    those that are measured, all eleven without it. Without `length` texts have 128 tokens, or what leaves a prefix
    room in a shorter context. `bos` puts what the tokenizer puts before a text, or BOS, in front, or leaves it out;
    None means what the tokenizer itself does with a text. Further options go to `load`.
    """
    check_audit(length=length, num_sequences=num_sequences, seed=seed)
    measured = _schemes(schemes)
    loaded = load(model, **options)
    check_in_memory(loaded.model, "An audit")
    batch = texts_to_measure(loaded, text, bos=bos, length=length, num_sequences=num_sequences, seed=seed)
    progress = progress or (lambda done, total: None)
    progress(0, _num_cells(measured))
    setting = Setting(loaded=loaded, batch=batch, seed=seed)
    setting.check_plain()
    cells, trials, refused = _measured(setting, measured, progress)
    asks_torchao = {scheme.name for scheme in measured}.issuperset(TORCHAO_SCHEMES)
    held_out = setting.held_out
    return AuditResult(
        loaded=loaded,
        receipt=take_receipt(loaded, held_out),
        batch=held_out,
        setting=setting,
        cells=tuple(cells),
        trials=tuple(trials),
        refused=refused,
        by_torchao=torchao_damages(setting) if asks_torchao else None,
    )


def _schemes(names: Sequence[str] | None) -> list[Scheme]:
    for name in names or ():
        check_choice("schemes", name, SCHEMES)
    return [SCHEMES[name] for name in names or SCHEMES]


def _num_cells(schemes: list[Scheme]) -> int:
    """Of each scheme in the model, its control, and its groups of layers; and of the modules that are blamed."""
    return len(schemes) * (2 + len(GROUPS)) + NUM_BLAMED


def _measured(
    setting: Setting, schemes: list[Scheme], progress: Progress
) -> tuple[list[Cell], list[Trial], dict[str, str]]:
    """Every cell; and every remedy where a scheme does harm, if any token is a sink."""
    total, done = _num_cells(schemes), 0

    def step() -> None:
        nonlocal done
        done += 1
        progress(done, max(total, done))

    cells: list[Cell] = []
    harmed: dict[str, np.ndarray] = {}
    for scheme in schemes:
        harmed[scheme.name] = setting.losses(scheme)
        step()
        modules = scheme.modules(setting.model)
        control = setting.damage(scheme.control())
        step()
        found = damage(harmed[scheme.name], setting.plain, scheme)
        cells.append(_cell(setting, "model", "all", scheme, modules, found, control.change))
        for group, part in layer_groups(setting.model, modules).items():
            cells.append(_cell(setting, "group", group, scheme, part, setting.damage(scheme, modules=part)))
            step()
    for module, scheme in _blamed(setting, schemes):
        found = setting.damage(scheme, modules=[module])
        cells.append(_cell(setting, "module", module, scheme, [module], found))
        step()
    trials, refused = [], {}
    harms = {cell.scheme: cell.measured for cell in cells if cell.level == "model"}
    pairs = [
        (remedy, SCHEMES[name])
        for remedy in TRIED_BY_AUDIT
        for name, harm in harms.items()
        if remedy.is_for(SCHEMES[name]) and needs_remedy(harm) and setting.is_sink.any()
    ]
    total += len(pairs)
    for remedy, scheme in pairs:
        if remedy.name not in refused:
            try:
                trial = tried(setting, remedy, scheme, harms[scheme.name], harmed[scheme.name])
            except InputError as error:
                trial = str(error)
            if isinstance(trial, str):
                refused[remedy.name] = trial
            else:
                trials.append(trial)
        step()
    return cells, trials, refused


def _cell(
    setting: Setting,
    level: str,
    place: str,
    scheme: Scheme,
    modules: list[str],
    measured: Damage,
    control: float | None = None,
) -> Cell:
    predicted = setting.prediction.damage(scheme, modules)
    return Cell(level=level, place=place, scheme=scheme.name, predicted=predicted, measured=measured, control=control)


def layer_groups(model: Any, modules: list[str]) -> dict[str, list[str]]:
    """The modules of each third of the layers."""
    layer_of, num_layers = layers_of(model), len(anatomy_of(model).layers)
    return {
        group: [name for name in modules if layer_of[name] * len(GROUPS) // num_layers == number]
        for number, group in enumerate(GROUPS)
    }


def _blamed(setting: Setting, schemes: list[Scheme]) -> Iterator[tuple[str, Scheme]]:
    """The modules with the largest predicted damage, each with the scheme that makes it."""
    worst: dict[str, tuple[float, str]] = {}
    names = {scheme.name for scheme in schemes}
    for (module, scheme), predicted in setting.prediction.damages.items():
        if scheme not in names:
            continue
        worst[module] = max(worst.get(module, (0.0, scheme)), (predicted, scheme))
    for module in sorted(worst, key=lambda name: -worst[name][0])[:NUM_BLAMED]:
        yield module, SCHEMES[worst[module][1]]
