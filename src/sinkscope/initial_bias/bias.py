"""bias(model or configuration): which tokens a model prefers before any training, why, and what training leaves of it.

A configuration is drawn from several seeds and every number has an interval over them; a model with weights is taken as
it is, with intervals over sequences.
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
from sinkscope.initial_bias.controls import CONTROLS, controlled
from sinkscope.initial_bias.reading import (
    BiasReading,
    BiasReadings,
    Checkpoint,
    Controlled,
    agreement,
    preference_correlation,
    read_bias,
    vocabulary_of,
)
from sinkscope.initial_bias.schemas import BIAS_TABLES
from sinkscope.initial_bias.tables import bias_tables
from sinkscope.models.anatomy import anatomy_of
from sinkscope.models.initial import INITIAL, Configuration, draw, find_configuration
from sinkscope.models.loaded import ModelLike
from sinkscope.models.loading import LoadedModel, LoadOptions, load
from sinkscope.models.token_batches import TokenBatch, token_batch
from sinkscope.progress import Progress
from sinkscope.results.result import Result
from sinkscope.results.tables import rows_where
from sinkscope.statistics import rank_correlation
from sinkscope.tracing.receipt import Receipt, described, take_receipt
from sinkscope.user_paths import user_path

NUM_SEEDS = 8
CALIBRATION_SEQUENCES = 64


@dataclass(frozen=True, repr=False)
class Bias(Result):
    """The bias of a model, as readings and as tables."""

    kind = "bias"
    schemas = BIAS_TABLES
    readings: BiasReadings
    receipt: Receipt

    @cached_property
    def tables(self) -> dict[str, dict[str, list]]:
        """Columns by table: bias, preferred_tokens, contraction, contraction_positions, controls, persistence."""
        return bias_tables(self.readings)

    @cached_property
    def summary(self) -> dict[str, Any]:
        return bias_summary(self.readings, self.tables) | described(self.receipt)

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
    names = list(CONTROLS if controls is None else dict.fromkeys(controls))
    for name in names:
        check_choice("controls", name, CONTROLS)
    for place in along:
        if isinstance(place, str | Path):
            user_path(str(place).removeprefix(INITIAL))  # refused before the hours that the readings may take
    check_bias(seeds=NUM_SEEDS if seeds is None else seeds, length=length, num_sequences=num_sequences, seed=seed)
    configuration = find_configuration(model, trust_remote_code=bool(options.get("trust_remote_code")))
    chosen = _seeds(configuration, seeds)
    later = [*along, *(_run_checkpoints(configuration) if configuration is not None else ())]
    total = len(chosen) * (1 + len(names)) + len(later)
    ticks = itertools.count(1)

    def read(loaded: LoadedModel, batch: TokenBatch) -> BiasReading:
        reading = read_bias(loaded, batch)
        if progress is not None:
            progress(next(ticks), total)
        return reading

    first: LoadedModel | None = None
    batches: list[TokenBatch] = []
    readings: list[BiasReading] = []
    under: dict[str, list[Controlled]] = {name: [] for name in names}
    refused: dict[str, str] = {}
    for index, loaded in enumerate(_models(configuration, model, chosen, options)):
        first = loaded if first is None else first
        # Every model has its own sequences, so that an interval over models includes the chance in their choice.
        batch, calibration = (
            token_batch(loaded, length=length, num_sequences=count, seed=seed + 2 * index + offset)
            for offset, count in enumerate((num_sequences, CALIBRATION_SEQUENCES))
        )
        batches.append(batch)
        readings.append(read(loaded, batch))
        for name in names:
            try:
                with controlled(name, loaded, calibration):
                    reading = read(loaded, batch)
                under[name].append(Controlled(reading.values, agreement(readings[-1], reading)))
            except InputError as error:
                refused[name] = str(error)
                next(ticks)
    assert first is not None
    checkpoints = []
    for place in later:
        loaded = load(place, **options)
        _check_shape(loaded, first)
        reading = read(loaded, batches[0])
        others = [preference_correlation(other, reading) for other in readings[1:]]
        name = _place_name(place, loaded)
        checkpoints.append(Checkpoint(name, _step(place), reading, agreement(readings[0], reading), others))
    return Bias(
        BiasReadings(
            name=first.name if configuration is None else configuration.name,
            model=first,
            batch=batches[0],
            seeds=chosen,
            baseline=readings,
            controls={name: by_seed for name, by_seed in under.items() if name not in refused},
            refused=refused,
            checkpoints=checkpoints,
        ),
        take_receipt(first, batches[0]),
    )


def _seeds(configuration: Configuration | None, seeds: int | None) -> tuple[int | None, ...]:
    if configuration is None:
        if seeds is not None:
            raise InputError(
                "`seeds` is for a configuration, and this model has its weights. "
                "Leave `seeds` out, or name the model's config.json to draw others of its kind."
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
    """The models one after the other, so that only one of them is in memory beside the first."""
    for seed in seeds:
        if configuration is None or seed is None:
            yield load(source, **options)
        else:
            yield draw(configuration, seed, dtype=options.get("dtype", "auto"), device=options.get("device", "auto"))


def _run_checkpoints(configuration: Configuration) -> list[Path]:
    if configuration.run is None:
        return []
    paths = [*sorted(configuration.run.glob("snapshots/step-????????")), configuration.run / "model"]
    return [path for path in paths if path.is_dir()]


def _place_name(place: Any, loaded: LoadedModel) -> str:
    """The name of a path; for a model or checkpoint of a training run with the run's name before it."""
    if not isinstance(place, str | Path) or str(place).startswith(INITIAL):
        return loaded.name
    parts = [part for part in user_path(place).resolve().parts if part not in ("snapshots", "checkpoints")]
    return "/".join(parts[-2:]) if parts[-1] == "model" or parts[-1].startswith("step-") else parts[-1]


