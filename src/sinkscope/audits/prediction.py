"""The damage of every scheme in every module, predicted from one forward and one backward pass over a few texts,
after a plain pass that finds the ranges of static scales.

A scheme changes what module m hands on at token t by d_mt. That is known: the scheme is emulated on what the module
reads, while the rest of the model stays as it was. Near a minimum of the loss the change is of second order: in the
mean 1/2 (g . d)^2, with g the gradient of the loss on the model's own predictions (`gradients`). Tokens and modules are
taken to add up, so the damage of some modules is 1/2 sum_mt (g_mt . d_mt)^2, a token's share of it.
What the formula leaves out: terms of first order, which differ from text to text and have no sign of their own; noise
that tokens or modules share; and that a loss cannot grow for ever.
Axes: N texts, B texts of a pass, T positions, E inputs, O outputs, H, D heads and their size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sinkscope.audits.formats import rounded_input, rounded_weight
from sinkscope.audits.gradients import read_gradients
from sinkscope.audits.schemes import (
    Ranges,
    Scheme,
    attend,
    attentions,
    linear_layers,
    rounded_cache,
    window_mask,
    window_size,
)
from sinkscope.measures.dimension_disparity import MASSIVE_RATIO
from sinkscope.models.anatomy import projection_weight
from sinkscope.progress import Progress
from sinkscope.tracing.attention_rule import AttentionRule

SHARE_OF_DAMAGE = 0.9
"""The worst groups are as few as hold this share of the predicted damage, or what the budget allows."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What one pass over the calibration says of every module."""

    damages: Mapping[tuple[str, str], float]
    """By (module, scheme), the change of the loss in nats a token."""
    statistics: Mapping[tuple[str, str], InputStatistics]
    """By (module, what): of the inputs of linear layers, and of the keys and the values of attention."""

    def damage(self, scheme: Scheme, modules: Collection[str]) -> float:
        """What a scheme costs in some modules at once."""
        return sum(self.damages.get((module, scheme.name), 0.0) for module in modules)

    def worst_groups(
        self, groups: Mapping[str, Sequence[str]], sizes: Mapping[str, int], allowed: float, *schemes: Scheme
    ) -> list[str]:
        """The few groups of modules that hold most of the damage of some schemes, by damage for their size, the worst
        first; no more than `allowed` in size."""
        cost = {name: sum(self.damage(scheme, modules) for scheme in schemes) for name, modules in groups.items()}
        size = {name: sum(sizes[module] for module in modules) for name, modules in groups.items()}
        enough = SHARE_OF_DAMAGE * sum(cost.values())
        chosen: list[str] = []
        for name in sorted(cost, key=lambda name: -cost[name] / size[name]):
            if sum(cost[chosen_name] for chosen_name in chosen) >= enough:
                break
            if sum(size[chosen_name] for chosen_name in chosen) + size[name] <= allowed:
                chosen.append(name)
        return chosen


