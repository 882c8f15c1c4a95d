"""From what was measured to the claims: each claim's numbers by sequence, taken from the evidence and the outcomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from sinkscope.capture.condition_reading import ConditionReading
from sinkscope.measures.super_neurons import channel_sparsity
from sinkscope.models.anatomy import Anatomy, Unit
from sinkscope.studies import claims as rules
from sinkscope.studies.claims import Claim, Part
from sinkscope.studies.conditions import DOSE, FACTORS, NUM_RANDOM_SETS, Outcome
from sinkscope.studies.evidence import Evidence
from sinkscope.studies.plan import Plan

NO_SINK = "there is no sink to explain"
NO_VARIANCE = "the position has no variance across sequences: every sequence has the same token there"
EMPTY_CONTROL = "an empty control: a norm follows the output projection, so that scaling changes nothing in this model"
NO_UNITS = "no unit writes a massive dimension at the sink at 10x its level elsewhere"


class Measured:
    """The outcomes of a study by condition, with the numbers by sequence that claims are made of."""

    def __init__(self, plan: Plan, untouched: Outcome, outcomes: dict[str, Outcome]) -> None:
        self.plan, self.untouched, self.outcomes = plan, untouched, outcomes

    def outcome(self, name: str, *where: object) -> Outcome:
        return self.outcomes["-".join(str(part) for part in (name, *where))]

    def has(self, name: str, *where: object) -> bool:
        return "-".join(str(part) for part in (name, *where)) in self.outcomes

    def rise_B(self, name: str, *where: object) -> np.ndarray:
        """How far the rate at each target rises over the untouched model's, mean over targets."""
        rises = [
            self.outcome(name, target, *where).rate_BS[:, target] - self.untouched.rate_BS[:, target]
            for target in self.plan.targets
        ]
        return np.mean(rises, axis=0)

    def at_sink_B(self, name: str | None = None, *where: object) -> np.ndarray:
        """The rate at the sink, untouched or under a condition."""
        outcome = self.untouched if name is None else self.outcome(name, *where)
        return outcome.rate_BS[:, self.plan.sink]


def remaining(numerator: int = 1) -> Callable[[np.ndarray], np.ndarray]:
    """Share of the sink that is left: mean of a later column over that of the first."""
    return lambda means: means[..., numerator] / means[..., 0]


def reading_claims(
    plan: Plan,
    anatomy: Anatomy,
    evidence: Evidence,
    untouched: ConditionReading,
    *,
    sink_varies: bool,
) -> list[Claim]:
    """The claims that need no intervention; the first of them is whether there is a sink."""
    rate_BS = untouched.rate_BS.numpy()
    result = [Claim(id="sink", parts=[Part(columns_BC=rate_BS[:, plan.sink], threshold=rules.SINK, rule="at least")])]
    result += _variance_claims(plan, evidence, sink_varies)
    result += _unit_claims(plan, anatomy, evidence)
    ratio_BT = untouched.dom_ratio_LBT[list(plan.alive)].double().mean(0).numpy()
    elsewhere = _elsewhere(plan, rate_BS)
    columns = np.stack([ratio_BT[:, elsewhere].mean(1), ratio_BT[:, plan.sink]], 1)
    result.append(
        Claim(
            id="dimension_disparity",
            parts=[Part(columns_BC=columns, threshold=rules.DOM_RATIO, rule="at least", statistic=remaining())],
            control=float(ratio_BT[:, elsewhere].mean()),
            control_name="DomRatio elsewhere",
            note=f"DomRatio {ratio_BT[:, plan.sink].mean():.3g} at the sink, mean over {len(plan.alive)} layers",
        )
    )
    cosine_BAT = evidence.cosine_BAT
    if not sink_varies or not cosine_BAT.shape[1]:
        note = "no attention follows a layer with disparity" if sink_varies else NO_VARIANCE
        return [*result, Claim(id="directional_collapse", note=note)]
    cosine_BT = cosine_BAT.mean(1)
    others_B = cosine_BT[:, elsewhere].mean(1)
    result.append(
        Claim(
            id="directional_collapse",
            parts=[
                Part(columns_BC=cosine_BT[:, plan.sink], threshold=rules.COSINE, rule="at least"),
                Part(columns_BC=cosine_BT[:, plan.sink] - others_B, threshold=rules.COSINE_ABOVE, rule="at least"),
            ],
            control=float(others_B.mean()),
            control_name="cosine at other positions",
        )
    )
    return result


