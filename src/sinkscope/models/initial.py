"""Models with weights that nobody has trained: drawn from a configuration and a seed."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sinkscope.arguments import memory_bytes
from sinkscope.errors import InputError
from sinkscope.models.checkpoint_checks import WEIGHTS, WEIGHTS_INDEX, ask, causal_config, check_counts
from sinkscope.models.loaded import LoadedModel
from sinkscope.models.loading import TOKENIZER_FILES, class_of, load, quiet
from sinkscope.names import DEFAULT_MODEL, RESOLVERS, run_path
from sinkscope.results.validated import shortened
from sinkscope.runtime import resolve_device, resolve_dtype

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


def find_configuration(source: Any = None, *, trust_remote_code: bool = False) -> Configuration | None:
    """The configuration that a name stands for: a config.json, a folder with one and no weights, or what RESOLVERS
    know; None where it stands for weights."""
    if isinstance(source, Configuration):
        return source
    if source is not None and hasattr(source, "to_diff_dict"):
        return Configuration(name=str(source.name_or_path or source.model_type), config=source)
    if source is None:
        source = DEFAULT_MODEL
    if not isinstance(source, str | Path) or str(source).startswith(INITIAL):
        return None
    for module in RESOLVERS:
        if (found := import_module(module).configuration(source)) is not None:
            return found
    path = run_path(source)
    if path.name == "config.json" and path.is_file():
        path = path.parent
    elif not (path / "config.json").is_file() or any((path / name).is_file() for name in (WEIGHTS, WEIGHTS_INDEX)):
        return None
    name = path.resolve().name
    config = causal_config(path, name, trust_remote_code)
    return Configuration(name=name, config=config, tokenizer=with_tokenizer(path), trust_remote_code=trust_remote_code)


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
        raise InputError(f"`seed` must be from 0 to 2^{bits} - 1, not {seed}.")
    model = drawn(configuration, seed)
    return placed(
        model, name or f"{configuration.name}, seed {seed}", configuration.tokenizer, dtype=dtype, device=device
    )


def placed(model: Any, name: str, tokenizer: Any, *, dtype: str, device: str) -> LoadedModel:
    """A model that was built here, on its device and in its type, as `load` gives one."""
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
            f"The weights of {shortened(configuration.name)} need {size / 1e9:,.0f} GB, and this machine has "
            f"{memory / 1e9:,.0f} GB of memory. Take a smaller configuration or, for a fingerprint, `fresh=0` and "
            "`unrelated` models."
        )


def drawn(configuration: Configuration, seed: int) -> Any:
    """The module itself, on the CPU and in float32."""
    _check_size(configuration)
    with torch.random.fork_rng(devices=[]), quiet(), torch.device("cpu"):
        # The CPU generator alone: torch.manual_seed would also reseed GPUs, whose state the fork does not cover.
        torch.default_generator.manual_seed(seed)
        return _built(configuration, seed).eval()


def _built(configuration: Configuration, seed: int = 0) -> Any:
    """A model of the configuration, in full precision, on the device of the context."""
    config: Any = copy.deepcopy(configuration.config)
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")
    if config.model_type == "sinkscope_decoder":
        config.seed = seed  # its parameters are drawn by generators of their own
    trusted = configuration.trust_remote_code
    return ask(
        "Transformers cannot build a model of this configuration",
        "Fetch it again, or mend it.",
        class_of(config).from_config,
        config,
        dtype=torch.float32,
        trust_remote_code=trusted,
    )


def with_tokenizer(folder: Path) -> Path | None:
    """The folder, if it holds a tokenizer."""
    return folder if any((folder / file).is_file() for file in TOKENIZER_FILES) else None
