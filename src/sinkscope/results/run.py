"""A finished run, read from its folder and checked.

A folder may come from anybody. So counts and indices are checked against the sizes that the summary states, and tables
that are drawn as maps are checked for their order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from sinkscope.errors import InputError
from sinkscope.initial_bias.schemas import BIAS, BIAS_TABLES
from sinkscope.results.run_folder import is_training_run
from sinkscope.results.tables import Schema, read_table, rows_where
from sinkscope.results.validated import NAME, Each, Int, Maybe, Real, Text, checked, read_json, read_yaml, refused
from sinkscope.studies.schemas import CLAIMS, STUDY_TABLES
from sinkscope.tracing.schemas import SEQUENCE_SINKS, TOKENS, TRACE_TABLES

Table = dict[str, list]
Kind = Literal["study", "trace", "bias", "audit", "remedy", "intervene", "fingerprint"]
SUMMARY = {
    "model": Maybe(NAME),
    "family": NAME,
    "num_layers": Int(1, 10_000),
    "tokens": {
        "kind": NAME,
        "length": Int(1, 2**31),
        "count": Int(1, 2**31),
        "bos": bool,
        "whole": Maybe([Int(1, 2**31)]),
    },
    "story": Maybe(Text()),
    "verdict": Maybe(Text()),
    "counts": Maybe(Text()),
    "command": Maybe(Text()),
}
TRACED = {
    "sink_rate": Maybe(Real()),
    "keys": Maybe([Int(0, "length")]),
    "writers": Maybe([{"layer": Int(0, "num_layers"), "expert": Maybe(Int()), "neuron": Int()}]),
    "sinks": [{"position": Int(0, "length"), "layers": Maybe([Int(0, "num_layers")])}],
    "birth_layers": [Int(-1, "num_layers")],
    "super_neurons": Maybe([{"layer": Int(0, "num_layers")}]),
    "massive_dimensions": [Int()],
    "token_sinks": Maybe([{"text": Text(), "num_sequences": Int(), "num_with": Int(), "positions": [Int()]}]),
    "variance_ratio": Maybe([Maybe(Real())]),
    "dom_ratio": {"position": Int(0, "length"), "sink": Maybe([Maybe(Real())]), "elsewhere": [Maybe(Real())]},
}
BIASED = {"controls": Each({"refused": Maybe(Text())})}
NUMBERED = {
    "layer": Int(-1, "num_layers"),
    "position": Int(0, "length"),
    "target": Int(0, "length"),
    "sequence": Int(0, "count"),
    "distance": Int(0, "length"),
    "head": Int(0, 2**16),
    "expert": Int(-1, 2**31),
    "neuron": Int(0, 2**31),
    "dimension": Int(0, 2**31),
    "rank": Int(0, 2**31),
}
"""Columns that index something, in every table."""
FEW = {
    **{"id": 1000, "condition": 1000, "quantity": 1000, "target": 1000, "control": 1000, "checkpoint": 10_000},
    **{"kind": 10_000, "what": 10_000, "remedy": 1000, "scheme": 1000, "model": 10_000, "variant": 1000},
}
"""Columns of names, each of which gets a row, a line or a figure, and how many different names they may hold."""
FEW_ROWS = 100_000
"""Rows of a table that a page lists as a whole."""
LISTED = {
    *("claims", "mediation", "random_sets", "minimal_set", "effects", *(schema.name for schema in BIAS_TABLES)),
    *("damages", "remedies", "sink_tokens", "means", "pairs", "unrelated", "variants", "training_runs", "births"),
}
ORDERED = {"positions": "position", "distances": "distance", "layers": "layer"}
"""Tables with the same rows for each layer, layer after layer, and the column that numbers these rows."""
FILES = (".parquet", ".jsonl", ".json", ".yaml", ".safetensors")
OF_TEXTS = (TOKENS.name, SEQUENCE_SINKS.name)
"""Tables of each sequence's own tokens, which may be longer than what is read by position."""
PARTS = {"embeddings", "attention", "feed_forward"}
NEVER_EMPTY = {"bias", "contraction", "contraction_positions"}


