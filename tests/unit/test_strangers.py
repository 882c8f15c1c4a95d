"""Whatever stands in a file that somebody gave, it is read or refused with its path: no traceback, no hang, no page."""

import dataclasses
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import pyarrow
import pyarrow.parquet
import pytest
import small_results as small
import torch
import yaml
from pydantic import BaseModel
from study_tables import write_study_folder
from training_folders import write_training_folder

import sinkscope
from sinkscope.compare.page import compare
from sinkscope.errors import InputError
from sinkscope.fingerprints.signature import Inputs, Signature, load_signature
from sinkscope.initial_bias.schemas import BIAS_TABLES, QUANTITIES
from sinkscope.models.initial import draw
from sinkscope.pages import html
from sinkscope.pretrain.presets import resolve
from sinkscope.results import tables
from sinkscope.results.kinds import below
from sinkscope.results.run_folder import run_folder
from sinkscope.results.saved import write_page_of_run
from sinkscope.results.tables import Column, Schema, read_table, write_table
from sinkscope.results.validated import (
    Name,
    UnusableFileError,
    Whole,
    check_safetensors,
    checked,
    read_json,
    read_yaml,
)

LINK = '<a href="http://example.org">name</a>\x1b[31m'
HOSTILE = (
    *(
        None,
        True,
        "",
        LINK,
        "x" * 100_000,
        "\ud800",
        -1,
        0,
        10**9,
        2**63,
        -(10**30),
        1e308,
        -1e308,
        1e-320,
        float("nan"),
    ),
    *(float("inf"), [], {}, [[]], [None], {"a": 1}, [LINK] * 3, json.loads("[" * 40 + "]" * 40), "2001-01-01"),
)
BYTES = (
    b"",
    b"\x00" * 64,
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"a":' * 5_000,
    b"NaN",
    b"9" * 5_000,
    b"{}",
    b"[]",
    b"null",
    b'""',
)


def flipped(choose: random.Random, content: bytes) -> bytes:
    """The content cut off, with bits flipped, with zeros in it, or another one."""
    if not content or choose.random() < 0.15:
        return choose.choice(BYTES)
    if choose.random() < 0.3:
        return content[: choose.randrange(len(content))]
    spoiled = bytearray(content)
    for _ in range(choose.choice((1, 3, 30))):
        spoiled[choose.randrange(len(spoiled))] ^= 1 << choose.randrange(8)
    if choose.random() < 0.2:
        start = choose.randrange(len(spoiled))
        spoiled[start : start + 16] = bytes(16)
    return bytes(spoiled)


def replaced(choose: random.Random, value):
    """A document with one of its values replaced or taken away."""
    value = json.loads(json.dumps(value))
    place, inside = None, {"": value}
    key = ""
    while isinstance(inside[key], dict | list) and inside[key] and (place is None or choose.random() < 0.7):
        place, inside = inside, inside[key]
        key = choose.choice(list(inside)) if isinstance(inside, dict) else choose.randrange(len(inside))
    if choose.random() < 0.2:
        del inside[key]
    else:
        inside[key] = choose.choice(HOSTILE)
    return value


def spoil_document(choose: random.Random, path: Path) -> None:
    if path.suffix == ".yaml":
        value = replaced(choose, yaml.safe_load(path.read_text()))
        path.write_text(yaml.safe_dump(value), errors="replace")
    elif path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        index = choose.randrange(len(rows))
        rows[index] = replaced(choose, rows[index])
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.write_text(json.dumps(replaced(choose, json.loads(path.read_text()))))


