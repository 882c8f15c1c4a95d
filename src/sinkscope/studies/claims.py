"""The claims about the baseline, and CLAIMS, all claims of a study. They are the same for every model.

A claim is one entry: its statement, its bars, the function that computes its numbers, and its control. `judging` says
how verdicts follow; the claims about cause and effect are in `causal_claims`. torch is imported inside the functions,
because the page of a saved study reads the entries without it.
"""

from __future__ import annotations

import numpy as np

from sinkscope.measures.sink_score import MIN_SINK_RATE, RECEIVED_THRESHOLD
from sinkscope.measures.thresholds import (
    DOM_RATIO,
    LEVEL_ELSEWHERE,
    MIN_HEAD_SINK_RATE,
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

OVER_FRESH = 1.25
"""Fresh models of one architecture differ by less: a sixth, as one position's variance over 32 sequences scatters."""


def _sink(study: StudyData) -> ClaimNumbers | Empty:
    return ClaimNumbers(by_bar=[study.baseline.rate_BS[:, study.plan.sink]])


def _over_fresh(means: np.ndarray) -> np.ndarray:
    """Variance at position 0 over that of the later half, geometric mean over layers, over the same in fresh models, of
    variances [..., 1 + N, L, S, T]: first the model's, then those of N fresh ones. The larger number of the sides of a
    norm on the aggregation."""
    import torch

    from sinkscope.measures.value_variance import variance_ratio

    log_NS = variance_ratio(torch.from_numpy(means)).log().numpy().mean(-2)
    return np.exp(log_NS[..., 0, :] - log_NS[..., 1:, :].mean(-2)).max(-1)


def _variance_discrepancy(study: StudyData) -> ClaimNumbers | Empty:
    if not study.sink_varies:
        return Empty(NO_VARIANCE)
    layers = study.plan.layers
    deviation_BLST = study.squared_deviation_LBST[layers].swapaxes(0, 1)
    law = _mean_r_squared(_with_law(study).mean(0))
    note = f"in layers 0 to {layers[-1]}: {_mean_ratios(deviation_BLST.mean(0))}"
    law_note = f"the averaging law predicts the variance by position with a log R^2 of {law:.2f}"
    if study.fresh_deviation_NLBST is None:
        return Empty(f"a second model, drawn afresh, does not fit on this machine; {note}; {law_note}")
    fresh_BNLST = study.fresh_deviation_NLBST[:, layers].transpose(2, 0, 1, 3, 4)
    note += f", before training {_mean_ratios(fresh_BNLST.mean(0))}; {law_note}"
    return ClaimNumbers(
        by_bar=[np.concatenate([deviation_BLST[:, None], fresh_BNLST], 1)],
        control=float(_over_fresh(fresh_BNLST.mean(0))),
        note=note,
    )


def _mean_ratios(variance: np.ndarray) -> str:
    """In words: variance at position 0 over that of the later half, geometric mean over layers and models, of variances
    [..., L, S, T]; on both sides of a norm on the aggregation."""
    import torch

    from sinkscope.measures.value_variance import variance_ratio

    ratio_S = variance_ratio(torch.from_numpy(variance)).log().flatten(0, -2).mean(0).exp().tolist()
    after, *before = (f"{ratio:.3g}" for ratio in ratio_S)
    return after if not before else f"{after} after the norm and {before[0]} before it"


def _mean_r_squared(means: np.ndarray) -> np.ndarray:
    """log R^2 of the averaging law, mean over layers. `means` [..., L, 1 + S, T] holds the law and the variances that
    it predicts; of the sides of a norm on the aggregation the better one counts, because the norm changes averages."""
    import torch

    from sinkscope.measures.value_variance import log_r_squared

    law, variance = torch.from_numpy(means[..., :1, :]), torch.from_numpy(means[..., 1:, :])
    return log_r_squared(variance, law.expand_as(variance)).mean(-2).numpy().max(-1)


def _with_law(study: StudyData) -> np.ndarray:
    """[B, L, 1 + S, T] what the averaging law predicts, and the squared deviations."""
    law_LBT = study.link_values.averaging_law_LBT
    return np.concatenate([law_LBT[:, :, None], study.squared_deviation_LBST], 2).swapaxes(0, 1)


def _super_neurons(study: StudyData) -> ClaimNumbers | Empty:
    if not study.plan.appearance_neurons:
        return Empty(NO_NEURONS, "does not hold")
    link_values = study.link_values
    elsewhere, here = link_values.super_write_elsewhere_B, link_values.super_write_B
    top_share, median = study.top_shares(study.plan.appearance_neurons)
    return ClaimNumbers(
        by_bar=[np.stack([link_values.all_write_B, here], 1), np.stack([here, elsewhere], 1)],
        control=float(np.sqrt(elsewhere.mean() / here.mean())),
        note=f"neurons {some_of(study.plan.appearance_neurons)}; the largest entry of their output vectors holds "
        f"{top_share:.1%} of the energy, that of the median neuron {median:.1%}",
    )


def _elsewhere(study: StudyData) -> np.ndarray:
    """[T] which positions are no sinks."""
    elsewhere = study.baseline.rate_BS.mean(0) < MIN_SINK_RATE
    elsewhere[study.plan.sink] = False
    return elsewhere


def _dimension_disparity(study: StudyData) -> ClaimNumbers | Empty:
    plan, elsewhere = study.plan, _elsewhere(study)
    ratio_BT = study.reading.dom_ratio_LBT[list(plan.layers_with_disparity)].double().nanmean(0).numpy()
    by_position = seen_mean(ratio_BT)
    return ClaimNumbers(
        by_bar=[np.stack([seen_mean(ratio_BT[:, elsewhere], 1), ratio_BT[:, plan.sink]], 1)],
        control=float(by_position[elsewhere].max() / seen_mean(ratio_BT[:, elsewhere], None)),
        note=f"DomRatio {by_position[plan.sink]:.3g} at the sink, mean over {len(plan.layers_with_disparity)} layers; "
        f"{_any_basis(study)}",
    )


def _any_basis(study: StudyData) -> str:
    """In words: what of the disparity does not depend on the basis, and how much is left of it in a rotated one."""
    sink, *others = study.link_values.direction_share_K
    text = f"one direction holds {sink:.1%} of the energy of the sink's states across sequences"
    text += f" ({np.mean(others):.1%} at ordinary positions)" if others else ""
    turned = study.results.get(Condition(TURNED_BASIS, study.plan.sink))
    if turned is not None:
        before, after = (float(o.at("dom_ratio", study.plan.sink).mean()) for o in (study.baseline, turned))
        text += f"; in a rotated basis DomRatio is {after:.3g} instead of {before:.3g}, mean over all layers"
    return text


def _lock(study: StudyData) -> ClaimNumbers | Empty:
    if not study.sink_varies:  # all states are the same, so their common direction is all of them
        return Empty(NO_VARIANCE)
    if not study.plan.sink_heads:
        return Empty(f"no head has the sink in at least {percent(MIN_HEAD_SINK_RATE)} of sequences")
    at_sink, *elsewhere = study.link_values.lock_BQ3N.swapaxes(0, 1)
    control = float(gone(elsewhere[0].mean(0))) if elsewhere else None
    note = f"mean over the {len(study.plan.sink_heads)} heads that have the sink{_collapse(study)}"
    if gone(at_sink.mean(0)) >= LOCKED:
        alone = f"removing its largest coordinate alone removes {study.link_values.gone_with_coordinate:.1%}"
        note += f"; they read a {study.link_values.locked_on}: {alone}"
    return ClaimNumbers(by_bar=[at_sink], control=control, note=note)


def _collapse(study: StudyData) -> str:
    """In words: how alike the sink's states are from sequence to sequence."""
    cosine_BAT = study.link_values.cosine_BAT
    if not cosine_BAT.shape[1]:
        return ""
    cosine_BT = seen_mean(cosine_BAT, 1)
    at_sink, others = seen_mean(cosine_BT[:, study.plan.sink]), seen_mean(cosine_BT[:, _elsewhere(study)], None)
    return f"; cosine between sequences {at_sink:.2f} at the sink, {others:.2f} at other positions"


LINK_CLAIMS = (
    Claim(
        id="sink",
        link="sink",
        statement=f"The strongest position is a sink: in at least {percent(MIN_SINK_RATE)} of heads and sequences it "
        f"receives more than {RECEIVED_THRESHOLD} of the attention",
        bars=(Bar("at least", MIN_SINK_RATE),),
        numbers=_sink,
        figures=("received",),
    ),
    Claim(
        id="variance_discrepancy",
        link="variance_discrepancy",
        statement="Training has raised it: in the early layers the value variance of position 0 over that of later "
        "positions is a quarter higher, or more, than in the same architecture before training",
        bars=(Bar("at least", OVER_FRESH, _over_fresh),),
        numbers=_variance_discrepancy,
        figures=("variance",),
        control_is="one model before training over two others",
    ),
    Claim(
        id="super_neurons",
        link="super_neurons",
        statement="At most 0.5 % of a layer's neurons write half of the sink's massive dimensions, 10x as strongly as "
        "at other positions",
        bars=(
            Bar("at least", 0.5, second_over_first),
            # This way round, since the level elsewhere may be 0.
            Bar("below", 1 / LEVEL_ELSEWHERE, lambda means: np.sqrt(second_over_first(means))),
        ),
        numbers=_super_neurons,
        figures=("writes",),
        control_is="what they write elsewhere, over what they write at the sink",
    ),
    Claim(
        id="dimension_disparity",
        link="dimension_disparity",
        statement="DomRatio, the largest entry of the residual over the mean one, is at least 3x as high at the sink "
        "as elsewhere",
        bars=(Bar("at least", DOM_RATIO, second_over_first),),
        numbers=_dimension_disparity,
        figures=("dom-ratio",),
        control_is="the largest of any other position",
    ),
    Claim(
        id="lock",
        link="directional_collapse",
        statement="Heads find the sink by this direction: removing it from the sink's state removes at least half of "
        "q . k on the sink",
        bars=(Bar("at least", LOCKED, gone),),
        numbers=_lock,
        figures=("heads-lock-share", "received"),
        control_is="what the same removes of q . k on another position",
    ),
)
CLAIMS: dict[str, Claim] = {claim.id: claim for claim in (*LINK_CLAIMS, *CAUSAL_CLAIMS)}
"""By id, in the order of the page. A saved study may hold claims that are no longer here."""
