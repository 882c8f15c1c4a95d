"""Edits of who may attend to whom, by layer, head and sequence."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from sinkscope.capture.attention_readers import read_attention
from sinkscope.capture.attention_tap import attention_tap
from sinkscope.capture.edits import RowEdit, editing_rows
from sinkscope.capture.tiled_attention import AttentionRule, ReadingRequest
from sinkscope.interventions.intervention import Indices, Intervention, Place, all_layers, as_indices


class MaskEdit(Intervention):
    """Some queries see other keys than the causal mask lets them see."""

    def __init__(
        self,
        model: Any,
        name: str,
        queries: tuple[int, ...],
        mode: Literal["only", "allow", "block"],
        keys: tuple[int, ...],
        *,
        layers: tuple[int, ...],
        heads: Indices,
        sequences: Indices,
    ) -> None:
        self.name = name
        super().__init__(model, Place(on="mask", layers=layers, positions=queries, heads=heads, sequences=sequences))
        self.edit = RowEdit(queries=queries, mode=mode, keys=keys, heads=heads, sequences=sequences)

    def opening(self, stack: contextlib.ExitStack) -> None:
        # With no key to read this is attention and nothing else: the model may be called as its owner calls it.
        # A trace inside opens a tap of its own.
        stack.enter_context(attention_tap(self.anatomy, _attend))
        stack.enter_context(editing_rows({id(layer.attention): self.edit for layer in self.layers()}))


def mask_to_self(
    model: Any,
    position: int,
    *,
    layers: Sequence[int] | None = None,
    heads: int | Sequence[int] | None = None,
    sequences: int | Sequence[int] | None = None,
) -> MaskEdit:
    """The token at `position` may attend only to itself."""
    return MaskEdit(
        model,
        "mask_to_self",
        (position,),
        "only",
        (position,),
        layers=all_layers(model, layers),
        heads=as_indices(heads),
        sequences=as_indices(sequences),
    )


def edit_mask(
    model: Any,
    queries: int | Sequence[int],
    mode: Literal["only", "allow", "block"],
    keys: int | Sequence[int],
    *,
    layers: Sequence[int] | None = None,
    heads: int | Sequence[int] | None = None,
    sequences: int | Sequence[int] | None = None,
) -> MaskEdit:
    """The queries may attend to these keys `only`, to these too (`allow`, also later ones), or no more (`block`)."""
    return MaskEdit(
        model,
        "edit_mask",
        as_indices(queries) or (),
        mode,
        as_indices(keys) or (),
        layers=all_layers(model, layers),
        heads=as_indices(heads),
        sequences=as_indices(sequences),
    )


def _attend(layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
    nothing = query.new_zeros(0).long()
    return read_attention(query, key, value, rule, ReadingRequest(keys=nothing))[0].output
