"""A folder is read as what it is, or refused with what to do."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest
import small_results as small
from study_tables import write_study_folder, write_trace_folder
from training_folders import write_training_folder

from sinkscope.compare.page import compare, write_comparison_page
from sinkscope.errors import InputError
from sinkscope.pages.text import isolated
from sinkscope.results.run import read_run
from sinkscope.results.run_folder import is_training_run
from sinkscope.results.saved import write_page_of_run
from sinkscope.studies.claims import CLAIMS


@pytest.fixture
def study(tmp_path):
    return write_study_folder(tmp_path / "study")


def test_kinds(study, tmp_path):
    assert read_run(study).kind == "study"
    assert read_run(write_trace_folder(tmp_path / "trace")).kind == "trace"


def test_a_study_without_token_texts(tmp_path):
    assert "tokens" not in read_run(write_study_folder(tmp_path / "study", tokens=None)).tables


def other_version(folder):
    path = folder / "claims.parquet"
    table = pyarrow.parquet.read_table(path)
    metadata = table.schema.metadata | {b"sinkscope.version": b"99"}
    pyarrow.parquet.write_table(table.replace_schema_metadata(metadata), path)


def missing_column(folder):
    path = folder / "rates.parquet"
    table = pyarrow.parquet.read_table(path)
    pyarrow.parquet.write_table(table.drop_columns(["low"]), path)


def missing_table(folder):
    (folder / "layers.parquet").unlink()


def cut_table(folder):
    path = folder / "positions.parquet"
    path.write_bytes(path.read_bytes()[:-100])


def broken_summary(folder):
    (folder / "summary.json").write_text('{"model": ')


def other_summary(folder):
    (folder / "summary.json").write_text("[1]")


def broken_config(folder):
    (folder / "config.yaml").write_text("a: [")


REFUSED = {
    other_version: "version 99",
    missing_column: "lacks low",
    missing_table: "layers",
    cut_table: "positions",
    broken_summary: "summary.json",
    other_summary: "it must be an object with names, not a list of 1",
    broken_config: "config.yaml",
}


def test_a_run_that_was_saved_before_a_nullable_column_was_declared_has_a_page(study, tmp_path):
    path = study / "sinks.parquet"
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(path).drop_columns(["low", "high"]), path)
    assert set(read_run(study).tables["sinks"]["low"]) == {None}
    write_page_of_run(study, tmp_path / "page.html")
    assert (tmp_path / "page.html").is_file()


@pytest.mark.parametrize(("damage", "message"), REFUSED.items(), ids=lambda value: getattr(value, "__name__", None))
def test_damaged_runs_are_refused_and_nothing_is_written(study, tmp_path, damage, message):
    damage(study)
    with pytest.raises(InputError, match=message):
        write_page_of_run(study, tmp_path / "page.html")
    assert {path.name for path in tmp_path.iterdir()} == {"study"}


def test_the_page_of_a_study_needs_no_torch(study, tmp_path):
    """A user waits seconds for torch alone. The control: a page of training, which asks for it, cannot be written."""
    trained = write_training_folder(tmp_path / "trained")
    code = """
import sys
from pathlib import Path

sys.modules["torch"] = None  # importing it fails
from sinkscope.results.saved import write_page_of_run

for number, folder in enumerate(sys.argv[1:]):
    write_page_of_run(folder, Path(folder).parent / f"page-{number}.html")
