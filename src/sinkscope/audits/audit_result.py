"""What `audit` gives back: what every scheme costs, its tables, its summary and its story in a few sentences."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from sinkscope.audits.advice import NEGLIGIBLE, Trial, needs_remedy
from sinkscope.audits.by_torchao import TORCHAO_SCHEMES
from sinkscope.audits.damage import Damage
from sinkscope.audits.evaluation import Evaluation
from sinkscope.audits.recipe import write_recipe
from sinkscope.audits.schemas import AUDIT_TABLES, DAMAGES, PREDICTIONS, READINGS, SINKS, TRIALS
from sinkscope.audits.schemes import SCHEMES, layers_of, scheme_in_words
from sinkscope.models.anatomy import anatomy_of
from sinkscope.models.loaded import LoadedModel
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
    """What a scheme costs somewhere in a model: predicted, and measured."""

    level: str
    """model, group (a third of the layers) or module."""
    place: str
    """all, the group of layers, or the module's name."""
    scheme: str
    predicted: float
    measured: Damage
    control: float | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class AuditResult(Result):
    """What was predicted and measured of a model."""

    kind = "audit"
    schemas = AUDIT_TABLES
    loaded: LoadedModel
    receipt: Receipt
    batch: TokenBatch
    """The held-out texts."""
    evaluation: Evaluation
    cells: tuple[Cell, ...]
    """What every scheme costs: in the whole model, in each third of its layers, and in the worst modules."""
    trials: tuple[Trial, ...]
    """Every remedy that was measured."""
    not_possible: dict[str, str]
    """Remedies that this model does not allow, with the reason."""
    by_torchao: tuple[Damage, Damage] | None = None
    """The damage of `TORCHAO_SCHEMES` together: (with torchao's kernels, emulated); None where it is not installed."""

    @property
    def has_sinks(self) -> bool:
        return bool(self.evaluation.is_sink.any())

    @property
    def advice(self) -> list[Trial]:
        """The remedies that help, each for a scheme, the largest effect first."""
        return sorted((trial for trial in self.trials if trial.holds), key=lambda trial: -trial.recovered.change)

    @property
    def broken(self) -> list[Cell]:
        """The schemes that cost enough to need a remedy, the worst first."""
        costly = [cell for cell in self.at("model") if needs_remedy(cell.measured)]
        return sorted(costly, key=lambda cell: -cell.measured.change)

    @property
    def why_nothing(self) -> str | None:
        """Why nothing is advised; None where something is."""
        if self.advice:
            return None
        if not self.broken:
            return f"no scheme clearly costs {NEGLIGIBLE:g} nats a token"
        if not self.has_sinks:
            return "no token of these texts is a sink, so no remedy was tried"
        return "no remedy recovers more than its control"

    @property
    def advice_status(self) -> dict[str, Any]:
        """Whether nothing needs to be done, and why nothing is advised, as the summary and the recipe say it."""
        return {"nothing_needed": not self.broken, "why_nothing": self.why_nothing}

    def at(self, level: str) -> list[Cell]:
        """The cells of a level: model, group or module."""
        return [cell for cell in self.cells if cell.level == level]

    @cached_property
    def rank_correlation(self) -> float:
        """Spearman's rho of prediction and measurement, over the cells of layer groups and schemes."""
        cells = self.at("group")
        return _correlation([cell.predicted for cell in cells], [cell.measured.change for cell in cells])

    @cached_property
    def repeatability(self) -> float:
        """Spearman's rho of the measurements on every other text with those on the rest.

        No prediction can be expected to correlate much better.
        """
        cells = self.at("group")
        even = [np.mean(cell.measured.by_text[0::2]) for cell in cells]
        odd = [np.mean(cell.measured.by_text[1::2]) for cell in cells]
        return _correlation(even, odd)

    @property
    def torchao_says(self) -> str | None:
        """Whether torchao agrees with the emulation, in a sentence; None where it is not installed."""
        if self.by_torchao is None:
            return None
        real, emulated = (cost.change for cost in self.by_torchao)
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
        write_recipe(folder, self.loaded, self.evaluation, self.advice, self.advice_status)


