"""unplug(model, neurons): a copy of a model without some neurons, by default the super neurons of its sinks.

What a neuron writes into the residual stream is its output vector in the down projection; there it becomes zero.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch

from sinkscope.errors import InputError
from sinkscope.models.anatomy import Neuron, NeuronLike, anatomy_of, as_neuron, checked_neurons
from sinkscope.models.loaded import LoadedModel, Model, bare_model
from sinkscope.models.token_batches import TokenBatch
from sinkscope.tracing.trace import trace


@torch.no_grad()
def unplug(model: Model, neurons: Iterable[NeuronLike]) -> Any:
    """A copy of the model in which these neurons write nothing; it saves and loads as a plain model of its family."""
    unplugged = copy.deepcopy(bare_model(model))
    anatomy = anatomy_of(unplugged)
    for (layer, expert), indices in checked_neurons(anatomy, neurons).items():
        weight_EF = anatomy.layers[layer].group_weight(expert)
        weight_EF[:, list(indices)] = 0
        if not torch.equal(anatomy.layers[layer].group_weight(expert), weight_EF):
            raise InputError(
                f"The down projection of layer {layer} computes its weights, so they cannot be set. Take the neurons "
                "out with `ablate_neurons`."
            )
    return unplugged


def super_neurons(loaded: LoadedModel, batch: TokenBatch) -> tuple[Neuron, ...]:
    """The neurons that write the massive dimensions of a model's sinks, strongest first; none without sinks."""
    found = trace(loaded, batch, effective_rank=False).findings
    if not found.sinks:
        return ()
    writing = [neuron for neuron in found.super_neurons if neuron.role == "writes"]
    return tuple(dict.fromkeys(map(as_neuron, writing)))
