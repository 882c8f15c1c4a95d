"""Interventions on the value aggregation o of one position, before the output projection: variance amplification and
its controls.

The formulas for the new o are in `formulas`. The mean that they need is taken layer by layer with the intervention
active below and the other interventions on, then frozen: a result depends neither on chunking nor on the sequences it
is measured on. `matching` brings moments to a level. Axes: B sequences, T positions, H heads, D head size, C = H * D
channels.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from sinkscope.errors import InputError
from sinkscope.interventions.base import (
    Acted,
    AggregationPlace,
    BatchShape,
    Intervention,
    Model,
    Place,
    active,
    as_indices,
    hook_on,
    layers_with_attention,
    one_index,
    together,
)
from sinkscope.interventions.calibration import MIN_CALIBRATION, calibration_of
from sinkscope.interventions.formulas import FORMULAS, LATER, OF_DEVIATION, LayerCalibration
from sinkscope.interventions.neurons import ChangeNeurons
from sinkscope.models.anatomy import Anatomy, Layer, anatomy_of, input_device
from sinkscope.models.loaded import bare_model
from sinkscope.models.token_batches import TokenBatch
from sinkscope.tracing.feed_forward_cache import FeedForwardCache
from sinkscope.tracing.layer_call import wide
from sinkscope.tracing.open_interventions import depth, suspend
from sinkscope.tracing.recorder import ending_after
from sinkscope.tracing.single_reader import evaluation_mode

AGGREGATION, BEFORE_NORM = "aggregation", "aggregation before its norm"
"""What is acted on: what enters the output projection, or the norm before it."""

AggregationHook = Callable[[Tensor, slice | Tensor], Tensor | None]
"""(aggregation [B, T, C], the channels acted on) -> the new aggregation; None leaves it as it is."""


class ChangeAggregation(Intervention):
    """One formula on the aggregation of one position, calibrated with whatever else is on."""

    def __init__(
        self,
        model: Model,
        formula: str,
        position: int,
        factor: float = 1.0,
        *,
        calibration: TokenBatch | Tensor | None = None,
        layers: int | Sequence[int] | None = None,
        heads: int | Sequence[int] | None = None,
        sequences: int | Sequence[int] | None = None,
        before_norm: bool = False,
    ) -> None:
        """`before_norm`: acts on what enters the norm on the aggregation, in models that have one. Otherwise on what
        enters the output projection, which every model has."""
        position = one_index(position)
        self.name, self.factor, self.position, self.needs = formula, factor, position, (position,)
        if not math.isfinite(factor):
            raise InputError(f"The factor must be a finite number, such as 4, not {factor}.")
        calibration, self.calibrated_on = calibration_of(model, calibration, position)
        if calibration.num_sequences < MIN_CALIBRATION:
            raise InputError(
                f"The calibration batch has {calibration.num_sequences} sequences; at least {MIN_CALIBRATION} are "
                "needed. A mean over fewer is mostly their noise."
            )
        super().__init__(
            model,
            Place(
                on=BEFORE_NORM if before_norm else AGGREGATION,
                layers=layers_with_attention(model, layers),
                positions=(position,),
                heads=as_indices(heads),
                sequences=as_indices(sequences),
            ),
        )
        if before_norm and (without := [layer.index for layer in self.layers() if layer.aggregation_norm is None]):
            raise InputError(
                f"Layer {without[0]} has no norm on the value aggregation, so nothing can act before it. Leave "
                "`before_norm` out."
            )
        self._model, self._batch = bare_model(model), calibration
        self._calibrations: dict[tuple[Intervention, ...], dict[int, LayerCalibration]] = {}
        """By the interventions that were on meanwhile."""
        self.calibrated: dict[int, LayerCalibration] = {}
        """By layer, as of now."""
        self.prepare()

    def prepare(self) -> None:
        """Works out what the first calibration needs."""

    def formula(self, old_BC: Tensor, layer: int) -> Tensor:
        """What the aggregation at the position becomes."""
        return FORMULAS[self.name](old_BC, self.calibrated[layer], self.factor, layer)

    @property
    def by_sequence(self) -> bool:
        return super().by_sequence or self.name in ("swap_deviation", "random_direction")

    def calibrate(self) -> None:
        # An intervention on certain sequences of the batch has no counterpart among the calibration's sequences.
        others = tuple(
            other
            for other in active(self.anatomy)
            if other is not self and not other.holds_a_batch and other.place.sequences is None
        )
        self._calibrate_with(self._reaching(others))

    def _reaching(self, others: tuple[Intervention, ...]) -> tuple[Intervention, ...]:
        """Those that can change the position. In a causal model one that acts on later positions alone cannot, unless a
        mask lets earlier positions attend to them."""
        if self.name in LATER:
            return others
        last, num_reaching = self.position, -1
        reaching: tuple[Intervention, ...] = ()
        while len(reaching) > num_reaching:  # each round may show the position to later ones
            num_reaching = len(reaching)
            reaching = tuple(other for other in others if other.first_position <= last)
            for other in reaching:
                last = max(last, *(other.needs or (last,)))
        return reaching

    def _calibrate_with(self, others: tuple[Intervention, ...]) -> None:
        if others not in self._calibrations:
            self.calibrated = {}
            run_with_aggregations(
                self._model,
                self._batch,
                self.place,
                others,
                lambda layer: self._hook(layer, lambda index: None, calibrating=True),
                whole=self.name in LATER,
            )
            self._calibrations[others] = self.calibrated  # stored once it is whole: a level may have been refused
        self.calibrated = self._calibrations[others]

    def opening(self, stack: contextlib.ExitStack, acted: Acted) -> None:
        # While another intervention is calibrated this one is calibrated again, layer by layer on the same pass. Its
        # earlier means were taken with fewer interventions on, and the result would depend on the order of entering.
        if inside := depth() > 0:
            stack.callback(setattr, self, "calibrated", self.calibrated)
            self.calibrated = {}
        for layer in self.layers():
            hook_aggregation(self.anatomy, layer, self.place, stack, self._hook(layer, acted, calibrating=inside))

    def _hook(self, layer: Layer, acted: Acted, *, calibrating: bool) -> AggregationHook:
        def hook(aggregation_BTC: Tensor, chosen: slice | Tensor) -> Tensor:
            acted(layer.index)
            if calibrating:
                seen_BTC = aggregation_BTC[..., chosen]
                self.calibrated[layer.index] = LayerCalibration.of(seen_BTC, self.position, LATER.get(self.name))
            old_BC = wide(aggregation_BTC[:, self.position, chosen])
            new_BC = self.formula(old_BC, layer.index)
            if not calibrating and self.place.sequences is not None:
                acts = torch.isin(torch.arange(len(old_BC)), torch.tensor(self.place.sequences)).to(old_BC.device)
                new_BC = torch.where(acts[:, None], new_BC, old_BC)
            changed = aggregation_BTC.clone()
            changed[:, self.position, chosen] = new_BC.to(changed.dtype)
            return changed

        return hook

    def check_deviation(self) -> None:
        """Refuses where no sequence differs from another; that is known once the intervention is on."""
        if self.name in OF_DEVIATION and self.calibrated and not any(seen.varies for seen in self.calibrated.values()):
            raise no_variance(f"at position {self.position}")

    def tensors(self) -> dict[str, Tensor]:
        """The frozen means, to be saved with a result: where mu comes from changes the outcome."""
        if not self._calibrations:  # it was never on
            self._calibrate_with(())
        side = ".before_norm" if self.place.on == BEFORE_NORM else ""
        return {
            f"{self.name}{side}.position_{self.position}.factor_{self.factor:g}.layer_{layer}": calibration.mean_C.cpu()
            for layer, calibration in self.calibrated.items()
        }


class SetAggregation(Intervention):
    """The aggregation of one position at given values [C] by layer, the same in every sequence."""

    name = "set_aggregation"

    def __init__(self, model: Model, position: int, values: Mapping[int, Tensor]) -> None:
        super().__init__(model, Place(on=AGGREGATION, layers=tuple(values), positions=(one_index(position),)))
        self.position, self.values, self.needs = position, values, (position,)

    def opening(self, stack: contextlib.ExitStack, acted: Acted) -> None:
        for layer in self.layers():
            hook_aggregation(self.anatomy, layer, self.place, stack, self._hook(layer, acted))

    def _hook(self, layer: Layer, acted: Acted) -> AggregationHook:
        def hook(aggregation_BTC: Tensor, chosen: slice | Tensor) -> Tensor:
            acted(layer.index)
            changed = aggregation_BTC.clone()
            changed[:, self.position] = self.values[layer.index].to(changed)
            return changed

        return hook


def mean_aggregations(
    model: torch.nn.Module, batch: TokenBatch, place: Place, others: Iterable[Intervention]
) -> dict[int, Tensor]:
    """By layer [C], the mean over a batch of the aggregation at a place's position, with `others` on and no more."""
    means: dict[int, Tensor] = {}

    def reading(layer: Layer) -> AggregationHook:
        def read(aggregation_BTC: Tensor, chosen: slice | Tensor) -> None:
            assert place.positions is not None
            means[layer.index] = wide(aggregation_BTC[:, place.positions[0]]).mean(0)

        return read

    run_with_aggregations(model, batch, place, others, reading)
    return means


