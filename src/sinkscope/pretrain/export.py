"""Writes a trained decoder as a folder that transformers loads: where it can, without this package.

| attention | feed-forward | written as |
| --- | --- | --- |
| softmax | swiglu | LlamaForCausalLM |
| qk_norm | swiglu | Qwen3ForCausalLM |
| any other | any | Decoder: `sinkscope.load`, or AutoModelForCausalLM after `import sinkscope.pretrain.decoder` |

A softmax model whose heads do not divide its width is written as a Decoder too, since Llama's configuration refuses it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig, PreTrainedTokenizerBase, Qwen3Config

from sinkscope.pretrain.decoder import Decoder
from sinkscope.pretrain.decoder_config import DecoderConfig

SHARED_FIELDS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "initializer_range"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "dtype"),
)


def export(model: Decoder, folder: Path, *, tokenizer: PreTrainedTokenizerBase | None = None) -> str:
    """Writes weights (safetensors), configuration and tokenizer into `folder`; returns the architecture's name."""
    config = model.config
    known = _known_config(config)
    if known is None:
        model.save_pretrained(folder)
    else:
        weights = model.state_dict().items()
        # The variant's own parameters, the norms of qk_norm, stand one level higher there.
        model.save_pretrained(folder, state_dict={name.replace(".variant.", "."): weight for name, weight in weights})
        known.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return ((known or config).architectures or ["Decoder"])[0]


def _known_config(config: DecoderConfig) -> PreTrainedConfig | None:
    """The configuration of the family that has the same forward pass, if there is one."""
    if config.feed_forward_variant != "swiglu":
        return None
    options: dict[str, Any] = {name: getattr(config, name) for name in SHARED_FIELDS}
    options["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.attention_variant == "softmax" and config.hidden_size % config.num_attention_heads == 0:
        return LlamaConfig(**options, architectures=["LlamaForCausalLM"])
    if config.attention_variant == "qk_norm":
        return Qwen3Config(**options, architectures=["Qwen3ForCausalLM"])
    return None
