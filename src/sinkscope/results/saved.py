"""Saved results, read again from their folders: story, summary, tables, figures and page, without the model.

A folder may come from anybody, so all that a page draws is checked as in `read_run`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sinkscope.audits.audited import Audit
from sinkscope.audits.remedied import Remedied
from sinkscope.audits.schemes import SCHEMES
from sinkscope.errors import InputError
from sinkscope.fingerprints.fingerprint import Fingerprint
from sinkscope.fingerprints.page import METHOD
from sinkscope.initial_bias.bias import Bias
from sinkscope.interventions.intervene import Intervened
from sinkscope.names import run_path
from sinkscope.pretrain.comparison import COMPARISON_TABLES, RATIOS, TrainingComparison, compare_training
from sinkscope.results.result import Result
from sinkscope.results.run import NUMBERED, Kind, Run, Table, check_table, files_of, read_optional, read_run
from sinkscope.results.run_folder import RunFolder, is_training_run
from sinkscope.results.tables import NO_RANGES, Schema, read_table
from sinkscope.results.validated import (
    LARGEST_FLOAT,
    NAME,
    Each,
    Int,
    Maybe,
    Real,
    Text,
    checked,
    read_json,
    read_yaml,
    refused,
)
from sinkscope.studies.study import Study
from sinkscope.tracing.trace import Trace

KINDS: dict[Kind, type[Result]] = {
    "trace": Trace,
    "study": Study,
    "bias": Bias,
    "audit": Audit,
    "remedy": Remedied,
    "intervene": Intervened,
    "fingerprint": Fingerprint,
}
MOST_MODELS = 1000
SIZES = {"length": Int(1, 2**31), "count": Int(1, 2**31)}
SHAPES: dict[Kind, Any] = {
    "audit": {
        "model": NAME,
        "family": NAME,
        "num_layers": Int(1, 10_000),
        "tokens": {**SIZES, "source": Maybe(NAME)},
        "loss": Real(),
        "story": Text(),
        "refused": Each(Text()),
        "why_nothing": Maybe(Text()),
        "nothing_needed": bool,
        "rank_correlation": Maybe(Real()),
        "repeatability": Maybe(Real()),
        "sinks_per_text": Real(),
    },
    "remedy": {"model": NAME, "story": Text(), "num_texts": Int(), "length": Int(), "source": Maybe(NAME)},
    "intervene": {
        "story": Text(),
        "before": {"model": NAME, "num_layers": Int(1, 10_000), "tokens": SIZES, "story": Text()},
        "after": {"story": Text()},
        "control": {"story": Text()},
        "control_is": Text(),
        "calibrated_on": Text(),
        "texts": Maybe([{"position": Int(), "text": Text()}]),
    },
    "fingerprint": {
        "method": NAME,
        "story": Text(),
        "caveat": Text(),
        "inputs": {"vocabulary": Int(), "length": Int(), "num_sequences": Int()},
        "models": [{"name": NAME}],
    },
}
COMPARED = {"baseline": NAME, "notes": [Text()]}


@dataclass(frozen=True, repr=False)
class SavedResult(Result):
    """A result as its folder holds it; the model that it is of is not loaded."""

    run: Run

    @property
    def kind(self) -> Kind:
        """What it is a result of, such as study."""
        return self.run.kind

    @property
    def headline(self) -> tuple[str, ...]:
        return tuple(KINDS[self.kind].headline)

    @property
    def story(self) -> str:
        return f"{self.run.answer}\n\n{self.summary.get('counts') or ''}".rstrip()

    @property
    def summary(self) -> dict[str, Any]:
        return self.run.summary

    @property
    def tables(self) -> dict[str, Table]:
        return self.run.tables

    @property
    def schemas(self) -> tuple[Schema, ...]:
        return self.run.schemas

    def write(self, folder: RunFolder) -> None:
        """Writes the summary, every table, and what was asked for on which machine into an open run folder."""
        super().write(folder)
        if self.run.config:
            folder.write_yaml("config.yaml", self.run.config)
        if self.run.environment:
            folder.write_json("environment.json", self.run.environment)


def load_result(folder: str | Path) -> Result:
    """The result that a folder holds, with its story, summary, tables, figures and page; its model is not loaded.

        sinkscope.load_result("runs/study").table("claims")

    The folder is one that `.save` or a command wrote. A training run gives the same as `compare_training(folder)`.
    """
    path = run_path(folder)
    if is_training_run(path):
        return compare_training([path])
    if not (path / "summary.json").is_file():
        raise _no_result(path)
    summary = read_json(path / "summary.json", {"kind": Maybe(NAME)})
    if "baseline" in summary:
        return _comparison(path, summary)
    kind = "intervene" if {"before", "after"} <= summary.keys() else summary.get("kind")
    return SavedResult(_read(path, kind, summary) if kind in SHAPES else read_run(path))


def _no_result(path: Path) -> InputError:
    if not path.is_dir():
        return InputError(f"There is no folder {path}. Name the folder that .save or a sinkscope command wrote.")
    if (path / "config.json").is_file():
        return InputError(f"{path} holds a model, not a saved result. Load it with sinkscope.load({str(path)!r}).")
    return InputError(
        f"{path} has no summary.json, so it is not a saved result. "
        "Name the folder that .save or a sinkscope command wrote."
    )


def _read(path: Path, kind: Kind, summary: dict[str, Any]) -> Run:
    """An audit, a remedy, an intervention or a fingerprint."""
    checked(summary, SHAPES[kind], path / "summary.json")
    described = summary["before"] if kind == "intervene" else summary
    sizes, ranges = {}, NO_RANGES
    if "num_layers" in described:
        tokens = described["tokens"]
        sizes = {"num_layers": described["num_layers"], "length": tokens["length"], "count": tokens["count"]}
        ranges = {name: allowed.ends(sizes) for name, allowed in NUMBERED.items()}
    schemas = tuple(KINDS[kind].schemas)
    tables = {schema.name: read_table(path / schema.name, schema, ranges) for schema in schemas}
    for schema in schemas:
        check_table(schema, tables[schema.name], sizes, path / f"{schema.name}.parquet")
    CHECKS.get(kind, _nothing)(path, summary, tables)
    config = read_optional(read_yaml, path / "config.yaml")
    environment = read_optional(read_json, path / "environment.json")
    return Run(path, kind, summary, config, environment, tables, schemas, files_of(path))


def _nothing(path: Path, summary: Mapping[str, Any], tables: Mapping[str, Table]) -> None:
    pass


def _check_audit(path: Path, summary: Mapping[str, Any], tables: Mapping[str, Table]) -> None:
    for name in ("predictions", "damages", "remedies"):
        _check_known(path, name, "scheme", tables, SCHEMES)
    sinks = tables["sink_tokens"]
    for text, *around in zip(sinks["token_text"], sinks["before"], sinks["after"], strict=True):
        if text is not None and None in around:
            raise refused(path / "sink_tokens.parquet", "a token with a text, between tokens without one")


def _check_fingerprint(path: Path, summary: Mapping[str, Any], tables: Mapping[str, Table]) -> None:
    if not 0 < len(summary["models"]) <= MOST_MODELS:
        raise refused(path / "summary.json", f"{len(summary['models'])} models, not 1 to {MOST_MODELS}")
    if summary["method"] not in METHOD:
        raise refused(path / "summary.json", f"{summary['method']!r} for method, not one of {', '.join(METHOD)}")
    names = {model["name"] for model in summary["models"]}
    for column in ("base", "suspect"):
        _check_known(path, "pairs", column, tables, names)


def _check_intervened(path: Path, summary: Mapping[str, Any], tables: Mapping[str, Table]) -> None:
    """Refuses observables in another order than by quantity, layer and position, in which they are drawn."""
    observables, before = tables["observables"], summary["before"]
    quantities, length = dict.fromkeys(observables["quantity"]), before["tokens"]["length"]
    num_cells = before["num_layers"] * length
    if missing := {"sink_rate", "received", "dom_ratio"} - quantities.keys():
        raise refused(path / "observables.parquet", f"no {min(missing)}")
    whole = len(observables["quantity"]) == num_cells * len(quantities)
    if not whole or (
        observables["quantity"] != [quantity for quantity in quantities for _ in range(num_cells)]
        or observables["layer"] != [at // length for at in range(num_cells)] * len(quantities)
        or observables["position"] != list(range(length)) * (before["num_layers"] * len(quantities))
    ):
        raise refused(path / "observables.parquet", "rows that are not those of every layer and position in order")


def _check_known(path: Path, name: str, column: str, tables: Mapping[str, Table], known: Iterable[str]) -> None:
    if unknown := set(tables[name][column]) - set(known):
        raise refused(path / f"{name}.parquet", f"{min(unknown)!r} in column {column}")


CHECKS: dict[Kind, Callable[[Path, Mapping[str, Any], Mapping[str, Table]], None]] = {
    "audit": _check_audit,
    "fingerprint": _check_fingerprint,
    "intervene": _check_intervened,
}


def _comparison(path: Path, summary: Mapping[str, Any]) -> TrainingComparison:
    """A comparison of training runs, as it was saved beside its page; the runs themselves are not read."""
    checked(summary, COMPARED, path / "summary.json")
    tables = {schema.name: read_table(path / schema.name, schema) for schema in COMPARISON_TABLES}
    for schema in COMPARISON_TABLES:
        if any(
            isinstance(value, float) and abs(value) > LARGEST_FLOAT
            for column in tables[schema.name].values()
            for value in column
        ):
            raise refused(path / f"{schema.name}.parquet", f"a number above {LARGEST_FLOAT:g}")
        check_table(schema, tables[schema.name], {}, path / f"{schema.name}.parquet")
    variants = tables["variants"]
    labels = tuple(dict.fromkeys(variants["variant"]))
    if labels[:1] != (summary["baseline"],):
        raise refused(path / "variants.parquet", "variants that do not begin with the baseline")
    for name in ("training_runs", "losses"):
        if summary["baseline"] not in tables[name]["variant"]:
            raise refused(path / f"{name}.parquet", "no rows of the baseline")
    for name in ("training_runs", "losses", "observables", "births"):
        _check_known(path, name, "variant", tables, labels)
    _check_known(path, "variants", "bound", tables, ("", "<", ">"))
    columns = (variants[name] for name in ("variant", "quantity", "mean", "low", "high"))
    ends = set()
    for label, quantity, mean, low, high in zip(*columns, strict=True):
        if (low is None) != (high is None) or (mean is None and quantity not in RATIOS):
            raise refused(path / "variants.parquet", f"no mean, or half an interval, of {quantity}")
        if quantity == "validation_loss":
            ends.add(label)
    if missing := set(labels) - ends:
        raise refused(path / "variants.parquet", f"no validation loss of {min(missing)}")
    return TrainingComparison(summary["baseline"], labels, (), tables, tuple(summary["notes"]))
