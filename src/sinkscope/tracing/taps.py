"""The taps of a model: hooks that show each layer, while it runs, to whoever listens, and let go of it afterwards.

A LayerCall is one layer during one pass. It holds what passes a tap until the taps that may look at it are through.
Axes: B sequences, T positions, Q lock positions, E width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sinkscope.models.anatomy import Layer
from sinkscope.tracing.attention import read_attention
from sinkscope.tracing.attention_rule import AttentionRule, ReadingRequest
from sinkscope.tracing.attention_tap import attention_tap
from sinkscope.tracing.layer_call import LayerCall, Passing, blame, value_variance, with_received
from sinkscope.tracing.lock import LOCK_SEQUENCES, NUM_LOCK_POSITIONS
from sinkscope.tracing.observables import Tap
from sinkscope.tracing.overflow import check_finite
from sinkscope.tracing.single_reader import in_this_thread
from sinkscope.tracing.units import LayerUnits

NO_KEYS = torch.empty(0, dtype=torch.long)


@contextlib.contextmanager
def open_taps(
    passing: Passing,
    layers: Sequence[Layer],
    taps: Callable[[int], Collection[Tap]],
    on_tap: Callable[[Tap, LayerCall], None],
    *,
    stands_out: bool,
) -> Iterator[None]:
    """While open, `on_tap` is called at every tap of each layer that `taps` names for it.

    `stands_out`: whether positions that stand out are followed from layer to layer. A pass whose numbers left the range
    of their type is refused.
    """
    with contextlib.ExitStack() as stack:
        _Listening(passing, taps, on_tap, stands_out).open(layers, stack)
        yield
    if passing.largest:
        rows = [largest_T.float().cpu() for largest_T in passing.largest.values()]
        check_finite(passing.anatomy.decoder, torch.stack(rows), first_layer=min(passing.largest))


class _Listening:
    """The hooks of one pass, in the order in which a layer calls them."""

    def __init__(self, passing: Passing, taps, on_tap, stands_out: bool) -> None:
        self.passing, self.taps, self.on_tap, self.stands_out = passing, taps, on_tap, stands_out
        self.calls: dict[int, LayerCall] = {}
        self.attended: set[int] = set()

    def open(self, layers: Sequence[Layer], stack: contextlib.ExitStack) -> None:
        wanted = {layer.index: set(self.taps(layer.index)) for layer in layers}
        every = set().union(*wanted.values())
        if layers[0].index == 0:
            enter = in_this_thread(self._enter_first)
            stack.callback(layers[0].block.register_forward_pre_hook(enter, with_kwargs=True).remove)
        for layer in layers:
            taps, module_hooks = wanted[layer.index], []
            if taps & {Tap.ATTENTION_IN, Tap.ATTENTION}:
                hook = in_this_thread(self._enter_attention(layer.index, taps))
                module_hooks.append(layer.attention.register_forward_pre_hook(hook, with_kwargs=True))
            if taps & {Tap.BEFORE_NORM, Tap.AGGREGATION} and layer.aggregation_norm is not None:
                hook = in_this_thread(self._leave_aggregation_norm(layer.index, taps))
                module_hooks.append(layer.aggregation_norm.register_forward_hook(hook))
            if taps & {Tap.AGGREGATION, Tap.PROJECTED}:
                hook = in_this_thread(self._leave_output_projection(layer.index, taps))
                module_hooks.append(layer.output_projection.register_forward_hook(hook))
            for handle in module_hooks:
                stack.callback(handle.remove)
            if Tap.RESIDUAL_MID in taps:
                between_parts(layer, stack, self._between_parts(layer.index))
            units = LayerUnits(layer) if Tap.UNITS in taps else None
            for handle in units.hooks() if units else ():
                stack.callback(handle.remove)
            leave = in_this_thread(self._leave_block(layer.index, units))
            stack.callback(layer.block.register_forward_hook(leave).remove)
        if Tap.ATTENTION in every:
            stack.enter_context(attention_tap(self.passing.anatomy, self._attention(wanted)))

    def _call(self, layer: int) -> LayerCall:
        if layer not in self.calls:
            self.calls = {layer: LayerCall(layer, self.passing)}
        return self.calls[layer]

    def _enter_first(self, module, args, kwargs) -> None:
        self._residual(self._call(-1), entering(args, kwargs))

    def _residual(self, call: LayerCall, residual_BTE: Tensor) -> None:
        passing = self.passing
        call.residual = residual_BTE
        if Tap.RESIDUAL_OUT in self.taps(call.index):
            self.on_tap(Tap.RESIDUAL_OUT, call)
        passing.largest[call.index] = call.largest
        if self.stands_out:
            passing.standing_out[call.index] = call.standing_out
            # A copy: a view would keep the rows of every position and sequence alive.
            rows_BQE = residual_BTE[:LOCK_SEQUENCES].index_select(1, call.standing_out[:NUM_LOCK_POSITIONS])
            passing.lock_residual[call.index] = rows_BQE

    def _enter_attention(self, layer: int, taps: set[Tap]):
        def hook(module, args, kwargs) -> None:
            call = self._call(layer)
            call.state = entering(args, kwargs)
            call.arguments = besides(args, kwargs)
            if Tap.ATTENTION_IN in taps:
                self.on_tap(Tap.ATTENTION_IN, call)
            call.let_go("direction", *([] if Tap.ATTENTION in taps else ["state"]))

        return hook

    def _attention(self, wanted: dict[int, set[Tap]]):
        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
            passing, taps = self.passing, wanted.get(layer, set())
            request = passing.request if Tap.ATTENTION in taps else ReadingRequest(keys=NO_KEYS)
            if Tap.ATTENTION in taps and layer not in self.calls:
                stray = min(wanted.keys() - self.attended, default=layer)
                raise RuntimeError(f"layer {stray} attends outside the module named for it: {blame(passing.anatomy)}")
            self.attended.add(layer)
            if passing.weigh_mixing and Tap.ATTENTION in taps:
                known = passing.known
                weights_KS = value_variance(value) if known is None else known.value_variance_LKS[layer]
                request = replace(request, key_weights=weights_KS)
            reading, passing.attention_path = read_attention(query, key, value, rule, request)
            if Tap.ATTENTION in taps:
                call = self._call(layer)
                call.query, call.key, call.value, call.rule, call.attention = query, key, value, rule, reading
                if self.stands_out:
                    passing.received_T = with_received(
                        passing.received_T, call.alpha, passing.request.keys, passing.length
                    )
                self.on_tap(Tap.ATTENTION, call)
                call.let_go("state", "query", "key", "value", "attention", "alpha", "is_sink", "lock_rows")
            return reading.output

        return attend

    def _leave_aggregation_norm(self, layer: int, taps: set[Tap]):
        def hook(module, args, output) -> None:
            call = self._call(layer)
            call.before_norm = args[0].reshape(*self.passing.shape, -1)
            if Tap.BEFORE_NORM in taps:
                self.on_tap(Tap.BEFORE_NORM, call)

        return hook

    def _leave_output_projection(self, layer: int, taps: set[Tap]):
        def hook(module, args, output) -> None:
            call = self._call(layer)
            call.aggregation, call.projected = (x.reshape(*self.passing.shape, -1) for x in (args[0], output))
            for tap in (Tap.AGGREGATION, Tap.PROJECTED):
                if tap in taps:
                    self.on_tap(tap, call)
            call.let_go("aggregation", "before_norm", "projected")

        return hook

    def _between_parts(self, layer: int):
        def found(residual_BTE: Tensor) -> None:
            call = self._call(layer)
            call.residual = residual_BTE
            self.on_tap(Tap.RESIDUAL_MID, call)
            call.let_go("residual", "tokens", "dom_ratio")

        return found

    def _leave_block(self, layer: int, units: LayerUnits | None):
        def hook(module, args, output) -> None:
            call = self._call(layer)
            self._residual(call, leaving(output))
            if units is not None:
                if not units.complete:
                    raise RuntimeError(
                        f"layer {layer} passed no neurons to its down projection: {blame(self.passing.anatomy)}"
                    )
                call.units = units
                self.on_tap(Tap.UNITS, call)
                units.clear()
            self.calls.clear()

        return hook


def between_parts(layer: Layer, stack: contextlib.ExitStack, found: Callable[[Tensor], None]) -> None:
    """Calls `found` with the residual stream [B, T, E] after the layer's attention, until the stack is closed."""
    entered: list[Tensor] = []

    def enter(module, args, kwargs) -> None:
        entered[:] = [entering(args, kwargs)]

    def leave_attention(module, args, output) -> None:
        state_BTE = entered.pop()
        found(state_BTE + leaving(output).reshape(state_BTE.shape))

    stack.callback(layer.block.register_forward_pre_hook(in_this_thread(enter), with_kwargs=True).remove)
    stack.callback(layer.attention_exit.register_forward_hook(in_this_thread(leave_attention)).remove)


def entering(args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """The hidden states of a block's or attention's call, which come first or by name."""
    return args[0] if args else kwargs["hidden_states"]


def besides(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The other arguments of such a call."""
    return args[1:], {name: value for name, value in kwargs.items() if name != "hidden_states"}


def leaving(output: Any) -> Tensor:
    """The hidden states that a block gives back, alone or first of several."""
    return output[0] if isinstance(output, tuple) else output
