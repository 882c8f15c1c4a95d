"""Prints the tables of lab/results.md from what paper_experiment.py kept: the paper's table, and why it helps.

    python lab/experiments/paper_tables.py kept > tables.md

Means over seeds with 95 % intervals (Student's t), of ratios geometric ones; differences are taken by seed against
softmax. A run reaches softmax's final loss where its held-out losses, joined by straight lines, first come down to that
of the same seed; seconds are those tokens over the run's median tokens/s, so start-up, probes and evaluations don't
count; they and tokens/s are left out where runs shared a device. Disparity is DomRatio at the sink, effective rank is
taken over held-out text, both as means over layers; the sink rate is that of random tokens; the largest activation is
the largest |residual| of any layer on held-out text. Shares of a gain are left out where there is none.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from kept_results import read_results, write_run

from sinkscope.errors import InputError
from sinkscope.pretrain.comparison import TrainingComparison, compare_training
from sinkscope.statistics import mean_interval

BASELINE, NORM = "softmax", "head_norm"
QUANTITIES = {
    "validation_loss": ("loss", ".4f"),
    "speedup": ("softmax's tokens over those to its loss", ".2f"),
    "speedup_s": ("the same in seconds", ".2f"),
    "effective_rank": ("effective rank", ".1f"),
    "dom_ratio": ("disparity", ".1f"),
    "sink_rate": ("sink rate", ".1%"),
    "largest_residual": ("largest activation", ".1f"),
    "tokens_per_second": ("tokens/s", ",.0f"),
}
PAPER = (
    "| *paper* softmax | 4 | 2.7812 +- .0109 | | | | 343.7 +- 15.6 | 82.7 +- 8.1 | from layer 5 | | |",
    "| *paper* head_norm | 4 | 2.7421 +- .0066 | -0.0391 | | | 446.0 +- 5.4 | 33.7 +- 2.7 | none | | |",
)
LINES_OF_A_COURSE = 12

Ends = dict[str, dict[int, dict[str, float]]]
"""Numbers at the end of training by variant, seed and quantity."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kept", type=Path, help="folder that paper_experiment.py --keep wrote")
    try:
        print("\n".join(tables(read_results(parser.parse_args().kept))))
    except InputError as error:
        print(f"paper_tables: {error}", file=sys.stderr)
        sys.exit(2)


def tables(results: list[dict[str, Any]]) -> list[str]:
    """All tables as lines of Markdown."""
    done = [result for result in results if not result["diverged"] and result["run"]["stage"] != "tune"]
    if not {BASELINE, NORM} <= {label_of(result["run"]) for result in done}:
        raise InputError(f"The {len(done)} judged runs lack {BASELINE} or {NORM}. Go on with paper_experiment.py.")
    with tempfile.TemporaryDirectory() as folder:
        comparison = compare_training([write_run(result, Path(folder)) for result in done])
    ends = ends_of_training(comparison, done)
    losses = loss_courses(comparison, done)
    parts = (
        tuning_table(results),
        main_table(ends),
        hopes(ends),
        births_table(comparison, done),
        course_table(losses, sink_births(comparison, done)),
        ablation_table(ends),
    )
    return [line for part in parts for line in (*part, "")]


def label_of(run: Mapping[str, Any]) -> str:
    """The variant; an ablation of it with what sets it apart."""
    is_bad = run["stage"] == "ablate" and run["variant"] == NORM
    return f"{NORM}, lambda {run['initial_lambda']:g}" if is_bad else run["variant"]


def ends_of_training(comparison: TrainingComparison, results: list[dict[str, Any]]) -> Ends:
    """Every quantity of the table, by variant and seed."""
    by_name = {result["name"]: result for result in results}
    ends: Ends = {}
    for row in comparison.rows("training_runs"):
        result = by_name[row["run"]]
        own = ends.setdefault(label_of(result["run"]), {}).setdefault(row["seed"], {})
        own["validation_loss"] = row["validation_loss"]
        if result.get("jobs", 1) == 1:  # runs that share a device slow each other down, and not all alike
            own["tokens_per_second"] = result["tokens_per_second"]
        if not row["bound"] and row["is_paired"]:
            own["speedup"] = 1 / row["tokens_ratio"]
        last = {probe["batch"]: probe for probe in result["probes"]}
        if last:
            own["sink_rate"] = last["random"]["whole"]["sink_rate"]
            layers = {name: last["text"]["layers"][name] for name in ("effective_rank", "dom_ratio")}
            own.update({name: fmean(value for value in values if value is not None) for name, values in layers.items()})
            if "largest_residual" in last["text"]["layers"]:  # probes did not always read it
                own["largest_residual"] = max(last["text"]["layers"]["largest_residual"])
    for by_seed in ends.values():
        for seed, own in by_seed.items():
            base = ends[BASELINE].get(seed, {})
            if "speedup" in own and "tokens_per_second" in own.keys() & base.keys():
                own["speedup_s"] = own["speedup"] * own["tokens_per_second"] / base["tokens_per_second"]
    return ends


