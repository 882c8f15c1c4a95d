"""The page of a run of `sinkscope fingerprint`: the answer, every pair with its verdict, and the pairs as a map."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from sinkscope.origins.fingerprint import Fingerprint
from sinkscope.report import html
from sinkscope.report.figure import Figure, categories, heat_map
from sinkscope.report.html import header, write_page
from sinkscope.report.text import escaped, interval, isolated, plotted

METHOD = {
    "alignment": "Every model reads the same uniformly random sequences. Alignment correlates the whitened ranks of "
    "their hidden dimensions one by one, in the last layer and in the embeddings of the last tokens: 1 for a model "
    "with itself, 0 on average for models that began with different weights, however alike they react. z counts "
    "standard deviations over random renamings of one model's dimensions; q is the rate of false discoveries among "
    "the pairs of this run. Same origin needs q of at most 1 % and a z above that of every unrelated model.",
    "seedprint": "The published test: Kendall's tau over the tenth of the dimensions with the smallest mean that both "
    "models share, with a p-value that takes dimensions for independent. It is not calibrated; use it to compare.",
}


def write_fingerprint_page(result: Fingerprint, command: str, destination: Path) -> None:
    """Writes the page of a result."""
    inputs = result.signatures[0].inputs
    title = "Origins of " + ", ".join(signature.name for signature in result.signatures[:4])
    circumstances = f"{inputs.num_sequences} sequences of {inputs.length} ids below {inputs.vocabulary}"
    figure = pairs_map(result)
    columns = ("base", "suspect", "verdict", "effect", "95 % interval", "z", "p", "q", "largest unrelated z")
    rows = [
        (
            pair.base,
            pair.suspect,
            pair.verdict,
            _known(pair.effect),
            "" if math.isnan(pair.low) else interval(pair.low, pair.high),
            *map(_known, (pair.z, pair.p, pair.q, pair.unrelated_z)),
        )
        for pair in sorted(result.pairs, key=lambda pair: (math.isnan(pair.z), -pair.z))
    ]
    unrelated = [
        (row["model"], row["unrelated"], _known(row["effect"]), _known(row["z"])) for row in result.unrelated_rows
    ]
    compared = html.table(("model", "unrelated model", "alignment", "z"), unrelated)
    body = [
        header(title, circumstances),
        '<main id="main">',
        f'<p class="answer">{isolated(result.story)}</p>',
        f"<p>{escaped(result.caveat)}</p>",
        f"<h2>Pairs</h2>{html.table(columns, rows)}",
        f"<details><summary>Unrelated models, for comparison</summary>{compared}</details>" if unrelated else "",
        f'<h2>Map</h2><div class="figures">{html.figure(figure, wide=True)}</div>',
        f"<h2>Method</h2><p>{escaped(METHOD[result.method])}</p><p><code>{isolated(command)}</code></p></main>",
    ]
    write_page(destination, title, "".join(body), [figure])


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def pairs_map(result: Fingerprint) -> Figure:
    """The effect of every pair."""
    names = [signature.name for signature in result.signatures]
    values = np.full((len(names), len(names)), np.nan)
    for pair in result.pairs:
        place = names.index(pair.base), names.index(pair.suspect)
        values[place] = values[place[::-1]] = pair.effect
    shown = [plotted(name) for name in names]
    return Figure(
        "pairs",
        "Effect by pair",
        "Alignment of two models, or the mean tau of the published test; pairs that were not asked for are blank.",
        ("pairs",),
        [heat_map(shown, shown, values, "effect", "%{y} and %{x}", largest=1.0)],
        {"xaxis": categories(shown), "yaxis": categories(shown)},
        ("base", "suspect", "effect"),
        [(pair.base, pair.suspect, _known(pair.effect)) for pair in result.pairs],
        height=min(900, 220 + 24 * len(names)),
    )