def spoil_table(choose: random.Random, path: Path) -> None:
    """Another value, type or number of rows in a table that is whole Parquet."""
    table = pyarrow.parquet.read_table(path)
    metadata, index = table.schema.metadata, choose.randrange(table.num_columns)
    name, column = table.column_names[index], table.column(index).to_pylist()
    what = choose.choice(("value", "value", "value", "type", "rows", "none"))
    if what == "rows":
        kept = [row for row in range(table.num_rows) if choose.random() < 0.9]
        choose.shuffle(kept)
        table = table.take(kept or pyarrow.array([], pyarrow.int64()))
    elif what == "none":
        table = table.slice(0, 0)
    else:
        wanted = table.schema.field(index).type
        hostile = [None, -1, 10**9, 2**62, float("nan"), float("inf"), -1e308, 1e-320, LINK, "a", "b" * 70_000, True]
        fitting = [value for value in hostile if _is(value, wanted)] or [None]
        for _ in range(choose.choice((1, 1, len(column)))):
            if column:
                column[choose.randrange(len(column))] = choose.choice(fitting)
        if what == "type":
            wanted = choose.choice(
                (pyarrow.string(), pyarrow.float64(), pyarrow.int64(), pyarrow.list_(pyarrow.int64()))
            )
            column = [None if wanted != pyarrow.string() or value is None else str(value) for value in column]
        field = pyarrow.field(name, wanted)
        table = table.set_column(index, field, pyarrow.array(column, wanted))
    pyarrow.parquet.write_table(table.replace_schema_metadata(metadata), path)


def _is(value, arrow_type) -> bool:
    try:
        pyarrow.array([value], arrow_type)
    except (pyarrow.ArrowException, OverflowError):
        return False
    return True


def mutate(choose: random.Random, folder: Path) -> str:
    """Spoils one file of a folder; returns its name."""
    files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".yaml", ".jsonl", ".parquet"))
    path = choose.choice(files)
    if choose.random() < 0.1:
        shutil.copy(choose.choice(files), path.with_suffix(".copy"))
        path.with_suffix(".copy").replace(path)
    elif choose.random() < 0.4:
        path.write_bytes(flipped(choose, path.read_bytes()))
    elif path.suffix == ".parquet":
        spoil_table(choose, path)
    else:
        spoil_document(choose, path)
    return path.name


def write_bias_folder(path: Path) -> Path:
    """A folder as `sinkscope bias` writes it, of two layers and three positions."""
    rows = {
        "bias": [{"quantity": name, "over": "seeds"} for name in QUANTITIES],
        "preferred_tokens": [{"rank": rank, "token": rank, "text": "a"} for rank in range(3)],
        "contraction": [{"layer": -1, "part": "embeddings"}]
        + [{"layer": layer, "part": part} for layer in range(2) for part in ("attention", "feed_forward")],
        "contraction_positions": [{"layer": layer, "position": p} for layer in (-1, 0, 1) for p in range(3)],
        "controls": [{"control": "no_attention", "quantity": name, "over": "seeds"} for name in QUANTITIES],
        "persistence": [{"checkpoint": f"step-{step}", "step": step} for step in (0, 10)],
    }
    with run_folder(path) as folder:
        tokens = {"kind": "random", "length": 3, "count": 32, "bos": False}
        summary = {"model": "planted", "family": "llama", "num_layers": 2, "tokens": tokens, "story": "It prefers."}
        folder.write_json("summary.json", summary | {"controls": {"no_attention": {}, "other": {"refused": "no"}}})
        folder.write_yaml("config.yaml", {"model": "planted"})
        folder.write_json("environment.json", {"torch": "2.13.0"})
        for schema in BIAS_TABLES:
            filled = [
                {column.name: row.get(column.name, _plain(column)) for column in schema.columns}
                for row in rows[schema.name]
            ]
            folder.write_table(schema, schema.from_rows(filled))
    return path


def _plain(column: Column):
    return {"int": 1, "float": 0.5, "bool": True, "str": "a"}[column.type]


def study(folder: Path, page: Path) -> None:
    write_page_of_run(folder, page)


def comparison(folder: Path, page: Path) -> None:
    compare([str(folder), str(folder.parent / "other")], page, run_of=Path)


def bias(folder: Path, page: Path) -> None:
    write_page_of_run(folder, page)


def audited(folder: Path, page: Path) -> None:
    sinkscope.load_result(folder).report(page)


def remedied(folder: Path, page: Path) -> None:
    sinkscope.load_result(folder).report(page)


def intervened(folder: Path, page: Path) -> None:
    sinkscope.load_result(folder).report(page)


def fingerprinted(folder: Path, page: Path) -> None:
    sinkscope.load_result(folder).report(page)


def compared(folder: Path, page: Path) -> None:
    sinkscope.load_result(folder).report(page)


def write_remedied(path: Path) -> Path:
    """Its result alone: the model beside it is not read."""
    with run_folder(path) as folder:
        sinkscope.Result.write(small.remedied(), folder)
    return path


