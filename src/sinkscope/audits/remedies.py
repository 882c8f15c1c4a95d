"""What can be done about the damage of a scheme. Each remedy has a control, which must win back less.

A remedy is a class: how it changes the way a model is used (`apply`), and its control. `audit` measures it under each
scheme that does harm, `remedy` alone and together with others; both by `Setting.losses`.
Axes: N texts, T positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sinkscope.arguments import CALIBRATION
from sinkscope.audits.damage import Damage, Prefix, damage, losses, scheme_losses
from sinkscope.audits.prediction import Prediction, predict
from sinkscope.audits.prefix import SinkPrefix, other_prefix, sink_prefix
from sinkscope.audits.schemes import CONTROL_BITS, Scheme, linear_layers
from sinkscope.audits.sink_tokens import attention_sinks
from sinkscope.audits.static_scales import Ranges, better_ranges, least_error_ranges
from sinkscope.audits.unplug import super_neurons, unplug
from sinkscope.errors import InputError
from sinkscope.interventions.neurons import matched_neurons
from sinkscope.measures.sink_score import eligible_positions
from sinkscope.models.anatomy import Neuron, anatomy_of
from sinkscope.models.loading import LoadedModel
from sinkscope.models.rotation import rotate
from sinkscope.models.token_batches import TokenBatch
from sinkscope.progress import Work

CONTROL_ROOM = 4
"""Times the largest input of the calibration; 14 of 16 bits are left for what lies within."""


@dataclass(frozen=True, kw_only=True)
class Treated:
    """A model as it is used with one remedy or several."""

    model: Any
    neurons: tuple[Neuron, ...] = ()
    """Neurons that were taken out of its weights."""
    prefix: SinkPrefix | None = None
    """What stands in the cache before every text."""
    exempted: tuple[str, ...] = ()
    """Modules that stay in 16 bits."""
    kept: Tensor | None = None
    """[N, T] tokens of the held-out texts that stay in 16 bits."""
    kept_in_calibration: Tensor | None = None
    ranges: Ranges | None = None
    """Of static scales; those of the least squared error without it."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model with texts that calibrate and texts that are held out, and what is found of them once it is needed."""

    loaded: LoadedModel
    batch: TokenBatch
    seed: int = 0
    work: Work = lambda what: lambda done, total: None
    """Is given the name of each long part, and returns what is told its progress."""

    @property
    def model(self) -> Any:
        return self.loaded.model

    @property
    def calibration(self) -> TokenBatch:
        return replace(self.batch, ids=self.batch.ids[:CALIBRATION])

    @property
    def held_out(self) -> TokenBatch:
        return replace(self.batch, ids=self.batch.ids[CALIBRATION:])

    def of(self, model: Any) -> Setting:
        """The same texts with a model that other remedies have changed, of which everything is found anew."""
        if model is self.model:
            return self
        loaded = replace(self.loaded, model=model)
        return replace(self, loaded=loaded, work=lambda what: self.work(f"{what} beside the other remedies"))

    @cached_property
    def plain(self) -> np.ndarray:
        """[N, T - 1] the losses of the model as it is, in 16 bits."""
        return losses(self.model, self.held_out.ids)[:, len(self.batch.leading_ids) :]

    def check_plain(self) -> None:
        """Refuses a model that gives no losses."""
        if not np.isfinite(self.plain).all():
            raise InputError(
                "The model's losses are NaN or infinite. Load it with `dtype='float32'`, or check its weights."
            )

    def losses(
        self, scheme: Scheme | None, treated: Treated | None = None, *, modules: Sequence[str] | None = None
    ) -> np.ndarray:
        """[N, T - 1] the losses of the held-out texts under a scheme in these modules, or in all; None for 16 bits.

        Ids that stand before each text, such as BOS, and the token after them are not counted: a text that follows a
        prefix has none of its own, and all must count the same tokens.
        """
        treated = treated or Treated(model=self.model)
        ids_NT, cache, start = self._texts(self.held_out, treated)
        if scheme is None and treated.model is self.model and cache is None:
            return self.plain  # tokens, modules and ranges matter only under a scheme
        if scheme is None:
            return losses(treated.model, ids_NT, prefix=cache)[:, start:]
        ranges, keep = None, treated.kept
        if scheme.shared_by == "calibration":
            ranges = treated.ranges or self._static_ranges(scheme, treated)
        if keep is None and scheme.keeps_sinks:
            keep = self.is_sink
        if modules is None:
            modules = [name for name in scheme.modules(treated.model) if name not in treated.exempted]
        losses_NT = scheme_losses(
            treated.model, scheme, ids_NT, modules=modules, ranges=ranges, keep=keep, prefix=cache
        )
        return losses_NT[:, start:]

    def _texts(self, batch: TokenBatch, treated: Treated) -> tuple[Tensor, Prefix | None, int]:
        """The ids [N, T] that are read, the cache before them, and the first loss that counts."""
        start = len(batch.leading_ids)
        if treated.prefix is None:
            return batch.ids, None, start
        return batch.ids[:, start:], treated.prefix.cache, 0

    def _static_ranges(self, scheme: Scheme, treated: Treated) -> Ranges:
        """Of the least squared error, in the model as it is used."""
        if scheme.bits == CONTROL_BITS:
            return self.control_ranges
        if treated.model is self.model and treated.prefix is None and treated.kept is None:
            return self.ranges
        ids_NT, cache, _ = self._texts(self.calibration, treated)
        return least_error_ranges(treated.model, ids_NT, keep=treated.kept_in_calibration, prefix=cache)

    def damage(self, scheme: Scheme, *, modules: Sequence[str] | None = None) -> Damage:
        return damage(self.losses(scheme, modules=modules), self.plain, scheme)

    @cached_property
    def sinks(self) -> Tensor:
        is_sink, *_ = attention_sinks(self.loaded, self.batch)
        return is_sink

    @property
    def is_sink(self) -> Tensor:
        """[N, T] of the held-out texts."""
        return self.sinks[CALIBRATION:]

    @cached_property
    def other_tokens(self) -> tuple[Tensor, Tensor]:
        """As many random positions as there are sinks, of the held-out and the calibration texts: the control."""
        generator = torch.Generator().manual_seed(self.seed)
        return as_many(self.is_sink, generator), as_many(self.sinks[:CALIBRATION], generator)

    @cached_property
    def ranges(self) -> Ranges:
        """Of static scales, on the calibration."""
        return least_error_ranges(self.model, self.calibration.ids)

    @cached_property
    def control_ranges(self) -> Ranges:
        """Of the control: so wide that nothing is clipped in other texts either."""
        found = least_error_ranges(self.model, self.calibration.ids, bits=CONTROL_BITS)
        return {name: CONTROL_ROOM * largest for name, largest in found.items()}

    @cached_property
    def prediction(self) -> Prediction:
        step, calibration = self.work("texts that blame modules"), self.calibration
        step(0, calibration.num_sequences)
        is_sink = self.sinks[:CALIBRATION]
        return predict(self.model, calibration.ids, ranges=self.ranges, is_sink=is_sink, seed=self.seed, progress=step)

    def blamed(self, *schemes: Scheme) -> tuple[str, ...]:
        """The few modules that the prediction blames for most of the damage of these schemes, the worst first."""
        return tuple(self.prediction.blamed(schemes[0].modules(self.model), *schemes))

    @cached_property
    def prefix(self) -> SinkPrefix:
        """The model's own sink tokens as a cache; without tokens where none help."""
        return sink_prefix(self.loaded, self.calibration, progress=self.work("prefixes tried"))

    @cached_property
    def other_prefix(self) -> SinkPrefix:
        """The control of the prefix."""
        return other_prefix(self.loaded, self.prefix, seed=self.seed)

    @cached_property
    def better_ranges(self) -> tuple[Ranges, Ranges]:
        return self.better_ranges_of(Treated(model=self.model))

    def better_ranges_of(self, treated: Treated) -> tuple[Ranges, Ranges]:
        """(the ranges of least squared error, the better ones), both the same where no others are better."""
        ids_NT, cache, _ = self._texts(self.calibration, treated)
        modules = [name for name in linear_layers(treated.model) if name not in treated.exempted]
        step = self.work("texts that set static scales")
        step(0, len(ids_NT))
        return better_ranges(treated.model, ids_NT, modules=modules, prefix=cache, seed=self.seed, progress=step)

    @cached_property
    def super_neurons(self) -> tuple[Neuron, ...]:
        return super_neurons(self.loaded, self.calibration)


