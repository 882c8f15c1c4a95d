"""What an audit found: records, tables, one JSON object, and a few sentences."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from sinkscope.audits.advice import NEGLIGIBLE, Trial, needs_remedy
from sinkscope.audits.by_torchao import TORCHAO_SCHEMES
from sinkscope.audits.damage import Damage
from sinkscope.audits.recipe import write_recipe
from sinkscope.audits.remedies import Setting
from sinkscope.audits.schemas import AUDIT_TABLES, DAMAGES, PREDICTIONS, READINGS, SINKS, TRIALS
from sinkscope.audits.schemes import SCHEMES, layers_of, scheme_in_words
from sinkscope.models.anatomy import anatomy_of
from sinkscope.models.loading import LoadedModel
from sinkscope.models.token_batches import TokenBatch
from sinkscope.results.result import Result
from sinkscope.results.run_folder import RunFolder
from sinkscope.statistics import rank_correlation
from sinkscope.tracing.receipt import Receipt, beginnings_in_words, described

NUM_AROUND = 8
"""Tokens on each side that show where a sink token stands."""
AGREEMENT = 0.1
"""Share of the damage by which torchao may differ: its scales are a little finer (127.5 steps, not 127), so it rounds
other values up."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A scheme somewhere in a model: predicted, and measured."""

    level: str
    place: str
    scheme: str
    predicted: float
    measured: Damage
    control: float | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class AuditResult(Result):
    """What was predicted and measured of a model, as records and as tables."""

    kind = "audit"
    schemas = AUDIT_TABLES
    loaded: LoadedModel
    receipt: Receipt
    batch: TokenBatch
    """The held-out texts."""
    setting: Setting
    cells: tuple[Cell, ...]
    trials: tuple[Trial, ...]
    refused: dict[str, str]
    """Remedies that this model does not allow, with the reason."""
    by_torchao: tuple[Damage, Damage] | None = None
    """Of two schemes at once, for real and emulated; None where torchao is not installed."""

    @property
    def has_sinks(self) -> bool:
        return bool(self.setting.is_sink.any())

    @property
    def advice(self) -> list[Trial]:
        """What to do, the largest effect first; of a remedy and scheme that hold."""
        return sorted((trial for trial in self.trials if trial.holds), key=lambda trial: -trial.won.change)

    @property
    def broken(self) -> list[Cell]:
        """The schemes that cost enough to need a remedy, the worst first."""
        harms = sorted(self.at("model"), key=lambda cell: -cell.measured.change)
        return [cell for cell in harms if needs_remedy(cell.measured)]

    @property
    def why_nothing(self) -> str | None:
        """Why nothing is advised; None where something is."""
        if self.advice:
            return None
        if not self.broken:
            return f"no scheme is seen to cost {NEGLIGIBLE:g} nats a token"
        if not self.has_sinks:
            return "no token of these texts is a sink, so no remedy was tried"
        return "no remedy wins back more than its control"

    @property
    def nothing(self) -> dict[str, Any]:
        """Whether nothing is needed, and why nothing is advised, as the summary and the recipe say it."""
        return {"nothing_needed": not self.broken, "why_nothing": self.why_nothing}

    def at(self, level: str) -> list[Cell]:
        return [cell for cell in self.cells if cell.level == level]

    @cached_property
    def rank_correlation(self) -> float:
        """Of prediction and measurement, over the cells of layer groups and schemes."""
        cells = self.at("group")
        return _correlation([cell.predicted for cell in cells], [cell.measured.change for cell in cells])

    @cached_property
    def repeatability(self) -> float:
        """The same between the measurements on every other text and on the rest: what no prediction can pass by far."""
        halves = [[np.mean(cell.measured.by_text[half::2]) for cell in self.at("group")] for half in (0, 1)]
        return _correlation(*halves)

    @property
    def torchao_says(self) -> str | None:
        """Whether torchao agrees with the emulation, in a sentence; None where it is not installed."""
        if self.by_torchao is None:
            return None
        real, emulated = (found.change for found in self.by_torchao)
        agrees = "agrees" if abs(real - emulated) < max(NEGLIGIBLE, AGREEMENT * emulated) else "does not agree"
        schemes = " with ".join(scheme_in_words(name) for name in TORCHAO_SCHEMES)
        return f"torchao {agrees}: {schemes} cost {real:+.4f} for real, {emulated:+.4f} emulated."

    @cached_property
    def tables(self) -> dict[str, dict[str, list]]:
        """Columns by table: readings, predictions, damages, remedies, sink_tokens."""
        return _tables(self)

    @cached_property
    def summary(self) -> dict[str, Any]:
        return _summary(self) | described(self.receipt)

    @property
    def story(self) -> str:
        return self.summary["story"]

    def write(self, folder: RunFolder) -> None:
        """Writes the summary, every table and the recipe into an open run folder."""
        super().write(folder)
        write_recipe(folder, self.loaded, self.setting, self.advice, self.nothing)


