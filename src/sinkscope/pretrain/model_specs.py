"""What a name given by a user stands for: a model with weights, or a configuration to draw models from.

| name | weights | configuration, whose weights are drawn from seeds |
| --- | --- | --- |
| a model folder, a .gguf file, a Hugging Face name | its own | no |
| init:RUN | those that the training run in the folder RUN began with, drawn again from its seed | no |
| RUN, or reference:softmax and its like | those that the training run ended with | the run's |
| RUN/checkpoints/step-00001000 | those of that checkpoint of the run | no |
| a config.json, or a folder with one and no weights | none | yes |
| a preset of pretrain: tiny, 30m, 152m or 1b | none | yes |
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from sinkscope.arguments import memory_bytes
from sinkscope.errors import InputError
from sinkscope.models.checkpoint_checks import WEIGHTS, WEIGHTS_INDEX, ask, causal_config, check_counts
from sinkscope.models.loading import TOKENIZER_FILES, LoadedModel, load, quiet
from sinkscope.names import DEFAULT_MODEL, run_path
from sinkscope.pretrain.checkpoints import FOLDER, RECORD, TENSORS, damage, expected_layouts
from sinkscope.pretrain.presets import PRESETS, decoder_config, preset
from sinkscope.pretrain.runs import initial_configuration
from sinkscope.results.run_folder import is_training_run
from sinkscope.results.validated import shortened
from sinkscope.runtime import resolve_device, resolve_dtype
from sinkscope.user_paths import user_path

if TYPE_CHECKING:
    from transformers import PretrainedConfig

INITIAL = "init:"


@dataclass(frozen=True, kw_only=True, eq=False)
class Configuration:
    """The shape of a model, without weights."""

    name: str
    config: PretrainedConfig
    tokenizer: Path | None = None
    """The folder of the tokenizer, if there is one."""
    run: Path | None = None
    """The training run that it comes from."""
    seed: int | None = None
    """The seed of that run's first weights."""
    trust_remote_code: bool = False
    """Whether code that came with the configuration may run."""


def resolve(source: str | Path, *, dtype: str, device: str, device_map: Any, tokenizer: Any) -> LoadedModel | None:
    """The weights that init:RUN or a checkpoint of a run stands for; None for names that `load` itself knows."""
    checkpoint = user_path(source)
    if str(source) in PRESETS and not checkpoint.exists():
        raise InputError(
            expected="a model with weights",
            found=f"{source}, a preset of pretrain, which has none",
            next_step="Train one of this shape with sinkscope pretrain, or see what it prefers with sinkscope bias",
        )
    is_initial = str(source).startswith(INITIAL)
    if not is_initial and not (checkpoint / RECORD).is_file():
        return None
    if device_map is not None:
        raise InputError(
            expected="`device_map` only with a model that is loaded as it was saved",
            found=f"{source}, which is built here",
            next_step="Leave `device_map` out",
        )
    if is_initial:
        found = _run_configuration(run_path(str(source).removeprefix(INITIAL)))
        assert found.seed is not None
        model = _drawn(found, found.seed)
        name = f"{INITIAL}{found.name}"
    else:
        found, model = _checkpoint(checkpoint)
        name = f"{found.name}, {checkpoint.resolve().name}"
    return _placed(model, name, tokenizer or found.tokenizer, dtype=dtype, device=device)


def _checkpoint(folder: Path) -> tuple[Configuration, Any]:
    """(configuration of the run, model with a checkpoint's weights)."""
    run = folder.resolve().parent.parent
    if not is_training_run(run):
        raise InputError(
            expected="a checkpoint inside its training run's folder, whose config.yaml describes the model",
            found=f"{folder} without its run",
            next_step="Name it where sinkscope pretrain wrote it, or copy the whole folder of the run and name "
            f"COPY/{FOLDER}/{folder.resolve().name}",
        )
    found = _run_configuration(run)
    model = _drawn(found, 0)
    if (reason := damage(folder, expected_layouts(dict(model.named_parameters()), []))) is not None:
        raise InputError(
            expected=f"a whole checkpoint in {folder}", found=reason, next_step="Give another checkpoint of the run"
        )
    tensors = load_file(folder / TENSORS)
    weights = {name: tensors[f"model.{name}"] for name, _ in model.named_parameters()}
    model.load_state_dict(weights, strict=False)  # tied weights have one name there
    return found, model


