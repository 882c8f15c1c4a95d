"""Refusals: checkpoints that cannot be read exactly as they were written, and models that are no causal LM.

Files are checked before any weight is loaded, since a damaged one otherwise fails deep inside a library, or not at all.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from sinkscope.errors import InputError
from sinkscope.models.quantised import check_scales
from sinkscope.models.weights import each_weight
from sinkscope.results.validated import shortened

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ADAPTER = "adapter_config.json"
HEAD_NORM = "sinkscope_head_norm"
"""The model type of a saved model with inserted norms; in a configuration in memory, the key of their options."""
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
PART_COUNTS = re.compile(r"(num|n)_\w*(layer|head|expert|label)|\w+\.(block|attention\.head|expert)_count")
"""What config.json and GGUF files call them."""
MOST_PARTS = 4096
"""Layers, heads, experts or labels of a model."""
CHUNK = 1 << 24
"""Elements looked at together when weights are checked: this bounds the memory of the check."""


def looks_like_hub_name(name: str) -> bool:
    """Whether `name` has the form of a Hub name, and no file or folder here has that name."""
    return (
        re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", name) is not None
        and not name.endswith((".gguf", ".safetensors", ".json", *PICKLE_SUFFIXES))
        and not Path(name).exists()
    )


def refuse_path(path: Path) -> NoReturn:
    """Refuses what is neither a folder nor a .gguf file, and says what it is instead."""
    if not path.exists():
        raise InputError(
            f"There is no folder or .gguf file {str(path)!r}. Check the path; a Hugging Face name has the form "
            "owner/name."
        )
    if path.suffix in PICKLE_SUFFIXES:
        raise _pickle(path.name)
    raise InputError(f"{path.name} is neither a model folder nor a .gguf file. Name the folder it is in.")


def _pickle(file: str) -> InputError:
    return InputError(
        f"{file} is a pickle checkpoint, which can run any code when it is opened. "
        "Convert it to safetensors: load it where you trust it, then model.save_pretrained(FOLDER)."
    )


def read_config(folder: Path) -> dict[str, Any]:
    """The entries of the folder's config.json."""
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(
            f"There is no config.json in {folder.resolve().name}. Name the folder that save_pretrained wrote, or a "
            ".gguf file."
        )
    config = _read_json(path)
    if not isinstance(config.get("model_type"), str) and "auto_map" not in config:
        raise InputError(
            f"The config.json in {folder.resolve().name} has no model_type. Fetch the checkpoint again, or write its "
            "model_type into config.json."
        )
    check_counts(config)
    if not isinstance(config.get("auto_map") or {}, dict):
        raise InputError(
            f"The auto_map in config.json must name classes, and is {reprlib.repr(config['auto_map'])}. Fetch the "
            "checkpoint again, or mend config.json."
        )
    return config


def check_counts(described: dict[str, Any]) -> None:
    """Refuses a configuration of more parts than any model has: they are built one by one, which takes for ever."""
    sections = [described]
    for section in sections:  # not by recursion, which depth would break
        sections += [value for value in section.values() if isinstance(value, dict)]
        for name, value in section.items():
            if PART_COUNTS.match(str(name)) and isinstance(value, int) and value > MOST_PARTS:
                raise InputError(
                    f"The configuration gives {name} {shortened(str(value))}, but no model has more than {MOST_PARTS} "
                    "layers, heads, experts or labels. Fetch the checkpoint again, or mend its configuration."
                )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:  # invalid UTF-8 is a ValueError too
        content = str(error)
    if not isinstance(content, dict):
        wrong = f"is corrupt ({content})" if isinstance(content, str) else "does not hold a JSON object"
        raise InputError(f"{path.name} {wrong}. Fetch the checkpoint again.")
    return content


def check_no_adapter(folder: Path, source: str) -> None:
    """Refuses the folder of a PEFT adapter, which `source` names, with the lines that load it upon its base."""
    if not (folder / ADAPTER).is_file():
        return
    base = _read_json(folder / ADAPTER).get("base_model_name_or_path")
    base = shortened(base) if isinstance(base, str) and base else "ITS BASE"
    raise InputError(
        f"{source} is an adapter of {base}, not a model by itself. Load both, and pass the model: "
        f"base = AutoModelForCausalLM.from_pretrained({base!r}); "
        f"model = PeftModel.from_pretrained(base, {source!r})."
    )


