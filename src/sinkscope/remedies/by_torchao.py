"""One scheme for real, where torchao is installed: what its 8-bit weights cost, beside the emulation."""

from __future__ import annotations

import copy
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
from torch import Tensor, nn

from sinkscope.remedies.damage import Damage, damage, losses
from sinkscope.remedies.schemes import linear_layers

TORCHAO_SCHEME = "weights-8-channel"


def torchao_damage(model: Any, ids_NT: Tensor, plain_NT: np.ndarray) -> Damage | None:
    """The damage of torchao's int8 weights, one scale an output channel; None without torchao, or for a model whose
    linear layers it does not know (Conv1D of GPT-2)."""
    layers = linear_layers(model)
    if find_spec("torchao") is None or not all(type(layer) is nn.Linear for layer in layers.values()):
        return None
    quantization, real = import_module("torchao.quantization"), copy.deepcopy(model)
    quantization.quantize_(real, quantization.Int8WeightOnlyConfig(), filter_fn=lambda part, name: name in layers)
    return damage(losses(real, ids_NT), plain_NT)