def write_comparison(path: Path) -> Path:
    with tempfile.TemporaryDirectory() as runs:
        return sinkscope.compare_training(small.planted_runs(Path(runs))).save(path)


READERS = {
    study: (write_study_folder, 60),
    bias: (write_bias_folder, 60),
    comparison: (write_training_folder, 40),
    audited: (lambda path: small.audited().save(path), 60),
    remedied: (write_remedied, 60),
    intervened: (lambda path: small.intervened_chain().save(path), 60),
    fingerprinted: (lambda path: small.fingerprinted().save(path), 60),
    compared: (write_comparison, 60),
}


@pytest.mark.parametrize("read", READERS)
def test_a_run_folder_is_read_or_refused(tmp_path, monkeypatch, read: Callable[[Path, Path], None]):
    monkeypatch.setattr(html, "_asset", lambda name: "")  # megabytes that no folder changes
    write, times = READERS[read]
    whole, page, choose = write(tmp_path / "whole"), tmp_path / "page.html", random.Random(15)
    if read is comparison:
        write_training_folder(tmp_path / "other", variant="gate")
    read(whole, page)  # the control: an unspoiled folder makes a page
    told = []
    for _ in range(times):
        with tempfile.TemporaryDirectory(dir=tmp_path) as kept:
            folder = Path(kept) / "run"
            shutil.copytree(whole, folder)
            if read is comparison:
                (Path(kept) / "other").symlink_to(tmp_path / "other")
            mutate(choose, folder)
            made = Path(kept) / "page.html"
            try:
                read(folder, made)
            except InputError as error:
                told.append(str(error))
                assert not made.exists()
            else:
                assert "\\u003ca href" not in made.read_text(encoding="utf-8"), "a link in a figure"
    assert times / 4 < len(told) < times
    assert max(map(len, told)) < 1000


@pytest.fixture(scope="module")
def signature() -> Signature:
    """One that no model made."""
    states = torch.randn(64, 24, generator=torch.Generator().manual_seed(0))
    inputs = Inputs(vocabulary=50, length=4, num_sequences=64)
    known = {"name": "planted", "inputs": inputs, "inputs_hash": inputs.hash, "weight_hash": "0", "dtype": "float32"}
    return Signature(states=states, embeddings=-states, vocabulary=50, config={"model_type": "llama"}, **known)


def test_a_signature_is_read_or_refused(tmp_path, signature):
    path, choose, told = tmp_path / "one.safetensors", random.Random(15), []
    signature.save(path)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for _ in range(300):
        if choose.random() < 0.4:
            path.write_bytes(flipped(choose, content))
        else:
            spoiled = json.loads(json.dumps(header))
            if choose.random() < 0.5:
                record = json.loads(spoiled["__metadata__"]["sinkscope.signature"])
                spoiled["__metadata__"]["sinkscope.signature"] = json.dumps(replaced(choose, record))
            else:
                spoiled = replaced(choose, spoiled)
            text = json.dumps(spoiled).encode()
            path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
        try:
            load_signature(path)
        except InputError as error:
            told.append(str(error))
    assert 100 < len(told) < 300
    assert all(str(path) in text for text in told)


RECIPE = {"preset": "tiny", "model": {"num_hidden_layers": 2, "hidden_size": 64}, "training": {"steps": 3, "seed": 1}}


def test_a_recipe_is_read_or_refused(tmp_path):
    path, choose, refused = tmp_path / "recipe.yaml", random.Random(15), 0
    for _ in range(150):
        content = yaml.safe_dump(RECIPE).encode()
        if choose.random() < 0.5:
            path.write_bytes(flipped(choose, content))
        else:
            path.write_text(yaml.safe_dump(replaced(choose, RECIPE)), errors="replace")
        try:
            resolve(str(path), data=["text"], training={})
        except InputError:
            refused += 1
    assert 50 < refused < 150


