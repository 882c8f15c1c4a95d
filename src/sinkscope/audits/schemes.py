"""What engineers do to a model to make it cheaper: fewer bits in linear layers or in the KV cache, or a window.

- A scheme of linear layers rounds weights, or what the layers read, or both, as compressed-tensors does (`formats`).
  Static scales are made in a calibration. The output head is never rounded: its weights are often those of the
  embeddings.
- A scheme of the cache rounds keys, after rotary, and values, before they are attended to.
- A window lets a query attend to the last quarter of a text's length.
Tokens that are kept stay in 16 bits in the cache, and a window always shows them.
Axes: N texts, B texts of a pass, T positions, S keys, E inputs, O outputs, H query heads, K key-value heads, D head
size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sinkscope.audits.formats import (
    CACHES,
    CONTROL_CACHE,
    CacheFormat,
    configured_schemes,
    control_args,
    is_named,
    named_scheme,
    rounded_input,
    rounded_weight,
    stored_bits,
    why_not_rounded,
)
from sinkscope.errors import InputError
from sinkscope.models.anatomy import anatomy_of, idle_adapters, is_linear, is_transposed, projection_weight
from sinkscope.models.loaded import bare_model
from sinkscope.tracing.attention_hook import attention_hook
from sinkscope.tracing.attention_rule import AttentionRule
from sinkscope.tracing.single_reader import in_this_thread, single_reader

TILE_SCORES = 1 << 24
"""Attention scores that are held at once."""
WINDOW, WINDOW_WITH_SINKS = "window", "window-with-sinks"
DEFAULT_SCHEMES = ("FP8_DYNAMIC", "FP8", "W8A8", "W4A16", "NVFP4")
"""What is deployed most: on Hopper and later, on Ampere, for few users, on Blackwell."""
DEFAULT_CACHES = ("fp8", "q8_0", "q4_0")

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""Modules that engines such as vLLM multiply as one, so that all of them have the same scheme or none has any."""