class Remedy(ABC):
    """One thing to do, and its control."""

    name: str
    control_is: str

    def is_for(self, scheme: Scheme) -> bool:
        """Whether an audit tries it against a scheme."""
        return False

    def acts_on(self, scheme: Scheme) -> bool:
        """Whether it can change the damage of a scheme at all."""
        return True

    @abstractmethod
    def apply(self, setting: Setting, schemes: Sequence[Scheme], to: Treated) -> Treated | str:
        """`to` with this remedy against these schemes; a text says why the model has nothing that it could act on."""

    @abstractmethod
    def control(self, setting: Setting, schemes: Sequence[Scheme]) -> Treated:
        """The control, of the model as it is."""

    def what(self, setting: Setting, scheme: Scheme) -> str:
        """What is done, for the advice of an audit."""
        raise NotImplementedError


class KeepTokens(Remedy):
    name = "keep tokens"
    control_is = "as many random positions"

    def is_for(self, scheme):
        shares_a_scale = scheme.shared_by in ("text", "calibration")
        return not scheme.keeps_sinks and (scheme.what in ("cache", "window") or shares_a_scale)

    def apply(self, setting, schemes, to):
        return replace(to, kept=setting.is_sink, kept_in_calibration=setting.sinks[:CALIBRATION])

    def control(self, setting, schemes):
        kept, in_calibration = setting.other_tokens
        return Treated(model=setting.model, kept=kept, kept_in_calibration=in_calibration)

    def what(self, setting, scheme):
        count = float(setting.is_sink.sum(1).double().mean())
        where = "in the window" if scheme.what == "window" else "in 16 bits"
        return f"{count:.1f} sink tokens a text, found in each text, stay {where}"


