"""Static scales: the range of what each linear layer reads in a calibration, and of each layer's keys and values.

- `largest_magnitudes`: nothing is clipped, as by llm-compressor's `static_minmax`, the observer of its presets.
- `least_error_ranges`: the squared error is least. A few far values are clipped where all others gain more by it, as by
  HistogramObserver of PyTorch and llm-compressor's `mse`. Schemes that name that observer have these.
- `better_ranges`: also tries those of the least predicted damage, which clip a far value where the loss hardly depends
  on it; the squared error cannot see that. The prediction holds for small changes only: it is wrong where a sink is
  clipped away. So these ranges are taken only if the losses of the calibration stay nearer to the model's.
Axes: N texts, B texts of a pass, T positions, E inputs, O outputs, M magnitudes, R ranges.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sinkscope.audits.damage import Prefix, losses, scheme_losses
from sinkscope.audits.formats import W8A8_STATIC, rounded_input
from sinkscope.audits.gradients import read_gradients
from sinkscope.audits.schemes import Scheme, attend, attentions, entering_rows, linear_layers, linear_scheme
from sinkscope.models.anatomy import anatomy_of, projection_weight
from sinkscope.models.loaded import bare_model
from sinkscope.progress import Progress
from sinkscope.tracing.attention_hook import attention_hook
from sinkscope.tracing.attention_rule import AttentionRule

STATIC_BITS = 8
"""Of `W8A8_STATIC`."""
CONTROL_ROOM = 4
"""A control's static ranges are this many times the largest magnitude of the calibration, so that nothing is clipped in
other texts either."""
RANGE_STEPS = 20
"""Ranges that are tried for the least squared error: even steps up to the largest input."""
SHARES = torch.exp2(-torch.arange(9) / 2).tolist()
"""Ranges that are tried for the least predicted damage, as shares of the largest input: down to a sixteenth."""
BINS_AN_OCTAVE, HALF_BINS = 32, 32 * 128
"""Magnitudes are counted in bins of 2 %, over all that float32 holds."""
MAGNITUDE_M = torch.exp2(torch.arange(1 - HALF_BINS, 1 + HALF_BINS, dtype=torch.float64) / BINS_AN_OCTAVE)
"""The upper ends of the bins, so that the largest range clips nothing."""

Ranges = dict[str, Any]
"""A number for a linear layer, [2, K] for the keys and values of an attention, by the module's name."""


def scheme_ranges(
    scheme: Scheme,
    model: Any,
    largest: Mapping[str, Any],
    least_error: Callable[[], Mapping[str, Any]],
) -> Ranges:
    """The ranges of a scheme: the largest magnitudes, or those of the least squared error where it names that observer;
    of a control, more than the largest."""
    if scheme.is_control:
        return {name: CONTROL_ROOM * value for name, value in largest.items()}
    inputs = {name: group.input_activations for name, group in scheme.arguments(model).items()}
    by_error = [name for name, args in inputs.items() if args is not None and args.observer == "mse"]
    return {**largest, **(least_error() if by_error else {})}


