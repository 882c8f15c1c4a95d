"""The configuration of the decoder: its shape, and the variants of its attention and feed-forward."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from sinkscope.attention.variants import AttentionShape
from sinkscope.errors import InputError


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
        if self.head_dim is None:
            self.head_dim = self.hidden_size // max(1, self.num_attention_heads)
            if self.head_dim * self.num_attention_heads != self.hidden_size:
                raise _bad_shape(
                    f"a width that {self.num_attention_heads} heads divide, or a head_dim",
                    f"hidden_size {self.hidden_size}",
                )
        self.variant_options = self.variant_options or {}
        self._check()
        super().__post_init__(**kwargs)

    def _check(self) -> None:
        sizes = (
            *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
            *("head_dim", "intermediate_size", "max_position_embeddings"),
        )
        for name in sizes:
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise _bad_shape(f"a whole number of at least 1 for {name}", repr(getattr(self, name)))
        shape = self.attention_shape()
        if shape.num_heads % shape.num_key_value_heads:
            raise _bad_shape(
                f"a num_key_value_heads that divides num_attention_heads {self.num_attention_heads}",
                str(shape.num_key_value_heads),
            )
        if shape.head_size % 2:
            raise _bad_shape("an even head_dim, since rotation turns pairs of channels", str(shape.head_size))

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


def _bad_shape(expected: str, found: str) -> InputError:
    return InputError(expected=expected, found=found, next_step="Change it in the configuration")
