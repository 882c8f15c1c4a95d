"""Gradients of the loss on a model's own predictions, given to a callback module by module during a backward pass.

Targets are drawn from those predictions, so the mean of g g^T is the Fisher information F: the curvature of the loss
if the predictions are true. A change d of a module's output at a token costs about 1/2 d^T F d, which is the mean of
1/2 (g . d)^2. Nothing is kept beyond what the backward pass of a few texts holds.
Axes: N texts, B texts of a pass, T positions, E inputs, O outputs, V vocabulary, H, D heads and their size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.audits.damage import Prefix, passes
from sinkscope.audits.schemes import attend, linear_layers
from sinkscope.models.anatomy import anatomy_of
from sinkscope.progress import Progress
from sinkscope.tracing.attention_hook import attention_hook
from sinkscope.tracing.attention_rule import AttentionRule
from sinkscope.tracing.single_reader import evaluation_mode

OnLinear = Callable[[slice, str, Tensor, Tensor], None]
"""(texts, module, what it read [B, T, E], the gradient at its output [B, T, O]), in float32."""
OnAttention = Callable[..., None]
"""(texts, layer, queries, keys, values, their rule, the gradient at the aggregation [B, T, H, D])."""


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
    """Reads the texts, a few at a time, each after a prefix if one is given; calls `on_linear` and `on_attention`.

    `seed` is that of the targets; `progress` is called with (texts read, texts in all).
    """
    generator = torch.Generator().manual_seed(seed)
    device = model.get_input_embeddings().weight.device
    for texts in passes(ids_NT):
        ids_BT = ids_NT[texts]
        cache = {"use_cache": False} if prefix is None else {"past_key_values": prefix(len(ids_BT))}
        with evaluation_mode(model), _watched(model, texts, ids_BT.shape, on_linear, on_attention) as embedded:
            logits_BTV = model(ids_BT.to(device), **cache).logits[:, :-1].float()
            # Drawn on the CPU, text by text, so that a seed gives the same targets on every device.
            chances_BTV = logits_BTV.detach().softmax(-1).cpu()
            drawn = [torch.multinomial(chances_TV, 1, generator=generator)[:, 0] for chances_TV in chances_BTV]
            targets = torch.cat(drawn).to(logits_BTV.device)
            loss = nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets, reduction="sum")
            # By the embeddings alone: the hooks see every gradient on the way, and none is kept for the weights.
            torch.autograd.grad(loss, embedded.pop())
        if progress is not None:
            progress(texts.stop, len(ids_NT))


@contextlib.contextmanager
def _watched(
    model: Any, texts: slice, shape: torch.Size, on_linear: OnLinear, on_attention: OnAttention | None
) -> Iterator[list[Tensor]]:
    """While open, a backward pass calls `on_linear` and `on_attention`.

    Yields the list in which a forward pass leaves the embeddings, to differentiate by.
    """
    embedded: list[Tensor] = []

    def on_embedding(module: Any, args: Any, output_BTE: Tensor) -> Tensor:
        embedded.append(output_BTE.detach().requires_grad_())
        return embedded[-1]

    def linear(name: str):
        def note(g: Tensor, x: Tensor) -> None:
            # [B, T, E]; some models give their feed-forward [B T, E].
            on_linear(texts, name, x.reshape(*shape, -1).float(), g.reshape(*shape, -1).float())

        return lambda module, args, output: _Watched.apply(output, note, args[0])

    def attention(layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        def note(g_BTHD: Tensor, *kept: Tensor) -> None:
            assert on_attention is not None
            on_attention(texts, layer, *kept, rule, g_BTHD)

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
