"""`bias`: which tokens a model prefers before any training, why, and what training leaves of it.

From a configuration several models are drawn, one a seed, and intervals are over seeds. A model that has weights is
taken as it is, and intervals are over sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from sinkscope.arguments import check_bias, check_choice
from sinkscope.errors import InputError
from sinkscope.initial_bias.controls import CONTROLS, under_control
from sinkscope.initial_bias.measurement import (
    BiasMeasurement,
    BiasMeasurements,
    Checkpoint,
    ControlResult,
    agreement,
    measure_bias,
    preference_correlation,
    vocabulary_of,
)
from sinkscope.initial_bias.schemas import BIAS_TABLES
from sinkscope.initial_bias.tables import bias_tables
from sinkscope.models.anatomy import anatomy_of
from sinkscope.models.initial import INITIAL, Configuration, draw, find_configuration
from sinkscope.models.loaded import LoadedModel, ModelLike
from sinkscope.models.loading import LoadOptions, load
from sinkscope.models.token_batches import TokenBatch, token_batch
from sinkscope.progress import Progress
from sinkscope.results.result import Result
from sinkscope.results.tables import rows_where
from sinkscope.statistics import rank_correlation
from sinkscope.tracing.receipt import Receipt, described, take_receipt
from sinkscope.user_paths import user_path

NUM_SEEDS = 8
CALIBRATION_SEQUENCES = 64
"""Sequences beside the measured ones, on which a control takes the variances that it needs."""


@dataclass(frozen=True, repr=False)
class Bias(Result):
    """The result of `bias`: what was measured of each model, and the tables made of it."""

    kind = "bias"
    schemas = BIAS_TABLES
    measurements: BiasMeasurements
    receipt: Receipt

    @cached_property
    def tables(self) -> dict[str, dict[str, list]]:
        """Columns by table: bias, preferred_tokens, contraction, contraction_positions, controls, persistence."""
        return bias_tables(self.measurements)

    @cached_property
    def summary(self) -> dict[str, Any]:
        return bias_summary(self.measurements, self.tables) | described(self.receipt)

    @property
    def story(self) -> str:
        return self.summary["story"]


def bias(
    model: ModelLike | None = None,
    *,
    seeds: int | None = None,
    num_sequences: int = 128,
    length: int = 32,
    seed: int = 0,
    controls: Sequence[str] | None = None,
    along: Sequence[ModelLike] = (),
    progress: Progress | None = None,
    **options: Unpack[LoadOptions],
) -> Bias:
    """The bias of a model, or of models drawn from a configuration.

        sinkscope.bias("tiny", seeds=4).table("controls")

    `model` is anything that `load` takes, or a configuration, from which `seeds` models are drawn (8 by default): a
    preset such as "tiny", a config.json or its folder, a training run. `seed` is that of the random sequences.
    `controls` are names of CONTROLS, by default all. `along` holds later checkpoints of the model; a training run
    brings its own. Further options go to `load`.
    """
    controls = [controls] if isinstance(controls, str) else controls
    along = [along] if isinstance(along, str | Path) else along
    control_names = list(CONTROLS if controls is None else dict.fromkeys(controls))
    for name in control_names:
        check_choice("controls", name, CONTROLS)
    for source in along:
        if isinstance(source, str | Path):
            user_path(str(source).removeprefix(INITIAL))  # a bad path is refused now, not after hours of measuring
    check_bias(seeds=NUM_SEEDS if seeds is None else seeds, length=length, num_sequences=num_sequences, seed=seed)
    configuration = find_configuration(model, trust_remote_code=bool(options.get("trust_remote_code")))
    model_seeds = _seeds(configuration, seeds)
    later_models = [*along]
    if configuration is not None:
        later_models += _run_checkpoints(configuration)
    total = len(model_seeds) * (1 + len(control_names)) + len(later_models)
    ticks = itertools.count(1)

    def measure(loaded: LoadedModel, batch: TokenBatch) -> BiasMeasurement:
        measurement = measure_bias(loaded, batch)
        if progress is not None:
            progress(next(ticks), total)
        return measurement

    first: LoadedModel | None = None
    batches: list[TokenBatch] = []
    baseline: list[BiasMeasurement] = []
    under_controls: dict[str, list[ControlResult]] = {name: [] for name in control_names}
    refused: dict[str, str] = {}
    for index, loaded in enumerate(_models(configuration, model, model_seeds, options)):
        first = loaded if first is None else first
        # Every model has its own sequences, so that an interval over models includes the chance in their choice.
        batch = token_batch(loaded, length=length, num_sequences=num_sequences, seed=seed + 2 * index)
        calibration = token_batch(loaded, length=length, num_sequences=CALIBRATION_SEQUENCES, seed=seed + 2 * index + 1)
        batches.append(batch)
        baseline.append(measure(loaded, batch))
        for name in control_names:
            try:
                with under_control(name, loaded, calibration):
                    measurement = measure(loaded, batch)
                under_controls[name].append(ControlResult(measurement.values, agreement(baseline[-1], measurement)))
            except InputError as error:
                refused[name] = str(error)
                next(ticks)  # counted as done
    assert first is not None
    checkpoints = []
    for source in later_models:
        loaded = load(source, **options)
        _check_shape(loaded, first)
        measurement = measure(loaded, batches[0])
        # How far models that were never trained agree with it by chance.
        other_seeds = [preference_correlation(other, measurement) for other in baseline[1:]]
        name = _source_name(source, loaded)
        checkpoints.append(
            Checkpoint(name, _step(source), measurement, agreement(baseline[0], measurement), other_seeds)
        )
    return Bias(
        BiasMeasurements(
            name=first.name if configuration is None else configuration.name,
            model=first,
            batch=batches[0],
            seeds=model_seeds,
            baseline=baseline,
            controls={name: by_seed for name, by_seed in under_controls.items() if name not in refused},
            refused=refused,
            checkpoints=checkpoints,
        ),
        take_receipt(first, batches[0]),
    )


def _seeds(configuration: Configuration | None, seeds: int | None) -> tuple[int | None, ...]:
    """The seeds to draw models from; (None,) for a model that has weights."""
    if configuration is None:
        if seeds is not None:
            raise InputError(
                "`seeds` is for a configuration, but this model has weights already. "
                "Leave `seeds` out, or give the model's config.json to draw models of its shape."
            )
        return (None,)
    count = NUM_SEEDS if seeds is None else seeds
    # A training run's own seed comes first: it is where its checkpoints began.
    first_seeds = [] if configuration.seed is None else [configuration.seed]
    others = (seed for seed in range(count + 1) if seed not in first_seeds)
    return tuple([*first_seeds, *others][:count])


def _models(
    configuration: Configuration | None, source: Any, seeds: Sequence[int | None], options: LoadOptions
) -> Iterator[LoadedModel]:
    """The models one after another, so that at most one of them is in memory beside the first."""
    for seed in seeds:
        if configuration is None or seed is None:
            yield load(source, **options)
        else:
            yield draw(configuration, seed, dtype=options.get("dtype", "auto"), device=options.get("device", "auto"))


def _run_checkpoints(configuration: Configuration) -> list[Path]:
    """The snapshots and the final model of a training run; none for another configuration."""
    if configuration.run is None:
        return []
    paths = [*sorted(configuration.run.glob("snapshots/step-????????")), configuration.run / "model"]
    return [path for path in paths if path.is_dir()]


def _source_name(source: Any, loaded: LoadedModel) -> str:
    """The last part of a path; for a model or checkpoint of a training run, with the run's name before it."""
    if not isinstance(source, str | Path) or str(source).startswith(INITIAL):
        return loaded.name
    parts = [part for part in user_path(source).resolve().parts if part not in ("snapshots", "checkpoints")]
    return "/".join(parts[-2:]) if parts[-1] == "model" or parts[-1].startswith("step-") else parts[-1]


