"""Tidy tables: columns declared once with their meaning, checked when written, read back from either format.

Tables are Parquet. Where pyarrow is not installed they are JSON lines, with the declaration in a file beside them.
Columns stay columns all the way: numbers given as numpy arrays reach Parquet without a Python object per row.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sinkscope.errors import InputError
from sinkscope.results.atomic import whole_file

ColumnType = Literal["int", "float", "bool", "str"]

# A column type as (numpy kinds it accepts, Python types it accepts, numpy dtype it is stored as). An int in a float
# column is widened; nothing else is converted, and bool is not an int.
_ACCEPTED: dict[ColumnType, tuple[str, tuple[type, ...], Any]] = {
    "int": ("iu", (int, np.integer), np.int64),
    "float": ("fiu", (float, int, np.floating, np.integer), np.float64),
    "bool": ("b", (bool, np.bool_), np.bool_),
    "str": ("UT", (str,), object),
}


@dataclass(frozen=True)
class Column:
    """One declared column. `nullable` allows None, and in a float column NaN, which is stored as null."""

    name: str
    type: ColumnType
    meaning: str
    nullable: bool = False


@dataclass(frozen=True)
class Schema:
    """A table's name, which is its file name, and its columns in file order."""

    name: str
    columns: tuple[Column, ...]
    version: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", tuple(self.columns))
        names = [column.name for column in self.columns]
        if len(set(names)) != len(names):
            raise ValueError(f"table {self.name!r} declares a column twice: {names}")
        if not re.fullmatch(r"[A-Za-z0-9_-]+", self.name):
            raise ValueError(f"table name {self.name!r} cannot be a file name")
        if unknown := [column.name for column in self.columns if column.type not in _ACCEPTED]:
            raise ValueError(f"table {self.name!r}: the type of {unknown} is none of {list(_ACCEPTED)}")

    def from_rows(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, list]:
        """The columns that rows with at least their names make."""
        return {column.name: [row[column.name] for row in rows] for column in self.columns}


def write_table(schema: Schema, data: Mapping[str, Sequence | np.ndarray], path_without_suffix: Path) -> Path:
    """The path of the file written: `data` checked against `schema`, as Parquet or, without pyarrow, JSON lines.

    Nulls are None in a sequence, masked entries in a numpy masked array, NaN in a float column.
    Data that does not fit the schema is a programming error: ValueError, before any file is opened.
    """
    checked = _checked(schema, data)
    try:
        import pyarrow
    except ModuleNotFoundError as error:
        if error.name != "pyarrow":
            raise
        return _write_json_lines(schema, checked, path_without_suffix)
    import pyarrow.parquet

    types = {"int": pyarrow.int64(), "float": pyarrow.float64(), "bool": pyarrow.bool_(), "str": pyarrow.string()}
    arrow_schema = pyarrow.schema(
        [
            pyarrow.field(column.name, types[column.type], column.nullable, metadata={"meaning": column.meaning})
            for column in schema.columns
        ],
        metadata={"sinkscope.table": schema.name, "sinkscope.version": str(schema.version)},
    )
    arrays = [
        pyarrow.array(values, types[column.type], mask=nulls)
        for column, (values, nulls) in zip(schema.columns, checked, strict=True)
    ]
    path = path_without_suffix.with_name(path_without_suffix.name + ".parquet")
    table = pyarrow.Table.from_arrays(arrays, schema=arrow_schema)
    with whole_file(path) as partial:
        pyarrow.parquet.write_table(table, partial, compression="zstd")
    return path


def read_table(path: Path, schema: Schema | None = None) -> dict[str, list]:
    """The columns of a table by name, nulls as None; `path` may leave the suffix out.

    With a schema, a table of another version, or one that lacks a declared column, is refused.
    """
    candidates = [path] if path.suffix in (".parquet", ".jsonl") else [Path(f"{path}.parquet"), Path(f"{path}.jsonl")]
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        raise InputError(
            expected=f"a table at {path}", found="no .parquet or .jsonl file", next_step="Give the folder of a run"
        )
    try:
        version, table = _read_json_lines(found) if found.suffix == ".jsonl" else _read_parquet(found)
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # pyarrow's and json's errors are ValueErrors
        raise InputError(
            expected=f"a whole table in {found}", found=f"{error}", next_step="Run the command that wrote it again"
        ) from error
    missing = [column.name for column in schema.columns if column.name not in table] if schema else []
    if schema and (version != schema.version or missing):
        raise InputError(
            expected=f"version {schema.version} of the table in {found}",
            found=f"version {version}" + (f" without {', '.join(missing)}" if missing else ""),
            next_step="Run the command that wrote it again with this version of sinkscope",
        )
    return table


def rows_where(table: Mapping[str, Sequence], **equal: Any) -> list[dict[str, Any]]:
    """The rows of a table, given by columns, whose columns named in `equal` have these values."""
    # Columns are compared before any row is built: tables of long sequences have hundreds of thousands of rows.
    kept = range(len(next(iter(table.values()))))
    for name, value in equal.items():
        column = table[name]
        kept = [index for index in kept if column[index] == value]
    return [{name: column[index] for name, column in table.items()} for index in kept]


