"""A saved result is read again without its model: the same story, summary, tables, figures and page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import small_results as small
from study_tables import write_study_folder
from tiny_models import tiny_model

import sinkscope
from sinkscope.pages import html
from sinkscope.results.kinds import kinds

LIVE = {
    "trace": small.trace_of_text,
    "bias": lambda: small.biased(tiny_model("llama")),
    "audit": small.audited,
    "remedy": small.remedied,
    "intervene": small.intervened_chain,
    "fingerprint": small.fingerprinted,
}


@pytest.fixture(autouse=True)
def small_pages(monkeypatch):
    monkeypatch.setattr(html, "_asset", lambda name: "")  # megabytes that no result changes


def page_of(result: sinkscope.Result, path: Path) -> str:
    return result.report(path, overwrite=True).read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", LIVE)
def test_a_saved_result_tells_and_draws_the_same(kind, tmp_path):
    live = LIVE[kind]()
    saved = sinkscope.load_result(live.save(tmp_path / "run"))
    assert isinstance(saved, sinkscope.SavedResult)
    assert saved.kind == kind
    assert (saved.story, saved.headline) == (live.story, live.headline)
    assert saved.summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    for schema in live.schemas:
        assert saved.table(schema.name).equals(live.table(schema.name))
    page = page_of(live, tmp_path / "page.html")
    assert page_of(saved, tmp_path / "page.html") == page
    assert saved.plot().axes
    assert saved._repr_html_().split("</b>")[1] == live._repr_html_().split("</b>")[1]
    again = sinkscope.load_result(saved.save(tmp_path / "again"))
    assert (again.summary, again.tables) == (saved.summary, saved.tables)
    # The control: with other numbers in its tables the page is another.
    for schema in saved.schemas:
        for column in (each.name for each in schema.columns if each.type == "float"):
            values = saved.tables[schema.name][column]
            saved.tables[schema.name][column] = [None if value is None else value / 2 for value in values]
    assert page_of(saved, tmp_path / "page.html") != page


def test_a_study_and_training_are_read_too(tmp_path):
    study = sinkscope.load_result(write_study_folder(tmp_path / "study"))
    assert isinstance(study, sinkscope.SavedResult)
    assert study.story.split("\n")[0][:30] in page_of(study, tmp_path / "study.html")
    assert set(study.table("claims").column("verdict").to_pylist()) <= set(html.VERDICTS)
    runs = small.planted_runs(tmp_path)
    alone = sinkscope.load_result(runs[0])
    assert alone.story == sinkscope.compare_training(runs[0]).story
    compared = sinkscope.compare_training(runs)
    saved = sinkscope.load_result(compared.save(tmp_path / "tables"))
    assert (saved.story, saved.tables) == (compared.story, compared.tables)
    assert saved.story[:50].replace("'", "&#x27;") in page_of(saved, tmp_path / "compared.html")
    assert {*LIVE, "study", "training"} == set(kinds())


def test_a_model_and_a_result_are_told_apart(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "model")
    result = small.intervened_chain().save(tmp_path / "run")
    with pytest.raises(
        sinkscope.InputError, match=r"holds a model, not a saved result. Load it with sinkscope\.load\("
    ):
        sinkscope.load_result(tmp_path / "model")
    with pytest.raises(sinkscope.InputError, match=r"is a saved result, not a model. Read it with sinkscope\.load_res"):
        sinkscope.load(result)
    with pytest.raises(sinkscope.InputError, match="There is no folder"):
        sinkscope.load_result(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(sinkscope.InputError, match=r"no summary\.json"):
        sinkscope.load_result(tmp_path / "empty")
    # A remedied model is both.
    remedied = small.remedied().save(tmp_path / "both")
    assert sinkscope.load_result(remedied).story == small.remedied().story
    assert sinkscope.load(remedied).source == "folder"
