"""The claims about interventions: each one's numbers by sequence, from the outcomes of the conditions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sinkscope.models.anatomy import Anatomy, Unit
from sinkscope.studies import claims as rules
from sinkscope.studies.claims import Claim, Part
from sinkscope.studies.conditions import DOSE, FACTORS, NUM_RANDOM_SETS, Outcome
from sinkscope.studies.plan import Plan
from sinkscope.studies.reading_claims import NO_UNITS, NO_VARIANCE, remaining, top_shares

EMPTY_CONTROL = "an empty control: a norm follows the output projection, so that scaling changes nothing in this model"


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
    if top_shares(anatomy, minimal)[0] < rules.TOP_SHARE:
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
