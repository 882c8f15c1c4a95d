"""How large position 0's variance is before any training, in models of the same architecture with random weights.

Averaging alone gives position 0 more variance than later positions. So the ratio in a trained model says little without
that of models drawn afresh from its configuration.

Axes: N models, L early layers, B sequences, S
sides of a norm on the aggregation, T positions.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sinkscope.errors import InputError
from sinkscope.measures.value_variance import squared_deviation
from sinkscope.models.anatomy import anatomy_of, input_device
from sinkscope.models.checkpoint_checks import HEAD_NORM
from sinkscope.models.initial import Configuration, draw
from sinkscope.models.insert_head_norm import insert_head_norm
from sinkscope.models.loaded import LoadedModel
from sinkscope.tracing.layer_call import LayerCall
from sinkscope.tracing.observables import HookPoint, Observable
from sinkscope.tracing.recorder import Recorder
from sinkscope.tracing.reducers import Rows

SEEDS = (0, 1, 2)
SCALED_BY_DEPTH = ("gpt2", "sinkscope_decoder")
"""Model types whose initial weights depend on the number of layers: they are drawn whole."""


def fresh_deviation(loaded: LoadedModel, ids_BT: Tensor, num_layers: int) -> np.ndarray | None:
    """[N, L, B, S, T] squared deviation of the aggregation, whose mean over sequences is the variance, in models drawn
    afresh, on the same tokens; None where this machine cannot hold one."""
    config = _shortened(loaded.model.config, num_layers)
    configuration = Configuration(name=loaded.name, config=config, trust_remote_code=loaded.trust_remote_code)
    device = str(input_device(anatomy_of(loaded.model)))
    deviations = []
    for seed in SEEDS:
        try:
            model = draw(configuration, seed, device=device).model
        except InputError:  # its only reason here: too large
            return None
        if (options := getattr(config, HEAD_NORM, None)) is not None:
            insert_head_norm(model, **options)
        deviations.append(_deviation(model, ids_BT, range(num_layers)))
        del model
    return np.stack(deviations)


def _shortened(config: Any, num_layers: int) -> Any:
    """The configuration of the first layers alone: later ones are not read."""
    short = copy.deepcopy(config)
    if config.model_type in SCALED_BY_DEPTH:
        return short
    text = short.get_text_config()  # itself, but for models of images and text
    for name, value in text.to_dict().items():
        if isinstance(value, list) and len(value) == text.num_hidden_layers:  # what each layer is
            setattr(text, name, value[:num_layers])
    text.num_hidden_layers = num_layers
    return short


def _deviation(model: Any, ids_BT: Tensor, layers: range) -> np.ndarray:
    anatomy, name = anatomy_of(model), "squared_deviation"
    observable = Observable(
        name=name, hook_point=HookPoint.AGGREGATION, value=_squared_deviation, reducer=Rows(), layers=layers
    )
    recording = Recorder(anatomy, [observable]).read(model, ids_BT)
    return np.stack([rows.double().cpu().numpy() for rows in recording[name].values()])


def _squared_deviation(call: LayerCall) -> Tensor:
    """[B, S, T] of the aggregation, on each side of its norm."""
    return torch.stack([squared_deviation(side) for side in call.sides], 1)
