"""What an audit decides of each scheme: safe, repair or avoid; and what each remedy recovers, beside its control."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sinkscope.audits.damage import Damage, damage
from sinkscope.audits.evaluation import Evaluation, ModelSetup
from sinkscope.audits.remedies import EXEMPT, Remedy
from sinkscope.audits.schemes import Scheme

NEGLIGIBLE = 0.01
"""A damage below this, in nats a token, needs no remedy: one per cent of perplexity."""
SAFE = 0.02
"""A scheme is safe if the interval of its damage lies below this."""
REPAIRED = 0.05
"""A scheme is repaired by a remedy that leaves less than this."""


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
    is_loaded: bool = False
    """Whether engines load what it needs."""
    modules: tuple[str, ...] = ()
    """Those that stay in 16 bits."""
    bits: float = 0.0
    """Bits a weight, or a number of the cache, with the remedy."""

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


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """What is left of a scheme's damage with some groups of modules in 16 bits."""

    scheme: str
    num_groups: int
    num_modules: int
    bits: float
    remaining: Damage


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do with a scheme."""

    scheme: str
    what: str
    verdict: Literal["safe", "repair", "avoid", "undecided"]
    damage: Damage
    bits: float
    """Of a weight, or a number of the cache, with the repair."""
    repair: Trial | None = None

    @property
    def remaining(self) -> Damage:
        """The damage, after the repair where there is one."""
        return self.damage if self.repair is None else self.repair.remaining


def needs_remedy(cost: Damage) -> bool:
    """Whether a scheme is seen to cost enough: of a damage that may be none, nothing can be recovered."""
    return cost.low > 0 and cost.change >= NEGLIGIBLE


def decide(scheme: Scheme, cost: Damage, bits: float, trials: Sequence[Trial]) -> Decision:
    """Safe, repair, avoid, or undecided for too few texts; only what engines load is a repair."""
    loaded = [trial for trial in trials if trial.scheme == scheme.name and trial.is_loaded and trial.holds]
    best = min(loaded, key=lambda trial: trial.remaining.change, default=None)
    common = {"scheme": scheme.name, "what": scheme.what, "damage": cost}
    if cost.high < SAFE:
        return Decision(**common, verdict="safe", bits=bits)
    if cost.low <= 0 or cost.change < SAFE:
        return Decision(**common, verdict="undecided", bits=bits)
    if best is not None and best.remaining.change < REPAIRED:
        return Decision(**common, verdict="repair", bits=best.bits, repair=best)
    return Decision(**common, verdict="avoid", bits=bits)


def try_remedy(
    evaluation: Evaluation, remedy: Remedy, schemes: Sequence[Scheme], baselines: dict[str, tuple[Damage, np.ndarray]]
) -> list[Trial] | str:
    """A remedy measured against each of these schemes; where the model has nothing that it could act on, the reason.

    `baselines` has, by scheme, its damage without the remedy, and the losses [N, T - 1] behind it.
    """
    together = [[scheme] for scheme in schemes] if remedy is EXEMPT else [list(schemes)]
    modules: dict[str, tuple[str, ...]] = {}
    remedied, controls = dict[str, np.ndarray](), dict[str, np.ndarray]()
    for chosen in together:
        setup = remedy.apply(evaluation, chosen, ModelSetup(model=evaluation.model))
        if isinstance(setup, str):
            return setup
        remedied |= {scheme.name: evaluation.losses(scheme, setup) for scheme in chosen}
        modules |= {scheme.name: setup.modules_in_16_bits for scheme in chosen}
        # The control may need a copy of the model too, so the first one goes before it is made.
        del setup
        setup = remedy.control(evaluation, chosen)
        controls |= {scheme.name: evaluation.losses(scheme, setup) for scheme in chosen}
    trials = []
    for scheme in schemes:
        remedied_NT, control_NT = remedied[scheme.name], controls[scheme.name]
        cost, losses_NT = baselines[scheme.name]
        trials.append(
            Trial(
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
                is_loaded=remedy.is_loaded,
                modules=modules[scheme.name],
                bits=scheme.bits(evaluation.model, modules[scheme.name]),
            )
        )
    return trials


def curve(evaluation: Evaluation, scheme: Scheme, trial: Trial) -> list[CurvePoint]:
    """What is left with 1, 2, 4 and so on of the worst groups in 16 bits, up to those of the remedy."""
    groups = list(evaluation.worst_groups(scheme).values())
    points, number = [], 1
    while number <= len(groups):
        modules = [module for group in groups[:number] for module in group]
        remaining = trial.remaining
        if number < len(groups):
            setup = ModelSetup(model=evaluation.model, modules_in_16_bits=tuple(modules))
            remaining = damage(evaluation.losses(scheme, setup), evaluation.baseline, scheme)
        bits = scheme.bits(evaluation.model, modules)
        points.append(
            CurvePoint(scheme=scheme.name, num_groups=number, num_modules=len(modules), bits=bits, remaining=remaining)
        )
        number = len(groups) if number < len(groups) < 2 * number else 2 * number
    return points