Visible = Callable[[Tensor], Tensor]
"""From some queries to the keys that they may see, [B or 1, queries, S]: never a square of the text's length."""
Ranges = Mapping[str, Any]
"""Largest magnitudes in a calibration: of what a linear layer reads, and [2, K] of an attention's keys and values, by
the module's name."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """One way to make a model cheaper."""

    name: str
    what: Literal["linear", "cache", "window"]
    groups: tuple[Any, ...] = ()
    """The `QuantizationScheme`s of compressed-tensors; a module has the first that targets it."""
    ignore: tuple[str, ...] = ()
    """Modules that a configuration leaves out."""
    cache: CacheFormat | None = None
    window: int | None = None
    """Keys that a query sees, its own included; None for a quarter of the text."""
    keeps_sinks: bool = False
    """Whether the sinks of each text are kept."""

    @property
    def is_control(self) -> bool:
        return self.name.endswith("(control)")

    def control(self) -> Scheme:
        """The same with so many bits, or so wide a window, that next to nothing changes."""
        groups = []
        for group in self.groups:
            args = {part: getattr(group, part) for part in ("weights", "input_activations")}
            wide = {part: None if given is None else control_args(given) for part, given in args.items()}
            groups.append(group.model_copy(update=wide))
        cache = None if self.cache is None else CONTROL_CACHE
        name = f"{self.name} (control)"
        return replace(self, name=name, groups=tuple(groups), cache=cache, window=1 << 30)

    def arguments(self, model: Any) -> dict[str, Any]:
        """By the name of each linear layer that it rounds, its `QuantizationScheme`."""
        from compressed_tensors.utils.match import match_name, match_targets

        chosen = {}
        for name, layer in linear_layers(bare_model(model)).items():
            if any(match_name(name, pattern) for pattern in self.ignore):
                continue
            for group in self.groups:
                # Conv1D of GPT-2 is a linear layer too.
                if "Linear" in group.targets or match_targets(name, layer, group.targets):
                    chosen[name] = group
                    break
        return chosen

    def modules(self, model: Any) -> list[str]:
        """The names of the modules that it can act on: linear layers, or attention for the cache and the window."""
        return list(self.arguments(model) if self.what == "linear" else attentions(bare_model(model)))

    def needs_ranges(self) -> bool:
        """Whether it has static scales."""
        inputs = [group.input_activations for group in self.groups]
        static = any(args is not None and args.dynamic is not True for args in inputs)
        return static or (self.cache is not None and self.cache.is_calibrated)

    def shares_a_scale(self) -> bool:
        """Whether all tokens of a layer share a scale, so that one of them can cost all others."""
        inputs = [group.input_activations for group in self.groups]
        return any(args is not None and args.strategy in ("tensor", "tensor_group") for args in inputs)

    def why_not(self, model: Any) -> str | None:
        """Why this model cannot have it, in a sentence; None where it can."""
        model = bare_model(model)
        if self.what == "linear":
            layers, arguments = linear_layers(model), self.arguments(model)
            if not arguments:
                return "no linear layer of this model is among its targets."
            for name, group in arguments.items():
                if why := why_not_rounded(group, projection_weight(layers[name]).shape[1]):
                    return f"in {name} {why}. Give a configuration that fits, or ignores it."
        if self.cache is not None and self.cache.multiple > 1:
            head, heads = _cached_shape(model)
            size = head if self.cache.by_head else head * heads
            if size % self.cache.multiple:
                where = "head" if self.cache.by_head else "token"
                return f"the {size} numbers of a {where} are no multiple of its block of {self.cache.multiple}."
        return None

    def bits(self, model: Any, modules_in_16_bits: Collection[str] = ()) -> float:
        """Bits a weight of the linear layers, or a number of the cache, on average; some modules may keep 16."""
        model = bare_model(model)
        if self.what != "linear":
            names, low = self.modules(model), 16 if self.cache is None else self.cache.bits
            return low + (16 - low) * len(set(names) & set(modules_in_16_bits)) / len(names)
        arguments, total, count = self.arguments(model), 0.0, 0
        for name, layer in linear_layers(model).items():
            group, size = arguments.get(name), layer.weight.numel()
            weights = None if group is None or name in modules_in_16_bits else group.weights
            total += size * (16 if weights is None else stored_bits(weights))
            count += size
        return total / count

    def sizes(self, model: Any) -> dict[str, int]:
        """By module, its weights; for the cache, 1 a layer."""
        layers = linear_layers(bare_model(model)) if self.what == "linear" else {}
        return {name: layers[name].weight.numel() if layers else 1 for name in self.modules(model)}

    @contextlib.contextmanager
    def on(
        self,
        model: Any,
        modules: Collection[str] | None = None,
        *,
        ranges: Ranges | None = None,
        keep: Tensor | None = None,
    ) -> Iterator[None]:
        """While open, the scheme acts in these modules, or in all; on leaving, the model is as it was to the bit.

        `ranges` are those of a calibration (`static_scales`). `keep` [B, T] marks tokens that stay in 16 bits in the
        cache, or in the window; the passes inside must have its shape.
        """
        model = bare_model(model)
        names = self.modules(model)
        if unknown := [name for name in modules or () if name not in names]:
            raise InputError(
                f"{self.name} acts on no module of this model called {unknown[0]}. Choose among "
                f"`Scheme.modules(model)`, such as {names[0]}."
            )
        chosen = names if modules is None else [name for name in names if name in modules]
        if self.needs_ranges() and (ranges is None or not set(chosen) <= set(ranges)):
            reason = "none are given" if ranges is None else "these are of other modules"
            raise InputError(
                f"{self.name} takes its scales from the `ranges` of a calibration, but {reason}. Give what "
                "`calibrate(model, ids).ranges(scheme)` returns."
            )
        with single_reader(model):
            opened = (
                _rounded_layers(self, model, chosen, ranges or {})
                if self.what == "linear"
                else _other_attention(self, model, chosen, ranges or {}, keep)
            )
            with opened:
                yield


def schemes_of(schemes: Sequence[str] | None = None, caches: Sequence[str] | None = None) -> list[Scheme]:
    """The schemes of these names or files, and those of the cache and the windows; the usual ones where neither is
    given."""
    if schemes is None and caches is None:
        schemes, caches = DEFAULT_SCHEMES, DEFAULT_CACHES
    return [*map(linear_scheme, schemes or ()), *map(cache_scheme, caches or ())]


def linear_scheme(name: str) -> Scheme:
    """The scheme of linear layers of that name, or of the file or folder of that name."""
    if not is_named(name.upper()) and Path(name).exists():
        groups, ignore = configured_schemes(Path(name))
        return Scheme(name=Path(name).stem, what="linear", groups=groups, ignore=ignore)
    return Scheme(name=name.upper(), what="linear", groups=(named_scheme(name.upper()),))


def cache_scheme(name: str) -> Scheme:
    """The scheme of the cache of that name, or the window."""
    if name in (WINDOW, WINDOW_WITH_SINKS):
        return Scheme(name=name, what="window", keeps_sinks=name == WINDOW_WITH_SINKS)
    if name not in CACHES:
        raise InputError(
            f"There is no cache format {name!r}. Use one of {', '.join([*CACHES, WINDOW, WINDOW_WITH_SINKS])}."
        )
    return Scheme(name=f"cache-{name}", what="cache", cache=CACHES[name])


def linear_layers(model: Any) -> dict[str, Any]:
    """By name, every linear layer that a pass over text calls, except the output head.

    Refuses a model that multiplies by other weights too, since a scheme could not act there.
    """
    left_out = {model.get_output_embeddings(), *idle_adapters(model)}
    called = set(anatomy_of(model).decoder.modules()) - left_out  # not those that read images
    layers = {name: part for name, part in model.named_modules() if is_linear(part) and part in called}
    # Of models of sinkscope's own: layers that multiply by a weight without being a Linear.
    others = [type(part).__name__ for part in model.modules() if getattr(part, "acts_by_weight_alone", False)]
    experts = [layer.index for layer in anatomy_of(model).layers if layer.experts is not None]
    if others or experts or not layers:
        if experts:
            why = f"has experts in layer {experts[0]}"
        else:
            why = f"has {others[0]}" if others else f"({type(model).__name__}) has none"
        raise InputError(
            "All projections must be linear layers (torch.nn.Linear, or Conv1D of GPT-2), but this model "
            f"{why}. Use a dense model."
        )
    return layers


def attentions(model: Any) -> dict[str, int]:
    """The layer of each attention module, by name."""
    layer_of = {id(layer.attention): layer.index for layer in anatomy_of(model).attention_layers}
    return {name: layer_of[id(part)] for name, part in model.named_modules() if id(part) in layer_of}


def fused_groups(modules: Collection[str]) -> dict[str, list[str]]:
    """By the name of what an engine fuses, the modules in it; a module alone is a group of its own."""
    fused_of = {part: fused for fused, parts in FUSED.items() for part in parts}
    groups: dict[str, list[str]] = {}
    for name in modules:
        parent, dot, last = name.rpartition(".")
        groups.setdefault(f"{parent}{dot}{fused_of.get(last, last)}", []).append(name)
    return groups


def layers_of(model: Any) -> dict[str, int]:
    """The layer of every module inside a block, by name."""
    index = {id(part): layer.index for layer in anatomy_of(model).layers for part in layer.block.modules()}
    return {name: index[id(part)] for name, part in model.named_modules() if id(part) in index}


def rounded_cache(
    scheme: Scheme, key_BKSD: Tensor, value_BKSD: Tensor, range_2K: Tensor | None = None, keep_BT: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Keys and values as a scheme of the cache reads them back; kept tokens are the last of them, in 16 bits."""
    assert scheme.cache is not None
    largest_2K = torch.zeros(2, key_BKSD.shape[1]) if range_2K is None else range_2K
    key = scheme.cache.key(key_BKSD, largest_2K[0])
    value = scheme.cache.value(value_BKSD, largest_2K[1])
    if keep_BT is None:
        return key, value
    kept = keep_BT.to(key.device)[:, None, :, None]
    return torch.where(kept, key_BKSD, key), torch.where(kept, value_BKSD, value)


