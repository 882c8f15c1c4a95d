"""Studies a list of models one by one, and puts them into one page and one table.

Run: python examples/atlas.py models.yaml --out runs/atlas

    study: {length: 64, num_sequences: 32}              options of sinkscope study, for all models
    audit: {text: book.txt, num_sequences: 16}          of sinkscope audit; without this line there is no remedy
    models:
      - reference:softmax
      - {name: SmolLM2, model: weights/SmolLM2.gguf, dtype: float32, study: {bos: "no"}, audit: false}

Each model has a folder with its study and its audit. The same command goes on where it was stopped: what is finished is
read, and a study that was interrupted keeps its finished parts. Where there are several GPUs each takes a model; with
--ray ADDRESS the models are tasks of that Ray cluster, which must see the same folder. --into page.md puts the table
into a page in place of the one that is there.
"""

from __future__ import annotations

import argparse
import itertools
import os
import queue
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from sinkscope.atomic import explained, whole_file
from sinkscope.errors import InputError
from sinkscope.pages import html
from sinkscope.pages.text import NO_VALUE, number
from sinkscope.results.kinds import Scalar
from sinkscope.results.tables import Column, Schema, write_table
from sinkscope.results.validated import (
    Name,
    Whole,
    checked,
    read_json,
    read_text,
    read_yaml,
)

Row = dict[str, Any]
Run = Callable[[list[str], Mapping[str, str]], str]
"""Runs a command in an environment; returns what went wrong, empty if nothing did."""
ATLAS = Schema(
    "atlas",
    (
        Column("model", "str", "Name of the model"),
        Column("family", "str", "Its family"),
        Column("position", "int", "Position of the strongest sink, or of the strongest key", nullable=True),
        Column("sink_rate", "float", "Share of heads and sequences that count it as a sink", nullable=True),
        Column("mechanism", "str", "token, position, no_averaging, variance, undecided or no_sink"),
        Column("cause", "str", "The same in words, with its decisive number and its control"),
        Column("neurons", "str", "The minimal set of neurons, as layer:neuron"),
        Column("dimensions", "str", "Massive dimensions, the strongest first"),
        Column("remedy", "str", "What recovers most of the damage of 8-bit activations, with its share"),
    ),
)
SCHEME = "W8A8_STATIC"
Options = dict[str, Scalar]


class OfAModel(BaseModel):
    model: Name
    name: Name | None = None
    study: Options | None = None
    audit: bool | Options | None = None


class Sections(BaseModel):
    """What the list of models may hold."""

    study: Options | None = None
    audit: Options | None = None
    models: list[OfAModel]


class Claim(BaseModel):
    id: Name
    verdict: Name


class Neuron(BaseModel):
    layer: Whole
    neuron: Whole


class DomRatio(BaseModel):
    position: Whole | None = None


class Study(BaseModel):
    """What is read of a study's summary.json."""

    family: Name
    claims: list[Claim]
    mechanism: Name | None = None
    cause: str | None = None
    minimal_set: list[Neuron] | None = None
    dom_ratio: DomRatio
    sink_rate: float | None = None
    massive_dimensions: list[Whole]


class Damage(BaseModel):
    measured: float


class Schemes(BaseModel):
    static: Damage = Field(alias=SCHEME)


class Advice(BaseModel):
    scheme: Name
    remedy: Name
    share_won_back: float


class Audit(BaseModel):
    """What is read of an audit's summary.json."""

    schemes: Schemes
    advice: list[Advice]


PAGE = Path(__file__).with_name("atlas.html")
"""Its template."""
MOST_LISTED = 6
MOST_LETTERS = 100
MOST_PAGE = 1 << 24


@dataclass(frozen=True)
class Entry:
    """One model of the list, with the options of each command."""

    name: str
    model: str
    options: Row = field(default_factory=dict)
    study: Row = field(default_factory=dict)
    audit: Row | None = None