class Exempt(Remedy):
    name = "leave modules in 16 bits"
    control_is = "as many random modules"

    def is_for(self, scheme):
        return scheme.what in ("activations", "weights")

    def apply(self, setting, schemes, to):
        exempted = setting.of(to.model).blamed(*schemes)
        return replace(to, exempted=exempted) if exempted else "no module is predicted to do harm"

    def control(self, setting, schemes):
        blamed = setting.blamed(*schemes)
        others = [name for name in schemes[0].modules(setting.model) if name not in blamed]
        order = torch.randperm(len(others), generator=torch.Generator().manual_seed(setting.seed))
        return Treated(model=setting.model, exempted=tuple(others[index] for index in order[: len(blamed)]))

    def what(self, setting, scheme):
        return ", ".join(setting.blamed(scheme))


class Prefixed(Remedy):
    name = "prefix"
    control_is = "the cache of as many tokens that are no sinks"

    def is_for(self, scheme):
        return scheme.shared_by in ("text", "calibration")

    def apply(self, setting, schemes, to):
        prefix = setting.of(to.model).prefix
        return replace(to, prefix=prefix) if prefix.ids else prefix.why_none

    def control(self, setting, schemes):
        return Treated(model=setting.model, prefix=setting.other_prefix)

    def what(self, setting, scheme):
        return f"the cache of tokens {list(setting.prefix.ids)} before every text"


class Rotate(Remedy):
    name = "rotate"
    control_is = "norm gains folded in, the basis as it was"

    def is_for(self, scheme):
        return scheme.what in ("activations", "weights")

    def apply(self, setting, schemes, to):
        return replace(to, model=rotate(to.model, seed=setting.seed))

    def control(self, setting, schemes):
        width = setting.model.get_input_embeddings().weight.shape[1]
        basis = torch.eye(width, dtype=torch.float64)
        return Treated(model=rotate(setting.model, basis, seed=setting.seed))

    def what(self, setting, scheme):
        return "the residual stream in a random orthogonal basis, norm gains folded in"


class Unplug(Remedy):
    name = "unplug"
    control_is = "as many random neurons unplugged"

    def apply(self, setting, schemes, to):
        neurons = setting.super_neurons
        if not neurons:
            return "no super neuron writes a sink"
        return replace(to, model=unplug(to.model, neurons), neurons=neurons)

    def control(self, setting, schemes):
        others = matched_neurons(anatomy_of(setting.model), setting.super_neurons, (), seed=setting.seed)
        return Treated(model=unplug(setting.model, others))


class Scales(Remedy):
    name = "scales"
    control_is = "the same changes of range in other modules"

    def acts_on(self, scheme):
        return scheme.shared_by == "calibration"

    def apply(self, setting, schemes, to):
        is_alone = to.model is setting.model and to.prefix is None and not to.exempted
        by_error, better = setting.better_ranges if is_alone else setting.better_ranges_of(to)
        if better == by_error:
            return "those of the least squared error do as well"
        return replace(to, ranges=better)

    def control(self, setting, schemes):
        by_error, better = setting.better_ranges
        names = list(by_error)
        order = torch.randperm(len(names), generator=torch.Generator().manual_seed(setting.seed)).tolist()
        shares = [better[names[number]] / by_error[names[number]] for number in order]
        ranges = {name: share * by_error[name] for name, share in zip(names, shares, strict=True)}
        return Treated(model=setting.model, ranges=ranges)


def as_many(mask_NT: Tensor, generator: torch.Generator) -> Tensor:
    """In each row as many random places as are marked, among the others that could be a sink."""
    free_NT = ~mask_NT & eligible_positions(mask_NT.shape[1])
    order_NT = torch.rand(mask_NT.shape, generator=generator).masked_fill(~free_NT, 2).argsort(1).argsort(1)
    return free_NT & (order_NT < mask_NT.sum(1, keepdim=True))


EXEMPT, PREFIX = Exempt(), Prefixed()
TRIED_BY_AUDIT: tuple[Remedy, ...] = (KeepTokens(), EXEMPT, PREFIX, Rotate())
BY_OPTION: dict[str, Remedy] = {
    "unplug": Unplug(),
    "rotate": Rotate(),
    "prefix": PREFIX,
    "exempt": EXEMPT,
    "scales": Scales(),
}
"""Those that `remedy` can do, in the order in which they are put together. The first change the weights, and what
follows is found for the changed model; a model that cannot be rotated is refused before the searches, which take
minutes."""
