"""A model in another basis of the residual stream: every state x becomes Q x, and the logits stay as they were.

The gains of norms on the stream move into the weights that read it, then all that writes the stream is turned by Q and
all that reads it by Q^T. An RMS norm without gains does not see a rotation. A layer norm sees none that leaves the mean
over dimensions alone, so there Q keeps the vector of ones; an offset b after gains g becomes Q (b / g).
A norm with gains between an output projection and the stream (Gemma 2 and 3, OLMo 2 and 3, GLM 4) acts dimension by
dimension on what is written: no weights make up for that, and such a model is refused.

Which weights read a norm is seen in a pass of a few tokens, and whether the function is unchanged in another: what this
file does not know of a model is refused, never left half turned.
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
from sinkscope.models.checkpoint_checks import check_in_memory
from sinkscope.models.loaded import Model, bare_model

NUM_TRIED = 16
"""Tokens of the passes that see and check."""


class RotationError(InputError):
    """Something else than plain norms and linear maps reads or writes the residual stream: `reason` says what."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"The residual stream cannot be rotated: {reason}. Choose a model in which only plain norms and linear "
            "maps read and write it, such as one of the Llama family."
        )


@torch.no_grad()
def rotate(model: Model, rotation: Tensor | None = None, *, seed: int = 0) -> Any:
    """A copy of a causal language model whose residual stream is turned by an orthogonal [E, E] matrix: the one given,
    or a random one. It is a plain model of its family and saves and loads as such; tied embeddings are untied."""
    own = bare_model(model)
    check_in_memory(own, "Rotating")
    _check_norms(anatomy_of(own))
    turned = copy.deepcopy(own).eval()
    anatomy = anatomy_of(turned)
    decoder, embedding, head = anatomy.decoder, turned.get_input_embeddings(), turned.get_output_embeddings()
    norms = [decoder.get_submodule(anatomy.family.final_norm)]
    norms += [part for layer in anatomy.layers for part in layer.block.children() if _is_norm(part, anatomy.width)]
    centred = any(isinstance(norm, nn.LayerNorm) for norm in norms)
    ids = torch.arange(NUM_TRIED, device=embedding.weight.device)[None] % embedding.num_embeddings
    readers, before = _readers(turned, norms, ids)
    rotation = random_rotation(anatomy.width, seed=seed, centred=centred) if rotation is None else rotation.double()
    _check_rotation(rotation, anatomy.width, centred)

    if head.weight is embedding.weight:
        head.weight = nn.Parameter(embedding.weight.detach().clone())
        for config in (turned.config, turned.config.get_text_config()):
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
    _check_same(before, turned(ids).logits)
    return turned.train(own.training)


def random_rotation(width: int, *, seed: int, centred: bool = False) -> Tensor:
    """[E, E] float64, uniform among orthogonal matrices, or `centred`: among those that keep the vector of ones."""
    generator = torch.Generator().manual_seed(seed)

    def orthogonal(size: int, first: Tensor | None = None) -> Tensor:
        drawn = torch.randn(size, size, generator=generator, dtype=torch.float64)
        if first is not None:
            drawn[:, 0] = first
        basis, triangle = torch.linalg.qr(drawn)
        return basis * triangle.diagonal().sign()

    if not centred:
        return orthogonal(width)
    basis = orthogonal(width, torch.ones(width, dtype=torch.float64))
    inner = torch.block_diag(torch.ones(1, 1, dtype=torch.float64), orthogonal(width - 1))
    return basis @ inner @ basis.T


def _turn(weight: Tensor, axis: int, rotation: Tensor, gain_E: Tensor | None = None) -> None:
    """Turns the vectors along one axis, in place; gains multiply them before."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    along = weight.to(dtype).movedim(axis, -1)
    if gain_E is not None:
        along = along * gain_E.to(along)
    weight.copy_((along @ rotation.to(along).T).movedim(-1, axis))


def _is_norm(part: nn.Module, width: int) -> bool:
    weight = getattr(part, "weight", None)
    return isinstance(weight, Tensor) and weight.shape == (width,)


def _readers(model: Any, norms: list[Any], ids: Tensor) -> tuple[dict[Any, list[Any]], Tensor]:
    """(the modules with weights that get each norm's output, the logits of the pass in which this was seen)."""
    readers: dict[Any, list[Any]] = {norm: [] for norm in norms}
    left: dict[int, tuple[Any, Tensor]] = {}
    handles = []

    def leave(norm: Any, args: Any, output: Tensor) -> None:
        left[output.untyped_storage().data_ptr()] = norm, output  # kept, so that its memory stays its own

    def enter(part: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and (found := left.get(value.untyped_storage().data_ptr())):
                readers[found[0]].append(part)

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
        yield reader.gate_up_proj, 1 if reader.is_transposed else 2
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
            yield layer.experts.down_proj, 2 if layer.experts.is_transposed else 1
            if (bias := getattr(layer.experts, "down_proj_bias", None)) is not None:
                yield bias, 1


def _check_norms(anatomy: Anatomy) -> None:
    for layer in anatomy.layers:
        if layer.post_norm is not None or layer.attention_exit is not layer.output_projection:
            raise RotationError(
                f"a norm with gains follows the projections of layer {layer.index} ({anatomy.family.name})"
            )
    if getattr(anatomy.decoder, "project_in", None) is not None:
        raise RotationError("a projection brings the embeddings to its width")


def _check_rotation(rotation: Tensor, width: int, centred: bool) -> None:
    identity = torch.eye(width, dtype=torch.float64)
    orthogonal = rotation.shape == identity.shape and torch.allclose(rotation @ rotation.T, identity, atol=1e-6)
    if not orthogonal or (centred and not torch.allclose(rotation.sum(1), torch.ones_like(rotation[0]), atol=1e-6)):
        rows = ", and its rows must add up to 1, because layer norms subtract the mean" if centred else ""
        raise InputError(
            f"`rotation` has shape {tuple(rotation.shape)}. It must be orthogonal and {width} x {width}{rows}. Leave "
            "`rotation` out for a random one."
        )


def _check_same(before: Tensor, after: Tensor) -> None:
    """The function must be unchanged; a part that was missed changes the logits by as much as they are."""
    apart = float((after.double() - before.double()).norm() / before.double().norm())
    # Norms and routers of many families work in float32 at most.
    if not apart <= 4 * max(torch.finfo(before.dtype).eps, torch.finfo(torch.float32).eps) ** 0.5:
        raise RotationError(f"the logits change by {apart:.1e} of themselves in the rotated basis")