def read_list(path: Path) -> list[Entry]:
    """The models of a YAML file; what is not understood is refused."""
    asked = read_yaml(path, dict[str, Any])
    if not asked.get("models") or asked.keys() - Sections.model_fields.keys():
        raise InputError(
            f"{path} has {', '.join(asked) or 'nothing'}, not models and perhaps study and audit. "
            "Write it as the head of atlas.py shows."
        )
    if isinstance(asked["models"], list):
        asked["models"] = [{"model": given} if isinstance(given, str) else given for given in asked["models"]]
    checked(asked, Sections, path)
    entries = []
    for own in asked["models"]:
        model = own.pop("model")
        name = re.sub(r"[^\w.-]+", "-", own.pop("name", None) or model)[:MOST_LETTERS].strip("-.")  # of a folder
        if not name:
            raise InputError(f"{model!r} in {path} leaves no name for its folder. Give it a `name` with a letter.")
        study = {**(asked.get("study") or {}), **(own.pop("study", None) or {})}
        of_all, audit = asked.get("audit"), own.pop("audit", None)
        audit = None if audit is False or audit is of_all is None else {**(of_all or {}), **(audit or {})}
        entries.append(Entry(name, model, own, study, audit))
    names = [entry.name for entry in entries]
    if twice := {name for name in names if names.count(name) > 1}:
        raise InputError(f"Two models have the name {min(twice)}. Give one of them another `name`.")
    return entries


def commands(entry: Entry, out: Path) -> Iterator[list[str]]:
    """What is still to be run for a model."""
    for command, asked in (("study", entry.study), ("audit", entry.audit)):
        folder = out / entry.name / command
        if asked is not None and not (folder / "summary.json").is_file():
            tried = {"schemes": SCHEME} if command == "audit" else {}
            options = [
                part for key, value in {**entry.options, **tried, **asked}.items() for part in _option(key, value)
            ]
            yield [command, entry.model, "--out", str(folder), *options]


def _option(key: str, value: Any) -> list[str]:
    name = f"--{key.replace('_', '-')}"
    return ([name] if value else []) if isinstance(value, bool) else [name, str(value)]


def run_command(arguments: list[str], environment: Mapping[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "sinkscope", *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    told = done.stderr.strip().splitlines() or [f"ended with exit code {done.returncode}"]  # killed, it says nothing
    return "" if done.returncode == 0 else told[-1]


def study_one(entry: Entry, out: Path, run: Run, environment: Mapping[str, str]) -> str:
    """Runs what is missing of one model; returns what went wrong."""
    for arguments in commands(entry, out):
        print(f"{entry.name}: sinkscope {arguments[0]}", flush=True)
        if wrong := run(arguments, environment):
            return f"{entry.name}: {wrong}"
    return ""


def study_all(entries: list[Entry], out: Path, run: Run = run_command) -> list[str]:
    """Every model, one on each GPU or one after the other; returns what went wrong."""
    import torch

    count, visible = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",")[:count] if visible else map(str, range(count))
    devices = [{"CUDA_VISIBLE_DEVICES": name} for name in names] or [{}]
    free: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()
    for device in devices:
        free.put(device)

    def work(entry: Entry) -> str:
        device = free.get()
        try:
            return study_one(entry, out, run, device)
        finally:
            free.put(device)

    with ThreadPoolExecutor(len(devices)) as pool:
        return [wrong for wrong in pool.map(work, entries) if wrong]


def study_on_ray(entries: list[Entry], out: Path, address: str) -> list[str]:
    """Every model as a task of a Ray cluster; Ray gives each its GPU."""
    import ray  # pyright: ignore[reportMissingImports]

    ray.init(address=address)
    num_gpus = 1 if ray.cluster_resources().get("GPU") else 0
    task = ray.remote(num_gpus=num_gpus)(study_one)
    return [wrong for wrong in ray.get([task.remote(entry, out, run_command, {}) for entry in entries]) if wrong]


def row_of(entry: Entry, out: Path) -> Row | None:
    """What is known of a model; None before its study is finished."""
    folder = out / entry.name
    if not (folder / "study" / "summary.json").is_file():
        return None
    found = read_json(folder / "study" / "summary.json", Study)
    verdicts = {claim["id"]: claim["verdict"] for claim in found["claims"]}
    has_sink = verdicts.get("sink") == "holds"
    neurons = [f"{neuron['layer']}:{neuron['neuron']}" for neuron in found["minimal_set"] or []]
    return {
        "model": entry.name,
        "family": found["family"],
        "position": found["dom_ratio"].get("position"),
        "sink_rate": found.get("sink_rate"),
        # A study of an earlier version has no mechanism.
        "mechanism": found.get("mechanism") or ("" if has_sink else "no_sink"),
        "cause": (found.get("cause") or "") if has_sink else "No sink on these tokens.",
        "neurons": _some(neurons),
        "dimensions": _some(found["massive_dimensions"]),
        "remedy": _remedy(folder / "audit" / "summary.json"),
    }


def _some(items: Iterable[Any]) -> str:
    items = [str(item) for item in items]
    more = f" and {len(items) - MOST_LISTED} more" if len(items) > MOST_LISTED else ""
    return ", ".join(items[:MOST_LISTED]) + more


def _remedy(path: Path) -> str:
    if not path.is_file():
        return "not audited"
    audited = read_json(path, Audit)
    cost = audited["schemes"][SCHEME]["measured"]
    advised = [step for step in audited["advice"] if step["scheme"] == SCHEME]
    if not advised:
        return f"none needed or none helps; 8 bits cost {cost:.3f} nats"
    best = max(advised, key=lambda step: step["share_won_back"])
    return f"{best['remedy']}: {best['share_won_back']:.0%} of {cost:.3f} nats"


def write_atlas(entries: list[Entry], out: Path, wrong: list[str]) -> None:
    """The page, the table and the same as Markdown, of all models whose studies are finished; adds to `wrong` what
    could not be read."""
    rows = []
    for entry in entries:
        try:
            rows += filter(None, [row_of(entry, out)])
        except InputError as error:  # a damaged file of one model
            wrong.append(f"{entry.name}: {error}")
    write_table(ATLAS, ATLAS.from_rows(rows), out / "atlas")
    names = [column.name for column in ATLAS.columns]
    columns = [name.replace("_", " ") for name in names]
    html.write_page(
        out / "atlas.html",
        html.environment().from_string(PAGE.read_text(encoding="utf-8")),
        "Atlas of sinks",
        [],
        f"{len(rows)} of {len(entries)} models. A name leads to the page of its study.",
        columns=columns,
        rows=[[_cell(name, row) for name in names] for row in rows],
        missing=[entry.name for entry in entries if entry.name not in {row["model"] for row in rows}],
        wrong=wrong,
    )
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(names) + "|"]
    lines += [f"| {' | '.join(_text(name, row).replace('|', ' ') for name in names)} |" for row in rows]
    with whole_file(out / "atlas.md") as partial:
        partial.write_text("\n".join(lines) + "\n", encoding="utf-8")


