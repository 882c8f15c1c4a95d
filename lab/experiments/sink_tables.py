"""Prints the tables and the verdicts of the experiment where sinks are born, from what sink_experiment.py kept.

    python lab/experiments/sink_tables.py lab/results/sink
    python lab/experiments/sink_tables.py lab/results/trio    # the models that come with the package
    python lab/experiments/sink_tables.py lab/results/sink --figure lab/sinks-born.png
    python lab/experiments/sink_tables.py lab/results/sink --write-books tokens    # once: how many windows a book has

A difference is an arm's loss less softmax's on the same held-out windows and the same seed. Its 95 % interval is a
bootstrap over the held-out books, since windows of one book are alike. What counts as confirmed stands in
sink_experiment.yaml and is applied here as it stands.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from kept_results import read_results, write_run
from sink_plan import PLAN, read_plan

from sinkscope.atomic import whole_file
from sinkscope.errors import InputError
from sinkscope.pretrain.comparison import compare_training
from sinkscope.pretrain.tokens import open_shards
from sinkscope.statistics import resample_weights

BASELINE, NORM, CONTROL = "softmax", "head_norm", "scale"
CONSTANT = "_constant"
SETTINGS = (CONSTANT, "_all_targets", "_muon")
"""Arms whose names end so are compared with the softmax arm of the same ending."""
RULES = ("confirmed", "accelerates", "removes_the_sink", "halves_the_sink")
"""What a plan's verdicts must say for the tables."""
BOOKS = "books.json"
SHARDS = "486fe5afc08e78e2664c406ff3d8f5b8f79f74fe3c7461636c2624b6ad037223"
SAME_TEXT = {"f86d09ebd3dfb2a2eec8e9739461ac4b4f93ea697360795e7b9e4c9952614675": SHARDS}
"""Shards that count as others: they differ in one training file of 8,216, the `_sysconfigdata` of the Python that made
the text, in at most 22,685 of 87 M tokens. All else stands where it stood, and the held-out text is the same."""
QUANTITIES: dict[str, tuple[Callable[[dict], float], str]] = {
    "loss": (lambda measures: fmean(measures["loss"]["windows"]), ".4f"),
    "sink, random": (lambda measures: fmean(measures["random"]["first"]["sink_rate_by_layer"]), ".1%"),
    "sink, text": (lambda measures: fmean(measures["text"]["first"]["sink_rate_by_layer"]), ".1%"),
    "variance ratio": (lambda measures: variance_discrepancy(measures["text"]), ".2f"),
    "DomRatio, text": (lambda measures: fmean(measures["residual"]["dom_ratio"]), ".1f"),
    "norm ratio": (lambda measures: fmean(measures["residual"]["norm_ratio"]), ".2f"),
    "top direction": (lambda measures: fmean(measures["residual"]["top_direction"]), ".2f"),
    "effective rank": (lambda measures: fmean(measures["text"]["effective_rank"]), ".1f"),
    "largest activation": (lambda measures: max(measures["residual"]["largest"]), ",.0f"),
    "kurtosis": (lambda measures: fmean(measures["residual"]["kurtosis"]), ",.0f"),
}
"""What the table shows of each run at position 0; means over layers where nothing else is said."""
DAMAGES = {
    "8-bit activations, per tensor": "8-bit activations, per tensor",
    "8-bit activations, per token": "per token",
    "4-bit weights, per channel": "4-bit weights",
    "window of 32": "window of 32",
    "the first 4 and a window of 28": "4 first kept",
}

ByArm = dict[str, dict[int, dict[str, Any]]]
"""Measures by arm and seed."""