def attend(
    query_BHTD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, rule: AttentionRule, visible: Visible | None = None
) -> Tensor:
    """[B, T, H, D] attention written out, a tile of queries at a time, under a model's own rule and a mask of ours."""
    if rule.mask_changes:
        raise InputError("This scheme cannot act beside an intervention on the mask. Leave the intervention out.")
    num_batch, num_heads, length, _ = query_BHTD.shape
    groups = num_heads // key_BKSD.shape[1]
    key_BHSD, value_BHSD = (x.repeat_interleave(groups, 1) for x in (key_BKSD, value_BKSD))
    positions = torch.arange(length, device=query_BHTD.device)
    tile = max(1, TILE_SCORES // (num_batch * num_heads * length))
    outputs = []
    for queries in positions.split(tile):
        behind_TS = queries[:, None] - positions
        seen = (behind_TS >= 0) & (behind_TS < (rule.window or length))
        if visible is not None:
            seen = seen & visible(queries)[:, None]
        scores_BHTS = (query_BHTD[:, :, queries] @ key_BHSD.transpose(2, 3)).float() * rule.scaling
        weights_BHTS = rule.weights(scores_BHTS, seen)
        outputs.append(weights_BHTS.to(value_BHSD.dtype) @ value_BHSD)
    return torch.cat(outputs, 2).transpose(1, 2)


@contextlib.contextmanager
def entering_rows(model: Any, layers: Mapping[str, Any], act: Any) -> Iterator[None]:
    """While open, `act(name, x [B, T, E])` is called with the input of each layer; what it returns, if anything, takes
    the input's place.

    Some models give their feed-forward all tokens of a batch in one row. The embeddings say how many texts there are.
    """
    shape: list[int] = []

    def on_embedding(module: Any, args: Any, output: Tensor) -> None:
        shape[:] = output.shape[:2]

    def entering(name: str):
        def hook(module: Any, args: tuple) -> tuple | None:
            changed = act(name, args[0].reshape(*shape, -1))
            return None if changed is None else (changed.reshape(args[0].shape), *args[1:])

        return hook

    with contextlib.ExitStack() as stack:
        stack.callback(model.get_input_embeddings().register_forward_hook(in_this_thread(on_embedding)).remove)
        for name, layer in layers.items():
            stack.callback(layer.register_forward_pre_hook(in_this_thread(entering(name))).remove)
        yield


@contextlib.contextmanager
def _rounded_layers(scheme: Scheme, model: Any, chosen: list[str], ranges: Ranges) -> Iterator[None]:
    """While open, these linear layers have rounded weights, and read rounded inputs."""
    layers, arguments = linear_layers(model), scheme.arguments(model)
    reading = {name: layers[name] for name in chosen if arguments[name].input_activations is not None}

    def rounded(name: str, x_BTE: Tensor) -> Tensor:
        return rounded_input(arguments[name].input_activations, x_BTE, ranges.get(name))

    # The tensors themselves go back, not copies, so the model is as it was to the bit.
    before = [(layers[name], layers[name].weight.data) for name in chosen]
    try:
        for name in chosen:
            if arguments[name].weights is not None:
                layer = layers[name]
                weight = rounded_weight(arguments[name].weights, projection_weight(layer))
                layer.weight.data = weight.T.contiguous() if is_transposed(layer) else weight
        with entering_rows(model, reading, rounded):
            yield
    finally:
        for layer, values in before:
            layer.weight.data = values


def _other_attention(
    scheme: Scheme, model: Any, chosen: list[str], ranges: Ranges, keep_BT: Tensor | None
) -> contextlib.AbstractContextManager:
    acting = {layer: name for name, layer in attentions(model).items() if name in chosen}

    def on_attention(layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        if layer not in acting:
            return attend(query, key, value, rule)
        if scheme.what == "cache":
            return attend(query, *rounded_cache(scheme, key, value, ranges.get(acting[layer]), keep_BT), rule)
        return attend(query, key, value, rule, window_mask(scheme, query, keep_BT))

    return attention_hook(anatomy_of(model), on_attention)


def _cached_shape(model: Any) -> tuple[int, int]:
    """(the size of a head of the keys, how many heads a token has), of the first layer."""
    config = model.config.get_text_config()
    heads = anatomy_of(model).num_key_value_heads
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads, heads


def window_size(scheme: Scheme, length: int) -> int:
    """How many keys a query attends to in a text of this length, its own included."""
    return min(length, max(1, length // 4) if scheme.window is None else scheme.window)


def window_mask(scheme: Scheme, query_BHTD: Tensor, keep_BT: Tensor | None = None) -> Visible:
    """The keys that a window shows to each query. Kept tokens are always among them and take their place in it."""
    length = query_BHTD.shape[2]
    positions = torch.arange(length, device=query_BHTD.device)
    size = window_size(scheme, length)
    if keep_BT is None:
        return lambda queries: (queries[:, None] - positions < size)[None]
    keep_BS = keep_BT.to(query_BHTD.device)
    left_B = (size - keep_BS.sum(1)).clamp(min=1)
    return lambda queries: (queries[:, None] - positions < left_B[:, None, None]) | keep_BS[:, None]
