"""The claims that need no intervention: each one's numbers by sequence, from the untouched model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from sinkscope.capture.replay import ConditionReading
from sinkscope.measures.dimension_disparity import top_energy_share
from sinkscope.measures.value_variance import log_r_squared, variance_ratio
from sinkscope.models.anatomy import Anatomy, Unit
from sinkscope.statistics import seen_mean
from sinkscope.studies import claims as rules
from sinkscope.studies.claims import Claim, Part
from sinkscope.studies.evidence import Evidence
from sinkscope.studies.plan import Plan

NO_SINK = "there is no sink to explain"
NO_VARIANCE = "the position has no variance across sequences: every sequence has the same token there"
NO_UNITS = "no unit writes a massive dimension at the sink at 10x its level elsewhere"


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
    ratio_BT = untouched.dom_ratio_LBT[list(plan.alive)].double().nanmean(0).numpy()
    elsewhere = _elsewhere(plan, rate_BS)
    columns = np.stack([seen_mean(ratio_BT[:, elsewhere], 1), ratio_BT[:, plan.sink]], 1)
    by_position = seen_mean(ratio_BT)
    result.append(
        Claim(
            id="dimension_disparity",
            parts=[Part(columns_BC=columns, threshold=rules.DOM_RATIO, rule="at least", statistic=remaining())],
            control=float(by_position[elsewhere].max() / seen_mean(ratio_BT[:, elsewhere], None)),
            control_name="the largest of any other position",
            note=f"DomRatio {by_position[plan.sink]:.3g} at the sink, mean over {len(plan.alive)} layers",
        )
    )
    cosine_BAT = evidence.cosine_BAT
    if not sink_varies or not cosine_BAT.shape[1]:
        note = "no attention follows a layer with disparity" if sink_varies else NO_VARIANCE
        return [*result, Claim(id="directional_collapse", note=note)]
    cosine_BT = seen_mean(cosine_BAT, 1)
    others_B = seen_mean(cosine_BT[:, elsewhere], 1)
    result.append(
        Claim(
            id="directional_collapse",
            parts=[
                Part(columns_BC=cosine_BT[:, plan.sink], threshold=rules.COSINE, rule="at least"),
                Part(columns_BC=cosine_BT[:, plan.sink] - others_B, threshold=rules.COSINE_ABOVE, rule="at least"),
            ],
            control=float(seen_mean(others_B)),
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

    def ratio(means: np.ndarray) -> np.ndarray:
        variance = torch.from_numpy(means.reshape(*means.shape[:-1], num_layers, length))
        return variance_ratio(variance).mean(-1).numpy()

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
    """log R^2 of the law, mean over layers."""
    return log_r_squared(torch.from_numpy(variance_LT), torch.from_numpy(law_LT)).mean(-1).numpy()


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
    top_share, median = top_shares(anatomy, plan.birth_units)
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


def top_shares(anatomy: Anatomy, units: Sequence[Unit]) -> tuple[float, float]:
    """(top energy share of the units' output vectors, that of the median unit of their layers), means over units."""
    shares, medians = [], []
    for unit in units:
        layer = anatomy.layers[unit.layer]
        top_F = top_energy_share(layer.written_vectors(unit.expert).T)
        shares.append(float(top_F[unit.neuron]))
        medians.append(float(top_F.nanmedian()))  # units that write nothing have none
    return float(np.mean(shares)), float(np.mean(medians))


def remaining() -> Callable[[np.ndarray], np.ndarray]:
    """What is left: the mean of the second column over that of the first."""
    return lambda means: means[..., 1] / means[..., 0]