BOMB = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefg", "bcdefgh", strict=True))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "line 2 has an alias or a tag"),
        ("a: !!python/object/apply:os.system [ls]", "an alias or a tag"),
        ("a: 1\nb: {c: 1, d: 2, c: 3}", "c stands twice, from line 2 on"),
        ("[" * 100_000, "nested more than 32 deep"),
        ("a: " + "9" * 6_000, "4300 digits"),
        ("a: 0x" + "f" * 1_000, "more than 64 bits"),
        ("a: .inf", "a number of at most"),
        ("1: 2", "a name in it is 1, not text"),
        ("a: " + "x" * 70_000, "65,536 characters"),
        ("x" * (1 << 18), "65,536 characters"),
        ("- x\n" * 70_000, "more than 262,144 bytes"),
    ],
)
def test_yaml_within_bounds(tmp_path, text, message):
    path = tmp_path / "config.yaml"
    path.write_text("when: 2001-01-01\nat: 10:20\n")
    assert read_yaml(path) == {"when": "2001-01-01", "at": 620}
    path.write_text(text)
    with pytest.raises(InputError, match=f"Cannot use {path}: .*{message}"):
        read_yaml(path)


class Item(BaseModel):
    position: Annotated[Whole, below("length")]
    rate: float | None = None


class Document(BaseModel):
    model: Name
    bos: bool
    items: list[Item]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": 3}, "model must be text, not 3."),
        ({"model": "x" * 5000}, "model must be text of at most 4096 characters, not 'xxx"),
        ({"bos": 1}, "bos must be true or false, not 1."),
        ({"items": {"position": 1}}, "items must be a list, not a dict of 1."),
        ({"items": [{"position": 1}, {}]}, "items[1] has no key 'position'."),
        ({"items": [[]]}, "items[0] must be an object with names, not a list of 0."),
        ({"items": [{"position": True}]}, "items[0].position must be a whole number, not True."),
        ({"items": [{"position": 2.0}]}, "items[0].position must be a whole number, not 2.0."),
        ({"items": [{"position": -1}]}, "items[0].position must be at least 0, not -1."),
        ({"items": [{"position": 8}]}, "items[0].position must be below 8, not 8."),
        ({"items": [{"position": 1, "rate": "1"}]}, "items[0].rate must be a number, not '1'."),
        ({"items": [{"position": 1, "rate": False}]}, "items[0].rate must be a number, not False."),
        ({"items": [0] * (1 << 20)}, "it has more than 1,048,576 values."),
    ],
)
def test_what_is_not_as_declared_is_named(tmp_path, changes, message):
    whole = {"model": "planted", "bos": False, "items": [{"position": 7, "rate": 1}], "more": {"a": [None]}}
    assert checked(whole, Document, tmp_path, {"length": 8}) == whole
    with pytest.raises(UnusableFileError) as error:
        checked(whole | changes, Document, tmp_path, {"length": 8}, where="line 3")
    assert str(error.value).startswith(f"Cannot use {tmp_path}: line 3: {message[:-1]}")
    with pytest.raises(UnusableFileError, match=r"it must be an object with names, not None"):
        checked(None, Document, tmp_path)


def test_what_is_no_plain_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "endless").symlink_to("/dev/zero")
    for path in (*(tmp_path / name for name in ("pipe", "loop", "endless", "none", "x" * 300, "a\0b")), tmp_path):
        for read in (read_json, read_yaml, check_safetensors):
            with pytest.raises(UnusableFileError, match="Cannot use"):
                read(path)


@pytest.mark.parametrize("claimed", [{"hidden_size": 1 << 20}, {"vocab_size": 10**12}, {"num_hidden_layers": 10**9}])
def test_a_signature_that_claims_a_model_which_no_machine_holds(signature, claimed):
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {"model_type": "llama", **small, "vocab_size": 50, **claimed}
    with pytest.raises(InputError, match=r"this machine has .* GB of memory|more than 4096 layers"):
        draw(dataclasses.replace(signature, config=config).configuration(), 0)


def test_a_table_with_more_values_than_can_be_read(tmp_path, monkeypatch):
    schema = Schema("heads", (Column("head", "int", "index of the head"),))
    path = write_table(schema, {"head": [0, 7, 7]}, tmp_path / "heads")
    assert read_table(path, schema, {"head": (0, 7)}) == {"head": [0, 7, 7]}
    for least, most in ((1, 7), (0, 6)):
        with pytest.raises(InputError, match=f"{path}: column head .* 0 to 7, .*only {least} to {most}"):
            read_table(path, schema, {"head": (least, most)})
    monkeypatch.setattr(tables, "MOST_CELLS", 2)
    with pytest.raises(InputError, match="3 values, and at most 2 are read"):
        read_table(path, schema)