def check_weight_names(names: Iterable[str], checkpoint: str) -> None:
    """Refuses a list of files that has no safetensors weights."""
    names = set(names)
    if names & {WEIGHTS, WEIGHTS_INDEX}:
        return
    if pickles := sorted(name for name in names if name.endswith(PICKLE_SUFFIXES)):
        raise _pickle(f"{pickles[0]} in {checkpoint}")
    held = f"holds only {', '.join(sorted(names)[:5])}" if names else "is empty"
    raise InputError(
        f"There is no {WEIGHTS} or {WEIGHTS_INDEX} in {checkpoint}, which {held}. Name a folder with safetensors "
        "weights, or a .gguf file."
    )


def check_safetensors(folder: Path) -> dict[str, str]:
    """The dtype of every tensor on disk; refuses a missing shard, or a file whose header and length do not agree."""
    from safetensors import SafetensorError, safe_open

    # The single file goes first, as it does in transformers.
    shards = [WEIGHTS]
    if not (folder / WEIGHTS).is_file():
        weight_map = _read_json(folder / WEIGHTS_INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise InputError(f"{WEIGHTS_INDEX} has no weight_map, which names the shards. Fetch the checkpoint again.")
        shards = sorted({str(shard) for shard in weight_map.values()})
        if odd := next((shard for shard in shards if Path(shard).name != shard or len(shard) > 255), None):
            raise InputError(
                f"{WEIGHTS_INDEX} must name files, and names {shortened(odd)}. Fetch the checkpoint again."
            )
    dtypes = {}
    for shard in shards:
        if not (folder / shard).is_file():
            raise InputError(f"{shard}, which {WEIGHTS_INDEX} names, is missing. Fetch it.")
        try:
            # Reads the header only; it also fails when the tensors do not cover the file to its last byte.
            with safe_open(folder / shard, framework="pt") as tensors:
                dtypes |= {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise InputError(f"{shard} is corrupt or truncated ({first_line(error)}). Fetch the file again.") from error
    return dtypes


def check_code(described: dict[str, Any], name: str, *, trusted: bool) -> None:
    """Refuses a config.json whose model needs code that is neither in transformers nor trusted."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = described.get("model_type")
    auto_map = described.get("auto_map") or {}
    if not trusted and "AutoModelForCausalLM" in auto_map and model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise InputError(
            f"{name} brings its own code (auto_map in config.json), which is not part of transformers. Read that code, "
            "then give `trust_remote_code=True` to run it."
        )
    if model_type not in CONFIG_MAPPING and not (trusted and auto_map):
        raise InputError(
            f"This version of transformers does not know the model type {model_type!r} of {name}. Check model_type in "
            "config.json, or upgrade transformers."
        )


def check_causal(config: Any, name: str) -> None:
    """Refuses encoders, encoder-decoders, decoders that look ahead and windows without a token: attention that is not
    causal, or that is not defined."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    model_type, kind = getattr(config, "model_type", None), None
    if getattr(config, "is_encoder_decoder", False):
        kind = "an encoder-decoder"
    # transformers would build a "causal LM" from these too, with attention in both directions.
    elif model_type in (*MODEL_FOR_MASKED_LM_MAPPING_NAMES, "bert-generation"):
        kind = None if getattr(config, "is_decoder", False) else "an encoder"
    elif getattr(text_config, "use_bidirectional_attention", None) in (True, "all"):
        kind = "a decoder with attention in both directions"
    # Code that comes with a checkpoint, or with a user's own model, is not in the mapping: its type is its own.
    elif model_type in CONFIG_MAPPING and not any(
        type(config) in mapping for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    ):
        kind = (
            None
            if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
            else "a model without a causal head"
        )
    if kind is not None:
        raise InputError(
            f"{name} is {kind} ({model_type}), not a causal language model. Name a decoder-only model; "
            "`sinkscope models` lists the families."
        )
    windowed = "sliding_attention" in (getattr(text_config, "layer_types", None) or ["sliding_attention"])
    window = getattr(text_config, "sliding_window", None)
    if windowed and window is not None and not (isinstance(window, int) and window >= 1):
        raise InputError(
            f"The sliding_window in config.json must be at least 1 token, not {reprlib.repr(window)}. Write the window "
            "that the model was trained with, or null for none."
        )


def check_loading_info(info: dict[str, Any], name: str) -> None:
    """Refuses a load after which some weights are not the checkpoint's; tied weights are not among the missing."""
    for key, what in (("missing_keys", "no weights"), ("mismatched_keys", "weights of another shape")):
        if bad := sorted(str(entry) for entry in info.get(key) or ()):
            raise InputError(
                f"{name} has {what} for {len(bad)} of the parameters that config.json describes, first {bad[0]}. Fetch "
                "the checkpoint again; random weights are not put in place of missing ones."
            )
    check_scales(info.get("unexpected_keys") or (), name)


def check_weights(model: nn.Module) -> None:
    """Refuses packed weights and any that are NaN or infinite, by the name of the first one."""
    for name, weight in each_weight(model):
        if not weight.is_floating_point() or weight.element_size() < 2:
            raise InputError(
                f"{name} is quantised, in {str(weight.dtype).removeprefix('torch.')} and not in float32, bfloat16, "
                "float16 or float64. Call model.dequantize() before you pass the model, or load it in full precision."
            )
        lowest, highest = _range(weight)
        if not (torch.isfinite(lowest) and torch.isfinite(highest)):
            raise _not_finite(name, lowest)
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and not buffer.is_meta:
            lowest, highest = _range(buffer)
            # A mask kept as a buffer holds -inf on purpose.
            if torch.isnan(lowest) or torch.isposinf(highest):
                raise _not_finite(name, lowest)


def _range(tensor: Tensor) -> tuple[Tensor, Tensor]:
    # The two extremes of a chunk are NaN if any element is, and need no memory, where isfinite needs a mask.
    extremes = [torch.stack(torch.aminmax(chunk)) for chunk in tensor.reshape(-1).split(CHUNK) if chunk.numel()]
    if not extremes:
        return tensor.new_zeros(()), tensor.new_zeros(())
    lowest, highest = torch.stack(extremes).double().cpu().unbind(1)
    return lowest.amin(), highest.amax()


def _not_finite(name: str, lowest: Tensor) -> InputError:
    return InputError(
        f"There is {'NaN' if torch.isnan(lowest) else 'an infinity'} in {name}. Fetch the checkpoint again, or give "
        "`dtype='float32'` if a narrower one overflowed."
    )


def first_line(error: BaseException) -> str:
    """What an error of another library says, short enough for one of our messages; two lines where the first only
    announces."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def causal_config(folder: Path, name: str, trust_remote_code: bool) -> PretrainedConfig:
    """The configuration in a folder; refused where it describes no causal language model."""
    from transformers import AutoConfig

    described = read_config(folder)
    problem = "Transformers cannot read config.json", "Fetch the checkpoint again, or mend config.json."
    if described.get("model_type") == HEAD_NORM:
        # The model without norms; `load_head_norm` puts them in. The code beside the weights is not run.
        config = ask(*problem, lambda: AutoConfig.for_model(described["base"], **described["model"]))
        ask(*problem, lambda: setattr(config, HEAD_NORM, described["head_norm"]["options"]))
        check_causal(config, name)
        return config
    check_code(described, name, trusted=trust_remote_code)
    config = ask(
        *problem,
        AutoConfig.from_pretrained,
        folder,
        local_files_only=True,
        trust_remote_code=trust_remote_code,
    )
    check_causal(config, name)
    return config


def ask(problem: str, advice: str, call: Any, *args: Any, **kwargs: Any) -> Any:
    """What `call` returns; whatever it raises becomes an InputError, because it reads files we do not control.

    It says `problem`, with the reason of the library in brackets, and the sentence `advice`.
    """
    try:
        return call(*args, **kwargs)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{problem} ({type(error).__name__}: {first_line(error)}). {advice}") from error
