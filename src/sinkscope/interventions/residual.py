"""Interventions on the residual stream as it leaves a block: chosen dimensions of a token set, moved or held, or its
norm held.

Axes: B sequences, T positions, E width, M chosen dimensions.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal, Unpack

import torch
from torch import Tensor

from sinkscope.arguments import check_choice
from sinkscope.errors import InputError
from sinkscope.interventions.base import (
    Acted,
    Indices,
    Intervention,
    Model,
    Place,
    ResidualPlace,
    TokenPlace,
    all_layers,
    as_indices,
    check_held,
    check_text,
    hook_on,
    indices,
)
from sinkscope.interventions.calibration import batch_of
from sinkscope.interventions.neurons import ClampNeurons
from sinkscope.models.anatomy import Anatomy, NeuronLike, anatomy_of, as_neurons
from sinkscope.models.loaded import bare_model
from sinkscope.models.token_batches import TokenBatch
from sinkscope.tracing.block_states import leaving
from sinkscope.tracing.open_interventions import check_indices
from sinkscope.tracing.receipt import check_reading
from sinkscope.tracing.replay import ConditionReading, read_condition


class ChangeResidual(Intervention):
    """New values for tokens of the residual stream after each block."""

    def __init__(
        self,
        model: Model,
        name: str,
        dimensions: Indices,
        *,
        layers: int | Sequence[int] | None = None,
        positions: int | Sequence[int] | None = None,
        sequences: int | Sequence[int] | None = None,
    ) -> None:
        self.name, self.dimensions = name, dimensions or ()
        super().__init__(
            model,
            Place(
                on="residual stream",
                layers=all_layers(model, layers),
                positions=as_indices(positions),
                sequences=as_indices(sequences),
                items=None if dimensions is None else frozenset(dimensions),
            ),
        )
        _check_dimensions(self.anatomy, self.dimensions)

    @abstractmethod
    def new_values(self, layer: int, hidden_BTE: Tensor) -> Tensor:
        """The new stream at every token; ignored where the intervention does not act."""

    def opening(self, stack: contextlib.ExitStack, acted: Acted) -> None:
        for layer in self.layers():
            hook_on(stack, layer.block, self._hook(layer.index, acted), after=True)

    def _hook(self, layer: int, acted: Acted):
        def hook(module, args, output):
            acted(layer)
            hidden_BTE = leaving(output)
            num_batch, length, _ = hidden_BTE.shape
            check_text(self.place, num_batch, length)
            device = hidden_BTE.device
            rows = torch.arange(num_batch, device=device)[indices(self.place.sequences, device)]
            columns = torch.arange(length, device=device)[indices(self.place.positions, device)]
            changed = hidden_BTE.clone()
            new_BTE = self.new_values(layer, hidden_BTE).to(changed.dtype)
            changed[rows[:, None], columns] = new_BTE[rows[:, None], columns]
            return (changed, *output[1:]) if isinstance(output, tuple) else changed

        return hook


class SetDimensions(ChangeResidual):
    """Dimensions at zero, at their mean over a calibration batch, or at the values of another position."""

    def __init__(
        self,
        model: Model,
        dimensions: Sequence[int],
        mode: str,
        *,
        source: int | None,
        calibration: TokenBatch | None,
        **where: Unpack[ResidualPlace],
    ) -> None:
        chosen = as_indices(dimensions) or ()
        super().__init__(model, "set_dimensions", chosen, **where)
        self.mode, self.source = mode, source
        if mode != "mean":
            self.needs = (*(self.place.positions or ()), *(() if source is None else (source,)))
        check_choice("mode", mode, ("zero", "mean", "transplant"))
        if mode == "mean" and calibration is None:
            raise InputError("`mode='mean'` needs a `calibration` batch.")
        if mode == "transplant" and source is None:
            raise InputError("`mode='transplant'` needs a `source` position.")
        self.mean_LTM: Tensor | None = None
        if mode == "mean" and calibration is not None:
            ids_BT = batch_of(model, calibration).ids
            reading = read_condition(self.anatomy, model, ids_BT, dimensions=chosen)
            self.mean_LTM = reading.dimensions_LBTM.mean(1)

    def new_values(self, layer: int, hidden_BTE: Tensor) -> Tensor:
        new_BTE = hidden_BTE.clone()
        chosen = list(self.dimensions)
        if self.mode == "zero":
            new_BTE[..., chosen] = 0
        elif self.mode == "mean":
            assert self.mean_LTM is not None
            mean_TM = self.mean_LTM[layer].to(new_BTE)
            if len(mean_TM) != new_BTE.shape[1]:
                raise InputError(
                    f"The mean is taken by position over texts of {len(mean_TM)} tokens, but this text has "
                    f"{new_BTE.shape[1]}. Calibrate on sequences as long as the text."
                )
            new_BTE[..., chosen] = mean_TM
        else:
            assert self.source is not None
            check_indices("position", (self.source,), new_BTE.shape[1])
            new_BTE[..., chosen] = hidden_BTE[:, self.source, None][..., chosen].expand_as(new_BTE[..., chosen])
        return new_BTE


class ClampDimensions(ChangeResidual):
    """Dimensions held at their values in a baseline reading of the same batch."""

    holds_a_batch = True

    def __init__(
        self, model: Model, baseline: ConditionReading, dimensions: Sequence[int], **where: Unpack[ResidualPlace]
    ) -> None:
        super().__init__(model, "clamp", tuple(dimensions), **where)
        self.held_LBTM = baseline.dimension_values(self.dimensions)

    def new_values(self, layer: int, hidden_BTE: Tensor) -> Tensor:
        check_held(self.held_LBTM[layer], hidden_BTE)
        new_BTE = hidden_BTE.clone()
        new_BTE[..., list(self.dimensions)] = self.held_LBTM[layer].to(new_BTE)
        return new_BTE


class ClampNorms(ChangeResidual):
    """The norm of tokens held at its baseline value; their direction is free."""

    holds_a_batch = True

    def __init__(self, model: Model, baseline: ConditionReading, **where: Unpack[ResidualPlace]) -> None:
        super().__init__(model, "clamp", None, **where)
        self.held_LBT = baseline.residual_norm_LBT

    def new_values(self, layer: int, hidden_BTE: Tensor) -> Tensor:
        check_held(self.held_LBT[layer], hidden_BTE)
        norm_BT = torch.linalg.vector_norm(hidden_BTE.float(), dim=-1)
        scale_BT = (self.held_LBT[layer].to(norm_BT) / norm_BT).masked_fill(norm_BT == 0, 0)  # zeros have no direction
        return hidden_BTE * scale_BT[..., None].to(hidden_BTE.dtype)


def set_dimensions(
    model: Model,
    dimensions: Sequence[int],
    mode: Literal["zero", "mean", "transplant"] = "zero",
    *,
    source: int | None = None,
    calibration: TokenBatch | None = None,
    **where: Unpack[ResidualPlace],
) -> SetDimensions:
    """Residual dimensions at zero, at their mean, or at another position's values, after each block.

    `where` takes layers, positions and sequences.
    """
    return SetDimensions(model, dimensions, mode, source=source, calibration=calibration, **where)


def clamp(
    model: Model,
    baseline: TokenBatch | Tensor | ConditionReading,
    *,
    neurons: Sequence[NeuronLike] = (),
    dimensions: Sequence[int] = (),
    norms: bool = False,
    **where: Unpack[TokenPlace],
) -> contextlib.AbstractContextManager:
    """Neurons, dimensions or norms held at their baseline values on a batch, while other interventions act.

    `baseline` is the batch that the model will be run on, or a reading of it. `where` takes positions and sequences.
    """
    neurons = as_neurons(neurons)
    if not (neurons or dimensions or norms):
        raise InputError("A clamp needs something to hold. Give `neurons`, `dimensions` or `norms`.")
    if not isinstance(baseline, ConditionReading):
        owner = bare_model(model)
        batch = batch_of(model, baseline)
        anatomy = anatomy_of(owner)
        _check_dimensions(anatomy, dimensions)
        check_reading(owner, anatomy)
        baseline = read_condition(anatomy, owner, batch.ids, neurons=tuple(neurons), dimensions=tuple(dimensions))
    clamps: list[Intervention] = []
    if neurons:
        clamps.append(ClampNeurons(model, neurons, baseline, **where))
    if dimensions:
        clamps.append(ClampDimensions(model, baseline, dimensions, **where))
    if norms:
        clamps.append(ClampNorms(model, baseline, **where))
    return clamps[0] if len(clamps) == 1 else Clamp(clamps)


class Clamp(contextlib.ExitStack):
    """Several things held at once."""

    def __init__(self, clamps: list[Intervention]) -> None:
        super().__init__()
        self.clamps = clamps
        self.first_layer = min((iv.first_layer for iv in clamps if iv.first_layer is not None), default=None)

    def __repr__(self) -> str:
        return "\n".join(map(repr, self.clamps))

    def __enter__(self):
        with contextlib.ExitStack() as stack:  # where the second is refused, the first is undone
            for intervention in self.clamps:
                stack.enter_context(intervention)
            self.push(stack.pop_all())
        return super().__enter__()


def _check_dimensions(anatomy: Anatomy, dimensions: Sequence[int]) -> None:
    if wrong := [dimension for dimension in dimensions if not 0 <= dimension < anatomy.width]:
        raise InputError(
            f"There is no dimension {', '.join(map(str, wrong))}. Choose from 0 to {anatomy.width - 1}; 'sinkscope "
            "trace' lists the massive ones."
        )
