"""How numbers are rounded: schemes of linear layers by compressed-tensors, and formats of the KV cache.

A scheme of a linear layer is a `QuantizationScheme` of compressed-tensors, and its own functions find the scales and
round (`calculate_qparams`, `compute_dynamic_scales_and_zp`, `fake_quantize`), in float32. The package has no formats of
llama.cpp and none of KIVI, so these are written out here.
Axes: B texts of a pass, T positions, S keys, E inputs, O outputs, I inputs of a weight, K key-value heads, D head size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from sinkscope.errors import InputError

CONTROL_BITS = 24
"""Of a control, which must change next to nothing: as many as float32 keeps."""
TOKENS_OF_KIVI = 32
"""Tokens of a channel of the keys, or channels of a token of the values, that share a scale."""
BLOCK_OF_LLAMA_CPP = 32
"""Numbers of a token, over its heads, that share a scale."""

W8A8_STATIC, W8A8_TENSOR = "W8A8_STATIC", "W8A8_TENSOR"
"""What compressed-tensors has no name for: 8-bit integers with one scale for all that a layer reads, static or one for
each text."""


@cache
def compressed_tensors() -> Any:
    """The package's module of quantisation; refuses where it is not installed."""
    try:
        import compressed_tensors.quantization
    except ImportError:
        raise InputError(
            "Schemes are rounded by compressed-tensors, which is not installed. Install it: pip install "
            "'sinkscope[quantise]'."
        ) from None
    return compressed_tensors.quantization


def is_named(name: str) -> bool:
    """Whether a scheme has this name: one of compressed-tensors, or one of ours."""
    return name in (W8A8_STATIC, W8A8_TENSOR) or compressed_tensors().is_preset_scheme(name)


def named_scheme(name: str) -> Any:
    """The `QuantizationScheme` of that name, for every Linear; refuses an unknown name."""
    package = compressed_tensors()
    if name not in (W8A8_STATIC, W8A8_TENSOR):
        try:
            return package.preset_name_to_scheme(name, ["Linear"])
        except KeyError as error:
            raise InputError(
                f"There is no scheme {name}, and no such file. Of compressed-tensors: {error.args[0]}; and "
                f"{W8A8_STATIC} and {W8A8_TENSOR}."
            ) from None
    # The observer of least squared error, as llm-compressor calls it: a static scale clips a few far values.
    how = {"dynamic": True} if name == W8A8_TENSOR else {"observer": "mse"}
    inputs = package.QuantizationArgs(num_bits=8, strategy="tensor", **how)
    weights = package.QuantizationArgs(num_bits=8, strategy="channel")
    return package.QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)


def configured_schemes(path: Path) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """(the `QuantizationScheme`s of a file, the modules that it ignores).

    The file is a configuration of compressed-tensors in YAML or JSON, or a checkpoint's config.json, or its folder.
    """
    package = compressed_tensors()
    file = path / "config.json" if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
        content = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
        if isinstance(content, dict):
            content = content.get("quantization_config", content)
        if not isinstance(content, dict) or "config_groups" not in content:
            method = content.get("quant_method", "none") if isinstance(content, dict) else "none"
            raise InputError(
                f"{file} has no `config_groups` of compressed-tensors (its quantisation is {method}). Give a "
                "configuration of compressed-tensors, or the name of a scheme such as W4A16."
            )
        config = package.QuantizationConfig.model_validate(content)
    except (OSError, UnicodeError, ValueError, KeyError, yaml.YAMLError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"{file} cannot be read as a configuration of compressed-tensors: {reason}.") from error
    if config.kv_cache_scheme is not None:
        raise InputError(
            f"{file} has a `kv_cache_scheme` beside its groups, and the two are measured apart. Leave it out, and give "
            "the cache with --cache, such as fp8."
        )
    return tuple(config.config_groups.values()), tuple(config.ignore or ())


def why_not_rounded(scheme: Any, num_inputs: int) -> str | None:
    """Why a layer with so many inputs cannot have this scheme; None where it can."""
    for args in (scheme.weights, scheme.input_activations):
        if args is None:
            continue
        if args.group_size is not None and args.group_size > 0 and num_inputs % args.group_size:
            return f"{num_inputs} inputs are no multiple of its group of {args.group_size}"
        if args is scheme.input_activations and not args.dynamic:
            if args.strategy != "tensor":
                return f"static scales of inputs must be one a tensor, not one a {args.strategy}"
            if not args.symmetric:
                return "asymmetric static scales of inputs are not measured"
    if scheme.output_activations is not None:
        return "it rounds outputs too, which is not measured"
    return None


