"""Checkpoints of a training run, from which it resumes, and the export of its model for transformers.

A checkpoint is a folder that is whole or absent. Weights and the states of optimisers and random generators are in
safetensors. `checkpoint.json` has the step, which is also the position in the data, and the hash of every file. What
FSDP2 shards is gathered tensor by tensor and written by the first process. torch.distributed.checkpoint would write a
pickle, which runs code when it is loaded.

An export is a folder that transformers loads, if possible without this package.

| attention | feed-forward | written as |
| --- | --- | --- |
| softmax | swiglu | LlamaForCausalLM |
| qk_norm | swiglu | Qwen3ForCausalLM |
| any other | any | Decoder: `sinkscope.load`, or AutoModelForCausalLM after `import sinkscope.pretrain.decoder` |

A softmax model whose heads do not divide its width is written as a Decoder too, since Llama's configuration refuses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedTokenizerBase, Qwen3Config

from sinkscope.errors import InputError
from sinkscope.models.sharded import whole
from sinkscope.pretrain.decoder import Decoder
from sinkscope.pretrain.decoder_config import DecoderConfig
from sinkscope.pretrain.optimisers import CapturableMuon
from sinkscope.pretrain.parallel import Processes, laid_out_as
from sinkscope.pretrain.tokens import file_sha256
from sinkscope.progress import Say
from sinkscope.results.run_folder import MARK, remove_run, run_folder
from sinkscope.results.validated import Count, Name, UnusableFileError, read_json, refused

FOLDER = "checkpoints"
RECORD = "checkpoint.json"
TENSORS = "training.safetensors"

Parameters = dict[str, Tensor]
"""Parameters and buffers by name; sharded or whole, as the optimisers hold them."""
Layout = tuple[tuple[int, ...], torch.dtype | None]
"""Shape and dtype of a tensor; None for a dtype that a checkpoint cannot hold."""


class Record(BaseModel):
    """What checkpoint.json must hold; it may hold more."""

    step: Count
    files: dict[str, Name]
    data: Name
    elapsed_s: Annotated[float, Field(ge=0)]
    seconds: dict[str, Annotated[float, Field(ge=0)]]
    validation_loss: float | None = None


# What each optimiser keeps for a parameter: (names of tensors of its shape, names of scalars).
_MUON = (("momentum_buffer",), ())
_STATE = {
    torch.optim.AdamW: (("exp_avg", "exp_avg_sq"), ("step",)),
    torch.optim.Muon: _MUON,
    CapturableMuon: _MUON,
}
# By the names that safetensors has for them. Weights and moments are float32, states of random generators are bytes.
_DTYPES = {"F32": torch.float32, "U8": torch.uint8}

SHARED_FIELDS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "initializer_range"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "dtype"),
)
"""Fields that our decoder's configuration has in common with those of Llama and Qwen3, under the same names."""


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
    tensors = {}
    for name, tensor in (training_state(parameters, optimisers) | _generator_states(group.device)).items():
        gathered = whole(tensor)  # a collective: every process must call it for every tensor
        if group.is_first:
            tensors[name] = gathered.cpu().contiguous()
    if not group.is_first:
        return
    if path.exists():
        remove_run(path)  # a damaged checkpoint: the run was resumed from an older one and has come here again
    with run_folder(path) as folder:
        save_file(tensors, folder.path / TENSORS)
        files = {TENSORS: file_sha256(folder.path / TENSORS)}
        folder.write_json(RECORD, {"step": step, "files": files, **record})
    for old in _checkpoints(run)[keep:]:
        remove_run(old)


def newest_checkpoint(run: Path, expected: Mapping[str, Layout], say: Say) -> Path | None:
    """The newest undamaged checkpoint, None if there is none yet; says which newer ones are damaged."""
    checkpoints = _checkpoints(run)
    for path in checkpoints:
        reason = damage(path, expected)
        if reason is None:
            return path
        say(f"checkpoint {path.name} is damaged ({reason}); trying the one before it")
    if checkpoints:
        newest = checkpoints[0]
        raise InputError(
            f"Every checkpoint in {run / FOLDER} is damaged; {newest.name}: {damage(newest, expected)}. "
            "Start the run again with `overwrite=True`, or choose another `out`."
        )
    return None


def load_checkpoint(
    path: Path, parameters: Parameters, optimisers: list[torch.optim.Optimizer], group: Processes
) -> dict[str, Any]:
    """Loads a checkpoint into the parameters, the optimisers and the random generators; returns its record."""
    tensors = load_file(path / TENSORS)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(laid_out_as(parameter, tensors[f"model.{name}"]))
    torch.set_rng_state(tensors["generator.cpu"])
    if "generator.cuda" in tensors and group.device.type == "cuda":
        torch.cuda.set_rng_state(tensors["generator.cuda"].cpu(), group.device)
    for name, parameter, optimiser in _optimised(parameters, optimisers):
        moments, scalars = _STATE[type(optimiser)]
        for key in moments:
            optimiser.state[parameter][key] = laid_out_as(parameter, tensors[f"optimiser.{name}.{key}"])
        for key in scalars:
            optimiser.state[parameter][key] = tensors[f"optimiser.{name}.{key}"].to(parameter.device)
    return _record(path)


