"""The damage of every scheme in every module, predicted from one forward and one backward pass over a few texts.

A scheme changes what module m hands on at token t by d_mt. That is known: the scheme is emulated on what the module
reads, while the rest of the model stays as it was. Near a minimum of the loss the change is of second order,

    1/2 d^T F d,

F the Fisher information: the curvature of the loss where the model's own predictions are taken for true. With targets
drawn from those predictions, the gradient g of the loss on them has the mean of g g^T equal to F. Tokens and modules
are taken to add up, so the damage of some modules is 1/2 sum_mt (g_mt . d_mt)^2, a token's share of it.
What the formula leaves out: terms of first order, which differ from text to text and have no sign of their own; noise
that tokens or modules share; and that a loss cannot grow for ever.
Each number is reduced when the backward pass reaches its module. Nothing is kept beyond what that pass holds of a text.
Axes: N texts, B texts of a pass, T positions, E inputs, O outputs, V vocabulary, H, D heads and their size.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.capture.attention_rule import AttentionRule
from sinkscope.capture.attention_tap import attention_tap
from sinkscope.capture.recorder import Progress, evaluation_mode
from sinkscope.models.anatomy import anatomy_of
from sinkscope.remedies.readings import Reading
from sinkscope.remedies.schemes import (
    SCHEMES,
    Scheme,
    attend,
    attentions,
    linear_layers,
    rounded_cache,
    rounded_input,
    rounded_weight,
    window_mask,
    window_size,
)

BLAMED_SHARE = 0.9
"""Modules are blamed until they hold this share of the predicted damage ..."""
MOST_BLAMED = 0.05
"""... or are this share of all modules."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What one pass finds of every module."""

    damages: Mapping[tuple[str, str], float]
    """By (module, scheme), the change of the loss in nats a token."""
    readings: Mapping[tuple[str, str], Reading]
    """By (module, what): the inputs of linear layers; the keys and the values of attention."""

    def damage(self, scheme: Scheme, modules: Collection[str]) -> float:
        """Of a scheme in some modules at once."""
        return sum(self.damages[module, scheme.name] for module in modules)

    def blamed(self, modules: Sequence[str], *schemes: Scheme) -> list[str]:
        """The few modules that hold most of the damage of some schemes, the worst first."""
        harm = {name: sum(self.damages[name, scheme.name] for scheme in schemes) for name in modules}
        enough, most = BLAMED_SHARE * sum(harm.values()), max(1, int(MOST_BLAMED * len(harm)))
        chosen: list[str] = []
        for name in sorted(harm, key=lambda name: -harm[name])[:most]:
            if sum(harm[each] for each in chosen) >= enough:
                break
            chosen.append(name)
        return chosen


