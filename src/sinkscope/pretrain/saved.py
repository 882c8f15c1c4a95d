"""Reads training results from folders: runs, which are compared anew, or the saved tables of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sinkscope.pretrain.comparison import TrainingComparison, compare_training
from sinkscope.pretrain.schemas import COMPARISON_TABLES, KINDS, RATIOS
from sinkscope.results.run import Table, check_known, check_table
from sinkscope.results.run_folder import is_training_run
from sinkscope.results.tables import read_table
from sinkscope.results.validated import LARGEST_FLOAT, read_json, refused


def load(folders: Sequence[Path]) -> TrainingComparison:
    """The comparison of the training runs in these folders, or the one that a folder of tables holds."""
    if len(folders) == 1 and not is_training_run(folders[0]):
        return _saved(folders[0])
    return compare_training(folders)


def _saved(path: Path) -> TrainingComparison:
    """A comparison from its tables, as they were saved beside its page; the runs themselves are not read.

    The files may have been edited, so what the page relies on is checked here.
    """
    summary = read_json(path / "summary.json", KINDS[0].summary)
    tables = {schema.name: read_table(path / schema.name, schema) for schema in COMPARISON_TABLES}
    for schema in COMPARISON_TABLES:
        if _is_too_large(tables[schema.name]):
            raise refused(path / f"{schema.name}.parquet", f"it holds a number above {LARGEST_FLOAT:g}")
        check_table(schema, tables[schema.name], {}, path / f"{schema.name}.parquet")
    variants = tables["variants"]
    labels = tuple(dict.fromkeys(variants["variant"]))
    if labels[:1] != (summary["baseline"],):
        raise refused(path / "variants.parquet", "its variants do not begin with the baseline")
    for name in ("training_runs", "losses"):
        if summary["baseline"] not in tables[name]["variant"]:
            raise refused(path / f"{name}.parquet", "it has no rows of the baseline")
    for name in ("training_runs", "losses", "observables", "births"):
        check_known(path / f"{name}.parquet", "variant", tables[name], labels)
    columns = (variants[name] for name in ("variant", "quantity", "mean", "low", "high"))
    with_loss = set()
    for label, quantity, mean, low, high in zip(*columns, strict=True):
        if (low is None) != (high is None) or (mean is None and quantity not in RATIOS):
            raise refused(path / "variants.parquet", f"it has no mean, or half an interval, of {quantity}")
        if quantity == "validation_loss":
            with_loss.add(label)
    if missing := set(labels) - with_loss:
        raise refused(path / "variants.parquet", f"it has no validation loss of {min(missing)}")
    return TrainingComparison(summary["baseline"], labels, (), tables, tuple(summary["notes"]))


def _is_too_large(table: Table) -> bool:
    return any(isinstance(value, float) and abs(value) > LARGEST_FLOAT for column in table.values() for value in column)
