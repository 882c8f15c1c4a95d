"""unplug(model, units): a copy of a model without some feed-forward units, by default the super neurons of its sinks.

What a unit writes into the residual stream is its output vector in the down projection; there it becomes zero.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch

from sinkscope.errors import InputError
from sinkscope.models.anatomy import Unit, UnitLike, anatomy_of, as_unit, checked_units
from sinkscope.models.loaded import LoadedModel, Model, bare_model
from sinkscope.models.token_batches import TokenBatch
from sinkscope.tracing.trace import trace


@torch.no_grad()
def unplug(model: Model, units: Iterable[UnitLike]) -> Any:
    """A copy of the model in which these units write nothing; it saves and loads as a plain model of its family."""
    unplugged = copy.deepcopy(bare_model(model))
    anatomy = anatomy_of(unplugged)
    for (layer, expert), neurons in checked_units(anatomy, units).items():
        weight_EF = anatomy.layers[layer].group_weight(expert)
        weight_EF[:, list(neurons)] = 0
        if not torch.equal(anatomy.layers[layer].group_weight(expert), weight_EF):
            raise InputError(
                f"The down projection of layer {layer} computes its weights, so they cannot be set. Take the neurons "
                "out with `ablate_neurons`."
            )
    return unplugged


def super_neurons(loaded: LoadedModel, batch: TokenBatch) -> tuple[Unit, ...]:
    """The units that write the massive dimensions of a model's sinks, strongest first; none without sinks."""
    found = trace(loaded, batch, effective_rank=False).findings
    if not found.sinks:
        return ()
    writing = [neuron for neuron in found.super_neurons if neuron.role == "writes"]
    return tuple(dict.fromkeys(map(as_unit, writing)))