def predict(
    model: Any,
    ids_NT: Tensor,
    *,
    ranges: Mapping[str, float],
    is_sink: Tensor,
    seed: int = 0,
    progress: Progress | None = None,
) -> Prediction:
    """The prediction for every scheme; `ranges` give the static scales and `is_sink` [N, T] the sinks of the texts.

    `progress` is called with (texts read, texts in all)."""
    layers, names = linear_layers(model), {layer: name for name, layer in attentions(model).items()}
    generator = torch.Generator().manual_seed(seed)
    sums: defaultdict[tuple[str, str], float] = defaultdict(float)
    readings: defaultdict[tuple[str, str], Reading] = defaultdict(Reading)
    num_texts, length = ids_NT.shape
    is_sink_BT = is_sink[:1]

    def add(module: str, scheme: Scheme, dot_BT: Tensor) -> None:
        # A window costs the tokens after it alone, and `damage` counts those.
        counted = length - 1 - (window_size(scheme, length) if scheme.what == "window" else 0)
        sums[module, scheme.name] += float(dot_BT.double().square().sum()) / 2 / counted / num_texts

    def on_linear(name: str, x_BTE: Tensor, g_BTO: Tensor) -> None:
        readings[name, "inputs"].add(x_BTE, is_sink_BT)
        layer = layers[name]
        weight_OI = (layer.weight.T if type(layer).__name__ == "Conv1D" else layer.weight).float()
        g_BTE = g_BTO @ weight_OI
        for scheme in SCHEMES.values():
            if scheme.what == "activations":
                add(name, scheme, (g_BTE * (rounded_input(scheme, x_BTE, ranges[name]) - x_BTE)).sum(-1))
            elif scheme.what == "weights":
                noise_OI = rounded_weight(scheme, weight_OI) - weight_OI
                add(name, scheme, (g_BTO * (x_BTE @ noise_OI.T)).sum(-1))

    def on_attention(
        layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule, g_BTHD: Tensor
    ) -> None:
        name, plain_BTHD = names[layer], attend(query, key, value, rule)
        for what, x_BKSD in (("keys", key), ("values", value)):
            readings[name, what].add(x_BKSD.transpose(1, 2).flatten(2), is_sink_BT)
        for scheme in SCHEMES.values():
            if scheme.what == "cache":
                other_BTHD = attend(query, *rounded_cache(scheme, key, value), rule)
            elif scheme.what == "window":
                keep_BT = is_sink_BT if scheme.keeps_sinks else None
                other_BTHD = attend(query, key, value, rule, window_mask(scheme, query, keep_BT))
            else:
                continue
            add(name, scheme, (g_BTHD * (other_BTHD - plain_BTHD)).sum((-1, -2)))

    with evaluation_mode(model), _gradients(model, on_linear, on_attention) as embedded:
        for text in range(num_texts):
            is_sink_BT = is_sink[text : text + 1]
            ids_BT = ids_NT[text : text + 1].to(model.get_input_embeddings().weight.device)
            logits_TV = model(ids_BT, use_cache=False).logits[0, :-1].float()
            drawn_T = torch.multinomial(logits_TV.detach().softmax(-1).cpu(), 1, generator=generator)[:, 0]
            loss = nn.functional.cross_entropy(logits_TV, drawn_T.to(logits_TV.device), reduction="sum")
            torch.autograd.grad(loss, embedded.pop())
            if progress is not None:
                progress(text + 1, num_texts)
    return Prediction(damages=dict(sums), readings=dict(readings))


@contextlib.contextmanager
def _gradients(model: Any, on_linear: Callable[..., None], on_attention: Callable[..., None]) -> Iterator[list[Tensor]]:
    """While open, a backward pass hands what each linear layer read, and each attention, to a function, with the
    gradient at its output. Yields the list in which a forward pass leaves the embeddings, to differentiate by."""
    embedded: list[Tensor] = []

    def on_embedding(module: Any, args: Any, output_BTE: Tensor) -> Tensor:
        embedded.append(output_BTE.detach().requires_grad_())
        return embedded[-1]

    def linear(name: str):
        def note(g: Tensor, x: Tensor) -> None:
            shape = (1, x.numel() // x.shape[-1], -1)  # one text a pass, flattened or not
            on_linear(name, x.reshape(shape).float(), g.reshape(shape).float())

        return lambda module, args, output: _Watched.apply(output, note, args[0])

    def attention(layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        def note(g_BTHD: Tensor, *kept: Tensor) -> None:
            on_attention(layer, *kept, rule, g_BTHD)

        return _Watched.apply(attend(query, key, value, rule), note, query, key, value)  # type: ignore[return-value]

    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(attention_tap(anatomy_of(model), attention))
        stack.callback(model.get_input_embeddings().register_forward_hook(on_embedding).remove)
        for name, layer in linear_layers(model).items():
            stack.callback(layer.register_forward_hook(linear(name)).remove)
        yield embedded


class _Watched(torch.autograd.Function):
    """The same tensor; when its gradient comes, it is handed on with what was kept."""

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
