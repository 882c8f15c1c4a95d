"""The tables of a study, row by row; `schemas` declares their columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch

from sinkscope.models.anatomy import as_neuron
from sinkscope.statistics import bootstrap_mean_interval, bootstrap_tail, resample_weights, seen_mean
from sinkscope.studies.checks import missed
from sinkscope.studies.condition_result import QUANTITIES, ROWS, ConditionResult
from sinkscope.studies.conditions import (
    BASELINE,
    CONTROLS_OF,
    DIMENSIONS,
    DOSE,
    FACTORIAL_TABLE,
    SUPER_NEURONS,
    Condition,
)
from sinkscope.studies.judging import HALF, RISE, Judgement, mediated, second_over_first
from sinkscope.studies.purpose import Purpose
from sinkscope.studies.schemas import (
    ATTENTION_ROWS,
    BACK_UP,
    CLAIMS,
    EFFECTS,
    FACTORIAL,
    HEAD_ROLES,
    HISTOGRAMS,
    MANIPULATION,
    MEDIATION,
    MINIMAL_SET,
    NEEDED,
    NORMS,
    OUTPUT_ENERGY,
    RANDOM_SETS,
    RATES,
    SINGLE_LAYERS,
    TEXT_CLAIMS,
    TEXT_LOSSES,
)
from sinkscope.studies.study_data import StudyData
from sinkscope.tracing.trace import Trace

NUM_BINS = 24
NUM_RANKS = 64
SHOWN_NEURONS = 4
LEADING = (BASELINE, "mask_to_self", "amplify_variance")
"""Conditions whose histograms come first, because the page shows the first few."""
SHOWN_SEQUENCES = 4
ENTERING = ("output projection", "norm")
"""What the aggregation enters at the place that was read, by `before_norm`."""
RULES = {
    "at least": "low >= threshold",
    "above": "low > threshold",
    "below": "high < threshold",
    "": "no number to judge",
}


Rows = Iterator[dict[str, Any]]


def study_tables(trace: Trace, study: StudyData, judgements: Sequence[Judgement]) -> dict[str, Mapping]:
    """Columns by table."""
    rows = {
        CLAIMS: _claims(judgements),
        RATES: _rates(study),
        EFFECTS: _effects(study),
        FACTORIAL: _factorial(study),
        MANIPULATION: _manipulation(study),
        ATTENTION_ROWS: _attention_rows(study),
        NORMS: _norms(study),
        MEDIATION: _mediation(study),
        SINGLE_LAYERS: _single_layers(study),
        RANDOM_SETS: _random_sets(study),
        MINIMAL_SET: _minimal_set(trace, study),
        HISTOGRAMS: _histograms(study),
        OUTPUT_ENERGY: _output_energy(study),
    }
    return {"tokens": _tokens(trace)} | {schema.name: schema.from_rows(list(of)) for schema, of in rows.items()}


def text_tables(judgements: Sequence[Judgement], purpose: Purpose | None) -> dict[str, Mapping]:
    """What was read on text, beside random tokens; empty tables where nothing was."""
    losses, roles = [], []
    if purpose is not None:
        for removed, (change, low, high) in purpose.changes.items():
            loss_B = purpose.losses[removed]
            loss = float(loss_B.mean())
            losses.append(dict(removed=removed, loss=loss, change=change, low=low, high=high, n=len(loss_B)))
        for each in purpose.roles:
            worth = {}
            for kind, (value, low, high) in each.by_kind.items():
                worth |= {kind: value, f"{kind}_low": low, f"{kind}_high": high}
            roles.append(dict(layer=each.layer, head=each.head, role=each.role, **worth))
    rows = {TEXT_CLAIMS: list(_claims(judgements)), TEXT_LOSSES: losses, HEAD_ROLES: roles}
    return {schema.name: schema.from_rows(of) for schema, of in rows.items()}


def _conditions(study: StudyData) -> list[tuple[str, int | None, float | None, ConditionResult]]:
    """(condition, target, factor, result), the baseline first; random sets have a table of their own."""
    rows: list[tuple[str, int | None, float | None, ConditionResult]] = [(BASELINE, None, None, study.baseline)]
    for condition, result in study.results.items():
        if condition.number is None:
            rows.append((condition.label, condition.target, condition.factor, result))
    return rows


def _claims(judgements: Sequence[Judgement]) -> Rows:
    for j in judgements:
        yield dict(
            id=j.id,
            statement=j.claim.statement,
            link=j.claim.link,
            verdict=j.verdict,
            effect=j.effect,
            low=j.low,
            high=j.high,
            confidence=j.confidence,
            threshold=None if j.bar is None else j.bar.threshold,
            rule=RULES["" if j.bar is None else j.bar.rule],
            control=j.control,
            control_name=None if j.control is None else j.claim.control_is,
            n=j.n,
            p_value=j.p_value,
            note=j.note,
        )


def _rates(study: StudyData) -> Rows:
    for name, target, factor, result in _conditions(study):
        low_S, high_S = bootstrap_mean_interval(result.rate_BS)
        for position, rate in enumerate(result.rate_BS.mean(0)):
            yield dict(
                condition=name,
                target=target,
                factor=factor,
                position=position,
                rate=float(rate),
                low=float(low_S[position]),
                high=float(high_S[position]),
                later_rate=float(result.later_BS[:, position].mean()),
            )


def _factorial(study: StudyData) -> Rows:
    """A row for each cell of the factorial: mixing, level of the variance and level of the energy."""
    for cell, conditions in study.by_target.items():
        if FACTORIAL_TABLE not in cell.kind.shown_in:
            continue
        rise_B = study.risen_B(conditions)
        low, high = bootstrap_mean_interval(rise_B)
        ratios = [study.moments_over_baseline(c, cell.before_norm) for c in conditions]
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios_3 = np.exp(np.mean(np.log(ratios), (0, 2)))
        yield dict(
            mixing=cell.name,
            variance_of=cell.variance,
            energy_of=cell.energy,
            entering=ENTERING[cell.before_norm],
            targets=", ".join(str(c.target) for c in conditions),
            rise=float(rise_B.mean()),
            low=float(low),
            high=float(high),
            variance=_number(ratios_3[0]),
            energy=_number(ratios_3[1]),
            squared_mean=_number(ratios_3[2]),
            mean_share=_number(_mean_share(ratios_3[2], ratios_3[1])),
            missed=missed(study, *conditions) or "",
            n=len(rise_B),
        )


def _manipulation(study: StudyData) -> Rows:
    """What every condition did to the aggregation at its target, layer by layer."""
    failures: dict[Condition, str] = {}
    for conditions in study.by_target.values():  # targets are checked together
        failures |= dict.fromkeys(conditions, missed(study, *conditions) or "")
    for condition in study.results:
        if condition.number is not None:
            continue
        for side, layer in product(study.sides, study.plan.layers):
            variance, energy, squared_mean = study.moments_over_baseline(condition, side)[:, layer]
            yield dict(
                condition=condition.label,
                target=condition.target,
                factor=condition.factor,
                entering=ENTERING[side],
                layer=layer,
                variance=_number(variance),
                energy=_number(energy),
                squared_mean=_number(squared_mean),
                mean_share=_number(_mean_share(squared_mean, energy)),
                missed=failures[condition],
            )


def _mean_share(squared_mean: float, energy: float) -> float:
    """|mu| / |o| over that of the baseline, from the ratios of squared mean and energy. Rounding may bring the squared
    mean below 0 where the mean was removed."""
    return float(np.sqrt(max(squared_mean, 0.0) / energy)) if energy > 0 else np.nan


def _number(value: float) -> float | None:
    """None where a ratio has no value, such as 0 / 0."""
    return float(value) if np.isfinite(value) else None


def _effects(study: StudyData) -> Rows:
    plan, baseline = study.plan, study.baseline
    for name, target, factor, result in _conditions(study)[1:]:
        assert target is not None
        pairs = {
            "sink_rate_at_target": (baseline.later_BS[:, target], result.later_BS[:, target]),
            "sink_rate_at_sink": (baseline.later_BS[:, plan.sink], result.later_BS[:, plan.sink]),
        }
        for quantity in QUANTITIES:
            pairs[f"{quantity}_at_target"] = (baseline.at(quantity, target), result.at(quantity, target))
        for quantity in ROWS:
            pairs[f"{quantity}_elsewhere"] = (baseline.outside(quantity, target), result.outside(quantity, target))
        if plan.super_neurons:
            before_B, after_B = (np.abs(o.neurons_BTn[:, target]).mean(-1) for o in (baseline, result))
            pairs["super_neuron_activation_at_target"] = (before_B, after_B)
        if baseline.loss_B is not None and result.loss_B is not None:
            pairs["loss"] = (baseline.loss_B, result.loss_B)
        difference_BQ = np.stack([after - before for before, after in pairs.values()], 1)
        low_Q, high_Q = bootstrap_mean_interval(difference_BQ)
        for number, (quantity, (before, after)) in enumerate(pairs.items()):
            yield dict(
                condition=name,
                target=target,
                factor=factor,
                quantity=quantity,
                before=float(seen_mean(before)),
                after=float(seen_mean(after)),
                difference=float(seen_mean(difference_BQ[:, number])),
                low=float(low_Q[number]),
                high=float(high_Q[number]),
                n=int(np.isfinite(difference_BQ[:, number]).sum()),
            )


def _attention_rows(study: StudyData) -> Rows:
    """Entropy and mixing of every position's attention, before and after each condition."""
    before_QBT = study.baseline.rows_QBT
    for name, target, factor, result in _conditions(study)[1:]:
        low_QT, high_QT = bootstrap_mean_interval((result.rows_QBT - before_QBT).swapaxes(0, 1))
        for quantity, before_BT, after_BT, low_T, high_T in zip(
            ROWS, before_QBT, result.rows_QBT, low_QT, high_QT, strict=True
        ):
            for position, (before, after) in enumerate(zip(before_BT.mean(0), after_BT.mean(0), strict=True)):
                yield dict(
                    condition=name,
                    target=target,
                    factor=factor,
                    quantity=quantity,
                    position=position,
                    before=float(before),
                    after=float(after),
                    low=float(low_T[position]),
                    high=float(high_T[position]),
                )


