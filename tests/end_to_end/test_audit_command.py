"""The real command audit: what it prints and writes for a model without sinks, and how it refuses."""

import json

from command_line import assert_refused
from tiny_models import tiny_model

from sinkscope.audits.schemas import AUDIT_TABLES
from sinkscope.results.tables import read_table

FEW = ("--length", 64, "--num-sequences", 2)


def test_a_model_without_sinks_has_a_safe_scheme(sinkscope, tmp_path):
    tiny_model("llama", scale=1.0, num_hidden_layers=3).save_pretrained(tmp_path / "model")
    tried = ("--schemes", "FP8_DYNAMIC", "--schemes", "W4A16", "--cache", "fp8")
    result = sinkscope("audit", "model", *FEW, *tried, "--seed", 5, "--out", "run", "--json")
    assert result.code == 0, result.err
    summary = json.loads(result.out)
    assert (summary["tokens"]["seed"], summary["tokens"]["source"]) == (5, "written by the model itself")
    assert "2 held-out texts of 64 tokens, written by the model itself" in (tmp_path / "run/report.html").read_text()
    assert summary["best"] == "FP8_DYNAMIC"
    assert "no multiple of its group of 128" in summary["refused"]["W4A16"]
    assert summary["sinks_per_text"] == 0
    assert summary["num_cells"] == 6
    for schema in AUDIT_TABLES:
        read_table(tmp_path / "run" / schema.name, schema)
    assert json.loads((tmp_path / "run" / "recipe.json").read_text())["schemes"]["cache-fp8"]["verdict"] == "safe"
    assert (tmp_path / "run" / "compressed-tensors-FP8_DYNAMIC.json").is_file()
    assert "safe as it is" in (tmp_path / "run" / "report.html").read_text()
    (tmp_path / "book.txt").write_text("words", encoding="utf-8")
    refused = sinkscope("audit", "model", *FEW, "--text", "book.txt", "--out", "other")
    assert_refused(refused, "has no tokenizer to read text with", tmp_path)
    refused = sinkscope("audit", "model", *FEW, "--cache", "fp9", "--out", "other")
    assert_refused(refused, "no cache format 'fp9'", tmp_path)
    refused = sinkscope("audit", "model", *FEW, "--out", "run")
    assert_refused(refused, "--overwrite", tmp_path)
