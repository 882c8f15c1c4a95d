"""Complete checkpoints of a training run, each a folder that is whole or absent, and the model that a run exports.

A checkpoint holds the weights and the states of optimisers and random generators in safetensors. `checkpoint.json`
has the step, which is also the position in the data, and the hash of every file. What FSDP2 shards is gathered, tensor
by tensor, and written by the first process: torch.distributed.checkpoint would write a pickle.

An export is a folder that transformers loads, if possible without this package.

| attention | feed-forward | written as |
| --- | --- | --- |
| softmax | swiglu | LlamaForCausalLM |
| qk_norm | swiglu | Qwen3ForCausalLM |
| any other | any | Decoder: `sinkscope.load`, or AutoModelForCausalLM after `import sinkscope.pretrain.decoder` |

A softmax model whose heads do not divide its width is written as a Decoder too, since Llama's configuration refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedTokenizerBase, Qwen3Config

from sinkscope.errors import InputError
from sinkscope.pretrain.decoder import Decoder
from sinkscope.pretrain.decoder_config import DecoderConfig
from sinkscope.pretrain.optimisers import CapturableMuon
from sinkscope.pretrain.parallel import Processes, laid_out_as, whole
from sinkscope.pretrain.tokens import file_sha256
from sinkscope.progress import Say
from sinkscope.results.run_folder import MARK, remove_run, run_folder
from sinkscope.results.validated import NAME, Each, Int, Maybe, Real, UnusableFileError, read_json, refused

FOLDER = "checkpoints"
RECORD = "checkpoint.json"
TENSORS = "training.safetensors"

Parameters = dict[str, Tensor]
"""Parameters and buffers by name; sharded or whole, as the optimisers hold them."""
Layout = tuple[tuple[int, ...], torch.dtype | None]
"""Shape and dtype of a tensor; None for a dtype that a checkpoint cannot hold."""

RECORD_SHAPE = {
    "step": Int(1),
    "files": Each(NAME),
    "data": NAME,
    "elapsed_s": Real(0),
    "seconds": Each(Real(0)),
    "validation_loss": Maybe(Real()),
}
# What each optimiser keeps for a parameter: tensors of its shape, and counts.
_MUON = (("momentum_buffer",), ())
_STATE = {
    torch.optim.AdamW: (("exp_avg", "exp_avg_sq"), ("step",)),
    torch.optim.Muon: _MUON,
    CapturableMuon: _MUON,
}
# As safetensors names them.
_DTYPES = {"F32": torch.float32, "U8": torch.uint8}

SHARED_FIELDS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "initializer_range"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "dtype"),
)


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
        gathered = whole(tensor)  # by every process
        if group.is_first:
            tensors[name] = gathered.cpu().contiguous()
    if not group.is_first:
        return
    if path.exists():
        remove_run(path)  # a damaged one: this run was resumed from one before it
    with run_folder(path) as folder:
        save_file(tensors, folder.path / TENSORS)
        files = {TENSORS: file_sha256(folder.path / TENSORS)}
        folder.write_json(RECORD, {"step": step, "files": files, **record})
    for old in _checkpoints(run)[keep:]:
        remove_run(old)


def newest_checkpoint(run: Path, expected: Mapping[str, Layout], say: Say) -> Path | None:
    """The newest undamaged checkpoint, None if there is none yet; says which newer ones are damaged."""
    found = _checkpoints(run)
    for path in found:
        reason = damage(path, expected)
        if reason is None:
            return path
        say(f"checkpoint {path.name} is damaged ({reason}); looking at the one before")
    if found:
        raise InputError(
            f"Every checkpoint in {run / FOLDER} is damaged; {found[0].name}: {damage(found[0], expected)}. "
            "Start the run again with `overwrite=True`, or choose another `out`."
        )
    return None


def load_checkpoint(
    path: Path, parameters: Parameters, optimisers: list[torch.optim.Optimizer], group: Processes
) -> dict[str, Any]:
    """The record of a checkpoint, whose tensors are now in the parameters, the optimisers and the generators."""
    tensors = load_file(path / TENSORS)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(laid_out_as(parameter, tensors[f"model.{name}"]))
    torch.set_rng_state(tensors["generator.cpu"])
    if "generator.cuda" in tensors and group.device.type == "cuda":
        torch.cuda.set_rng_state(tensors["generator.cuda"].cpu(), group.device)
    owners = {id(p): o for o in optimisers for entry in o.param_groups for p in entry["params"]}
    for name, parameter in parameters.items():
        if (optimiser := owners.get(id(parameter))) is not None:
            moments, counts = _STATE[type(optimiser)]
            for key in moments:
                optimiser.state[parameter][key] = laid_out_as(parameter, tensors[f"optimiser.{name}.{key}"])
            for key in counts:
                optimiser.state[parameter][key] = tensors[f"optimiser.{name}.{key}"].to(parameter.device)
    return _record(path)


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
    """What a checkpoint after at least one update must hold, before any update is done."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    layouts = {f"model.{name}": _layout(parameter) for name, parameter in parameters.items()}
    layouts["generator.cpu"] = _layout(torch.get_rng_state())
    for optimiser in optimisers:
        moments, counts = _STATE[type(optimiser)]
        for parameter in (parameter for entry in optimiser.param_groups for parameter in entry["params"]):
            name = names[id(parameter)]
            layouts |= {f"optimiser.{name}.{key}": _layout(parameter) for key in moments}
            layouts |= {f"optimiser.{name}.{key}": ((), torch.float32) for key in counts}
    return layouts


def _checkpoints(run: Path) -> list[Path]:
    """Checkpoints, newest first. Folders with other names, such as partial ones, are left out."""
    return sorted((run / FOLDER).glob("step-????????"), reverse=True)


def damage(path: Path, expected: Mapping[str, Layout]) -> str | None:
    """What is wrong with a checkpoint: its record, a file's hash, or a missing tensor; None if nothing is."""
    try:
        record = _record(path)
    except UnusableFileError as error:
        return f"{RECORD}: {error.reason}"
    found = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} - {RECORD, MARK}
    if missing := sorted(record["files"].keys() - found):
        return f"{missing[0][:100]} is missing"
    for name in sorted(found):
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
        return "generator.cpu is no state of a generator"
    return None


def _record(path: Path) -> dict[str, Any]:
    """checkpoint.json, checked."""
    record = read_json(path / RECORD, RECORD_SHAPE)
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
    config = model.config
    known = _known_config(config)
    if known is None:
        model.save_pretrained(folder)
    else:
        weights = model.state_dict().items()
        # The variant's own parameters, the norms of qk_norm, stand one level higher there.
        model.save_pretrained(folder, state_dict={name.replace(".variant.", "."): weight for name, weight in weights})
        known.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return ((known or config).architectures or ["Decoder"])[0]


def _known_config(config: DecoderConfig) -> PreTrainedConfig | None:
    """The configuration of the family that has the same forward pass, if there is one."""
    if config.feed_forward_variant != "swiglu":
        return None
    options: dict[str, Any] = {name: getattr(config, name) for name in SHARED_FIELDS}
    options["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.attention_variant == "softmax" and config.hidden_size % config.num_attention_heads == 0:
        return LlamaConfig(**options, architectures=["LlamaForCausalLM"])
    if config.attention_variant == "qk_norm":
        return Qwen3Config(**options, architectures=["Qwen3ForCausalLM"])
    return None
