"""A model in another basis of the residual stream: every state x becomes Q x, and the logits stay as they were.

1. The gains of norms on the stream are multiplied into the weights that read the norm's output.
2. Whatever writes into the stream is multiplied by Q, and whatever reads it by Q^T.

An RMS norm without gains gives the same in every basis. A layer norm also subtracts the mean over dimensions, so there
Q keeps the vector of ones; an offset b after gains g becomes Q (b / g). A norm with gains between an output projection
and the stream (Gemma 2 and 3, OLMo 2 and 3, GLM 4) acts dimension by dimension on what is written, which no change of
weights can make up for. Such a model is refused.

One pass over a few tokens shows which weights read a norm, and another whether the logits are unchanged. A model with
parts that this file does not know is refused, never left half rotated.
Axes: E width.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.errors import InputError
from sinkscope.models.anatomy import Anatomy, anatomy_of, is_transposed
from sinkscope.models.experts import is_transposed as experts_are_transposed
from sinkscope.models.loaded import Model, bare_model, reads_images
from sinkscope.models.weights import check_in_memory

NUM_TOKENS = 16
"""Tokens of those two passes."""


class RotationError(InputError):
    """Something other than plain norms and linear maps reads or writes the residual stream; `reason` says what."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"The residual stream cannot be rotated: {reason}. Choose a model in which only plain norms and linear "
            "maps read and write it, such as one of the Llama family."
        )


@torch.no_grad()
def rotate(model: Model, rotation: Tensor | None = None, *, seed: int = 0) -> Any:
    """A copy of a causal language model whose residual stream is rotated by an orthogonal [E, E] matrix.

    That is `rotation`, or a random one from `seed`. The copy is a plain model of its family, which saves and loads as
    such; tied embeddings are untied.
    """
    original = bare_model(model)
    check_in_memory(original, "Rotating")
    if reads_images(original):
        raise RotationError("image features are written into it beside tokens")
    _check_norms(anatomy_of(original))
    result = copy.deepcopy(original).eval()
    anatomy = anatomy_of(result)
    decoder, embedding, head = anatomy.decoder, result.get_input_embeddings(), result.get_output_embeddings()
    norms = [decoder.get_submodule(anatomy.family.final_norm)]
    norms += [part for layer in anatomy.layers for part in layer.block.children() if _is_norm(part, anatomy.width)]
    centred = any(isinstance(norm, nn.LayerNorm) for norm in norms)
    ids = torch.arange(NUM_TOKENS, device=embedding.weight.device)[None] % embedding.num_embeddings
    readers, logits = _readers(result, norms, ids)
    rotation = random_rotation(anatomy.width, seed=seed, centred=centred) if rotation is None else rotation.double()
    _check_rotation(rotation, anatomy.width, centred)

    if head.weight is embedding.weight:  # untied: the head takes gains in, the embeddings do not
        head.weight = nn.Parameter(embedding.weight.detach().clone())
        for config in (result.config, result.config.get_text_config()):
            config.tie_word_embeddings = False
    for norm in norms:
        gain_E = norm.weight.detach().clone()
        for reader in readers[norm]:
            for weight, axis in _reading_weights(reader):
                _turn(weight, axis, rotation, gain_E)
        if getattr(norm, "bias", None) is not None:
            norm.bias.div_(gain_E)
            _turn(norm.bias, 0, rotation)
        norm.weight.fill_(1)
    for weight, axis in _writing_weights(anatomy):
        _turn(weight, axis, rotation)
    _check_same(logits, result(ids).logits)
    return result.train(original.training)


def random_rotation(width: int, *, seed: int, centred: bool = False) -> Tensor:
    """[E, E] float64, uniform among orthogonal matrices; if `centred`, among those that keep the vector of ones."""
    generator = torch.Generator().manual_seed(seed)

    def orthogonal(size: int, first: Tensor | None = None) -> Tensor:
        matrix = torch.randn(size, size, generator=generator, dtype=torch.float64)
        if first is not None:
            matrix[:, 0] = first
        basis, triangle = torch.linalg.qr(matrix)
        return basis * triangle.diagonal().sign()  # without these signs the basis would not be uniform

    if not centred:
        return orthogonal(width)
    # In a basis whose first vector is that of ones: the identity along it, and any rotation of the others.
    basis = orthogonal(width, torch.ones(width, dtype=torch.float64))
    inner = torch.block_diag(torch.ones(1, 1, dtype=torch.float64), orthogonal(width - 1))
    return basis @ inner @ basis.T


