"""`compare_training`: training runs over variants and seeds, side by side as tables.

Runs that differ only in their seed are replicas of one variant. The baseline is softmax or, without it, the variant of
the first run. The main question is how many tokens a variant needs to reach the baseline's final validation loss.
Losses are not smoothed; between two evaluations they are interpolated linearly in tokens, and a run reaches a loss
where this line first falls to it. The baseline follows the same rule, so its ratio to itself is 1. Each run is compared
with the baseline's run of the same seed; the mean of these ratios is geometric.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from sinkscope.errors import InputError
from sinkscope.names import run_path
from sinkscope.pretrain.appearances import appearances
from sinkscope.pretrain.runs import (
    FinishedRun,
    Groups,
    check_comparable,
    num_machines,
    read_finished_run,
    replicas,
    unequal_conditions,
)
from sinkscope.pretrain.schemas import BIRTHS, COMPARISON_TABLES, LOSSES, OBSERVABLES, RATIOS, TRAINING_RUNS, VARIANTS
from sinkscope.results.result import Result
from sinkscope.results.run_folder import check_page
from sinkscope.results.tables import rows_where
from sinkscope.statistics import mean_interval
from sinkscope.user_paths import user_path

if TYPE_CHECKING:
    from markupsafe import Markup

    from sinkscope.pages.figure import Figure

Row = dict[str, Any]
PROBED = ("sink_rate", "dom_ratio", "effective_rank")
"""Observables that are compared at the end of training: means over layers, on held-out text."""


@dataclass(frozen=True)
class Reach:
    """How far a run had to train to bring its validation loss down to a target.

    `bound` is ">" if it never did: more would be needed. It is "<" if the first evaluation was already below.
    """

    tokens: float
    seconds: float
    bound: str


@dataclass(frozen=True, repr=False)
class TrainingComparison(Result):
    """The result of `compare_training`: tables by variant and by run."""

    kind = "training"
    schemas = COMPARISON_TABLES
    baseline: str
    variants: tuple[str, ...]
    """Labels, the baseline's first, then in the order given."""
    runs: tuple[FinishedRun, ...]
    tables: dict[str, dict[str, list]]
    notes: tuple[str, ...]
    """What could not be compared, and why."""

    def rows(self, table: str, **equal: Any) -> list[Row]:
        """The rows of a table whose columns named in `equal` have these values."""
        return rows_where(self.tables[table], **equal)

    def of(self, variant: str, quantity: str) -> Row | None:
        """A variant's row for one quantity; None if it was not measured."""
        return next(iter(self.rows("variants", variant=variant, quantity=quantity)), None)

    def figures(self) -> list[Figure]:
        """What the page draws."""
        return self._page.figures(self)

    def report(self, out: Path | str, *, overwrite: bool = False) -> Path:
        """Writes the page of one run, or the page of several runs with their tables in a folder beside it."""
        path = user_path(out)
        check_page(path, overwrite)
        if len(self.runs) == 1:
            self._page.write_page(self, path)
        else:
            self._page.write_page_beside(self, path, overwrite=overwrite)
        return path

    def section(self, tables: Path) -> tuple[Markup, list[Figure]]:
        """(HTML, figures) of these runs, for a page beside the folder `tables` that shows other runs too."""
        return self._page.section(self, tables)

    @property
    def _page(self) -> Any:
        return import_module(self._declared.page)

    @property
    def story(self) -> str:
        return comparison_story(self.tables, self.baseline)

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json: the story, the notes, and the short tables as rows."""
        short = {schema.name: self.rows(schema.name) for schema in (VARIANTS, TRAINING_RUNS, BIRTHS)}
        return {"story": self.story, "baseline": self.baseline, "notes": self.notes, **short}


def compare_training(runs: Path | str | Sequence[Path | str]) -> TrainingComparison:
    """The tables of complete training runs, which must have seen the same data in batches of the same size.

        sinkscope.compare_training(["runs/softmax-0", "runs/gate-0"]).of("gate", "tokens_ratio")

    A run is a folder, or a model that comes with the package. One run alone has the same tables.
    """
    names = [runs] if isinstance(runs, str | Path) else runs
    if not names:
        raise InputError("No training run was given. Give the folder of one, or of several.")
    finished = [read_finished_run(run_path(str(run))) for run in names]
    check_comparable(finished)
    groups = replicas(finished)
    baseline = next(iter(groups))
    run_rows = _run_rows(groups, one_machine=num_machines(finished) == 1)
    losses: list[Row] = []
    observables: list[Row] = []
    link_rows: list[Row] = []
    ordered_runs: list[FinishedRun] = []
    for label, group in groups.items():
        for run in group:
            losses += [row | _keys(label, run) for row in run.evaluations]
            observables += _observable_rows(label, run)
            link_rows += _appearance_rows(label, run)
            ordered_runs.append(run)
    rows = {
        TRAINING_RUNS: run_rows,
        LOSSES: losses,
        OBSERVABLES: observables,
        BIRTHS: link_rows,
        VARIANTS: _variant_rows(list(groups), run_rows, observables),
    }
    tables = {schema.name: schema.from_rows(schema_rows) for schema, schema_rows in rows.items()}
    return TrainingComparison(baseline, tuple(groups), tuple(ordered_runs), tables, tuple(unequal_conditions(groups)))


def reach(evaluations: Sequence[Row], target: float) -> Reach:
    """Where the validation loss first falls to the target, on straight lines in tokens between evaluations."""
    previous = None
    for row in evaluations:
        if row["validation_loss"] <= target:
            if previous is None:
                bound = "<" if row["validation_loss"] < target else ""
                return Reach(row["tokens"], row["elapsed_s"], bound)
            # The share of the way between the two evaluations.
            share = (previous["validation_loss"] - target) / (previous["validation_loss"] - row["validation_loss"])
            tokens = previous["tokens"] + share * (row["tokens"] - previous["tokens"])
            seconds = previous["elapsed_s"] + share * (row["elapsed_s"] - previous["elapsed_s"])
            return Reach(tokens, seconds, "")
        previous = row
    return Reach(evaluations[-1]["tokens"], evaluations[-1]["elapsed_s"], ">")


def _keys(label: str, run: FinishedRun) -> Row:
    return {"variant": label, "seed": run.seed}


def _run_rows(groups: Groups, *, one_machine: bool) -> list[Row]:
    """Rows of the table training_runs: how soon each run reaches the baseline's final loss."""
    baseline = next(iter(groups.values()))
    is_alone = len(baseline) == len(groups) == 1
    # By seed: the final loss of the baseline's run, and where this run itself first reached it.
    references = {run.seed: (run.validation_loss, _reach_of_baseline(run, is_alone=is_alone)) for run in baseline}
    losses, reaches = zip(*references.values(), strict=True)
    mean_reach = Reach(fmean(one.tokens for one in reaches), fmean(one.seconds for one in reaches), "")
    rows = []
    for label, group in groups.items():
        for run in group:
            # A seed that the baseline lacks is compared with the baseline's mean.
            target, reference = references.get(run.seed, (fmean(losses), mean_reach))
            reached = reach(run.evaluations, target)
            rows.append(
                _keys(label, run)
                | {
                    "run": run.name,
                    "tokens": run.evaluations[-1]["tokens"],
                    "elapsed_s": run.evaluations[-1]["elapsed_s"],
                    "tokens_per_second": run.tokens_per_second,
                    "validation_loss": run.validation_loss,
                    "target_loss": target,
                    "is_paired": run.seed in references,
                    "tokens_to_target": reached.tokens,
                    "seconds_to_target": reached.seconds,
                    "bound": reached.bound,
                    "tokens_ratio": reached.tokens / reference.tokens,
                    "seconds_ratio": reached.seconds / reference.seconds if one_machine else None,
                }
            )
    return rows


