"""Checks that interventions leave a model as they found it: its hooks, attention, configuration and weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from sinkscope.errors import InputError
from sinkscope.models.anatomy import Anatomy
from sinkscope.models.sharded import is_sharded
from sinkscope.models.weights import weight_checksum
from sinkscope.tracing.attention_hook import implementation_of

NOTED_BY_SAVING = {"architectures", "dtype", "transformers_version"}
"""What `save_pretrained` writes into the configuration of the model that it saves. That is no change of the model."""


@dataclass(frozen=True, kw_only=True)
class _State:
    """What an intervention must leave unchanged."""

    hooks: dict[str, tuple]
    """By the name of the module that has them."""
    configuration: Any
    weights: str


_before: WeakKeyDictionary[nn.Module, tuple[int, _State]] = WeakKeyDictionary()
"""By decoder: how many interventions are open, and the model's state before the first of them."""


@contextlib.contextmanager
def restored(name: str, anatomy: Anatomy) -> Iterator[None]:
    """While open, an intervention may change the model. When the last one on a model is closed, in whatever order, an
    error says what differs from the state before the first one."""
    decoder = anatomy.decoder
    if is_sharded(decoder):
        raise InputError(
            f"{name} changes a model in one process, and the weights of this one are spread over several. Load a "
            "checkpoint of it into one process."
        )
    num_open, before = _before.get(decoder) or (0, _state(anatomy))
    _before[decoder] = num_open + 1, before
    failed = True
    try:
        yield
        failed = False
    finally:
        num_open, before = _before.pop(decoder)
        if num_open > 1:
            _before[decoder] = num_open - 1, before
        elif not failed:  # an error on top would hide the one that its owner must see
            _check(name, anatomy, before)


def _state(anatomy: Anatomy) -> _State:
    """The state of a model now."""
    config = getattr(anatomy.decoder, "config", None)
    return _State(
        hooks=_hooks(anatomy.decoder),
        configuration=None if config is None else (implementation_of(config), _settings(config)),
        weights=weight_checksum(anatomy.decoder),
    )


def _settings(config: Any) -> dict[str, Any]:
    """The entries of a configuration, without what saving the model writes there."""
    return {key: value for key, value in config.to_dict().items() if key not in NOTED_BY_SAVING}


def _check(name: str, anatomy: Anatomy, before: _State) -> None:
    """Refuses a model whose state is not as before; `name` is the intervention that was closed last."""
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
    """The ids of the hooks on each module that has any. torch has no public list of a module's hooks."""
    hooks = {}
    for name, module in model.named_modules():
        of_module = (
            module._forward_pre_hooks,
            module._forward_hooks,
            module._backward_pre_hooks,
            module._backward_hooks,
        )
        if any(of_module):
            hooks[name] = tuple(map(tuple, of_module))
    return hooks
