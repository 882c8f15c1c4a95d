"""Progress while work goes on, on standard error: bars on a terminal, elsewhere a line every 30 seconds."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from sinkscope.report.text import printed, say

SECONDS_BETWEEN_LINES = 30.0


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Shows on a terminal what is being done; elsewhere every 30 seconds for how long."""
    console = Console(stderr=True)
    if not console.is_terminal:
        with _lines() as begin:
            begin(what)
            yield
        return
    with console.status(Text(printed(what, console.encoding))):
        yield


@contextlib.contextmanager
def bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal; yields the function that moves it."""
    with bars() as begin:
        yield begin(what)


@contextlib.contextmanager
def bars() -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """One bar for each of several tasks; yields a function that starts a task's bar and returns what moves it.

    Where there is no terminal for bars, a line every 30 seconds says what is done and left of the newest task.
    """
    if not Console(stderr=True).is_terminal:
        with _lines() as begin_lines:
            yield begin_lines
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as shown:

        def begin(what: str) -> Callable[[int, int], None]:
            task = shown.add_task(printed(what, shown.console.encoding), total=None)
            return lambda done, total: shown.update(task, completed=done, total=total)

        yield begin


@contextlib.contextmanager
def _lines() -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    newest: tuple[str, int, int | None, float] | None = None  # what, done, total, begun at
    ended = threading.Event()

    def print_lines() -> None:
        while not ended.wait(SECONDS_BETWEEN_LINES):
            if newest is not None:
                say(progress_line(*newest), error=True)

    def begin(what: str) -> Callable[[int, int], None]:
        nonlocal newest
        begun_at = time.monotonic()
        newest = what, 0, None, begun_at

        def move(done: int, total: int) -> None:
            nonlocal newest
            newest = what, done, total, begun_at

        return move

    # A thread, since one step of the work may take longer than the time between two lines.
    printer = threading.Thread(target=print_lines, daemon=True)
    printer.start()
    try:
        yield begin
    finally:
        ended.set()
        printer.join()


def progress_line(what: str, done: int, total: int | None, begun_at: float) -> str:
    """What is done, what is left, and about how long that will take."""
    elapsed_s = time.monotonic() - begun_at
    if total is None:
        return f"{what}: begun {elapsed_s:.0f} s ago"
    text = f"{what}: {done} of {total} done after {elapsed_s:.0f} s"
    return f"{text}, {total - done} left, about {elapsed_s / done * (total - done):.0f} s" if done else text
