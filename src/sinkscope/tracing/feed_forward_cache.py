"""Keeps what feed-forwards write in the baseline's pass, for passes under an intervention.

In a causal model, positions before the first one that an intervention acts on stay as they are. So feed-forwards, most
of a layer's cost, need to run from that position on alone. Axes: B sequences, T positions, E width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator

import torch
from torch import Tensor

from sinkscope.models.anatomy import Layer
from sinkscope.tracing.single_reader import in_this_thread


class FeedForwardCache:
    """The writes of some layers' feed-forwards for one batch."""

    def __init__(self, layers: Iterable[Layer]) -> None:
        self.modules = {layer.index: layer.feed_forward for layer in layers if layer.feed_forward is not None}
        self.writes: dict[int, Tensor] = {}
        """By layer [B, T, E]."""

    @contextlib.contextmanager
    def filling(self) -> Iterator[None]:
        """While open, a pass fills the cache with what its feed-forwards write."""
        with contextlib.ExitStack() as stack:
            for layer, module in self.modules.items():
                keep = in_this_thread(self._keep(layer))
                stack.callback(module.register_forward_hook(keep, with_kwargs=True).remove)
            yield

    def _keep(self, layer: int):
        def hook(module, args, kwargs, output) -> None:
            # Only feed-forwards that map each token's state to its write can run on some positions alone. Those that
            # take or return more are left out, and run whole.
            if len(args) == 1 and not kwargs and isinstance(output, Tensor) and output.shape == args[0].shape:
                self.writes[layer] = output.clone()  # Falcon adds to it in place

        return hook

    @contextlib.contextmanager
    def used_before(self, position: int, *, but_in: Collection[int] = ()) -> Iterator[None]:
        """While open, feed-forwards run from a position on; before it they write what is in the cache. `but_in`: layers
        whose feed-forwards run whole."""

        def later(module, args):
            return (args[0][:, position:].contiguous(),)

        with contextlib.ExitStack() as stack:
            for layer, writes_BTE in self.writes.items():
                if position == 0 or layer in but_in:
                    continue

                def whole(module, args, output, before=writes_BTE[:, :position]):
                    return torch.cat([before, output], 1)

                module = self.modules[layer]
                stack.callback(module.register_forward_pre_hook(in_this_thread(later)).remove)
                stack.callback(module.register_forward_hook(in_this_thread(whole)).remove)
            yield
