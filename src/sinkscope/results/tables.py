"""Tidy tables in Parquet: columns declared once with their meaning, checked when they are written and when read back.

Columns stay columns all the way: numbers given as numpy arrays reach Parquet without a Python object per row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from sinkscope.atomic import whole_file
from sinkscope.errors import InputError
from sinkscope.results.validated import MOST_CHARACTERS, refused

if TYPE_CHECKING:
    import pyarrow

ColumnType = Literal["int", "float", "bool", "str"]

Ranges = Mapping[str, tuple[int, int]]
"""Smallest and largest whole number, by the name of the column."""
NO_RANGES: Ranges = {}
MOST_CELLS = 1 << 28
"""Values of a table that is read: 128k positions of 100 layers."""
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
    choices: tuple[str, ...] = ()
    """The only values that a file may hold; any where none are named."""


@dataclass(frozen=True)
class Schema:
    """A table's name, which is its file name, and its columns in file order."""

    name: str
    columns: tuple[Column, ...]
    version: int = 1
    is_listed: bool = False
    """A page lists all of its rows."""
    never_empty: bool = False
    ordered_by: str = ""
    """The same rows for each layer, layer after layer: the column that numbers these rows."""
    of_texts: bool = False
    """Of each sequence's own tokens, which may be longer than what is read by position. A page can do without it."""
    can_lack: bool = False
    """A folder that an earlier version wrote may lack it; it is then read as empty."""

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


def arrow_table(schema: Schema, data: Mapping[str, Sequence | np.ndarray]) -> pyarrow.Table:
    """`data` checked against `schema`, with the meaning of each column in its metadata.

    Nulls are None in a sequence, masked entries in a numpy masked array, NaN in a float column.
    Data that does not fit the schema is a programming error: ValueError.
    """
    columns, pyarrow = _checked(schema, data), _pyarrow()
    types = _arrow_types(pyarrow)
    arrow_schema = pyarrow.schema(
        [
            pyarrow.field(column.name, types[column.type], column.nullable, metadata={"meaning": column.meaning})
            for column in schema.columns
        ],
        metadata={"sinkscope.table": schema.name, "sinkscope.version": str(schema.version)},
    )
    arrays = [
        pyarrow.array(values, types[column.type], mask=nulls)
        for column, (values, nulls) in zip(schema.columns, columns, strict=True)
    ]
    return pyarrow.Table.from_arrays(arrays, schema=arrow_schema)


def write_table(schema: Schema, data: Mapping[str, Sequence | np.ndarray], path_without_suffix: Path) -> Path:
    """The path of the Parquet file written; data that does not fit is refused before any file is opened."""
    table = arrow_table(schema, data)
    path = path_without_suffix.with_name(path_without_suffix.name + ".parquet")
    with whole_file(path) as partial:
        _pyarrow().parquet.write_table(table, partial, compression="zstd")
    return path


def read_table(path: Path, schema: Schema | None = None, ranges: Ranges = NO_RANGES) -> dict[str, list]:
    """The columns of a table by name, nulls as None; `path` may leave the suffix out.

    With a schema only its columns are read. A nullable column that is not there is empty. A table of another version is
    refused, as is one that lacks another column or holds values that the schema does not allow. `ranges` bounds whole
    numbers by the name of their column.
    """
    file = path if path.suffix == ".parquet" else Path(f"{path}.parquet")
    if not file.is_file():
        raise InputError(f"There is no table {file}. Give the folder of a run.")
    version, table = _read_parquet(file, schema)
    if schema is None:
        return table
    missing = [column.name for column in schema.columns if column.name not in table]
    if version != schema.version or missing:
        lacking = f" and lacks {', '.join(missing)}" if missing else ""
        raise InputError(
            f"The table {file} has version {version}{lacking}; this sinkscope reads version {schema.version}. "
            "Run the command that wrote it again with this version."
        )
    table = {column.name: table[column.name] for column in schema.columns}
    try:
        for (name, values), (array, nulls) in zip(table.items(), _checked(schema, table), strict=True):
            if array.dtype == object:
                _check_texts(name, values)
            elif array.dtype == np.int64 and name in ranges:
                _check_range(name, array if nulls is None else array[~nulls], *ranges[name])
            elif nulls is not None:
                table[name] = [None if is_null else value for value, is_null in zip(values, nulls, strict=True)]
    except ValueError as error:
        raise refused(file, str(error)) from error
    return table


