"""Results as a notebook shows them, and their pages. Results reach this through `sinkscope.results.result.VIEWS`."""

from __future__ import annotations

import base64
import io
import tempfile
from pathlib import Path

from sinkscope.capture.trace import Trace
from sinkscope.origins.fingerprint import Fingerprint
from sinkscope.origins.initial_bias import Bias
from sinkscope.pretrain.comparison import TrainingComparison
from sinkscope.remedies.audited import Audit
from sinkscope.report import html
from sinkscope.report.audit import write_audit_page
from sinkscope.report.bias import write_bias_page
from sinkscope.report.comparison import write_training_page
from sinkscope.report.fingerprint import write_fingerprint_page
from sinkscope.report.intervened import write_intervened_page
from sinkscope.report.picture import can_draw
from sinkscope.report.picture import chain_figure as chain_figure
from sinkscope.report.study import write_study_page
from sinkscope.report.text import isolated
from sinkscope.results.result import Result
from sinkscope.results.run_folder import check_page
from sinkscope.studies.intervene import Intervened
from sinkscope.studies.study import Study

MOST_ROWS = 40
"""Rows that a notebook shows."""
NOTEBOOK_DPI = 50


def in_notebook(result: Result) -> str:
    """The story, the table that says most and, of a chain, its picture; without script and without a network."""
    name, *columns = result.headline
    parts = [f"<p><b>{type(result).__name__}</b>: {isolated(result.story)}</p>"]
    if (table := result.tables.get(name)) is not None:
        rows = list(zip(*(list(table[column])[:MOST_ROWS] for column in columns), strict=True))
        cut = f", {len(rows)} of {len(table[columns[0]])} rows" if len(rows) < len(table[columns[0]]) else ""
        shown = html.table([column.replace("_", " ") for column in columns], rows)
        parts.append(f"<p>{name.replace('_', ' ')}{cut}</p>{shown}" if rows else "")
    chain = result.trace if isinstance(result, Study) else result
    if isinstance(chain, Trace) and chain.has_findings and can_draw():
        image = io.BytesIO()
        chain.plot().savefig(image, format="png", dpi=NOTEBOOK_DPI)
        data = base64.b64encode(image.getvalue()).decode()
        parts.append(f'<img alt="The chain from left to right" src="data:image/png;base64,{data}">')
    return "".join(parts)


def write_report(result: Result, out: Path, *, overwrite: bool = False) -> None:
    """Writes the page of a result, from its tables alone."""
    check_page(out, overwrite)
    if isinstance(result, TrainingComparison):
        write_training_page(result, out, overwrite=overwrite)
    elif isinstance(result, Fingerprint):
        write_fingerprint_page(result, "", out)
    elif isinstance(result, Audit):
        write_audit_page(result.tables, result.summary, "", out)
    elif isinstance(result, Intervened):
        write_intervened_page(result, "", out)
    else:
        write_page = write_bias_page if isinstance(result, Bias) else write_study_page
        with tempfile.TemporaryDirectory() as folder:
            write_page(result.save(Path(folder) / "run"), out)
