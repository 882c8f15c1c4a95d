"""Makes the tables of a bias from its measurements.

With several seeds a value is their mean and its interval is over seeds; of a single model it is over sequences.

Axes: R seeds, S sites, N sequences, P positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from sinkscope.initial_bias.measurement import BiasMeasurements, sample_interval
from sinkscope.initial_bias.schemas import (
    BIAS,
    BIAS_TABLES,
    CONTRACTION,
    CONTRACTION_POSITIONS,
    CONTROLS,
    PERSISTENCE,
    PREFERRED_TOKENS,
    QUANTITIES,
)
from sinkscope.measures.directional_collapse import cosine_from_sum
from sinkscope.statistics import seen_mean, share_interval

Row = dict[str, Any]
AGREEMENT = "agreement"
"""In the table controls, the rank correlation of mean next-token probabilities with the baseline's."""
# Quantities that are followed along training.
PERSISTING = ("prediction_ratio", "probability_ratio", "entropy_deficit", "inter_cosine")


def bias_tables(measurements: BiasMeasurements) -> dict[str, dict[str, list]]:
    """Columns by table."""
    rows = {
        BIAS.name: _bias(measurements),
        PREFERRED_TOKENS.name: _preferred_tokens(measurements),
        CONTRACTION.name: _contraction(measurements),
        CONTRACTION_POSITIONS.name: _positions(measurements),
        CONTROLS.name: _controls(measurements),
        PERSISTENCE.name: _persistence(measurements),
    }
    return {schema.name: schema.from_rows(list(rows[schema.name])) for schema in BIAS_TABLES}


def _bias(measurements: BiasMeasurements) -> Iterable[Row]:
    for quantity in QUANTITIES:
        by_seed = [one.values[quantity] for one in measurements.baseline]
        if len(by_seed) > 1:
            yield (
                {"seed": None, "quantity": quantity}
                | _over("seeds", len(by_seed))
                | _quantity(measurements, quantity, by_seed)
            )
        for seed, values_N in zip(measurements.seeds, by_seed, strict=True):
            over = _over("sequences", len(values_N))
            yield {"seed": seed, "quantity": quantity} | over | _quantity(measurements, quantity, [values_N])


def _preferred_tokens(measurements: BiasMeasurements) -> Iterable[Row]:
    tokenizer = measurements.model.tokenizer
    for seed, model in zip(measurements.seeds, measurements.baseline, strict=True):
        mean_V = model.probability_V
        for rank, (token, share) in enumerate(zip(model.preferred_K, model.predicted_share_K, strict=True)):
            yield {
                "seed": seed,
                "rank": rank,
                "token": int(token),
                "text": None if tokenizer is None or token >= len(tokenizer) else tokenizer.decode([int(token)]),
                "prediction_ratio": float(share * len(mean_V)),
                "probability_ratio": float(mean_V[token] * len(mean_V)),
            }


