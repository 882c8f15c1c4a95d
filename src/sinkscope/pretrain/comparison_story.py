"""A comparison of training runs in two sentences: which variant reaches the baseline's loss first, and its sink."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sinkscope.results.tables import rows_where

Row = dict[str, Any]
AT_THE_END = {"sink_rate": "sink rate", "dom_ratio": "DomRatio", "effective_rank": "effective rank"}


def comparison_story(tables: Mapping[str, Mapping[str, list]], baseline: str) -> str:
    """The sentences, from the tables `variants` and `training_runs`."""

    def of(variant: str, quantity: str) -> Row | None:
        return next(iter(rows_where(tables["variants"], variant=variant, quantity=quantity)), None)

    loss = of(baseline, "validation_loss")
    assert loss is not None
    final = f"{baseline}'s final validation loss of {loss['mean']:.4f}"
    ratios = [row for row in rows_where(tables["variants"], quantity="tokens_ratio") if row["variant"] != baseline]
    num_runs = len(tables["training_runs"]["run"])
    if num_runs == 1:
        return _of_one_run(tables, of)
    if not ratios:
        return f"{num_runs} runs of {baseline}, and no other variant to compare them with: {final}."
    reached = [row for row in ratios if row["mean"] is not None and row["bound"] != ">"]
    if not reached:
        names, does = ", ".join(row["variant"] for row in ratios), "does" if len(ratios) == 1 else "do"
        every = " in every seed" if any(row["num_seeds"] > 1 for row in ratios) else ""
        return f"{names} {does} not reach {final}{every}."
    best = min(reached, key=lambda row: row["mean"])
    of_many = f"Of {len(ratios)} other variants, " if len(ratios) > 1 else ""
    text = f"{of_many}{best['variant']} reaches {final} with {_percent(best)} of its tokens{_seeds(best)}"
    seconds = of(best["variant"], "seconds_ratio")
    if seconds is not None and seconds["mean"] is not None:
        text += f", and with {_percent(seconds)} of its seconds{_seeds(seconds)}"
    found = [
        f"{name} {_mean(own)} against {_mean(base)}"
        for quantity, name in AT_THE_END.items()
        if (own := of(best["variant"], quantity)) is not None and (base := of(baseline, quantity)) is not None
    ]
    return f"{text}. At the end, on held-out text: {', '.join(found)}." if found else f"{text}."


def _of_one_run(tables: Mapping[str, Mapping[str, list]], of: Callable[[str, str], Row | None]) -> str:
    """What a run reached, how its sink ended, and which links were born on held-out text."""
    (run,) = rows_where(tables["training_runs"])
    text = f"{run['variant']}, seed {run['seed']}: validation loss {run['validation_loss']:.4f} after "
    text += f"{run['tokens']:,} tokens"
    found = [f"{name} {_mean(row)}" for key, name in AT_THE_END.items() if (row := of(run["variant"], key)) is not None]
    text += f"; {', '.join(found)}." if found else "."
    births = rows_where(tables["births"], batch="text")
    born = sorted((row for row in births if row["tokens"] is not None), key=lambda row: row["tokens"])
    if born:
        listed = [f"{row['link']} at {row['tokens']:,} tokens" for row in born]
        text += f" Born on held-out text: {', '.join(listed)}."
    if missing := [row["link"] for row in births if row["tokens"] is None]:
        text += f" Not born: {', '.join(missing)}."
    return text


def _percent(row: Row) -> str:
    return f"{row['bound']} {100 * row['mean']:.0f} %".strip()


def _seeds(row: Row) -> str:
    """The interval over seeds, or a note that there is none."""
    if row["low"] is None:
        return " (one seed, no interval)" if row["num_seeds"] == 1 else f" ({row['num_seeds']} seeds, no interval)"
    doubt = "; no clear difference" if row["low"] <= 1 <= row["high"] else ""
    return f" ({100 * row['low']:.0f} to {100 * row['high']:.0f} % over {row['num_seeds']} seeds{doubt})"


def _mean(row: Row) -> str:
    return f"{100 * row['mean']:.1f} %" if row["quantity"] == "sink_rate" else f"{row['mean']:,.3g}"
