"""Tables: what is written is what was declared, and reads back the same."""

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkscope.errors import InputError
from sinkscope.results import tables
from sinkscope.results.tables import Column, Schema, read_table, write_table

SCHEMA = Schema(
    "heads",
    (
        Column("layer", "int", "index of the layer"),
        Column("expert", "int", "index of the expert; null in a dense layer", nullable=True),
        Column("rate", "float", "share of sequences", nullable=True),
        Column("is_sink", "bool", "whether it is a sink"),
        Column("token", "str", "text of the token"),
    ),
)
DATA = {
    "token": ["a", "é\x00", '"\n', ""],
    "layer": [0, 1, 2, 3],
    "expert": [None, 7, None, 2**62],
    "rate": [0.1, float("nan"), None, float("-inf")],
    "is_sink": [True, False, True, False],
}
EXPECTED = DATA | {"rate": [0.1, None, None, float("-inf")]}
ONE_FLOAT = Schema("t", (Column("x", "float", "a number"),))


def test_reads_back_what_was_written(tmp_path):
    path = write_table(SCHEMA, DATA, tmp_path / "heads")
    assert path == tmp_path / "heads.parquet"
    for where in (path, tmp_path / "heads"):
        table = read_table(where)
        assert table == EXPECTED
        assert list(table) == [column.name for column in SCHEMA.columns]  # declared order, not the order given
    # Control: the comparison sees one changed cell.
    write_table(SCHEMA, DATA | {"layer": [0, 1, 2, 4]}, tmp_path / "heads")
    assert read_table(path) != EXPECTED


def test_numpy_columns(tmp_path):
    data = {
        "layer": np.arange(3, dtype=np.int32),
        "expert": np.ma.masked_array(np.arange(3, dtype=np.uint8), [False, True, False]),
        "rate": np.array([0.5, np.nan, 2.0], dtype=np.float32),
        "is_sink": np.array([True, False, True]),
        "token": np.array(["a", "bc", "d"]),
    }
    expected = {
        "layer": [0, 1, 2],
        "expert": [0, None, 2],
        "rate": [0.5, None, 2.0],
        "is_sink": [True, False, True],
        "token": ["a", "bc", "d"],
    }
    assert read_table(write_table(SCHEMA, data, tmp_path / "heads")) == expected
    as_objects = {name: np.array(values, dtype=object) for name, values in expected.items()}
    assert read_table(write_table(SCHEMA, as_objects, tmp_path / "heads")) == expected


def test_a_table_without_rows_keeps_its_columns(tmp_path):
    path = write_table(SCHEMA, {column.name: [] for column in SCHEMA.columns}, tmp_path / "heads")
    assert read_table(path) == {column.name: [] for column in SCHEMA.columns}


def test_parquet_carries_the_declaration(tmp_path):
    import pyarrow
    import pyarrow.parquet

    path = write_table(SCHEMA, DATA, tmp_path / "heads")
    schema = pyarrow.parquet.read_schema(path)
    assert schema.metadata[b"sinkscope.table"] == b"heads"
    assert schema.metadata[b"sinkscope.version"] == b"1"
    assert [field.metadata[b"meaning"].decode() for field in schema] == [column.meaning for column in SCHEMA.columns]
    assert [field.nullable for field in schema] == [False, True, True, False, False]
    assert [str(field.type) for field in schema] == ["int64", "int64", "double", "bool", "string"]
    assert pyarrow.parquet.ParquetFile(path).metadata.row_group(0).column(0).compression == "ZSTD"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": [1, 2, 3, 4]}, r"undeclared columns \['extra'\]"),
        ({"token": None}, r"missing columns \['token'\]"),
        ({"layer": [0, 1, 2]}, "different lengths .*'layer': 3"),
        ({"layer": [0, 1, 2, None]}, "heads.layer is not nullable, but 1 of its 4 values are empty"),
        ({"is_sink": [True, False, None, None]}, "heads.is_sink is not nullable, but 2 of its"),
        ({"token": ["a", "b", None, "d"]}, "heads.token is not nullable"),
        ({"layer": np.ma.masked_array([0, 1, 2, 3], [0, 0, 0, 1])}, "heads.layer is not nullable"),
        ({"layer": [0, 1, 2, 3.0]}, "heads.layer holds values of type float, not int"),
        ({"layer": [0, 1, 2, True]}, "heads.layer holds values of type bool, not int"),
        ({"layer": [0, 1, 2, "3"]}, "heads.layer holds values of type str, not int"),
        ({"rate": [0.1, "x", 0.2, 0.3]}, "heads.rate holds values of type str, not float"),
        ({"rate": [0.1, False, 0.2, 0.3]}, "heads.rate holds values of type bool, not float"),
        ({"is_sink": [1, 0, 1, 0]}, "heads.is_sink holds values of type int, not bool"),
        ({"token": ["a", "b", "c", 4]}, "heads.token holds values of type int, not str"),
        ({"token": [b"a", "b", "c", "d"]}, "heads.token holds values of type bytes, not str"),
        ({"layer": np.arange(4.0)}, "heads.layer is an array of float64, not of int"),
        ({"layer": np.ones(4, bool)}, "heads.layer is an array of bool, not of int"),
        ({"rate": np.ones((4, 2))}, r"heads.rate has the shape \(4, 2\), not one axis"),
        ({"layer": [0, 1, 2, 2**63]}, "heads.layer: a value does not fit"),
        ({"layer": np.full(4, 2**63, np.uint64)}, "heads.layer: .* does not fit"),
    ],
)
def test_refuses_what_was_not_declared(tmp_path, change, message):
    data = {name: values for name, values in (DATA | change).items() if values is not None}
    with pytest.raises(ValueError, match=message):
        write_table(SCHEMA, data, tmp_path / "heads")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("values", [[1.0, None], [1.0, float("nan")], np.array([1.0, np.nan])])
