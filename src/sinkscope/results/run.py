"""A finished run, read from its folder and checked.

A folder may come from anybody. So counts and indices are checked against the sizes that the summary states, and tables
that are drawn as maps are checked for their order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sinkscope.errors import InputError
from sinkscope.results.kinds import Kind, Sizes, kind_of, kinds
from sinkscope.results.run_folder import is_training_run
from sinkscope.results.tables import NO_RANGES, Schema, read_table, rows_where
from sinkscope.results.validated import checked, read_json, read_yaml, refused, strictly

Table = dict[str, list]
NUMBERED: dict[str, tuple[int, int | str]] = {
    "layer": (-1, "num_layers"),
    "position": (0, "length"),
    "target": (0, "length"),
    "sequence": (0, "count"),
    "distance": (0, "length"),
    "head": (0, 2**16),
    "expert": (-1, 2**31),
    "neuron": (0, 2**31),
    "dimension": (0, 2**31),
    "rank": (0, 2**31),
}
"""Columns that index something, in every table: the least number, and the first too large or the size it is."""
FEW = {
    **{"id": 1000, "condition": 1000, "quantity": 1000, "target": 1000, "control": 1000, "checkpoint": 10_000},
    **{"kind": 10_000, "what": 10_000, "remedy": 1000, "scheme": 1000, "model": 10_000, "variant": 1000},
}
"""Columns of names, each of which gets a row, a line or a figure, and how many different names they may hold."""
FEW_ROWS = 100_000
"""Rows of a table that a page lists as a whole."""
FILES = (".parquet", ".jsonl", ".json", ".yaml", ".safetensors")


@dataclass(frozen=True)
class Run:
    """The tables and records of one run. `tables` holds the tables of its kind by name."""

    path: Path
    kind: str
    summary: dict[str, Any]
    config: dict[str, Any]
    environment: dict[str, Any]
    tables: dict[str, Table]
    schemas: tuple[Schema, ...]
    """The schemas of `tables`, with the columns that were read."""
    files: tuple[str, ...]
    """What was written beside the page."""
    given_label: str = ""
    """What distinguishes it from other runs on the same page; empty if it is alone."""

    @property
    def model(self) -> str:
        return str(self.summary.get("model") or self.environment.get("model") or self.path.name)

    @property
    def circumstances(self) -> str:
        """The family, its size, and the tokens that it ran on."""
        tokens = self.summary["tokens"]
        bos = ", BOS first" if tokens["bos"] else ""
        many = "one sequence" if tokens["count"] == 1 else f"{tokens['count']} sequences"
        sequences = f"{many} of {tokens['length']} {tokens['kind']} tokens{bos}"
        num_layers, with_attention = self.summary["num_layers"], self.summary.get("attention_layers")
        layers = f"{num_layers} layers" + (f", {len(with_attention)} with attention" if with_attention else "")
        return f"{self.summary['family']}, {layers}; {sequences}"

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
        """The command that made the run, as it was typed; empty if it was not recorded."""
        return str(self.config.get("command") or self.summary.get("command") or "")

    @property
    def strongest(self) -> int:
        """Position of the strongest sink, or of the strongest key where there is none."""
        return self.summary["dom_ratio"]["position"]

    @cached_property
    def appearance_layers(self) -> list[int]:
        """Layers where disparity appears."""
        return appearance_layers(self.summary)

    @cached_property
    def claims(self) -> dict[str, dict[str, Any]]:
        """The claims of a study by id, in their order; empty for other runs."""
        return {row["id"]: row for row in self.rows("claims")}

    def rows(self, table_name: str, **equal: Any) -> list[dict[str, Any]]:
        """The rows of a table whose columns named in `equal` have these values; none where there is no such table."""
        return rows_where(self.tables[table_name], **equal) if table_name in self.tables else []


def read_run(folder: Path, columns: Mapping[str, Collection[str]] | None = None, *, of: Collection[str] = ()) -> Run:
    """The run in a folder. Tables of another version are refused and, where kinds are named by `of`, every other kind.
    `columns`, by table: only these are read, since those of a long text fill gigabytes."""
    kind = kind_of(folder)
    if kind.load or (of and kind.name not in of):
        expected = " or ".join(kinds()[name].called for name in of or ("study", "trace"))
        raise InputError(
            f"{folder} holds {kind.called}, not {expected}. To see it, write its page with sinkscope report {folder}."
        )
    summary = read_json(folder / "summary.json")
    sizes = _sizes(kind, summary, folder / "summary.json")
    checked(summary, kind.summary, folder / "summary.json", sizes)
    schemas = _schemas(kind, columns, folder)
    tables = {schema.name: _table(folder, schema, sizes) for schema in schemas}
    run = Run(
        path=folder,
        kind=kind.name,
        summary=summary,
        config=_optional(read_yaml, folder / "config.yaml"),
        environment=_optional(read_json, folder / "environment.json"),
        tables=tables,
        schemas=schemas,
        files=tuple(sorted(path.name for path in folder.iterdir() if path.suffix in FILES)),
    )
    if kind.check is not None:
        kind.check(run)
    return run


def _sizes(kind: Kind, summary: Mapping[str, Any], path: Path) -> dict[str, int]:
    """How many layers, tokens and sequences a summary states; `longest` is the longest text."""
    if kind.sized_by is None:
        return {}
    stated = checked(summary, dict[str, Any], path)
    if kind.sized_by:
        stated = stated.get(kind.sized_by)
    sizes = strictly(Sizes, checked(stated, Sizes, path, where=kind.sized_by))
    tokens = sizes.tokens
    return {
        "num_layers": sizes.num_layers,
        "length": tokens.length,
        "count": tokens.count,
        "longest": max([tokens.length, *(tokens.whole or ())]),
    }


def _schemas(kind: Kind, columns: Mapping[str, Collection[str]] | None, folder: Path) -> tuple[Schema, ...]:
    """The tables of a run of this kind that are read, each with the columns that are."""
    # A page can do without what each sequence's own tokens receive.
    schemas = [s for s in kind.schemas if not s.of_texts or (folder / f"{s.name}.parquet").is_file()]
    if columns is None:
        return tuple(schemas)
    selected = []
    for schema in schemas:
        if schema.name in columns:
            names = columns[schema.name]
            selected.append(replace(schema, columns=tuple(c for c in schema.columns if c.name in names)))
    return tuple(selected)


def _table(folder: Path, schema: Schema, sizes: Mapping[str, int]) -> Table:
    """A table whose whole numbers are within the sizes."""
    if schema.can_lack and not (folder / f"{schema.name}.parquet").is_file():
        return {column.name: [] for column in schema.columns}
    if not sizes:
        ranges = NO_RANGES
    else:
        bounds = {**sizes, "length": sizes["longest"]} if schema.of_texts else sizes
        ranges = {
            name: (least, (bounds[end] if isinstance(end, str) else end) - 1) for name, (least, end) in NUMBERED.items()
        }
    table = read_table(folder / schema.name, schema, ranges)
    check_table(schema, table, sizes, folder / f"{schema.name}.parquet")
    return table


def is_run(folder: Path) -> bool:
    """Whether sinkscope wrote this folder."""
    return (folder / "summary.json").is_file() or is_training_run(folder)


def _optional(read: Callable[[Path, Any], Any], path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is no file."""
    return read(path, dict[str, Any]) if path.exists() else {}


