"""8-bit activations and weights for real, where torchao is installed, beside their emulation."""

from __future__ import annotations

import copy
from importlib import import_module
from importlib.util import find_spec

import numpy as np
from torch import nn

from sinkscope.audits.damage import Damage, damage, losses
from sinkscope.audits.remedies import Setting
from sinkscope.audits.schemes import SCHEMES, linear_layers

TORCHAO_SCHEMES = ("activations-8-dynamic", "weights-8-channel")
"""Torchao rounds activations and weights together, so both are emulated at once."""


def torchao_damages(setting: Setting) -> tuple[Damage, Damage] | None:
    """What both cost: (for real, emulated); None without torchao, or for a model whose linear layers it does not know
    (Conv1D of GPT-2)."""
    layers = linear_layers(setting.model)
    if find_spec("torchao") is None or not all(type(layer) is nn.Linear for layer in layers.values()):
        return None
    quantization, model = import_module("torchao.quantization"), copy.deepcopy(setting.model)
    scales = [quantization.PerTensor(), quantization.PerRow()]
    how = quantization.Int8DynamicActivationInt8WeightConfig(granularity=scales, set_inductor_config=False)
    quantization.quantize_(model, how, filter_fn=lambda part, name: name in layers)
    # One text at a time: its tensor is all that is read at once.
    real_NT = np.concatenate([losses(model, ids_T[None]) for ids_T in setting.held_out.ids])[
        :, len(setting.batch.leading_ids) :
    ]
    activations, weights = (SCHEMES[name] for name in TORCHAO_SCHEMES)
    with weights.on(setting.model):
        emulated_NT = setting.losses(activations)
    return damage(real_NT, setting.plain), damage(emulated_NT, setting.plain)
