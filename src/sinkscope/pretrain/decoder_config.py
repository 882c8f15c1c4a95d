"""The decoder's configuration for transformers: its shape, and the variants of its attention and feed-forward."""

from __future__ import annotations

import math
import reprlib
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from sinkscope.attention.variants import AttentionShape
from sinkscope.errors import InputError

SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "max_position_embeddings"),
)


LARGEST_SIZE = 1 << 24
MOST_PARTS = 1 << 12
"""Of layers, and of heads. Far above any model: modules are built before the memory they need is known."""


class DecoderConfig(PreTrainedConfig):
    """The shape of a decoder and the variant of its attention and feed-forward."""

    model_type = "sinkscope_decoder"
    keys_to_ignore_at_inference = ("past_key_values",)

    vocab_size: int = 50257
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    """As many as query heads if not given."""
    head_dim: int | None = None
    """hidden_size / num_attention_heads if not given."""
    intermediate_size: int = 3072
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    attention_variant: str = "softmax"
    variant_options: dict | None = None
    feed_forward_variant: str = "swiglu"
    initializer_range: float = 0.02
    seed: int = 0
    """Of the initial weights."""
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.variant_options is None:
            self.variant_options = {}
        self._check_fields()
        if self.head_dim is None:
            self.head_dim, rest = divmod(self.hidden_size, self.num_attention_heads)
            if rest:
                raise InputError(
                    f"{self.num_attention_heads} heads do not divide hidden_size {self.hidden_size}. "
                    "Change one of them in the configuration, or give head_dim."
                )
        shape = self.attention_shape()
        if shape.num_heads % shape.num_key_value_heads:
            divided = f"a divisor of num_attention_heads {shape.num_heads}"
            raise _refused("num_key_value_heads", divided, shape.num_key_value_heads)
        if shape.head_size % 2:
            raise _refused("head_dim", "even (rotation turns pairs of channels)", shape.head_size)
        super().__post_init__(**kwargs)

    def _check_fields(self) -> None:
        for name in SIZES:
            value = getattr(self, name)
            if name == "head_dim" and value is None:
                continue
            largest = MOST_PARTS if name in ("num_hidden_layers", "num_attention_heads") else LARGEST_SIZE
            if type(value) is not int or not 1 <= value <= largest:
                raise _refused(name, f"a whole number from 1 to {largest}", value)
        if type(self.seed) is not int:
            raise _refused("seed", "a whole number", self.seed)
        for name in ("rope_theta", "rms_norm_eps", "initializer_range"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                # YAML reads 1e4, without a point, as text.
                raise _refused(name, "a number above 0", value)
        for name in ("tie_word_embeddings", "use_cache"):
            if not isinstance(getattr(self, name), bool):
                raise _refused(name, "true or false", getattr(self, name))
        for name in ("attention_variant", "feed_forward_variant"):
            if not isinstance(getattr(self, name), str):
                raise _refused(name, "a name", getattr(self, name))
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(self, name)
            tokens = value if isinstance(value, list) else [value]
            if value is not None and not all(type(token) is int for token in tokens):
                raise _refused(name, "a token's number", value)
        if not isinstance(self.variant_options, dict):
            raise _refused("variant_options", "names with values", self.variant_options)

    def attention_shape(self) -> AttentionShape:
        """The numbers that an attention variant is built from."""
        assert self.num_key_value_heads is not None  # both are set by __post_init__
        assert self.head_dim is not None
        return AttentionShape(
            width=self.hidden_size,
            num_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_size=self.head_dim,
            length=self.max_position_embeddings,
            eps=self.rms_norm_eps,
        )


def _refused(name: str, allowed: str, value: Any) -> InputError:
    return InputError(f"{name} must be {allowed}, not {reprlib.repr(value)}. Change it in the configuration.")


AutoConfig.register(DecoderConfig.model_type, DecoderConfig)