def find_configuration(source: Any = None, *, trust_remote_code: bool = False) -> Configuration | None:
    """The configuration that a name of the table above stands for; None where it stands for weights."""
    if isinstance(source, Configuration):
        return source
    if source is not None and hasattr(source, "to_diff_dict"):
        return Configuration(name=str(source.name_or_path or source.model_type), config=source)
    if source is None:
        source = DEFAULT_MODEL
    if not isinstance(source, str | Path) or str(source).startswith(INITIAL):
        return None
    path = run_path(source)
    if is_training_run(path):
        return _run_configuration(path)
    if path.name == "config.json" and path.is_file():
        path = path.parent
    elif not path.exists() and str(source) in PRESETS:
        return Configuration(name=str(source), config=decoder_config(preset(str(source))))
    elif not (path / "config.json").is_file() or any((path / name).is_file() for name in (WEIGHTS, WEIGHTS_INDEX)):
        return None
    name = path.resolve().name
    config = causal_config(path, name, trust_remote_code)
    return Configuration(name=name, config=config, tokenizer=_with_tokenizer(path), trust_remote_code=trust_remote_code)


def draw(
    configuration: Configuration, seed: int, *, name: str | None = None, dtype: str = "auto", device: str = "auto"
) -> LoadedModel:
    """A model of the configuration with weights drawn from a seed, by the family's own rule of initialisation.

    They are drawn on the CPU in float32, so a seed gives the same weights on every device. dtype "auto" is float32. The
    global random state is left as it was.
    """
    # Of a seed torch's generator keeps 32 bits on a CPU: 2^32 would draw the model of seed 0. Our decoder hashes it.
    bits = 63 if configuration.config.model_type == "sinkscope_decoder" else 32
    if not 0 <= seed < 1 << bits:
        raise InputError(expected=f"a seed from 0 to 2^{bits} - 1", found=str(seed), next_step="Choose another seed")
    model = _drawn(configuration, seed)
    return _placed(
        model, name or f"{configuration.name}, seed {seed}", configuration.tokenizer, dtype=dtype, device=device
    )


def _placed(model: Any, name: str, tokenizer: Any, *, dtype: str, device: str) -> LoadedModel:
    wanted = resolve_dtype(dtype)
    model = model.to(resolve_device(device), None if wanted == "auto" else wanted)
    model.config.name_or_path = name
    return load(model, tokenizer=tokenizer)


def _check_size(configuration: Configuration) -> None:
    """Refuses a shape whose weights the machine cannot hold, before any of them is drawn."""
    check_counts(configuration.config.to_dict())
    with torch.device("meta"), torch.random.fork_rng(devices=[]), quiet():
        size = 4 * sum(each.numel() for each in _built(configuration).parameters())
    if size > (memory := memory_bytes()):
        raise InputError(
            expected=f"a model of the shape of {shortened(configuration.name)} that this machine can hold",
            found=f"{size / 1e9:,.0f} GB of weights, and {memory / 1e9:,.0f} GB of memory",
            next_step="Take a smaller configuration or, for a fingerprint, `fresh=0` and `unrelated` models",
        )


def _drawn(configuration: Configuration, seed: int) -> Any:
    _check_size(configuration)
    with torch.random.fork_rng(devices=[]), quiet(), torch.device("cpu"):
        # The CPU generator alone: torch.manual_seed would also reseed GPUs, whose state the fork does not cover.
        torch.default_generator.manual_seed(seed)
        return _built(configuration, seed).eval()


def _built(configuration: Configuration, seed: int = 0) -> Any:
    """A model of the configuration, in full precision, on the device of the context."""
    from transformers import AutoModelForCausalLM

    config: Any = copy.deepcopy(configuration.config)
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")
    if config.model_type == "sinkscope_decoder":
        config.seed = seed  # its parameters are drawn by generators of their own
    trusted = configuration.trust_remote_code
    return ask(
        "a configuration that transformers can build",
        "Fetch it again, or mend it",
        AutoModelForCausalLM.from_config,
        config,
        dtype=torch.float32,
        trust_remote_code=trusted,
    )


def _run_configuration(run: Path) -> Configuration:
    config, tokenizer = initial_configuration(run)
    name = run.resolve().name
    return Configuration(name=name, config=config, tokenizer=_with_tokenizer(tokenizer), run=run, seed=config.seed)


def _with_tokenizer(folder: Path) -> Path | None:
    return folder if any((folder / file).is_file() for file in TOKENIZER_FILES) else None