def no_variance(where: str) -> InputError:
    return InputError(
        f"All sequences have the same state {where}, so there is no variance to scale. Leave out the "
        "beginning-of-sequence token, or choose another position."
    )


def hook_aggregation(
    anatomy: Anatomy, layer: Layer, place: Place, stack: contextlib.ExitStack, hook: AggregationHook
) -> None:
    """Until the stack is closed, calls `hook` with the layer's aggregation and puts its result in its place."""
    shape, before_norm = BatchShape(layer, stack), place.on == BEFORE_NORM

    def before_projection(module, args):
        aggregation_BTC = shape.unflatten(args[0].flatten(-2) if before_norm else args[0], place)  # a norm gets heads
        changed = hook(aggregation_BTC, _channels(aggregation_BTC, anatomy.num_heads, place))
        return None if changed is None else (changed.reshape(args[0].shape), *args[1:])

    entered = layer.aggregation_norm if before_norm else layer.output_projection
    assert entered is not None
    hook_on(stack, entered, before_projection)


def _channels(aggregation_BTC: Tensor, num_heads: int, place: Place) -> slice | Tensor:
    """The channels of the heads that are acted on."""
    if place.heads is None:
        return slice(None)
    channels_HD = torch.arange(aggregation_BTC.shape[-1], device=aggregation_BTC.device)
    return channels_HD.view(num_heads, -1)[list(place.heads)].flatten()