@dataclass(frozen=True)
class Run:
    """The tables and records of one run. `tables` holds the tables of its kind by name."""

    path: Path
    kind: Kind
    summary: dict[str, Any]
    config: dict[str, Any]
    environment: dict[str, Any]
    tables: dict[str, Table]
    schemas: tuple[Schema, ...]
    """Of these tables, with the columns that were read."""
    files: tuple[str, ...]
    """What was written beside the page."""
    given_label: str = ""
    """What distinguishes it from the other runs of a page, where there are several."""

    @property
    def model(self) -> str:
        return str(self.summary.get("model") or self.environment.get("model") or self.path.name)

    @property
    def label(self) -> str:
        """The model, and whether its sequences began with BOS: two studies of one model differ in that."""
        return self.given_label or self.model + (", BOS first" if self.summary.get("tokens", {}).get("bos") else "")

    @property
    def answer(self) -> str:
        """The run in one sentence: a study's verdict, or what the trace found."""
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
        return births_of(self.summary)

    @cached_property
    def claims(self) -> dict[str, dict[str, Any]]:
        """The claims of a study by id, in their order; empty for other runs."""
        return {row["id"]: row for row in self.rows("claims")}

    def rows(self, table_name: str, **equal: Any) -> list[dict[str, Any]]:
        """The rows of a table whose columns named in `equal` have these values; none where there is no such table."""
        return rows_where(self.tables[table_name], **equal) if table_name in self.tables else []


def births_of(summary: Mapping) -> list[int]:
    """Layers where disparity is born; the embeddings do not count as a layer."""
    return [layer for layer in summary["birth_layers"] if layer >= 0]


def curve_layers(summary: Mapping) -> list[int]:
    """The first layer and the one where disparity is born, or the one before the sink where none is."""
    return sorted({0, *(births_of(summary)[:1] or [before_the_sink(summary)])})


def before_the_sink(summary: Mapping) -> int:
    """The layer before the first with the strongest sink, where it must come from; 0 where there is no sink."""
    return max(0, min((layer for sink in summary["sinks"][:1] for layer in sink.get("layers") or ()), default=0) - 1)


def is_run(folder: Path) -> bool:
    """Whether sinkscope wrote this folder."""
    return (folder / "summary.json").is_file() or is_training_run(folder)


def read_run(folder: Path, columns: Mapping[str, Collection[str]] | None = None) -> Run:
    """The study, trace or bias in a folder; anything else, or tables of another version, is refused. `columns`, by
    table: only these are read, since those of a long text fill gigabytes."""
    summary, kind = _summary(folder), _kind(folder)
    checked(summary, SUMMARY, folder / "summary.json")
    sizes = {"num_layers": summary["num_layers"], **{name: summary["tokens"][name] for name in ("length", "count")}}
    checked(summary, BIASED if kind == "bias" else TRACED, folder / "summary.json", sizes)
    ranges = {name: allowed.ends(sizes) for name, allowed in NUMBERED.items()}
    longest = sizes | {"length": max([sizes["length"], *(summary["tokens"].get("whole") or ())])}
    of_texts = {name: allowed.ends(longest) for name, allowed in NUMBERED.items()}
    # A page can do without what each sequence's own tokens receive.
    schemas = tuple(
        schema for schema in _schemas(kind, columns) if schema.name not in OF_TEXTS or _has_table(folder, schema.name)
    )
    tables = {
        schema.name: read_table(folder / schema.name, schema, of_texts if schema.name in OF_TEXTS else ranges)
        for schema in schemas
    }
    for schema in schemas:
        check_table(schema, tables[schema.name], sizes, folder / f"{schema.name}.parquet")
    run = Run(
        path=folder,
        kind=kind,
        summary=summary,
        config=read_optional(read_yaml, folder / "config.yaml"),
        environment=read_optional(read_json, folder / "environment.json"),
        tables=tables,
        schemas=schemas,
        files=files_of(folder),
    )
    if kind != "bias":
        _check_heads(run)
    return run


