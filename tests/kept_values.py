"""What was found before, kept as JSON, and how what is found now differs from it, a line for each difference."""

from __future__ import annotations

import difflib
import gzip
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch

RELATIVE, OF_LARGEST = 1e-3, 1e-4
FRACTION = re.compile("[-\u2212]?\\d+\\.\\d+(?:e[-\u2212+]?\\d+)?")
LEFT_OUT = ("elapsed_s", "receipt")
"""What a clock says, and receipts, which have a time and rounding errors."""
MOST_SHOWN = 60
"""Differences that a failed test shows."""


def differences(
    where: str, kept: Any, now: Any, *, apart: Mapping[str, float] | None = None, with_new: bool = True
) -> Iterator[str]:
    """What differs, named by its place; `apart`, by place, is how far numbers of a list may lie from one another."""
    asked = {"apart": apart, "with_new": with_new}
    if isinstance(kept, dict) and isinstance(now, dict):
        for name in {**kept, **now}:
            place = f"{where}.{name}".lstrip(".")
            if name not in now:
                yield f"{place}: gone"
            elif name not in kept:
                if with_new:
                    yield f"{place}: new"
            else:
                yield from differences(place, kept[name], now[name], **asked)
    elif are_texts(kept) and are_texts(now):
        yield from (f"{where}: {line}" for line in changed_lines(kept, now))
    elif isinstance(kept, list) and isinstance(now, list):
        if len(kept) != len(now):
            yield f"{where}: {len(kept)} entries before, {len(now)} now"
            return
        numbers = [abs(value) for value in kept if isinstance(value, float) and math.isfinite(value)]
        allowed = max(OF_LARGEST * max(numbers, default=0), (apart or {}).get(where, 0))
        for index, (before, after) in enumerate(zip(kept, now, strict=True)):
            if not (isinstance(before, float) and isinstance(after, float)):
                yield from differences(f"{where}[{index}]", before, after, **asked)
            elif not math.isclose(before, after, rel_tol=RELATIVE, abs_tol=allowed):
                yield f"{where}[{index}]: {before} before, {after} now"
    elif isinstance(kept, float) and isinstance(now, float):
        if not math.isclose(kept, now, rel_tol=RELATIVE):
            yield f"{where}: {kept} before, {now} now"
    elif kept != now:
        yield f"{where}: {kept!r} before, {now!r} now"


def are_texts(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)


def changed_lines(kept: list[str], now: list[str]) -> list[str]:
    """The lines that are gone, with a minus, and those that are new, with a plus."""
    if len(kept) == len(now):
        pairs = [pair for pair in zip(kept, now, strict=True) if not same_text(*pair)]
        return [line for before, after in pairs for line in (f"-{before}", f"+{after}")]
    compared = difflib.unified_diff(kept, now, n=0, lineterm="")
    return [line for line in compared if not line.startswith(("---", "+++", "@@"))]


def same_text(before: str, after: str) -> bool:
    """Whether two texts are the same but for the last digit of fractions; whole numbers count or name something."""
    if FRACTION.split(before) != FRACTION.split(after):
        return False
    fractions = [[float(found.replace("\u2212", "-")) for found in FRACTION.findall(text)] for text in (before, after)]
    return all(math.isclose(one, other, rel_tol=1e-2, abs_tol=1e-3) for one, other in zip(*fractions, strict=True))


def shown(found: Iterable[str]) -> str:
    lines = list(found)
    more = [f"and {len(lines) - MOST_SHOWN} more"] if len(lines) > MOST_SHOWN else []
    return "\n".join(["", *lines[:MOST_SHOWN], *more])


def read(path: Path) -> Any:
    return json.loads(gzip.decompress(path.read_bytes()))


def keep(folder: Path, cases: Mapping[str, Callable[[], Any]], chosen: Iterable[str]) -> None:
    """Writes the chosen cases, all of them where none is named, and prints how each differs from what was there."""
    folder.mkdir(exist_ok=True)
    for case in list(chosen) or cases:
        path, value = folder / f"{case}.json.gz", cases[case]()
        before = read(path) if path.exists() else {}
        for line in differences("", before, value):
            print(f"{case}: {line}")
        text = json.dumps(value)
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
        print(f"{case}: {len(text)} characters", flush=True)


def plain(value: Any) -> Any:
    """The value in the types JSON has, floats to seven digits; not-a-number is None, as in a written table."""
    if isinstance(value, np.ma.MaskedArray):
        return [plain(item) for item in value.tolist()]
    if isinstance(value, np.ndarray | torch.Tensor):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items() if name not in LEFT_OUT}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return None if math.isnan(value) else float(f"{value:.7g}")
    return value
