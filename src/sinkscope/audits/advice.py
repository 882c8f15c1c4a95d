"""Which remedies an audit advises: how much of a scheme's damage each recovers, beside its control."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sinkscope.audits.damage import Damage, damage
from sinkscope.audits.evaluation import Evaluation, ModelSetup
from sinkscope.audits.remedies import Remedy
from sinkscope.audits.schemes import Scheme

NEGLIGIBLE = 0.01
"""A damage below this, in nats a token, needs no remedy: one per cent of perplexity."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A remedy of a scheme, measured."""

    remedy: str
    scheme: str
    damage: Damage
    """Of the scheme without the remedy."""
    remaining: Damage
    """With the remedy."""
    recovered: Damage
    control: Damage
    """What the control recovers."""
    beyond_control: Damage
    """What the remedy recovers beyond its control, text by text."""
    what: str
    control_is: str

    @property
    def holds(self) -> bool:
        """Whether it recovers something, and more than its control on the same texts."""
        return min(self.recovered.low, self.beyond_control.low) > 0

    @property
    def share(self) -> float:
        """The share of the damage that the remedy recovers."""
        return self.recovered.change / self.damage.change

    @property
    def control_share(self) -> float:
        """The share of the damage that its control recovers."""
        return self.control.change / self.damage.change


def needs_remedy(cost: Damage) -> bool:
    """Whether a scheme is seen to cost enough: of a damage that may be none, nothing can be recovered."""
    return cost.low > 0 and cost.change >= NEGLIGIBLE


def try_remedy(
    evaluation: Evaluation, remedy: Remedy, scheme: Scheme, cost: Damage, losses_NT: np.ndarray
) -> Trial | str:
    """A remedy measured; where the model has nothing that it could act on, the reason.

    `cost` is the damage of the scheme without the remedy, and `losses_NT` [N, T - 1] the losses behind it.
    """
    setup = remedy.apply(evaluation, [scheme], ModelSetup(model=evaluation.model))
    if isinstance(setup, str):
        return setup
    remedied_NT = evaluation.losses(scheme, setup)
    control_NT = evaluation.losses(scheme, remedy.control(evaluation, [scheme]))
    return Trial(
        remedy=remedy.name,
        scheme=scheme.name,
        damage=cost,
        remaining=damage(remedied_NT, evaluation.baseline, scheme),
        # A damage is a change of the loss, so what is recovered is the damage of doing without the remedy.
        recovered=damage(losses_NT, remedied_NT, scheme),
        control=damage(losses_NT, control_NT, scheme),
        beyond_control=damage(control_NT, remedied_NT, scheme),
        what=remedy.what(evaluation, scheme),
        control_is=remedy.control_is,
    )
