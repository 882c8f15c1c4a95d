"""Random tiny models of every family, built from configurations and never downloaded.

Odd sizes on purpose: head size is not width / heads where a family allows it, groups of query heads share a key-value
head, windows are shorter than the sequences of the tests, and mixtures keep a dense layer where the family has one.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

_LLAMA_LIKE = dict(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=None,
    bos_token_id=1,
    eos_token_id=2,
)
_MOE = dict(num_experts_per_tok=2, moe_intermediate_size=24)

CONFIGURATIONS: dict[str, dict] = {
    "llama": _LLAMA_LIKE,
    "mistral": dict(_LLAMA_LIKE, sliding_window=11),
    "qwen2": dict(_LLAMA_LIKE, use_sliding_window=True, sliding_window=9, max_window_layers=1),
    "qwen3": dict(_LLAMA_LIKE, head_dim=16),
    "gemma2": dict(
        _LLAMA_LIKE,
        head_dim=16,
        sliding_window=9,
        attn_logit_softcapping=2.0,
        query_pre_attn_scalar=16,
        num_hidden_layers=4,
    ),
    "gemma3": dict(_LLAMA_LIKE, head_dim=16, sliding_window=9, query_pre_attn_scalar=16, num_hidden_layers=6),
    "olmo2": _LLAMA_LIKE,
    "olmo3": dict(_LLAMA_LIKE, sliding_window=9, num_hidden_layers=4),
    "phi3": dict(_LLAMA_LIKE, sliding_window=13),
    "smollm3": dict(_LLAMA_LIKE, num_hidden_layers=4),
    "glm4": dict(_LLAMA_LIKE, head_dim=16),
    "gpt2": dict(vocab_size=97, n_embd=48, n_layer=3, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=2),
    "gpt_neox": dict(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=256,
    ),
    "opt": dict(
        vocab_size=97,
        hidden_size=48,
        ffn_dim=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=256,
        word_embed_proj_dim=48,
    ),
    "falcon": dict(
        vocab_size=97,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_kv_heads=2,
        new_decoder_architecture=True,
        alibi=False,
    ),
    "mixtral": dict(_LLAMA_LIKE, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "qwen3_moe": dict(_LLAMA_LIKE, **_MOE, head_dim=16, num_experts=4, mlp_only_layers=[1], decoder_sparse_step=1),
    "gpt_oss": dict(
        _LLAMA_LIKE, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=9, num_hidden_layers=4
    ),
    "deepseek_v3": dict(
        _LLAMA_LIKE,
        **_MOE,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=12,
    ),
}

_USUAL = dict(blocks="model.layers", attention="self_attn", output="self_attn.o_proj", down="mlp.down_proj")
PARTS = {
    **{family: _USUAL for family in CONFIGURATIONS},
    "gpt2": dict(blocks="transformer.h", attention="attn", output="attn.c_proj", down="mlp.c_proj"),
    "gpt_neox": dict(
        blocks="gpt_neox.layers", attention="attention", output="attention.dense", down="mlp.dense_4h_to_h"
    ),
    "opt": dict(blocks="model.decoder.layers", attention="self_attn", output="self_attn.out_proj", down="fc2"),
    "falcon": dict(
        blocks="transformer.h", attention="self_attention", output="self_attention.dense", down="mlp.dense_4h_to_h"
    ),
}
"""Where each family keeps its parts, written down a second time so that a wrong row of the family table shows."""

_MODEL_TYPE = {"gemma3": "gemma3_text"}


def tiny_model(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 10.0, **overrides):
    """A random model of the family in evaluation mode, its weights scaled up so that attention is far from uniform."""
    config = AutoConfig.for_model(_MODEL_TYPE.get(family, family), **{**CONFIGURATIONS[family], **overrides})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        roughen(model, scale)
    return model


def roughen(model, scale: float) -> None:
    """Scales weights up, and moves gains, biases and learned sinks away from their neutral values: a path that drops
    one of them must show."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(scale)
            else:
                parameter.add_(0.3 * torch.randn_like(parameter))
