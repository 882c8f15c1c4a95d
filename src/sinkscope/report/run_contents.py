"""What a finished run left in its folder: read once, checked, and never guessed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from sinkscope.errors import InputError
from sinkscope.results.bias_schemas import BIAS, BIAS_TABLES
from sinkscope.results.run_folder import is_training_run
from sinkscope.results.study_schemas import CLAIMS, STUDY_TABLES, TOKENS
from sinkscope.results.tables import read_table, rows_where
from sinkscope.results.trace_schemas import TRACE_TABLES

Table = dict[str, list]
Kind = Literal["study", "trace", "bias"]


@dataclass(frozen=True)
class Run:
    """The tables and records of one run. `tables` holds those that its kind has, by name."""

    path: Path
    kind: Kind
    summary: dict[str, Any]
    config: dict[str, Any]
    environment: dict[str, Any]
    tables: dict[str, Table]

    @property
    def model(self) -> str:
        return str(self.summary.get("model") or self.environment.get("model") or self.path.name)

    @property
    def label(self) -> str:
        """The model, and whether its sequences began with BOS: two studies of one model differ in that."""
        return self.model + (", BOS first" if self.summary.get("tokens", {}).get("bos") else "")

    @property
    def answer(self) -> str:
        """The run in one sentence: a study's verdict, else what the trace found."""
        return str(self.summary.get("verdict") or self.summary.get("story") or "")

    @property
    def command(self) -> str:
        """What was typed; empty where it was not recorded."""
        return str(self.config.get("command") or self.summary.get("command") or "")

    @property
    def strongest(self) -> int:
        """Position of the strongest sink, or of the strongest key where there is none."""
        return self.summary["dom_ratio"]["position"]

    @cached_property
    def births(self) -> list[int]:
        """Layers where disparity is born; the embeddings are none."""
        return [layer for layer in self.summary["birth_layers"] if layer >= 0]

    @cached_property
    def claims(self) -> dict[str, dict[str, Any]]:
        """The claims of a study by id, in their order; empty for other runs."""
        return {row["id"]: row for row in self.rows("claims")}

    def rows(self, table_name: str, **equal: Any) -> list[dict[str, Any]]:
        """The rows of a table whose columns named in `equal` have these values; none where there is no such table."""
        return rows_where(self.tables[table_name], **equal) if table_name in self.tables else []

    def file_name(self, table: str) -> str:
        """The file that holds a table: Parquet, or JSON lines where pyarrow was missing."""
        return f"{table}.jsonl" if (self.path / f"{table}.jsonl").is_file() else f"{table}.parquet"


def is_run(folder: Path) -> bool:
    """Whether a command of ours wrote this folder."""
    return (folder / "summary.json").is_file() or is_training_run(folder)


def read_run(folder: Path) -> Run:
    """The study, trace or bias in a folder; anything else, or tables of another version, is refused."""
    if (trains := is_training_run(folder)) or not is_run(folder):
        found = "no such folder" if not folder.is_dir() else "neither summary.json nor a training run"
        raise InputError(
            expected=f"a study or a trace in {folder}",
            found="a training run" if trains else found,
            next_step=f"Compare it with others: sinkscope compare {folder} OTHER"
            if trains
            else "Give a folder that sinkscope study, trace or pretrain wrote",
        )
    summary = _read_object(folder / "summary.json")
    if summary.get("kind") == "fingerprint":
        raise InputError(
            expected=f"a study or a trace in {folder}",
            found="a run of sinkscope fingerprint",
            next_step="Leave it out; its own page shows all of its pairs",
        )
    if {"before", "after"} <= summary.keys():
        raise InputError(
            expected=f"a study or a trace in {folder}",
            found="a run of sinkscope intervene",
            next_step="Leave it out; its table observables holds before, after and control side by side",
        )
    kind = _kind(folder)
    schemas = BIAS_TABLES if kind == "bias" else TRACE_TABLES + (STUDY_TABLES if kind == "study" else ())
    tables = {
        schema.name: read_table(folder / schema.name, schema)
        for schema in schemas
        # Token texts exist only where the model came with a tokenizer.
        if schema is not TOKENS or _has_table(folder, TOKENS.name)
    }
    return Run(
        path=folder,
        kind=kind,
        summary=summary,
        config=_read_object(folder / "config.yaml"),
        environment=_read_object(folder / "environment.json"),
        tables=tables,
    )


def _kind(folder: Path) -> Kind:
    if _has_table(folder, BIAS.name):
        return "bias"
    return "study" if _has_table(folder, CLAIMS.name) else "trace"


def _has_table(folder: Path, name: str) -> bool:
    return any((folder / f"{name}{suffix}").is_file() for suffix in (".parquet", ".jsonl"))


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON or YAML object in a file; empty where there is no file."""
    if not path.is_file():
        return {}
    import yaml

    parse = json.loads if path.suffix == ".json" else yaml.safe_load
    try:
        value = parse(path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        raise _unreadable(path, error) from error
    if not isinstance(value, dict):
        raise _unreadable(path, ValueError(f"a {type(value).__name__}"))
    return value


def _unreadable(path: Path, error: Exception) -> InputError:
    return InputError(
        expected=f"a whole file in {path}", found=str(error), next_step="Run the command that wrote it again"
    )
