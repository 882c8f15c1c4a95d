"""Named shapes of the decoder, from one that trains in seconds on a CPU to a billion parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sinkscope.errors import InputError
from sinkscope.pretrain.decoder_config import DecoderConfig

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tiny": dict(
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=192,
        max_position_embeddings=128,
    ),
    "30m": dict(hidden_size=320, num_hidden_layers=12, num_attention_heads=5, intermediate_size=864),
    # The paper's: 12 layers of width 768 with the tied vocabulary of GPT-2 make 152 million.
    "152m": dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072),
    "1b": dict(
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=8192,
        max_position_embeddings=2048,
        rope_theta=500000.0,
    ),
}
"""By name, the fields of DecoderConfig that differ from its defaults."""


def preset(name: str) -> dict[str, Any]:
    """The fields of the preset called `name`."""
    if name not in PRESETS:
        raise InputError(
            expected=f"a preset: {', '.join(PRESETS)}",
            found=repr(name),
            next_step="Choose one with --config, or give a YAML file",
        )
    return dict(PRESETS[name])


def decoder_config(fields: Mapping[str, Any]) -> DecoderConfig:
    """The configuration with these fields, as they stand in a YAML file; unknown ones are refused."""
    known = DecoderConfig.__annotations__.keys()
    if unknown := fields.keys() - known:
        raise InputError(
            expected=f"fields of a model: {', '.join(known)}",
            found=", ".join(sorted(map(str, unknown))),
            next_step="Remove them from the configuration",
        )
    try:
        return DecoderConfig(**fields)
    except TypeError as error:
        raise InputError(
            expected="values of the right type for the model", found=str(error), next_step="Correct them below model"
        ) from error
