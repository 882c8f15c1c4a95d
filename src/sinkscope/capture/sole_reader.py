"""One reading of a model at a time, and hooks that hear the passes of their own thread alone.

A reading changes what all threads share: hooks, the attention implementation, the mode of dropout. A second thread that
wants to read the same model is refused; a plain forward pass in another thread goes on as if nobody was reading.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from sinkscope.errors import InputError

_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_making = threading.Lock()


@contextlib.contextmanager
def sole_reader(model: nn.Module) -> Iterator[None]:
    """Keeps other threads from reading the model; the same thread may enter again."""
    with _making:
        lock = _locks.setdefault(getattr(model, "base_model", model), threading.RLock())
    if not lock.acquire(blocking=False):
        raise InputError(
            expected="a model that no other thread is reading",
            found="a reading in another thread, which is not done",
            next_step="Wait for it, or load the model a second time",
        )
    try:
        yield
    finally:
        lock.release()


def in_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook on a module that does nothing in passes of other threads."""
    thread = threading.get_ident()
    return lambda *call: hook(*call) if threading.get_ident() == thread else None
