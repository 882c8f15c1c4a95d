"""Lets one thread at a time read a model, through hooks that act in that thread's passes alone.

Reading changes what threads share: hooks, the attention implementation, whether dropout is on. So while one thread
reads a model, another one that wants to read it is refused. A forward pass in another thread is not affected.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from sinkscope.errors import InputError
from sinkscope.models.loaded import without_dropout
from sinkscope.models.sharded import unsharded
from sinkscope.tracing.open_interventions import check_owner

_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_making = threading.Lock()
_num_readings = 0
_eager = contextlib.ExitStack()


@contextlib.contextmanager
def single_reader(model: nn.Module) -> Iterator[None]:
    """While open, other threads may not read the model; this thread may enter again. Nothing runs compiled meanwhile,
    since a compiled graph may leave out our hooks."""
    check_owner(model)
    with _making:
        lock = _locks.setdefault(getattr(model, "base_model", model), threading.RLock())
    if not lock.acquire(blocking=False):
        raise InputError("Another thread is still reading this model. Wait for it, or load the model a second time.")
    try:
        with everything_eager():
            yield
    finally:
        lock.release()


@contextlib.contextmanager
def everything_eager() -> Iterator[None]:
    """While open, compiled modules run eagerly. torch has one switch for all threads, so the last reader switches it
    back."""
    global _num_readings
    with _making:
        _num_readings += 1
        if _num_readings == 1:
            _eager.enter_context(torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        with _making:
            _num_readings -= 1
            if not _num_readings:
                _eager.close()


def in_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook, made to do nothing in passes of other threads."""
    thread = threading.get_ident()
    return lambda *call: hook(*call) if threading.get_ident() == thread else None


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """While open, dropout is off and this thread alone may read the model, whose weights outside blocks are whole.
    Afterwards each module has its mode back."""
    with single_reader(model), unsharded(model), without_dropout(model):
        yield
