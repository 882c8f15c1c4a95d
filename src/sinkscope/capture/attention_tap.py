"""Hands every layer's queries, keys and values to a function of ours, through interfaces that a model offers.

Most families look up a function by name in the attention registry of transformers. A mask function of the same name
must be registered too, or the model sees the future. Ours builds no mask: it passes on what the mask means (causal,
with or without a window) and refuses anything else. Falcon calls scaled_dot_product_attention itself, which a torch
function mode sees. Registration is process-wide, so both functions look up a context variable for the active tap. A
pass of another thread has none and uses the functions that the model used before.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface

from sinkscope.capture.attention_rule import AttentionRule
from sinkscope.capture.edits import row_edits
from sinkscope.capture.sole_reader import in_this_thread, sole_reader
from sinkscope.errors import InputError
from sinkscope.models.anatomy import Anatomy

NAME = "sinkscope"

OnAttention = Callable[[int, Tensor, Tensor, Tensor, AttentionRule], Tensor]
"""(layer, query [B, H, T, D], key [B, K, S, D], value [B, K, S, D], rule) -> value aggregation [B, T, H, D]."""

_HARMLESS = {
    "position_ids",
    "cache_position",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "sliding_window",
    "is_causal",
}
"""Arguments that models pass on to attention and that change nothing here: windows are read from the mask, positions
are already in q, k."""


@dataclass(frozen=True)
class CausalMask:
    """What a model's mask means; it is passed on in place of the mask."""

    window: int | None


@dataclass
class _ActiveTap:
    layer_of: dict[int, int]
    on_attention: OnAttention
    current_layer: int | None = None


_active: ContextVar[_ActiveTap | None] = ContextVar("sinkscope_attention_tap", default=None)
_before: dict[int, str] = {}
"""The attention implementation that each model used before, by its configuration's id: for passes of other threads.
Entries stay, since such a pass may still call our function just after the tap is closed."""


