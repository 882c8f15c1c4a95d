"""The command `sinkscope models`: which families are supported, and where a model keeps its modules."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated

import typer

from sinkscope.cli_options import TrustRemoteCode


@dataclass(frozen=True, kw_only=True)
class ModelsOptions:
    """Which model is shown."""

    name: Annotated[
        str | None, typer.Argument(help="A family of the table, or a model to look into.", show_default=False)
    ] = None
    trust_remote_code: TrustRemoteCode = False
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON to standard output, and nothing else.")] = False


def models_command(options: ModelsOptions) -> None:
    """List the families in the table, or show where a model keeps its modules.

    Example: sinkscope models gpt2
    """
    from sinkscope.models.anatomy import anatomy_of
    from sinkscope.models.families import FAMILIES
    from sinkscope.models.loading import load
    from sinkscope.pages import progress

    rows = [family.row() for family in FAMILIES if options.name in (None, family.name)]
    if rows:
        if options.as_json:
            print(json.dumps(rows, indent=2))
        else:
            show_families(rows)
        return
    with progress.working("loading the model"):
        parts = anatomy_of(load(options.name, trust_remote_code=options.trust_remote_code).model).row()
    if options.as_json:
        print(json.dumps(parts, indent=2))
    else:
        show_anatomy(options.name or "", parts)


def show_families(rows: list[dict]) -> None:
    """Prints the table of families."""
    from sinkscope.pages.terminal import Terminal

    columns = ("family", "blocks", "output projection", "feed-forward", "notes")
    out = Terminal()
    out.table("families", columns, [tuple(str(value) for value in row.values()) for row in rows], limit=len(rows))
    if len(rows) > 1:
        out.say("The parts of any other causal model of transformers are found by a short pass: sinkscope models MODEL")


def show_anatomy(name: str, parts: dict) -> None:
    """Prints where a model keeps its modules, a line each."""
    from sinkscope.pages.terminal import Terminal

    out = Terminal(soft_wrap=True)
    out.say(name, style="bold")
    for key, value in parts.items():
        out.say(f"  {key}: {value}")
