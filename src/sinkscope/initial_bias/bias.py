"""bias(model or configuration): which tokens a model prefers from birth, why, and what training leaves of it.

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
from sinkscope.initial_bias.summary import bias_summary
from sinkscope.initial_bias.tables import bias_tables
from sinkscope.models.anatomy import anatomy_of
from sinkscope.models.initial import INITIAL, Configuration, draw, find_configuration
from sinkscope.models.loaded import ModelLike
from sinkscope.models.loading import LoadedModel, LoadOptions, load
from sinkscope.models.token_batches import TokenBatch, token_batch
from sinkscope.progress import Progress
from sinkscope.results.result import Result
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
    found = find_configuration(model, trust_remote_code=bool(options.get("trust_remote_code")))
    chosen = _seeds(found, seeds)
    later = [*along, *(_run_checkpoints(found) if found is not None else ())]
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
    for index, loaded in enumerate(_models(found, model, chosen, options)):
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
            name=first.name if found is None else found.name,
            model=first,
            batch=batches[0],
            seeds=chosen,
            untouched=readings,
            controls={name: each for name, each in under.items() if name not in refused},
            refused=refused,
            checkpoints=checkpoints,
        ),
        take_receipt(first, batches[0]),
    )


def _seeds(found: Configuration | None, seeds: int | None) -> tuple[int | None, ...]:
    if found is None:
        if seeds is not None:
            raise InputError(
                expected="`seeds` beside a configuration only",
                found="a model that has its weights",
                next_step="Leave `seeds` out, or name the model's config.json to draw others of its kind",
            )
        return (None,)
    count = NUM_SEEDS if seeds is None else seeds
    # A training run's own seed comes first: it is where its checkpoints began.
    own = [] if found.seed is None else [found.seed]
    others = (seed for seed in range(count + 1) if seed not in own)
    return tuple([*own, *others][:count])


def _models(
    found: Configuration | None, source: Any, seeds: Sequence[int | None], options: LoadOptions
) -> Iterator[LoadedModel]:
    """The models one after the other, so that only one of them is in memory beside the first."""
    for seed in seeds:
        if found is None or seed is None:
            yield load(source, **options)
        else:
            yield draw(found, seed, dtype=options.get("dtype", "auto"), device=options.get("device", "auto"))


def _run_checkpoints(found: Configuration) -> list[Path]:
    if found.run is None:
        return []
    return [path for path in (*sorted(found.run.glob("snapshots/step-????????")), found.run / "model") if path.is_dir()]


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
    expected, found = (
        f"{vocabulary_of(model)} tokens and width {anatomy_of(model.model).width}" for model in (first, loaded)
    )
    if found != expected:
        raise InputError(
            expected=f"checkpoints of one model, with {expected}",
            found=f"{found} in {loaded.name}",
            next_step="Give checkpoints of the same training run",
        )
