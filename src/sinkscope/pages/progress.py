"""Progress while work goes on, on standard error: bars on a terminal that can redraw a line, elsewhere a line every 30
seconds."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from sinkscope.pages.text import printed, say

SECONDS_BETWEEN_LINES = 30.0


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Shows on a terminal what is being done; elsewhere says every 30 seconds for how long."""
    console = Console(stderr=True)
    if not console.is_interactive:
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
    if not Console(stderr=True).is_interactive:
        with _lines() as begin_lines:
            yield begin_lines
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:

        def begin(what: str) -> Callable[[int, int], None]:
            task = progress.add_task(printed(what, progress.console.encoding), total=None)
            return lambda done, total: progress.update(task, completed=done, total=total)

        yield begin


@contextlib.contextmanager
def _lines() -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    newest: Task | None = None
    ended = threading.Event()

    def print_lines() -> None:
        while not ended.wait(SECONDS_BETWEEN_LINES):
            if newest is not None:
                say(newest.line(), error=True)

    def begin(what: str) -> Callable[[int, int], None]:
        nonlocal newest
        newest = Task(what)
        return newest.move

    # A thread, since one step of the work may take longer than the time between two lines.
    printer = threading.Thread(target=print_lines, daemon=True)
    printer.start()
    try:
        yield begin
    finally:
        ended.set()
        printer.join()


class Task:
    """What is done of one task, and what is left."""

    def __init__(self, what: str) -> None:
        self.what, self.begun_at = what, time.monotonic()
        self.done, self.total = 0, 0
        self.first = self.done, self.begun_at
        """What was done when it was first counted, and when: what comes before takes no part in the speed."""

    def move(self, done: int, total: int) -> None:
        if not self.total:
            self.first = done, time.monotonic()
        self.done, self.total = done, total

    def line(self) -> str:
        now, (before, counted_at) = time.monotonic(), self.first
        if not self.total:
            return f"{self.what}: begun {now - self.begun_at:.0f} s ago"
        text = f"{self.what}: {self.done} of {self.total} done after {now - self.begun_at:.0f} s"
        if self.done == before:
            return text
        left = self.total - self.done
        return f"{text}, {left} left, about {(now - counted_at) / (self.done - before) * left:.0f} s"
