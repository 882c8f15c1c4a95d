"""What the package says today is what it said before: every table, summary and verdict against kept ones.

A change that should not change numbers passes this unchanged. One that should writes them again, reads what is printed
of the differences, and says in the changelog which and why:

    PYTHONPATH=src:tests python tests/parity/test_parity.py [CASE ...]

Column by column, a number may differ by a thousandth of itself or a ten-thousandth of its column's largest: float32
sums in another order, on another processor, do no more. Where heads are counted, one at the very threshold may count or
not. Columns that are gone are named in DROPPED; new ones are not looked at.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import small_results as small
from kept_values import differences, keep, plain, read, shown
from planted_models import DECOYS
from tiny_models import CONFIGURATIONS, tiny_model

import sinkscope

KEPT = Path(__file__).parent / "kept"
COUNTED = {f"tables.{column}": 2e-3 for column in ("rates.rate", "rates.low", "rates.high", "claims.p_value")}
"""Shares of counted heads, and what is resampled from them, with how far they may differ: two heads of 1,024."""
DROPPED: frozenset[str] = frozenset()
"""`tables.TABLE.COLUMN` or `summary.NAME` of what was kept and is no longer written."""
TIMED = ("elapsed_s", "tokens_per_second", "mfu")


def told(found: Any) -> dict:
    """The tables and the summary of a result; of a study, those of its trace too."""
    tables = {**found.trace.tables, **found.tables} if isinstance(found, sinkscope.Study) else found.tables
    return {"tables": tables, "summary": found.summary}


def trained(variants: Sequence[str]) -> dict:
    """What two short runs log, and their comparison, without what a clock says."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [small.trained(Path(folder), variant) for variant in variants]
        logs = {}
        for run in runs:
            for name in ("metrics", "probes"):
                rows = [json.loads(line) for line in (run / f"{name}.jsonl").read_text().splitlines()]
                logs[f"{run.name} {name}"] = [
                    {key: value for key, value in row.items() if key not in TIMED} for row in rows
                ]
        compared = sinkscope.compare_training(runs).tables
        return {"tables": {name: compared[name] for name in ("losses", "observables", "births")}, "summary": logs}


def compared() -> dict:
    with tempfile.TemporaryDirectory() as folder:
        return told(sinkscope.compare_training(small.planted_runs(Path(folder))))


CASES: dict[str, Callable[[], dict]] = {
    **{
        f"reference-{name}": lambda name=name: told(small.studied(f"reference:{name}"))
        for name in ("softmax", "learned_sink")
    },
    **{f"family-{name}": lambda name=name: told(small.traced(tiny_model(name))) for name in CONFIGURATIONS},
    **{
        f"study-{name}": lambda name=name: told(small.studied(tiny_model(name)))
        for name in ("llama", "gemma2", "mixtral")
    },
    "study-gpt2": lambda: told(small.study_of_gpt2()),
    "chunked-llama": lambda: told(small.traced(tiny_model("llama"), chunk_tokens=48)),
    "keys-gemma3": lambda: told(small.traced(tiny_model("gemma3"), keys=[0, 5])),
    "trace-text": lambda: told(small.trace_of_text()),
    **{
        f"bias-{name}": lambda name=name: told(small.biased(tiny_model(name), controls=[]))
        for name in ("llama", "gpt_neox")
    },
    "planted-chain": lambda: told(small.study_of_chain()),
    **{f"decoy-{kind}": lambda kind=kind: told(small.study_of_decoy(kind)) for kind in DECOYS},
    "audit-chain": lambda: told(small.audited()),
    "audit-llama": lambda: told(small.audited_without_sink()),
    "remedy-chain": lambda: told(small.remedied()),
    "remedy-scales": lambda: told(small.rescaled()),
    "remedy-text": lambda: told(small.remedied_on_text()),
    "fingerprint": lambda: told(small.fingerprinted()),
    **{f"intervene-{asked}": lambda asked=asked: told(small.intervened(asked)) for asked in small.INTERVENTIONS},
    "intervene-chain": lambda: told(small.intervened_chain()),
    "sink-tokens": lambda: {"tables": {}, "summary": small.sinks_of_tokens()},
    "training": lambda: trained(["softmax", "head_norm"]),
    "compare-training": compared,
}


def changes(kept: dict, now: dict) -> list[str]:
    """What changed of what was kept, but for what is new or was dropped on purpose."""
    expected = {f"{place}: gone" for place in DROPPED}
    return [line for line in differences("", kept, now, apart=COUNTED, with_new=False) if line not in expected]


@pytest.mark.parametrize("case", CASES)
def test_every_number_is_what_it_was(case):
    found = changes(read(KEPT / f"{case}.json.gz"), plain(CASES[case]()))
    assert not found, shown(found)


def test_a_number_that_changed_is_found():
    def of(column, values):
        return {"tables": {"rates": {column: values}}, "summary": {}}

    assert "tables.rates.other[1]: 2.0 before, 2.01 now" in changes(of("other", [1.0, 2.0]), of("other", [1.0, 2.01]))
    assert not changes(of("other", [1.0, 1e-7]), of("other", [1.0001, 1.5e-5]))
    assert changes(of("rate", [0.5, 0.1]), of("rate", [0.5, 0.103]))
    assert not changes(of("rate", [0.5, 0.1]), of("rate", [0.5, 0.101]))
    assert changes(of("rate", [0.5]), of("rate", [None]))
    assert changes(of("rate", [0.5]), of("rate", [0.5, 0.5]))
    assert changes(of("text", ["a", "b"]), of("text", ["a", "c"])) == ["tables.rates.text: -b", "tables.rates.text: +c"]
    assert changes({"claims": [{"verdict": "holds"}]}, {"claims": [{"verdict": "undecided"}]})
    assert changes(of("rate", [0.5]), {"tables": {}, "summary": {}}) == ["tables.rates: gone"]
    assert not changes({"tables": {}, "summary": {}}, of("rate", [0.5]))


if __name__ == "__main__":
    keep(KEPT, {case: lambda make=make: plain(make()) for case, make in CASES.items()}, sys.argv[1:])
