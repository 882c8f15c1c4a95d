"""Loads a causal language model and its tokenizer from a name, a folder, a .gguf file or an object."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import nn

from sinkscope.errors import InputError
from sinkscope.models.anatomy import anatomy_of
from sinkscope.models.checkpoint_checks import (
    ADAPTER,
    ask,
    causal_config,
    check_causal,
    check_loading_info,
    check_no_adapter,
    check_safetensors,
    check_weight_names,
    check_weights,
    first_line,
    looks_like_hub_name,
    refuse_path,
)
from sinkscope.models.gguf_files import gguf_tokenizer, load_gguf, read_gguf_header
from sinkscope.models.insert_head_norm import load_head_norm
from sinkscope.models.loaded import LoadedModel, ModelLike, bare_model
from sinkscope.models.quantised import INSTALL, dense, dequantising
from sinkscope.models.tokenizer_loading import load_tokenizer
from sinkscope.names import DEFAULT_MODEL, RESOLVERS, is_reference, reference_run
from sinkscope.results.run_folder import is_training_run
from sinkscope.runtime import check_placement, check_torch_defaults, resolve_device, resolve_dtype
from sinkscope.user_paths import user_path

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


class LoadOptions(TypedDict, total=False):
    """The options of `load`, for functions that hand them on."""

    # The parameters of `load` a second time: no type checker makes a TypedDict from a signature. A test compares them.
    revision: str | None
    dtype: str
    device: str
    device_map: str | dict[str, Any] | None
    trust_remote_code: bool
    tokenizer: str | Path | PreTrainedTokenizerBase | None


def load(
    source: ModelLike | None = None,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    device_map: str | dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
) -> LoadedModel:
    """The model that `source` names, in eval mode on its device, with every weight checked. A model object keeps its
    mode; whatever reads it does so in eval mode.

        model = sinkscope.load("HuggingFaceTB/SmolLM2-135M", dtype="bfloat16")

    `source` is a folder, a .gguf file, a Hugging Face name, a model object (taken as it is), reference:softmax (the
    default), reference:head_norm or reference:learned_sink, which come with the package, or a training run: RUN for
    its final weights, init:RUN for its first ones, RUN/checkpoints/step-00001000 for a checkpoint.

    dtype "auto" is the checkpoint's own dtype on CUDA and float32 on the CPU, where bfloat16 is slow and less exact;
    a GGUF file has no such dtype and is dequantised to bfloat16 on CUDA, float32 on the CPU. `device_map` is handed to
    transformers, for models larger than one device, in place of `device`. Code that comes with a checkpoint runs only
    with `trust_remote_code`. `tokenizer` is one at hand, or the folder of one, in place of the model's own. The global
    random state is left as it was.
    """
    check_torch_defaults()
    if isinstance(source, LoadedModel):
        return source if tokenizer is None else replace(source, tokenizer=load_tokenizer(tokenizer))
    source = bare_model(source)
    if source is None:
        source = DEFAULT_MODEL
    check_placement(dtype, device, device_map)
    if revision is not None and not (isinstance(source, str) and looks_like_hub_name(source)):
        raise InputError("`revision` needs a Hugging Face name; this model is not on the Hub. Leave `revision` out.")
    if isinstance(source, nn.Module):
        if (dtype, device, device_map) != ("auto", "auto", None):
            raise InputError(
                "A model object is taken as it is, without `dtype`, `device` and `device_map`. Leave them out, and "
                "move the model with model.to(...) before you pass it."
            )
        if hasattr(source, "config"):
            check_causal(source.config, _name_of(source))
        else:
            anatomy_of(source)  # refuses a model that says nothing of itself
        return _finish(source, tokenizer, name=_name_of(source), source="given", trust_remote_code=trust_remote_code)
    if not isinstance(source, str | Path):
        raise InputError(f"A {type(source).__name__} is no model. Give load() a model name, a path, a model or None.")

    for module in RESOLVERS:
        placement = {"dtype": dtype, "device": device, "device_map": device_map}
        resolved = import_module(module).resolve(source, tokenizer=tokenizer, **placement)
        if resolved is not None:
            return resolved
    target_device, target_dtype = resolve_device(device), resolve_dtype(dtype)
    on_cuda = target_device.type == "cuda" and device_map != "cpu"
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if device_map is not None:
        options["device_map"] = device_map
    commit = None
    path = user_path(source)
    if is_reference(source):
        name, kind = str(source), "reference"
        path = reference_run(name) / "model"
    elif path.suffix.lower() == ".gguf" and path.is_file():
        name, kind = path.name, "gguf"
    elif path.is_dir():
        kind = "folder"
        path, name = _model_folder(path)
    else:
        name, kind = str(source), "hub"
        path = download(name, path, revision, trust_remote_code)
        commit = path.name  # the cache names a snapshot's folder by its commit
    # Building a model draws random numbers, even where all of them are overwritten.
    with torch.random.fork_rng(devices=[]), quiet():
        if kind == "gguf":
            header = read_gguf_header(path)
            if target_dtype == "auto":
                target_dtype = torch.bfloat16 if on_cuda else torch.float32
            model = load_gguf(header, dtype=target_dtype, **options)
            if tokenizer is None and "tokenizer.ggml.model" in header.metadata:
                tokenizer = gguf_tokenizer(path)
        else:
            if target_dtype == "auto" and not on_cuda:
                target_dtype = torch.float32
            model = _load_folder(path, name, dtype=target_dtype, **options)
            if tokenizer is None and any((path / file).is_file() for file in TOKENIZER_FILES):
                tokenizer = path
        if device_map is None:
            model = ask(
                "The model cannot be moved to its device",
                "Give a smaller `dtype`, or `device_map='auto'`.",
                model.to,
                target_device,
            )
        return _finish(model, tokenizer, name=name, source=kind, revision=commit, trust_remote_code=trust_remote_code)


def _model_folder(folder: Path) -> tuple[Path, str]:
    """(where the model is, its name) of a folder; a training run stands for the model that it ended with.

    A model in a run is named after the run: the folders themselves are called alike in all runs.
    """
    folder = folder.resolve()
    if is_training_run(folder):
        if not (folder / "model").is_dir():
            raise InputError(
                f"The training run in {folder} has no model yet. Finish it with sinkscope pretrain, or take its first "
                f"weights with init:{folder}."
            )
        return folder / "model", folder.name
    if folder.name == "model" and is_training_run(folder.parent):
        return folder, folder.parent.name
    if folder.parent.name == "snapshots" and is_training_run(run := folder.parent.parent):
        return folder, f"{run.name}, {folder.name}"
    if (folder / "summary.json").is_file() and not (folder / "config.json").is_file():
        raise InputError(
            f"{folder} is a saved result, not a model. Read it with sinkscope.load_result({str(folder)!r})."
        )
    return folder, folder.name


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences transformers' load report and bars; what matters in them is refused by the checks."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    hub_bars = not are_progress_bars_disabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
        (enable_progress_bars if hub_bars else disable_progress_bars)()


def _load_folder(folder: Path, name: str, *, dtype: torch.dtype | str, **options: Any) -> PreTrainedModel:
    """The model in a folder, dense if it was quantised, with its head-wise RMSNorm if it has one."""
    check_no_adapter(folder, str(folder))
    config = causal_config(folder, name, options["trust_remote_code"])
    check_weight_names((entry.name for entry in folder.iterdir()), name)
    quantised = getattr(config, "quantization_config", None) is not None
    options |= dequantising(config, check_safetensors(folder), name)
    model, info = ask(
        "Transformers cannot load the weights that config.json describes",
        INSTALL
        if quantised
        else "Fetch the checkpoint again; for lack of memory, give a smaller `dtype` or `device_map='auto'`.",
        class_of(config).from_pretrained,
        folder,
        config=config,
        dtype=dtype,
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
        **options,
    )
    check_loading_info(info, name)
    if quantised:
        model = dense(model, name, dtype)
    load_head_norm(model, folder)
    return model


def class_of(config: Any) -> Any:
    """The class of transformers that loads a checkpoint: for one of a model that reads images too, which has no other
    causal head or was saved as such, the class that does."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )

    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForCausalLM
    saved_as: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and saved_as.__name__ not in (config.architectures or ()):
        return AutoModelForCausalLM
    return AutoModelForImageTextToText


