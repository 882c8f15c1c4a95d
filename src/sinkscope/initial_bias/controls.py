"""Controls of the bias: each removes or changes one suspected cause of the preference.

A control is a context in which the model runs changed; leaving it restores the model. A family in which a control is
not possible is refused with the reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sinkscope.errors import InputError
from sinkscope.measures.value_variance import value_variance
from sinkscope.models.anatomy import AnyModule, Layer, anatomy_of, input_device
from sinkscope.models.loaded import LoadedModel
from sinkscope.models.token_batches import TokenBatch
from sinkscope.models.weights import check_in_memory
from sinkscope.tracing.block_states import besides, entering, leaving
from sinkscope.tracing.hooks import between_parts
from sinkscope.tracing.single_reader import evaluation_mode


@dataclass(frozen=True)
class Control:
    """A change to the model, and what it changes in words."""

    open: Callable[[LoadedModel, TokenBatch, contextlib.ExitStack], None]
    """Changes the model until the stack is closed; the batch is for calibration."""
    question: str


@contextlib.contextmanager
def under_control(name: str, loaded: LoadedModel, calibration: TokenBatch) -> Iterator[None]:
    """While open, the model runs under a control of CONTROLS. What the family does not allow is refused beforehand."""
    with contextlib.ExitStack() as stack:
        CONTROLS[name].open(loaded, calibration, stack)
        yield


def _tanh_activation(loaded: LoadedModel, _: TokenBatch, stack: contextlib.ExitStack) -> None:
    anatomy = anatomy_of(loaded.model)
    for layer in anatomy.layers:
        if not layer.activations:
            raise _refused(
                f"In {anatomy.family.name} the activation function is written into the code of the experts, "
                "where it cannot be swapped."
            )
    for layer in anatomy.layers:
        for activation in layer.activations:
            stack.callback(activation.register_forward_hook(lambda module, args, output: args[0].tanh()).remove)


def _odd_feed_forward(loaded: LoadedModel, _: TokenBatch, stack: contextlib.ExitStack) -> None:
    anatomy = anatomy_of(loaded.model)
    for layer in anatomy.layers:
        if layer.feed_forward is None:
            raise _refused(
                f"In {anatomy.family.name} the feed-forward is written into the block and cannot run by itself."
            )

    def hook(module: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        others, named = besides(args, kwargs)
        # module.forward and not module(...), which would run this hook again.
        mirrored = module.forward(-entering(args, kwargs), *others, **named)
        return _with_first(output, (leaving(output) - leaving(mirrored)) / 2)

    for layer in anatomy.layers:
        feed_forward: AnyModule = layer.feed_forward
        stack.callback(feed_forward.register_forward_hook(hook, with_kwargs=True).remove)


def _no_feed_forward(loaded: LoadedModel, _: TokenBatch, stack: contextlib.ExitStack) -> None:
    for layer in anatomy_of(loaded.model).layers:
        _end_after_attention(layer, stack)


def _end_after_attention(layer: Layer, stack: contextlib.ExitStack) -> None:
    """The block returns the stream as it is after its attention, whatever its feed-forward does."""
    held: list[Tensor] = []
    between_parts(layer, stack, held.append)
    stack.callback(
        layer.block.register_forward_hook(lambda module, args, output: _with_first(output, held.pop())).remove
    )


def _no_attention(loaded: LoadedModel, _: TokenBatch, stack: contextlib.ExitStack) -> None:
    for layer in anatomy_of(loaded.model).layers:
        handle = layer.attention_exit.register_forward_hook(lambda module, args, output: torch.zeros_like(output))
        stack.callback(handle.remove)


def _redrawn_embeddings(loaded: LoadedModel, _: TokenBatch, stack: contextlib.ExitStack) -> None:
    check_in_memory(loaded.model, "Redrawing the embeddings")
    weight = anatomy_of(loaded.model).decoder.get_input_embeddings().weight
    before = weight.detach().clone()
    # Seeded by the weights: models of different seeds get different embeddings, and the same model always the same.
    generator = torch.Generator().manual_seed(int(loaded.weight_hash[:12], 16))
    drawn = torch.randn(weight.shape, generator=generator) * float(before.float().std())

    def put(values: Tensor) -> None:
        with torch.no_grad():
            weight.copy_(values)

    stack.callback(put, before)
    put(drawn.to(weight))


def _calibrated_variance(loaded: LoadedModel, calibration: TokenBatch, stack: contextlib.ExitStack) -> None:
    """Multiplies position t of the value aggregation by sqrt(variance at 0 / variance at t), in each layer.

    The variances are measured on the calibration sequences, layer by layer, with the layers below already scaled, and
    then kept fixed.
    """
    anatomy, factors = anatomy_of(loaded.model), {}

    def calibrate(layer: int):
        def hook(module: Any, args: tuple) -> tuple:
            values_BTC = args[0].reshape(-1, calibration.length, args[0].shape[-1])
            variance_T = value_variance(values_BTC.double())
            if not (variance_T > 0).all():
                raise _refused(
                    f"In {anatomy.family.name} some values of layer {layer} do not differ between sequences."
                )
            factors[layer] = (variance_T[0] / variance_T).sqrt()
            return scaled(args, factors[layer])

        return hook

    def scaled(args: tuple, factor_T: Tensor) -> tuple:
        values_BTC = args[0].reshape(-1, len(factor_T), args[0].shape[-1])
        return ((values_BTC * factor_T.to(values_BTC)[:, None]).reshape(args[0].shape), *args[1:])

    with contextlib.ExitStack() as calibrating, evaluation_mode(loaded.model), torch.no_grad():
        for layer in anatomy.layers:
            handle = layer.output_projection.register_forward_pre_hook(calibrate(layer.index))
            calibrating.callback(handle.remove)
        anatomy.decoder(input_ids=calibration.ids.to(input_device(anatomy)), use_cache=False)
    for layer in anatomy.layers:
        factor_T = factors[layer.index]
        handle = layer.output_projection.register_forward_pre_hook(lambda module, args, f=factor_T: scaled(args, f))
        stack.callback(handle.remove)


def _with_first(output: Any, first: Tensor) -> Any:
    """The output of a module, with its hidden states replaced."""
    return (first, *output[1:]) if isinstance(output, tuple) else first


def _refused(reason: str) -> InputError:
    return InputError(f"{reason} Leave this control out.")


CONTROLS: Mapping[str, Control] = {
    "tanh_activation": Control(_tanh_activation, "Activation swapped for tanh, which is odd"),
    "odd_feed_forward": Control(_odd_feed_forward, "Feed-forward f(x) swapped for its odd part, (f(x) - f(-x)) / 2"),
    "no_feed_forward": Control(_no_feed_forward, "Feed-forward removed"),
    "no_attention": Control(_no_attention, "Attention removed"),
    "redrawn_embeddings": Control(_redrawn_embeddings, "Embeddings drawn anew, with a tied output head"),
    "calibrated_variance": Control(
        _calibrated_variance, "Value aggregation rescaled so that later positions keep the variance of position 0"
    ),
}