def run_with_aggregations(
    model: torch.nn.Module,
    batch: TokenBatch,
    place: Place,
    others: Iterable[Intervention],
    hook_of: Callable[[Layer], AggregationHook],
    *,
    whole: bool = False,
) -> None:
    """One pass of a batch as far as the last layer of a place, with `others` on and no more, and a hook in each of its
    layers. `whole`: the hook reads positions after the place's too."""
    others = tuple(others)
    if not place.layers:
        return
    whole = whole or any(other.name in LATER for other in others)
    # In a causal model later tokens change nothing at a position, so tokens behind the last one needed are left out.
    needed = [place.positions, *(other.needs for other in others)]
    num_read = batch.length
    if not whole and None not in needed:
        last = 1
        for positions in needed:
            last = max(last, *(positions or (last,)))
        num_read = last + 1
    anatomy = anatomy_of(model)
    with suspend(), together(others), contextlib.ExitStack() as stack:
        layers = [anatomy.layers[index] for index in place.layers]
        for layer in layers:
            hook_aggregation(anatomy, layer, place, stack, hook_of(layer))
        if isinstance(batch, CachedBatch) and not any(isinstance(other, ChangeNeurons) for other in others):
            first = min((*(place.positions or (0,)), *(other.first_position for other in others)))
            stack.enter_context(batch.cache.used_before(first))
        stack.enter_context(torch.no_grad())
        stack.enter_context(evaluation_mode(model))
        with ending_after(layers[-1].output_projection):
            anatomy.decoder(input_ids=batch.ids[:, :num_read].to(input_device(anatomy)), use_cache=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class CachedBatch(TokenBatch):
    """A batch that many calibrations share, with what the baseline's feed-forwards write for it."""

    cache: FeedForwardCache


def cached_batch(model: torch.nn.Module, batch: TokenBatch, layers: Sequence[int]) -> CachedBatch:
    """For calibrations in these layers. To be made again whenever the model's weights change."""
    cache = FeedForwardCache(anatomy_of(model).layers[: max(layers)])
    place = Place(on=AGGREGATION, layers=tuple(layers))
    with cache.filling():
        run_with_aggregations(model, batch, place, (), lambda layer: lambda aggregation, chosen: None, whole=True)
    return CachedBatch(**vars(batch), cache=cache)


def amplify_variance(
    model: Model,
    position: int,
    factor: float,
    *,
    calibration: TokenBatch | Tensor | None = None,
    **where: Unpack[AggregationPlace],
) -> ChangeAggregation:
    """The deviation of the aggregation at `position` from its mean is multiplied by `factor`.

    `where` takes layers, heads and sequences, all of them by default, and before_norm. Without a calibration, one of
    random tokens is drawn.
    """
    return ChangeAggregation(model, "amplify_variance", position, factor, calibration=calibration, **where)


def scale_norm(
    model: Model,
    position: int,
    factor: float,
    *,
    calibration: TokenBatch | Tensor | None = None,
    **where: Unpack[AggregationPlace],
) -> ChangeAggregation:
    """The aggregation at `position` is multiplied by `factor`: the control that makes no sink.

    `where` takes layers, heads and sequences, all of them by default, and before_norm. Without a calibration, one of
    random tokens is drawn.
    """
    return ChangeAggregation(model, "scale_norm", position, factor, calibration=calibration, **where)


def shift_mean(
    model: Model,
    position: int,
    factor: float,
    *,
    calibration: TokenBatch | Tensor | None = None,
    **where: Unpack[AggregationPlace],
) -> ChangeAggregation:
    """The mean is added 1 - `factor` times: what amplification does beside scaling the norm.

    `where` takes layers, heads and sequences, all of them by default, and before_norm. Without a calibration, one of
    random tokens is drawn.
    """
    return ChangeAggregation(model, "shift_mean", position, factor, calibration=calibration, **where)


def swap_deviation(
    model: Model,
    position: int,
    factor: float,
    *,
    calibration: TokenBatch | Tensor | None = None,
    **where: Unpack[AggregationPlace],
) -> ChangeAggregation:
    """As amplification, with another sequence's deviation.

    `where` takes layers, heads and sequences, all of them by default, and before_norm. Without a calibration, one of
    random tokens is drawn.
    """
    return ChangeAggregation(model, "swap_deviation", position, factor, calibration=calibration, **where)


def random_direction(
    model: Model,
    position: int,
    factor: float,
    *,
    calibration: TokenBatch | Tensor | None = None,
    **where: Unpack[AggregationPlace],
) -> ChangeAggregation:
    """As amplification, along a random direction of equal norm.

    `where` takes layers, heads and sequences, all of them by default, and before_norm. Without a calibration, one of
    random tokens is drawn.
    """
    return ChangeAggregation(model, "random_direction", position, factor, calibration=calibration, **where)


def equalise_variance(
    model: Model, position: int, *, calibration: TokenBatch | Tensor | None = None, **where: Unpack[AggregationPlace]
) -> ChangeAggregation:
    """The variance at `position` is brought down to that of the later half of positions.

    `where` takes layers, heads and sequences, all of them by default, and before_norm. Without a calibration, one of
    random tokens is drawn.
    """
    return ChangeAggregation(model, "equalise_variance", position, calibration=calibration, **where)