def _reach_of_baseline(run: FinishedRun, *, is_alone: bool) -> Reach:
    """Where a run of the baseline first reached its own final loss.

    Refuses a run whose loss did not fall, unless it is the only run: no other could be compared with it.
    """
    reached = reach(run.evaluations, run.validation_loss)
    if reached.bound and not is_alone:
        first = run.evaluations[0]
        raise InputError(
            f"The validation loss of the baseline {run.path} does not fall: "
            f"{first['validation_loss']:.4f} at step {first['step']} and {run.validation_loss:.4f} at the end. "
            "Train it longer or with a lower learning rate, or put another run first."
        )
    return reached


def _observable_rows(label: str, run: FinishedRun) -> list[Row]:
    """Each quantity of each probe, as its mean and its largest value over layers."""
    rows = []
    for probe in run.probes:
        for quantity, values in probe["layers"].items():
            measured = [value for value in values if value is not None]  # None: not finite in that layer
            rows.append(
                _keys(label, run)
                | {name: probe[name] for name in ("batch", "step", "tokens")}
                | {
                    "quantity": quantity,
                    "mean": fmean(measured) if measured else None,
                    "largest": max(measured, default=None),
                }
            )
    return rows


def _appearance_rows(label: str, run: FinishedRun) -> list[Row]:
    """Rows of the table births: when each link appeared in a run, on each batch."""
    rows = []
    for batch in dict.fromkeys(probe["batch"] for probe in run.probes):
        for appearance in appearances(probe for probe in run.probes if probe["batch"] == batch):
            entries = {
                name: getattr(appearance, name) for name in ("step", "tokens", "step_before", "layer", "largest")
            }
            link = {"batch": batch, "link": appearance.link.name, "threshold": appearance.link.threshold}
            rows.append(_keys(label, run) | link | entries)
    return rows


