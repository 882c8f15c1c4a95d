"""Complete checkpoints of a training run, each a folder that is whole or absent.

A checkpoint holds the weights, the optimisers' state and the generators' in safetensors, and `checkpoint.json` with
the step, which is the position in the data too, and the hash of every file. Sharded by FSDP2, the tensors go through
torch.distributed.checkpoint instead, each process writing its own; its `.metadata` file is a pickle, as torch writes
it, and is unpickled on resuming: resume no such run that you don't trust.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from sinkscope.errors import InputError
from sinkscope.pretrain.parallel import Processes
from sinkscope.pretrain.token_shards import file_sha256
from sinkscope.results.run_folder import remove_run, run_folder

FOLDER = "checkpoints"
RECORD = "checkpoint.json"
TENSORS = "training.safetensors"
SHARDS = "shards"

Parameters = dict[str, Tensor]
"""By name, and a model's buffers with them; sharded or whole, as the optimisers hold them."""


def save_checkpoint(
    run: Path,
    step: int,
    parameters: Parameters,
    optimisers: list[torch.optim.Optimizer],
    group: Processes,
    *,
    keep: int,
    **record: Any,
) -> None:
    """Writes the checkpoint of a step, then removes all but the newest `keep`; every process calls it."""
    path = run / FOLDER / f"step-{step:08d}"
    tensors = training_state(parameters, optimisers) | _generator_states(group.device)
    if group.is_first and path.exists():
        remove_run(path)  # a damaged one: this run was resumed from one before it
    with run_folder(path) if group.is_first else contextlib.nullcontext() as folder:
        partial = Path(group.from_first(str(folder.path) if folder else ""))
        if group.mode == "fsdp":
            save_shards(tensors, checkpoint_id=partial / SHARDS)
        elif group.is_first:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial / TENSORS)
        if folder is not None:
            files = sorted(file for file in partial.rglob("*") if file.is_file())
            hashes = {str(file.relative_to(partial)): file_sha256(file) for file in files}
            folder.write_json(RECORD, {"step": step, "files": hashes, **record})
    if group.is_first:
        for old in _checkpoints(run)[keep:]:
            remove_run(old)


def newest_checkpoint(run: Path, say: Callable[[str], None]) -> Path | None:
    """The newest whole checkpoint, None before the first; each damaged one is named on the way to it."""
    found = _checkpoints(run)
    for path in found:
        reason = damage(path)
        if reason is None:
            return path
        say(f"checkpoint {path.name} is damaged ({reason}); looking at the one before")
    if found:
        raise InputError(
            expected=f"a whole checkpoint in {run / FOLDER}",
            found="damaged ones only",
            next_step="Start the run again with --overwrite, or choose another folder with --out",
        )
    return None


def load_checkpoint(
    path: Path, parameters: Parameters, optimisers: list[torch.optim.Optimizer], group: Processes
) -> dict[str, Any]:
    """The record of a checkpoint, whose tensors are now in the parameters, the optimisers and the generators."""
    sharded = (path / SHARDS).is_dir()
    if sharded != (group.mode == "fsdp"):
        raise InputError(
            expected=f"a checkpoint written with --parallel {group.mode}",
            found=f"one {'with' if sharded else 'without'} shards",
            next_step=f"Resume {'with' if sharded else 'without'} --parallel fsdp",
        )
    tensors = _load_shards(path / SHARDS, parameters, group.device) if sharded else load_file(path / TENSORS)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors.pop(f"model.{name}"))
    torch.set_rng_state(tensors.pop("generator.cpu"))
    if (state := tensors.pop("generator.cuda", None)) is not None and group.device.type == "cuda":
        torch.cuda.set_rng_state(state.cpu(), group.device)
    owners = {id(p): o for o in optimisers for entry in o.param_groups for p in entry["params"]}
    for name, tensor in tensors.items():
        parameter_name, _, key = name.removeprefix("optimiser.").rpartition(".")
        parameter = parameters[parameter_name]
        owners[id(parameter)].state[parameter][key] = tensor.to(parameter.device)
    return json.loads((path / RECORD).read_text(encoding="utf-8"))


def training_state(parameters: Parameters, optimisers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Every tensor that training changes: `model.<parameter>` and `optimiser.<parameter>.<entry>`."""
    names = {parameter: name for name, parameter in parameters.items()}
    tensors = {f"model.{name}": parameter.detach() for name, parameter in parameters.items()}
    for optimiser in optimisers:
        for parameter, state in optimiser.state.items():
            name = names[parameter]  # type: ignore[index]
            tensors |= {f"optimiser.{name}.{key}": value for key, value in state.items()}
    return tensors


def _checkpoints(run: Path) -> list[Path]:
    """Newest first. Folders under other names, such as partial ones, are none."""
    return sorted((run / FOLDER).glob("step-????????"), reverse=True)


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, by the hashes of its files; None where it is whole."""
    try:
        record = json.loads((path / RECORD).read_text(encoding="utf-8"))
        for name, sha256 in record["files"].items():
            if not (path / name).is_file():
                return f"{name} is missing"
            if file_sha256(path / name) != sha256:
                return f"{name} has other bytes"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{RECORD} cannot be read"
    return None if record["files"] else "it holds no tensors"


def _generator_states(device: torch.device) -> dict[str, Tensor]:
    states = {"generator.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["generator.cuda"] = torch.cuda.get_rng_state(device)
    return states


def _load_shards(path: Path, parameters: Parameters, device: torch.device) -> dict[str, Tensor]:
    """The tensors of a sharded checkpoint, each laid out as the parameter it belongs to."""
    tensors: dict[str, Tensor] = {}
    for name, entry in FileSystemReader(path).read_metadata().state_dict_metadata.items():
        size, dtype = entry.size, entry.properties.dtype  # type: ignore[union-attr]
        owner = parameters.get(name.removeprefix("model.")) if name.startswith("model.") else None
        owner = parameters.get(name.removeprefix("optimiser.").rpartition(".")[0]) if owner is None else owner
        if owner is not None and owner.shape == size:
            tensors[name] = torch.empty_like(owner, requires_grad=False)
        else:
            tensors[name] = torch.empty(size, dtype=dtype, device="cpu" if name.startswith("generator") else device)
    load_shards(tensors, checkpoint_id=path)
    return tensors