def _finish(model: Any, tokenizer: Any, *, trust_remote_code: bool, **origin: Any) -> LoadedModel:
    """The model, its weights checked, with its tokenizer and where it came from."""
    check_weights(model)
    if next(model.parameters()).dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch has no grouped matrix product in float64
    return LoadedModel(
        model=model,
        tokenizer=load_tokenizer(tokenizer, trust_remote_code=trust_remote_code),
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        trust_remote_code=trust_remote_code,
        **origin,
    )


def _name_of(model: nn.Module) -> str:
    """What a model object is called: its name on the Hub, the last part of its path, or its class."""
    name = str(getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__)
    return name if looks_like_hub_name(name) else Path(name).name


HUB_TIMEOUT_S = 5.0
SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
WEIGHT_FILES = ["model.safetensors", "model-*-of-*.safetensors"]


def download(name: str, path: Path, revision: str | None, trust_remote_code: bool) -> Path:
    """The folder of the Hub's snapshot of `name`, fetched or cached."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if not looks_like_hub_name(name):
        refuse_path(path)
    small = SMALL_FILES + ["*.py"] * trust_remote_code
    try:
        # Asked once and with a timeout: the downloads themselves retry for half a minute without a network.
        listing = HfApi().model_info(name, revision=revision, timeout=HUB_TIMEOUT_S)
    except GatedRepoError as error:
        raise InputError(
            f"{name} is gated on the Hub. Accept its terms on its page, then log in with `hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise InputError(
            f"There is no {name!r} here, nor on the Hub. Check the spelling of the folder, .gguf file or Hugging Face "
            "name; for a private model, log in with `hf auth login`."
        ) from error
    except RevisionNotFoundError as error:
        raise InputError(f"{name} has no revision {revision!r}. Give a branch, tag or commit as `revision`.") from error
    except Exception as error:  # The HTTP library changes with the version of the Hub client; its errors share no base.
        try:
            return Path(snapshot_download(name, revision=revision, local_files_only=True))
        except Exception:
            raise InputError(
                f"There is no {name!r} here or in the download cache, and the Hub cannot be reached "
                f"({first_line(error)}). Check the spelling of the folder, .gguf file or Hugging Face name, or the "
                "network connection."
            ) from error
    names = {file.rfilename for file in listing.siblings or ()}
    failure = f"The download of {name} failed", "Run the command again to resume it."
    snapshot = {"repo_id": name, "revision": listing.sha, "ignore_patterns": ["*/*"]}
    if ADAPTER in names:
        check_no_adapter(Path(ask(*failure, snapshot_download, **snapshot, allow_patterns=[ADAPTER])), name)
    check_weight_names(names, name)
    folder = Path(ask(*failure, snapshot_download, **snapshot, allow_patterns=small))
    causal_config(folder, name, trust_remote_code)  # refused before gigabytes of weights come, not after
    return Path(ask(*failure, snapshot_download, **snapshot, allow_patterns=small + WEIGHT_FILES))