def main_table(ends: Ends) -> list[str]:
    heads = [head for head, _ in QUANTITIES.values()]
    heads.insert(1, "less softmax's, by seed")
    lines = [f"| variant | seeds | {' | '.join(heads)} |", f"| --- |{' ---: |' * (len(heads) + 1)}"]
    for label, by_seed in ends.items():
        cells = []
        for name, (_, form) in QUANTITIES.items():
            values = [own[name] for own in by_seed.values() if name in own]
            if name.startswith("speedup") and len(values) < len(by_seed):  # a mean of those that reach it would flatter
                cells.append(f"reached on {len(values)} of {len(by_seed)} seeds" if name == "speedup" else "")
            else:
                cells.append(with_interval(values, form, in_logs=name.startswith("speedup")))
            if name == "validation_loss":
                cells.append("" if label == BASELINE else with_interval(gains(ends, label, sign=-1), "+.4f"))
        lines.append(f"| {label} | {len(by_seed)} | {' | '.join(cells)} |")
    return [*lines, *PAPER]


def gains(ends: Ends, label: str, sign: int = 1) -> list[float]:
    """Softmax's loss less the variant's, for the seeds that both have."""
    base = ends[BASELINE]
    return [
        sign * (base[seed]["validation_loss"] - own["validation_loss"])
        for seed, own in ends[label].items()
        if seed in base
    ]


def hopes(ends: Ends) -> list[str]:
    """What was hoped for, and whether it was found."""
    found = gains(ends, NORM)
    low, _ = mean_interval(found)
    fastest = {
        label: math.exp(fmean(math.log(own["speedup"]) for own in by_seed.values()))
        for label, by_seed in ends.items()
        if label != BASELINE and all("speedup" in own for own in by_seed.values())
    }
    best = max(fastest, key=lambda label: fastest[label], default=None)
    means = {
        (label, name): fmean(values)
        for label in (BASELINE, NORM)
        for name in ("dom_ratio", "effective_rank")
        if (values := [own[name] for own in ends[label].values() if name in own])
    }
    lines = [
        _verdict(
            min(found) > 0 and low > 0,
            f"{NORM} has the lower loss on every seed, and its interval excludes 0",
            f"{sum(gain > 0 for gain in found)} of {len(found)} seeds, gain {with_interval(found, '.4f')}",
        ),
        _verdict(
            best is not None and fastest[best] >= 1.25,
            "the best variant needs at least 1.25x fewer tokens",
            "no variant reaches softmax's loss on all of its seeds"
            if best is None
            else f"{best} {fastest[best]:.2f}x, on {len(ends[best])} seed(s)",
        ),
    ]
    if (BASELINE, "dom_ratio") in means:
        ratio = means[BASELINE, "dom_ratio"] / means[NORM, "dom_ratio"]
        ranks = means[NORM, "effective_rank"], means[BASELINE, "effective_rank"]
        lines.append(_verdict(ratio >= 2, f"{NORM}'s disparity is at least 2x lower", f"{ratio:.2f}x"))
        lines.append(_verdict(ranks[0] > ranks[1], "its effective rank is higher", f"{ranks[0]:.1f}, {ranks[1]:.1f}"))
    return lines


def tuning_table(results: list[dict[str, Any]]) -> list[str]:
    """Every trial with its loss."""
    lines = ["| trial | learning rate | weight decay | initial lambda | loss |", "| --- | ---: | ---: | ---: | ---: |"]
    for result in results:
        run = result["run"]
        if run["stage"] == "tune":
            loss = "diverged" if result["diverged"] else f"{result['summary']['validation_loss']:.4f}"
            value = "" if run["initial_lambda"] is None else f"{run['initial_lambda']:g}"
            numbers = f"{run['learning_rate']:g} | {run['weight_decay']:g} | {value}"
            lines.append(f"| {run['variant']}, seed {run['seed']} | {numbers} | {loss} |")
    return lines


def births_table(comparison: TrainingComparison, results: list[dict[str, Any]]) -> list[str]:
    """In the order of birth in softmax: the step of each link by seed, on random tokens; beside it, the norm's."""
    rows = _with_labels(comparison.rows("births", batch="random"), comparison, results)
    steps: dict[tuple[str, str], list[int | None]] = {}
    for row in rows:
        steps.setdefault((row["link"], row["label"]), []).append(row["step"])
    links = dict.fromkeys(row["link"] for row in rows)

    def age(link: str) -> float:
        return fmean(math.inf if step is None else step for step in steps[link, BASELINE])

    lines = [f"| link | born at step, {BASELINE} by seed | {NORM} |", "| --- | --- | --- |"]
    for link in sorted(links, key=age):
        cells = [", ".join("-" if step is None else str(step) for step in steps[link, at]) for at in (BASELINE, NORM)]
        lines.append(f"| {link} | {' | '.join(cells)} |")
    return lines


