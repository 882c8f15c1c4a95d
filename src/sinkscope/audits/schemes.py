"""What engineers do to a model to make it cheaper, emulated: fewer bits in activations, weights or cache, or a window.

Rounding is symmetric and to nearest: x becomes s clip(round(x / s)), s the largest magnitude of what shares a scale
over 2^(bits - 1) - 1.
- Activations are what a linear layer reads. A scale is shared by a text (dynamic, per tensor), by every text
  (static, per tensor; made for the least squared error in a calibration, and larger values are clipped) or by a token.
- Weights share a scale by output channel, or by a group of 128 of its inputs.
- In the cache, keys share a scale by channel of a text and values by token (Liu et al. 2024, KIVI): a few channels of
  the keys are large for every token, and values have no such channels. So one token with large keys costs all others.
- A window lets a query attend to the last quarter of a text's length.
Tokens that are kept stay in 16 bits and do not count for a scale; a window always shows them. The output head is never
rounded: its weights are often those of the embeddings.
Axes: N texts, B texts of a pass, T positions, S keys, E inputs, O outputs, H query heads, K key-value heads, D head
size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from sinkscope.errors import InputError
from sinkscope.models.anatomy import anatomy_of, idle_adapters, is_linear, is_transposed, projection_weight
from sinkscope.models.loaded import bare_model
from sinkscope.tracing.attention_hook import attention_hook
from sinkscope.tracing.attention_rule import AttentionRule
from sinkscope.tracing.single_reader import in_this_thread, single_reader

GROUP = 128
"""Inputs of a weight that share a scale, where groups do."""
CONTROL_BITS = 16
"""Of a control, which must change next to nothing."""
TILE_SCORES = 1 << 24
"""Attention scores that are held at once."""


Visible = Callable[[Tensor], Tensor]
"""From some queries to the keys that they may see, [B or 1, queries, S]: never a square of the text's length."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """One way to make a model cheaper."""

    name: str
    what: Literal["activations", "weights", "cache", "window"]
    bits: int = CONTROL_BITS
    shared_by: Literal["text", "calibration", "token", "channel", "group"] = "channel"
    """Which values share a scale: those of a text, of the calibration, a token, an output channel or a group of inputs.

    In the cache, keys share by channel and values by token."""
    group: int = GROUP
    window: int | None = None
    """Keys that a query sees, its own included; None for a quarter of the text."""
    keeps_sinks: bool = False
    """Whether the sinks of each text are kept."""

    def control(self) -> Scheme:
        """The same with so many bits, or so wide a window, that next to nothing changes."""
        return replace(self, name=f"{self.name} (control)", bits=CONTROL_BITS, window=1 << 30)

    def modules(self, model: Any) -> list[str]:
        """The names of the modules that it can act on: linear layers, or attention for the cache and the window."""
        model = bare_model(model)
        return list(attentions(model) if self.what in ("cache", "window") else linear_layers(model))

    @contextlib.contextmanager
    def on(
        self,
        model: Any,
        modules: Collection[str] | None = None,
        *,
        ranges: Mapping[str, float] | None = None,
        keep: Tensor | None = None,
    ) -> Iterator[None]:
        """While open, the scheme acts in these modules, or in all; on leaving, the model is as it was to the bit.

        `ranges` are those of what each linear layer reads in a calibration (`least_error_ranges`), for static scales.
        `keep` [B, T] marks tokens that stay in 16 bits, or in the window; the passes inside must have its shape.
        """
        model = bare_model(model)
        names = self.modules(model)
        if unknown := [name for name in modules or () if name not in names]:
            raise InputError(
                f"{self.name} acts on no module of this model called {unknown[0]}. Choose among "
                f"`Scheme.modules(model)`, such as {names[0]}."
            )
        chosen = names if modules is None else [name for name in names if name in modules]
        with single_reader(model):
            if self.what == "weights":
                opened = _rounded_weights(self, model, chosen)
            elif self.what == "activations":
                opened = _rounded_inputs(self, model, chosen, ranges, keep)
            else:
                opened = _other_attention(self, model, chosen, keep)
            with opened:
                yield


SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme(name="activations-8-static", what="activations", bits=8, shared_by="calibration"),
        Scheme(name="activations-8-dynamic", what="activations", bits=8, shared_by="text"),
        Scheme(name="activations-8-token", what="activations", bits=8, shared_by="token"),
        *(
            Scheme(name=f"weights-{bits}-{shared_by}", what="weights", bits=bits, shared_by=shared_by)
            for bits in (8, 4)
            for shared_by in ("channel", "group")
        ),
        *(Scheme(name=f"cache-{bits}", what="cache", bits=bits) for bits in (8, 4)),
        Scheme(name="window", what="window"),
        Scheme(name="window-with-sinks", what="window", keeps_sinks=True),
    )
}


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
    layer_of = {id(layer.attention): layer.index for layer in anatomy_of(model).layers}
    return {name: layer_of[id(part)] for name, part in model.named_modules() if id(part) in layer_of}


def layers_of(model: Any) -> dict[str, int]:
    """The layer of every module inside a block, by name."""
    index = {id(part): layer.index for layer in anatomy_of(model).layers for part in layer.block.modules()}
    return {name: index[id(part)] for name, part in model.named_modules() if id(part) in index}


