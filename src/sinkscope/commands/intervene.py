"""sinkscope intervene: any combination of interventions, with every observable before, after and under a control."""

from __future__ import annotations

from dataclasses import asdict, dataclass, make_dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sinkscope.arguments import check_trace_length
from sinkscope.commands.options import BatchOptions, Bos, ModelOptions, Output, run_environment, write_request
from sinkscope.interventions.kinds import KINDS, requests

if TYPE_CHECKING:
    Interventions = Any
else:
    # One option for each kind of intervention.
    Interventions = make_dataclass(
        "Interventions",
        [
            (name, Annotated[list[str] | None, typer.Option(help=kind.help, show_default=False)], None)
            for name, kind in KINDS.items()
        ],
        frozen=True,
        kw_only=True,
    )


@dataclass(frozen=True, kw_only=True)
class InterveneOptions:
    """Where interventions act, and how the sequences begin."""

    layers: Annotated[
        str | None, typer.Option(help="Layers of mask, aggregation and dimension edits, such as 0-2.")
    ] = None
    heads: Annotated[str | None, typer.Option(help="Heads of mask and aggregation edits, such as 0,3.")] = None
    bos: Bos = None


def intervene_command(
    interventions: Interventions, asked: InterveneOptions, tokens: BatchOptions, source: ModelOptions, output: Output
) -> None:
    """Change a model's forward pass and show every observable before, after and under a control.

    Aggregation edits act up to the birth of disparity unless --layers says otherwise; their means come from 64 other
    sequences. The control replaces each intervention: a mask by its opposite, amplification by scaling the norm, units
    by matched random ones.

    Example: sinkscope intervene gpt2 --mask-to-self 10 --clamp-dimension 447@10
    """
    check_trace_length(tokens.length)
    given = {kind: texts for kind, texts in asdict(interventions).items() if texts}
    wanted = requests(given, layers=asked.layers, heads=asked.heads)
    path = output.path(source.model)
    from sinkscope.report import terminal
    from sinkscope.results.run_folder import run_folder
    from sinkscope.studies.intervene import intervene

    loaded = source.load()
    with terminal.working("tracing before, after and under the control"):
        result = intervene(loaded, wanted, bos=asked.bos, **asdict(tokens))
    with run_folder(path, output.overwrite) as folder:
        write_request(folder, source, tokens, asked, interventions=given)
        attention = result.after.recording.attention_path
        folder.write_json("environment.json", run_environment(loaded, attention_path=attention))
        result.write(folder)
    output.show(path, lambda: terminal.show_intervened(result, path))
