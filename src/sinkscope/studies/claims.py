"""The claims of a study, the same for every model. Each is one entry: its statement, its bars, where its
numbers come from, and what its control is. `judging` says how they are judged.

These are the links in the baseline; cause and effect follow in `causal_claims`. torch is imported inside the
functions: the page of a saved study reads the entries without it.
"""

from __future__ import annotations

import numpy as np

from sinkscope.measures.sink_score import MIN_SINK_RATE
from sinkscope.measures.thresholds import (
    COSINE,
    DOM_RATIO,
    LEVEL_ELSEWHERE,
    MIN_HEAD_SINK_RATE,
    TOP_SHARE,
    VARIANCE_RATIO,
)
from sinkscope.pages.text import percent
from sinkscope.statistics import seen_mean
from sinkscope.studies.causal_claims import CAUSAL_CLAIMS
from sinkscope.studies.conditions import TURNED_BASIS, Condition
from sinkscope.studies.judging import (
    LOCKED,
    Bar,
    Claim,
    ClaimNumbers,
    Empty,
    gone,
    second_over_first,
    some_of,
)
from sinkscope.studies.study_data import NO_NEURONS, NO_VARIANCE, StudyData


def _sink(study: StudyData) -> ClaimNumbers | Empty:
    return ClaimNumbers(by_bar=[study.baseline.rate_BS[:, study.plan.sink]])


def _ratio_at_birth(means: np.ndarray) -> np.ndarray:
    """Position 0 over the later half in the last layer, of variances [..., L, S, T], on the side of a norm on the
    aggregation where it is most."""
    import torch

    from sinkscope.measures.value_variance import variance_ratio

    return variance_ratio(torch.from_numpy(means[..., -1, :, :])).numpy().max(-1)


def _variance_discrepancy(study: StudyData) -> ClaimNumbers | Empty:
    if not study.sink_varies:
        return Empty(NO_VARIANCE)
    layers = study.plan.before_sink
    deviation_BLST = study.squared_deviation_LBST[layers].swapaxes(0, 1)
    note = f"layer {layers[-1]}; geometric mean over layers up to it {_mean_ratios(deviation_BLST.mean(0))}"
    if study.fresh_variance_NLST is None:
        return ClaimNumbers(by_bar=[deviation_BLST], note=f"{note}; this machine cannot hold a model drawn afresh")
    fresh_NLST = study.fresh_variance_NLST[:, layers]
    return ClaimNumbers(
        by_bar=[deviation_BLST],
        control=float(np.exp(np.log(_ratio_at_birth(fresh_NLST)).mean())),
        note=f"{note}, at initialisation {_mean_ratios(fresh_NLST)}",
    )


def _mean_ratios(variance: np.ndarray) -> str:
    """Position 0 over the later half, geometric mean over layers and models, of variances [..., L, S, T]; by side."""
    import torch

    from sinkscope.measures.value_variance import variance_ratio

    ratio_S = variance_ratio(torch.from_numpy(variance)).log().flatten(0, -2).mean(0).exp().tolist()
    after, *before = (f"{ratio:.3g}" for ratio in ratio_S)
    return after if not before else f"{after} after the norm and {before[0]} before it"


def _mean_r_squared(means: np.ndarray) -> np.ndarray:
    """log R^2 of the law, mean over layers, of the law and the variances it is to predict [..., L, 1 + S, T], on the
    side of a norm on the aggregation where it is most: the law is about averages, which a norm changes."""
    import torch

    from sinkscope.measures.value_variance import log_r_squared

    law, variance = torch.from_numpy(means[..., :1, :]), torch.from_numpy(means[..., 1:, :])
    return log_r_squared(variance, law.expand_as(variance)).mean(-2).numpy().max(-1)


