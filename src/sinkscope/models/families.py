"""Where each family keeps its modules: one row per family, which names module paths below the decoder's block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

PARTS = ("attention", "mixer", "feed_forward")
"""What a layer may add to the residual stream."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Module paths of one family, relative to a block unless said otherwise."""

    name: str
    model_types: tuple[str, ...]
    blocks: str = "layers"
    """Path of the list of blocks, relative to the decoder."""
    attention: str = "self_attn"
    output_projection: str = "self_attn.o_proj"
    down_projection: str = "mlp.down_proj"
    experts: str | None = None
    shared_down_projection: str | None = None
    shared_gate: str | None = None
    """A linear layer of one output, whose sigmoid multiplies what the shared expert gives."""
    expert_scale: float = 1.0
    """What the sum of the routed experts is multiplied by where the shared expert is added to it."""
    final_norm: str = "norm"
    """Path of the norm after the last block, relative to the decoder."""
    post_norm: str | None = None
    """A norm between the down projection and the residual stream; what neurons write is what leaves it."""
    post_attention_norm: str | None = None
    """A norm between the output projection and the residual stream."""
    mixer_exit: str | None = None
    """What a layer has in place of attention or beside it (a state-space model, linear attention, a convolution), or
    the norm after that: the module whose output is added to the residual stream."""
    attention_scale: float = 1.0
    mixer_scale: float = 1.0
    feed_forward_scale: float = 1.0
    """What each is multiplied by where it is added to the residual stream."""
    parts_of_layers: tuple[tuple[str, ...], ...] | None = None
    """By layer, which of PARTS it has; None where each layer has attention and a feed-forward."""
    feed_forward: str | None = "mlp"
    """The module that holds the whole feed-forward; None where the block itself carries it out."""
    activations: tuple[str, ...] = ("mlp.act_fn",)
    """Where a layer may keep its activation function as a module; a layer has those that are there."""
    attention_door: str = "registry"
    """How queries and keys are reached: the attention registry, or the model's own call of
    scaled_dot_product_attention with a mask that it is given (sdpa_call) or with is_causal=True (causal_sdpa)."""
    notes: str = ""
    parallel: Callable[[Any], bool] = field(default=lambda config: False)
    """Whether attention and feed-forward read the same input and are added together."""
    unsupported: Callable[[Any], str | None] = field(default=lambda config: None)
    """What in a configuration of this family cannot be honoured, if anything."""

    def parts(self, layer: int) -> tuple[str, ...]:
        """Which of PARTS a layer has."""
        return ("attention", "feed_forward") if self.parts_of_layers is None else self.parts_of_layers[layer]

    def row(self) -> dict:
        """The family as a row of the table that people see."""
        return {
            "family": self.name,
            "blocks": self.blocks,
            "output_projection": self.output_projection,
            "feed_forward": self.experts or self.down_projection,
            "notes": self.notes,
        }


def _opt_unsupported(config) -> str | None:
    return (
        None if config.do_layer_norm_before else "do_layer_norm_before=False (the residual stream itself is normalised)"
    )


def _falcon_unsupported(config) -> str | None:
    return "alibi=True (a bias of T x T per head)" if config.alibi else None


FAMILIES: tuple[Family, ...] = (
    Family(name="llama", model_types=("llama",), notes="grouped queries"),
    Family(name="mistral", model_types=("mistral",), notes="grouped queries, sliding window"),
    Family(name="qwen2", model_types=("qwen2",), notes="grouped queries, some layers with a sliding window"),
    Family(name="qwen3", model_types=("qwen3",), notes="query and key norm"),
    Family(
        name="gemma2",
        model_types=("gemma2",),
        post_norm="post_feedforward_layernorm",
        post_attention_norm="post_attention_layernorm",
        notes="soft-capped scores, alternating windows, post-norms",
    ),
    Family(
        name="gemma3",
        model_types=("gemma3_text", "gemma3"),
        post_norm="post_feedforward_layernorm",
        post_attention_norm="post_attention_layernorm",
        notes="query and key norm, alternating windows, post-norms",
    ),
    Family(
        name="olmo2",
        model_types=("olmo2",),
        post_norm="post_feedforward_layernorm",
        post_attention_norm="post_attention_layernorm",
        notes="query and key norm, post-norms and no pre-norms",
    ),
    Family(
        name="olmo3",
        model_types=("olmo3",),
        post_norm="post_feedforward_layernorm",
        post_attention_norm="post_attention_layernorm",
        notes="as olmo2, some layers with a sliding window",
    ),
    Family(
        name="phi3",
        model_types=("phi3",),
        activations=("mlp.activation_fn",),
        notes="fused projections, sliding window",
    ),
    Family(name="smollm3", model_types=("smollm3",), notes="some layers without rotation"),
    Family(
        name="glm4",
        model_types=("glm4",),
        post_norm="post_mlp_layernorm",
        post_attention_norm="post_self_attn_layernorm",
        activations=("mlp.activation_fn",),
        notes="partial rotation, post-norms",
    ),
    Family(
        name="gpt2",
        model_types=("gpt2",),
        blocks="h",
        final_norm="ln_f",
        attention="attn",
        output_projection="attn.c_proj",
        down_projection="mlp.c_proj",
        activations=("mlp.act",),
        notes="learned positions, transposed weights",
    ),
    Family(
        name="gpt_neox",
        model_types=("gpt_neox",),
        final_norm="final_layer_norm",
        attention="attention",
        output_projection="attention.dense",
        down_projection="mlp.dense_4h_to_h",
        parallel=lambda config: config.use_parallel_residual,
        activations=("mlp.act",),
        notes="attention and feed-forward in parallel",
    ),
    Family(
        name="opt",
        model_types=("opt",),
        final_norm="final_layer_norm",
        output_projection="self_attn.out_proj",
        down_projection="fc2",
        unsupported=_opt_unsupported,
        feed_forward=None,
        activations=("activation_fn",),
        notes="learned positions, ReLU",
    ),
    Family(
        name="falcon",
        model_types=("falcon",),
        blocks="h",
        final_norm="ln_f",
        attention="self_attention",
        output_projection="self_attention.dense",
        down_projection="mlp.dense_4h_to_h",
        attention_door="sdpa_call",
        parallel=lambda config: config.parallel_attn or config.new_decoder_architecture,
        unsupported=_falcon_unsupported,
        activations=("mlp.act",),
        notes="attention and feed-forward in parallel, keys repeated before attention",
    ),
    Family(
        name="mixtral",
        model_types=("mixtral",),
        experts="mlp.experts",
        activations=("mlp.experts.act_fn",),
        notes="experts",
    ),
    Family(
        name="qwen3_moe",
        model_types=("qwen3_moe",),
        experts="mlp.experts",
        activations=("mlp.act_fn", "mlp.experts.act_fn"),
        notes="experts, query and key norm",
    ),
    Family(
        name="gpt_oss",
        model_types=("gpt_oss",),
        experts="mlp.experts",
        activations=(),
        notes="experts, learned sinks, alternating windows",
    ),
    Family(
        name="deepseek_v3",
        model_types=("deepseek_v3",),
        experts="mlp.experts",
        shared_down_projection="mlp.shared_experts.down_proj",
        activations=("mlp.act_fn", "mlp.experts.act_fn", "mlp.shared_experts.act_fn"),
        notes="latent attention, experts with a shared one, first layers dense",
    ),
)
