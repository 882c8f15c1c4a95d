"""What goes into a block or an attention and what a block gives back, in the forms that families use."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def entering(args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """The hidden states of a call, which come first or by name."""
    return args[0] if args else kwargs["hidden_states"]


def leaving(output: Any) -> Tensor:
    """The hidden states that a block gives back, alone or first of several."""
    return output[0] if isinstance(output, tuple) else output
