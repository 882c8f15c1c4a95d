"""audit(model, text): what in a model breaks when it is made cheaper, where, and what to do about it.

Calibration texts are read to find the sinks and the ranges that static scales need, and, with a backward pass, to
predict the damage of every scheme in every module. The rest is measured on other texts: each scheme, each scheme in
each third of the layers, the modules with the largest predicted damage, and the remedies.
Axes: N texts, T positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from sinkscope.arguments import check_audit
from sinkscope.audits.advice import NEGLIGIBLE, CurvePoint, Trial, curve, needs_remedy, try_remedy
from sinkscope.audits.audit_result import AuditResult, Cell
from sinkscope.audits.damage import Comparison, Damage, damage, mean_over_texts
from sinkscope.audits.evaluation import BUDGET, Evaluation
from sinkscope.audits.remedies import EXEMPT, ROTATE, TRIED_BY_AUDIT, Remedy
from sinkscope.audits.schemes import Scheme, layers_of, schemes_of
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
"""Thirds of the layers, in which each scheme is measured too."""
NUM_WORST_MODULES = 5
"""Modules that are measured one at a time: those with the largest predicted damage."""
MOST_ROTATED = 10**9
"""Parameters of the largest model that an audit rotates, since that takes a copy of the model."""


def audit(
    model: ModelLike | None = None,
    text: Tokens | Path | None = None,
    *,
    schemes: Sequence[str] | None = None,
    caches: Sequence[str] | None = None,
    budget: float = BUDGET,
    bos: bool | None = None,
    length: int | None = None,
    num_sequences: int = 16,
    seed: int = 0,
    progress: Progress | None = None,
    **options: Unpack[LoadOptions],
) -> AuditResult:
    """The audit of a model on `num_sequences` held-out texts of `length` tokens, which come after 16 that
    calibrate.

        sinkscope.audit("HuggingFaceTB/SmolLM2-135M", "book.txt", schemes=["FP8_DYNAMIC", "W4A16"]).decisions

    `text` is a file, a list of texts or chats, or token ids; without one the model writes its own. `schemes` are names
    of compressed-tensors, configurations of it or checkpoints that have one; `caches` are formats of the KV cache, or a
    window. Without either, those that are deployed most. `budget` is how many bits a weight on average modules in 16
    bits may add. `length` is by default 128, or less where the model's context is short, so that a prefix fits.
    `bos=True` puts in front what the tokenizer puts before a text, or BOS, and `bos=False` leaves it out; by default a
    text begins as the tokenizer begins it. Further options go to `load`.
    """
    check_audit(length=length, num_sequences=num_sequences, seed=seed, budget=budget)
    chosen = schemes_of(schemes, caches)
    loaded = load(model, **options)
    check_in_memory(loaded.model, "An audit")
    impossible = {scheme.name: why for scheme in chosen if (why := scheme.why_not(loaded.model))}
    possible = [scheme for scheme in chosen if scheme.name not in impossible]
    if not possible:
        name, why = next(iter(impossible.items()), ("schemes", "none are given."))
        raise InputError(f"{name} cannot be audited here: {why}")
    batch = texts_to_measure(loaded, text, bos=bos, length=length, num_sequences=num_sequences, seed=seed)
    evaluation = Evaluation(loaded=loaded, batch=batch, schemes=tuple(possible), budget=budget, seed=seed)
    audited = _Audit(evaluation, progress or (lambda done, total: None))
    audited.measure()
    held_out = evaluation.held_out
    return AuditResult(
        loaded=loaded,
        receipt=take_receipt(loaded, held_out),
        batch=held_out,
        evaluation=evaluation,
        cells=tuple(audited.cells),
        trials=tuple(audited.trials),
        points=tuple(audited.points),
        not_possible=impossible | audited.not_possible,
    )


class _Audit:
    """What is measured one after another, and how much is left."""

    def __init__(self, evaluation: Evaluation, progress: Progress) -> None:
        self.evaluation, self.progress = evaluation, progress
        self.done = self.left = 0
        self.cells: list[Cell] = []
        self.trials: list[Trial] = []
        self.points: list[CurvePoint] = []
        self.not_possible: dict[str, str] = {}

    def measure(self) -> None:
        evaluation, schemes = self.evaluation, self.evaluation.schemes
        in_all = len(schemes) * (3 + len(GROUPS)) + NUM_WORST_MODULES
        self._plan(3 + in_all + self._num_of_remedies(schemes))
        evaluation.check_finite()
        self._step()
        _ = evaluation.sinks
        self._step()
        prediction = evaluation.prediction
        self._step()
        modules = {scheme.name: scheme.modules(evaluation.model) for scheme in schemes}
        predicted = {scheme.name: prediction.damage(scheme, modules[scheme.name]) for scheme in schemes}
        self._plan(in_all + self._num_of_remedies([s for s in schemes if predicted[s.name] >= NEGLIGIBLE]))

        baselines: dict[str, tuple[Damage, np.ndarray]] = {}
        for scheme in schemes:
            compared = evaluation.compare(scheme)
            self._step(2)
            control = evaluation.damage(scheme.control())
            self._step()
            whole = damage(compared.losses, evaluation.baseline, scheme)
            baselines[scheme.name] = whole, compared.losses
            self._add("model", "all", scheme, modules[scheme.name], whole, control.change, compared)
            for group, part in layer_groups(evaluation.model, modules[scheme.name]).items():
                self._add("group", group, scheme, part, evaluation.damage(scheme, modules=part))
                self._step()
        worst = list(_worst_modules(evaluation, schemes))
        for module, scheme in worst:
            self._add("module", module, scheme, [module], evaluation.damage(scheme, modules=[module]))
            self._step()
        costly = [scheme for scheme in schemes if needs_remedy(baselines[scheme.name][0])]
        self._plan(self._num_of_remedies(costly))
        for remedy, against in self._remedies(costly):
            self._try(remedy, against, baselines)
        self._plan(0)

    def _plan(self, left: int) -> None:
        """So many steps are left."""
        self.left = left
        self.progress(self.done, self.done + left)

    def _step(self, count: int = 1) -> None:
        self.done += count
        self._plan(max(0, self.left - count))

    def _remedies(self, schemes: Sequence[Scheme]) -> Iterator[tuple[Remedy, list[Scheme]]]:
        """Each remedy with the schemes that it is for."""
        for remedy in TRIED_BY_AUDIT:
            if against := [scheme for scheme in schemes if remedy.is_for(scheme)]:
                yield remedy, against

    def _num_of_remedies(self, schemes: Sequence[Scheme]) -> int:
        """How many steps the remedies of these schemes take: each with its control, and a point of the curve."""
        return sum(len(against) * (3 if remedy is EXEMPT else 2) for remedy, against in self._remedies(schemes))

    def _try(self, remedy: Remedy, against: list[Scheme], baselines: dict[str, tuple[Damage, np.ndarray]]) -> None:
        if remedy is ROTATE and self.evaluation.model.num_parameters() > MOST_ROTATED:
            self.not_possible[remedy.name] = (
                "it takes a copy of the model, so it is not tried above a billion parameters. `sinkscope remedy "
                "--rotate` tries it."
            )
            return
        try:
            trials = try_remedy(self.evaluation, remedy, against, baselines)
        except InputError as error:
            trials = str(error)
        if isinstance(trials, str):
            self.not_possible[remedy.name] = trials
            return
        self.trials += trials
        self._step(2 * len(against))
        if remedy is EXEMPT:
            for scheme, trial in zip(against, trials, strict=True):
                self.points += curve(self.evaluation, scheme, trial)
                self._step()

    def _add(
        self,
        level: str,
        place: str,
        scheme: Scheme,
        modules: list[str],
        measured: Damage,
        control: float | None = None,
        compared: Comparison | None = None,
    ) -> None:
        self.cells.append(
            Cell(
                level=level,
                place=place,
                scheme=scheme.name,
                what=scheme.what,
                predicted=self.evaluation.prediction.damage(scheme, modules),
                measured=measured,
                control=control,
                divergence=None if compared is None else mean_over_texts(compared.divergence),
                same_top=None if compared is None else mean_over_texts(compared.same_top),
            )
        )


def layer_groups(model: Any, modules: list[str]) -> dict[str, list[str]]:
    """The modules of each third of the layers."""
    layer_of, num_layers = layers_of(model), len(anatomy_of(model).layers)
    return {
        group: [name for name in modules if layer_of[name] * len(GROUPS) // num_layers == number]
        for number, group in enumerate(GROUPS)
    }


def _worst_modules(evaluation: Evaluation, schemes: Sequence[Scheme]) -> Iterator[tuple[str, Scheme]]:
    """The modules with the largest predicted damage, each with the scheme that does it."""
    by_name = {scheme.name: scheme for scheme in schemes}
    worst: dict[str, tuple[float, str]] = {}  # by module, the largest damage and its scheme
    for (module, scheme), predicted in evaluation.prediction.damages.items():
        worst[module] = max(worst.get(module, (0.0, scheme)), (predicted, scheme))
    for module in sorted(worst, key=lambda name: -worst[name][0])[:NUM_WORST_MODULES]:
        yield module, by_name[worst[module][1]]
