"""What long work calls as it goes on; who starts it says what is then shown."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with (parts done, parts in all), such as forward passes or sequences."""
Work = Callable[[str], Progress]
"""Called with what is begun, such as the name of a model; returns what is called as it goes on."""
Say = Callable[[str], None]
"""Called with a sentence on what was done or comes next."""