def _elsewhere(plan: Plan, rate_BS: np.ndarray) -> np.ndarray:
    """Positions that are no sink."""
    elsewhere = rate_BS.mean(0) < rules.SINK
    elsewhere[plan.sink] = False
    return elsewhere


def _variance_claims(plan: Plan, evidence: Evidence, sink_varies: bool) -> list[Claim]:
    if not sink_varies:
        return [Claim(id=name, note=NO_VARIANCE) for name in ("variance_discrepancy", "averaging_law")]
    num_layers, num_sequences, length = evidence.squared_deviation_LBT.shape
    variance_BLT = evidence.squared_deviation_LBT.transpose(1, 0, 2).reshape(num_sequences, -1)
    law_BLT = evidence.averaging_law_LBT.transpose(1, 0, 2).reshape(num_sequences, -1)
    later = slice(length - length // 2, None)

    def ratio(means: np.ndarray) -> np.ndarray:
        variance = means.reshape(*means.shape[:-1], num_layers, length)
        return (variance[..., 0] / variance[..., later].mean(-1)).mean(-1)

    shuffled = np.roll(law_BLT.reshape(num_sequences, num_layers, length), length // 2, axis=-1)
    control = float(_r_squared(variance_BLT.mean(0).reshape(num_layers, length), shuffled.mean(0)))
    return [
        Claim(
            id="variance_discrepancy",
            parts=[Part(columns_BC=variance_BLT, threshold=rules.VARIANCE_RATIO, rule="at least", statistic=ratio)],
            control=float(_later_ratio(variance_BLT.mean(0).reshape(num_layers, length))),
            control_name="the same of the position in the middle",
        ),
        Claim(
            id="averaging_law",
            parts=[
                Part(
                    columns_BC=np.concatenate([variance_BLT, law_BLT], 1),
                    threshold=rules.LAW_R_SQUARED,
                    rule="at least",
                    statistic=lambda means: _law_r_squared(means, num_layers, length),
                )
            ],
            control=control,
            control_name="the law moved by half the length",
        ),
    ]


def _law_r_squared(means: np.ndarray, num_layers: int, length: int) -> np.ndarray:
    halves = means.reshape(*means.shape[:-1], 2, num_layers, length)
    return _r_squared(halves[..., 0, :, :], halves[..., 1, :, :])


def _r_squared(variance_LT: np.ndarray, law_LT: np.ndarray) -> np.ndarray:
    """log R^2 with nothing fitted, mean over layers; as measures.value_variance.log_r_squared, on numpy arrays."""
    observed, predicted = np.log(variance_LT), np.log(law_LT)
    residual = np.square(observed - predicted).sum(-1)
    total = np.square(observed - observed.mean(-1, keepdims=True)).sum(-1)
    return (1 - residual / total).mean(-1)


def _later_ratio(variance_LT: np.ndarray) -> np.ndarray:
    length = variance_LT.shape[-1]
    return (variance_LT[:, length // 2] / variance_LT[:, length - length // 2 :].mean(-1)).mean()


def _unit_claims(plan: Plan, anatomy: Anatomy, evidence: Evidence) -> list[Claim]:
    if not plan.birth_units:
        return [
            Claim(id="super_neurons", without_numbers="does not hold", note=NO_UNITS),
            Claim(id="channel_sparsity", note=NO_UNITS),
        ]
    share = np.stack([evidence.all_write_B, evidence.super_write_B], 1)
    level = np.stack([evidence.super_write_elsewhere_B, evidence.super_write_B], 1)
    top_share, median = _sparsity(anatomy, plan.birth_units)
    n = len(share)
    return [
        Claim(
            id="super_neurons",
            parts=[
                Part(columns_BC=share, threshold=rules.WRITE_SHARE, rule="at least", statistic=remaining()),
                Part(
                    columns_BC=level,
                    threshold=rules.LEVEL_ELSEWHERE,
                    rule="at least",
                    statistic=lambda means: np.sqrt(means[..., 1] / means[..., 0]),
                ),
            ],
            control=float(np.sqrt(level[:, 0].mean() / level[:, 1].mean())),
            control_name="their level elsewhere",
            note=f"units {', '.join(map(str, plan.birth_units[:8]))}",
        ),
        Claim(
            id="channel_sparsity",
            parts=[
                Part(columns_BC=np.full(n, top_share), threshold=rules.TOP_SHARE, rule="at least"),
                Part(columns_BC=np.full(n, top_share / median), threshold=rules.TOP_SHARE_OVER_MEDIAN, rule="at least"),
            ],
            control=median,
            control_name="the median unit's",
            note="a fact about weights: no sampling error",
        ),
    ]


def _sparsity(anatomy: Anatomy, units: Sequence[Unit]) -> tuple[float, float]:
    """(top energy share of the units' output vectors, that of the median unit of their layers), means over units."""
    shares, medians = [], []
    for unit in units:
        layer = anatomy.layers[unit.layer]
        weight_EF = layer.group_weight(unit.expert).float() * layer.write_gain()[:, None]
        top_F = channel_sparsity(weight_EF).top_share
        shares.append(float(top_F[unit.neuron]))
        medians.append(float(top_F.median()))
    return float(np.mean(shares)), float(np.mean(medians))


def causal_claims(
    plan: Plan, anatomy: Anatomy, measured: Measured, minimal: Sequence[Unit], *, sink_varies: bool
) -> list[Claim]:
    """The claims about interventions."""
    result = _creation_claims(plan, measured)
    before = measured.at_sink_B()
    if sink_varies:
        control = measured.at_sink_B("equalise_variance", plan.targets[0]).mean() / before.mean()
        result.append(
            _left(
                "equalising_removes_sink",
                [before, measured.at_sink_B("equalise_variance", plan.sink)],
                control=float(control),
                control_name="left when another position is equalised",
            )
        )
    else:
        result.append(Claim(id="equalising_removes_sink", note=NO_VARIANCE))
    result += _necessity_claims(plan, anatomy, measured, minimal)
    return result + _sufficiency_claims(plan, measured)


def _creation_claims(plan: Plan, measured: Measured) -> list[Claim]:
    ids = (
        *("mask_to_self_creates_sink", "amplification_creates_sink", "dose_response", "norm_scaling_does_not"),
        *("random_direction_does_not", "variance_beats_mean_shift"),
    )
    if not plan.targets:
        return [Claim(id=name, note="no position is free of a sink and has enough later queries") for name in ids]
    dose = f"{DOSE:g}"
    amplified = measured.rise_B("amplify_variance", dose)
    scaled, random = measured.rise_B("scale_norm", dose), measured.rise_B("random_direction", dose)
    shifted, swapped = measured.rise_B("shift_mean", dose), measured.rise_B("swap_deviation", dose)
    where = f"mean over positions {', '.join(map(str, plan.targets))}"
    up = {"threshold": rules.RISE, "rule": "at least"}
    no_more = {"threshold": rules.RISE, "rule": "below"}
    trend = _trend_B(measured)
    return [
        Claim(
            id=ids[0],
            parts=[Part(columns_BC=measured.rise_B("mask_to_self"), **up)],
            control=float(measured.rise_B("mask_but_self").mean()),
            control_name="rise when it sees all but itself",
            note=where,
        ),
        Claim(
            id=ids[1],
            parts=[Part(columns_BC=amplified, **up)],
            control=float(scaled.mean()),
            control_name="rise when the norm is scaled alike",
            note=where,
        ),
        Claim(
            id=ids[2],
            parts=[Part(columns_BC=trend, threshold=0.0, rule="above")],
            control=0.0,
            control_name="no trend",
            note="Kendall's tau of rate against factor, by sequence and position",
        ),
        Claim(
            id=ids[3],
            parts=[Part(columns_BC=scaled, **no_more)],
            control=float(amplified.mean()),
            control_name="rise under amplification",
            note=where if _changes_anything(measured, "scale_norm", dose) else EMPTY_CONTROL,
        ),
        Claim(
            id=ids[4],
            parts=[Part(columns_BC=random, **no_more)],
            control=float(amplified.mean()),
            control_name="rise under amplification",
            note=where,
        ),
        Claim(
            id=ids[5],
            parts=[
                Part(columns_BC=amplified - shifted, threshold=0.0, rule="above"),
                Part(columns_BC=amplified - swapped, threshold=0.0, rule="above"),
            ],
            control=float(max(shifted.mean(), swapped.mean())),
            control_name="the larger rise of the two",
            note=f"shift_mean {shifted.mean():+.1%}, swap_deviation {swapped.mean():+.1%}",
        ),
    ]


def _changes_anything(measured: Measured, name: str, *where: object) -> bool:
    """Whether a condition moves what leaves the model at all."""
    target = measured.plan.targets[0]
    before, after = measured.untouched.at["loss"], measured.outcome(name, target, *where).at["loss"]
    return bool(np.abs(after - before).max() > 1e-5)


def _trend_B(measured: Measured) -> np.ndarray:
    """Kendall's tau between factor and rate at the target, mean over targets; 0 where the rate never moves."""
    plan = measured.plan
    rates_FKB = np.array(
        [
            [measured.untouched.rate_BS[:, target] for target in plan.targets],
            *(
                [measured.outcome("amplify_variance", t, f"{factor:g}").rate_BS[:, t] for t in plan.targets]
                for factor in FACTORS
            ),
        ]
    )
    first, second = np.triu_indices(len(rates_FKB), 1)
    signs = np.sign(rates_FKB[second] - rates_FKB[first])
    moved = np.square(signs).sum(0)
    tau = signs.sum(0) / np.sqrt(np.maximum(moved, 1) * len(first))
    return tau.mean(0)


def _left(name: str, columns: list[np.ndarray], **others) -> Claim:
    part = Part(columns_BC=np.stack(columns, 1), threshold=rules.QUARTER, rule="below", statistic=remaining())
    return Claim(id=name, parts=[part], **others)


def _necessity_claims(plan: Plan, anatomy: Anatomy, measured: Measured, minimal: Sequence[Unit]) -> list[Claim]:
    if not minimal:
        note = "no set of the units that write the massive dimensions takes the sink away"
        return [
            Claim(id="super_neurons_necessary", without_numbers="does not hold", note=note),
            Claim(id="channel_sparsity_necessary", note="no minimal set was found"),
        ]
    before, sink = measured.at_sink_B(), plan.sink
    ablated, densified = (measured.at_sink_B(name, sink) for name in ("ablate_minimal_set", "densify_minimal_set"))
    random_sets = [measured.at_sink_B("random_set", sink, number) for number in range(NUM_RANDOM_SETS)]
    necessary = _left(
        "super_neurons_necessary",
        [before, ablated],
        control=float(min(rates.mean() for rates in random_sets) / before.mean()),
        control_name="left by the worst of 20 matched random sets",
        note=f"{len(minimal)} units: {', '.join(map(str, minimal[:8]))}",
    )
    spared = Part(
        columns_BC=np.stack([before, *random_sets], 1),
        threshold=rules.RANDOM_SETS,
        rule="at least",
        statistic=lambda means: means[..., 1:].min(-1) / means[..., 0],
    )
    necessary = Claim(**{**necessary.__dict__, "parts": [*necessary.parts, spared]})
    if _sparsity(anatomy, minimal)[0] < rules.TOP_SHARE:
        # Spreading a vector that is dense already only turns it elsewhere, which says nothing about sparsity.
        note = "the set's output vectors are not channel-sparse"
        return [necessary, Claim(id="channel_sparsity_necessary", note=note)]
    sparse = _left(
        "channel_sparsity_necessary",
        [before, densified],
        control=float(ablated.mean() / before.mean()),
        control_name="left when they are removed",
    )
    return [necessary, sparse]


def _sufficiency_claims(plan: Plan, measured: Measured) -> list[Claim]:
    mediations = [
        (f"mediation_{short}_{mediator.removeprefix('massive_')}", f"clamp_{mediator.removeprefix('massive_')}", cause)
        for short, cause in (("mask", ("mask_to_self",)), ("amplification", ("amplify_variance", f"{DOSE:g}")))
        for mediator in ("super_neurons", "massive_dimensions")
    ]
    sufficient = Claim(id="super_neurons_sufficient", note=NO_UNITS)
    if plan.super_neurons and plan.targets:
        sufficient = Claim(
            id="super_neurons_sufficient",
            parts=[Part(columns_BC=measured.rise_B("transplant_super_neurons"), threshold=rules.RISE, rule="at least")],
            control=float(measured.rise_B("transplant_random_set").mean()),
            control_name="rise by as many matched random units",
        )
    result = [sufficient]
    for name, clamp, (cause, *dose) in mediations:
        if not plan.targets or not measured.has(f"{clamp}+{cause}", plan.targets[0], *dose):
            result.append(Claim(id=name, note=NO_UNITS if "neurons" in name else "there is no massive dimension"))
            continue
        total, direct = measured.rise_B(cause, *dose), measured.rise_B(f"{clamp}+{cause}", *dose)
        if total.mean() < rules.RISE:
            result.append(Claim(id=name, note=f"{cause} makes no sink that could be mediated"))
            continue
        result.append(
            Claim(
                id=name,
                parts=[
                    Part(
                        columns_BC=np.stack([total, direct], 1),
                        threshold=rules.MEDIATED,
                        rule="at least",
                        statistic=lambda means: 1 - means[..., 1] / means[..., 0],
                    )
                ],
                control=float(direct.mean()),
                control_name="rise with the mediator held (direct effect)",
                note=f"total effect {total.mean():+.1%}",
            )
        )
    return result