def _step(place: Any) -> int | None:
    """The step that a snapshot's folder is named by."""
    name = Path(place).name if isinstance(place, str | Path) else ""
    number = name.removeprefix("step-")
    return int(number) if number != name and number.isdecimal() else None


def _check_shape(loaded: LoadedModel, first: LoadedModel) -> None:
    expected_shape, shape = (
        f"{vocabulary_of(model)} tokens and width {anatomy_of(model.model).width}" for model in (first, loaded)
    )
    if shape != expected_shape:
        raise InputError(
            f"{loaded.name} has {shape}, and the first model has {expected_shape}. "
            "Give checkpoints of the same training run."
        )


Tables = dict[str, dict[str, list]]
Row = dict[str, Any]


def bias_summary(readings: BiasReadings, tables: Tables) -> Row:
    """The entries of summary.json."""
    anatomy = anatomy_of(readings.model.model)
    one = len(readings.baseline) == 1
    quantities = {row["quantity"]: row for row in rows_where(tables["bias"]) if one or row["over"] == "seeds"}
    summary = {
        "model": readings.name,
        "family": anatomy.family.name,
        "num_layers": len(anatomy.layers),
        "width": anatomy.width,
        "vocabulary": readings.vocabulary,
        "tokens": readings.batch.describe(),
        "seeds": [seed for seed in readings.seeds if seed is not None],
        "prefers_tokens": _above_zero(quantities["entropy_deficit"], "value"),
        "bias": {name: _interval(row, "value") for name, row in quantities.items()},
        "preferred_tokens": [
            row["token"] for row in rows_where(tables["preferred_tokens"]) if row["seed"] == readings.seeds[0]
        ],
        "contraction": _contraction(tables),
        "variance_link": _variance_link(readings),
        "controls": _controls(tables) | {name: {"refused": reason} for name, reason in readings.refused.items()},
        "persistence": [
            {name: row[name] for name in ("checkpoint", "step", "ceiling", "other_seeds")}
            | _interval(row, "correlation")
            for row in rows_where(tables["persistence"])
        ],
    }
    return summary | {"story": _story(summary)}


