"""Whether a model is left as it was found: its hooks, its attention, its configuration and its weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from sinkscope.errors import InputError
from sinkscope.models.anatomy import Anatomy
from sinkscope.models.weights import weight_checksum
from sinkscope.tracing.attention_hook import implementation_of

NOTED_BY_SAVING = {"architectures", "dtype", "transformers_version"}


@dataclass(frozen=True, kw_only=True)
class _State:
    """What must not change on a model."""

    hooks: dict[str, tuple]
    """By the module's name."""
    configuration: Any
    weights: str


_found: WeakKeyDictionary[nn.Module, tuple[int, _State]] = WeakKeyDictionary()
"""By decoder: how many interventions are open, and how the first of them found the model."""


@contextlib.contextmanager
def restored(name: str, anatomy: Anatomy) -> Iterator[None]:
    """While open, an intervention may change the model. When the last one of a model is closed, in whatever order, an
    error says what is not as the first one found it."""
    decoder = anatomy.decoder
    num_open, found = _found.get(decoder) or (0, _state(anatomy))
    _found[decoder] = num_open + 1, found
    failed = True
    try:
        yield
        failed = False
    finally:
        num_open, found = _found.pop(decoder)
        if num_open > 1:
            _found[decoder] = num_open - 1, found
        elif not failed:  # else what failed is what its owner must see
            _check(name, anatomy, found)


def _state(anatomy: Anatomy) -> _State:
    config = getattr(anatomy.decoder, "config", None)
    return _State(
        hooks=_hooks(anatomy.decoder),
        configuration=None if config is None else (implementation_of(config), _settings(config)),
        weights=weight_checksum(anatomy.decoder),
    )


def _settings(config: Any) -> dict[str, Any]:
    """Of a configuration, without what saving the model notes in it."""
    return {key: value for key, value in config.to_dict().items() if key not in NOTED_BY_SAVING}


def _check(name: str, anatomy: Anatomy, before: _State) -> None:
    after = _state(anatomy)
    if changed := [module for module, hooks in after.hooks.items() if hooks != before.hooks.get(module)]:
        what = f"the hooks of {changed[0] or 'the decoder'} are"
    elif after.configuration != before.configuration:
        what = "the configuration, or the attention implementation in it, is"
    elif after.weights != before.weights and not _is_trained(anatomy.decoder):
        what = "the weights are"
    else:
        return
    raise InputError(
        f"After {name} was closed, {what} not as before it was opened: something changed the model meanwhile. Load the "
        "model again, and make such changes before or after the intervention."
    )


def _is_trained(decoder: nn.Module) -> bool:
    """Whether the owner trains the model: then weights are meant to change."""
    return any(parameter.grad is not None for parameter in decoder.parameters())


def _hooks(model: nn.Module) -> dict[str, tuple]:
    """By module. torch has no public list of a module's hooks."""
    kept = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    found = {name: tuple(tuple(getattr(module, each)) for each in kept) for name, module in model.named_modules()}
    return {name: hooks for name, hooks in found.items() if any(hooks)}