def scheme_in_words(name: str) -> str:
    """A scheme as tables and sentences say it, such as 8-bit activations (per tensor, static)."""
    scheme = SCHEMES[name]
    if scheme.what == "cache":
        return f"{scheme.bits}-bit KV cache"
    if scheme.what == "window":
        return "window of a quarter of the text" + " (with its sinks)" * scheme.keeps_sinks
    shared = {
        "text": "per tensor, dynamic",
        "calibration": "per tensor, static",
        "token": "per token",
        "channel": "per channel",
        "group": f"groups of {scheme.group}",
    }[scheme.shared_by]
    return f"{scheme.bits}-bit {scheme.what} ({shared})"


def quantised(x: Tensor, bits: int, largest: Tensor | float) -> Tensor:
    """x rounded to 2^bits - 1 even steps up to `largest`, and clipped there; zeros stay zeros."""
    levels = 2 ** (bits - 1) - 1
    wide = x.float()
    scale = torch.as_tensor(largest).to(wide).clamp(min=levels * torch.finfo(torch.float32).tiny) / levels
    return ((wide / scale).round().clamp(-levels, levels) * scale).to(x.dtype)


def largest_over(x: Tensor, dims: int | tuple[int, ...], keep_BT: Tensor | None = None) -> Tensor:
    """The largest magnitude over some axes of x [B, ..., T, E], which stay with size 1; kept tokens do not count."""
    return without_kept(x, keep_BT).detach().float().abs().amax(dims, keepdim=True)


def without_kept(x: Tensor, keep_BT: Tensor | None) -> Tensor:
    """x [B, ..., T, E] with zeros for the tokens that are kept."""
    return x if keep_BT is None else x.masked_fill(_as_mask(keep_BT, x), 0)


def rounded_input(scheme: Scheme, x_BTE: Tensor, largest: float | None = None, keep_BT: Tensor | None = None) -> Tensor:
    """What a linear layer reads under a scheme of activations; `largest` is its range in the calibration."""
    if scheme.shared_by == "calibration":
        assert largest is not None
        rounded = quantised(x_BTE, scheme.bits, largest)
    else:
        dims = (-2, -1) if scheme.shared_by == "text" else -1
        rounded = quantised(x_BTE, scheme.bits, largest_over(x_BTE, dims, keep_BT))
    return rounded if keep_BT is None else torch.where(_as_mask(keep_BT, x_BTE), x_BTE, rounded)


def rounded_weight(scheme: Scheme, weight_OI: Tensor) -> Tensor:
    """A weight under a scheme of weights; the last group may be smaller."""
    size = scheme.group if scheme.shared_by == "group" else weight_OI.shape[1]
    return torch.cat([quantised(part, scheme.bits, largest_over(part, 1)) for part in weight_OI.split(size, 1)], 1)


def rounded_cache(
    scheme: Scheme, key_BKSD: Tensor, value_BKSD: Tensor, keep_BT: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Keys, by channel of a text, and values, by token, under a scheme of the cache."""
    key = quantised(key_BKSD, scheme.bits, largest_over(key_BKSD, -2, keep_BT))
    value = quantised(value_BKSD, scheme.bits, largest_over(value_BKSD, -1))
    if keep_BT is None:
        return key, value
    kept = _as_mask(keep_BT, key)
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


def _rounded_inputs(
    scheme: Scheme, model: Any, chosen: list[str], ranges: Mapping[str, float] | None, keep_BT: Tensor | None
) -> contextlib.AbstractContextManager:
    if scheme.shared_by == "calibration" and (ranges is None or not set(chosen) <= set(ranges)):
        reason = "none are given" if ranges is None else "these are of other layers"
        raise InputError(
            f"{scheme.name} takes its scales from `ranges` of every linear layer, but {reason}. Give what "
            "`least_error_ranges` returns for a calibration text."
        )
    layers = linear_layers(model)

    def rounded(name: str, x_BTE: Tensor) -> Tensor:
        return rounded_input(scheme, x_BTE, (ranges or {}).get(name), keep_BT)

    return entering_rows(model, {name: layers[name] for name in chosen}, rounded)


@contextlib.contextmanager
def _rounded_weights(scheme: Scheme, model: Any, chosen: list[str]) -> Iterator[None]:
    layers = linear_layers(model)
    # The tensors themselves go back, not copies, so the model is as it was to the bit.
    before = [(layers[name], layers[name].weight.data) for name in chosen]
    try:
        for layer, _ in before:
            rounded = rounded_weight(scheme, projection_weight(layer))
            layer.weight.data = rounded.T.contiguous() if is_transposed(layer) else rounded
        yield
    finally:
        for layer, values in before:
            layer.weight.data = values


def _other_attention(
    scheme: Scheme, model: Any, chosen: list[str], keep_BT: Tensor | None
) -> contextlib.AbstractContextManager:
    layer_of = attentions(model)
    acting = {layer_of[name] for name in chosen}

    def on_attention(layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        if layer not in acting:
            return attend(query, key, value, rule)
        if scheme.what == "cache":
            return attend(query, *rounded_cache(scheme, key, value, keep_BT), rule)
        return attend(query, key, value, rule, window_mask(scheme, query, keep_BT))

    return attention_hook(anatomy_of(model), on_attention)


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


def _as_mask(keep_BT: Tensor, x: Tensor) -> Tensor:
    """The mask [B, T] in the shape of x [B, ..., T, E]."""
    return keep_BT.to(x.device).view(keep_BT.shape[0], *(1,) * (x.ndim - 3), keep_BT.shape[1], 1)