def _step(source: Any) -> int | None:
    """The step in the name of a snapshot's folder; None for other sources."""
    name = Path(source).name if isinstance(source, str | Path) else ""
    number = name.removeprefix("step-")
    return int(number) if number != name and number.isdecimal() else None


def _check_shape(loaded: LoadedModel, first: LoadedModel) -> None:
    def shape(model: LoadedModel) -> str:
        return f"{vocabulary_of(model)} tokens and width {anatomy_of(model.model).width}"

    if shape(loaded) != shape(first):
        raise InputError(
            f"{loaded.name} has {shape(loaded)}, and the first model has {shape(first)}. "
            "Give checkpoints of the same training run."
        )


Tables = dict[str, dict[str, list]]
Row = dict[str, Any]


def bias_summary(measurements: BiasMeasurements, tables: Tables) -> Row:
    """The entries of summary.json."""
    anatomy = anatomy_of(measurements.model.model)
    # Of several seeds, the rows over all of them; of one model, its only rows.
    is_single = len(measurements.baseline) == 1
    quantities = {row["quantity"]: row for row in rows_where(tables["bias"]) if is_single or row["over"] == "seeds"}
    summary = {
        "model": measurements.name,
        "family": anatomy.family.name,
        "num_layers": len(anatomy.layers),
        "width": anatomy.width,
        "vocabulary": measurements.vocabulary,
        "tokens": measurements.batch.describe(),
        "seeds": [seed for seed in measurements.seeds if seed is not None],
        "prefers_tokens": _above_zero(quantities["entropy_deficit"], "value"),
        "bias": {name: _interval(row, "value") for name, row in quantities.items()},
        "preferred_tokens": [
            row["token"] for row in rows_where(tables["preferred_tokens"]) if row["seed"] == measurements.seeds[0]
        ],
        "contraction": _contraction(tables),
        "variance_link": _variance_link(measurements),
        "controls": _controls(tables) | {name: {"refused": reason} for name, reason in measurements.refused.items()},
        "persistence": [
            {name: row[name] for name in ("checkpoint", "step", "ceiling", "other_seeds")}
            | _interval(row, "correlation")
            for row in rows_where(tables["persistence"])
        ],
    }
    return summary | {"story": _story(summary)}


