"""The hidden states in a call of a block or an attention, wherever the family passes them."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def entering(args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """The hidden states that a block or an attention is called with: its first argument, or one by name."""
    return args[0] if args else kwargs["hidden_states"]


def besides(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The other arguments of the same call."""
    return args[1:], {name: value for name, value in kwargs.items() if name != "hidden_states"}


def leaving(output: Any) -> Tensor:
    """The hidden states that a block returns, alone or as the first of several."""
    return output[0] if isinstance(output, tuple) else output