def _summary(folder: Path) -> dict[str, Any]:
    """The summary of a study, trace or bias, not checked yet; every other run is refused."""
    if (trains := is_training_run(folder)) or not is_run(folder):
        found = "no such folder" if not folder.is_dir() else "neither summary.json nor a training run"
        raise InputError(
            expected=f"a study or a trace in {folder}",
            found="a training run" if trains else found,
            next_step=f"Write its page with sinkscope report {folder}, or compare it: sinkscope compare {folder} OTHER"
            if trains
            else "Give a folder that sinkscope study, trace or pretrain wrote",
        )
    summary = read_json(folder / "summary.json", {"kind": Maybe(NAME)})
    if (command := summary.get("kind")) in ("fingerprint", "audit"):
        raise InputError(
            expected=f"a study or a trace in {folder}",
            found=f"a run of sinkscope {command}",
            next_step=f"See its own page, {folder / 'report.html'}, which shows all of it",
        )
    if command == "remedy":
        raise InputError(
            expected=f"a study or a trace in {folder}",
            found="a remedied model",
            next_step=f"See its card, {folder / 'README.md'}",
        )
    if {"before", "after"} <= summary.keys():
        raise InputError(
            expected=f"a study or a trace in {folder}",
            found="a run of sinkscope intervene",
            next_step=f"See its own page, {folder / 'report.html'}, with before, after and control side by side",
        )
    return summary


def _kind(folder: Path) -> Kind:
    if _has_table(folder, BIAS.name):
        return "bias"
    return "study" if _has_table(folder, CLAIMS.name) else "trace"


def _schemas(kind: Kind, columns: Mapping[str, Collection[str]] | None) -> Sequence[Schema]:
    """The tables of a run of this kind that are read, each with the columns that are."""
    schemas = BIAS_TABLES if kind == "bias" else TRACE_TABLES + (STUDY_TABLES if kind == "study" else ())
    if columns is None:
        return schemas
    return [
        replace(schema, columns=tuple(column for column in schema.columns if column.name in columns[schema.name]))
        for schema in schemas
        if schema.name in columns
    ]


def files_of(folder: Path) -> tuple[str, ...]:
    """The files of a run's folder, by name."""
    return tuple(sorted(path.name for path in folder.iterdir() if path.suffix in FILES))


def _has_table(folder: Path, name: str) -> bool:
    return (folder / f"{name}.parquet").is_file()


def read_optional(read: Callable[[Path, Any], Any], path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is no file."""
    return read(path, {}) if path.exists() else {}


def check_table(schema: Schema, table: Table, sizes: Mapping[str, int], path: Path) -> None:
    """Refuses a table with more than a page can show, or in another order than a map is drawn in."""
    name, num_rows = schema.name, len(next(iter(table.values())))
    names = {column.name for column in schema.columns if column.type != "float"}
    if name in LISTED and num_rows > FEW_ROWS:
        raise refused(path, f"{num_rows:,} rows, of at most {FEW_ROWS:,}")
    for column, most in FEW.items():
        if column in names and name != "tokens" and len(set(table[column])) > most:
            raise refused(path, f"more than {most:,} values of {column}")
    if name in NEVER_EMPTY and not num_rows:
        raise refused(path, "no rows")
    if unknown := set(table.get("part", ())) - PARTS:
        raise refused(path, f"{next(iter(unknown))!r} in column part, not one of {', '.join(sorted(PARTS))}")
    if name in ORDERED:
        num_layers = sizes["num_layers"]
        inner = table[ORDERED[name]][: num_rows // num_layers]
        whole = {"positions": inner == list(range(sizes["length"])), "layers": num_rows == num_layers}.get(name, inner)
        layers = [layer for layer in range(num_layers) for _ in inner]
        if not whole or table["layer"] != layers or (name != "layers" and table[ORDERED[name]] != inner * num_layers):
            raise refused(path, f"{num_rows} rows that are not those of {num_layers} layers, one after the other")


def _check_heads(run: Run) -> None:
    """Refuses a table whose rows at a key are not those of every layer and head, one after the other."""
    table, num_layers = run.tables["heads"], run.summary["num_layers"]
    found: dict[int, list[tuple[int, int]]] = {run.strongest: []}
    for position, layer, head in zip(table["position"], table["layer"], table["head"], strict=True):
        found.setdefault(position, []).append((layer, head))
    for position, rows in found.items():
        expected = [(layer, head) for layer in range(num_layers) for head in range(len(rows) // num_layers)]
        if not rows or rows != expected:
            raise refused(run.path / "heads.parquet", f"other rows at position {position} than a layer's heads each")
