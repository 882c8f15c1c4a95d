"""The arms of the ladder, its sizes, and the model of one run.

Every arm is the package's decoder with another step between the value aggregation and the output projection:

| arm | o, heads [H, D] of one token |
| --- | --- |
| softmax | o |
| head_norm | o_h / RMS(o_h) * lambda_h + offset_h: the paper's, with a lambda and an offset for each head |
| all_heads_norm | o / RMS(o over all heads) * lambda_h + offset_h |
| scale | o * lambda_h + offset_h: the same parameters without a division |
| head_gate | o_h * sigmoid(w_h . x): one gate a head |

Axes: B batch, T position, H heads, D head size, C = H * D.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sinkscope.attention.variants import VARIANTS, AttentionShape, HeadGate, Rotation, Softmax
from sinkscope.pretrain.decoder import Attention, Decoder, SwiGLU, rotated
from sinkscope.pretrain.decoder_config import DecoderConfig

FIRST_LAMBDA = 0.25
LENGTH = 512


class Scale(Softmax):
    """o * lambda + offset, both by head."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        self.lambdas = nn.Parameter(torch.full((shape.num_heads, shape.head_size), FIRST_LAMBDA))
        self.offsets = nn.Parameter(torch.zeros(shape.num_heads, shape.head_size))

    def divided(self, o_BTHD: Tensor) -> Tensor:
        return o_BTHD

    def leave(self, o_BTHD: Tensor, x_BTE: Tensor, rotation: Rotation) -> Tensor:
        wide_BTHD = self.divided(o_BTHD.to(torch.promote_types(o_BTHD.dtype, torch.float32)))
        return (wide_BTHD * self.lambdas + self.offsets).to(o_BTHD.dtype).flatten(2)


class HeadNorm(Scale):
    """The paper's: each head is divided by its root mean square."""

    def divided(self, o_BTHD: Tensor) -> Tensor:
        return o_BTHD * torch.rsqrt(o_BTHD.square().mean(-1, keepdim=True) + self.shape.eps)


class AllHeadsNorm(Scale):
    """All heads of a token are divided by their common root mean square."""

    def divided(self, o_BTHD: Tensor) -> Tensor:
        return o_BTHD * torch.rsqrt(o_BTHD.square().mean((-2, -1), keepdim=True) + self.shape.eps)


ARMS: dict[str, type[Softmax]] = {
    "softmax": Softmax,
    "head_norm": HeadNorm,
    "all_heads_norm": AllHeadsNorm,
    "scale": Scale,
    "head_gate": HeadGate,
}

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
    "small": {"hidden_size": 256, "num_hidden_layers": 16, "num_attention_heads": 4, "intermediate_size": 704},
    "larger": {"hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8, "intermediate_size": 1408},
}


def build(arm: str, size: str, seed: int) -> Decoder:
    """The decoder of an arm at its start: matrices that write into the residual stream are zero."""
    shape = SIZES[size]
    config = DecoderConfig(
        vocab_size=4096,
        num_key_value_heads=shape["num_attention_heads"] // 2,
        max_position_embeddings=LENGTH,
        seed=seed,
        **shape,  # type: ignore[arg-type]
    )
    assert isinstance(VARIANTS, dict)
    VARIANTS["ladder"] = ARMS[arm]  # looked up by name while the model is built
    config.attention_variant = "ladder"
    model = Decoder(config)
    with torch.no_grad():
        for block in model.blocks:
            attention: Any = block.self_attn
            attention.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()  # type: ignore[union-attr, operator]
            if isinstance(attention.variant, Scale):  # the decoder sets what it does not know to 0
                attention.variant.lambdas.fill_(FIRST_LAMBDA)
    return model


def fuse(model: Decoder) -> None:
    """Makes one product of queries, keys and values, and one of gate and up; the numbers are the same."""
    for block in model.blocks:
        block.self_attn.forward = types.MethodType(_attention, block.self_attn)
        block.mlp.forward = types.MethodType(_feed_forward, block.mlp)


def _attention(self: Attention, hidden_BTE: Tensor, rotation: Rotation, *_: Any) -> tuple[Tensor, None]:
    matrices = [self.q_proj.weight, self.k_proj.weight, self.v_proj.weight]
    parts = functional.linear(hidden_BTE, torch.cat(matrices)).split([len(matrix) for matrix in matrices], -1)
    q, k, v = (part.unflatten(-1, (-1, self.head_size)) for part in parts)
    q, k, v = rotated(q, rotation).transpose(1, 2), rotated(k, rotation).transpose(1, 2), v.transpose(1, 2)
    o_BTHD = self.variant.attend(q, k, v, None)
    return self.o_proj(self.variant.leave(o_BTHD, hidden_BTE, rotation)), None


def _feed_forward(self: SwiGLU, x_BTE: Tensor) -> Tensor:
    gate, up = functional.linear(x_BTE, torch.cat([self.gate_proj.weight, self.up_proj.weight])).chunk(2, -1)
    return self.down_proj(functional.silu(gate) * up)
