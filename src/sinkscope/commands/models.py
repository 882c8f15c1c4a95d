"""sinkscope models: the families that are supported, and where one model keeps its parts."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from sinkscope.commands import options


def models_command(
    name: Annotated[
        str | None, typer.Argument(help="A family of the table, or a model to look into.", show_default=False)
    ] = None,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON to standard output, and nothing else.")] = False,
) -> None:
    """List the families that are supported, or show where one model keeps its parts.

    Example: sinkscope models gpt2
    """
    from sinkscope.models.anatomy import anatomy_of
    from sinkscope.models.families import FAMILIES
    from sinkscope.models.loading import load
    from sinkscope.report import terminal

    rows = [family.row() for family in FAMILIES if name in (None, family.name)]
    if rows:
        print(json.dumps(rows, indent=2)) if as_json else terminal.show_families(rows)
        return
    with terminal.working("loading the model"):
        parts = anatomy_of(load(name, trust_remote_code=trust_remote_code).model).row()
    print(json.dumps(parts, indent=2)) if as_json else terminal.show_anatomy(name or "", parts)
