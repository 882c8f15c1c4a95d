"""Interventions on who may attend to whom, by layer, head and sequence."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Literal, Unpack

from torch import Tensor

from sinkscope.arguments import check_choice
from sinkscope.interventions.base import (
    Acted,
    AttentionPlace,
    Intervention,
    Model,
    Place,
    as_indices,
    layers_with_attention,
    one_index,
)
from sinkscope.tracing.attention import read_attention
from sinkscope.tracing.attention_hook import attention_hook
from sinkscope.tracing.attention_rule import AttentionRule, ReadingRequest
from sinkscope.tracing.open_interventions import MaskChange, changing_mask


class ChangeMask(Intervention):
    """Some queries attend to other keys than the causal mask allows."""

    def __init__(
        self,
        model: Model,
        name: str,
        queries: int | Sequence[int],
        mode: Literal["only", "allow", "block"],
        keys: int | Sequence[int],
        *,
        layers: int | Sequence[int] | None = None,
        heads: int | Sequence[int] | None = None,
        sequences: int | Sequence[int] | None = None,
    ) -> None:
        self.name = name
        check_choice("mode", mode, ("only", "allow", "block"))
        rows, columns = as_indices(queries) or (), as_indices(keys) or ()
        acts = bool(columns) or mode == "only"
        place = Place(
            on="mask",
            layers=layers_with_attention(model, layers) if acts else (),
            positions=rows,
            heads=as_indices(heads),
            sequences=as_indices(sequences),
        )
        super().__init__(model, place)
        self.needs = (*rows, *columns)
        self.change = MaskChange(queries=rows, mode=mode, keys=columns, heads=place.heads, sequences=place.sequences)

    def opening(self, stack: contextlib.ExitStack, acted: Acted) -> None:
        if not self.place.layers:
            return  # so that not even the last bit of the logits changes
        # With no key to read this is attention and nothing else: the model may be called as its owner calls it.
        # A trace inside hooks attention by itself.
        stack.enter_context(attention_hook(self.anatomy, _attend, every_thread=True))
        attentions = {layer.index: layer.attention for layer in self.layers()}
        stack.enter_context(changing_mask(attentions, self.change, acted))


def mask_to_self(model: Model, position: int, **where: Unpack[AttentionPlace]) -> ChangeMask:
    """The token at `position` may attend only to itself; `where` takes layers, heads and sequences."""
    position = one_index(position)  # several positions would attend to one another
    return ChangeMask(model, "mask_to_self", position, "only", position, **where)


def edit_mask(
    model: Model,
    queries: int | Sequence[int],
    mode: Literal["only", "allow", "block"],
    keys: int | Sequence[int],
    **where: Unpack[AttentionPlace],
) -> ChangeMask:
    """The queries may attend to these keys `only`, to these too (`allow`, also later ones), or no more (`block`).

    `where` takes layers, heads and sequences.
    """
    return ChangeMask(model, "edit_mask", queries, mode, keys, **where)


def _attend(layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
    nothing = query.new_zeros(0).long()
    return read_attention(query, key, value, rule, ReadingRequest(keys=nothing))[0].output
