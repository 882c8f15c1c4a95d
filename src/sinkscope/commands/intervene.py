"""sinkscope intervene: any combination of interventions, with everything read before, after and under a control."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from sinkscope.arguments import check_trace_length
from sinkscope.commands import options


@dataclass(frozen=True, kw_only=True)
class InterveneConfig:
    """What was asked for; written to config.yaml."""

    model: str | None
    revision: str | None
    dtype: str
    device: str
    device_map: str | None
    trust_remote_code: bool
    tokens: str
    bos: bool | None
    length: int
    num_sequences: int
    seed: int
    interventions: dict[str, list[str]]
    layers: str | None
    heads: str | None

    def __post_init__(self) -> None:
        options.check_model_and_batch(self)
        check_trace_length(self.length)


def intervene_command(
    model: options.Model = None,
    mask_to_self: Annotated[
        list[str] | None, typer.Option(help="POSITION that may attend only to itself.", show_default=False)
    ] = None,
    block: Annotated[
        list[str] | None,
        typer.Option(help="QUERY:KEYS that may no longer be attended to, such as 10:0-4.", show_default=False),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(help="QUERY:KEYS that may be attended to, later keys too, such as 0:0-63.", show_default=False),
    ] = None,
    amplify: Annotated[
        list[str] | None, typer.Option(help="POSITION:FACTOR, variance amplification.", show_default=False)
    ] = None,
    scale_norm: Annotated[
        list[str] | None, typer.Option(help="POSITION:FACTOR, scales the whole aggregation.", show_default=False)
    ] = None,
    shift_mean: Annotated[
        list[str] | None, typer.Option(help="POSITION:FACTOR, adds 1 - factor times the mean.", show_default=False)
    ] = None,
    swap_deviation: Annotated[
        list[str] | None, typer.Option(help="POSITION:FACTOR, with another sequence's deviation.", show_default=False)
    ] = None,
    random_direction: Annotated[
        list[str] | None, typer.Option(help="POSITION:FACTOR, along a random direction.", show_default=False)
    ] = None,
    equalise: Annotated[
        list[str] | None,
        typer.Option(help="POSITION whose variance is brought down to that of later ones.", show_default=False),
    ] = None,
    ablate: Annotated[
        list[str] | None, typer.Option(help="LAYER:NEURON or LAYER:EXPERT:NEURON, set to zero.", show_default=False)
    ] = None,
    ablate_mean: Annotated[
        list[str] | None, typer.Option(help="LAYER:NEURON, set to its mean.", show_default=False)
    ] = None,
    ablate_resample: Annotated[
        list[str] | None, typer.Option(help="LAYER:NEURON, set to values of other tokens.", show_default=False)
    ] = None,
    densify: Annotated[
        list[str] | None,
        typer.Option(help="LAYER:NEURON whose output vector is spread over all dimensions.", show_default=False),
    ] = None,
    transplant: Annotated[
        list[str] | None,
        typer.Option(help="LAYER:NEURON@SOURCE:TARGET, its activation written at the target too.", show_default=False),
    ] = None,
    zero_dimension: Annotated[
        list[str] | None,
        typer.Option(help="DIMENSION@POSITION of the residual stream, set to zero.", show_default=False),
    ] = None,
    clamp_neuron: Annotated[
        list[str] | None, typer.Option(help="LAYER:NEURON@POSITION held at its untouched values.", show_default=False)
    ] = None,
    clamp_dimension: Annotated[
        list[str] | None, typer.Option(help="DIMENSION@POSITION held at its untouched values.", show_default=False)
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="Layers of mask, aggregation and dimension edits, such as 0-2.")
    ] = None,
    heads: Annotated[str | None, typer.Option(help="Heads of mask and aggregation edits, such as 0,3.")] = None,
    tokens: options.Tokens = "random",
    bos: options.Bos = None,
    length: options.Length = 64,
    num_sequences: options.NumSequences = 32,
    seed: options.Seed = 0,
    revision: options.Revision = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
    trust_remote_code: options.TrustRemoteCode = False,
    out: options.Out = None,
    overwrite: options.Overwrite = False,
    as_json: options.AsJson = False,
) -> None:
    """Change a model's forward pass and show every observable before, after and under a control.

    Aggregation edits act up to the birth of disparity unless --layers says otherwise; their means come from 64 other
    sequences. The control replaces each intervention: a mask by its opposite, amplification by scaling the norm, units
    by matched random ones.

    Example: sinkscope intervene gpt2 --mask-to-self 10 --clamp-dimension 447@10
    """
    given = {
        "mask_to_self": mask_to_self,
        "block": block,
        "allow": allow,
        "amplify": amplify,
        "scale_norm": scale_norm,
        "shift_mean": shift_mean,
        "swap_deviation": swap_deviation,
        "random_direction": random_direction,
        "equalise": equalise,
        "ablate": ablate,
        "ablate_mean": ablate_mean,
        "ablate_resample": ablate_resample,
        "densify": densify,
        "transplant": transplant,
        "zero_dimension": zero_dimension,
        "clamp_neuron": clamp_neuron,
        "clamp_dimension": clamp_dimension,
    }
    config = InterveneConfig(
        model=model,
        revision=revision,
        dtype=dtype,
        device=device,
        device_map=device_map,
        trust_remote_code=trust_remote_code,
        tokens=tokens,
        bos=bos,
        length=length,
        num_sequences=num_sequences,
        seed=seed,
        interventions={name: values for name, values in given.items() if values},
        layers=layers,
        heads=heads,
    )
    path = options.run_path(out, model, overwrite)
    from sinkscope.report import terminal
    from sinkscope.results.run_folder import run_folder
    from sinkscope.studies.intervene import intervene
    from sinkscope.studies.requests import parsed

    requests = parsed(config.interventions, layers=layers, heads=heads)

    loaded = options.load_model(config)
    with terminal.working("tracing before, after and under the control"):
        result = intervene(
            loaded, requests, tokens=tokens, bos=bos, length=length, num_sequences=num_sequences, seed=seed
        )
    with run_folder(path, overwrite) as folder:
        folder.write_yaml("config.yaml", {**asdict(config), "command": shlex.join(["sinkscope", *sys.argv[1:]])})
        path_of_attention = result.after.recording.attention_path
        folder.write_json("environment.json", options.run_environment(loaded, attention_path=path_of_attention))
        result.write(folder)
    if as_json:
        print((path / "summary.json").read_text(encoding="utf-8"), end="")
    else:
        terminal.show_intervened(result, path)
