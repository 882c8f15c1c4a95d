"""Models as people name them: what `load` knows, the checkpoints of a training run, and a run's first weights.

| name | weights | configuration, whose weights are drawn from seeds |
| --- | --- | --- |
| a model folder, a .gguf file, a Hugging Face name | its own | no |
| init:RUN | those that the training run in the folder RUN began with, drawn again from its seed | no |
| RUN, or reference:softmax or reference:learned_sink | those that the training run ended with | the run's |
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
from sinkscope.models.checkpoint_checks import WEIGHTS, WEIGHTS_INDEX, causal_config
from sinkscope.models.loading import TOKENIZER_FILES, LoadedModel, load, quiet
from sinkscope.models.reference import DEFAULT_MODEL, is_reference, reference_run
from sinkscope.pretrain.checkpoints import FOLDER, RECORD, TENSORS, damage, expected_layouts
from sinkscope.pretrain.presets import PRESETS, decoder_config, preset
from sinkscope.pretrain.run_setup import initial_configuration
from sinkscope.results.run_folder import is_training_run
from sinkscope.results.validated import shortened
from sinkscope.runtime import resolve_device, resolve_dtype
from sinkscope.user_paths import user_path

if TYPE_CHECKING:
    from transformers import PretrainedConfig

INITIAL = "init:"
MOST_PARTS = 4096
"""Layers, heads or experts of a model that is drawn."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Configuration:
    """The shape of a model, without weights."""

    name: str
    config: PretrainedConfig
    tokenizer: Path | None = None
    """A folder that holds one."""
    run: Path | None = None
    """The training run that it comes from."""
    seed: int | None = None
    """The seed of that run's first weights."""


def load_model(source: Any = None, *, dtype: str = "auto", device: str = "auto", **options: Any) -> LoadedModel:
    """The weights that a name of the table above stands for; anything else is left to `load`, with its options."""
    if isinstance(source, str) and source.startswith(INITIAL):
        _refuse_options(source, options)
        found = _run_configuration(_run(source.removeprefix(INITIAL)))
        assert found.seed is not None
        return draw(found, found.seed, name=f"{INITIAL}{found.name}", dtype=dtype, device=device)
    if isinstance(source, str | Path) and (path := user_path(source) / RECORD).is_file():
        _refuse_options(source, options)
        return _checkpoint(path.parent, dtype=dtype, device=device)
    if isinstance(source, str) and source in PRESETS and not user_path(source).exists():
        raise InputError(
            expected="a model with weights",
            found=f"{source}, a preset of pretrain, which has none",
            next_step=f"Train it with sinkscope pretrain --config {source}, or see what it prefers with sinkscope bias",
        )
    return load(source, dtype=dtype, device=device, **options)


def _refuse_options(source: str | Path, options: dict[str, Any]) -> None:
    for name, flag in (("revision", "--revision"), ("device_map", "--device-map")):
        if options.get(name) is not None:
            raise InputError(
                expected=f"{flag} beside a model that is read as it was saved",
                found=f"{source}, which is built here",
                next_step=f"Leave {flag} out",
            )


def _checkpoint(folder: Path, *, dtype: str, device: str) -> LoadedModel:
    """A checkpoint's weights in a model of its run's configuration."""
    run = folder.resolve().parent.parent
    if not is_training_run(run):
        raise InputError(
            expected="a checkpoint inside its training run's folder, whose config.yaml describes the model",
            found=f"{folder} without its run",
            next_step="Name it where sinkscope pretrain wrote it, or copy the whole folder of the run and name "
            f"COPY/{FOLDER}/{folder.resolve().name}",
        )
    if not (folder / TENSORS).is_file():
        raise InputError(
            expected=f"a checkpoint of one process in {folder}",
            found="one in shards",
            next_step="Take a snapshot of the run, or the run itself when it is finished",
        )
    found = _run_configuration(run)
    with torch.random.fork_rng(devices=[]), quiet():
        model = _drawn(found.config, 0)
    if (reason := damage(folder, expected_layouts(dict(model.named_parameters()), []))) is not None:
        raise InputError(
            expected=f"a whole checkpoint in {folder}", found=reason, next_step="Give another checkpoint of the run"
        )
    tensors = load_file(folder / TENSORS)
    weights = {name: tensors[f"model.{name}"] for name, _ in model.named_parameters()}
    model.load_state_dict(weights, strict=False)  # tied weights have one name there
    wanted = resolve_dtype(dtype)
    model = model.to(resolve_device(device), None if wanted == "auto" else wanted)
    model.config.name_or_path = f"{found.name}, {folder.name}"
    return load(model, tokenizer=found.tokenizer)


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
    path = _run(source)
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
    return Configuration(name=name, config=config, tokenizer=_with_tokenizer(path))


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
    target, wanted = resolve_device(device), resolve_dtype(dtype)
    _check_size(configuration)
    with torch.random.fork_rng(devices=[]), quiet():
        model = _drawn(configuration.config, seed).to(target, None if wanted == "auto" else wanted)
        model.config.name_or_path = name or f"{configuration.name}, seed {seed}"
        return load(model, tokenizer=configuration.tokenizer)


def _check_size(configuration: Configuration) -> None:
    """Refuses a shape whose weights the machine cannot hold, before any of them is drawn."""
    counts = {
        name: value
        for name, value in configuration.config.to_dict().items()
        if type(value) is int and name.startswith(("num_", "n_layer", "n_head"))
    }
    found = next((f"{name} {value:,}" for name, value in counts.items() if value > MOST_PARTS), None)
    if found is None:
        with torch.device("meta"), torch.random.fork_rng(devices=[]), quiet():
            size = 4 * sum(each.numel() for each in _built(configuration.config).parameters())
        memory = memory_bytes()
        found = f"{size / 1e9:,.0f} GB of weights, and {memory / 1e9:,.0f} GB of memory" if size > memory else None
    if found is not None:
        raise InputError(
            expected=f"a model of the shape of {shortened(configuration.name)} that this machine can hold",
            found=found,
            next_step="Take a smaller configuration or, for a fingerprint, `fresh=0` and `unrelated` models",
        )


def _drawn(config: Any, seed: int) -> Any:
    config = copy.deepcopy(config)
    if config.model_type == "sinkscope_decoder":
        config.seed = seed  # its parameters are drawn by generators of their own
    # The CPU generator alone: torch.manual_seed would also reseed GPUs, whose state the caller's fork does not cover.
    torch.default_generator.manual_seed(seed)
    with torch.device("cpu"):
        return _built(config).eval()


def _built(config: Any) -> Any:
    """A model of the configuration, in full precision, on the device of the context."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _run(source: str | Path) -> Path:
    """The folder that a name stands for, where it stands for one."""
    return reference_run(str(source)) if is_reference(source) else user_path(source)


def _run_configuration(run: Path) -> Configuration:
    config, tokenizer = initial_configuration(run)
    name = run.resolve().name
    return Configuration(name=name, config=config, tokenizer=_with_tokenizer(tokenizer), run=run, seed=config.seed)


def _with_tokenizer(folder: Path) -> Path | None:
    return folder if any((folder / file).is_file() for file in TOKENIZER_FILES) else None