def test_a_column_of_numbers_has_no_holes_unless_declared(tmp_path, values):
    with pytest.raises(ValueError, match=r"t\.x is not nullable, but 1 of its"):
        write_table(ONE_FLOAT, {"x": values}, tmp_path / "t")
    # Control: the same values where null is declared.
    nullable = Schema("t", (Column("x", "float", "a number", nullable=True),))
    assert read_table(write_table(nullable, {"x": values}, tmp_path / "t")) == {"x": [1.0, None]}


def test_an_int_in_a_float_column_is_widened(tmp_path):
    for values in ([1, 2.5], np.array([1, 2])):
        table = read_table(write_table(ONE_FLOAT, {"x": values}, tmp_path / "t"))
        assert all(type(value) is float for value in table["x"])


def test_bad_declarations():
    with pytest.raises(ValueError, match="twice"):
        Schema("t", (Column("x", "int", ""), Column("x", "float", "")))
    with pytest.raises(ValueError, match="none of"):
        Schema("t", (Column("x", "complex", ""),))  # type: ignore[arg-type]
    for name in ("", "a/b", "..", "a.parquet"):
        with pytest.raises(ValueError, match="file name"):
            Schema(name, ())


def test_reading_what_is_not_there_or_not_whole(tmp_path):
    with pytest.raises(InputError, match=r"There is no table .*heads\.parquet"):
        read_table(tmp_path / "heads")
    path = write_table(SCHEMA, DATA, tmp_path / "heads")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"Cannot use .*heads\.parquet: .*Run the command that wrote it again"):
        read_table(path)


def test_reading_parquet_without_pyarrow(tmp_path, monkeypatch):
    path = write_table(SCHEMA, DATA, tmp_path / "heads")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match="pip install pyarrow"):
        read_table(path)


@settings(max_examples=40)
@given(
    rows=st.lists(
        st.tuples(
            st.integers(-(2**63), 2**63 - 1),
            st.none() | st.integers(-(2**63), 2**63 - 1),
            st.none() | st.floats(allow_nan=False),
            st.booleans(),
            st.text(st.characters(exclude_categories=["Cs"])),
        ),
        max_size=5,
    ),
)
def test_any_table_survives(tmp_path_factory, rows):
    columns = [column.name for column in SCHEMA.columns]
    data = {name: [row[index] for row in rows] for index, name in enumerate(columns)}
    assert read_table(write_table(SCHEMA, data, tmp_path_factory.mktemp("t") / "heads"), SCHEMA) == data


def test_a_table_of_another_version_or_without_a_column_is_refused(tmp_path):
    path = write_table(SCHEMA, DATA, tmp_path / "heads")
    newer = Schema("heads", SCHEMA.columns, version=2)
    wider = Schema("heads", (*SCHEMA.columns, Column("entropy", "float", "of the head")))
    assert read_table(path, SCHEMA) == EXPECTED
    with pytest.raises(InputError, match=r"heads\.parquet has version 1; this sinkscope reads version 2"):
        read_table(path, newer)
    with pytest.raises(InputError, match="version 1 and lacks entropy"):
        read_table(path, wider)


def test_a_nullable_column_that_is_declared_later_is_empty_in_older_tables(tmp_path, monkeypatch):
    path = write_table(SCHEMA, DATA, tmp_path / "heads")
    added = [Column(kind, kind, "declared later", nullable=True) for kind in ("int", "float", "bool", "str")]
    wider = Schema("heads", (added[0], *SCHEMA.columns, *added[1:]))
    table = read_table(path, wider, {"int": (0, 3)})
    assert table == EXPECTED | {column.name: [None] * 4 for column in added}
    assert list(table) == [column.name for column in wider.columns]
    assert read_table(path, Schema("heads", tuple(added))) == {column.name: [None] * 4 for column in added}
    # What is not in the file counts too: its rows are as many as the file says.
    monkeypatch.setattr(tables, "MOST_CELLS", 4 * len(wider.columns) - 1)
    with pytest.raises(InputError, match="36 values, and at most 35 are read"):
        read_table(path, wider)
