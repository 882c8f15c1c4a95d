"""Results as a notebook shows them, and their pages. Results reach this through `sinkscope.results.result.VIEWS`."""

from __future__ import annotations

import base64
import io
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sinkscope.audits.audit_page import audit_figures, write_audit_page
from sinkscope.audits.remedy_page import remedied_figures, write_remedied_page
from sinkscope.compare.page import write_training_page
from sinkscope.errors import InputError
from sinkscope.fingerprints.page import pairs_map, write_fingerprint_page
from sinkscope.initial_bias.page import bias_section
from sinkscope.interventions.page import intervened_figures, write_intervened_page
from sinkscope.pages import html
from sinkscope.pages.drawn import drawing
from sinkscope.pages.figure import Figure
from sinkscope.pages.text import isolated
from sinkscope.pretrain.comparison import TrainingComparison
from sinkscope.pretrain.figures import birth_figures, training_figures
from sinkscope.pretrain.page import write_training_run_page
from sinkscope.results.result import Result
from sinkscope.results.run import Run, read_run
from sinkscope.results.run_folder import check_page
from sinkscope.results.run_page import write_page_of
from sinkscope.results.saved import KINDS, SavedResult
from sinkscope.studies.page import study_page_figures
from sinkscope.studies.study import Study
from sinkscope.tracing.picture import can_draw, chain_figure
from sinkscope.tracing.trace import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

MOST_ROWS = 40
"""Rows that a notebook shows."""
SMALL_DPI = 50
"""Of the picture beside a story."""
MAIN = {
    "training": ("loss-tokens", "sink-rate", "dom-ratio"),
    "audit": ("remedies", "scatter"),
    "intervene": ("sink-rate", "received"),
}
"""The figures that say most, of a kind whose first figure does not."""


def in_notebook(result: Result) -> str:
    """The story, the table that says most and, of a chain, its picture; without script and without a network."""
    name, *columns = result.headline
    answer, *below = result.story.split("\n\n")
    parts = [
        f"<p><b>{type(result).__name__}</b>: {isolated(answer)}</p>",
        *(f"<p>{isolated(each)}</p>" for each in below),
    ]
    if (table := result.tables.get(name)) is not None:
        rows = list(zip(*(list(table[column])[:MOST_ROWS] for column in columns), strict=True))
        cut = f", {len(rows)} of {len(table[columns[0]])} rows" if len(rows) < len(table[columns[0]]) else ""
        shown = html.table([column.replace("_", " ") for column in columns], rows)
        parts.append(f"<p>{name.replace('_', ' ')}{cut}</p>{shown}" if rows else "")
    chain = _chain_of(result)
    if chain is not None and not _lacking(chain) and can_draw():
        image = io.BytesIO()
        chain.plot().savefig(image, format="png", dpi=SMALL_DPI)
        data = base64.b64encode(image.getvalue()).decode()
        parts.append(f'<img alt="The chain from left to right" src="data:image/png;base64,{data}">')
    return "".join(parts)


def plot(result: Result, names: Sequence[str]) -> Drawing:
    """Figures of the result's page by name, drawn by matplotlib; without names the chain, or those that say most."""
    chain = _whole_chain_of(result)
    if not names and chain is not None:
        return chain_figure(chain.tables, chain.summary)
    found = {figure.id: figure for figure in _figures(result)}
    if unknown := [name for name in names if name not in found]:
        raise InputError(
            expected=f"names of figures: {', '.join(found)}", found=repr(unknown[0]), next_step="Choose some of them"
        )
    main = [name for name in MAIN.get(_kind(result) or "", ()) if name in found]
    return drawing([found[name] for name in names or main or list(found)[:1]])


def _kind(result: Result) -> str | None:
    if isinstance(result, TrainingComparison):
        return "training"
    if isinstance(result, SavedResult):
        return result.kind
    return next((kind for kind, live in KINDS.items() if isinstance(result, live)), None)


def _chain_of(result: Result) -> Trace | SavedResult | None:
    chain = result.trace if isinstance(result, Study) else result
    if isinstance(chain, SavedResult):
        return chain if chain.kind in ("trace", "study") else None
    return chain if isinstance(chain, Trace) else None


def _lacking(chain: Trace | SavedResult) -> list[str]:
    return chain.lacking if isinstance(chain, Trace) else []  # a folder that lacks something is refused


def _whole_chain_of(result: Result) -> Trace | SavedResult | None:
    """The same; refused where it lacks what its page draws."""
    chain = _chain_of(result)
    if chain is not None and (lacking := _lacking(chain)):
        raise InputError(
            expected="a trace of all observables, to draw its page",
            found=f"one without {', '.join(lacking)}",
            next_step="Leave `observables` out, or read its `tables`",
        )
    return chain


def _run_of(result: Result) -> Run:
    """The study, trace or bias, as its folder has it."""
    if isinstance(result, SavedResult):
        return result.run
    with tempfile.TemporaryDirectory() as folder:
        return read_run(result.save(Path(folder) / "run"))


def _figures(result: Result) -> list[Figure]:
    """What the result's page draws."""
    kind = _kind(result)
    if isinstance(result, TrainingComparison):
        return training_figures(result) + birth_figures(result)
    if kind == "fingerprint":
        return [pairs_map(result.tables, result.summary)]
    if kind == "audit":
        return audit_figures(result.tables, result.summary)
    if kind == "remedy":
        return remedied_figures(result.tables)
    if kind == "intervene":
        return intervened_figures(result.tables, result.summary)
    run = _run_of(result)
    return bias_section(run)[1] if kind == "bias" else study_page_figures(run)


def write_report(result: Result, out: Path, *, overwrite: bool = False) -> None:
    """Writes the page of a result, from its tables alone."""
    check_page(out, overwrite)
    _whole_chain_of(result)
    kind, command = _kind(result), result.run.command if isinstance(result, SavedResult) else ""
    if isinstance(result, TrainingComparison) and len(result.runs) == 1:
        write_training_run_page(result, out)
    elif isinstance(result, TrainingComparison):
        write_training_page(result, out, overwrite=overwrite)
    elif kind == "fingerprint":
        write_fingerprint_page(result.tables, result.summary, command, out)
    elif kind == "audit":
        write_audit_page(result.tables, result.summary, command, out)
    elif kind == "remedy":
        write_remedied_page(result.tables, result.summary, out)
    elif kind == "intervene":
        write_intervened_page(result.tables, result.summary, command, out)
    else:
        write_page_of(_run_of(result), out)