def _variant_rows(labels: list[str], runs: list[Row], observables: list[Row]) -> list[Row]:
    """Rows of the table variants: means and intervals over seeds, and over paired differences to the baseline."""
    # By quantity and (variant, seed): the value at the end of training.
    ends: dict[str, dict[tuple[str, int], float]] = {
        name: {(row["variant"], row["seed"]): row[name] for row in runs}
        for name in ("validation_loss", "tokens_per_second")
    }
    for name in PROBED:
        # Rows come in the order of steps, so that of the last probe replaces the others.
        ends[name] = {
            (row["variant"], row["seed"]): row["mean"]
            for row in observables
            if row["quantity"] == name and row["batch"] == "text" and row["mean"] is not None
        }
    rows = []
    for label in labels:
        of_variant = [row for row in runs if row["variant"] == label]
        rows += [_ratio_row(label, name, of_variant) for name in RATIOS if of_variant[0][name] is not None]
        for name, values in ends.items():
            by_seed = {seed: value for (variant, seed), value in values.items() if variant == label}
            base = {seed: value for (variant, seed), value in values.items() if variant == labels[0]}
            differences = [value - base[seed] for seed, value in by_seed.items() if seed in base]
            if by_seed:
                row = _end_row(label, name, list(by_seed.values()), differences)
                if name == "tokens_per_second" and row["low"] is not None:
                    # A speed is above 0, so its interval must be too.
                    row["low"], row["high"] = _interval_above_zero(by_seed.values())
                rows.append(row)
    return rows


def _ratio_row(label: str, quantity: str, runs: list[Row]) -> Row:
    paired = [row for row in runs if row["is_paired"]]
    used = paired or runs
    bounds = {row["bound"] for row in used} - {""}
    # If some ratios are lower bounds (or some upper bounds), so is their mean. With both kinds it bounds nothing.
    mean = math.exp(fmean(math.log(row[quantity]) for row in used)) if len(bounds) < 2 else None
    low, high = (None, None)
    if not bounds and len(paired) > 1:
        low, high = _interval_above_zero([row[quantity] for row in paired])
    return _row(
        label, quantity, len(used), mean, low, high, bound="".join(sorted(bounds)) if len(bounds) < 2 else "",
        num_reached=sum(row["bound"] != ">" for row in used), num_pairs=len(paired),
    )  # fmt: skip


def _end_row(label: str, quantity: str, values: list[float], differences: list[float]) -> Row:
    low, high = _interval(values)
    difference_low, difference_high = _interval(differences)
    return _row(
        label, quantity, len(values), fmean(values), low, high, num_pairs=len(differences),
        difference=fmean(differences) if differences else None,
        difference_low=difference_low, difference_high=difference_high,
    )  # fmt: skip


def _interval(values: list[float]) -> tuple[float | None, float | None]:
    return mean_interval(values) if len(values) > 1 else (None, None)


def _interval_above_zero(values: Iterable[float]) -> tuple[float, float]:
    """The interval of positive numbers, from their logarithms, so that it stays above 0."""
    low, high = mean_interval([math.log(value) for value in values])
    return math.exp(low), math.exp(high)


