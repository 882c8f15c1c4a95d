"""A model with texts that calibrate and texts that are held out; what is measured of them is measured once.

`Evaluation.losses` is what both `audit` and `remedy` compare: the losses of the held-out texts under a scheme, of the
model as a `ModelSetup` says that it is used.
Axes: N texts, T positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sinkscope.arguments import CALIBRATION
from sinkscope.audits.damage import Comparison, Damage, Prefix, compare, damage, losses, scheme_losses
from sinkscope.audits.prediction import Prediction, predict
from sinkscope.audits.prefix import SinkPrefix, other_prefix, sink_prefix
from sinkscope.audits.schemes import Ranges, Scheme, fused_groups, linear_layers
from sinkscope.audits.sink_tokens import attention_sinks
from sinkscope.audits.static_scales import better_ranges, largest_magnitudes, least_error_ranges, scheme_ranges
from sinkscope.errors import InputError
from sinkscope.measures.sink_score import eligible_positions
from sinkscope.models.anatomy import Neuron, as_neuron
from sinkscope.models.loaded import LoadedModel
from sinkscope.models.token_batches import TokenBatch
from sinkscope.progress import Work
from sinkscope.tracing.trace import trace

BUDGET = 1.0
"""Bits a weight that modules in 16 bits may add on average, by default."""


@dataclass(frozen=True, kw_only=True)
class ModelSetup:
    """A model and how it is used: as it is, or with one remedy or several."""

    model: Any
    neurons: tuple[Neuron, ...] = ()
    """Neurons that were taken out of its weights."""
    prefix: SinkPrefix | None = None
    """What stands in the cache before every text."""
    modules_in_16_bits: tuple[str, ...] = ()
    tokens_in_16_bits: Tensor | None = None
    """[N, T] mask over the held-out texts: what stays in 16 bits in the cache, or in the window."""
    ranges: Ranges | None = None
    """Of static scales; None for those of the least squared error."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A model with its texts; every property is worked out when it is first needed, and kept."""

    loaded: LoadedModel
    batch: TokenBatch
    """The first 16 texts calibrate, the others are held out."""
    schemes: tuple[Scheme, ...]
    """Those whose damage is predicted."""
    budget: float = BUDGET
    """Bits a weight that modules in 16 bits may add on average."""
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

    def of(self, model: Any) -> Evaluation:
        """The same texts with a model that other remedies have changed; nothing measured before is taken over."""
        if model is self.model:
            return self
        loaded = replace(self.loaded, model=model)
        return replace(self, loaded=loaded, work=lambda what: self.work(f"{what} beside the other remedies"))

    @cached_property
    def baseline(self) -> np.ndarray:
        """[N, T - 1] the losses of the model as it is, in 16 bits."""
        return losses(self.model, self.held_out.ids)[:, len(self.batch.leading_ids) :]

    def check_finite(self) -> None:
        """Refuses a model that gives no losses."""
        if not np.isfinite(self.baseline).all():
            raise InputError(
                "The model's losses are NaN or infinite. Load it with `dtype='float32'`, or check its weights."
            )

    def losses(
        self, scheme: Scheme | None, setup: ModelSetup | None = None, *, modules: Sequence[str] | None = None
    ) -> np.ndarray:
        """[N, T - 1] the losses of the held-out texts under a scheme in these modules, or in all; None for 16 bits.

        Ids that stand before each text, such as BOS, and the token after them are not counted: a text that follows a
        prefix has none of its own, and all must count the same tokens.
        """
        setup = setup or ModelSetup(model=self.model)
        ids_NT, cache, start = self._texts(self.held_out, setup)
        if scheme is None and setup.model is self.model and cache is None:
            return self.baseline  # tokens, modules and ranges matter only under a scheme
        if scheme is None:
            return losses(setup.model, ids_NT, prefix=cache)[:, start:]
        ranges, keep = None, setup.tokens_in_16_bits
        if scheme.needs_ranges():
            ranges = setup.ranges or self._static_ranges(scheme, setup)
        if keep is None and scheme.keeps_sinks:
            keep = self.is_sink
        if modules is None:
            modules = [name for name in scheme.modules(setup.model) if name not in setup.modules_in_16_bits]
        losses_NT = scheme_losses(setup.model, scheme, ids_NT, modules=modules, ranges=ranges, keep=keep, prefix=cache)
        return losses_NT[:, start:]

    def compare(self, scheme: Scheme) -> Comparison:
        """The scheme in the model as it is, beside the baseline, token by token."""
        ranges = self._static_ranges(scheme, ModelSetup(model=self.model)) if scheme.needs_ranges() else None
        keep = self.is_sink if scheme.keeps_sinks else None
        compared = compare(self.model, scheme, self.held_out.ids, ranges=ranges, keep=keep)
        return compared.after(len(self.batch.leading_ids))

    def damage(self, scheme: Scheme, *, modules: Sequence[str] | None = None) -> Damage:
        """What the scheme costs the model as it is, in these modules or in all."""
        return damage(self.losses(scheme, modules=modules), self.baseline, scheme)

    def _texts(self, batch: TokenBatch, setup: ModelSetup) -> tuple[Tensor, Prefix | None, int]:
        """The ids [N, T] that are read, the cache before them, and the first loss that counts."""
        start = len(batch.leading_ids)
        if setup.prefix is None:
            return batch.ids, None, start
        return batch.ids[:, start:], setup.prefix.cache, 0

    def _static_ranges(self, scheme: Scheme, setup: ModelSetup) -> Ranges:
        """The usual ranges of the scheme, in the model as it is used."""
        if setup.model is self.model and setup.prefix is None:
            return scheme_ranges(scheme, self.model, self.largest, lambda: self.least_error)
        ids_NT, cache, _ = self._texts(self.calibration, setup)
        largest = largest_magnitudes(setup.model, ids_NT, prefix=cache)
        return scheme_ranges(
            scheme, setup.model, largest, lambda: least_error_ranges(setup.model, ids_NT, prefix=cache)
        )

    @cached_property
    def sinks(self) -> Tensor:
        """[N, T] which tokens are sinks, of all texts."""
        is_sink, *_ = attention_sinks(self.loaded, self.batch)
        return is_sink

    @property
    def is_sink(self) -> Tensor:
        """[N, T] which tokens of the held-out texts are sinks."""
        return self.sinks[CALIBRATION:]

    @cached_property
    def random_tokens(self) -> Tensor:
        """[N, T] as many random positions of the held-out texts as there are sinks: the control."""
        return as_many(self.is_sink, torch.Generator().manual_seed(self.seed))

    @cached_property
    def largest(self) -> Ranges:
        """The largest magnitudes of the calibration."""
        return largest_magnitudes(self.model, self.calibration.ids)

    @cached_property
    def least_error(self) -> Ranges:
        """The static ranges of the least squared error on the calibration."""
        return least_error_ranges(self.model, self.calibration.ids)

    @cached_property
    def prediction(self) -> Prediction:
        """What each scheme is predicted to cost in each module, from the calibration."""
        step, calibration = self.work("texts that predict damage"), self.calibration
        step(0, calibration.num_sequences)
        setup = ModelSetup(model=self.model)
        static = [scheme for scheme in self.schemes if scheme.needs_ranges()]
        return predict(
            self.model,
            calibration.ids,
            self.schemes,
            ranges={scheme.name: self._static_ranges(scheme, setup) for scheme in static},
            is_sink=self.sinks[:CALIBRATION],
            seed=self.seed,
            progress=step,
        )

    def worst_groups(self, *schemes: Scheme) -> dict[str, list[str]]:
        """By name, the few fused groups that hold most of the predicted damage of these schemes and fit the budget, the
        worst first."""
        first = schemes[0]
        groups, sizes = fused_groups(first.modules(self.model)), first.sizes(self.model)
        # A weight in 16 bits adds 16 less those of the scheme; of a scheme of inputs alone, a group counts its share.
        added = max(1.0, 16 - first.bits(self.model))
        allowed = self.budget / added * sum(sizes.values())
        return {name: groups[name] for name in self.prediction.worst_groups(groups, sizes, allowed, *schemes)}

    def worst_modules(self, *schemes: Scheme) -> tuple[str, ...]:
        """The modules of the worst groups, the worst group first."""
        return tuple(module for modules in self.worst_groups(*schemes).values() for module in modules)

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
        """`better_ranges_of` the model as it is."""
        return self.better_ranges_of(ModelSetup(model=self.model))

    def better_ranges_of(self, setup: ModelSetup) -> tuple[Ranges, Ranges]:
        """(the ranges of least squared error, the better ones), both the same where no others are better."""
        ids_NT, cache, _ = self._texts(self.calibration, setup)
        modules = [name for name in linear_layers(setup.model) if name not in setup.modules_in_16_bits]
        step = self.work("texts that set static scales")
        step(0, len(ids_NT))
        return better_ranges(setup.model, ids_NT, modules=modules, prefix=cache, seed=self.seed, progress=step)

    @cached_property
    def super_neurons(self) -> tuple[Neuron, ...]:
        """The neurons that write the massive dimensions of the model's sinks, strongest first; none without sinks."""
        findings = trace(self.loaded, self.calibration, effective_rank=False).findings
        if not findings.sinks:
            return ()
        writing = [as_neuron(neuron) for neuron in findings.super_neurons if neuron.role == "writes"]
        return tuple(dict.fromkeys(writing))  # one that writes several dimensions is listed once


def as_many(mask_NT: Tensor, generator: torch.Generator) -> Tensor:
    """[N, T] in each row as many random places as are marked, among the others that could be a sink."""
    free_NT = ~mask_NT & eligible_positions(mask_NT.shape[1])
    # The rank of each place in a random order of its row; 2 puts those that are not free behind all others.
    order_NT = torch.rand(mask_NT.shape, generator=generator).masked_fill(~free_NT, 2).argsort(1).argsort(1)
    return free_NT & (order_NT < mask_NT.sum(1, keepdim=True))