def _norms(study: StudyData) -> Rows:
    """Norm of the residual by layer: where a condition acts, at the sink, and elsewhere."""
    baseline = study.baseline
    for name, target, factor, result in _conditions(study)[1:]:
        places = {"sink": result.places.index(study.plan.sink), "elsewhere": len(result.places)}
        if target not in (None, study.plan.sink):
            places["target"] = result.places.index(target)
        for place, column in places.items():
            before_LB, after_LB = (o.norm_LPB[:, column] for o in (baseline, result))
            low_L, high_L = bootstrap_mean_interval((after_LB - before_LB).T)
            for layer, (before, after) in enumerate(zip(before_LB.mean(1), after_LB.mean(1), strict=True)):
                yield dict(
                    condition=name,
                    target=target,
                    factor=factor,
                    layer=layer,
                    place=place,
                    before=float(before),
                    after=float(after),
                    low=float(low_L[layer]),
                    high=float(high_L[layer]),
                )


def _mediation(study: StudyData) -> Rows:
    for cause, dose in (("mask_to_self", None), ("amplify_variance", DOSE)):
        for held, mediator in ((SUPER_NEURONS, "super_neurons"), (DIMENSIONS, "massive_dimensions")):
            direct = study.at_targets(cause, dose, held)
            if not direct:
                continue
            total_B = study.risen_B([replace(condition, held=None) for condition in direct])
            controls = [study.risen_B(study.at_targets(cause, dose, of)) for of in CONTROLS_OF[held]]
            random_B = min(controls, key=np.mean)
            direct_B = study.risen_B(direct)
            total, random, left = (float(risen_B.mean()) for risen_B in (total_B, random_B, direct_B))
            share, low, high = _with_interval(mediated, np.stack([total_B, direct_B], 1)) if total >= RISE else NOT_RUN
            yield dict(
                intervention=cause,
                mediator=mediator,
                total=total,
                random=random,
                direct=left,
                indirect=total - left,
                share=share,
                low=low,
                high=high,
                n=len(total_B),
            )