def _tables(audit: AuditResult) -> dict[str, dict[str, list]]:
    """Columns by table, in the order of the model's modules."""
    layer_of = layers_of(audit.setting.model)
    anatomy, names = anatomy_of(audit.setting.model), dict(audit.setting.model.named_modules())
    block_name = {id(part): name for name, part in names.items()}

    def place(module: str) -> dict[str, Any]:
        layer = layer_of[module]
        prefix = block_name[id(anatomy.layers[layer].block)] + "."
        return {"module": module, "layer": layer, "kind": module.removeprefix(prefix)}

    order = {name: number for number, name in enumerate(names)}
    prediction = audit.setting.prediction
    readings = sorted(prediction.readings.items(), key=lambda item: order[item[0][0]])
    damages = sorted(prediction.damages.items(), key=lambda item: order[item[0][0]])
    rows = {
        READINGS: [{**place(module), "what": what, **reading.row()} for (module, what), reading in readings],
        PREDICTIONS: [{**place(module), "scheme": scheme, "predicted": value} for (module, scheme), value in damages],
        DAMAGES: [{**vars(cell), **_ends("measured", cell.measured)} for cell in audit.cells],
        TRIALS: [_trial_row(trial) for trial in audit.trials],
        SINKS: [_sink_row(audit, text, position) for text, position in audit.setting.is_sink.nonzero().tolist()],
    }
    return {schema.name: schema.from_rows(listed) for schema, listed in rows.items()}


def _sink_row(audit: AuditResult, text: int, position: int) -> dict[str, Any]:
    """A row of the table of sink tokens."""
    ids, tokenizer = audit.batch.ids[text].tolist(), audit.loaded.tokenizer
    places = {
        "before": ids[max(0, position - NUM_AROUND) : position],
        "token_text": ids[position : position + 1],
        "after": ids[position + 1 : position + 1 + NUM_AROUND],
    }
    words = {name: None if tokenizer is None else tokenizer.decode(part) for name, part in places.items()}
    return {"text": text, "position": position, "token": ids[position], **words}


def _trial_row(trial: Trial) -> dict[str, Any]:
    """A row of the table of remedies."""
    parts = {name: _ends(name, getattr(trial, name)) for name in ("left", "won", "control")}
    return (
        vars(trial)
        | {"damage": trial.damage.change, "holds": trial.holds}
        | {key: value for part in parts.values() for key, value in part.items()}
    )


def _ends(name: str, found: Damage) -> dict[str, float]:
    return {name: found.change, f"{name}_low": found.low, f"{name}_high": found.high}


def _summary(audit: AuditResult) -> dict[str, Any]:
    """The object written as summary.json and printed with --json."""
    is_sink = audit.setting.is_sink
    return {
        "kind": "audit",
        "model": audit.loaded.name,
        "family": anatomy_of(audit.setting.model).family.name,
        "num_layers": len(anatomy_of(audit.setting.model).layers),
        "tokens": audit.batch.describe() | {"source": audit.batch.source},
        "loss": float(audit.setting.plain.mean()),
        "sinks_per_text": float(is_sink.sum(1).double().mean()),
        "schemes": {
            cell.scheme: {"predicted": cell.predicted, **_ends("measured", cell.measured), "control": cell.control}
            for cell in audit.at("model")
        },
        "rank_correlation": audit.rank_correlation,
        "num_cells": len(audit.at("group")),
        "repeatability": audit.repeatability,
        "advice": [
            {"remedy": trial.remedy, "scheme": trial.scheme, "what": trial.what, "share_won_back": trial.share}
            | {"damage": trial.damage.change, **_ends("won", trial.won), **_ends("control", trial.control)}
            for trial in audit.advice
        ],
        **audit.nothing,
        "refused": audit.refused,
        "torchao": audit.torchao_says,
        "story": _story(audit) + beginnings_in_words(audit.receipt, lacks_sink=not audit.has_sinks),
    }


def _story(audit: AuditResult) -> str:
    """What breaks, and the most useful thing to do."""
    # Without sinks a window that keeps them is the window.
    broken = [cell for cell in audit.broken if audit.has_sinks or not SCHEMES[cell.scheme].keeps_sinks]
    worst = "; ".join(f"{scheme_in_words(cell.scheme)} costs {cell.measured.change:.3f}" for cell in broken[:3])
    if not audit.broken:
        return f"{audit.loaded.name}: nothing needed, {audit.why_nothing}."
    if not audit.has_sinks:
        return (
            f"{audit.loaded.name}: no token of these texts is a sink, so nothing needs to be done about sinks. What "
            f"costs most by itself, in nats a token: {worst}."
        )
    lines = [f"{audit.loaded.name}, in nats a token: {worst}."]
    seen: set[str] = set()
    for trial in audit.advice:
        if trial.scheme not in seen and len(seen) < 3:
            seen.add(trial.scheme)
            won = f"{trial.won.change:.3f} of {trial.damage.change:.3f}"
            words = f"{trial.remedy} wins back {won} (its control {trial.control.change:.3f})"
            lines.append(f"For {scheme_in_words(trial.scheme)}: {words}.")
    if not audit.advice:
        lines.append(f"Nothing helps: {audit.why_nothing}.")
    return " ".join(lines)


def _correlation(x: list, y: list) -> float:
    return rank_correlation(np.array(x), np.array(y))