"""
    done = subprocess.run([sys.executable, "-c", code, study, trained], capture_output=True, text=True, check=False)
    assert (tmp_path / "page-0.html").is_file(), done.stderr
    assert "torch" in done.stderr
    assert not (tmp_path / "page-1.html").exists()


def test_a_saved_claim_that_is_known_no_more_is_shown_without_a_figure(study, tmp_path):
    """The control: under its own name it leads to its figure."""
    statement = isolated(CLAIMS["opening_removes_sink"].statement)
    write_page_of_run(study, tmp_path / "before.html")
    before = (tmp_path / "before.html").read_text(encoding="utf-8")
    assert f'<td title="opening_removes_sink"><a href="#remaining">{statement}</a>' in before
    path = study / "claims.parquet"
    table = pyarrow.parquet.read_table(path)
    names = [{"opening_removes_sink": "of_before"}.get(name, name) for name in table["id"].to_pylist()]
    column = table.schema.get_field_index("id")
    pyarrow.parquet.write_table(table.set_column(column, table.schema.field(column), [names]), path)
    write_page_of_run(study, tmp_path / "after.html")
    assert f'<td title="of_before">{statement}</td>' in (tmp_path / "after.html").read_text(encoding="utf-8")


def test_refused_comparisons(study, tmp_path):
    page = tmp_path / "page.html"
    other = shutil.copytree(study, tmp_path / "other")
    (tmp_path / "empty").mkdir()
    small.intervened_chain().save(tmp_path / "edited")
    for names, message in (
        ([study, tmp_path / "edited"], "a run of sinkscope intervene, not a study or a trace"),
        ([study], "needs two runs or more, not 1"),
        ([study] * 27, "27 runs are too many: at most 26"),
        ([study, other, tmp_path / "empty" / ".." / "study"], "study was given twice"),
        (["gpt2", "gpt2"], "gpt2 was given twice"),
        ([study, tmp_path / "nowhere"], "There is no folder"),
        ([study, tmp_path / "empty"], r"has no summary\.json"),
    ):
        with pytest.raises(InputError, match=message):
            compare(list(map(str, names)), page, run_of=Path)
    page.write_text("mine")
    for overwrite, reason in ((False, "There is already a file"), (True, "is not a page that sinkscope wrote")):
        with pytest.raises(InputError, match=reason):
            compare([str(study), str(other)], page, overwrite=overwrite, run_of=Path)
    assert page.read_text() == "mine"
    with pytest.raises(InputError, match="a folder"):
        compare([str(study), str(other)], tmp_path, overwrite=True, run_of=Path)
    with pytest.raises(InputError, match="Not a directory"):
        compare([str(study), str(other)], page / "page.html", run_of=Path)
    with pytest.raises(InputError, match=r"page\.html"):
        compare([str(study), str(other)], tmp_path / "page.txt", run_of=Path)
    assert {path.name for path in tmp_path.iterdir()} == {"study", "other", "empty", "edited", "page.html"}


def test_a_name_that_is_no_run_is_made_one(study, tmp_path):
    made = shutil.copytree(study, tmp_path / "made")
    asked = []
    told = compare([str(study), "gpt2"], tmp_path / "page.html", run_of=lambda name: asked.append(name) or made)
    assert asked == ["gpt2"]
    verdict = json.loads((study / "summary.json").read_text())["verdict"]
    assert [line[:2] for line in told.splitlines()] == ["A ", "B "]
    assert all(line.endswith(verdict) for line in told.splitlines())
    assert "made" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_training_run_is_not_taken_for_a_study(tmp_path):
    with pytest.raises(InputError, match="sinkscope report"):
        read_run(write_training_folder(tmp_path / "training"))


def test_a_training_run_is_known_by_its_configuration(study, tmp_path):
    training = write_training_folder(tmp_path / "training")
    (training / "metrics.jsonl").unlink()  # as before the first step
    assert is_training_run(training)
    # Controls: a study, and rows of the same name that another program wrote.
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metrics.jsonl").write_text("{}\n")
    (training / "config.yaml").write_text("a: [")
    for folder in (study, tmp_path / "other", training, tmp_path / "nowhere"):
        assert not is_training_run(folder)


def test_runs_are_labelled_by_what_differs(tmp_path):
    alike = [write_trace_folder(tmp_path / name) for name in ("one", "other")]
    smaller = write_trace_folder(tmp_path / "smaller")
    run = read_run(smaller)
    model, dtype = run.model, run.environment["dtype"]
    (smaller / "environment.json").write_text(json.dumps(run.environment | {"dtype": "bfloat16"}))
    told = write_comparison_page([*alike, smaller], tmp_path / "page.html").splitlines()
    assert [line.partition(": ")[0] for line in told] == [
        f"A {model}, dtype {dtype}, in one",
        f"B {model}, dtype {dtype}, in other",
        f"C {model}, dtype bfloat16",
    ]
    alone = write_comparison_page([alike[0], write_study_folder(tmp_path / "study", model="m")], tmp_path / "two.html")
    assert alone.startswith(f"A {model}: "), "labels that differ stay as they are"


def test_folders_of_one_name_are_told_apart_by_those_above_them(tmp_path):
    places = ("a/softmax", "b/softmax", "b/deep/softmax", "b/other")
    folders = [write_trace_folder(tmp_path / place) for place in places]
    told = write_comparison_page(folders, tmp_path / "page.html").splitlines()
    model = read_run(folders[0]).model
    names = ("a/softmax", "b/softmax", "deep/softmax", "other")
    assert [line.partition(": ")[0] for line in told] == [
        f"{letter} {model}, in {name}" for letter, name in zip("ABCD", names, strict=True)
    ]
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert all(f"<bdi>{name}</bdi></p>" in page for name in names)