def predict(
    model: Any,
    ids_NT: Tensor,
    schemes: Sequence[Scheme],
    *,
    ranges: Mapping[str, Ranges],
    is_sink: Tensor,
    seed: int = 0,
    progress: Progress | None = None,
) -> Prediction:
    """The prediction for these schemes; `ranges` are those of each scheme's name, and `is_sink` [N, T] marks the sinks
    of the texts.

    `progress` is called with (texts read, texts in all)."""
    layers, names = linear_layers(model), {layer: name for name, layer in attentions(model).items()}
    linear = [scheme for scheme in schemes if scheme.what == "linear"]
    arguments = {scheme.name: scheme.arguments(model) for scheme in linear}
    sums: defaultdict[tuple[str, str], float] = defaultdict(float)
    statistics: defaultdict[tuple[str, str], InputStatistics] = defaultdict(InputStatistics)
    num_texts, length = ids_NT.shape

    def add(module: str, scheme: Scheme, dot_BT: Tensor) -> None:
        # A window costs the tokens after it alone, and `damage` counts those.
        counted = length - 1 - (window_size(scheme, length) if scheme.what == "window" else 0)
        sums[module, scheme.name] += float(dot_BT.double().square().sum()) / 2 / counted / num_texts

    def on_linear(texts: slice, name: str, x_BTE: Tensor, g_BTO: Tensor) -> None:
        statistics[name, "inputs"].add(x_BTE, is_sink[texts])
        weight_OI = projection_weight(layers[name]).float()
        g_BTE = g_BTO @ weight_OI
        for scheme in linear:
            group = arguments[scheme.name].get(name)
            if group is None:
                continue
            # With x and W rounded to x' and W', the noise x' W' - x W is (x' - x) W' + x (W' - W).
            rounded_g_BTE, dot_BT = g_BTE, 0.0
            if group.weights is not None:
                rounded_g_BTE = g_BTO @ rounded_weight(group.weights, weight_OI)
                dot_BT = ((rounded_g_BTE - g_BTE) * x_BTE).sum(-1)
            if group.input_activations is not None:
                rounded_BTE = rounded_input(group.input_activations, x_BTE, ranges.get(scheme.name, {}).get(name))
                dot_BT = dot_BT + (rounded_g_BTE * (rounded_BTE - x_BTE)).sum(-1)
            add(name, scheme, torch.as_tensor(dot_BT))

    def on_attention(
        texts: slice, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule, g_BTHD: Tensor
    ) -> None:
        name, plain_BTHD, is_sink_BT = names[layer], attend(query, key, value, rule), is_sink[texts]
        for what, x_BKSD in (("keys", key), ("values", value)):
            statistics[name, what].add(x_BKSD.transpose(1, 2).flatten(2), is_sink_BT)
        for scheme in schemes:
            if scheme.what == "cache":
                range_2K = ranges.get(scheme.name, {}).get(name)
                other_BTHD = attend(query, *rounded_cache(scheme, key, value, range_2K), rule)
            elif scheme.what == "window":
                keep_BT = is_sink_BT if scheme.keeps_sinks else None
                other_BTHD = attend(query, key, value, rule, window_mask(scheme, query, keep_BT))
            else:
                continue
            add(name, scheme, (g_BTHD * (other_BTHD - plain_BTHD)).sum((-1, -2)))

    read_gradients(model, ids_NT, on_linear, on_attention, seed=seed, progress=progress)
    return Prediction(damages=dict(sums), statistics=dict(statistics))


@dataclass
class InputStatistics:
    """Sums and extremes of what a module reads, over all tokens so far."""

    moments: Tensor = field(default_factory=lambda: torch.zeros(5, dtype=torch.float64))
    """How many values, and the sums of x, x^2, x^3 and x^4."""
    channel_E: Tensor | None = None
    """The largest magnitude of each channel."""
    tokens: list[Tensor] = field(default_factory=list)
    """The largest magnitude of each token, by text."""
    sink_energy: float = 0.0
    """The sum of squares in sink tokens."""
    massive_energy: float = 0.0
    """The sum of squares in values of at least 10 times their token's mean magnitude."""

    def add(self, x_BTE: Tensor, is_sink_BT: Tensor) -> None:
        x = x_BTE.detach().double()
        magnitude = x.abs()
        energy = x.square()
        powers = [torch.ones_like(x).sum(), x.sum(), energy.sum(), (energy * x).sum(), energy.square().sum()]
        self.moments += torch.stack(powers).cpu()
        largest_E = magnitude.amax((0, 1)).cpu()
        self.channel_E = largest_E if self.channel_E is None else torch.maximum(self.channel_E, largest_E)
        self.tokens.append(magnitude.amax(-1).flatten().cpu())
        self.sink_energy += float(energy[is_sink_BT.to(x.device)].sum())
        massive = magnitude >= MASSIVE_RATIO * magnitude.mean(-1, keepdim=True)
        self.massive_energy += float(energy[massive].sum())

    def row(self) -> dict[str, float]:
        """A row of the table: largest value, its ratio to the median channel and token, kurtosis, and energy shares.

        Kurtosis is Pearson's, over all values: 3 for a Gaussian. NaN where everything is zero.
        """
        assert self.channel_E is not None
        count, *sums = self.moments.tolist()
        mean, square, cube, fourth = (total / count for total in sums)
        # The second and the fourth central moment, by the binomial theorem.
        variance = square - mean**2
        central = fourth - 4 * mean * cube + 6 * mean**2 * square - 3 * mean**4
        tokens, energy = torch.cat(self.tokens), sums[1]
        return {
            "largest": float(tokens.max()),
            "channel_ratio": _ratio(self.channel_E),
            "token_ratio": _ratio(tokens),
            "kurtosis": central / variance**2 if variance > 0 else float("nan"),
            "sink_energy": self.sink_energy / energy if energy else float("nan"),
            "massive_energy": self.massive_energy / energy if energy else float("nan"),
        }


def _ratio(largest: Tensor) -> float:
    """The largest of some ranges over their median; NaN where most are zero."""
    median = float(largest.median())
    return float(largest.max()) / median if median else float("nan")
