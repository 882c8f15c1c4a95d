"""The decoder that pretrain trains: like Llama (RoPE, RMSNorm, SwiGLU, grouped queries), with a choice of attention.

Parameters have Llama's names, so a softmax model is a Llama checkpoint. The initial weights of each parameter come from
a random generator of its own, seeded with (seed, name). So two variants with the same seed start from equal weights in
every parameter that both have.

| parameter | initial value |
| --- | --- |
| embeddings, untied output head | normal, std initializer_range |
| q, k, v, gate and up projections; gates of attention | normal, std initializer_range |
| o and down projections, which write into the residual stream | normal, std initializer_range / sqrt(2 layers) |
| gains of RMSNorm, also of qk_norm and value_norm | 1 |
| lambda of head-wise RMSNorm and of scale | initial_lambda (0.25) |
| offset of head-wise RMSNorm, learned sinks | 0 |
| any other parameter of a variant | as its class made it |

Axes: B batch, T position, H heads, K key-value heads, D head size, E width, F neurons, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel, initialization
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation.utils import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sinkscope.attention.head_norm import HeadRMSNorm, HeadScale
from sinkscope.attention.variants import LearnedSink, RMSNorm, Rotation, build_variant
from sinkscope.errors import InputError
from sinkscope.models.anatomy import Anatomy, describe
from sinkscope.models.families import Family
from sinkscope.pretrain.decoder_config import DecoderConfig

FAMILY = Family(name="sinkscope_decoder", model_types=("sinkscope_decoder",), notes="attention variants")

LARGEST_TO_MEDIAN = 4.0
"""Bound on max / median of |output vector|. Normal entries reach it at 2.7 standard deviations."""


class Attention(nn.Module):
    """One layer's attention: projections and rotation are here, all that differs between variants is in `variant`."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer, True
        shape = config.attention_shape()
        self.head_size = shape.head_size
        self.num_key_value_groups = shape.num_heads // shape.num_key_value_heads
        queries, keys = shape.num_heads * shape.head_size, shape.num_key_value_heads * shape.head_size
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        self.variant = build_variant(config.attention_variant, shape, config.variant_options or {})

    def forward(
        self, hidden_states: Tensor, rotation: Rotation, attention_mask: Any = None, cache: Cache | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """([B, T, E], attention weights where the implementation is "eager")."""
        q = self.q_proj(hidden_states).unflatten(-1, (-1, self.head_size))  # [B, T, H, D]
        k = self.k_proj(hidden_states).unflatten(-1, (-1, self.head_size))  # [B, T, K, D]
        v = self.v_proj(hidden_states).unflatten(-1, (-1, self.head_size))
        q, k, v = self.variant.prepare(q, k, v)
        # Views [B, H, T, D] of memory in which heads come after positions, so that attention leaves its output in that
        # order too. With tensors that are contiguous heads first, gradients were wrong on CUDA (lab/benchmarks.md).
        q, k, v = rotated(q, rotation).transpose(1, 2), rotated(k, rotation).transpose(1, 2), v.transpose(1, 2)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        implementation, weights = self.config._attn_implementation, None
        if implementation == "sdpa":
            o_BTHD = self.variant.attend(q, k, v, attention_mask)
        elif implementation == "eager":
            o_BTHD, weights = self.variant.attend_plain(q, k, v, attention_mask)
        else:
            # Any other function in the registry of transformers, such as the recorder's. It needs to be told what the
            # variant adds, for example a learned sink.
            attend = ALL_ATTENTION_FUNCTIONS[implementation]
            scaling, arguments = self.variant.scaling, self.variant.arguments(q)
            o_BTHD, weights = attend(self, q, k, v, attention_mask, scaling=scaling, **arguments)
        return self.o_proj(self.variant.leave(o_BTHD, hidden_states, rotation)), weights


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = build_feed_forward(config.feed_forward_variant, config.hidden_size, config.intermediate_size)

    def forward(
        self, hidden_states: Tensor, rotation: Rotation, attention_mask: Any = None, cache: Cache | None = None
    ) -> Tensor:
        """[B, T, E] the residual stream after the layer; no mask means causal."""
        update, _ = self.self_attn(self.input_layernorm(hidden_states), rotation, attention_mask, cache)
        hidden_states = hidden_states + update
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class DecoderBody(nn.Module):
    """Tokens to the normalised state after the last layer."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed_tokens

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool = False,
    ) -> BaseModelOutputWithPast:
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        num_cached = 0 if past_key_values is None else past_key_values.get_seq_length()
        rotation = self.rotation(hidden, num_cached, position_ids)
        mask = None
        # Plain causal training needs no mask. Building one would read positions back from the device, and wait for it.
        if attention_mask is not None or past_key_values is not None or self.config._attn_implementation != "sdpa":
            mask = create_causal_mask(
                config=self.config,
                inputs_embeds=hidden,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                position_ids=position_ids,
            )
        for block in self.layers:
            hidden = block(hidden, rotation, mask, past_key_values)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden), past_key_values=past_key_values)

    def rotation(self, hidden_BTE: Tensor, first: int = 0, position_ids: Tensor | None = None) -> Rotation:
        """(cos, sin) of the rotary angles, each [1 or B, T, D / 2], at `position_ids` or from position `first` on.

        Channel pair i turns by position / theta^(2 i / D). In float32: in bfloat16 late positions would share angles.
        """
        size, device = self.config.attention_shape().head_size, hidden_BTE.device
        if position_ids is None:
            position_ids = torch.arange(first, first + hidden_BTE.shape[1], device=device)[None]
        wavelengths = self.config.rope_theta ** (torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
        angles = position_ids.unsqueeze(-1).float() * (1.0 / wavelengths)
        return angles.cos(), angles.sin()


class Decoder(PreTrainedModel, GenerationMixin):
    """The causal language model.

    `forward` is for transformers. Training never makes all logits at once: it takes `hidden_states` and
    `lm_head_weight` for a loss in chunks (step.py), and compiles the `blocks`.
    """

    config: DecoderConfig
    config_class = DecoderConfig
    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _no_split_modules = ["Block"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.model = DecoderBody(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.layers

    @property
    def final_norm(self) -> RMSNorm:
        return self.model.norm

    @property
    def lm_head_weight(self) -> Tensor:
        """[V, E]; the embedding itself where they are tied."""
        return self.lm_head.weight

    @property
    def sinkscope_anatomy(self) -> Anatomy:
        return describe(FAMILY, self)

    def hidden_states(self, input_ids: Tensor) -> Tensor:
        """[B, T, E] the normalised states after the last layer, without logits."""
        return self.model(input_ids).last_hidden_state

    def paths(self, dtype: torch.dtype | None = None) -> dict[str, str]:
        """Which implementations run on the model's device, for activations of `dtype` (by default the weights')."""
        attention: Any = self.blocks[0].self_attn
        return attention.variant.paths(self.lm_head.weight.new_empty(0, dtype=dtype))

    def get_decoder(self) -> DecoderBody:
        return self.model

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        """Yes: each call looks it up in the configuration. (transformers would search the source code.)"""
        return True

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [B, T, V] and, with labels (the tokens themselves, -100 to skip), the mean loss of the next token."""
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and labels is None
        states = self.model(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache=use_cache
        )
        logits = self.lm_head(states.last_hidden_state[:, -logits_to_keep:])
        loss: Any = None
        if labels is not None:
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=states.past_key_values)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Carries out the table at the head of this file; what was loaded from a file keeps its values.

        `initialization` is transformers' own: its functions leave parameters alone that are marked as loaded.
        """
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.device.type == "meta":
                continue  # only the shape is wanted
            if isinstance(module, nn.Linear | nn.Embedding) or name.startswith("raw_"):
                initialization.copy_(parameter, self._random_weights(module, name))
            elif isinstance(module, HeadRMSNorm | HeadScale) and name == "weight":
                initialization.constant_(parameter, module.initial_lambda)
            elif isinstance(module, RMSNorm) and name == "weight":
                initialization.ones_(parameter)
            elif (isinstance(module, HeadRMSNorm) and name == "offset") or (
                type(module) is LearnedSink and name == "sink"  # a subclass keeps what its class made
            ):
                initialization.zeros_(parameter)

    def _random_weights(self, module: nn.Module, name: str) -> Tensor:
        """Normal numbers that depend on the seed and the module's name alone, not on which modules there are."""
        path = next(path for path, candidate in self.named_modules() if candidate is module)
        std = self.config.initializer_range
        if path.endswith(("o_proj", "down_proj")):
            std /= (2 * self.config.num_hidden_layers) ** 0.5
        # Python's own hash() differs from one process to the next.
        digest = hashlib.sha256(f"{self.config.seed} {path}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        return torch.randn(getattr(module, name).shape, generator=generator, dtype=torch.float32) * std


def rotated(x_BTHD: Tensor, rotation: Rotation) -> Tensor:
    """Channels d and d + D / 2 turned by the position's angle, as Llama pairs them; worked out in at least float32."""
    cos, sin = (part.unsqueeze(-2) for part in rotation)
    a, b = x_BTHD.to(torch.promote_types(x_BTHD.dtype, torch.float32)).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x_BTHD.dtype)