def _turn(weight: Tensor, axis: int, rotation: Tensor, gain_E: Tensor | None = None) -> None:
    """Multiplies a weight by the rotation along one axis, in place; before it by the gains, if there are any."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    along = weight.to(dtype).movedim(axis, -1)
    if gain_E is not None:
        along = along * gain_E.to(along)
    weight.copy_((along @ rotation.to(along).T).movedim(-1, axis))


def _is_norm(part: nn.Module, width: int) -> bool:
    """Whether a module has one gain for each dimension of the stream."""
    weight = getattr(part, "weight", None)
    return isinstance(weight, Tensor) and weight.shape == (width,)


def _readers(model: Any, norms: list[Any], ids: Tensor) -> tuple[dict[Any, list[Any]], Tensor]:
    """(by norm, the modules with weights that read its output; the logits of the pass that showed this)."""
    readers: dict[Any, list[Any]] = {norm: [] for norm in norms}
    outputs: dict[int, tuple[Any, Tensor]] = {}  # by address: (norm, its output)
    handles = []

    def leave(norm: Any, args: Any, output: Tensor) -> None:
        # The output is kept, so that no other tensor gets its address.
        outputs[output.untyped_storage().data_ptr()] = norm, output

    def enter(part: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            address = value.untyped_storage().data_ptr() if isinstance(value, Tensor) else None
            if address in outputs:
                norm, _ = outputs[address]
                readers[norm].append(part)

    for norm in norms:
        handles.append(norm.register_forward_hook(leave))
    for part in model.modules():
        if part not in readers and any(weight.ndim > 1 for weight in part.parameters(recurse=False)):
            handles.append(part.register_forward_pre_hook(enter, with_kwargs=True))
    try:
        logits = model(ids).logits
    finally:
        for handle in handles:
            handle.remove()
    if silent := [type(norm).__name__ for norm, parts in readers.items() if not parts]:
        raise RotationError(f"no module with weights gets the output of a {silent[0]}")
    return readers, logits


def _reading_weights(reader: Any) -> Iterator[tuple[Tensor, int]]:
    """(weight, the axis along which it reads the stream)."""
    if hasattr(reader, "gate_up_proj"):
        yield reader.gate_up_proj, 1 if experts_are_transposed(reader) else 2
    elif is_transposed(reader):
        yield reader.weight, 0
    elif isinstance(getattr(reader, "weight", None), nn.Parameter) and reader.weight.ndim == 2:
        yield reader.weight, 1  # a Linear or a router
    else:
        raise RotationError(f"a {type(reader).__name__} reads it")


def _writing_weights(anatomy: Anatomy) -> Iterator[tuple[Tensor, int]]:
    """(weight, the axis along which it writes the stream)."""
    for part in anatomy.decoder.modules():
        if isinstance(part, nn.Embedding):  # of tokens, and of positions where they are learned
            yield part.weight, 1
    for layer in anatomy.layers:
        for part in (layer.output_projection, layer.down_projection, layer.shared_down_projection):
            if part is None:
                continue
            if not isinstance(part.weight, nn.Parameter):
                raise RotationError(f"a {type(part).__name__} writes it")
            yield part.weight, 1 if is_transposed(part) else 0
            if part.bias is not None:
                yield part.bias, 0
        if layer.experts is not None:
            yield layer.experts.down_proj, 2 if experts_are_transposed(layer.experts) else 1
            if (bias := getattr(layer.experts, "down_proj_bias", None)) is not None:
                yield bias, 1


def _check_norms(anatomy: Anatomy) -> None:
    """Refuses other mixers than attention, and norms and projections between the stream and what writes it."""
    if mixers := [layer for layer in anatomy.layers if layer.mixer_exit is not None]:
        raise RotationError(f"a {type(mixers[0].mixer_exit).__name__} writes it in layer {mixers[0].index}")
    for layer in anatomy.layers:
        if layer.post_norm is not None or layer.attention_exit is not layer.output_projection:
            raise RotationError(
                f"a norm with gains follows the projections of layer {layer.index} ({anatomy.family.name})"
            )
    if getattr(anatomy.decoder, "project_in", None) is not None:
        raise RotationError("a projection brings the embeddings to its width")


def _check_rotation(rotation: Tensor, width: int, centred: bool) -> None:
    """Refuses a matrix that is not orthogonal or, if `centred`, does not keep the vector of ones."""
    identity = torch.eye(width, dtype=torch.float64)
    orthogonal = rotation.shape == identity.shape and torch.allclose(rotation @ rotation.T, identity, atol=1e-6)
    if not orthogonal or (centred and not torch.allclose(rotation.sum(1), torch.ones_like(rotation[0]), atol=1e-6)):
        rows = ", and its rows must add up to 1, because layer norms subtract the mean" if centred else ""
        raise InputError(
            f"`rotation` has shape {tuple(rotation.shape)}. It must be orthogonal and {width} x {width}{rows}. Leave "
            "`rotation` out for a random one."
        )


def _check_same(before: Tensor, after: Tensor) -> None:
    """Refuses a rotation that changes the logits: a part that was missed changes them by about their own size."""
    difference = float((after.double() - before.double()).norm() / before.double().norm())
    # Not finer than float32, in which norms and routers of many families work whatever the model's dtype is.
    if not difference <= 4 * max(torch.finfo(before.dtype).eps, torch.finfo(torch.float32).eps) ** 0.5:
        raise RotationError(f"the logits change by {difference:.1e} of themselves in the rotated basis")
