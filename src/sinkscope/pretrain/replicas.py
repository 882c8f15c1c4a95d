"""Which training runs can be compared, which of them are replicas of one variant, and what is unequal among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sinkscope.errors import InputError
from sinkscope.pretrain.decoder_config import DecoderConfig
from sinkscope.pretrain.finished_run import FinishedRun

Groups = dict[str, list[FinishedRun]]
"""Runs by the label of their variant, the baseline's first."""
# What must be equal for losses and observables to be compared: the same batches of the same tokens, and
# the same held-out windows.
SHARED = (
    *("batch_size", "sequence_length", "skipped_targets", "evaluation_sequences", "probe_length", "probe_sequences"),
)


def check_comparable(runs: Sequence[FinishedRun]) -> None:
    """Returns if the losses of these runs can be compared, else raises InputError."""
    # Runs of earlier versions have no hash of their tokens in the summary; their sources' names must do.
    hashed = all("data" in run.summary for run in runs)
    first, *others = [
        {name: run.config["training"].get(name) for name in SHARED}
        | {"data": run.summary["data"][:12] if hashed else [run.config.get("data"), run.config.get("validation")]}
        for run in runs
    ]
    for run, conditions in zip(runs[1:], others, strict=True):
        for name, value in conditions.items():
            if value != first[name]:
                raise InputError(
                    expected="training runs on the same data, in batches and held-out windows of the same size; "
                    f"{name} {first[name]} as in {runs[0].path}",
                    found=f"{name} {value} in {run.path}",
                    next_step=f"Leave {run.path} out, or train it again with the same {name}",
                )


def replicas(runs: list[FinishedRun]) -> Groups:
    """Replicas by label, the baseline first; a label names the variant and what else differs from the baseline."""
    settings: list[tuple[dict[str, Any], list[FinishedRun]]] = []
    for run in runs:
        group = next((group for found, group in settings if found == run.settings), None)
        if group is None:
            settings.append((run.settings, [run]))
        elif twin := next((other for other in group if other.seed == run.seed), None):
            raise InputError(
                expected=f"one run of {run.variant} with seed {run.seed}",
                found=f"two, {twin.path} and {run.path}",
                next_step=f"Leave one of them out, or train it with another --seed than {run.seed}",
            )
        else:
            group.append(run)
    first = next((index for index, (_, group) in enumerate(settings) if group[0].variant == "softmax"), 0)
    settings.insert(0, settings.pop(first))
    return {_label(group[0], found, settings[0][0]): group for found, group in settings}


def num_machines(runs: Sequence[FinishedRun]) -> int:
    """On how many kinds of machine the runs were timed."""
    names = ("device_name", "num_processes", "parallel", "precision", "compiled", "num_threads")
    return len({tuple(str(run.environment.get(name)) for name in names) for run in runs})


def unequal_conditions(groups: Groups) -> list[str]:
    """What a reader must know about seeds, machines and probes that the variants do not share."""
    notes = []
    runs = [run for group in groups.values() for run in group]
    if num_machines(runs) > 1:
        notes.append("Seconds are not compared: the runs were made on different machines or numbers of devices.")
    baseline = next(iter(groups))
    seeds = {run.seed for run in groups[baseline]}
    common = {label: seeds & {run.seed for run in group} for label, group in list(groups.items())[1:]}
    if none := [label for label, shared in common.items() if not shared]:
        notes.append(f"No seed in common with {baseline}, so compared with its mean, no interval: {_listed(none)}.")
    if one := [label for label, shared in common.items() if len(shared) == 1]:
        notes.append(f"One seed in common with {baseline}, so ratios have no interval: {_listed(one)}.")
    for label, shared in common.items():
        if alone := sorted({run.seed for run in groups[label]} - shared) if shared else []:
            notes.append(f"Seeds without a partner in {baseline} are left out of {label}'s ratios: {_listed(alone)}.")
    if any(not run.probes for run in runs):
        without = [run.name for run in runs if not run.probes]
        notes.append(f"Without probes, so without sinks, disparity and births: {_listed(without)}.")
    return notes


def _listed(items: Sequence[str | int]) -> str:
    return ", ".join(map(str, items))


def _label(run: FinishedRun, settings: dict[str, Any], baseline: dict[str, Any]) -> str:
    entries = [run.variant]
    for key in sorted(settings.keys() | baseline.keys()):
        value, usual = (found.get(key, getattr(DecoderConfig, key, None)) for found in (settings, baseline))
        if key == "attention_variant" or value == usual:
            continue
        if key == "variant_options":
            entries += [f"{name} {option}" for name, option in (value or {}).items()]
        else:
            entries.append(f"{key} {value}")
    return ", ".join(entries)