def put_into(page: Path, table: str) -> None:
    """Puts the table into a page of Markdown in place of the one with the same head, which must be there."""
    text, head = read_text(page, MOST_PAGE), table.splitlines()[0]
    before, found, after = text.partition(head)
    if not found:
        raise InputError(f"{page} has no table. Write its first line: {head}")
    rest = after.splitlines(keepends=True)[1:]
    kept = "".join(itertools.dropwhile(lambda line: line.startswith("|"), rest))
    with whole_file(page) as partial:
        partial.write_text(before + table + kept, encoding="utf-8")


def _text(name: str, row: Row) -> str:
    if name == "sink_rate" and row[name] is not None:
        return f"{row[name]:.1%}"
    return number(row[name]) if not isinstance(row[name], str) else row[name] or NO_VALUE


def _cell(name: str, row: Row) -> str | html.Link:
    text = _text(name, row)
    return html.Link(text, f"{row['model']}/study/report.html") if name == "model" else text


def main(arguments: list[str] | None = None, run: Run = run_command) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, help="YAML list of models")
    parser.add_argument("--out", type=Path, default=Path("runs/atlas"), help="folder of the atlas")
    parser.add_argument("--ray", metavar="ADDRESS", help="address of a Ray cluster, such as auto")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="page of Markdown whose table is replaced")
    asked = parser.parse_args(arguments)
    try:
        entries = read_list(asked.models)
        with explained(asked.out):
            asked.out.mkdir(parents=True, exist_ok=True)
        wrong = study_on_ray(entries, asked.out, asked.ray) if asked.ray else study_all(entries, asked.out, run)
        write_atlas(entries, asked.out, wrong)
        if asked.into:
            put_into(asked.into, (asked.out / "atlas.md").read_text(encoding="utf-8"))
    except InputError as error:
        print(f"atlas: {error}", file=sys.stderr)
        return 2
    for text in wrong:
        print(text, file=sys.stderr)
    print(f"Page: {asked.out / 'atlas.html'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
