"""8-bit activations and weights with torchao's own kernels, where it is installed, beside their emulation."""

from __future__ import annotations

import copy
from importlib import import_module
from importlib.util import find_spec

import numpy as np
from torch import nn

from sinkscope.audits.damage import Damage, damage, losses
from sinkscope.audits.evaluation import Evaluation
from sinkscope.audits.schemes import SCHEMES, linear_layers

TORCHAO_SCHEMES = ("activations-8-dynamic", "weights-8-channel")
"""Torchao rounds activations and weights together, so both are emulated at once."""


def torchao_damages(evaluation: Evaluation) -> tuple[Damage, Damage] | None:
    """What both schemes cost together: (with torchao's kernels, emulated).

    None without torchao, and for a model with linear layers that it does not know, such as Conv1D of GPT-2.
    """
    layers = linear_layers(evaluation.model)
    if find_spec("torchao") is None or not all(type(layer) is nn.Linear for layer in layers.values()):
        return None
    quantization, model = import_module("torchao.quantization"), copy.deepcopy(evaluation.model)
    scales = [quantization.PerTensor(), quantization.PerRow()]
    how = quantization.Int8DynamicActivationInt8WeightConfig(granularity=scales, set_inductor_config=False)
    quantization.quantize_(model, how, filter_fn=lambda part, name: name in layers)
    # One text at a time: a dynamic scale is shared by all that a pass reads, and it must be one text's.
    real_NT = np.concatenate([losses(model, ids_T[None]) for ids_T in evaluation.held_out.ids])
    real_NT = real_NT[:, len(evaluation.batch.leading_ids) :]
    activations, weights = (SCHEMES[name] for name in TORCHAO_SCHEMES)
    with weights.on(evaluation.model):
        emulated_NT = evaluation.losses(activations)
    return damage(real_NT, evaluation.baseline), damage(emulated_NT, evaluation.baseline)
