"""A trained model is itself after quantisation and noise, and none of its own configuration's initialisations."""

import copy
import dataclasses

import pytest
import torch

from sinkscope import fingerprint, load
from sinkscope.models.initial import Configuration, draw

pytestmark = pytest.mark.real_weights


def changed(loaded, name, change):
    """A copy whose matrices went through `change`."""
    model = copy.deepcopy(loaded.model)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.copy_(change(weight))
    return dataclasses.replace(load(model), name=name)


def to_eight_bits(weight):
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    return (weight / scale).round() * scale


def test_smollm2_knows_itself_and_no_fresh_initialisation(smollm2_model):
    generator = torch.Generator().manual_seed(0)

    def with_noise(weight):
        return weight + 0.05 * weight.std() * torch.randn(weight.shape, generator=generator)

    suspects = [
        changed(smollm2_model, "8 bits", to_eight_bits),
        changed(smollm2_model, "noise", with_noise),
        draw(Configuration(name="smollm2", config=smollm2_model.model.config), 7, name="fresh"),
    ]
    result = fingerprint([smollm2_model, *suspects], num_sequences=64, length=16, fresh=1)
    assert [pair.verdict for pair in result.pairs] == ["same origin", "same origin", "different origin"]
    assert result.pairs[0].effect > result.pairs[1].effect > 0.5
    assert abs(result.pairs[2].z) < 4