def variance_discrepancy(text: dict[str, Any]) -> float:
    """The geometric mean over layers up to the birth of disparity, or up to the first sink if that comes before.

    After a sink the ratio is near 0 in every model, since its state is a constant. All layers count where neither is.
    """
    ratios = text["variance_ratio"]
    first_sink = min((layer for sink in text["sinks"] for layer in sink["layers"]), default=len(ratios))
    return geometric_mean(ratios[: min([first_sink, *(birth + 1 for birth in text["birth_layers"])])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kept", type=Path, help="folder that sink_experiment.py --keep wrote")
    parser.add_argument("--plan", type=Path, default=PLAN, help="the plan that the runs belong to")
    parser.add_argument("--write-books", type=Path, metavar="TOKENS", help="write how many windows each book has")
    parser.add_argument("--figure", type=Path, metavar="PNG", help="draw the arms that have the plan's schedule")
    options = parser.parse_args()
    try:
        plan = read_plan(options.plan)
        if options.write_books:
            counts = windows_of_books(
                options.write_books, plan["recipe"]["training"]["sequence_length"], plan["measures"]["loss_windows"]
            )
            (options.kept / BOOKS).write_text(json.dumps(counts) + "\n", encoding="utf-8")
        results = read_results(options.kept)
        for summary in (result["summary"] for result in results if not result["diverged"]):
            summary["data"] = SAME_TEXT.get(summary["data"], summary["data"])
        print("\n".join(tables(results, read_books(options.kept), plan["verdicts"])))
        if options.figure:
            draw(results, options.figure)
    except InputError as error:
        print(f"sink_tables: {error}", file=sys.stderr)
        sys.exit(2)


def windows_of_books(tokens: Path, length: int, count: int) -> list[int]:
    """How many of `count` windows, spread over the held-out text, begin in each document."""
    shards = open_shards(tokens)
    (ids,) = shards.tokens("validation")  # one shard holds it
    ends = np.flatnonzero(np.asarray(ids) == 0)  # the token that ends a document
    num_windows = (len(ids) - 1) // length
    starts = length * np.linspace(0, num_windows - 1, min(count, num_windows)).round().astype(np.int64)
    return np.bincount(np.searchsorted(ends, starts)).tolist()


def read_books(kept: Path) -> list[int]:
    if not (kept / BOOKS).is_file():
        raise InputError(f"{kept} has no {BOOKS}. Write it with --write-books and the tokens.")
    return json.loads((kept / BOOKS).read_text(encoding="utf-8"))


def tables(results: list[dict[str, Any]], books: Sequence[int], rules: dict[str, Any]) -> list[str]:
    """All tables as lines of Markdown."""
    if missing := [rule for rule in RULES if rule not in rules]:
        raise InputError(
            f"The plan lacks the verdicts {', '.join(missing)}. Leave --plan out: sink_experiment.yaml has them."
        )
    arms: ByArm = {}
    for result in results:
        if not result["diverged"] and result["measures"] is not None:
            arms.setdefault(result["run"]["arm"], {})[result["run"]["seed"]] = result["measures"]
    if not any(arm == baseline_of(arm) for arm in arms):
        raise InputError(f"There is no run of {BASELINE} yet. Go on with sink_experiment.py.")
    judged = verdicts(arms, books, results, rules)
    parts = (ends_table(arms, books), damage_table(arms), judged, bars_table(arms, books, rules), course_table(results))
    failed = [f"Diverged: {result['name']}." for result in results if result["diverged"]]
    return [line for part in (*parts, failed) for line in (*part, "")]


def ends_table(arms: ByArm, books: Sequence[int]) -> list[str]:
    """A row for each run: its loss beside softmax's, and what was measured."""
    lines = [f"| run | less softmax's | {' | '.join(QUANTITIES)} |", "| --- | ---: |" + " ---: |" * len(QUANTITIES)]
    for arm, by_seed in arms.items():
        for seed, measures in sorted(by_seed.items()):
            base = arms.get(baseline_of(arm), {}).get(seed)
            found = "" if arm == baseline_of(arm) or base is None else interval_text(*difference(measures, base, books))
            cells = [format(of(measures), form) for of, form in QUANTITIES.values()]
            lines.append(f"| {arm}-{seed} | {found} | {' | '.join(cells)} |")
    return lines


def baseline_of(arm: str) -> str:
    return BASELINE + next((setting for setting in SETTINGS if arm.endswith(setting)), "")


def damage_table(arms: ByArm) -> list[str]:
    """By how much perplexity grows under each condition, mean over seeds."""
    lines = [f"| arm | seeds | {' | '.join(DAMAGES.values())} |", "| --- | ---: |" + " ---: |" * len(DAMAGES)]
    for arm, by_seed in arms.items():
        changes = [fmean(fmean(measures["downstream"][name]) for measures in by_seed.values()) for name in DAMAGES]
        lines.append(f"| {arm} | {len(by_seed)} | {' | '.join(f'{np.expm1(change):+.2%}' for change in changes)} |")
    return lines


def difference(measures: dict, base: dict, books: Sequence[int]) -> tuple[float, float, float]:
    """The mean difference of the windows' losses, and the ends of its interval over books."""
    values_N = np.subtract(measures["loss"]["windows"], base["loss"]["windows"])
    counts_B = np.asarray(books)
    if counts_B.sum() != len(values_N):
        raise InputError(
            f"{BOOKS} has {counts_B.sum()} windows, and the results {len(values_N)}. Write it again with --write-books."
        )
    edges = np.cumsum([0, *books])
    sums_B = np.array([values_N[low:high].sum() for low, high in itertools.pairwise(edges)])
    weights_RB = resample_weights(len(books))
    means_R = (weights_RB @ sums_B) / np.maximum(weights_RB @ counts_B, 1e-12)
    low, high = np.quantile(means_R, [0.025, 0.975])
    return float(values_N.mean()), float(low), float(high)


def interval_text(mean: float, low: float, high: float) -> str:
    return f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]"


def verdicts(arms: ByArm, books: Sequence[int], results: list[dict[str, Any]], rules: dict[str, Any]) -> list[str]:
    """What the plan calls confirmed, applied to what is there."""
    lines = []
    if NORM in arms:
        norm = against_softmax(arms, NORM, books)
        claim = "head_norm ends lower on every seed, half the disparity, higher rank"
        lines.append(_verdict(norm.confirmed(rules), claim, str(norm)))
        found = f"{norm.sink:.1%} left, {norm.softmax_sink:.1%} in softmax"
        lines.append(_verdict(norm.removes_the_sink(rules), "head_norm removes the sink", found))
        half = rules["halves_the_sink"]["of_softmax_at_most"]
        share = norm.sink / norm.softmax_sink
        lines.append(_verdict(share <= half, "head_norm halves the sink", f"{share:.0%} of it"))
    if CONTROL in arms:
        control = against_softmax(arms, CONTROL, books)
        lines.append(
            _verdict(not control.confirmed(rules), "scale without division does not do the same", str(control))
        )
    constant = [r for r in results if not r["diverged"] and r["run"]["arm"] in (BASELINE + CONSTANT, NORM + CONSTANT)]
    if len({result["run"]["arm"] for result in constant}) == 2:
        ratio, found = acceleration(constant)
        least = rules["accelerates"]["tokens_ratio_at_least"]
        lines.append(_verdict(ratio >= least, "head_norm accelerates", found))
    else:
        lines.append("- not run: whether head_norm accelerates (the arms at a constant rate)")
    return lines


class AgainstSoftmax(NamedTuple):
    """An arm beside the softmax of the same rate, targets and optimiser, means over the seeds that both have."""

    differences: dict[int, tuple[float, float, float]]
    """By seed, with the ends of the interval."""
    disparity: float
    """How many times lower than softmax's."""
    rank: float
    softmax_rank: float
    sink: float
    softmax_sink: float

    def confirmed(self, rules: dict[str, Any]) -> bool:
        """Whether the arm does what is asked of head_norm."""
        rule = rules["confirmed"]
        return (
            all(high < rule["interval_below"] for _, _, high in self.differences.values())
            and self.disparity >= rule["disparity_ratio_at_least"]
            and self.rank > self.softmax_rank
        )

    def removes_the_sink(self, rules: dict[str, Any]) -> bool:
        return self.sink <= rules["removes_the_sink"]["sink_rate_at_most"]

    def __str__(self) -> str:
        by_seed = ", ".join(f"seed {seed} {interval_text(*numbers)}" for seed, numbers in self.differences.items())
        ranks = f"effective rank {self.rank:.1f}, {self.softmax_rank:.1f} in softmax"
        return f"{by_seed}; disparity {self.disparity:.2f}x lower; {ranks}"


def against_softmax(arms: ByArm, arm: str, books: Sequence[int]) -> AgainstSoftmax:
    mine, base = arms[arm], arms[baseline_of(arm)]
    seeds = sorted(mine.keys() & base.keys())

    def means(quantity: str) -> list[float]:
        of, _ = QUANTITIES[quantity]
        return [fmean(of(by_seed[seed]) for seed in seeds) for by_seed in (mine, base)]

    disparity, softmax_disparity = means("DomRatio, text")
    return AgainstSoftmax(
        {seed: difference(mine[seed], base[seed], books) for seed in seeds},
        softmax_disparity / disparity,
        *means("effective rank"),
        *means("sink, random"),
    )


def bars_table(arms: ByArm, books: Sequence[int], rules: dict[str, Any]) -> list[str]:
    """Every arm by the bars that were set for head_norm."""
    lines = [
        "| by the bars of head_norm | seeds | mean difference | highest end of an interval | disparity, times lower | "
        "effective rank | sink left | meets *confirmed* | removes the sink |",
        "| --- |" + " ---: |" * 6 + " --- | --- |",
    ]
    for arm in arms:
        if arm != baseline_of(arm) and arms[arm].keys() & arms.get(baseline_of(arm), {}).keys():
            found = against_softmax(arms, arm, books)
            means, _, highs = zip(*found.differences.values(), strict=True)
            cells = [
                f"{len(means)} | {fmean(means):+.4f} | {max(highs):+.4f} | {found.disparity:.2f}",
                f"{found.rank:.1f}, softmax {found.softmax_rank:.1f}",
                f"{found.sink:.1%}, softmax {found.softmax_sink:.1%}",
                *("yes" if holds else "no" for holds in (found.confirmed(rules), found.removes_the_sink(rules))),
            ]
            lines.append(f"| {arm} | {' | '.join(cells)} |")
    return lines


def acceleration(results: list[dict[str, Any]]) -> tuple[float, str]:
    """Softmax's tokens over head_norm's to softmax's final loss, geometric mean over seeds; 0 where never reached."""
    with tempfile.TemporaryDirectory() as folder:
        rows = compare_training([write_run(result, Path(folder)) for result in results]).rows("training_runs")
    mine = [row for row in rows if row["run"].startswith(NORM)]
    if any(row["bound"] == ">" for row in mine):
        return 0.0, "softmax's final loss is not reached on every seed"
    ratio = float(np.exp(-fmean(np.log(row["tokens_ratio"]) for row in mine)))
    return ratio, f"{ratio:.3f}x fewer tokens on {len(mine)} seeds"


def course_table(results: list[dict[str, Any]]) -> list[str]:
    """When the losses part, beside when softmax's links are born: by seed, head_norm's loss less softmax's."""
    chosen = [r for r in results if not r["diverged"] and r["run"]["arm"] in (BASELINE, NORM)]
    if not chosen:
        return []
    runs = {(r["run"]["arm"], r["run"]["seed"]): r for r in chosen}
    seeds = sorted(seed for arm, seed in runs if arm == NORM and (BASELINE, seed) in runs)
    lines = [f"| step | {' | '.join(f'seed {seed}' for seed in seeds)} |", "| ---: |" + " ---: |" * len(seeds)]
    losses = {key: {row["step"]: row["validation_loss"] for row in run["metrics"]} for key, run in runs.items()}
    for step in sorted(set.intersection(*(set(steps) for steps in losses.values()))) if seeds else []:
        cells = [f"{losses[NORM, seed][step] - losses[BASELINE, seed][step]:+.4f}" for seed in seeds]
        lines.append(f"| {step:,} | {' | '.join(cells)} |")
    with tempfile.TemporaryDirectory() as folder:
        comparison = compare_training([write_run(run, Path(folder)) for run in chosen])
    arm_of = {(row["variant"], row["seed"]): row["run"] for row in comparison.rows("training_runs")}
    births: dict[str, dict[str, str]] = {}
    for row in comparison.rows("births", batch="random"):
        step = "-" if row["step"] is None else f"{row['step']:,}"
        births.setdefault(row["link"], {})[arm_of[row["variant"], row["seed"]]] = step
    names = sorted(runs[key]["name"] for key in runs)
    lines += ["", f"| link, born at step | {' | '.join(names)} |", "| --- |" + " ---: |" * len(names)]
    lines += [f"| {link} | {' | '.join(by_run.get(name, '') for name in names)} |" for link, by_run in births.items()]
    return lines


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Loss less softmax's, sink rate and effective rank through training, by arm with a band over its seeds."""
    chosen = [r for r in results if not r["diverged"] and baseline_of(r["run"]["arm"]) == BASELINE]
    chosen.sort(key=lambda result: result["run"]["arm"] != BASELINE)  # the first run names the baseline
    with tempfile.TemporaryDirectory() as folder:
        comparison = compare_training([write_run(result, Path(folder)) for result in chosen])
    with whole_file(path) as partial:
        comparison.plot("advantage", "sink-rate", "effective-rank").savefig(
            partial, format="png", dpi=80, metadata={"Software": "sinkscope"}
        )


def _verdict(holds: bool, claim: str, found: str) -> str:
    return f"- {'confirmed' if holds else 'not confirmed'}: {claim} ({found})"


if __name__ == "__main__":
    main()