def stored_bits(args: Any) -> float:
    """Bits a number, with those of the scales that a group shares."""
    scale_bits = 16 if args.scale_dtype is None else 8
    return args.num_bits + (scale_bits / args.group_size if args.group_size and args.group_size > 0 else 0)


def control_args(args: Any) -> Any:
    """The same in 24-bit integers: who shares a scale stays as it is."""
    how = {"num_bits": CONTROL_BITS, "type": "int", "scale_dtype": None, "zp_dtype": torch.int32}
    if args.strategy == "tensor_group":  # whose global scale is for scales of few bits
        how |= {"strategy": "group", "dynamic": bool(args.dynamic)}
    return args.model_copy(update=how)


def rounded_weight(args: Any, weight_OI: Tensor) -> Tensor:
    """A weight under a scheme; its scales are those of its smallest and largest values."""
    package, weight = compressed_tensors(), weight_OI.float()
    helpers = package.utils
    if args.strategy == "tensor":
        parts, dims, keep = weight, (0, 1), False
    elif args.strategy == "channel":
        parts, dims, keep = weight, (1,), True
    elif args.strategy == "block":
        height, width = args.block_structure
        padded = helpers.maybe_pad_tensor_for_block_quant(weight, args.block_structure)
        parts, dims, keep = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height)), (1, 3), False
    else:
        parts, dims, keep = weight.unflatten(1, (-1, args.group_size)), (-1,), False
    low, high = parts.amin(dims, keepdim=keep), parts.amax(dims, keepdim=keep)
    overall = helpers.generate_gparam(weight.amin(), weight.amax()) if args.strategy == "tensor_group" else None
    scale, zero = helpers.calculate_qparams(low, high, args, global_scale=overall)
    return package.fake_quantize(weight, scale, zero, args, global_scale=overall).to(weight_OI.dtype)


def rounded_input(args: Any, x_BTE: Tensor, largest: float | None = None) -> Tensor:
    """What a linear layer reads under a scheme; `largest` is its range in the calibration, for static scales."""
    package, x = compressed_tensors(), x_BTE.float()
    helpers = package.utils
    if args.strategy == "tensor" and args.dynamic and len(x) > 1:
        # A dynamic scale is shared by all that is read at once, and it must be one text's.
        return torch.cat([rounded_input(args, x_1TE) for x_1TE in x_BTE.split(1)])
    end = None if largest is None else torch.as_tensor(largest, device=x.device, dtype=x.dtype)
    overall = None
    if args.strategy == "tensor_group" and end is not None:
        overall = helpers.generate_gparam(-end, end)
    if args.dynamic:
        # The module is not looked at; the function asks for one.
        scale, zero = helpers.compute_dynamic_scales_and_zp(x, args, nn.Identity(), global_scale=overall)
    else:
        assert end is not None
        scale, zero = helpers.calculate_qparams(-end, end, args)
    return package.fake_quantize(x, scale, zero, args, global_scale=overall).to(x_BTE.dtype)


@dataclass(frozen=True, kw_only=True)
class CacheFormat:
    """How keys and values are kept."""

    key: Callable[[Tensor, Tensor], Tensor]
    """From keys [B, K, S, D] after rotary, as engines keep them, and the largest magnitude of each head in the
    calibration [K], to what is read back."""
    value: Callable[[Tensor, Tensor], Tensor]
    bits: float
    """Of a number, with its share of the scales."""
    is_calibrated: bool = False
    """Whether it has static scales."""
    multiple: int = 1
    """A token's keys, over all heads or of one, must be a multiple of this."""
    by_head: bool = True


def _by_compressed_tensors(how: Mapping[str, Any], x_BKSD: Tensor, largest_K: Tensor) -> Tensor:
    """Static scales, one a tensor or one a head; or groups along D below one static scale."""
    package = compressed_tensors()
    helpers, args = package.utils, package.QuantizationArgs(**how)
    x, largest = x_BKSD.float(), largest_K.to(x_BKSD.device, torch.float32)
    if args.strategy == "tensor_group":
        overall = helpers.generate_gparam(-largest.amax(), largest.amax())
        scale, zero = helpers.compute_dynamic_scales_and_zp(x, args, nn.Identity(), global_scale=overall)
        return package.fake_quantize(x, scale, zero, args, global_scale=overall).to(x_BKSD.dtype)
    end = largest[:, None, None] if args.strategy == "attn_head" else largest.amax()
    scale, zero = helpers.calculate_qparams(-end, end, args)
    return package.fake_quantize(x, scale, zero, args).to(x_BKSD.dtype)