def sink_births(comparison: TrainingComparison, results: list[dict[str, Any]]) -> list[int | None]:
    """The tokens at which each softmax run had a sink in some layer; None where it never had."""
    rows = comparison.rows("births", batch="random", link="sink in a layer")
    return [row["tokens"] for row in _with_labels(rows, comparison, results) if row["label"] == BASELINE]


def loss_courses(comparison: TrainingComparison, results: list[dict[str, Any]]) -> dict[int, dict[int, list[float]]]:
    """[tokens][seed] softmax's and the norm's losses, where both were evaluated."""
    found: dict[str, dict[tuple[int, int], float]] = {BASELINE: {}, NORM: {}}
    for row in _with_labels(comparison.rows("losses"), comparison, results):
        if row["label"] in found:
            found[row["label"]][row["tokens"], row["seed"]] = row["validation_loss"]
    courses: dict[int, dict[int, list[float]]] = {}
    for tokens, seed in sorted(found[BASELINE].keys() & found[NORM].keys()):
        courses.setdefault(tokens, {})[seed] = [found[label][tokens, seed] for label in (BASELINE, NORM)]
    return courses


def course_table(courses: Mapping[int, Mapping[int, Sequence[float]]], births: Sequence[int | None]) -> list[str]:
    """The gain over training, when it is there for good, and how much of it before softmax has a sink."""
    gain = {tokens: [base - own for base, own in by_seed.values()] for tokens, by_seed in courses.items()}
    final = fmean(gain[max(gain)])
    lasting = lasting_gain(gain)
    lines = ["| M tokens | softmax's loss less head_norm's | of the final gain |", "| ---: | ---: | ---: |"]
    chosen = sorted(gain)[:: max(1, len(gain) // LINES_OF_A_COURSE)]
    for tokens in dict.fromkeys([*chosen, max(gain)]):
        share = f"{fmean(gain[tokens]) / final:.0%}" if final > 0 else ""
        lines.append(f"| {tokens / 1e6:.1f} | {with_interval(gain[tokens], '+.4f')} | {share} |")
    when = "never" if lasting is None else f"from {lasting / 1e6:.1f} M tokens on"
    born = ["never" if tokens is None else f"{tokens / 1e6:.1f} M" for tokens in births]
    lines += ["", f"The gain is there for good (interval above 0 at every later evaluation) {when}."]
    lines.append(f"A layer of softmax has a sink from, by seed: {', '.join(born) or 'not probed'} tokens on.")
    return lines


def lasting_gain(gain: Mapping[int, Sequence[float]]) -> int | None:
    """The tokens from which on the interval of the gain stays above 0; None where it is not above 0 at the end."""
    first = None
    for tokens in sorted(gain, reverse=True):
        if not mean_interval(gain[tokens])[0] > 0:  # NaN with one seed: nothing can be said
            break
        first = tokens
    return first


def ablation_table(ends: Ends) -> list[str]:
    """How much of the norm's gain each other variant has, by seed."""
    base, norm = ends[BASELINE], ends[NORM]
    lines = ["| variant | gain | of head_norm's on the same seeds |", "| --- | ---: | ---: |"]
    for label in ends:
        seeds = [seed for seed in ends[label] if seed in base and seed in norm]
        if label != BASELINE and seeds:
            own = [base[seed]["validation_loss"] - ends[label][seed]["validation_loss"] for seed in seeds]
            whole = fmean(base[seed]["validation_loss"] - norm[seed]["validation_loss"] for seed in seeds)
            share = f"{fmean(own) / whole:.0%}" if whole > 0 else ""
            lines.append(f"| {label} | {with_interval(own, '+.4f')} | {share} |")
    return lines


def with_interval(values: Sequence[float], form: str, *, in_logs: bool = False) -> str:
    """The mean, and its 95 % interval where there is more than one value; of ratios the geometric mean."""
    if not values:
        return ""
    chosen = [math.log(value) for value in values] if in_logs else values
    numbers = [fmean(chosen), *mean_interval(chosen)]
    mean, low, high = map(math.exp, numbers) if in_logs else numbers
    return f"{mean:{form}}" + ("" if math.isnan(low) else f" [{low:{form}}, {high:{form}}]")


def _with_labels(rows: list[dict], comparison: TrainingComparison, results: list[dict[str, Any]]) -> list[dict]:
    """The rows with our name for the variant, which says no settings that all runs share."""
    labels = {result["name"]: label_of(result["run"]) for result in results}
    ours = {(row["variant"], row["seed"]): labels[row["run"]] for row in comparison.rows("training_runs")}
    return [row | {"label": ours[row["variant"], row["seed"]]} for row in rows]


def _verdict(holds: bool, hope: str, found: str) -> str:
    return f"- {'confirmed' if holds else 'not confirmed'}: {hope} ({found})"


if __name__ == "__main__":
    main()
