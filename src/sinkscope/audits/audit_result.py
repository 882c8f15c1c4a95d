"""What `audit` gives back: what every scheme costs, what to do with it, its tables, its summary and its story."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from sinkscope.audits.advice import CurvePoint, Decision, Trial, decide
from sinkscope.audits.damage import Damage
from sinkscope.audits.evaluation import Evaluation
from sinkscope.audits.recipe import ends, write_recipe
from sinkscope.audits.schemas import (
    AUDIT_TABLES,
    CONTROL_FAILS,
    CURVE,
    DAMAGES,
    DECISIONS,
    PLACES,
    PREDICTIONS,
    READINGS,
    SINKS,
    TRIALS,
    VERDICTS,
)
from sinkscope.audits.schemes import layers_of
from sinkscope.models.anatomy import anatomy_of
from sinkscope.models.loaded import LoadedModel
from sinkscope.models.token_batches import TokenBatch
from sinkscope.results.result import Result
from sinkscope.results.run_folder import RunFolder
from sinkscope.statistics import rank_correlation
from sinkscope.tracing.receipt import Receipt, beginnings_in_words, described

NUM_AROUND = 8
"""Tokens on each side that show where a sink token stands."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What a scheme costs somewhere in a model: predicted, and measured."""

    level: str
    """model, group (a third of the layers) or module."""
    place: str
    """all, the group of layers, or the module's name."""
    scheme: str
    what: str
    """linear, cache or window."""
    predicted: float
    measured: Damage
    control: float | None = None
    divergence: Damage | None = None
    """KL divergence from the baseline's predictions, of the whole model."""
    same_top: Damage | None = None
    """Share of tokens after which both find the same one the most probable."""

    @property
    def control_fails(self) -> bool:
        """Whether the control changed the loss, so that the rounding itself is not to be trusted."""
        return self.control is not None and abs(self.control) > CONTROL_FAILS


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
    points: tuple[CurvePoint, ...]
    """What is left of each damage with so many groups of modules in 16 bits."""
    not_possible: dict[str, str]
    """Schemes and remedies that this model does not allow, with the reason."""

    @property
    def has_sinks(self) -> bool:
        return bool(self.evaluation.is_sink.any())

    @cached_property
    def decisions(self) -> list[Decision]:
        """What to do with each scheme: of linear layers, of the cache and windows, and in each the safe ones first,
        those that can be repaired, and the others; of these, the fewest bits first."""
        by_name, model = {scheme.name: scheme for scheme in self.evaluation.schemes}, self.evaluation.model
        decisions = []
        for cell in self.at("model"):
            scheme = by_name[cell.scheme]
            decisions.append(decide(scheme, cell.measured, scheme.bits(model), self.trials))
        return sorted(
            decisions,
            key=lambda decision: (
                PLACES.index(decision.what),
                VERDICTS.index(decision.verdict),
                round(decision.bits, 1),
                decision.remaining.change,
            ),
        )

    @property
    def best(self) -> Decision | None:
        """The cheapest scheme of linear layers that is safe, or the cheapest that can be repaired; None without one."""
        usable = [decision for decision in self.decisions if decision.verdict in ("safe", "repair")]
        return next((decision for decision in usable if decision.what == "linear"), None)

    @property
    def advice(self) -> list[Trial]:
        """The remedies that help, each for a scheme, the largest effect first."""
        return sorted((trial for trial in self.trials if trial.holds), key=lambda trial: -trial.recovered.change)

    @property
    def failed_controls(self) -> list[Cell]:
        """The schemes whose control changed the loss."""
        return [cell for cell in self.at("model") if cell.control_fails]

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

    @cached_property
    def tables(self) -> dict[str, dict[str, list]]:
        """Columns by table: decisions, readings, predictions, damages, remedies, curve, sink_tokens."""
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
        write_recipe(folder, self.loaded, self.evaluation, self.decisions, self.trials)
        positions = [row.nonzero().flatten().tolist() for row in self.evaluation.is_sink]
        folder.write_json("kept_positions.json", positions)


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
    what = {scheme.name: scheme.what for scheme in audit.evaluation.schemes}
    prediction = audit.evaluation.prediction
    statistics = sorted(prediction.statistics.items(), key=lambda item: order[item[0][0]])
    damages = sorted(prediction.damages.items(), key=lambda item: order[item[0][0]])
    rows = {
        DECISIONS: [_decision_row(decision) for decision in audit.decisions],
        READINGS: [{**place(module), "what": part, **inputs.row()} for (module, part), inputs in statistics],
        PREDICTIONS: [
            {**place(module), "scheme": scheme, "what": what[scheme], "predicted": value}
            for (module, scheme), value in damages
        ],
        DAMAGES: [_cell_row(cell) for cell in audit.cells],
        TRIALS: [_trial_row(trial) for trial in audit.trials],
        CURVE: [{**vars(point), **ends("left", point.remaining)} for point in audit.points],
        SINKS: [_sink_row(audit, text, position) for text, position in audit.evaluation.is_sink.nonzero().tolist()],
    }
    return {schema.name: schema.from_rows(schema_rows) for schema, schema_rows in rows.items()}


