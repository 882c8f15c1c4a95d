"""Attention variants: softmax attention with one of its steps changed. A new variant is one class and its entry in
VARIANTS.

The steps, in order: `prepare` changes queries, keys and values before their rotation; `attend` computes the weighted
sum of values; `leave` changes this value aggregation before the output projection. `attend_plain` is `attend` with the
T x T weights written out: the definition, in float64 too, against which the fast `attend` is tested.
Axes: B batch, T query position, S key position, H query heads, K key-value heads, D head size, E width, C = H * D.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sinkscope.arguments import check_choice
from sinkscope.attention.head_norm import EqualisedFirst, HeadRMSNorm, HeadScale
from sinkscope.attention.sink_attention import can_fuse_sink, sink_attention
from sinkscope.errors import InputError
from sinkscope.kernels.head_rms_norm import head_rms_norm_path

SIGMOID_QUERIES = 256
"""Queries whose sigmoid attention is computed at once."""

Rotation = tuple[Tensor, Tensor]
"""cos and sin [.., T, D / 2] of the rotary angles."""


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """The numbers of one attention layer."""

    width: int
    num_heads: int
    num_key_value_heads: int
    head_size: int
    length: int
    """Positions that the model is made for."""
    eps: float


class RMSNorm(nn.Module):
    """x / RMS(x) * gain over the last axis, in float32 or wider and back, whatever autocast does."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