def _contraction(measurements: BiasMeasurements) -> Iterable[Row]:
    contractions = [one.contraction for one in measurements.baseline]
    over = "seeds" if len(contractions) > 1 else "sequences"
    inter, intra = _by_sample(measurements, "inter_SN"), _by_sample(measurements, "intra_SN")
    between_S = _between_seeds(np.stack([one.mean_state_SE for one in contractions]))
    for site in range(inter.shape[1]):
        # Sites alternate: after an attention, after a feed-forward. The embeddings come first.
        part = "embeddings" if site == 0 else ("feed_forward", "attention")[site % 2]
        row: Row = {"layer": (site - 1) // 2, "part": part}
        for name, values in (("inter", inter), ("intra", intra)):
            added = values[:, site] - values[:, site - 1] if site else np.full(len(values), np.nan)
            row |= _value(name, values[:, site]) | _value(f"{name}_added", added)
        for name in ("alignment", "top_share", "split_half"):
            row[name] = float(np.mean([getattr(one, f"{name}_S")[site] for one in contractions]))
        yield row | {"between_seeds": float(between_S[site])} | _over(over, len(inter))


def _by_sample(measurements: BiasMeasurements, name: str) -> np.ndarray:
    """[R, S] means by seed, or [N, S] values by sequence of a single model."""
    by_seed = [getattr(one.contraction, name) for one in measurements.baseline]
    return by_seed[0].T if len(by_seed) == 1 else np.stack([seen_mean(values_SN, -1) for values_SN in by_seed])


def _between_seeds(mean_state_RSE: np.ndarray) -> np.ndarray:
    direction_RSE = torch.nn.functional.normalize(torch.from_numpy(mean_state_RSE), dim=-1)
    return cosine_from_sum(direction_RSE.sum(0), (direction_RSE != 0).any(-1).sum(0)).numpy()


def _positions(measurements: BiasMeasurements) -> Iterable[Row]:
    contractions = [one.contraction for one in measurements.baseline]
    inter = np.stack([one.inter_by_position for one in contractions])
    variance = np.stack([one.value_variance for one in contractions])
    for layer in range(-1, inter.shape[1] - 1):
        for index, position in enumerate(contractions[0].positions_P):
            values_R = variance[:, layer, index] if layer >= 0 else np.full(len(contractions), np.nan)
            row = {"layer": layer, "position": int(position), "n": len(contractions)}
            yield row | _value("inter", inter[:, layer + 1, index]) | _value("value_variance", values_R)


def _controls(measurements: BiasMeasurements) -> Iterable[Row]:
    count = len(measurements.baseline)
    over = _over("seeds", count) if count > 1 else _over("sequences", measurements.batch.num_sequences)
    for control, results in measurements.controls.items():
        for quantity in QUANTITIES:
            under = [one.values[quantity] for one in results]
            baseline = [one.values[quantity] for one in measurements.baseline]
            row = {"control": control, "quantity": quantity, "value": float(np.mean([seen_mean(one) for one in under]))}
            row |= _value("difference", _samples([a - b for a, b in zip(under, baseline, strict=True)]))
            if quantity == "prediction_ratio":
                _widen(row, "difference", *_difference_of_shares(measurements.vocabulary, under, baseline))
            yield row | over
        pairs = [(one.agreement, model.ceiling) for one, model in zip(results, measurements.baseline, strict=True)]
        row = {
            "control": control,
            "quantity": AGREEMENT,
            "value": float(np.mean([one.correlation for one, _ in pairs])),
        }
        if len(pairs) == 1:
            differences = pairs[0][0].values - pairs[0][1].values
        else:
            differences = np.array([one.correlation - ceiling.correlation for one, ceiling in pairs])
        yield row | _value("difference", differences) | over


def _persistence(measurements: BiasMeasurements) -> Iterable[Row]:
    beginning = measurements.baseline[0].contraction.mean_state_SE[-1]
    for checkpoint in measurements.checkpoints:
        measurement, correlation = checkpoint.measurement, checkpoint.agreement
        mean_state = measurement.contraction.mean_state_SE[-1]
        cosine = mean_state @ beginning / np.linalg.norm(mean_state) / np.linalg.norm(beginning)
        row: Row = {
            "checkpoint": checkpoint.name,
            "step": checkpoint.step,
            **_value("correlation", correlation.values),
            "ceiling": measurements.baseline[0].ceiling.correlation,
            "other_seeds": float(np.mean(checkpoint.other_seeds)) if checkpoint.other_seeds else None,
            "mean_state_cosine": float(cosine),
            "n": measurements.batch.num_sequences,
        }
        for quantity in PERSISTING:
            row |= _quantity(measurements, quantity, [measurement.values[quantity]], quantity)
        yield row


def _quantity(measurements: BiasMeasurements, quantity: str, by_seed: list[np.ndarray], name: str = "value") -> Row:
    """A quantity of one model, or its mean over several."""
    row = _value(name, _samples(by_seed))
    if quantity == "prediction_ratio":
        values = np.concatenate(by_seed) / measurements.vocabulary
        low, high = (measurements.vocabulary * end for end in share_interval(float(values.mean()), len(values)))
        if len(by_seed) == 1:
            row |= {f"{name}_low": low, f"{name}_high": high}
        else:
            _widen(row, name, low, high)
    return row


def _samples(by_seed: list[np.ndarray]) -> np.ndarray:
    """The samples of an interval: values of a single model's sequences, or means of several models."""
    return by_seed[0] if len(by_seed) == 1 else np.array([seen_mean(values_N) for values_N in by_seed])


def _value(name: str, samples: np.ndarray) -> Row:
    """The mean of the samples and its interval, as columns."""
    low, high = sample_interval(samples)
    return {name: float(seen_mean(samples)), f"{name}_low": float(low), f"{name}_high": float(high)}


def _widen(row: Row, name: str, low: float, high: float) -> None:
    """Widens an interval to contain another: a token that was never predicted shows no spread to resample."""
    row[f"{name}_low"], row[f"{name}_high"] = np.fmin(row[f"{name}_low"], low), np.fmax(row[f"{name}_high"], high)


def _difference_of_shares(vocabulary: int, under: list[np.ndarray], baseline: list[np.ndarray]) -> tuple[float, float]:
    """Newcombe's interval of a difference of two shares, from Wilson's of each; in units of 1 / V."""
    shares = [np.concatenate(values) / vocabulary for values in (under, baseline)]
    (a, (a_low, a_high)), (b, (b_low, b_high)) = (
        (float(values.mean()), share_interval(float(values.mean()), len(values))) for values in shares
    )
    low = a - b - np.hypot(a - a_low, b_high - b)
    high = a - b + np.hypot(a_high - a, b - b_low)
    return vocabulary * low, vocabulary * high


def _over(what: str, count: int) -> Row:
    return {"over": what, "n": count}
