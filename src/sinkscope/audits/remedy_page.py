"""The page of a remedied model: what 8-bit activations cost before and after, beside the controls."""

from __future__ import annotations

from pathlib import Path

from sinkscope.audits.schemas import LOSSES
from sinkscope.audits.texts import held_out_in_words
from sinkscope.pages import html
from sinkscope.pages.figure import Figure, axis, categories, level, levels, line
from sinkscope.pages.text import interval, plotted
from sinkscope.results.run import Run


def write_page(run: Run, destination: Path) -> None:
    """Writes the page of a remedied model."""
    summary = run.summary
    title = f"What helps in 8 bits: {summary['model']}"
    circumstances = held_out_in_words(summary["num_texts"], summary["length"], summary.get("source"))
    html.write_page(destination, "audits/remedy_page.html", title, figures(run), circumstances, story=summary["story"])


def figures(run: Run) -> list[Figure]:
    """One figure: the loss of each model above that of the baseline, in 16 bits and in 8."""
    rows = run.rows(LOSSES.name)
    names = {row["model"]: row["model"] + " (control)" * row["control"] for row in rows}
    traces = []
    for look, scheme in enumerate(dict.fromkeys(row["scheme"] for row in rows)):
        of_scheme = [row for row in rows if row["scheme"] == scheme]
        x = [plotted(names[row["model"]]) for row in of_scheme]
        y = [row["change"] for row in of_scheme]
        ends = {end: [row[end] for row in of_scheme] for end in ("low", "high")}
        traces.append(line(x, y, scheme, look, mode="markers", **ends))
    listed = []
    for row in rows:
        loss = (names[row["model"]], row["scheme"], row["loss"], row["change"], interval(row["low"], row["high"]))
        listed.append((*loss, row["won_back"], interval(row["won_low"], row["won_high"])))
    return [
        Figure(
            "losses",
            "What 8-bit activations cost, before and after",
            "Loss above that of the baseline in 16 bits, in nats a token. The lines are 95 % intervals over texts.",
            (LOSSES.name,),
            traces,
            {
                "xaxis": categories(list(map(plotted, names.values()))),
                "yaxis": axis("nats a token"),
                **levels(level(0, "baseline in 16 bits")),
            },
            ("model", "scheme", "loss", "change", "95 % interval", "share recovered", "95 % interval"),
            listed,
            height=380,
        )
    ]