NOT_RUN = (None, None, None)


def _with_interval(
    statistic: Callable[[np.ndarray], np.ndarray], values_BC: np.ndarray
) -> tuple[float | None, float | None, float | None]:
    """(a statistic of means over sequences, both ends of its 95 % interval)."""
    tail = bootstrap_tail(len(values_BC), 0.95)
    with np.errstate(invalid="ignore", divide="ignore"):
        resampled_R = statistic(resample_weights(len(values_BC)) @ values_BC)
        low, high = np.nanquantile(resampled_R, [tail, 1 - tail])
        return float(statistic(values_BC.mean(0))), float(low), float(high)


def _single_layers(study: StudyData) -> Rows:
    """What the mask does in each early layer alone."""
    for condition, result in study.results.items():
        if condition.name == "see_self_in_layer":
            risen_B = study.risen_B([condition])
            low, high = bootstrap_mean_interval(risen_B)
            yield dict(
                layer=condition.number,
                target=condition.target,
                rise=float(risen_B.mean()),
                low=float(low),
                high=float(high),
                n=len(result.rate_BS),
            )


def _random_sets(study: StudyData) -> Rows:
    if study.results:
        before, controls = study.at_sink_B().mean(), study.controls
        for number, (neurons, level) in enumerate(zip(controls.sets, controls.set_levels, strict=True)):
            rate = study.at_sink_B(Condition("random_set", study.plan.sink, number=number)).mean()
            yield dict(
                set=number, num_units=len(neurons), write=level, rate=float(rate), remaining=float(rate / before)
            )


