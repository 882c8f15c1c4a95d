"""The page of a remedied model: what 8 bits cost it before and after, beside the controls."""

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
    summary, drawn = run.summary, figures(run)
    title = f"What helps in 8 bits: {summary['model']}"
    circumstances = held_out_in_words(summary["num_texts"], summary["length"], summary.get("source"))
    html.write_page(destination, "audits/remedy_page.html", title, drawn, circumstances, story=summary["story"])


def figures(run: Run) -> list[Figure]:
    """The loss of each treated model above the original's, in 16 bits and in 8."""
    rows = run.rows(LOSSES.name)
    names = {row["model"]: row["model"] + " (control)" * row["control"] for row in rows}
    traces = []
    for look, scheme in enumerate(dict.fromkeys(row["scheme"] for row in rows)):
        own = [row for row in rows if row["scheme"] == scheme]
        ends = {end: [row[end] for row in own] for end in ("low", "high")}
        x, y = [plotted(names[row["model"]]) for row in own], [row["change"] for row in own]
        traces.append(line(x, y, scheme, look, mode="markers", **ends))
    listed = [
        (names[row["model"]], row["scheme"], row["loss"], row["change"], interval(row["low"], row["high"]))
        for row in rows
    ]
    return [
        Figure(
            "losses",
            "What 8 bits cost, before and after",
            "Loss above that of the original in 16 bits, in nats a token; lines are 95 % intervals over texts.",
            (LOSSES.name,),
            traces,
            {
                "xaxis": categories(list(map(plotted, names.values()))),
                "yaxis": axis("nats a token"),
                **levels(level(0, "original in 16 bits")),
            },
            ("model", "scheme", "loss", "change", "95 % interval", "won back", "95 % interval"),
            [
                (*entry, row["won_back"], interval(row["won_low"], row["won_high"]))
                for entry, row in zip(listed, rows, strict=True)
            ],
            height=380,
        )
    ]
