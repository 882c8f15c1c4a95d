"""Sends every layer's queries, keys and values through a function of ours, by interfaces that models offer (a family's
`attention_door`).

- "registry": most families look up their attention by name in the registry of transformers. We register a function
  under a name of our own and put that name into the configuration. A mask function must be registered under the same
  name, or the model sees the future. Ours builds no mask: it passes on what the mask means (causal, with or without a
  window), and refuses any other.
- "sdpa_call" (Falcon) and "causal_sdpa" (models of your own): the attention calls scaled_dot_product_attention itself,
  which a TorchFunctionMode sees while the attention's module runs.

Registration is process-wide, so our functions look for a hook that acts on the pass that runs. If there is none, as in
another thread's pass or in a copy of the model, they do what the model did before.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface

from sinkscope.errors import InputError
from sinkscope.models.anatomy import Anatomy, Layer, input_device
from sinkscope.tracing.attention_rule import AttentionRule
from sinkscope.tracing.open_interventions import OwnHook, depth, mask_changes
from sinkscope.tracing.single_reader import single_reader

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
"""Arguments that models pass to attention and that change nothing here: windows are read from the mask, and positions
are already in queries and keys."""


@dataclass(frozen=True, eq=False)
class CausalMask:
    """What a model's mask means. It is passed to attention in place of the mask."""

    window: int | None
    refused: InputError | None = None
    """Why it cannot be read; raised when attention is called."""
    plain: Callable[[], Any] | None = None
    """Builds the mask itself, for another model that shares the configuration object."""

    def __getstate__(self) -> dict[str, Any]:
        """Without `plain`, which can't be pickled: under torchrun the arguments of attention are sent for the lock."""
        return vars(self) | {"plain": None}


@dataclass(frozen=True, kw_only=True, eq=False)
class _AttentionHook:
    """A function that the attention of one model goes through."""

    decoder: nn.Module
    config: Any
    """The model's configuration, by which the mask function recognises the model; None if it has none."""
    layer_of: dict[int, int]
    """The layer's index by the id of its attention module."""
    on_attention: OnAttention
    depth: int
    """At how many suspensions it was opened (`open_interventions.depth`); it acts at that depth alone."""
    thread: int | None
    """The thread whose passes go through it; None for all threads."""

    @property
    def acts(self) -> bool:
        """Whether it acts on the pass that runs here and now."""
        return self.depth == depth() and self.thread in (None, threading.get_ident())


_hooks: list[_AttentionHook] = []
"""The open hooks of all models, in the order in which they were opened. Of several, the last one acts."""
_doors: WeakKeyDictionary[nn.Module, tuple[int, contextlib.ExitStack]] = WeakKeyDictionary()
"""By decoder: how many hooks are open, and what undoes the change that opening the first one made to the model."""
_doors_lock = threading.Lock()


@dataclass(kw_only=True)
class _Renamed:
    """A configuration that names our attention in place of the model's own. Several models may share the object, so the
    name is put back when the last of them is closed."""

    config: Any
    before: str
    ours: str
    count: int = 0


_renamed: dict[int, _Renamed] = {}
"""By the configuration's id."""


class _OurName(str):
    """Our name in a configuration. Copies and pickles get the owner's name back, since another process does not know
    ours."""

    def __new__(cls, name: str, before: str):
        return super().__new__(cls, name)

    def __init__(self, name: str, before: str) -> None:
        self.before = before

    def __reduce_ex__(self, protocol) -> tuple:
        return str, (self.before,)


def implementation_of(config: Any) -> str:
    """The attention implementation that a configuration's owner has chosen."""
    renamed = _renamed.get(id(config))
    now = config._attn_implementation
    return renamed.before if renamed is not None and renamed.ours == now else now


