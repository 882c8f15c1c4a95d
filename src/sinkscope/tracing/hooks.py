"""The hooks of a forward pass. They show each running layer to a function, at the hook points of observables.py, and
drop its activations afterwards.

A LayerCall is one layer during one pass. An activation is dropped as soon as no later hook point may read it, so that
recording keeps no more than one layer's activations alive.
Axes: B sequences, T positions, Q lock positions, E width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sinkscope.models.anatomy import AnyModule, Layer
from sinkscope.models.sharded import unsharded
from sinkscope.tracing.attention import read_attention
from sinkscope.tracing.attention_hook import attention_hook
from sinkscope.tracing.attention_rule import AttentionRule, ReadingRequest
from sinkscope.tracing.block_states import besides, entering, leaving
from sinkscope.tracing.layer_call import LayerCall, Passing, blame, value_variance, with_received
from sinkscope.tracing.layer_neurons import LayerNeurons
from sinkscope.tracing.lock import LOCK_SEQUENCES, NUM_LOCK_POSITIONS
from sinkscope.tracing.observables import HookPoint
from sinkscope.tracing.overflow import check_finite
from sinkscope.tracing.single_reader import in_this_thread

NO_KEYS = torch.empty(0, dtype=torch.long)
"""Asked of layers whose attention nobody records: only its output is computed."""


@contextlib.contextmanager
def open_hooks(
    passing: Passing,
    layers: Sequence[Layer],
    points: Callable[[int], Collection[HookPoint]],
    on_hook: Callable[[HookPoint, LayerCall], None],
    *,
    follow_positions: bool,
) -> Iterator[None]:
    """While open, calls `on_hook(hook_point, call)` at the hook points that `points` returns for a layer's index.

    `follow_positions`: whether positions of interest are chosen in each layer. A pass with NaN or infinity is refused.
    """
    with contextlib.ExitStack() as stack:
        _LayerHooks(passing, points, on_hook, follow_positions).open(layers, stack)
        yield
    if passing.largest:
        rows = [largest_T.float().cpu() for largest_T in passing.largest.values()]
        check_finite(passing.anatomy.decoder, torch.stack(rows), first_layer=min(passing.largest))


class _LayerHooks:
    """The hooks of one pass, in the order in which a layer calls them."""

    def __init__(self, passing: Passing, points, on_hook, follow_positions: bool) -> None:
        self.passing, self.points, self.on_hook, self.follow_positions = passing, points, on_hook, follow_positions
        self.calls: dict[int, LayerCall] = {}
        """The layer that runs now, by its index."""
        self.attended: set[int] = set()
        """Layers whose attention has run."""

    def open(self, layers: Sequence[Layer], stack: contextlib.ExitStack) -> None:
        """Registers only those hooks that the layers' hook points need."""
        points_of = {layer.index: set(self.points(layer.index)) for layer in layers}
        all_points = set().union(*points_of.values())
        if layers[0].index == 0:  # a pass may begin at a later layer
            enter = in_this_thread(self._enter_first)
            stack.callback(layers[0].block.register_forward_pre_hook(enter, with_kwargs=True).remove)
        for layer in layers:
            points, module_hooks = points_of[layer.index], []
            if points & {HookPoint.ATTENTION_IN, HookPoint.ATTENTION}:
                hook = in_this_thread(self._enter_attention(layer.index, points))
                module_hooks.append(layer.attention.register_forward_pre_hook(hook, with_kwargs=True))
            if points & {HookPoint.BEFORE_NORM, HookPoint.AGGREGATION} and layer.aggregation_norm is not None:
                hook = in_this_thread(self._leave_aggregation_norm(layer.index, points))
                module_hooks.append(layer.aggregation_norm.register_forward_hook(hook))
            if points & {HookPoint.AGGREGATION, HookPoint.PROJECTED}:
                hook = in_this_thread(self._leave_output_projection(layer.index, points))
                module_hooks.append(layer.output_projection.register_forward_hook(hook))
            for handle in module_hooks:
                stack.callback(handle.remove)
            if HookPoint.RESIDUAL_MID in points:
                between_parts(layer, stack, self._between_parts(layer.index))
            neurons = None
            if HookPoint.NEURONS in points:
                neurons = LayerNeurons(layer)
                for handle in neurons.hooks():
                    stack.callback(handle.remove)
            leave = in_this_thread(self._leave_block(layer.index, neurons))
            stack.callback(layer.block.register_forward_hook(leave).remove)
        if HookPoint.ATTENTION in all_points:
            stack.enter_context(attention_hook(self.passing.anatomy, self._attention(points_of)))

    def _call(self, layer: int) -> LayerCall:
        if layer not in self.calls:
            self.calls = {layer: LayerCall(layer, self.passing)}
        return self.calls[layer]

    def _enter_first(self, module, args, kwargs) -> None:
        self._residual(self._call(-1), entering(args, kwargs))

    def _residual(self, call: LayerCall, residual_BTE: Tensor) -> None:
        passing = self.passing
        call.residual = residual_BTE
        if HookPoint.RESIDUAL_OUT in self.points(call.index):
            self.on_hook(HookPoint.RESIDUAL_OUT, call)
        # Looked at when the pass has ended: reading it here would make a GPU wait in every layer.
        passing.largest[call.index] = call.largest
        if self.follow_positions:
            passing.positions_of_interest[call.index] = call.positions_of_interest
            # A copy: a view would keep the rows of every position and sequence alive.
            rows_BQE = residual_BTE[:LOCK_SEQUENCES].index_select(1, call.positions_of_interest[:NUM_LOCK_POSITIONS])
            passing.lock_residual[call.index] = rows_BQE

    def _enter_attention(self, layer: int, points: set[HookPoint]):
        def hook(module, args, kwargs) -> None:
            call = self._call(layer)
            call.state = entering(args, kwargs)
            call.arguments = besides(args, kwargs)
            if HookPoint.ATTENTION_IN in points:
                self.on_hook(HookPoint.ATTENTION_IN, call)
            call.let_go("direction", *([] if HookPoint.ATTENTION in points else ["state"]))

        return hook

    def _attention(self, points_of: dict[int, set[HookPoint]]):
        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
            passing, points = self.passing, points_of.get(layer, set())
            request = passing.request if HookPoint.ATTENTION in points else ReadingRequest(keys=NO_KEYS)
            if HookPoint.ATTENTION in points and layer not in self.calls:
                # The attention function was called, but the hook on the attention's module was not.
                asked = {index for index, points in points_of.items() if HookPoint.ATTENTION in points}
                stray = min(asked - self.attended, default=layer)
                outside = f"Layer {stray} ran attention outside `{passing.anatomy.family.attention}`."
                raise RuntimeError(f"{outside} {blame(passing.anatomy)}")
            self.attended.add(layer)
            if passing.weigh_mixing and HookPoint.ATTENTION in points:
                survey = passing.survey
                weights_KS = value_variance(value) if survey is None else survey.value_variance_KS[layer]
                request = replace(request, key_weights=weights_KS)
            reading, passing.attention_path = read_attention(query, key, value, rule, request)
            if HookPoint.ATTENTION in points:
                call = self._call(layer)
                call.query, call.key, call.value, call.rule, call.attention = query, key, value, rule, reading
                if self.follow_positions:
                    passing.received_T = with_received(
                        passing.received_T, call.alpha, passing.request.keys, passing.length
                    )
                self.on_hook(HookPoint.ATTENTION, call)
                call.let_go("state", "query", "key", "value", "attention", "alpha", "is_sink", "lock_rows")
            return reading.output

        return attend

    def _leave_aggregation_norm(self, layer: int, points: set[HookPoint]):
        def hook(module, args, output) -> None:
            call = self._call(layer)
            call.before_norm = args[0].reshape(*self.passing.shape, -1)
            if HookPoint.BEFORE_NORM in points:
                self.on_hook(HookPoint.BEFORE_NORM, call)

        return hook

    def _leave_output_projection(self, layer: int, points: set[HookPoint]):
        def hook(module, args, output) -> None:
            call = self._call(layer)
            call.aggregation, call.projected = (x.reshape(*self.passing.shape, -1) for x in (args[0], output))
            for point in (HookPoint.AGGREGATION, HookPoint.PROJECTED):
                if point in points:
                    self.on_hook(point, call)
            call.let_go("aggregation", "before_norm", "projected")

        return hook

    def _between_parts(self, layer: int):
        def on_residual(residual_BTE: Tensor) -> None:
            call = self._call(layer)
            call.residual = residual_BTE
            self.on_hook(HookPoint.RESIDUAL_MID, call)
            call.let_go("residual", "tokens", "dom_ratio")

        return on_residual

    def _leave_block(self, layer: int, neurons: LayerNeurons | None):
        def hook(module, args, output) -> None:
            call = self._call(layer)
            self._residual(call, leaving(output))
            if neurons is not None:
                if not neurons.complete:
                    raise RuntimeError(
                        f"The down projection of layer {layer} got no neurons. {blame(self.passing.anatomy)}"
                    )
                call.neurons = neurons
                with unsharded(module):  # FSDP2 has freed the block's weights by now
                    self.on_hook(HookPoint.NEURONS, call)
                neurons.clear()
            self.calls.clear()

        return hook


def between_parts(layer: Layer, stack: contextlib.ExitStack, on_residual: Callable[[Tensor], None]) -> None:
    """Calls `on_residual` with the residual stream [B, T, E] after the layer's attention, or mixer, or both, until the
    stack is closed."""
    waiting: list[AnyModule] = []
    states: list[Tensor] = []

    def enter(module, args, kwargs) -> None:
        waiting[:] = [part for part, _ in layer.mixing_exits]
        states[:] = [entering(args, kwargs)]

    def leave_part(scale: float):
        def hook(module, args, output) -> None:
            added_BTE = leaving(output).reshape(states[0].shape)
            states[0] = states[0] + (added_BTE * scale if scale != 1 else added_BTE)
            waiting.remove(module)
            if not waiting:
                on_residual(states.pop())

        return hook

    stack.callback(layer.block.register_forward_pre_hook(in_this_thread(enter), with_kwargs=True).remove)
    for part, scale in layer.mixing_exits:
        stack.callback(part.register_forward_hook(in_this_thread(leave_part(scale))).remove)