def _minimal_set(trace: Trace, study: StudyData) -> Rows:
    shares = {as_neuron(u): u.write_share for u in trace.findings.super_neurons if u.position == study.plan.sink}
    for number, neuron in enumerate(study.minimal):
        alone = study.removal if len(study.minimal) == 1 else Condition("ablate_alone", study.plan.sink, number=number)
        left, low, high = NOT_RUN
        if alone in study.results:
            left, low, high = _with_interval(second_over_first, study.left_B2(alone))
        role = None
        if high is not None:
            role = NEEDED if high < HALF else BACK_UP
        yield dict(
            layer=neuron.layer,
            expert=neuron.expert,
            neuron=neuron.neuron,
            share=shares.get(neuron, 0.0),
            left_alone=left,
            left_low=low,
            left_high=high,
            role=role,
        )


def _histograms(study: StudyData) -> Rows:
    plan = study.plan
    acted_on = (None, plan.sink, *plan.targets[:1])
    entries = [entry for entry in _conditions(study) if entry[1] in acted_on and entry[2] in (None, DOSE)]
    entries.sort(key=lambda entry: entry[0] not in LEADING)  # stable: the page shows the first few
    for number, neuron in enumerate(plan.super_neurons[:SHOWN_NEURONS]):
        values = [result.neurons_BTn[..., number] for *_, result in entries]
        edges = np.linspace(min(v.min() for v in values), max(v.max() for v in values), NUM_BINS + 1)
        for (name, target, _, _), values_BT in zip(entries, values, strict=True):
            elsewhere = np.ones(values_BT.shape[1], dtype=bool)
            elsewhere[[plan.sink, *([] if target is None else [target])]] = False
            places = {"sink": values_BT[:, plan.sink], "elsewhere": values_BT[:, elsewhere]}
            if target not in (None, plan.sink):
                places["target"] = values_BT[:, target]
            for place, some in places.items():
                counts, _ = np.histogram(some, edges)
                for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
                    yield dict(
                        condition=name,
                        target=target,
                        layer=neuron.layer,
                        expert=neuron.expert,
                        neuron=neuron.neuron,
                        place=place,
                        bin_low=float(low),
                        bin_high=float(high),
                        count=int(count),
                    )


def _output_energy(study: StudyData) -> Rows:
    for super_neuron in study.plan.super_neurons[:SHOWN_NEURONS]:
        layer = study.anatomy.layers[super_neuron.layer]
        weight_EF = layer.written_vectors(super_neuron.expert).cpu()
        energy_EF = weight_EF.square() / weight_EF.square().sum(0)
        top_F = energy_EF.amax(0)  # NaN of neurons that write nothing, which are sorted last
        median = int(top_F.argsort()[int(top_F.isfinite().sum()) // 2])
        for kind, neuron in (("super", super_neuron.neuron), ("median", median)):
            top = torch.topk(energy_EF[:, neuron], min(NUM_RANKS, len(energy_EF)))
            for rank, (share, dimension) in enumerate(zip(top.values.tolist(), top.indices.tolist(), strict=True)):
                yield dict(
                    layer=super_neuron.layer,
                    expert=super_neuron.expert,
                    neuron=neuron,
                    kind=kind,
                    rank=rank,
                    dimension=dimension,
                    energy_share=share,
                    value=float(weight_EF[dimension, neuron]),
                )


def _tokens(trace: Trace) -> Mapping:
    """Those of the first sequences."""
    table = trace.tables["tokens"]
    num_shown = int((table["sequence"] < SHOWN_SEQUENCES).sum())
    return {name: column[:num_shown] for name, column in table.items()}