def _tables(audit: AuditResult) -> dict[str, dict[str, list]]:
    """Columns by table; the rows of modules are in the model's order."""
    layer_of = layers_of(audit.evaluation.model)
    anatomy, names = anatomy_of(audit.evaluation.model), dict(audit.evaluation.model.named_modules())
    block_name = {id(part): name for name, part in names.items()}

    def place(module: str) -> dict[str, Any]:
        """Where a module is: its layer, and its name within the layer."""
        layer = layer_of[module]
        prefix = block_name[id(anatomy.layers[layer].block)] + "."
        return {"module": module, "layer": layer, "kind": module.removeprefix(prefix)}

    order = {name: number for number, name in enumerate(names)}
    prediction = audit.evaluation.prediction
    statistics = sorted(prediction.statistics.items(), key=lambda item: order[item[0][0]])
    damages = sorted(prediction.damages.items(), key=lambda item: order[item[0][0]])
    rows = {
        READINGS: [{**place(module), "what": what, **inputs.row()} for (module, what), inputs in statistics],
        PREDICTIONS: [{**place(module), "scheme": scheme, "predicted": value} for (module, scheme), value in damages],
        DAMAGES: [{**vars(cell), **_ends("measured", cell.measured)} for cell in audit.cells],
        TRIALS: [_trial_row(trial) for trial in audit.trials],
        SINKS: [_sink_row(audit, text, position) for text, position in audit.evaluation.is_sink.nonzero().tolist()],
    }
    return {schema.name: schema.from_rows(schema_rows) for schema, schema_rows in rows.items()}


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
    """A row of the table of remedies, whose columns say `left` and `won` for what remains and what is recovered."""
    row = vars(trial) | {"damage": trial.damage.change, "holds": trial.holds}
    row |= _ends("left", trial.remaining)
    row |= _ends("won", trial.recovered)
    return row | _ends("control", trial.control)


def _ends(name: str, change: Damage) -> dict[str, float]:
    """A change of the loss with both ends of its interval, as columns or keys of that name."""
    return {name: change.change, f"{name}_low": change.low, f"{name}_high": change.high}


def _summary(audit: AuditResult) -> dict[str, Any]:
    """The object written as summary.json and printed with --json."""
    is_sink = audit.evaluation.is_sink
    return {
        "kind": "audit",
        "model": audit.loaded.name,
        "family": anatomy_of(audit.evaluation.model).family.name,
        "num_layers": len(anatomy_of(audit.evaluation.model).layers),
        "tokens": audit.batch.describe() | {"source": audit.batch.source},
        "loss": float(audit.evaluation.baseline.mean()),
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
            | {"damage": trial.damage.change, **_ends("won", trial.recovered), **_ends("control", trial.control)}
            for trial in audit.advice
        ],
        **audit.advice_status,
        "refused": audit.not_possible,
        "torchao": audit.torchao_says,
        "story": _story(audit) + beginnings_in_words(audit.receipt, lacks_sink=not audit.has_sinks),
    }


def _story(audit: AuditResult) -> str:
    """What breaks, and the most useful thing to do: the three worst schemes, and the best remedy of three at most."""
    # Without sinks a window that keeps them is the same as one that does not, and would be told twice.
    broken = [cell for cell in audit.broken if audit.has_sinks or not SCHEMES[cell.scheme].keeps_sinks]
    worst = "; ".join(f"{scheme_in_words(cell.scheme)} costs {cell.measured.change:.3f}" for cell in broken[:3])
    if not audit.broken:
        return f"{audit.loaded.name}: nothing needs to be done, since {audit.why_nothing}."
    if not audit.has_sinks:
        return (
            f"{audit.loaded.name}: no token of these texts is a sink, so nothing needs to be done about sinks. Costs "
            f"in nats a token, the worst first: {worst}."
        )
    lines = [f"{audit.loaded.name}, in nats a token: {worst}."]
    best: dict[str, Trial] = {}  # of each scheme; the advice begins with the largest effect
    for trial in audit.advice:
        best.setdefault(trial.scheme, trial)
    for trial in list(best.values())[:3]:
        lines.append(
            f"For {scheme_in_words(trial.scheme)}: {trial.remedy}, which recovers {trial.share:z.0%} of the damage "
            f"(its control {trial.control_share:z.0%})."
        )
    if not audit.advice:
        lines.append(f"Nothing helps: {audit.why_nothing}.")
    return " ".join(lines)


def _correlation(x: list, y: list) -> float:
    return rank_correlation(np.array(x), np.array(y))
