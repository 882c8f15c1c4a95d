"""What pages of different products share of a run."""

from __future__ import annotations

from sinkscope.pages import html
from sinkscope.pages.text import escaped, isolated
from sinkscope.results.run import Run


def method(run: Run, text: str = "") -> str:
    """The last section: how the numbers were made, what was typed, where it ran and which files it wrote."""
    shown = f"<pre><code>{isolated(run.command)}</code></pre>" if run.command else ""
    return (
        f'<h2 id="method">Method</h2>{f"<p>{text}</p>" if text else ""}{shown}'
        + html.facts([*run.environment.items()])
        + f"<details open><summary>config.yaml</summary>{html.facts(run.config.items())}</details>"
        + f'<p class="muted">Files of this run: {escaped(", ".join(run.files))}</p>'
    )
