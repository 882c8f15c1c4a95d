"""Gradients of the loss on a model's own predictions, given to a callback module by module during a backward pass.

Targets are drawn from those predictions, so the mean of g g^T is the Fisher information F: the curvature of the loss
if the predictions are true. A change d of a module's output at a token costs about 1/2 d^T F d, which is the mean of
1/2 (g . d)^2. Nothing is kept beyond what the backward pass of one text holds.
Axes: N texts, B texts of a pass, T positions, E inputs, O outputs, V vocabulary, H, D heads and their size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.audits.damage import Prefix
from sinkscope.audits.schemes import attend, linear_layers
from sinkscope.models.anatomy import anatomy_of
from sinkscope.progress import Progress
from sinkscope.tracing.attention_hook import attention_hook
from sinkscope.tracing.attention_rule import AttentionRule
from sinkscope.tracing.single_reader import evaluation_mode

OnLinear = Callable[[int, str, Tensor, Tensor], None]
"""(text, module, what it read [1, T, E], the gradient at its output [1, T, O]), in float32."""
OnAttention = Callable[..., None]
"""(text, layer, queries, keys, values, their rule, the gradient at the aggregation [1, T, H, D])."""


def read_gradients(
    model: Any,
    ids_NT: Tensor,
    on_linear: OnLinear,
    on_attention: OnAttention | None = None,
    *,
    prefix: Prefix | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> None:
    """Reads the texts one by one, each after a prefix if one is given, and calls `on_linear` and `on_attention`.

    `seed` is that of the targets; `progress` is called with (texts read, texts in all).
    """
    generator = torch.Generator().manual_seed(seed)
    device = model.get_input_embeddings().weight.device
    for text in range(len(ids_NT)):
        cache = {"use_cache": False} if prefix is None else {"past_key_values": prefix(1)}
        with evaluation_mode(model), _watched(model, text, on_linear, on_attention) as embedded:
            logits_TV = model(ids_NT[text : text + 1].to(device), **cache).logits[0, :-1].float()
            # Drawn on the CPU, so that a seed gives the same targets on every device.
            targets_T = torch.multinomial(logits_TV.detach().softmax(-1).cpu(), 1, generator=generator)[:, 0]
            loss = nn.functional.cross_entropy(logits_TV, targets_T.to(logits_TV.device), reduction="sum")
            # By the embeddings alone: the hooks see every gradient on the way, and none is kept for the weights.
            torch.autograd.grad(loss, embedded.pop())
        if progress is not None:
            progress(text + 1, len(ids_NT))


@contextlib.contextmanager
def _watched(model: Any, text: int, on_linear: OnLinear, on_attention: OnAttention | None) -> Iterator[list[Tensor]]:
    """While open, a backward pass calls `on_linear` and `on_attention`.

    Yields the list in which a forward pass leaves the embeddings, to differentiate by.
    """
    embedded: list[Tensor] = []

    def on_embedding(module: Any, args: Any, output_BTE: Tensor) -> Tensor:
        embedded.append(output_BTE.detach().requires_grad_())
        return embedded[-1]

    def linear(name: str):
        def note(g: Tensor, x: Tensor) -> None:
            # [1, T, E] of one text; some models give their feed-forward [T, E].
            shape = (1, x.numel() // x.shape[-1], -1)
            on_linear(text, name, x.reshape(shape).float(), g.reshape(shape).float())

        return lambda module, args, output: _Watched.apply(output, note, args[0])

    def attention(layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        def note(g_BTHD: Tensor, *kept: Tensor) -> None:
            assert on_attention is not None
            on_attention(text, layer, *kept, rule, g_BTHD)

        return _Watched.apply(attend(query, key, value, rule), note, query, key, value)  # type: ignore[return-value]

    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        if on_attention is not None:
            stack.enter_context(attention_hook(anatomy_of(model), attention))
        stack.callback(model.get_input_embeddings().register_forward_hook(on_embedding).remove)
        for name, layer in linear_layers(model).items():
            stack.callback(layer.register_forward_hook(linear(name)).remove)
        yield embedded


class _Watched(torch.autograd.Function):
    """The identity; the backward pass calls `note` with the gradient and the tensors that were kept for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, note: Callable[..., None], *kept: Tensor) -> Tensor:
        ctx.note = note
        ctx.save_for_backward(*kept)
        return x.clone()  # not a view: some models add to it in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with torch.no_grad():
            ctx.note(gradients[0], *ctx.saved_tensors)
        return gradients[0], None, *(None for _ in ctx.saved_tensors)