def _interval(row: Row, name: str) -> Row:
    """A value with its interval, whose ends are NaN if there is none."""
    ends = {"value": row[name], "low": row[f"{name}_low"], "high": row[f"{name}_high"]}
    return ends | {key: row[key] for key in ("over", "n") if key in row}


def _above_zero(row: Row, name: str) -> bool | None:
    """Whether the whole interval lies above 0; None without an interval."""
    return None if np.isnan(row[f"{name}_low"]) else bool(row[f"{name}_low"] > 0)


def _contraction(tables: Tables) -> Row:
    """The first and last cosines, and what attention and feed-forward add over all layers."""
    rows = rows_where(tables["contraction"])
    result: Row = {}
    for name in ("inter", "intra"):
        added = {"attention": 0.0, "feed_forward": 0.0}
        for row in rows:
            if row["part"] in added:  # not the embeddings, which add to nothing
                added[row["part"]] += float(row[f"{name}_added"])
        result[name] = {"first": rows[0][name], "last": rows[-1][name], "added": added}
    return result | {name: rows[-1][name] for name in ("alignment", "top_share", "split_half", "between_seeds")}


def _variance_link(measurements: BiasMeasurements) -> list[float]:
    """By layer, how value variance and cosine between sequences go together over positions.

    A rank correlation, mean over seeds: near -1 if states agree most where values vary least.
    """
    contractions = [one.contraction for one in measurements.baseline]
    by_layer = []
    for layer in range(len(contractions[0].value_variance)):
        correlations = [
            rank_correlation(one.value_variance[layer], one.inter_by_position[layer + 1]) for one in contractions
        ]
        by_layer.append(float(np.mean(correlations)))
    return by_layer


def _controls(tables: Tables) -> Row:
    """By control and quantity: the value and its difference to the baseline."""
    result: Row = {}
    for row in rows_where(tables["controls"]):
        names = ("value", "difference", "difference_low", "difference_high", "over", "n")
        result.setdefault(row["control"], {})[row["quantity"]] = {name: row[name] for name in names}
    return result


def _story(summary: Row) -> str:
    deficit, ratio = summary["bias"]["entropy_deficit"], summary["bias"]["prediction_ratio"]
    over = f"{len(summary['seeds'])} seeds" if len(summary["seeds"]) > 1 else f"{summary['tokens']['count']} sequences"
    weights = ", with random weights," if summary["seeds"] else ""
    verdict = {
        True: "prefers some tokens whatever it reads",
        False: "shows no preference beyond chance",
        None: "has too few samples for a verdict",
    }[summary["prefers_tokens"]]
    sentences = [
        f"{summary['model']}{weights} {verdict}: its preferred token is predicted {_with_interval(ratio)} times as "
        f"often as chance, and the entropy of its predictions is {_with_interval(deficit)} nats below uniform, over "
        f"{over}."
    ]
    inter = summary["contraction"]["inter"]
    sentences.append(
        f"The cosine between sequences goes from {inter['first']:.2f} to {inter['last']:.2f}: feed-forwards add "
        f"{inter['added']['feed_forward']:+.2f}, attention {inter['added']['attention']:+.2f}."
    )
    effects = [
        (entry["entropy_deficit"]["difference"], name)
        for name, entry in summary["controls"].items()
        if "refused" not in entry and entry["entropy_deficit"]["difference_high"] < 0
    ]
    if effects and summary["prefers_tokens"]:
        difference, name = min(effects)
        question = CONTROLS[name].question
        sentences.append(
            f"The control that weakens the preference most: {question[0].lower()}{question[1:]} "
            f"({difference:+.2f} nats)."
        )
    if summary["persistence"]:
        last = summary["persistence"][-1]
        others = "" if last["other_seeds"] is None else f", and {last['other_seeds']:.2f} with that of other seeds"
        sentences.append(
            f"At checkpoint {last['checkpoint']} the preference has a rank correlation of {last['value']:.2f} with "
            f"that of the initial weights{others}."
        )
    return " ".join(sentences)


def _with_interval(entry: Row) -> str:
    interval = "" if np.isnan(entry["low"]) else f" ({entry['low']:.3g} to {entry['high']:.3g})"
    return f"{entry['value']:.3g}{interval}"