def check_table(schema: Schema, table: Table, sizes: Mapping[str, int], path: Path) -> None:
    """Refuses a table with more than a page can show, or in another order than a map is drawn in."""
    num_rows = len(next(iter(table.values())))
    names = {column.name for column in schema.columns if column.type != "float"}
    if schema.is_listed and num_rows > FEW_ROWS:
        raise refused(path, f"it has {num_rows:,} rows, and a page shows at most {FEW_ROWS:,}")
    for column, most in FEW.items():
        if column in names and not schema.of_texts and len(set(table[column])) > most:
            raise refused(path, f"column {column} has more than {most:,} different values")
    if schema.never_empty and not num_rows:
        raise refused(path, "it has no rows")
    for column in schema.columns:
        if column.choices:
            check_known(path, column.name, table, column.choices)
    if schema.ordered_by:
        num_layers = sizes["num_layers"]
        inner = table[schema.ordered_by][: num_rows // num_layers]
        is_whole = {"position": inner == list(range(sizes["length"])), "layer": num_rows == num_layers}
        layers = [layer for layer in range(num_layers) for _ in inner]
        repeats = schema.ordered_by == "layer" or table[schema.ordered_by] == inner * num_layers
        if not is_whole.get(schema.ordered_by, inner) or table["layer"] != layers or not repeats:
            raise refused(path, f"its {num_rows} rows are not those of {num_layers} layers, one after the other")


def check_known(path: Path, column: str, table: Mapping[str, Sequence], known: Iterable[str]) -> None:
    """Refuses a table with another name in a column than the known ones."""
    if unknown := set(table[column]) - set(known):
        raise refused(path, f"column {column} holds the unknown name {min(unknown)!r}")


def appearance_layers(summary: Mapping) -> list[int]:
    """Layers where disparity appears; the embeddings do not count as a layer."""
    return [layer for layer in summary["birth_layers"] if layer >= 0]


def curve_layers(summary: Mapping) -> list[int]:
    """The first layer, and the one where disparity appears, or else the one before the sink; in a hybrid the layers
    with attention that are nearest to these."""
    with_attention = summary.get("attention_layers") or range(summary["num_layers"])
    layers = {0, *(appearance_layers(summary)[:1] or [before_the_sink(summary)])}
    return sorted({min(with_attention, key=lambda near, layer=layer: abs(near - layer)) for layer in layers})


def before_the_sink(summary: Mapping) -> int:
    """The layer before the first with the strongest sink, where it must come from; 0 where there is no sink."""
    return max(0, min((layer for sink in summary["sinks"][:1] for layer in sink.get("layers") or ()), default=0) - 1)