def _decision_row(decision: Decision) -> dict[str, Any]:
    """A row of the table of decisions."""
    row = vars(decision) | {"repair": None if decision.repair is None else decision.repair.remedy}
    return row | ends("costs", decision.damage) | ends("left", decision.remaining)


def _cell_row(cell: Cell) -> dict[str, Any]:
    """A row of the table of damages."""
    row = {**vars(cell), **ends("measured", cell.measured)}
    for name in ("divergence", "same_top"):
        value = getattr(cell, name)
        row |= dict.fromkeys((name, f"{name}_low", f"{name}_high")) if value is None else ends(name, value)
    return row


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
    row |= ends("left", trial.remaining)
    row |= ends("won", trial.recovered)
    return row | ends("control", trial.control)


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
        "best": None if audit.best is None else audit.best.scheme,
        "decisions": {decision.scheme: decision.verdict for decision in audit.decisions},
        "schemes": {
            cell.scheme: {
                "predicted": cell.predicted,
                **ends("measured", cell.measured),
                "divergence": None if cell.divergence is None else cell.divergence.change,
                "same_top": None if cell.same_top is None else cell.same_top.change,
                "control": cell.control,
                "control_fails": cell.control_fails,
            }
            for cell in audit.at("model")
        },
        "rank_correlation": audit.rank_correlation,
        "num_cells": len(audit.at("group")),
        "repeatability": audit.repeatability,
        "advice": [
            {"remedy": trial.remedy, "scheme": trial.scheme, "what": trial.what, "share_won_back": trial.share}
            | {"is_experiment": not trial.is_loaded, "damage": trial.damage.change}
            | ends("won", trial.recovered)
            | ends("left", trial.remaining)
            | ends("control", trial.control)
            for trial in audit.advice
        ],
        "refused": audit.not_possible,
        "story": _story(audit) + beginnings_in_words(audit.receipt, lacks_sink=not audit.has_sinks),
    }


def _story(audit: AuditResult) -> str:
    """What cannot be decided, the cheapest scheme to use, and the others."""
    sentences = []
    by_verdict: dict[str, list[Decision]] = {}
    for decision in audit.decisions:
        by_verdict.setdefault(decision.verdict, []).append(decision)
    if undecided := by_verdict.get("undecided"):
        names = ", ".join(decision.scheme for decision in undecided)
        sentences.append(f"Too few texts to decide on {names}: give more with --num-sequences.")
    if audit.failed_controls:
        names = ", ".join(cell.scheme for cell in audit.failed_controls)
        sentences.append(f"Don't trust {names}: the control, which rounds to 24 bits, changed the loss.")
    best = audit.best
    if best is None and any(decision.what == "linear" for decision in audit.decisions):
        sentences.append("No scheme of linear layers is safe, and none can be repaired within the budget.")
    if best is not None:
        how = "safe as it is" if best.repair is None else f"to be repaired: {best.repair.remedy}"
        sentences.append(f"The cheapest for linear layers is {best.scheme}, {how}: {_costs(best)}.")
    for verdict, word in (("safe", "Also safe"), ("repair", "To be repaired"), ("avoid", "Avoid")):
        others = [decision for decision in by_verdict.get(verdict, ()) if decision is not best]
        if others:
            listed = ", ".join(f"{other.scheme} ({other.remaining.change:+.3f})" for other in others)
            sentences.append(f"{word}: {listed}.")
    return f"{audit.loaded.name}, in nats a token. " + " ".join(sentences)


def _costs(decision: Decision) -> str:
    """What is lost, with a repair and without it."""
    left = decision.remaining
    cost = f"{left.change:+.3f} ({left.low:+.3f} to {left.high:+.3f}) at {decision.bits:.2f} bits"
    return cost if decision.repair is None else f"{cost}, {decision.damage.change:+.3f} without it"


def _correlation(x: list, y: list) -> float:
    return rank_correlation(np.array(x), np.array(y))
