"""Quantised checkpoints: dequantised to dense weights where transformers can do it, and refused elsewhere.

If transformers does not know how a weight is packed, it takes the stored numbers for the weights and drops their
scales. So the stored types are checked before anything is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from sinkscope.errors import InputError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

FULL_PRECISION = ("F64", "F32", "BF16", "F16")
WEIGHT_NAMES = ("weight", "_proj")
"""How names of weights end, also those of experts; masks and positions are integers in sound checkpoints too."""
SCALE_NAMES = re.compile(r"(^|[._])(scales?|scale_inv|scale_2|q?zeros|zero_points?|absmax|amax|quant_state\S*)$")
WHOLE = "Name the checkpoint in full precision, or as a GGUF file."
INSTALL = "Install what its quantisation asks for, or name the checkpoint in full precision."


def dequantising(config: PretrainedConfig, stored: Mapping[str, str], name: str) -> dict[str, Any]:
    """Arguments for from_pretrained to load a folder as dense weights; `stored` holds its tensors' dtypes by name."""
    description = getattr(config, "quantization_config", None)
    if description is None:
        _refuse_packed(stored, name)
        return {}
    from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig

    method = description.get("quant_method") if isinstance(description, dict) else None
    try:
        is_supported = AutoHfQuantizer.supports_quant_method(description)
        quantisation = AutoQuantizationConfig.from_dict(description) if is_supported else None
    except Exception as error:  # a stranger wrote it, and any class of transformers may fail on it
        raise InputError(
            f"Transformers cannot read the quantisation {method!r} of {name} here: {str(error).rstrip('.')}. {INSTALL}"
        ) from error
    if quantisation is None:
        raise InputError(f"This version of transformers does not know the quantisation {method!r} of {name}. {WHOLE}")
    if method in ("fp8", "mxfp8"):
        _refuse_unscaled(stored, name)
    if not hasattr(quantisation, "dequantize"):
        return {}  # what it leaves packed is dequantised after loading
    quantisation.dequantize = True
    return {"quantization_config": quantisation}


def dense(model: PreTrainedModel, name: str, dtype: torch.dtype | str) -> PreTrainedModel:
    """The model of a quantised checkpoint with dense weights in one dtype.

    What transformers left packed is dequantised by its own method.
    """
    target = model.config.dtype if dtype == "auto" else dtype
    if getattr(model, "is_quantized", False):
        method = getattr(model, "quantization_method", None)
        try:
            model = model.dequantize(dtype=target)
        except NotImplementedError as error:
            raise InputError(
                f"Transformers cannot dequantise {name}, quantised by {getattr(method, 'value', method)}. {WHOLE}"
            ) from error
    # transformers leaves what was not packed in the dtype on disk. Buffers stay: some must be in float32.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(target)
    return model


def check_scales(unexpected: Iterable[str], name: str) -> None:
    """Refuses a checkpoint with scales or zero points that were not loaded: the weights are wrong without them."""
    if stray := sorted(key for key in unexpected if SCALE_NAMES.search(key)):
        raise InputError(
            f"{name} has {len(stray)} scales of quantised weights that nothing applies, first {stray[0]}. {WHOLE}"
        )


def _refuse_packed(stored: Mapping[str, str], name: str) -> None:
    """Refuses packed weights that no quantization_config describes."""
    packed = {
        key: dtype
        for key, dtype in stored.items()
        if dtype.startswith("F8") or (dtype not in FULL_PRECISION and key.endswith(WEIGHT_NAMES))
    }
    if packed:
        first = min(packed)
        raise InputError(
            f"{len(packed)} of {len(stored)} tensors in {name} are packed, not float32, bfloat16, float16 or float64; "
            f"the first is {first} in {packed[first]}. No quantization_config says how to read them. {WHOLE}"
        )


def _refuse_unscaled(stored: Mapping[str, str], name: str) -> None:
    """Refuses 8-bit floating-point weights without a scale beside them."""
    for key, dtype in sorted(stored.items()):
        scaled = not stored.keys().isdisjoint((f"{key}_scale_inv", f"{key}_scale"))
        if dtype.startswith("F8") and not scaled and not SCALE_NAMES.search(key):
            raise InputError(f"{key} in {name} is stored in {dtype} without its scale. {WHOLE}")
