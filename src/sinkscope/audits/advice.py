"""Which remedies an audit advises: what each wins back of a scheme's damage, beside its control."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sinkscope.audits.damage import Damage, damage
from sinkscope.audits.remedies import Remedy, Setting, Treated
from sinkscope.audits.schemes import Scheme

NEGLIGIBLE = 0.01
"""A damage below this, in nats a token, needs no remedy: one per cent of perplexity."""


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


def tried(setting: Setting, remedy: Remedy, scheme: Scheme, harm: Damage, harmed: np.ndarray) -> Trial | str:
    """A remedy measured, where `harmed` are the losses [N, T - 1] of the scheme without it; a text says why the
    model has nothing that it could act on."""
    treated = remedy.apply(setting, [scheme], Treated(model=setting.model))
    if isinstance(treated, str):
        return treated
    with_remedy = setting.losses(scheme, treated)
    with_control = setting.losses(scheme, remedy.control(setting, [scheme]))
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