@contextlib.contextmanager
def attention_hook(anatomy: Anatomy, on_attention: OnAttention, *, every_thread: bool = False) -> Iterator[None]:
    """While open, every attention of the model goes through `on_attention`, in passes of this thread or of every
    thread. Hooks may be closed in any order. After the last one the model is as it was."""
    hook = _AttentionHook(
        decoder=anatomy.decoder,
        config=getattr(anatomy.decoder, "config", None),
        layer_of={id(layer.attention): layer.index for layer in anatomy.attention_layers},
        on_attention=on_attention,
        depth=depth(),
        thread=None if every_thread else threading.get_ident(),
    )
    with contextlib.ExitStack() as stack:
        if not every_thread:
            stack.enter_context(single_reader(anatomy.decoder))
        _enter_door(anatomy)
        stack.callback(_leave_door, anatomy.decoder)
        _hooks.append(hook)
        stack.callback(_hooks.remove, hook)
        yield


def _enter_door(anatomy: Anatomy) -> None:
    with _doors_lock:
        count, undo = _doors.get(anatomy.decoder, (0, contextlib.ExitStack()))
        if count == 0:
            _open_door(anatomy, undo)
        _doors[anatomy.decoder] = count + 1, undo


def _leave_door(decoder: nn.Module) -> None:
    with _doors_lock:
        count, undo = _doors.pop(decoder)
        if count > 1:
            _doors[decoder] = count - 1, undo
        else:
            undo.close()


def _open_door(anatomy: Anatomy, undo: contextlib.ExitStack) -> None:
    """Changes a model so that its attention calls ours; `undo` collects what changes it back."""
    door = anatomy.family.attention_door
    config: Any = getattr(anatomy.decoder, "config", None)
    if door != "causal_sdpa":
        _rename(config, door == "registry")
        undo.callback(_name_back, config)
    if door != "registry":
        marker = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=input_device(anatomy))
        for layer in anatomy.attention_layers:
            calls = _CallsOfLayer(anatomy, layer, marker)
            undo.callback(calls.close)
            undo.callback(layer.attention.register_forward_pre_hook(OwnHook(calls.enter, layer.attention)).remove)
            leave = OwnHook(calls.leave, layer.attention)
            undo.callback(layer.attention.register_forward_hook(leave, always_call=True).remove)
        if door == "sdpa_call":
            # Falcon passes on a mask of four dimensions as it is. Without one it would build a mask of T x T entries.
            by_marker = OwnHook(_mask_by_marker(anatomy.decoder, marker), anatomy.decoder)
            undo.callback(anatomy.decoder.register_forward_pre_hook(by_marker, with_kwargs=True).remove)


def _rename(config: Any, in_registry: bool) -> None:
    """Does what set_attn_implementation does, without its walk over all modules: each attention reads the name from the
    configuration at every call. Falcon reads it too, and only its sdpa branch makes the call that we can see."""
    if id(config) not in _renamed:
        before = config._attn_implementation
        ours = _OurName(_name_over(before) if in_registry else "sdpa", before)
        _renamed[id(config)] = _Renamed(config=config, before=before, ours=ours)
        config._attn_implementation = ours
    _renamed[id(config)].count += 1


def _name_back(config: Any) -> None:
    renamed = _renamed[id(config)]
    renamed.count -= 1
    if not renamed.count:
        del _renamed[id(config)]
        if config._attn_implementation == renamed.ours:  # else its owner has chosen another one meanwhile
            config._attn_implementation = renamed.before


@cache
def _name_over(before: str) -> str:
    """The name under which our functions are registered for models that use the implementation `before`. There is one
    for each, since our functions must know what to call if no hook acts: in other threads, and in copies."""
    name = f"{NAME}_over_{len(_names)}"
    _names[name] = before
    AttentionInterface.register(name, partial(_attention, before))
    AttentionMaskInterface.register(name, partial(_mask, before))
    return name


_names: dict[str, str] = {}


def _hook_of(attention: nn.Module) -> _AttentionHook | None:
    """The hook that acts on a call of this attention module; None if there is none."""
    return next((hook for hook in reversed(_hooks) if id(attention) in hook.layer_of and hook.acts), None)


def _has_hook(config: Any) -> bool:
    """Whether a hook acts on passes of a model with this configuration."""
    return any(hook.config is config and hook.acts for hook in _hooks)