def _interval(row: Row, name: str) -> Row:
    """A value with its interval, nulls where there is none."""
    ends = {"value": row[name], "low": row[f"{name}_low"], "high": row[f"{name}_high"]}
    return ends | {key: row[key] for key in ("over", "n") if key in row}


def _above_zero(row: Row, name: str) -> bool | None:
    """Whether the whole interval lies above 0; None where there is none."""
    return None if np.isnan(row[f"{name}_low"]) else bool(row[f"{name}_low"] > 0)


def _contraction(tables: Tables) -> Row:
    """The first and last cosines, and what attention and feed-forward add over all layers."""
    rows = rows_where(tables["contraction"])
    result: Row = {}
    for name in ("inter", "intra"):
        added = {
            part: float(sum(row[f"{name}_added"] for row in rows if row["part"] == part))
            for part in ("attention", "feed_forward")
        }
        result[name] = {"first": rows[0][name], "last": rows[-1][name], "added": added}
    return result | {name: rows[-1][name] for name in ("alignment", "top_share", "split_half", "between_seeds")}


def _variance_link(readings: BiasReadings) -> list[float]:
    """By layer, the rank correlation over positions of value variance and cosine between sequences, mean over seeds."""
    contractions = [reading.contraction for reading in readings.baseline]
    by_layer = []
    for layer in range(len(contractions[0].value_variance)):
        correlations = [
            rank_correlation(one.value_variance[layer], one.inter_by_position[layer + 1]) for one in contractions
        ]
        by_layer.append(float(np.mean(correlations)))
    return by_layer


def _controls(tables: Tables) -> Row:
    result: Row = {}
    for row in rows_where(tables["controls"]):
        names = ("value", "difference", "difference_low", "difference_high", "over", "n")
        result.setdefault(row["control"], {})[row["quantity"]] = {name: row[name] for name in names}
    return result


def _story(summary: Row) -> str:
    deficit, ratio = summary["bias"]["entropy_deficit"], summary["bias"]["prediction_ratio"]
    over = f"{len(summary['seeds'])} seeds" if len(summary["seeds"]) > 1 else f"{summary['tokens']['count']} sequences"
    drawn = ", drawn anew," if summary["seeds"] else ""
    verdict = {True: "prefers some tokens whatever it reads", False: "shows no preference beyond chance"}
    sentences = [
        f"{summary['model']}{drawn} {verdict.get(summary['prefers_tokens'], 'has too few samples for a verdict')}: "
        f"its preferred token is predicted {_shown(ratio)} times as often as chance, and the entropy of its "
        f"predictions lies {_shown(deficit)} nats below uniform, over {over}."
    ]
    inter = summary["contraction"]["inter"]
    sentences.append(
        f"The cosine between sequences goes from {inter['first']:.2f} to {inter['last']:.2f}: the feed-forward adds "
        f"{inter['added']['feed_forward']:+.2f}, attention {inter['added']['attention']:+.2f}."
    )
    effects = [
        (entry["entropy_deficit"]["difference"], name)
        for name, entry in summary["controls"].items()
        if "refused" not in entry and entry["entropy_deficit"]["difference_high"] < 0
    ]
    if effects and summary["prefers_tokens"]:
        difference, name = min(effects)
        sentences.append(f"Most of it goes with: {_lower(CONTROLS[name].question)} ({difference:+.2f} nats).")
    if summary["persistence"]:
        last = summary["persistence"][-1]
        others = "" if last["other_seeds"] is None else f", with other seeds' {last['other_seeds']:.2f}"
        sentences.append(
            f"At checkpoint {last['checkpoint']} the rank correlation with the preference at the beginning is "
            f"{last['value']:.2f}{others}."
        )
    return " ".join(sentences)


def _shown(entry: Row) -> str:
    interval = "" if np.isnan(entry["low"]) else f" ({entry['low']:.3g} to {entry['high']:.3g})"
    return f"{entry['value']:.3g}{interval}"


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]