def _averaging_law(study: StudyData) -> ClaimNumbers | Empty:
    if not study.sink_varies:
        return Empty(NO_VARIANCE)
    law_LBT = study.link_values.averaging_law_LBT
    both = np.concatenate([law_LBT[:, :, None], study.squared_deviation_LBST], 2).swapaxes(0, 1)
    moved = both.mean(0)
    moved[:, 0] = np.roll(moved[:, 0], both.shape[-1] // 2, axis=-1)
    return ClaimNumbers(by_bar=[both], control=float(_mean_r_squared(moved)))


def _super_neurons(study: StudyData) -> ClaimNumbers | Empty:
    if not study.plan.birth_neurons:
        return Empty(NO_NEURONS, "does not hold")
    link_values = study.link_values
    elsewhere, here = link_values.super_write_elsewhere_B, link_values.super_write_B
    return ClaimNumbers(
        by_bar=[np.stack([link_values.all_write_B, here], 1), np.stack([here, elsewhere], 1)],
        control=float(np.sqrt(elsewhere.mean() / here.mean())),
        note=f"neurons {some_of(study.plan.birth_neurons)}",
    )


def _channel_sparsity(study: StudyData) -> ClaimNumbers | Empty:
    if not study.plan.birth_neurons:
        return Empty(NO_NEURONS)
    top_share, median = study.top_shares(study.plan.birth_neurons)
    every_sequence = np.ones(len(study.baseline.rate_BS))
    by_bar = [top_share * every_sequence, top_share / median * every_sequence]
    return ClaimNumbers(by_bar=by_bar, control=median, note="a fact about weights: no sampling error")


def _elsewhere(study: StudyData) -> np.ndarray:
    """Positions that are no sink."""
    elsewhere = study.baseline.rate_BS.mean(0) < MIN_SINK_RATE
    elsewhere[study.plan.sink] = False
    return elsewhere


def _dimension_disparity(study: StudyData) -> ClaimNumbers | Empty:
    plan, elsewhere = study.plan, _elsewhere(study)
    ratio_BT = study.reading.dom_ratio_LBT[list(plan.alive)].double().nanmean(0).numpy()
    by_position = seen_mean(ratio_BT)
    return ClaimNumbers(
        by_bar=[np.stack([seen_mean(ratio_BT[:, elsewhere], 1), ratio_BT[:, plan.sink]], 1)],
        control=float(by_position[elsewhere].max() / seen_mean(ratio_BT[:, elsewhere], None)),
        note=f"DomRatio {by_position[plan.sink]:.3g} at the sink, {len(plan.alive)} layers; {_any_basis(study)}",
    )


def _any_basis(study: StudyData) -> str:
    """Of the disparity, what does not depend on the basis, and what is left in a turned one."""
    sink, *others = study.link_values.direction_share_K
    text = f"one direction across sequences holds {sink:.1%} of its energy"
    text += f" ({np.mean(others):.1%} at the targets)" if others else ""
    if (turned := study.results.get(Condition(TURNED_BASIS, study.plan.sink))) is not None:
        before, after = (float(o.at("dom_ratio", study.plan.sink).mean()) for o in (study.baseline, turned))
        text += f"; with the basis turned DomRatio falls from {before:.3g} to {after:.3g}, mean over all layers"
    return text


def _lock(study: StudyData) -> ClaimNumbers | Empty:
    if not study.sink_varies:  # all states are one, and without it nothing is left to read
        return Empty(NO_VARIANCE)
    if not study.plan.sink_heads:
        return Empty(f"no head has the sink in {percent(MIN_HEAD_SINK_RATE)} of sequences")
    at_sink, *elsewhere = study.link_values.lock_BQ3N.swapaxes(0, 1)
    control = float(gone(elsewhere[0].mean(0))) if elsewhere else None
    note = f"over {len(study.plan.sink_heads)} heads with the sink"
    if gone(at_sink.mean(0)) >= LOCKED:
        alone = f"without its largest coordinate alone {study.link_values.gone_with_coordinate:.1%} is gone"
        note += f": a lock on a {study.link_values.locked_on}, {alone}"
    return ClaimNumbers(by_bar=[at_sink], control=control, note=note)


def _directional_collapse(study: StudyData) -> ClaimNumbers | Empty:
    cosine_BAT = study.link_values.cosine_BAT
    if not study.sink_varies:
        return Empty(NO_VARIANCE)
    if not cosine_BAT.shape[1]:
        return Empty("no attention follows a layer with disparity")
    cosine_BT = seen_mean(cosine_BAT, 1)
    at_sink_B, others_B = cosine_BT[:, study.plan.sink], seen_mean(cosine_BT[:, _elsewhere(study)], 1)
    return ClaimNumbers(by_bar=[at_sink_B, at_sink_B - others_B], control=float(seen_mean(others_B)))


LAW_INTERVAL = (
    "the interval is moved so that the effect is its median. A resample repeats sequences, so its variances scatter "
    "more and its R^2 falls in nearly every one. The effect is low for the same reason: holding is harder to reach "
    "than it should be, never easier."
)
LINK_CLAIMS = (
    Claim(
        id="sink",
        link="sink",
        statement=f"The strongest position is a sink: at least {percent(MIN_SINK_RATE)} of heads, layers and sequences",
        bars=(Bar("at least", MIN_SINK_RATE),),
        numbers=_sink,
        figures=("received",),
    ),
    Claim(
        id="variance_discrepancy",
        link="variance_discrepancy",
        statement="Where disparity is born, or before the first sink if none is, position 0 has at least twice the "
        "variance of later positions",
        bars=(Bar("at least", VARIANCE_RATIO, _ratio_at_birth),),
        numbers=_variance_discrepancy,
        figures=("variance",),
        control_is="the same architecture at initialisation, three seeds",
    ),
    Claim(
        id="averaging_law",
        link="variance_discrepancy",
        statement="Averaging values explains how the variance falls: log R^2 at least 0.8",
        # A resample repeats sequences, so that its variances scatter more and log R^2 falls in nearly every one.
        bars=(Bar("at least", 0.8, _mean_r_squared, centred=True),),
        numbers=_averaging_law,
        figures=("variance",),
        interval_note=LAW_INTERVAL,
        control_is="the law moved by half the length",
    ),
    Claim(
        id="super_neurons",
        link="super_neurons",
        statement="At most 0.5 % of a birth layer's neurons carry half of the write into the massive dimensions, at "
        "10x their level elsewhere",
        bars=(
            Bar("at least", 0.5, second_over_first),
            # This way round, since the level elsewhere may be 0.
            Bar("below", 1 / LEVEL_ELSEWHERE, lambda means: np.sqrt(second_over_first(means))),
        ),
        numbers=_super_neurons,
        figures=("writes",),
        control_is="their level elsewhere",
    ),
    Claim(
        id="channel_sparsity",
        link="channel_sparsity",
        statement="One dimension holds a quarter of the super neurons' output vectors, 5x the median neuron's",
        bars=(Bar("at least", TOP_SHARE), Bar("at least", 5.0)),
        numbers=_channel_sparsity,
        figures=("output-vectors",),
        control_is="the median neuron's",
    ),
    Claim(
        id="dimension_disparity",
        link="dimension_disparity",
        statement="DomRatio at the sink is at least 3x that elsewhere",
        bars=(Bar("at least", DOM_RATIO, second_over_first),),
        numbers=_dimension_disparity,
        figures=("dom-ratio",),
        control_is="the largest of any other position",
    ),
    Claim(
        id="directional_collapse",
        link="directional_collapse",
        statement="The sink's state is one direction: cosine across sequences at least 0.9, and 0.2 above other "
        "positions",
        bars=(Bar("at least", COSINE), Bar("at least", 0.2)),
        numbers=_directional_collapse,
        figures=("dom-ratio",),
        control_is="cosine at other positions",
    ),
    Claim(
        id="lock",
        link="directional_collapse",
        statement="Without the one direction of the sink's state at least half of q . k on it is gone",
        bars=(Bar("at least", LOCKED, gone),),
        numbers=_lock,
        figures=("heads-lock-share", "received"),
        control_is="gone at another position without that direction",
    ),
)
CLAIMS: dict[str, Claim] = {claim.id: claim for claim in (*LINK_CLAIMS, *CAUSAL_CLAIMS)}
"""By id, in the order in which they are shown. A saved study may have claims that are no longer here."""
