"""The rows of names in examples/head_norm_in_your_model.py, on small modules of the same shape."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from head_norm_in_your_model import NANOCHAT, TORCHTITAN, put_norms, take_out_of_muon, with_norms_apart

HEADS, WIDTH = 4, 32


def holding(**parts):
    module = nn.Module()
    for name, part in parts.items():
        module.add_module(name, part)
    return module


def linear():
    return nn.Linear(WIDTH, WIDTH)


def nanochat():
    blocks = [holding(attn=holding(c_proj=linear()), mlp=holding(c_proj=linear())) for _ in range(2)]
    model = holding(transformer=nn.ModuleDict({"h": nn.ModuleList(blocks)}))
    return model, NANOCHAT, [part.attn.c_proj for part in model.transformer["h"]]


def torchtitan():
    blocks = [holding(attention=holding(wo=linear()), feed_forward=holding(w2=linear())) for _ in range(2)]
    model = holding(layers=nn.ModuleDict({str(number): part for number, part in enumerate(blocks)}))
    return model, TORCHTITAN, [part.attention.wo for part in model.layers.values()]


@pytest.mark.parametrize("make", [nanochat, torchtitan])
def test_the_projection_reads_normed_heads_and_muon_gets_no_lambda(make):
    model, family, projections = make()
    matrices = list(model.parameters())
    heads = torch.randn(3, 5, HEADS, WIDTH // HEADS, dtype=torch.float64)
    expected = 0.25 * heads / (heads.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    norms = put_norms(model, family, num_heads=HEADS, width=WIDTH)
    for projection in projections:
        weight, bias = projection.weight.double(), projection.bias.double()
        given = projection(heads.flatten(-2).float()).double()
        torch.testing.assert_close(given, expected.flatten(-2) @ weight.T + bias, rtol=1e-5, atol=1e-5)
        assert (given - heads.flatten(-2) @ weight.T - bias).abs().max() > 0.1  # the control
    optimiser = torch.optim.SGD([{"params": [p], "kind": "muon"} for p in model.parameters()], lr=0.1)
    take_out_of_muon(optimiser, norms, kind="adamw")
    in_muon = [p for group in optimiser.param_groups if group["kind"] == "muon" for p in group["params"]]
    assert set(map(id, in_muon)) == set(map(id, matrices))
    rest, apart = with_norms_apart(model, norms)
    assert set(map(id, rest["params"])) == set(map(id, matrices))
    assert len(apart["params"]) == 4