def _is_strange(attention: nn.Module) -> bool:
    """Whether an attention module belongs to no model that a hook acts on, but shares a configuration with one."""
    return not any(attention is part for hook in _hooks if hook.acts for part in hook.decoder.modules())


def _attention(
    before: str,
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
    """What models call in place of their attention, as registered by `_name_over`: ours if a hook acts on this call,
    else the implementation `before`. Returns (aggregation [B, T, H, D], None) as transformers expects."""
    hook = _hook_of(module)
    if hook is None and isinstance(attention_mask, CausalMask) and attention_mask.plain and _is_strange(module):
        # The mask was asked for with a configuration that this model shares with one that is read.
        attention_mask = attention_mask.plain()
    if hook is None and not isinstance(attention_mask, CausalMask):
        if (variant := getattr(module, "variant", None)) is not None:  # our decoder's own attention is in no registry
            attend_before = variant.attend_plain if before == "eager" else variant.attend
            output = attend_before(query, key, value, attention_mask)
            return output if before == "eager" else (output, None)
        # The registry has every implementation but eager attention, which each model file defines under this name.
        eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        attend = AttentionInterface().get_interface(before, eager)
        of_scores = {"softcap": softcap, "s_aux": s_aux, "sigmoid_bias": sigmoid_bias}
        others |= {name: value for name, value in of_scores.items() if value is not None}
        return attend(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **others)
    if hook is None:
        raise RuntimeError(
            f"The attention of layer {module.layer_idx} is not the module that its family's entry names."
        )
    if not isinstance(attention_mask, CausalMask):
        raise RuntimeError(
            f"layer {hook.layer_of[id(module)]} got a mask of type {type(attention_mask)}, not sinkscope's own"
        )
    if attention_mask.refused is not None:
        raise attention_mask.refused
    unknown = {name for name in others.keys() - _HARMLESS if others[name] is not None and others[name] is not False}
    if unknown or dropout or others.get("is_causal") is False:
        what = ", ".join(sorted(unknown)) or "dropout or a bidirectional mask"
        raise InputError(
            f"Attention is called with {what}, which cannot be read. What can be read is scaling, a causal mask, "
            "windows, soft-capping, learned sinks and a sigmoid. Use a model without the rest, or teach "
            "sinkscope/tracing/attention_hook.py what it means."
        )
    rule = AttentionRule(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=attention_mask.window,
        softcap=softcap,
        sink_logits=s_aux,
        mask_changes=mask_changes(module),
        sigmoid_bias=sigmoid_bias,
    )
    return hook.on_attention(hook.layer_of[id(module)], query, key, value, rule), None


def _mask(
    before: str,
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
    """What a model's mask means, a CausalMask, if a hook acts on this pass; else the mask of `before` itself. Padding,
    caches and masks other than causal windows are marked as refused."""
    size = {} if local_size is None else {"local_size": local_size}
    make = partial(
        AttentionMaskInterface()[before],
        *(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask),
        **size,
    )
    plain = cache(partial(make, **others))  # each layer asks for it, and it is T x T
    if not _has_hook(others.get("config")):
        return plain()
    window = local_size if local_size is not None and local_size < kv_length else None
    refused = None
    if attention_mask is not None and not bool(attention_mask.all()):
        refused = InputError("There is padding in the attention mask. Cut the sequences to one length.")
    elif (
        q_length != kv_length
        or q_offset
        or kv_offset
        or not _is_causal_window(mask_function, q_length, window)
        or _sees_the_next(mask_function, batch_size, q_length)
    ):
        refused = InputError(
            "Only a causal mask can be read, with or without a sliding window. This one is another (chunks, packed "
            "sequences, a prefix, image tokens that see one another, or a cache): use a model or input without it."
        )
    # Raised only where attention is called: of models that share a configuration, it isn't known here which one runs.
    return CausalMask(window, refused, plain)


def _is_causal_window(mask_function, length: int, window: int | None) -> bool:
    """Whether a mask function is a causal window: judged on a few positions, which lie at both edges of every pattern
    that transformers has."""
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


def _sees_the_next(mask_function, num_sequences: int, length: int) -> bool:
    """Whether any query sees the key after it: tokens of an image that see one another are next to each other."""
    sequences, zero = torch.arange(num_sequences)[:, None], torch.zeros((), dtype=torch.long)
    queries = torch.arange(length - 1)[None, :]
    return bool(torch.as_tensor(mask_function(sequences, zero, queries, queries + 1)).any())


def _mask_by_marker(decoder: nn.Module, marker: Tensor):
    """A hook that passes the marker to the decoder as its mask, unless the caller hides tokens."""

    def hook(module, args, kwargs):
        if module is not decoder or not _has_hook(module.config):
            return None
        given = kwargs.get("attention_mask")
        if given is not None and given is not marker and not bool(given.all()):
            return None  # refused where attention is called
        return args, {**kwargs, "attention_mask": marker}

    return hook


class _CallsOfLayer:
    """Catches the calls of scaled_dot_product_attention that one layer's attention makes while it runs."""

    def __init__(self, anatomy: Anatomy, layer: Layer, marker: Tensor) -> None:
        self.layer, self.marker = layer, marker
        self.by_flag = anatomy.family.attention_door == "causal_sdpa"
        self.running: dict[int, list[_SdpaCalls | None]] = defaultdict(list)
        """By thread, one entry for each call of the attention that runs now; None if no hook acts on it."""

    def enter(self, module, args) -> None:
        """A hook before the attention."""
        hook = _hook_of(module) if module is self.layer.attention else None
        calls = None if hook is None else _SdpaCalls(hook, self.layer, self.marker, self.by_flag)
        if calls is not None:
            calls.__enter__()
        self.running[threading.get_ident()].append(calls)

    def leave(self, module, args, output) -> None:
        """A hook after the attention, also if it fails."""
        if running := self.running[threading.get_ident()]:
            calls = running.pop()
            if calls is not None:
                calls.__exit__(None, None, None)

    def close(self) -> None:
        """Leaves calls that an interrupt left open."""
        while self.running[threading.get_ident()]:
            self.leave(None, None, None)


@contextlib.contextmanager
def direct_call(anatomy: Anatomy, layer: Layer) -> Iterator[None]:
    """For a direct call of a layer's `attention.forward`, which the hooks on the module don't see."""
    if anatomy.family.attention_door == "registry":
        yield
        return
    hook = _hook_of(layer.attention)
    assert hook is not None
    marker = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    with _SdpaCalls(hook, layer, marker, anatomy.family.attention_door == "causal_sdpa"):
        yield


class _SdpaCalls(TorchFunctionMode):
    """Sends the model's own calls of scaled_dot_product_attention through a hook.

    A call is readable if its mask is causal and nothing else: by `is_causal=True` if `by_flag`, else if its mask is the
    marker that `_mask_by_marker` passed on.
    """

    def __init__(self, hook: _AttentionHook, layer: Layer, marker: Tensor, by_flag: bool) -> None:
        super().__init__()
        self.hook, self.layer, self.marker, self.by_flag = hook, layer, marker, by_flag

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        query, key, value = args[:3]
        mask = kwargs.get("attn_mask")
        if self.by_flag:
            is_plain = len(args) == 3 and kwargs.keys() <= {"is_causal", "scale"} and kwargs.get("is_causal") is True
        else:
            is_plain = mask is not None and mask.shape == self.marker.shape
        if not is_plain:
            raise InputError(
                "scaled_dot_product_attention is called with a mask tensor (padding or a bias), but only a plain "
                "causal call can be read. Cut the sequences to one length, or use a model without an attention bias."
            )
        rule = AttentionRule(
            scaling=kwargs.get("scale") or query.shape[-1] ** -0.5, mask_changes=mask_changes(self.layer.attention)
        )
        return self.hook.on_attention(self.layer.index, query, key, value, rule).transpose(1, 2)
