"""Refuses a pass with NaN or infinity. NaN is above no threshold, so a model that overflows would show no sink."""

from __future__ import annotations

from torch import Tensor, nn

from sinkscope.errors import InputError

WIDER = {"float16": "float32", "bfloat16": "float32", "float32": "float64"}


def check_finite(model: nn.Module, largest_LT: Tensor, *, first_layer: int = 0) -> None:
    """Refuses NaN and infinity among the largest magnitudes [L, T] of the residual stream, and says where they begin.

    The first row leaves `first_layer`; -1 is the stream that enters layer 0. Whatever overflows inside a layer leaves
    it as NaN or infinity, so it is enough to look at the residual stream.
    """
    wrong = largest_LT.isfinite().logical_not().nonzero()
    if len(wrong):
        row, position = wrong[0].tolist()
        layer = row + first_layer
        where = f"in what leaves layer {layer}" if layer >= 0 else "in what enters layer 0"
        raise overflow(model, f"{where}, at position {position}")


def overflow(model: nn.Module, where: str) -> InputError:
    """The error for NaN or infinity somewhere in a pass."""
    dtype = next(str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point())
    advice = "Look at the model's weights: no type is wider."
    if dtype in WIDER:
        advice = f'Load the model with `dtype="{WIDER[dtype]}"`, or weaken the intervention, if one is on.'
    return InputError(f"There is NaN or infinity {where}: {dtype} cannot hold such numbers. {advice}")