AutoModelForCausalLM.register(DecoderConfig, Decoder)


class SwiGLU(nn.Module):
    """W_down (silu(W_gate x) * W_up x)."""

    def __init__(self, width: int, num_neurons: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, num_neurons, bias=False)
        self.up_proj = nn.Linear(width, num_neurons, bias=False)
        self.down_proj = self.build_down_projection(width, num_neurons)
        self.act_fn = nn.SiLU()  # a module, as the families have it, so that it can be swapped

    def build_down_projection(self, width: int, num_neurons: int) -> nn.Module:
        return nn.Linear(num_neurons, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class BoundedSwiGLU(SwiGLU):
    """SwiGLU with a `BoundedLinear` as its down projection."""

    def build_down_projection(self, width: int, num_neurons: int) -> nn.Module:
        return BoundedLinear(num_neurons, width)


class BoundedLinear(nn.Module):
    """A linear map whose every output vector w_j = W[:, j] keeps max |w| <= c median |w|, c = LARGEST_TO_MEDIAN.

    So no neuron can write into few dimensions alone. At least half of a vector's E entries reach its median m, and none
    passes c m. The largest entry then has at most 2 c^2 / E of the energy, the participation ratio is at least
    E / (2 c^2), and a vector that is zero in more than half of its dimensions is zero in all. (A fixed orthogonal
    mixing after a free matrix would bound nothing: the matrix can learn to undo it.)
    """

    acts_by_weight_alone = True
    """Tells the anatomy that `weight` is all that this projection multiplies by."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.raw_weight = nn.Parameter(torch.empty(num_outputs, num_inputs))

    @property
    def weight(self) -> Tensor:
        """[E, F] the weights that act: the free ones, clipped per output vector."""
        limit_F = LARGEST_TO_MEDIAN * self.raw_weight.abs().median(0).values
        return torch.clamp(self.raw_weight, -limit_F, limit_F)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


FEED_FORWARD_VARIANTS: Mapping[str, type[SwiGLU]] = {"swiglu": SwiGLU, "bounded_swiglu": BoundedSwiGLU}


def build_feed_forward(name: str, width: int, num_neurons: int) -> SwiGLU:
    """The feed-forward called `name`."""
    if name not in FEED_FORWARD_VARIANTS:
        raise InputError(
            f"There is no feed-forward variant {name!r}. "
            f"Change feed_forward_variant in the configuration to one of {', '.join(FEED_FORWARD_VARIANTS)}."
        )
    return FEED_FORWARD_VARIANTS[name](width, num_neurons)
