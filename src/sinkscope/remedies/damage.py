"""What a scheme costs: the change of the next-token loss on held-out text, with an interval over texts.

Axes: N texts, B texts of a pass, T positions, E width, M magnitudes, R ranges.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sinkscope.capture.recorder import evaluation_mode
from sinkscope.errors import InputError
from sinkscope.models.loading import bare_model
from sinkscope.remedies.schemes import (
    Scheme,
    entering_rows,
    linear_layers,
    window_size,
    without_kept,
)
from sinkscope.statistics import bootstrap_mean_interval

BATCH_TOKENS = 4096
"""Tokens of one forward pass."""
RANGE_STEPS = 20
"""Ranges that are tried for a static scale, up to the largest input."""
BINS_AN_OCTAVE, HALF_BINS = 32, 32 * 128
"""Magnitudes are counted in bins of 2 %, over all that float32 holds."""


@dataclass(frozen=True, kw_only=True)
class Damage:
    """The mean change of the loss, in nats a token, with its 95 % interval over texts."""

    change: float
    low: float
    high: float
    by_text: tuple[float, ...]

    @property
    def is_seen(self) -> bool:
        """Whether the interval leaves out no change at all."""
        return self.low > 0 or self.high < 0


def losses(
    model: Any,
    ids_NT: Tensor,
    *,
    prefix: Callable[[int], Any] | None = None,
    each: Callable[[slice], contextlib.AbstractContextManager] | None = None,
) -> np.ndarray:
    """[N, T - 1] the loss of each token after the first.

    `prefix(B)` gives the cache that every one of B texts is read after; a new one at each call, since a pass adds to
    it. `each(rows)` opens what must be on while those texts are read.
    """
    model = bare_model(model)
    device, found = model.get_input_embeddings().weight.device, []
    step = max(1, BATCH_TOKENS // ids_NT.shape[1])
    with torch.no_grad(), evaluation_mode(model):
        for start in range(0, len(ids_NT), step):
            rows = slice(start, start + step)
            ids_BT = ids_NT[rows].to(device)
            cache = {"use_cache": False} if prefix is None else {"past_key_values": prefix(len(ids_BT))}
            with contextlib.nullcontext() if each is None else each(rows):
                logits = model(ids_BT, **cache).logits[:, :-1].float()
            targets = ids_BT[:, 1:].to(logits.device)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
            found.append(loss.view(targets.shape).double().cpu())
    return torch.cat(found).numpy()


def scheme_losses(
    model: Any,
    scheme: Scheme,
    ids_NT: Tensor,
    *,
    modules: Any = None,
    ranges: Mapping[str, float] | None = None,
    keep: Tensor | None = None,
    prefix: Callable[[int], Any] | None = None,
) -> np.ndarray:
    """[N, T - 1] the losses under a scheme; `keep` [N, T] marks the tokens of each text that it spares."""
    if keep is None:
        with scheme.on(model, modules, ranges=ranges):
            found = losses(model, ids_NT, prefix=prefix)
    else:
        spared = keep

        def each(rows: slice) -> contextlib.AbstractContextManager:
            return scheme.on(model, modules, ranges=ranges, keep=spared[rows])

        found = losses(model, ids_NT, prefix=prefix, each=each)
    if not np.isfinite(found).all():
        raise InputError(
            expected=f"finite losses under {scheme.name}",
            found="NaN or infinity: a value was too large for the model's numbers",
            next_step="Load the model with `dtype='float32'`, or check its weights",
        )
    return found


def damage(losses_NT: np.ndarray, plain_NT: np.ndarray, scheme: Scheme | None = None) -> Damage:
    """The change from the plain losses of the same texts; of a window, that of tokens after it has dropped keys."""
    start = 0
    if scheme is not None and scheme.what == "window":
        start = min(window_size(scheme, losses_NT.shape[1] + 1), losses_NT.shape[1] - 1)
    change_N = (losses_NT - plain_NT)[:, start:].mean(1)
    low, high = bootstrap_mean_interval(change_N)
    return Damage(change=float(change_N.mean()), low=float(low), high=float(high), by_text=tuple(change_N.tolist()))


def input_ranges(
    model: Any,
    ids_NT: Tensor,
    *,
    bits: int = 8,
    keep: Tensor | None = None,
    prefix: Callable[[int], Any] | None = None,
) -> dict[str, float]:
    """The range of what each linear layer reads in a calibration, by name: what static scales are made of.

    It is the one that rounds the calibration with the least squared error (`least_error_range`). Tokens that are kept
    in 16 bits, `keep` [N, T], do not count."""
    model = bare_model(model)
    found: defaultdict[str, Tensor] = defaultdict(lambda: torch.zeros(2 * HALF_BINS, dtype=torch.int64))
    spared: Tensor | None = None

    def note(name: str, x_BTE: Tensor) -> None:
        magnitude = without_kept(x_BTE, spared).detach().float().abs().nan_to_num().flatten()
        bins = (magnitude.log2() * BINS_AN_OCTAVE).floor().clamp(-HALF_BINS, HALF_BINS - 1).long() + HALF_BINS
        found[name] += bins.bincount(minlength=2 * HALF_BINS).cpu()

    def each(rows: slice) -> contextlib.AbstractContextManager:
        nonlocal spared
        spared = None if keep is None else keep[rows]
        return contextlib.nullcontext()

    with entering_rows(model, linear_layers(model), note):
        losses(model, ids_NT, prefix=prefix, each=each)
    # The upper ends of the bins, so that the largest range clips nothing.
    magnitude_M = torch.exp2(torch.arange(1 - HALF_BINS, 1 + HALF_BINS, dtype=torch.float64) / BINS_AN_OCTAVE)
    return {name: least_error_range(magnitude_M, count_M, bits) for name, count_M in found.items()}


def least_error_range(magnitude_M: Tensor, count_M: Tensor, bits: int) -> float:
    """The range that rounds numbers of these magnitudes, each so often, with the least squared error.

    Of even steps up to the largest. A few far values are clipped where all others gain more by it, as by
    HistogramObserver, PyTorch's usual choice for static scales. Within the range the error is that of numbers spread
    evenly over a step, and below half a step the number itself.
    """
    seen = count_M > 0
    magnitude_M, count_M = magnitude_M[seen], count_M[seen]
    range_R1 = magnitude_M.max() * torch.arange(1, RANGE_STEPS + 1)[:, None] / RANGE_STEPS
    step_R1 = range_R1 / (2 ** (bits - 1) - 1)
    within_RM = torch.where(magnitude_M < step_R1 / 2, magnitude_M.square(), step_R1.square() / 12)
    error_RM = torch.where(magnitude_M > range_R1, (magnitude_M - range_R1).square(), within_RM)
    return float(range_R1[(count_M * error_RM).sum(1).argmin(), 0])