class Softmax(nn.Module):
    """a_ts = exp(q_t . k_s / sqrt(D)) / sum over visible keys: the baseline, whose steps the others override."""

    whole_batch = False
    """Whether training must see all sequences of a batch in one pass."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__()
        self.shape = shape
        self.scaling = shape.head_size**-0.5

    def prepare(self, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values before their rotation."""
        return q_BTHD, k_BTKD, v_BTKD

    def leave(self, o_BTHD: Tensor, x_BTE: Tensor, rotation: Rotation) -> Tensor:
        """[B, T, C] what the output projection reads; x is what attention itself read, the rotation its positions."""
        return o_BTHD.flatten(2)

    def arguments(self, q_BHTD: Tensor) -> dict[str, Any]:
        """What a function of the attention registry must know beside queries, keys and values, so that a trace reads
        the variant's own rule."""
        return {}

    def weights(self, scores_BHTS: Tensor) -> Tensor:
        """[B, H, T, S] attention weights, from scores that are the lowest number at hidden keys. The definition."""
        return scores_BHTS.softmax(-1)

    def attend_plain(
        self, q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(value aggregation [B, T, H, D], attention [B, H, T, S]) with the weights written out."""
        k_BHSD, v_BHSD = (_repeated(x, q_BHTD.shape[1]) for x in (k_BKSD, v_BKSD))
        scores_BHTS = (q_BHTD @ k_BHSD.transpose(2, 3)).to(torch.promote_types(q_BHTD.dtype, torch.float32))
        hidden = ~_visible(q_BHTD, k_BKSD, mask)
        # Not -inf: a row of padding, which sees nothing, would be NaN and spread to the rows that are read.
        scores_BHTS = (scores_BHTS * self.scaling).masked_fill(hidden, torch.finfo(scores_BHTS.dtype).min)
        a_BHTS = self.weights(scores_BHTS).to(q_BHTD.dtype)
        return (a_BHTS @ v_BHSD).transpose(1, 2), a_BHTS

    def attend(self, q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask: Tensor | None) -> Tensor:
        """[B, T, H, D] the value aggregation, without holding the attention; no mask means causal."""
        o_BHTD = functional.scaled_dot_product_attention(
            q_BHTD,
            k_BKSD,
            v_BKSD,
            attn_mask=mask,
            is_causal=mask is None and q_BHTD.shape[2] > 1,
            enable_gqa=k_BKSD.shape[1] != q_BHTD.shape[1],
        )
        return o_BHTD.transpose(1, 2)

    def paths(self, x: Tensor) -> dict[str, str]:
        """Which implementations run on tensors of this type and device, for the record."""
        return {"attention": "scaled_dot_product_attention"}


class HeadNorm(Softmax):
    """o <- o / RMS(o) * lambda per head."""

    def __init__(
        self, shape: AttentionShape, *, per_head: bool = False, offset: bool = False, initial_lambda: float = 0.25
    ) -> None:
        super().__init__(shape)
        self.head_norm = HeadRMSNorm(
            shape.num_heads, shape.head_size, per_head=per_head, offset=offset, initial_lambda=initial_lambda
        )

    def leave(self, o_BTHD: Tensor, x_BTE: Tensor, rotation: Rotation) -> Tensor:
        return self.head_norm(o_BTHD)

    def paths(self, x: Tensor) -> dict[str, str]:
        heads = x.new_empty(0, 0, self.shape.num_heads, self.shape.head_size)
        return super().paths(x) | {"head_norm": head_rms_norm_path(heads, self.head_norm.path)}


class FirstNorm(HeadNorm):
    """o <- o / RMS(o) * lambda per head at position 0 only, and no other token changes.

    This fixes the energy of position 0, not its variance across sequences: see `EqualVariance` for that one.
    """

    def leave(self, o_BTHD: Tensor, x_BTE: Tensor, rotation: Rotation) -> Tensor:
        return torch.where(_is_first(rotation), super().leave(o_BTHD, x_BTE, rotation), o_BTHD.flatten(2))


class EqualVariance(Softmax):
    """o <- mu + s (o - mu) at position 0 only, s the factor that leaves it the variance of later positions."""

    whole_batch = True  # the variance is that of its sequences

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        self.first = EqualisedFirst(shape.num_heads, shape.head_size)

    def leave(self, o_BTHD: Tensor, x_BTE: Tensor, rotation: Rotation) -> Tensor:
        return self.first(o_BTHD, _is_first(rotation)).flatten(2)


class Scale(Softmax):
    """o <- o * lambda per head: head_norm without its division."""

    def __init__(self, shape: AttentionShape, *, initial_lambda: float = 0.25) -> None:
        super().__init__(shape)
        self.scale = HeadScale(shape.head_size, initial_lambda=initial_lambda)

    def leave(self, o_BTHD: Tensor, x_BTE: Tensor, rotation: Rotation) -> Tensor:
        return self.scale(o_BTHD)


class Gate(Softmax):
    """o <- o * sigmoid(W_g x), one gate for every channel of every head."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        self.gate_proj = nn.Linear(shape.width, shape.num_heads * shape.head_size, bias=False)

    def leave(self, o_BTHD: Tensor, x_BTE: Tensor, rotation: Rotation) -> Tensor:
        return o_BTHD.flatten(2) * self.gate_proj(x_BTE).sigmoid()


class HeadGate(Softmax):
    """o <- o * sigmoid(w_h . x), one gate for every head."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        self.gate_proj = nn.Linear(shape.width, shape.num_heads, bias=False)

    def leave(self, o_BTHD: Tensor, x_BTE: Tensor, rotation: Rotation) -> Tensor:
        return (o_BTHD * self.gate_proj(x_BTE).sigmoid().unsqueeze(-1)).flatten(2)


class HeadNormGate(HeadNorm):
    """o <- o / RMS(o) * lambda * sigmoid(W_g x). The norm comes first: after the gate it would undo its scale."""

    def __init__(self, shape: AttentionShape, **options: Any) -> None:
        super().__init__(shape, **options)
        self.gate_proj = nn.Linear(shape.width, shape.num_heads * shape.head_size, bias=False)

    def leave(self, o_BTHD: Tensor, x_BTE: Tensor, rotation: Rotation) -> Tensor:
        return super().leave(o_BTHD, x_BTE, rotation) * self.gate_proj(x_BTE).sigmoid()


class Sigmoid(Softmax):
    """a_ts = sigmoid(q_t . k_s / sqrt(D) - log T), without a sum over keys.

    T is the length that the model is made for, not that of the text: else a token's state would depend on how much
    text follows it.
    """

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        self.bias = -math.log(shape.length)

    def arguments(self, q_BHTD: Tensor) -> dict[str, Any]:
        return {"sigmoid_bias": self.bias}

    def weights(self, scores_BHTS: Tensor) -> Tensor:
        return (scores_BHTS + self.bias).sigmoid()

    def attend(self, q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask: Tensor | None) -> Tensor:
        """Computes a few queries at a time with the keys up to the last of them, so that most hidden scores are never
        computed."""
        if mask is not None:
            return self.attend_plain(q_BHTD, k_BKSD, v_BKSD, mask)[0]
        first = k_BKSD.shape[2] - q_BHTD.shape[2]
        runs = []
        for q_BHnD in q_BHTD.split(SIGMOID_QUERIES, dim=2):
            first += q_BHnD.shape[2]
            runs.append(self.attend_plain(q_BHnD, k_BKSD[:, :, :first], v_BKSD[:, :, :first], None)[0])
        return torch.cat(runs, 1)

    def paths(self, x: Tensor) -> dict[str, str]:
        return {"attention": f"sigmoid written out, {SIGMOID_QUERIES} queries at a time"}


class LearnedSink(Softmax):
    """a_ts = exp(score) / (exp(sink_h) + sum over visible keys): a learned logit per head that has no value."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        self.sink = nn.Parameter(torch.zeros(shape.num_heads))

    def sink_logits(self, q_BHTD: Tensor) -> Tensor:
        """[H] the logits that take part in the softmax."""
        return self.sink

    def arguments(self, q_BHTD: Tensor) -> dict[str, Any]:
        return {"s_aux": self.sink_logits(q_BHTD)}

    def weights(self, scores_BHTS: Tensor) -> Tensor:
        sink_BHT1 = self.sink_logits(scores_BHTS).to(scores_BHTS.dtype)[:, None, None].expand(*scores_BHTS.shape[:3], 1)
        return torch.cat([scores_BHTS, sink_BHT1], -1).softmax(-1)[..., :-1]

    def attend(self, q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None or q_BHTD.shape[2] != k_BKSD.shape[2] or not can_fuse_sink(q_BHTD):
            return self.attend_plain(q_BHTD, k_BKSD, v_BKSD, mask)[0]
        k_BHSD, v_BHSD = (_repeated(x, q_BHTD.shape[1]) for x in (k_BKSD, v_BKSD))
        return sink_attention(q_BHTD, k_BHSD, v_BHSD, self.sink_logits(q_BHTD), self.scaling).transpose(1, 2)

    def paths(self, x: Tensor) -> dict[str, str]:
        fused = can_fuse_sink(x.new_empty(0, self.shape.head_size))
        return {"attention": "flash attention with a sink" if fused else "attention written out"}


class SoftmaxOne(LearnedSink):
    """a_ts = exp(score) / (1 + sum over visible keys): a sink logit that stays 0."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        del self.sink

    def sink_logits(self, q_BHTD: Tensor) -> Tensor:
        return q_BHTD.new_zeros(self.shape.num_heads, dtype=torch.float32)


class QKNorm(Softmax):
    """q <- q / RMS(q) * g_q and k <- k / RMS(k) * g_k per head, before the rotation."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        self.q_norm, self.k_norm = RMSNorm(shape.head_size, shape.eps), RMSNorm(shape.head_size, shape.eps)

    def prepare(self, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_norm(q_BTHD), self.k_norm(k_BTKD), v_BTKD


class ValueNorm(Softmax):
    """v <- v / RMS(v) * g_v per head."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        self.v_norm = RMSNorm(shape.head_size, shape.eps)

    def prepare(self, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q_BTHD, k_BTKD, self.v_norm(v_BTKD)


VARIANTS: Mapping[str, type[Softmax]] = {
    "softmax": Softmax,
    "head_norm": HeadNorm,
    "scale": Scale,
    "first_norm": FirstNorm,
    "equal_variance": EqualVariance,
    "gate": Gate,
    "head_gate": HeadGate,
    "head_norm_gate": HeadNormGate,
    "sigmoid": Sigmoid,
    "softmax_one": SoftmaxOne,
    "learned_sink": LearnedSink,
    "qk_norm": QKNorm,
    "value_norm": ValueNorm,
}


def build_variant(name: str, shape: AttentionShape, options: Mapping[str, Any]) -> Softmax:
    """The variant called `name`; unknown names and options are refused."""
    check_choice("variant", name, VARIANTS)
    defaults = _options_of(VARIANTS[name])
    for option, value in options.items():
        default = defaults.get(option)
        fits = isinstance(value, bool) if isinstance(default, bool) else isinstance(value, int | float)
        if default is None or not fits:
            listed = ", ".join(f"{name} ({type(value).__name__})" for name, value in defaults.items())
            options_it_has = f"Its options are {listed}" if listed else "It has no options"
            raise InputError(
                f"The variant {name} cannot have {option} = {value!r}. {options_it_has}. Change `variant_options`."
            )
    return VARIANTS[name](shape, **options)


def _options_of(variant: type[Softmax]) -> dict[str, Any]:
    """The options of a variant and of its base classes, with their defaults."""
    return {
        parameter.name: parameter.default
        for ancestor in variant.__mro__
        if issubclass(ancestor, Softmax)
        for parameter in inspect.signature(ancestor.__init__).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def _is_first(rotation: Rotation) -> Tensor:
    """[.., T, 1] which tokens are at position 0, also with a cache or padding. The first rotary angle is the position
    itself, and its sine is 0 at position 0 alone."""
    return rotation[1][..., :1] == 0


def _repeated(x_BKSD: Tensor, num_heads: int) -> Tensor:
    """[B, H, S, D]: each key-value head repeated for the query heads that share it."""
    return x_BKSD.repeat_interleave(num_heads // x_BKSD.shape[1], dim=1)


def _visible(q_BHTD: Tensor, k_BKSD: Tensor, mask: Tensor | None) -> Tensor:
    """[.., T, S] whether a query may see a key: by the mask or, without one, all keys up to the query's own."""
    if mask is not None:
        return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    num_queries, num_keys = q_BHTD.shape[2], k_BKSD.shape[2]
    queries = torch.arange(num_keys - num_queries, num_keys, device=q_BHTD.device)
    return torch.arange(num_keys, device=q_BHTD.device) <= queries[:, None]