def rows_where(table: Mapping[str, Sequence], **equal: Any) -> list[dict[str, Any]]:
    """The rows of a table, given by columns, whose columns named in `equal` have these values."""
    # Columns are compared before any row is built: tables of long sequences have hundreds of thousands of rows.
    rows = range(len(next(iter(table.values()))))
    for name, value in equal.items():
        column = table[name]
        rows = [index for index in rows if column[index] == value]
    return [{name: column[index] for name, column in table.items()} for index in rows]


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
            raise ValueError(f"column {where} has the shape {values.shape}, not one axis")
        if values.dtype.kind not in kinds:
            raise ValueError(f"column {where} is an array of {values.dtype}, not of {column.type}")
        if isinstance(values, np.ma.MaskedArray):
            nulls = np.ma.getmaskarray(values)
            values = values.data
        if column.type == "int" and values.dtype == np.uint64 and len(values) and values.max() > np.iinfo(np.int64).max:
            raise ValueError(f"column {where}: {values.max()} does not fit in 64 bits with a sign")
        array = values.astype(dtype, copy=False)
    else:
        items = list(values)
        # A set of types is one pass in C. numpy must not guess: it turns [1, "a"] into strings, [True, 2] into ints.
        types = set(map(type, items))
        wrong = [kind for kind in types - {type(None)} if not _fits(kind, python_types)]
        if wrong:
            names = ", ".join(sorted(kind.__name__ for kind in wrong))
            raise ValueError(f"column {where} holds values of type {names}, not {column.type}")
        if type(None) in types:
            nulls = np.fromiter((item is None for item in items), bool, len(items))
            if dtype is not object:
                items = [dtype() if item is None else item for item in items]
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
        raise ValueError(f"column {where} is not nullable, but {int(nulls.sum())} of its {len(array)} values are empty")
    return array, nulls


def _fits(kind: type, accepted: tuple[type, ...]) -> bool:
    return issubclass(kind, accepted) and (kind is not bool or bool in accepted)


def _check_texts(name: str, values: Sequence[str | None]) -> None:
    longest = max((len(value) for value in set(values) if value is not None), default=0)
    if longest > MOST_CHARACTERS:
        raise ValueError(f"column {name} has a text of {longest:,} characters; at most {MOST_CHARACTERS:,} are read")


def _check_range(name: str, values: np.ndarray, least: int, most: int) -> None:
    if len(values) and not (least <= values.min() and values.max() <= most):
        ends = f"{values.min()} to {values.max()}"
        raise ValueError(f"column {name} holds numbers from {ends}, and only {least} to {most} are possible")


def _read_parquet(path: Path, schema: Schema | None) -> tuple[int | None, dict[str, list]]:
    pyarrow = _pyarrow()
    try:
        stored_names = set(pyarrow.parquet.read_schema(path).names)
        columns = [column for column in schema.columns if column.name in stored_names] if schema else []
        texts = [column.name for column in columns if column.type == "str"]
        with pyarrow.parquet.ParquetFile(path, read_dictionary=texts) as file:
            arrow, names = file.schema_arrow, file.schema_arrow.names
            if schema:
                # Other types are not read: a list in one row may be as long as it likes.
                declared = {column.name: _arrow_types(pyarrow)[column.type] for column in columns}
                names = list(declared)
                for name in names:
                    stored = arrow.field(name).type
                    value_type = stored.value_type if pyarrow.types.is_dictionary(stored) else stored
                    if value_type != declared[name]:
                        raise ValueError(f"column {name} is of type {stored}, not {declared[name]}")
            # The footer says how much there is: a column of one value takes a few bytes for any number of rows.
            num_rows = file.metadata.num_rows
            if (cells := num_rows * len(schema.columns if schema else names)) > MOST_CELLS:
                raise ValueError(f"it has {cells:,} values, and at most {MOST_CELLS:,} are read")
            table = file.read(columns=names)
            version = (arrow.metadata or {}).get(b"sinkscope.version")
        values = {name: _listed(table.column(name)) for name in names}
        for column in schema.columns if schema else ():
            if column.nullable:  # one that was declared after the run was saved
                values.setdefault(column.name, [None] * num_rows)
        return None if version is None else int(version), values
    except (pyarrow.ArrowException, ValueError, OSError, KeyError) as error:
        raise refused(path, str(error)) from error


def _pyarrow() -> Any:
    """The package, imported when a table is first written or read, so that `sinkscope --help` does not wait for it."""
    try:
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise InputError("Tables need pyarrow, which is not installed. Run: pip install pyarrow.") from error
    return pyarrow


def _arrow_types(pyarrow: Any) -> dict[ColumnType, Any]:
    return {"int": pyarrow.int64(), "float": pyarrow.float64(), "bool": pyarrow.bool_(), "str": pyarrow.string()}


def _listed(column: Any) -> list:
    """A column of Arrow as Python objects; equal texts share one object, so that a long one is held once."""
    if not _pyarrow().types.is_dictionary(column.type):
        return column.to_pylist()
    listed: list = []
    for chunk in column.chunks:
        values = [*chunk.dictionary.to_pylist(), None]
        listed += [values[-1 if index is None else index] for index in chunk.indices.to_pylist()]
    return listed