def _q8_0(x_BKSD: Tensor, largest_K: Tensor) -> Tensor:
    """llama.cpp's q8_0: of each block of 32 the largest magnitude is 127 steps; the step is kept in float16."""
    return _by_block(x_BKSD, lambda x: (step := x.abs().amax(-1, keepdim=True) / 127, _divided(x, step).round()))


def _q4_0(x_BKSD: Tensor, largest_K: Tensor) -> Tensor:
    """llama.cpp's q4_0: of each block of 32 the number of largest magnitude, with its sign, is -8 steps, of -8 to 7."""

    def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
        step = x.gather(-1, x.abs().argmax(-1, keepdim=True)) / -8
        return step, (_divided(x, step) + 8.5).floor().clamp(0, 15) - 8

    return _by_block(x_BKSD, rounded)


def _by_block(x_BKSD: Tensor, rounded: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
    """Rounded in blocks of 32 of a token's numbers, over its heads; steps are kept in float16."""
    x_BSN = x_BKSD.float().transpose(1, 2).flatten(2)
    step, levels = rounded(x_BSN.unflatten(-1, (-1, BLOCK_OF_LLAMA_CPP)))
    return (step.half().float() * levels).reshape(x_BKSD.transpose(1, 2).shape).transpose(1, 2).to(x_BKSD.dtype)


def _divided(x: Tensor, step: Tensor) -> Tensor:
    """x / step; zero where the step is zero, since all is zero there."""
    return torch.where(step == 0, 0, x / step.where(step != 0, 1))


def _kivi(bits: int, dim: int, x_BKSD: Tensor, largest_K: Tensor) -> Tensor:
    """KIVI (Liu et al. 2024): of 32 numbers along an axis, the least and the largest are the ends of 2^bits levels."""
    parts = []
    for part in x_BKSD.float().split(TOKENS_OF_KIVI, dim):
        low, high = part.amin(dim, keepdim=True), part.amax(dim, keepdim=True)
        step = (high - low) / (2**bits - 1)
        parts.append(_divided(part - low, step).round() * step + low)
    return torch.cat(parts, dim).to(x_BKSD.dtype)


def _static(**how: Any) -> dict[str, Any]:
    rounding = partial(_by_compressed_tensors, how)
    return {"key": rounding, "value": rounding, "is_calibrated": True}


_LLAMA_CPP = {"multiple": BLOCK_OF_LLAMA_CPP, "by_head": False}
CACHES: dict[str, CacheFormat] = {
    "fp8": CacheFormat(**_static(num_bits=8, type="float", strategy="tensor"), bits=8),
    "fp8-per-head": CacheFormat(**_static(num_bits=8, type="float", strategy="attn_head"), bits=8),
    "int8": CacheFormat(**_static(num_bits=8, type="int", strategy="tensor"), bits=8),
    "q8_0": CacheFormat(key=_q8_0, value=_q8_0, bits=8.5, **_LLAMA_CPP),
    "q4_0": CacheFormat(key=_q4_0, value=_q4_0, bits=4.5, **_LLAMA_CPP),
    "kivi-8": CacheFormat(key=partial(_kivi, 8, -2), value=partial(_kivi, 8, -1), bits=9),
    "kivi-4": CacheFormat(key=partial(_kivi, 4, -2), value=partial(_kivi, 4, -1), bits=5),
    "nvfp4": CacheFormat(
        **_static(
            num_bits=4,
            type="float",
            strategy="tensor_group",
            group_size=16,
            dynamic="local",
            scale_dtype=torch.float8_e4m3fn,
        ),
        bits=4.5,
        multiple=16,
    ),
}
"""Keys and values have one calibrated scale a tensor, or one a head; blocks of 32 with a scale each (llama.cpp); or 32
tokens of a channel of the keys, 32 channels of a token of the values (KIVI, without its recent tokens in 16 bits)."""
CONTROL_CACHE = CacheFormat(
    key=partial(_kivi, CONTROL_BITS, -2), value=partial(_kivi, CONTROL_BITS, -1), bits=CONTROL_BITS
)
