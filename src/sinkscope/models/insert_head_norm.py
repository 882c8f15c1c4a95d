"""Puts HeadRMSNorm before every output projection of a Hugging Face model, and takes it out again.

The norm becomes a submodule of the projection and runs as a pre-hook on it, so the model trains, saves and compiles as
before. Its lambdas are saved with the model's weights. A model of transformers is saved with the code that loads it
without sinkscope (modeling_head_norm.py), and refuses to be loaded without the norms. `sinkscope.load` needs no such
code.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from sinkscope.attention.head_norm import HeadRMSNorm
from sinkscope.errors import InputError
from sinkscope.models.anatomy import AnyModule, anatomy_of
from sinkscope.models.checkpoint_checks import HEAD_NORM
from sinkscope.models.loaded import Model, bare_model
from sinkscope.models.modeling_head_norm import write_beside
from sinkscope.models.sharded import is_tensor_parallel, original_class
from sinkscope.models.weights import check_in_memory

NAME = "head_norm"
"""Name of the submodule in each output projection."""


def insert_head_norm(
    model: Model, *, per_head: bool = True, offset: bool = True, fixed: bool = False, initial_lambda: float = 1.0
) -> list[HeadRMSNorm]:
    """Puts HeadRMSNorm before every output projection, and returns the norms, one per layer with attention.

    `model` is changed in place: the lambdas of the norms are parameters of it. `remove_head_norm` undoes it exactly. To
    train from a random start, give `initial_lambda=0.25` (see HeadRMSNorm). Insert norms before a model is wrapped in
    DDP, and before the optimiser is made. FSDP2 may have sharded it: then the norms are sharded too.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise InputError(
            "DDP would not share the gradients of the norms. Insert them first, then wrap the model in DDP."
        )
    anatomy = anatomy_of(model)
    check_in_memory(bare_model(model), "Head-wise RMSNorm")
    if is_tensor_parallel(bare_model(model)):
        raise InputError(
            "This model is tensor-parallel: each process has some of the heads, and the norm would need all. Use FSDP2 "
            "(fully_shard) or DDP."
        )
    projections = [layer.output_projection for layer in anatomy.attention_layers]
    if any(hasattr(projection, NAME) for projection in projections):
        raise InputError("The model has head-wise RMSNorm already. Call remove_head_norm(model) first.")
    options = {"per_head": per_head, "offset": offset, "fixed": fixed, "initial_lambda": initial_lambda}
    norms = []
    for layer, projection in zip(anatomy.attention_layers, projections, strict=True):
        num_channels = layer.output_projection_weight().shape[1]
        norm = HeadRMSNorm(anatomy.num_heads, num_channels // anatomy.num_heads, **options)
        # Lambdas are few and small steps matter to them, so they stay in float32 whatever the weights are in.
        norm.to(projection.weight.device).train(projection.training)
        if hasattr(projection.weight, "device_mesh"):
            fully_shard(norm, mesh=projection.weight.device_mesh)
        projection.add_module(NAME, norm)
        norm.handle = projection.register_forward_pre_hook(_normalise)
        norms.append(norm)
    owner = bare_model(model)
    if hasattr(owner, "config"):
        setattr(owner.config, HEAD_NORM, options)
    if _is_of_transformers(owner):
        names = {id(module): name for name, module in owner.named_modules()}
        heads = {
            names[id(each)]: [norm.num_heads, norm.head_size] for each, norm in zip(projections, norms, strict=True)
        }
        owner.save_pretrained = partial(_save_pretrained, owner, {"projections": heads, "options": options})
    return norms


def remove_head_norm(model: Model) -> None:
    """Takes the norms out again. If the model was not trained meanwhile, it computes what it did before, to the bit."""
    for layer in anatomy_of(model).attention_layers:
        norm = getattr(layer.output_projection, NAME, None)
        if norm is None:
            raise InputError(
                f"There is no head-wise RMSNorm in layer {layer.index} to remove. Call insert_head_norm(model) first."
            )
        norm.handle.remove()
        delattr(layer.output_projection, NAME)
    owner = bare_model(model)
    if hasattr(owner, "config"):
        delattr(owner.config, HEAD_NORM)
    vars(owner).pop("save_pretrained", None)


def _is_of_transformers(model: AnyModule) -> bool:
    """Whether transformers alone can build a model of this class."""
    architecture = original_class(model)
    return getattr(transformers, architecture.__name__, None) is architecture


def _save_pretrained(model: AnyModule, settings: dict[str, Any], save_directory: str | Path, **kwargs: Any) -> None:
    """What `save_pretrained` of a model with norms does: it writes their code beside the weights."""
    type(model).save_pretrained(model, save_directory, **kwargs)
    if kwargs.get("is_main_process", True):
        write_beside(save_directory, settings)


def load_head_norm(model: AnyModule, folder: str | Path) -> None:
    """Puts the norms of a saved model into one that from_pretrained has just loaded from the same folder.

    Without norms in that folder the model stays as it is.
    """
    options = getattr(model.config, HEAD_NORM, None)
    if options is None:
        return
    insert_head_norm(model, **options)
    values = _saved_values(Path(folder))
    for name, parameter in model.named_parameters():
        if f".{NAME}." not in name:
            continue
        if name not in values or values[name].shape != parameter.shape:
            wrong = "missing" if name not in values else f"of shape {list(values[name].shape)}"
            raise InputError(
                f"{name} is {wrong} in the saved weights, and must have shape {list(parameter.shape)}. Save the model "
                "again with save_pretrained."
            )
        with torch.no_grad():
            parameter.copy_(values[name])


def _saved_values(folder: Path) -> dict[str, Tensor]:
    """The lambdas in a folder's safetensors files, by name."""
    values = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            values |= {name: tensors.get_tensor(name) for name in tensors.keys() if f".{NAME}." in name}  # noqa: SIM118
    return values


def _normalise(projection: AnyModule, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The pre-hook: the projection's input [..., C] split into heads [..., H, D], which the norm joins again."""
    norm = projection.head_norm
    return (norm(args[0].unflatten(-1, (norm.num_heads, norm.head_size))), *args[1:])
