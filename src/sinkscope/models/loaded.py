"""A model that is loaded, with its tokenizer and where it came from; what functions that take a model are given."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from sinkscope.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LoadedModel:
    """A model ready to trace, and where it came from."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    revision: str | None = None
    """The commit on the Hub, where the model came from there."""
    source: Literal["hub", "folder", "gguf", "given", "reference"]
    dtype: str
    trust_remote_code: bool

    def __repr__(self) -> str:
        size = sum(parameter.numel() for parameter in self.model.parameters())
        origin = self.source if self.revision is None else f"{self.source}, revision {self.revision[:8]}"
        tokenizer = "no tokenizer" if self.tokenizer is None else "with its tokenizer"
        device = next(self.model.parameters()).device
        return (
            f"{self.name} ({origin}): {type(self.model).__name__} of {size:,} parameters, {self.dtype} on {device}, "
            f"{tokenizer}"
        )

    @property
    def weight_hash(self) -> str:
        """SHA-256 of the weights as they are now."""
        from sinkscope.models.weights import weight_hash

        return weight_hash(self.model)


Model = LoadedModel | nn.Module
"""A model at hand, as `load` gives it or as its owner made it."""
PIXELS = ("pixel_values", "pixel_values_videos")
"""What images are given as, by the processor of a model that reads them."""
ModelLike = Model | str | Path
"""A model as `load` takes it: at hand, or by its name or its path."""


def bare_model(model: Any) -> Any:
    """The model itself, from a loaded model or from one that its owner made and perhaps wrapped for several devices."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return model.module
    return model.model if isinstance(model, LoadedModel) else model


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """While open, no module is in training mode. Afterwards each has its own mode back."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def without_head(part: Any) -> Any:
    """A model without its output head: Llama 4 names itself, with its head, where others name their decoder."""
    inner = getattr(part, "model", None)
    return inner if hasattr(part, "lm_head") and isinstance(inner, nn.Module) else part


def reads_images(model: Any) -> bool:
    """Whether a model reads images beside tokens."""
    read = inspect.signature(model.forward).parameters
    return any(name in read for name in PIXELS)


def bos_id(loaded: LoadedModel) -> int:
    """The id of the beginning-of-sequence token; refused where there is none."""
    token_id = find_bos(loaded)
    if token_id is None:
        raise InputError(f"{loaded.name} has no beginning-of-sequence token. Give `bos=False`.")
    return token_id


def find_bos(model: Any) -> int | None:
    """The id of the beginning-of-sequence token, from the tokenizer, else the generation or model configuration."""
    tokenizer, model = getattr(model, "tokenizer", None), bare_model(model)
    for place in (tokenizer, getattr(model, "generation_config", None), text_config(model)):
        token_id = getattr(place, "bos_token_id", None)
        if isinstance(token_id, int):
            return token_id
    return None


def text_config(model: Any) -> Any:
    """The section of a model's configuration that describes its decoder; None if it has no configuration."""
    config = getattr(model, "config", None)
    return config if config is None or not hasattr(config, "get_text_config") else config.get_text_config()
