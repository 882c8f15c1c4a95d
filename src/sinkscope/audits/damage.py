"""What a scheme costs, its damage: the change of the next-token loss on held-out text, with an interval over texts.

Axes: N texts, B texts of a pass, T positions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sinkscope.audits.schemes import Scheme, window_size
from sinkscope.errors import InputError
from sinkscope.models.loaded import bare_model
from sinkscope.statistics import bootstrap_mean_interval
from sinkscope.tracing.single_reader import evaluation_mode

BATCH_TOKENS = 4096
"""Tokens of one forward pass."""

Prefix = Callable[[int], Any]
"""Called with a number of texts, gives the cache that stands before them; a new one each time, as a pass adds to it."""


@dataclass(frozen=True, kw_only=True)
class Damage:
    """The mean change of the loss, in nats a token, with its 95 % interval over texts."""

    change: float
    low: float
    high: float
    by_text: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A scheme beside the baseline, token by token."""

    losses: np.ndarray
    """[N, T - 1] the losses under the scheme."""
    divergence: np.ndarray
    """[N, T - 1] the KL divergence of the scheme's predictions from the baseline's."""
    same_top: np.ndarray
    """[N, T - 1] whether both find the same token the most probable."""

    def after(self, start: int) -> Comparison:
        """Without the first tokens of each text."""
        return Comparison(
            losses=self.losses[:, start:], divergence=self.divergence[:, start:], same_top=self.same_top[:, start:]
        )


def passes(ids_NT: Tensor) -> list[slice]:
    """The texts of each pass."""
    step = max(1, BATCH_TOKENS // ids_NT.shape[1])
    return [slice(start, min(start + step, len(ids_NT))) for start in range(0, len(ids_NT), step)]


def losses(
    model: Any,
    ids_NT: Tensor,
    *,
    prefix: Prefix | None = None,
    around_pass: Callable[[slice], contextlib.AbstractContextManager] | None = None,
) -> np.ndarray:
    """[N, T - 1] the loss of each token after the first.

    `around_pass(rows)` is open while those texts are read.
    """
    model = bare_model(model)
    device = model.get_input_embeddings().weight.device
    losses_of_passes = []
    with torch.no_grad(), evaluation_mode(model):
        for rows in passes(ids_NT):
            ids_BT = ids_NT[rows].to(device)
            cache = {"use_cache": False} if prefix is None else {"past_key_values": prefix(len(ids_BT))}
            with contextlib.nullcontext() if around_pass is None else around_pass(rows):
                logits = model(ids_BT, **cache).logits[:, :-1].float()
            losses_of_passes.append(_next_token_losses(logits, ids_BT))
    return torch.cat(losses_of_passes).numpy()


def compare(
    model: Any,
    scheme: Scheme,
    ids_NT: Tensor,
    *,
    ranges: Mapping[str, Any] | None = None,
    keep: Tensor | None = None,
) -> Comparison:
    """A scheme in every module beside the baseline, which is read again: its predictions are too many to keep."""
    model = bare_model(model)
    device = model.get_input_embeddings().weight.device
    losses_of_passes, divergences, same_tops = [], [], []
    with torch.no_grad(), evaluation_mode(model):
        for rows in passes(ids_NT):
            ids_BT = ids_NT[rows].to(device)
            baseline_BTV = model(ids_BT, use_cache=False).logits[:, :-1]
            with scheme.on(model, ranges=ranges, keep=None if keep is None else keep[rows]):
                logits_BTV = model(ids_BT, use_cache=False).logits[:, :-1]
            losses_of_passes.append(_next_token_losses(logits_BTV, ids_BT))
            for baseline_TV, logits_TV in zip(baseline_BTV, logits_BTV, strict=True):
                expected_TV, rounded_TV = (x_TV.float().log_softmax(-1) for x_TV in (baseline_TV, logits_TV))
                divergence_T = (expected_TV.exp() * (expected_TV - rounded_TV)).sum(-1)
                divergences.append(divergence_T.double().cpu())
                same_tops.append((expected_TV.argmax(-1) == rounded_TV.argmax(-1)).double().cpu())
    losses_NT = torch.cat(losses_of_passes).numpy()
    _check_finite(losses_NT, scheme)
    return Comparison(
        losses=losses_NT, divergence=torch.stack(divergences).numpy(), same_top=torch.stack(same_tops).numpy()
    )


def _next_token_losses(logits_BTV: Tensor, ids_BT: Tensor) -> Tensor:
    """[B, T - 1] in float64, on the CPU."""
    targets = ids_BT[:, 1:].to(logits_BTV.device)
    loss = nn.functional.cross_entropy(logits_BTV.float().flatten(0, 1), targets.flatten(), reduction="none")
    return loss.view(targets.shape).double().cpu()


def scheme_losses(
    model: Any,
    scheme: Scheme,
    ids_NT: Tensor,
    *,
    modules: Any = None,
    ranges: Mapping[str, Any] | None = None,
    keep: Tensor | None = None,
    prefix: Prefix | None = None,
) -> np.ndarray:
    """[N, T - 1] the losses under a scheme.

    `keep` [N, T] marks tokens of each text that stay in 16 bits, or in a window.
    """
    if keep is None:
        # Opened once, not in every pass: weights are rounded when it opens.
        with scheme.on(model, modules, ranges=ranges):
            losses_NT = losses(model, ids_NT, prefix=prefix)
    else:
        keep_NT = keep

        def scheme_on(rows: slice) -> contextlib.AbstractContextManager:
            return scheme.on(model, modules, ranges=ranges, keep=keep_NT[rows])

        losses_NT = losses(model, ids_NT, prefix=prefix, around_pass=scheme_on)
    _check_finite(losses_NT, scheme)
    return losses_NT


def _check_finite(losses_NT: np.ndarray, scheme: Scheme) -> None:
    if not np.isfinite(losses_NT).all():
        raise InputError(
            f"Under {scheme.name} losses are NaN or infinite: a value was too large for the model's numbers. Load the "
            "model with `dtype='float32'`, or check its weights."
        )


def damage(losses_NT: np.ndarray, baseline_NT: np.ndarray, scheme: Scheme | None = None) -> Damage:
    """The change from the baseline losses of the same texts.

    Under a window only the tokens count that come after it has dropped its first key: before, nothing changes.
    """
    start = 0
    if scheme is not None and scheme.what == "window":
        start = min(window_size(scheme, losses_NT.shape[1] + 1), losses_NT.shape[1] - 1)
    return mean_over_texts((losses_NT - baseline_NT)[:, start:])


def mean_over_texts(values_NT: np.ndarray) -> Damage:
    """The mean, with its 95 % interval over texts."""
    values_N = values_NT.mean(1)
    low, high = bootstrap_mean_interval(values_N)
    return Damage(change=float(values_N.mean()), low=float(low), high=float(high), by_text=tuple(values_N.tolist()))
