"""sinkscope intervene: any combination of interventions, with everything read before, after and under a control."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from sinkscope.arguments import check_trace_length
from sinkscope.commands.options import BatchOptions, Bos, ModelOptions, Output, run_environment, write_request


@dataclass(frozen=True, kw_only=True)
class Interventions:
    """Interventions, each in words."""

    mask_to_self: Annotated[
        list[str] | None, typer.Option(help="POSITION that may attend only to itself.", show_default=False)
    ] = None
    block: Annotated[
        list[str] | None,
        typer.Option(help="QUERY:KEYS that may no longer be attended to, such as 10:0-4.", show_default=False),
    ] = None
    allow: Annotated[
        list[str] | None,
        typer.Option(help="QUERY:KEYS that may be attended to, later keys too, such as 0:0-63.", show_default=False),
    ] = None
    amplify: Annotated[
        list[str] | None, typer.Option(help="POSITION:FACTOR, variance amplification.", show_default=False)
    ] = None
    scale_norm: Annotated[
        list[str] | None, typer.Option(help="POSITION:FACTOR, scales the whole aggregation.", show_default=False)
    ] = None
    shift_mean: Annotated[
        list[str] | None, typer.Option(help="POSITION:FACTOR, adds 1 - factor times the mean.", show_default=False)
    ] = None
    swap_deviation: Annotated[
        list[str] | None, typer.Option(help="POSITION:FACTOR, with another sequence's deviation.", show_default=False)
    ] = None
    random_direction: Annotated[
        list[str] | None, typer.Option(help="POSITION:FACTOR, along a random direction.", show_default=False)
    ] = None
    equalise: Annotated[
        list[str] | None,
        typer.Option(help="POSITION whose variance is brought down to that of later ones.", show_default=False),
    ] = None
    ablate: Annotated[
        list[str] | None, typer.Option(help="LAYER:NEURON or LAYER:EXPERT:NEURON, set to zero.", show_default=False)
    ] = None
    ablate_mean: Annotated[
        list[str] | None, typer.Option(help="LAYER:NEURON, set to its mean.", show_default=False)
    ] = None
    ablate_resample: Annotated[
        list[str] | None, typer.Option(help="LAYER:NEURON, set to values of other tokens.", show_default=False)
    ] = None
    densify: Annotated[
        list[str] | None,
        typer.Option(help="LAYER:NEURON whose output vector is spread over all dimensions.", show_default=False),
    ] = None
    transplant: Annotated[
        list[str] | None,
        typer.Option(help="LAYER:NEURON@SOURCE:TARGET, its activation written at the target too.", show_default=False),
    ] = None
    zero_dimension: Annotated[
        list[str] | None,
        typer.Option(help="DIMENSION@POSITION of the residual stream, set to zero.", show_default=False),
    ] = None
    clamp_neuron: Annotated[
        list[str] | None, typer.Option(help="LAYER:NEURON@POSITION held at its untouched values.", show_default=False)
    ] = None
    clamp_dimension: Annotated[
        list[str] | None, typer.Option(help="DIMENSION@POSITION held at its untouched values.", show_default=False)
    ] = None


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
    path = output.path(source.model)
    from sinkscope.report import terminal
    from sinkscope.results.run_folder import run_folder
    from sinkscope.studies.intervene import intervene
    from sinkscope.studies.requests import parsed

    given = {kind: texts for kind, texts in asdict(interventions).items() if texts}
    requests = parsed(given, layers=asked.layers, heads=asked.heads)
    loaded = source.load()
    with terminal.working("tracing before, after and under the control"):
        result = intervene(loaded, requests, bos=asked.bos, **asdict(tokens))
    with run_folder(path, output.overwrite) as folder:
        write_request(folder, source, tokens, asked, interventions=given)
        attention = result.after.recording.attention_path
        folder.write_json("environment.json", run_environment(loaded, attention_path=attention))
        result.write(folder)
    output.show(path, lambda: terminal.show_intervened(result, path))