def _optimised(
    parameters: Parameters, optimisers: list[torch.optim.Optimizer]
) -> Iterator[tuple[str, Tensor, torch.optim.Optimizer]]:
    """(name, parameter, its optimiser) for every parameter that an optimiser has."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            for parameter in group["params"]:
                yield names[id(parameter)], parameter, optimiser


def training_state(parameters: Parameters, optimisers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Every tensor that training changes: `model.<parameter>` and `optimiser.<parameter>.<entry>`."""
    names = {parameter: name for name, parameter in parameters.items()}
    tensors = {f"model.{name}": parameter.detach() for name, parameter in parameters.items()}
    for optimiser in optimisers:
        for parameter, state in optimiser.state.items():
            name = names[parameter]  # type: ignore[index]
            tensors |= {f"optimiser.{name}.{key}": value for key, value in state.items()}
    return tensors


def expected_layouts(parameters: Parameters, optimisers: list[torch.optim.Optimizer]) -> dict[str, Layout]:
    """Shape and dtype of every tensor that a checkpoint must hold.

    Worked out from the parameters, because the optimisers have no state before the first update.
    """
    layouts = {f"model.{name}": _layout(parameter) for name, parameter in parameters.items()}
    layouts["generator.cpu"] = _layout(torch.get_rng_state())
    for name, parameter, optimiser in _optimised(parameters, optimisers):
        moments, scalars = _STATE[type(optimiser)]
        layouts |= {f"optimiser.{name}.{key}": _layout(parameter) for key in moments}
        layouts |= {f"optimiser.{name}.{key}": ((), torch.float32) for key in scalars}
    return layouts


def _checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, newest first. A half-written one has another name and is not among them."""
    return sorted((run / FOLDER).glob("step-????????"), reverse=True)


def damage(path: Path, expected: Mapping[str, Layout]) -> str | None:
    """What is wrong with a checkpoint, such as a file's hash or a missing tensor; None if nothing is."""
    try:
        record = _record(path)
    except UnusableFileError as error:
        return f"{RECORD}: {error.reason}"
    names = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} - {RECORD, MARK}
    if missing := sorted(record["files"].keys() - names):
        return f"{missing[0][:100]} is missing"
    for name in sorted(names):
        if file_sha256(path / name) != record["files"].get(name):
            return f"{name} has other bytes"
    try:
        layouts = _layouts(path)
    except (OSError, SafetensorError):
        return "its tensors cannot be read"
    for name, layout in expected.items():
        if name not in layouts:
            return f"no tensor {name}"
        if layouts[name] != layout:
            return f"{name} has the shape {list(layouts[name][0])} and dtype {layouts[name][1]}"
    try:
        with safe_open(path / TENSORS, framework="pt") as file:
            torch.Generator().set_state(file.get_tensor("generator.cpu"))
    except (RuntimeError, TypeError, SafetensorError):
        return "generator.cpu is not the state of a random generator"
    return None


def _record(path: Path) -> dict[str, Any]:
    """checkpoint.json, checked."""
    record = read_json(path / RECORD, Record)
    if path.name != f"step-{record['step']:08d}":
        raise refused(path / RECORD, f"it is of step {record['step']}")
    return record


def _layouts(path: Path) -> dict[str, Layout]:
    """Shape and dtype of every tensor in a checkpoint; the tensors themselves are not read."""
    with safe_open(path / TENSORS, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: (tuple(part.get_shape()), _DTYPES.get(part.get_dtype())) for name, part in slices.items()}


def _layout(tensor: Tensor) -> Layout:
    return tuple(tensor.shape), tensor.dtype


def _generator_states(device: torch.device) -> dict[str, Tensor]:
    states = {"generator.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["generator.cuda"] = torch.cuda.get_rng_state(device)
    return states


def export(model: Decoder, folder: Path, *, tokenizer: PreTrainedTokenizerBase | None = None) -> str:
    """Writes weights (safetensors), configuration and tokenizer into `folder`; returns the architecture's name."""
    family_config = _family_config(model.config)
    if family_config is None:
        model.save_pretrained(folder)
    else:
        weights = model.state_dict().items()
        # Parameters of the variant (the norms of qk_norm) stand one level higher in the family's own module.
        model.save_pretrained(folder, state_dict={name.replace(".variant.", "."): weight for name, weight in weights})
        family_config.save_pretrained(folder)  # in place of the decoder's, which save_pretrained wrote
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return ((family_config or model.config).architectures or ["Decoder"])[0]


def _family_config(config: DecoderConfig) -> PreTrainedConfig | None:
    """The configuration of the transformers family with the same forward pass, if there is one."""
    if config.feed_forward_variant != "swiglu":
        return None
    options: dict[str, Any] = {name: getattr(config, name) for name in SHARED_FIELDS}
    options["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.attention_variant == "softmax" and config.hidden_size % config.num_attention_heads == 0:
        return LlamaConfig(**options, architectures=["LlamaForCausalLM"])
    if config.attention_variant == "qk_norm":
        return Qwen3Config(**options, architectures=["Qwen3ForCausalLM"])
    return None
