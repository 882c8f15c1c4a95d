"""The range and shape of what a linear layer reads and of what the cache holds, reduced while a pass goes on.

Axes: B texts of a pass, T positions, E channels.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sinkscope.measures.dimension_disparity import MASSIVE_RATIO


@dataclass
class Reading:
    """Sums and extremes over the tokens seen so far; of a token only its largest magnitude is kept."""

    moments: Tensor = field(default_factory=lambda: torch.zeros(5, dtype=torch.float64))
    """How many values, and the sums of x, x^2, x^3 and x^4."""
    channel_E: Tensor | None = None
    tokens: list[Tensor] = field(default_factory=list)
    sink_energy: float = 0.0
    massive_energy: float = 0.0

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
        """Largest value, its ratio to that of the median channel and token, kurtosis, and shares of the energy.

        Kurtosis is Pearson's, over all values: 3 for a Gaussian. NaN where everything is zero.
        """
        assert self.channel_E is not None
        count, *sums = self.moments.tolist()
        mean, square, cube, fourth = (total / count for total in sums)
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
