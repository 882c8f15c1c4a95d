"""What can be done about the damage of a scheme, each measured beside a control that must win back less.

A remedy is one entry in REMEDIES: the schemes it is for, the losses under a scheme with it, and under its control.
Axes: N texts, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sinkscope.audits.damage import Damage, damage, losses, scheme_losses
from sinkscope.audits.prediction import Prediction
from sinkscope.audits.prefix import SinkPrefix, other_prefix, sink_prefix
from sinkscope.audits.schemes import CONTROL_BITS, Scheme
from sinkscope.audits.static_scales import least_error_ranges
from sinkscope.errors import InputError
from sinkscope.measures.sink_score import eligible_positions
from sinkscope.models.loading import load
from sinkscope.models.rotation import rotate
from sinkscope.models.token_batches import TokenBatch

NEGLIGIBLE = 0.01
"""A damage below this, in nats a token, needs no remedy: one per cent of perplexity."""
CONTROL_ROOM = 4
"""Times the largest input of the calibration; 14 of 16 bits are left for what lies within."""
EXEMPT = "leave modules in 16 bits"
PREFIX = "prefix"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What every remedy is measured on: a model, held-out texts, and what is known of both."""

    model: Any
    ids: Tensor
    is_sink: Tensor
    """[N, T] of the held-out texts."""
    calibration: Tensor
    calibration_sinks: Tensor
    ranges: dict[str, float]
    plain: np.ndarray
    prediction: Prediction
    seed: int = 0
    leading_ids: tuple[int, ...] = ()
    """Ids that stand before each text, such as BOS. One that follows a prefix has none of its own, so no loss counts
    these or the token after them: T below is without them."""

    def losses(self, scheme: Scheme, *, model: Any = None, **options: Any) -> np.ndarray:
        """[N, T - 1] under a scheme, with the static ranges of the calibration unless others are given."""
        if scheme.shared_by == "calibration":
            options.setdefault("ranges", self.control_ranges if scheme.bits == CONTROL_BITS else self.ranges)
        if scheme.keeps_sinks:
            options.setdefault("keep", self.is_sink)
        return scheme_losses(model or self.model, scheme, self.ids, **options)[:, len(self.leading_ids) :]

    def damage(self, scheme: Scheme, **options: Any) -> Damage:
        return damage(self.losses(scheme, **options), self.plain, scheme)

    @cached_property
    def control_ranges(self) -> dict[str, float]:
        """The static ranges of the control: so wide that nothing is clipped in other texts either."""
        found = least_error_ranges(self.model, self.calibration, bits=CONTROL_BITS)
        return {name: CONTROL_ROOM * largest for name, largest in found.items()}

    @cached_property
    def other_tokens(self) -> tuple[Tensor, Tensor]:
        """As many random positions as there are sinks, of the held-out and the calibration texts: the control."""
        generator = torch.Generator().manual_seed(self.seed)
        return _as_many(self.is_sink, generator), _as_many(self.calibration_sinks, generator)

    @cached_property
    def prefixes(self) -> tuple[SinkPrefix, SinkPrefix]:
        """The model's own sink tokens as a cache, found on the calibration texts, and the control."""
        loaded = load(self.model)
        prefix = sink_prefix(loaded, TokenBatch(ids=self.calibration, kind="given", leading_ids=self.leading_ids))
        if not prefix.ids:
            raise InputError(f"There is no prefix for this model: {prefix.why_none}. Try another remedy.")
        return prefix, other_prefix(loaded, prefix, seed=self.seed)

    def exempted(self, scheme: Scheme) -> list[str]:
        """The modules that the prediction blames most."""
        return self.prediction.blamed(scheme.modules(self.model), scheme)


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """One thing to do, and its control."""

    name: str
    what_for: Callable[[Scheme], bool]
    losses: Callable[[Setting, Scheme], np.ndarray]
    control: Callable[[Setting, Scheme], np.ndarray]
    what: Callable[[Setting, Scheme], str]
    control_is: str


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A remedy of a scheme, measured."""

    remedy: str
    scheme: str
    damage: Damage
    left: Damage
    won: Damage
    control: Damage
    """What the control wins back."""
    margin: Damage
    """What the remedy wins back beyond its control, text by text."""
    what: str
    control_is: str

    @property
    def holds(self) -> bool:
        """Whether it wins back something, and more than its control on the same texts."""
        return min(self.won.low, self.margin.low) > 0

    @property
    def share(self) -> float:
        """Of the damage that is won back."""
        return self.won.change / self.damage.change


def needs_remedy(harm: Damage) -> bool:
    """Whether a scheme is seen to cost enough: nothing can be won back of a damage that may be none."""
    return harm.low > 0 and harm.change >= NEGLIGIBLE


def tried(setting: Setting, remedy: Remedy, scheme: Scheme, harm: Damage, harmed: np.ndarray) -> Trial:
    """A remedy measured, where `harmed` are the losses [N, T - 1] of the scheme without it."""
    with_remedy, with_control = remedy.losses(setting, scheme), remedy.control(setting, scheme)
    return Trial(
        remedy=remedy.name,
        scheme=scheme.name,
        damage=harm,
        left=damage(with_remedy, setting.plain, scheme),
        won=damage(harmed, with_remedy, scheme),
        control=damage(harmed, with_control, scheme),
        margin=damage(with_control, with_remedy, scheme),
        what=remedy.what(setting, scheme),
        control_is=remedy.control_is,
    )


def _kept(setting: Setting, scheme: Scheme, keep: Tensor, of_calibration: Tensor) -> np.ndarray:
    ranges = None
    if scheme.shared_by == "calibration":
        ranges = least_error_ranges(setting.model, setting.calibration, keep=of_calibration)
    return setting.losses(scheme, keep=keep, ranges=ranges)


def _exempt(setting: Setting, scheme: Scheme, exempted: list[str]) -> np.ndarray:
    return setting.losses(scheme, modules=[name for name in scheme.modules(setting.model) if name not in exempted])


def other_modules(modules: Sequence[str], blamed: Sequence[str], *, seed: int) -> list[str]:
    """The control: as many random modules that are not blamed."""
    others, generator = [name for name in modules if name not in blamed], torch.Generator().manual_seed(seed)
    return [others[index] for index in torch.randperm(len(others), generator=generator)[: len(blamed)]]


def _random_modules(setting: Setting, scheme: Scheme) -> list[str]:
    return other_modules(scheme.modules(setting.model), setting.exempted(scheme), seed=setting.seed)


def _turned(setting: Setting, scheme: Scheme, rotation: Tensor | None) -> np.ndarray:
    model = rotate(setting.model, rotation, seed=setting.seed)
    ranges = least_error_ranges(model, setting.calibration) if scheme.shared_by == "calibration" else None
    return setting.losses(scheme, model=model, ranges=ranges)


def _as_they_were(setting: Setting, scheme: Scheme) -> np.ndarray:
    width = setting.model.get_input_embeddings().weight.shape[1]
    return _turned(setting, scheme, torch.eye(width, dtype=torch.float64))


def _after(setting: Setting, scheme: Scheme, prefix: SinkPrefix) -> np.ndarray:
    calibration, ids = (each[:, len(setting.leading_ids) :] for each in (setting.calibration, setting.ids))
    ranges = None
    if scheme.shared_by == "calibration":
        ranges = least_error_ranges(setting.model, calibration, prefix=prefix.cache)
    return scheme_losses(setting.model, scheme, ids, ranges=ranges, prefix=prefix.cache)


def _as_many(mask_NT: Tensor, generator: torch.Generator) -> Tensor:
    """In each row as many random places as are marked, among the others that could be a sink."""
    free_NT = ~mask_NT & eligible_positions(mask_NT.shape[1])
    order_NT = torch.rand(mask_NT.shape, generator=generator).masked_fill(~free_NT, 2).argsort(1).argsort(1)
    return free_NT & (order_NT < mask_NT.sum(1, keepdim=True))


REMEDIES: tuple[Remedy, ...] = (
    Remedy(
        name="keep tokens",
        what_for=lambda scheme: (
            not scheme.keeps_sinks
            and (scheme.what in ("cache", "window") or scheme.shared_by in ("text", "calibration"))
        ),
        losses=lambda setting, scheme: _kept(setting, scheme, setting.is_sink, setting.calibration_sinks),
        control=lambda setting, scheme: _kept(setting, scheme, *setting.other_tokens),
        what=lambda setting, scheme: (
            f"{float(setting.is_sink.sum(1).double().mean()):.1f} sink tokens a text, found in each text, "
            + ("stay in the window" if scheme.what == "window" else "stay in 16 bits")
        ),
        control_is="as many random positions",
    ),
    Remedy(
        name=EXEMPT,
        what_for=lambda scheme: scheme.what in ("activations", "weights"),
        losses=lambda setting, scheme: _exempt(setting, scheme, setting.exempted(scheme)),
        control=lambda setting, scheme: _exempt(setting, scheme, _random_modules(setting, scheme)),
        what=lambda setting, scheme: ", ".join(setting.exempted(scheme)),
        control_is="as many random modules",
    ),
    Remedy(
        name=PREFIX,
        what_for=lambda scheme: scheme.shared_by in ("text", "calibration"),
        losses=lambda setting, scheme: _after(setting, scheme, setting.prefixes[0]),
        control=lambda setting, scheme: _after(setting, scheme, setting.prefixes[1]),
        what=lambda setting, scheme: f"the cache of tokens {list(setting.prefixes[0].ids)} before every text",
        control_is="the cache of as many tokens that are no sinks",
    ),
    Remedy(
        name="rotate",
        what_for=lambda scheme: scheme.what in ("activations", "weights"),
        losses=lambda setting, scheme: _turned(setting, scheme, None),
        control=_as_they_were,
        what=lambda setting, scheme: "the residual stream in a random orthogonal basis, norm gains folded in",
        control_is="norm gains folded in, the basis as it was",
    ),
)


def check_plain(model: Any, ids_NT: Tensor) -> np.ndarray:
    """[N, T - 1] the losses of the baseline model; refuses a model that gives none."""
    plain_NT = losses(model, ids_NT)
    if not np.isfinite(plain_NT).all():
        raise InputError(
            "The baseline model's losses are NaN or infinite. Load it with `dtype='float32'`, or check its weights."
        )
    return plain_NT