@contextlib.contextmanager
def attention_tap(anatomy: Anatomy, on_attention: OnAttention) -> Iterator[None]:
    """While open, every attention of the model goes through `on_attention`; on leaving, the model is as it was."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(sole_reader(anatomy.decoder))
        door = anatomy.family.attention_door
        config = None if door == "causal_sdpa" else anatomy.decoder.config
        if config is not None:
            before = config._attn_implementation
            if before != NAME:
                _before[id(config)] = before
            stack.callback(setattr, config, "_attn_implementation", before)
        layer_of = {id(layer.attention): layer.index for layer in anatomy.layers}
        stack.callback(_active.reset, _active.set(_ActiveTap(layer_of, on_attention)))
        if config is not None and door == "registry":
            # What set_attn_implementation does, without its walk over all modules: each attention asks the
            # configuration for the name at every call.
            config._attn_implementation = NAME
        else:
            for layer in anatomy.layers:
                enter = in_this_thread(lambda module, args, index=layer.index: enter_layer(index))
                stack.callback(layer.attention.register_forward_pre_hook(enter).remove)
            marker = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=next(anatomy.decoder.parameters()).device)
            stack.enter_context(_SdpaCalls(anatomy, marker))
            if config is not None:
                # Falcon reads this attribute at every call, and only its sdpa branch makes the call that can be seen.
                config._attn_implementation = "sdpa"
                # A mask of four dimensions is passed on as it is; without one Falcon builds T x T of them.
                by_marker = in_this_thread(_mask_by_marker(marker))
                stack.callback(anatomy.decoder.register_forward_pre_hook(by_marker, with_kwargs=True).remove)
        yield


def _tap() -> _ActiveTap:
    tap = _active.get()
    assert tap is not None
    return tap


def _name_before(config) -> str:
    """The implementation that a pass of another thread uses."""
    if id(config) not in _before:
        raise RuntimeError(f"the attention implementation '{NAME}' only works inside sinkscope's attention tap")
    return _before[id(config)]


def _attention(
    module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask,
    scaling=None,
    dropout=0.0,
    softcap=None,
    s_aux=None,
    sigmoid_bias=None,
    **others,
):
    tap = _active.get()
    if tap is None:
        name = _name_before(module.config)
        if (variant := getattr(module, "variant", None)) is not None:  # our own decoder asks no registry for these two
            own = variant.attend_plain if name == "eager" else variant.attend
            found = own(query, key, value, attention_mask)
            return found if name == "eager" else (found, None)
        # The registry holds every implementation but the one that a model writes out itself, under this name.
        written_out: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        attend = AttentionInterface().get_interface(name, written_out)
        given = {"softcap": softcap, "s_aux": s_aux, "sigmoid_bias": sigmoid_bias}
        others |= {name: value for name, value in given.items() if value is not None}
        return attend(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **others)
    if id(module) not in tap.layer_of:
        raise RuntimeError(f"the attention of layer {module.layer_idx} is not the module that the family table names")
    if not isinstance(attention_mask, CausalMask):
        raise RuntimeError(
            f"layer {tap.layer_of.get(id(module))} got a mask of type {type(attention_mask)}, not sinkscope's own"
        )
    unknown = {name for name in others.keys() - _HARMLESS if others[name] is not None and others[name] is not False}
    if unknown or dropout or others.get("is_causal") is False:
        raise InputError(
            expected="attention made of scaling, a causal mask, windows, soft-capping, learned sinks and a sigmoid",
            found=f"further arguments to attention: {', '.join(sorted(unknown)) or 'dropout or a bidirectional mask'}",
            next_step="Use a model without them, or teach sinkscope/capture/attention_tap.py what they mean",
        )
    rule = AttentionRule(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=attention_mask.window,
        softcap=softcap,
        sink_logits=s_aux,
        edits=row_edits(module),
        sigmoid_bias=sigmoid_bias,
    )
    return tap.on_attention(tap.layer_of[id(module)], query, key, value, rule), None


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset=0,
    kv_offset=0,
    mask_function=None,
    attention_mask=None,
    local_size=None,
    **others,
) -> Any:
    """The meaning of the mask that a model asks for; refuses padding, caches and shapes other than causal windows."""
    if _active.get() is None:
        mask = AttentionMaskInterface()[_name_before(others["config"])]
        others |= {} if local_size is None else {"local_size": local_size}
        asked = (batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask)
        return mask(*asked, **others)
    if attention_mask is not None and not bool(attention_mask.all()):
        raise InputError(
            expected="sequences of equal length",
            found="padding in the attention mask",
            next_step="Cut the sequences to one length",
        )
    window = local_size if local_size is not None and local_size < kv_length else None
    if q_length != kv_length or q_offset or kv_offset or not _is_causal_window(mask_function, q_length, window):
        raise InputError(
            expected="a causal mask, with or without a sliding window",
            found="another pattern of who may attend to whom (chunks, packed sequences, a prefix or a cache)",
            next_step="Use a model or input without it",
        )
    return CausalMask(window)


def _is_causal_window(mask_function, length: int, window: int | None) -> bool:
    """Whether a mask function agrees with a causal window on a grid of positions that holds both edges of every
    pattern known."""
    marks = {0, 1, 2, length // 3, length // 2, length - 2, length - 1}
    if window is not None:
        marks |= {window - 1, window, window + 1, length - 1 - window, length - window}
    positions = torch.tensor(sorted(mark for mark in marks if 0 <= mark < length))
    queries, keys = positions[:, None], positions[None, :]
    expected = keys <= queries if window is None else (keys <= queries) & (keys > queries - window)
    zero = torch.zeros((), dtype=torch.long)
    return bool(
        torch.equal(torch.as_tensor(mask_function(zero, zero, queries, keys)).expand_as(expected).cpu(), expected)
    )


def _mask_by_marker(marker: Tensor):
    """A hook that gives the decoder the marker for a mask, unless the caller hides tokens."""

    def hook(module, args, kwargs):
        given = kwargs.get("attention_mask")
        if given is not None and given is not marker and not bool(given.all()):
            return None  # refused where attention is called
        return args, {**kwargs, "attention_mask": marker}

    return hook


def enter_layer(layer: int) -> None:
    """Notes which layer's attention runs next, for families whose attention call does not say it."""
    _tap().current_layer = layer


class _SdpaCalls(TorchFunctionMode):
    """Sees the model's own calls of scaled_dot_product_attention; the marker stands for a plain causal mask."""

    def __init__(self, anatomy: Anatomy, marker: Tensor) -> None:
        super().__init__()
        self.attentions = [layer.attention for layer in anatomy.layers]
        self.marker, self.by_flag = marker, anatomy.family.attention_door == "causal_sdpa"

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        tap = _tap()
        query, key, value = args[:3]
        mask = kwargs.get("attn_mask")
        if self.by_flag:
            is_plain = len(args) == 3 and kwargs.keys() <= {"is_causal", "scale"} and kwargs.get("is_causal") is True
        else:
            is_plain = mask is not None and mask.shape == self.marker.shape
        if not is_plain or tap.current_layer is None:
            raise InputError(
                expected="a plain causal call of scaled_dot_product_attention",
                found="a mask tensor (padding or a bias)",
                next_step="Cut the sequences to one length, or use a model without an attention bias",
            )
        rule = AttentionRule(
            scaling=kwargs.get("scale") or query.shape[-1] ** -0.5, edits=row_edits(self.attentions[tap.current_layer])
        )
        return tap.on_attention(tap.current_layer, query, key, value, rule).transpose(1, 2)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