def _row(
    label: str, quantity: str, num_seeds: int, mean: float | None, low: float | None, high: float | None, **more: Any
) -> Row:
    empty = {column.name: None for column in VARIANTS.columns} | {"bound": ""}
    entries = {"variant": label, "quantity": quantity, "num_seeds": num_seeds, "mean": mean, "low": low, "high": high}
    return empty | entries | more


AT_THE_END = {"sink_rate": "sink rate", "dom_ratio": "DomRatio", "effective_rank": "effective rank"}


def comparison_story(tables: Mapping[str, Mapping[str, list]], baseline: str) -> str:
    """The answer in one or two sentences, from the tables alone, so that a saved comparison has it too."""

    def of(variant: str, quantity: str) -> Row | None:
        return next(iter(rows_where(tables["variants"], variant=variant, quantity=quantity)), None)

    loss = of(baseline, "validation_loss")
    assert loss is not None  # every run has one
    final = f"{baseline}'s final validation loss of {loss['mean']:.4f}"
    ratios = [row for row in rows_where(tables["variants"], quantity="tokens_ratio") if row["variant"] != baseline]
    num_runs = len(tables["training_runs"]["run"])
    if num_runs == 1:
        return _of_one_run(tables, of)
    if not ratios:
        return f"{num_runs} runs of {baseline}, and no other variant to compare them with: {final}."
    reached = [row for row in ratios if row["mean"] is not None and row["bound"] != ">"]
    if not reached:
        names, does = ", ".join(row["variant"] for row in ratios), "does" if len(ratios) == 1 else "do"
        every = " in every seed" if any(row["num_seeds"] > 1 for row in ratios) else ""
        return f"{names} {does} not reach {final}{every}."
    best = min(reached, key=lambda row: row["mean"])
    of_many = f"Of {len(ratios)} other variants, " if len(ratios) > 1 else ""
    text = f"{of_many}{best['variant']} reaches {final} with {_percent(best)} of its tokens{_seeds(best)}"
    seconds = of(best["variant"], "seconds_ratio")
    if seconds is not None and seconds["mean"] is not None:
        text += f", and with {_percent(seconds)} of its seconds{_seeds(seconds)}"
    ends = []
    for quantity, name in AT_THE_END.items():
        of_best, of_baseline = of(best["variant"], quantity), of(baseline, quantity)
        if of_best is not None and of_baseline is not None:
            ends.append(f"{name} {_mean(of_best)} against {_mean(of_baseline)}")
    return f"{text}. At the end, on held-out text: {', '.join(ends)}." if ends else f"{text}."


def _of_one_run(tables: Mapping[str, Mapping[str, list]], of: Callable[[str, str], Row | None]) -> str:
    """The final loss of one run, how its sink ended, and which links appeared on held-out text."""
    (run,) = rows_where(tables["training_runs"])
    text = f"{run['variant']}, seed {run['seed']}: validation loss {run['validation_loss']:.4f} after "
    text += f"{run['tokens']:,} tokens"
    ends = []
    for quantity, name in AT_THE_END.items():
        row = of(run["variant"], quantity)
        if row is not None:
            ends.append(f"{name} {_mean(row)}")
    text += f"; {', '.join(ends)}." if ends else "."
    links = rows_where(tables["births"], batch="text")
    appeared = sorted((row for row in links if row["tokens"] is not None), key=lambda row: row["tokens"])
    if appeared:
        times = [f"{row['link']} at {row['tokens']:,} tokens" for row in appeared]
        text += f" Links that appear on held-out text: {', '.join(times)}."
    if missing := [row["link"] for row in links if row["tokens"] is None]:
        text += f" Links that do not appear: {', '.join(missing)}."
    return text


def _percent(row: Row) -> str:
    return f"{row['bound']} {100 * row['mean']:.0f} %".strip()


def _seeds(row: Row) -> str:
    """The interval over seeds, or a note that there is none."""
    if row["low"] is None:
        return " (one seed, no interval)" if row["num_seeds"] == 1 else f" ({row['num_seeds']} seeds, no interval)"
    doubt = "; no clear difference" if row["low"] <= 1 <= row["high"] else ""
    return f" ({100 * row['low']:.0f} to {100 * row['high']:.0f} % over {row['num_seeds']} seeds{doubt})"


def _mean(row: Row) -> str:
    return f"{100 * row['mean']:.1f} %" if row["quantity"] == "sink_rate" else f"{row['mean']:,.3g}"
