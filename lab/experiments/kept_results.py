"""What is kept of the runs of an experiment: a compressed line of JSON for each."""

from __future__ import annotations

import json
import lzma
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from paper_plan import Run

from sinkscope.errors import InputError
from sinkscope.pretrain.metrics import read_rows

FILE_BYTES, NUM_FILES = 15 << 20, 4
"""Limits on what is kept: a machine that is lent for training may hand back only a few files of at most 16 MiB."""


def run_result(name: str, run: dict[str, Any], folder: Path, *, jobs: int = 1) -> dict[str, Any]:
    """What is kept of a run, one of `jobs` at a time; one that was stopped has no summary.

    `run` is what the plan says of it. Measures are those of `sink_measures.py`, where it was asked.
    """
    rows = read_rows(folder / "metrics.jsonl")
    probes, summary, measures = (folder / file for file in ("probes.jsonl", "summary.json", "measures.json"))
    return {
        "name": name,
        "run": run,
        "diverged": False,
        "jobs": jobs,
        "config": yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")),
        "environment": json.loads((folder / "environment.json").read_text(encoding="utf-8")),
        "summary": json.loads(summary.read_text(encoding="utf-8")) if summary.exists() else None,
        # The later half: the first updates compile.
        "tokens_per_second": statistics.median(row["tokens_per_second"] for row in rows[len(rows) // 2 :]),
        "metrics": [row for row in rows if row["validation_loss"] is not None],
        "probes": read_rows(probes) if probes.exists() else [],
        "measures": json.loads(measures.read_text(encoding="utf-8")) if measures.exists() else None,
    }


class KeptResults:
    """Files of compressed lines that grow as runs end, so that what is done is there even if all else is killed."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder, self.say, self.number = folder, say, 0
        self.results: list[dict[str, Any]] = []
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("results-*.jsonl.xz"):
            old.unlink()

    def add(self, result: dict[str, Any]) -> None:
        self.results.append(result)
        member = _compressed(result)
        path = self._path()
        if path.exists() and path.stat().st_size + len(member) > FILE_BYTES:
            if self.number + 1 == NUM_FILES:
                self.say(f"no room in {self.folder} for the probes of {result['name']}: they are left out")
                member = _compressed(result | {"probes": []})
            else:
                self.number += 1
        with self._path().open("ab") as file:
            file.write(member)

    def _path(self) -> Path:
        return self.folder / f"results-{self.number}.jsonl.xz"


def read_results(folder: Path) -> list[dict[str, Any]]:
    """The kept results of all files in a folder."""
    lines: list[dict[str, Any]] = []
    for path in sorted(folder.glob("results-*.jsonl.xz")):
        with lzma.open(path, "rt", encoding="utf-8") as file:
            # Files of the first experiment name no run: there the settings do.
            lines += [
                {"name": Run(**line["run"]).name, **line} if "name" not in line else line
                for line in map(json.loads, file)
            ]
    if not lines:
        raise InputError(f"{folder} has no results-*.jsonl.xz. Give the folder that --keep of an experiment wrote.")
    return lines


def write_run(result: dict[str, Any], folder: Path) -> Path:
    """The run folder of a kept result as far as it was kept, for what reads run folders."""
    path = folder / result["name"]
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(yaml.safe_dump(result["config"]), encoding="utf-8")
    for name in ("environment", "summary"):
        if result[name] is not None:  # a summary says that the run is complete
            (path / f"{name}.json").write_text(json.dumps(result[name]), encoding="utf-8")
    for name in ("metrics", "probes"):
        lines = [json.dumps(row) + "\n" for row in result[name]]
        (path / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return path


def _compressed(result: dict[str, Any]) -> bytes:
    """One line as a whole xz stream: streams can be appended to one another."""
    return lzma.compress((json.dumps(result, allow_nan=False) + "\n").encode())