Checked = tuple[np.ndarray, np.ndarray | None]


def _checked(schema: Schema, data: Mapping[str, Sequence | np.ndarray]) -> list[Checked]:
    declared = [column.name for column in schema.columns]
    if set(data) != set(declared):
        missing, extra = sorted(set(declared) - set(data)), sorted(set(data) - set(declared))
        raise ValueError(f"table {schema.name!r}: missing columns {missing}, undeclared columns {extra}")
    lengths = {name: len(data[name]) for name in declared}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"table {schema.name!r}: columns of different lengths {lengths}")
    return [_checked_column(f"{schema.name}.{column.name}", column, data[column.name]) for column in schema.columns]


def _checked_column(where: str, column: Column, values: Sequence | np.ndarray) -> Checked:
    """The column as an array of its stored dtype, and where it is null (None: nowhere)."""
    kinds, python_types, dtype = _ACCEPTED[column.type]
    nulls: np.ndarray | None = None
    if isinstance(values, np.ndarray) and values.dtype.kind != "O":
        if values.ndim != 1:
            raise ValueError(f"column {where}: expected one axis, found shape {values.shape}")
        if values.dtype.kind not in kinds:
            raise ValueError(f"column {where}: expected {column.type}, found an array of {values.dtype}")
        if isinstance(values, np.ma.MaskedArray):
            nulls = np.ma.getmaskarray(values)
            values = values.data
        if column.type == "int" and values.dtype == np.uint64 and len(values) and values.max() > np.iinfo(np.int64).max:
            raise ValueError(f"column {where}: {values.max()} does not fit in 64 bits with a sign")
        array = values.astype(dtype, copy=False)
    else:
        items = list(values)
        # A set of types is one pass in C. numpy must not guess: it turns [1, "a"] into strings, [True, 2] into ints.
        found = set(map(type, items))
        wrong = [kind for kind in found - {type(None)} if not _fits(kind, python_types)]
        if wrong:
            raise ValueError(f"column {where}: expected {column.type}, found {sorted(kind.__name__ for kind in wrong)}")
        if type(None) in found:
            nulls = np.fromiter((item is None for item in items), bool, len(items))
            items = [dtype() if item is None else item for item in items] if dtype is not object else items
        # Strings stay objects: a numpy string array drops a NUL at the end of a token, and pads to the longest row.
        array = np.empty(len(items), dtype=dtype)
        try:
            array[:] = items
        except OverflowError as error:
            raise ValueError(f"column {where}: a value does not fit in {array.dtype}") from error
    if column.type == "float":
        not_a_number = np.isnan(array)
        if not_a_number.any():
            nulls = not_a_number if nulls is None else nulls | not_a_number
    if nulls is not None and not nulls.any():
        nulls = None
    if nulls is not None and not column.nullable:
        raise ValueError(f"column {where} is not nullable: found {int(nulls.sum())} empty values of {len(array)}")
    return array, nulls


def _fits(kind: type, accepted: tuple[type, ...]) -> bool:
    return issubclass(kind, accepted) and (kind is not bool or bool in accepted)


def _write_json_lines(schema: Schema, checked: list[Checked], path_without_suffix: Path) -> Path:
    declaration = path_without_suffix.with_name(path_without_suffix.name + ".schema.json")
    declaration.write_text(json.dumps(asdict(schema), ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    keys = [json.dumps(column.name) for column in schema.columns]
    path = path_without_suffix.with_name(path_without_suffix.name + ".jsonl")
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for row in zip(*(_json_cells(values, nulls) for values, nulls in checked), strict=True):
            file.write("{" + ", ".join(f"{key}: {cell}" for key, cell in zip(keys, row, strict=True)) + "}\n")
    return path


def _json_cells(values: np.ndarray, nulls: np.ndarray | None) -> Iterable[str]:
    for item, is_null in zip(values.tolist(), np.zeros(len(values), bool) if nulls is None else nulls, strict=True):
        if is_null:
            yield "null"
        elif isinstance(item, float) and math.isinf(item):
            yield "1e999" if item > 0 else "-1e999"  # JSON has no infinity; every reader rounds this number to it
        else:
            yield json.dumps(item)


def _read_json_lines(path: Path) -> tuple[int, dict[str, list]]:
    # The declaration, not the first row, names the columns: a table without rows has columns too.
    declaration = json.loads(path.with_suffix(".schema.json").read_text(encoding="utf-8"))
    table: dict[str, list] = {column["name"]: [] for column in declaration["columns"]}
    with path.open(encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            for name, values in table.items():
                values.append(row[name])
    return declaration["version"], table


def _read_parquet(path: Path) -> tuple[int | None, dict[str, list]]:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise InputError(
            expected=f"pyarrow, to read {path}", found="no pyarrow installed", next_step="Run: pip install pyarrow"
        ) from error
    table = pyarrow.parquet.read_table(path)
    version = (table.schema.metadata or {}).get(b"sinkscope.version")
    return None if version is None else int(version), {
        name: table.column(name).to_pylist() for name in table.column_names
    }
