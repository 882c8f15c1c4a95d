"""What the package says today is what it said before: every table, summary and verdict against kept ones.

A change that should not change numbers passes this unchanged. One that should writes them again, and says in the
changelog which and why:

    python tests/parity/test_parity.py [CASE ...]

Column by column, a number may differ by a thousandth of itself or a ten-thousandth of its column's largest: float32
sums in another order, on another processor, do no more. Where heads are counted, one at the very threshold may count or
not. Columns that are gone are left out; new ones are not looked at.
"""

from __future__ import annotations

import gzip
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from planted_models import DECOYS, decoy, planted_chain
from tiny_models import CONFIGURATIONS, tiny_model

import sinkscope
from sinkscope.arguments import STUDY_SEQUENCES

KEPT = Path(__file__).parent / "kept"
SMALL = dict(num_sequences=STUDY_SEQUENCES, length=32)
RELATIVE, OF_LARGEST = 1e-3, 1e-4
COUNTED = {"rates.rate": 2e-3, "rates.low": 2e-3, "rates.high": 2e-3, "claims.p_value": 2e-3}
"""Shares of counted heads, and what is resampled from them, with how far they may differ: two heads of 1,024."""
DROPPED: frozenset[str] = frozenset()
"""`table.column` of what was kept and is no longer written."""


def studied(model: Any, **options: Any) -> dict:
    found = sinkscope.study(sinkscope.load(model), **SMALL, **options)
    return {"tables": {**found.trace.tables, **found.tables}, "summary": found.summary}


def traced(model: Any, **options: Any) -> dict:
    loaded = sinkscope.load(model)
    found = sinkscope.trace(loaded, sinkscope.token_batch(loaded, num_sequences=6, length=24), **options)
    return {"tables": found.tables, "summary": found.summary}


def biased(model: Any) -> dict:
    found = sinkscope.bias(model, num_sequences=16, length=24, controls=[])
    return {"tables": found.tables, "summary": found.summary}


def planted(make: Callable, *args: Any) -> dict:
    model, facts = make(*args)
    return studied(model, bos=facts.bos)


CASES: dict[str, Callable[[], dict]] = {
    **{f"reference-{name}": lambda name=name: studied(f"reference:{name}") for name in ("softmax", "learned_sink")},
    **{f"family-{name}": lambda name=name: traced(tiny_model(name)) for name in CONFIGURATIONS},
    **{f"study-{name}": lambda name=name: studied(tiny_model(name)) for name in ("llama", "gpt2", "gemma2", "mixtral")},
    "chunked-llama": lambda: traced(tiny_model("llama"), chunk_tokens=48),
    "keys-gemma3": lambda: traced(tiny_model("gemma3"), keys=[0, 5]),
    **{f"bias-{name}": lambda name=name: biased(tiny_model(name)) for name in ("llama", "gpt_neox")},
    "planted-chain": lambda: planted(planted_chain, 0),
    **{f"decoy-{kind}": lambda kind=kind: planted(decoy, kind, 0) for kind in DECOYS},
}


@pytest.mark.parametrize("case", CASES)
def test_every_number_is_what_it_was(case):
    kept = json.loads(gzip.decompress((KEPT / f"{case}.json.gz").read_bytes()))
    now = plain(CASES[case]())
    for name, table in kept["tables"].items():
        for column, values in table.items():
            if f"{name}.{column}" not in DROPPED:
                compare(f"{name}.{column}", values, now["tables"][name][column])
    for name, value in kept["summary"].items():
        if f"summary.{name}" not in DROPPED:
            compare(f"summary.{name}", value, now["summary"][name])


def test_a_number_that_changed_is_found():
    with pytest.raises(AssertionError, match=r"table\.column"):
        compare("table.column", [1.0, 2.0, None], [1.0, 2.01, None])
    with pytest.raises(AssertionError, match="claims"):
        compare("claims", [{"verdict": "holds"}], [{"verdict": "undecided"}])
    compare("table.column", [1.0, 1e-7], [1.0001, 1.5e-5])
    with pytest.raises(AssertionError, match=r"rates\.rate"):
        compare("rates.rate", [0.5, 0.1], [0.5, 0.103])
    compare("rates.rate", [0.5, 0.1], [0.5, 0.101])


def compare(where: str, kept: Any, now: Any) -> None:
    if isinstance(kept, dict):
        for name, value in kept.items():
            compare(f"{where}.{name}", value, now[name])
    elif isinstance(kept, list):
        assert len(kept) == len(now), where
        numbers = [abs(value) for value in kept if isinstance(value, float) and math.isfinite(value)]
        apart = max(OF_LARGEST * max(numbers, default=0), COUNTED.get(where, 0))
        for number, (before, after) in enumerate(zip(kept, now, strict=True)):
            if isinstance(before, float) and isinstance(after, float):
                assert math.isclose(before, after, rel_tol=RELATIVE, abs_tol=apart), (
                    f"{where}[{number}]: {before} before, {after} now"
                )
            else:
                compare(f"{where}[{number}]", before, after)
    elif isinstance(kept, float) and isinstance(now, float):
        assert math.isclose(kept, now, rel_tol=RELATIVE), f"{where}: {kept} before, {now} now"
    else:
        assert kept == now, f"{where}: {kept} before, {now} now"


def plain(value: Any) -> Any:
    """The value in the types JSON has, floats to seven digits; not-a-number is None, as in a written table."""
    if isinstance(value, np.ma.MaskedArray):
        return [plain(item) for item in value.tolist()]
    if isinstance(value, np.ndarray | torch.Tensor):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items() if name != "elapsed_s"}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return None if math.isnan(value) else float(f"{value:.7g}")
    return value


if __name__ == "__main__":
    KEPT.mkdir(exist_ok=True)
    for case in sys.argv[1:] or CASES:
        text = json.dumps(plain(CASES[case]()))
        (KEPT / f"{case}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
        print(f"{case}: {len(text)} characters", flush=True)
