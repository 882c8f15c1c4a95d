"""The tables of a bias. With several seeds a value is their mean, with an interval over seeds; for one model the
interval is over sequences.

Axes: R seeds, S sites, N sequences, P positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from sinkscope.initial_bias.reading import BiasReadings, sample_interval
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
"""The rank correlation of mean next-token probabilities with the untouched model's."""
PERSISTING = ("prediction_ratio", "probability_ratio", "entropy_deficit", "inter_cosine")


def bias_tables(found: BiasReadings) -> dict[str, dict[str, list]]:
    """Columns by table."""
    made = {
        BIAS.name: _bias(found),
        PREFERRED_TOKENS.name: _preferred_tokens(found),
        CONTRACTION.name: _contraction(found),
        CONTRACTION_POSITIONS.name: _positions(found),
        CONTROLS.name: _controls(found),
        PERSISTENCE.name: _persistence(found),
    }
    return {schema.name: schema.from_rows(list(made[schema.name])) for schema in BIAS_TABLES}


def _bias(found: BiasReadings) -> Iterable[Row]:
    for quantity in QUANTITIES:
        by_seed = [reading.values[quantity] for reading in found.untouched]
        if len(by_seed) > 1:
            yield (
                {"seed": None, "quantity": quantity}
                | _over("seeds", len(by_seed))
                | _quantity(found, quantity, by_seed)
            )
        for seed, values_N in zip(found.seeds, by_seed, strict=True):
            over = _over("sequences", len(values_N))
            yield {"seed": seed, "quantity": quantity} | over | _quantity(found, quantity, [values_N])


def _preferred_tokens(found: BiasReadings) -> Iterable[Row]:
    tokenizer = found.model.tokenizer
    for seed, reading in zip(found.seeds, found.untouched, strict=True):
        mean_V = reading.probability_V
        for rank, (token, share) in enumerate(zip(reading.preferred_K, reading.predicted_share_K, strict=True)):
            yield {
                "seed": seed,
                "rank": rank,
                "token": int(token),
                "text": None if tokenizer is None or token >= len(tokenizer) else tokenizer.decode([int(token)]),
                "prediction_ratio": float(share * len(mean_V)),
                "probability_ratio": float(mean_V[token] * len(mean_V)),
            }


def _contraction(found: BiasReadings) -> Iterable[Row]:
    each = [reading.contraction for reading in found.untouched]
    over, inter, intra = "seeds", *(_by_sample(found, name) for name in ("inter_SN", "intra_SN"))
    if len(each) == 1:
        over = "sequences"
    between_S = _between_seeds(np.stack([one.mean_state_SE for one in each]))
    for site in range(inter.shape[1]):
        part = "embeddings" if site == 0 else ("feed_forward", "attention")[site % 2]
        row: Row = {"layer": (site - 1) // 2, "part": part}
        for name, values in (("inter", inter), ("intra", intra)):
            added = values[:, site] - values[:, site - 1] if site else np.full(len(values), np.nan)
            row |= _value(name, values[:, site]) | _value(f"{name}_added", added)
        for name in ("alignment", "top_share", "split_half"):
            row[name] = float(np.mean([getattr(one, f"{name}_S")[site] for one in each]))
        yield row | {"between_seeds": float(between_S[site])} | _over(over, len(inter))


def _by_sample(found: BiasReadings, name: str) -> np.ndarray:
    """[R, S] means by seed, or [N, S] values by sequence of a single model."""
    each = [getattr(reading.contraction, name) for reading in found.untouched]
    return each[0].T if len(each) == 1 else np.stack([seen_mean(values_SN, -1) for values_SN in each])


def _between_seeds(mean_state_RSE: np.ndarray) -> np.ndarray:
    unit = torch.nn.functional.normalize(torch.from_numpy(mean_state_RSE), dim=-1)
    return cosine_from_sum(unit.sum(0), (unit != 0).any(-1).sum(0)).numpy()


def _positions(found: BiasReadings) -> Iterable[Row]:
    each = [reading.contraction for reading in found.untouched]
    inter = np.stack([one.inter_by_position for one in each])
    variance = np.stack([one.value_variance for one in each])
    for layer in range(-1, inter.shape[1] - 1):
        for index, position in enumerate(each[0].positions_P):
            values_R = variance[:, layer, index] if layer >= 0 else np.full(len(each), np.nan)
            row = {"layer": layer, "position": int(position), "n": len(each)}
            yield row | _value("inter", inter[:, layer + 1, index]) | _value("value_variance", values_R)


def _controls(found: BiasReadings) -> Iterable[Row]:
    count = len(found.untouched)
    over = _over("seeds", count) if count > 1 else _over("sequences", found.batch.num_sequences)
    for control, each in found.controls.items():
        for quantity in QUANTITIES:
            under = [one.values[quantity] for one in each]
            before = [reading.values[quantity] for reading in found.untouched]
            row = {"control": control, "quantity": quantity, "value": float(np.mean([seen_mean(one) for one in under]))}
            row |= _value("difference", _samples([a - b for a, b in zip(under, before, strict=True)]))
            if quantity == "prediction_ratio":
                _widen(row, "difference", *_difference_of_shares(found.vocabulary, under, before))
            yield row | over
        pairs = [(one.agreement, reading.ceiling) for one, reading in zip(each, found.untouched, strict=True)]
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


def _persistence(found: BiasReadings) -> Iterable[Row]:
    beginning = found.untouched[0].contraction.mean_state_SE[-1]
    for checkpoint in found.checkpoints:
        reading, correlation = checkpoint.reading, checkpoint.agreement
        mean_state = reading.contraction.mean_state_SE[-1]
        cosine = mean_state @ beginning / np.linalg.norm(mean_state) / np.linalg.norm(beginning)
        row: Row = {
            "checkpoint": checkpoint.name,
            "step": checkpoint.step,
            **_value("correlation", correlation.values),
            "ceiling": found.untouched[0].ceiling.correlation,
            "other_seeds": float(np.mean(checkpoint.other_seeds)) if checkpoint.other_seeds else None,
            "mean_state_cosine": float(cosine),
            "n": found.batch.num_sequences,
        }
        for quantity in PERSISTING:
            row |= _quantity(found, quantity, [reading.values[quantity]], quantity)
        yield row


def _quantity(found: BiasReadings, quantity: str, by_seed: list[np.ndarray], name: str = "value") -> Row:
    """A quantity of one model, or its mean over several."""
    row = _value(name, _samples(by_seed))
    if quantity == "prediction_ratio":
        values = np.concatenate(by_seed) / found.vocabulary
        low, high = (found.vocabulary * end for end in share_interval(float(values.mean()), len(values)))
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


def _difference_of_shares(vocabulary: int, under: list[np.ndarray], before: list[np.ndarray]) -> tuple[float, float]:
    """Newcombe's interval of a difference of two shares, from Wilson's of each; in units of 1 / V."""
    shares = [np.concatenate(values) / vocabulary for values in (under, before)]
    (a, (a_low, a_high)), (b, (b_low, b_high)) = (
        (float(values.mean()), share_interval(float(values.mean()), len(values))) for values in shares
    )
    low = a - b - np.hypot(a - a_low, b_high - b)
    high = a - b + np.hypot(a_high - a, b - b_low)
    return vocabulary * low, vocabulary * high


def _over(what: str, count: int) -> Row:
    return {"over": what, "n": count}
