"""The bias of a model in a few numbers and a few sentences, from its tables."""

from __future__ import annotations

from typing import Any

import numpy as np

from sinkscope.initial_bias.controls import CONTROLS
from sinkscope.initial_bias.reading import BiasReadings
from sinkscope.models.anatomy import anatomy_of
from sinkscope.results.tables import rows_where
from sinkscope.statistics import rank_correlation

Tables = dict[str, dict[str, list]]
Row = dict[str, Any]


def bias_summary(found: BiasReadings, tables: Tables) -> Row:
    """The entries of summary.json."""
    anatomy = anatomy_of(found.model.model)
    one = len(found.untouched) == 1
    quantities = {row["quantity"]: row for row in rows_where(tables["bias"]) if one or row["over"] == "seeds"}
    summary = {
        "model": found.name,
        "family": anatomy.family.name,
        "num_layers": len(anatomy.layers),
        "width": anatomy.width,
        "vocabulary": found.vocabulary,
        "tokens": found.batch.describe(),
        "seeds": [seed for seed in found.seeds if seed is not None],
        "prefers_tokens": _above_zero(quantities["entropy_deficit"], "value"),
        "bias": {name: _interval(row, "value") for name, row in quantities.items()},
        "preferred_tokens": [
            row["token"] for row in rows_where(tables["preferred_tokens"]) if row["seed"] == found.seeds[0]
        ],
        "contraction": _contraction(tables),
        "variance_link": _variance_link(found),
        "controls": _controls(tables) | {name: {"refused": reason} for name, reason in found.refused.items()},
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


def _variance_link(found: BiasReadings) -> list[float]:
    """By layer, the rank correlation over positions of value variance and cosine between sequences, mean over seeds."""
    each = [reading.contraction for reading in found.untouched]
    return [
        float(np.mean([rank_correlation(one.value_variance[layer], one.inter_by_position[layer + 1]) for one in each]))
        for layer in range(len(each[0].value_variance))
    ]


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