def largest_magnitudes(model: Any, ids_NT: Tensor, *, prefix: Prefix | None = None) -> Ranges:
    """The largest magnitude of what each linear layer reads and, without a prefix, of each head's keys and values."""
    model = bare_model(model)
    names = {layer: name for name, layer in attentions(model).items()}
    largest: Ranges = {}

    def note(name: str, magnitude: Tensor) -> None:
        largest[name] = torch.maximum(largest[name], magnitude) if name in largest else magnitude

    def on_attention(layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        by_head = [x_BKSD.detach().float().abs().amax((0, 2, 3)).cpu() for x_BKSD in (key, value)]
        note(names[layer], torch.stack(by_head))
        return attend(query, key, value, rule)

    def entering(name: str, x_BTE: Tensor) -> None:
        note(name, x_BTE.detach().float().abs().amax().cpu())

    with contextlib.ExitStack() as stack:
        stack.enter_context(entering_rows(model, linear_layers(model), entering))
        if prefix is None:  # beside a cache, attention cannot be read
            stack.enter_context(attention_hook(anatomy_of(model), on_attention))
        losses(model, ids_NT, prefix=prefix)
    return {name: value if value.ndim else float(value) for name, value in largest.items()}


def least_error_ranges(model: Any, ids_NT: Tensor, *, bits: int = STATIC_BITS, prefix: Prefix | None = None) -> Ranges:
    """The ranges that round what linear layers read in a calibration with the least squared error."""
    counts, _ = _magnitudes(bare_model(model), ids_NT, prefix)
    return _least_error_ranges(counts, bits)


def least_error_range(magnitude_M: Tensor, count_M: Tensor, bits: int) -> float:
    """The range that rounds numbers of these magnitudes, each so often, with the least squared error.

    It is one of 20 even steps up to the largest magnitude. A number above the range is clipped, so its error is what
    it is above it. Within the range the error is that of numbers spread evenly over a step, step^2 / 12. Below half a
    step a number becomes zero, so its error is the number itself.
    """
    seen = count_M > 0
    magnitude_M, count_M = magnitude_M[seen], count_M[seen]
    range_R1 = magnitude_M.max() * torch.arange(1, RANGE_STEPS + 1)[:, None] / RANGE_STEPS
    step_R1 = range_R1 / ((2**bits - 1) / 2)
    within_RM = torch.where(magnitude_M < step_R1 / 2, magnitude_M.square(), step_R1.square() / 12)
    error_RM = torch.where(magnitude_M > range_R1, (magnitude_M - range_R1).square(), within_RM)
    return float(range_R1[(count_M * error_RM).sum(1).argmin(), 0])


def better_ranges(
    model: Any,
    ids_NT: Tensor,
    *,
    modules: Collection[str] | None = None,
    prefix: Prefix | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[Ranges, Ranges]:
    """(the ranges of least squared error, the better ones), which may be the same.

    The better ones are those under which the losses of the calibration stay nearer to the model's, with these `modules`
    rounded, or all. `progress` is called with (texts read, texts in all)."""
    model = bare_model(model)
    counts, baseline_NT = _magnitudes(model, ids_NT, prefix)
    by_error = _least_error_ranges(counts, STATIC_BITS)
    largest = {name: float(MAGNITUDE_M[count_M > 0].max()) for name, count_M in counts.items()}
    by_damage = least_damage_ranges(model, ids_NT, largest, prefix=prefix, seed=seed, progress=progress)
    static = linear_scheme(W8A8_STATIC)

    def distance(ranges: Ranges) -> float:
        rounded_NT = scheme_losses(model, static, ids_NT, modules=modules, ranges=ranges, prefix=prefix)
        return float(np.abs(rounded_NT - baseline_NT).mean())

    return by_error, min(by_error, by_damage, key=distance)


def least_damage_ranges(
    model: Any,
    ids_NT: Tensor,
    largest: Mapping[str, float],
    *,
    prefix: Prefix | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Ranges:
    """The ranges with the least predicted damage, each as if no other module were rounded; `largest` inputs bound
    them."""
    layers = linear_layers(model)
    damages = {name: np.zeros(len(SHARES)) for name in largest}
    args = linear_scheme(W8A8_STATIC).groups[0].input_activations

    def on_linear(texts: slice, name: str, x_BTE: Tensor, g_BTO: Tensor) -> None:
        g_BTE = g_BTO @ projection_weight(layers[name]).float()
        for number, share in enumerate(SHARES):
            noise_BTE = rounded_input(args, x_BTE, share * largest[name]) - x_BTE
            damages[name][number] += float((g_BTE * noise_BTE).sum(-1).double().square().sum())

    read_gradients(model, ids_NT, on_linear, prefix=prefix, seed=seed, progress=progress)
    return {name: largest[name] * SHARES[int(damage_R.argmin())] for name, damage_R in damages.items()}


def _least_error_ranges(counts: Mapping[str, Tensor], bits: int) -> Ranges:
    return {name: least_error_range(MAGNITUDE_M, count_M, bits) for name, count_M in counts.items()}


def _magnitudes(model: Any, ids_NT: Tensor, prefix: Prefix | None) -> tuple[dict[str, Tensor], np.ndarray]:
    """([M] how often each magnitude is read, by linear layer; [N, T - 1] the losses of the same pass)."""
    counts: defaultdict[str, Tensor] = defaultdict(lambda: torch.zeros(2 * HALF_BINS, dtype=torch.int64))

    def note(name: str, x_BTE: Tensor) -> None:
        magnitude = x_BTE.detach().float().abs().nan_to_num().flatten()
        bins = (magnitude.log2() * BINS_AN_OCTAVE).floor().clamp(-HALF_BINS, HALF_BINS - 1).long() + HALF_BINS
        counts[name] += bins.bincount(minlength=2 * HALF_BINS).cpu()

    with entering_rows(model, linear_layers(model), note):
        baseline_NT = losses(model, ids_NT, prefix=prefix)
    return counts, baseline_NT
