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
    step = max(1, BATCH_TOKENS // ids_NT.shape[1])
    with torch.no_grad(), evaluation_mode(model):
        for start in range(0, len(ids_NT), step):
            rows = slice(start, start + step)
            ids_BT = ids_NT[rows].to(device)
            cache = {"use_cache": False} if prefix is None else {"past_key_values": prefix(len(ids_BT))}
            with contextlib.nullcontext() if around_pass is None else around_pass(rows):
                logits = model(ids_BT, **cache).logits[:, :-1].float()
            targets = ids_BT[:, 1:].to(logits.device)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
            losses_of_passes.append(loss.view(targets.shape).double().cpu())
    return torch.cat(losses_of_passes).numpy()


def scheme_losses(
    model: Any,
    scheme: Scheme,
    ids_NT: Tensor,
    *,
    modules: Any = None,
    ranges: Mapping[str, float] | None = None,
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
    if not np.isfinite(losses_NT).all():
        raise InputError(
            f"Under {scheme.name} losses are NaN or infinite: a value was too large for the model's numbers. Load the "
            "model with `dtype='float32'`, or check its weights."
        )
    return losses_NT


def damage(losses_NT: np.ndarray, baseline_NT: np.ndarray, scheme: Scheme | None = None) -> Damage:
    """The change from the baseline losses of the same texts.

    Under a window only the tokens count that come after it has dropped its first key: before, nothing changes.
    """
    start = 0
    if scheme is not None and scheme.what == "window":
        start = min(window_size(scheme, losses_NT.shape[1] + 1), losses_NT.shape[1] - 1)
    change_N = (losses_NT - baseline_NT)[:, start:].mean(1)
    low, high = bootstrap_mean_interval(change_N)
    return Damage(change=float(change_N.mean()), low=float(low), high=float(high), by_text=tuple(change_N.tolist()))
