"""sinkscope bias: which tokens a model is born to prefer, what gathers its states, and what remains in training."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from sinkscope.arguments import check_bias
from sinkscope.commands import options
from sinkscope.runtime import check_placement


@dataclass(frozen=True, kw_only=True)
class BiasConfig:
    """What one reading of the bias was asked to do; written to config.yaml."""

    model: str | None
    seeds: int | None
    num_sequences: int
    length: int
    seed: int
    controls: str
    along: list[str]
    revision: str | None
    dtype: str
    device: str
    device_map: str | None
    trust_remote_code: bool

    def __post_init__(self) -> None:
        check_placement(self.dtype, self.device, self.device_map)
        seeds = 1 if self.seeds is None else self.seeds
        check_bias(seeds=seeds, length=self.length, num_sequences=self.num_sequences, seed=self.seed)


def bias_command(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A configuration (config.json or its folder, a preset of pretrain, a training run), whose weights are "
            "drawn from seeds; or a model with weights: Hugging Face name, folder, .gguf file, or init:RUN for what a "
            "training run began with. Without it reference:softmax.",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Seeds that a configuration is drawn from; 8 if not given.", show_default=False)
    ] = None,
    num_sequences: options.NumSequences = 128,
    length: options.Length = 32,
    seed: options.Seed = 0,
    controls: Annotated[
        str, typer.Option(help="all, none, or names separated by commas, such as no_attention.")
    ] = "all",
    along: Annotated[
        list[str] | None,
        typer.Option(help="A later checkpoint of the model; repeat it for several. A training run brings its own."),
    ] = None,
    revision: options.Revision = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
    trust_remote_code: options.TrustRemoteCode = False,
    out: options.Out = None,
    overwrite: options.Overwrite = False,
    as_json: options.AsJson = False,
) -> None:
    """Show which tokens a model prefers whatever it reads, what causes it, and what training leaves of it.

    Example: sinkscope bias tiny --seeds 8
    """
    config = BiasConfig(
        model=model,
        seeds=seeds,
        num_sequences=num_sequences,
        length=length,
        seed=seed,
        controls=controls,
        along=list(along or ()),
        revision=revision,
        dtype=dtype,
        device=device,
        device_map=device_map,
        trust_remote_code=trust_remote_code,
    )
    path = options.run_path(out, model, overwrite)
    from sinkscope.origins.initial_bias import bias
    from sinkscope.report import terminal
    from sinkscope.results.run_folder import run_folder

    with terminal.progress("readings") as progress:
        result = bias(
            model,
            seeds=seeds,
            num_sequences=num_sequences,
            length=length,
            seed=seed,
            controls={"all": None, "none": []}.get(controls, [name.strip() for name in controls.split(",")]),
            along=config.along,
            revision=revision,
            dtype=dtype,
            device=device,
            device_map=device_map,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    with terminal.working("writing tables"), run_folder(path, overwrite) as folder:
        folder.write_yaml("config.yaml", {**asdict(config), "command": shlex.join(["sinkscope", *sys.argv[1:]])})
        folder.write_json("environment.json", options.run_environment(result.readings.model))
        result.write(folder)
        if importlib.util.find_spec("plotly") is not None:
            from sinkscope.report.bias_page import write_bias_page

            write_bias_page(folder.path, folder.path / "report.html")
    if as_json:
        print((path / "summary.json").read_text(encoding="utf-8"), end="")
    else:
        terminal.show_bias(result, path)
