"""sinkscope study: whether the chain holds in a model, link by link, with causal evidence and controls."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from sinkscope.commands import options
from sinkscope.errors import InputError


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """What one study was asked to do; written to config.yaml."""

    model: str | None
    revision: str | None
    dtype: str
    device: str
    device_map: str | None
    trust_remote_code: bool
    tokens: str
    bos: str
    length: int
    num_sequences: int
    seed: int


BOS = {"auto": None, "yes": True, "no": False}


def study_command(
    model: options.Model = None,
    tokens: options.Tokens = "random",
    bos: Annotated[
        str, typer.Option(help="A BOS token at position 0: yes, no, both (two studies side by side) or auto.")
    ] = "auto",
    length: options.Length = 64,
    num_sequences: Annotated[int, typer.Option(help="Sequences that judge; 96 others choose and calibrate.")] = 32,
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
    """Decide link by link whether the chain holds in a model, and write a report.

    An interrupted study goes on where it stopped when it is given the same --out.

    Example: sinkscope study HuggingFaceTB/SmolLM2-135M --out runs/smollm2
    """
    config = StudyConfig(
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
    )
    if bos not in (*BOS, "both"):
        raise InputError(expected="--bos yes, no, both or auto", found=f"'{bos}'", next_step="Choose one of them")
    path = options.run_path(out, model, overwrite)
    loaded = options.load_model(config)
    if bos == "both":
        paths = [path.with_name(f"{path.name}-{name}") for name in ("no-bos", "bos")]
        for each in paths:
            options.run_path(each, model, overwrite)
        for choice, each in zip(("no", "yes"), paths, strict=True):
            _study(replace(config, bos=choice), loaded, each, overwrite, as_json)
        _compare(paths, path.with_name(f"{path.name}.html"), quiet=as_json)
    else:
        _study(config, loaded, path, overwrite, as_json)


def study_run(model: str) -> Path:
    """The run folder of a study of a model with every option at its default, made now."""
    config = StudyConfig(
        model=model,
        revision=None,
        dtype="auto",
        device="auto",
        device_map=None,
        trust_remote_code=False,
        tokens="random",
        bos="auto",
        length=64,
        num_sequences=32,
        seed=0,
    )
    path = options.run_path(None, model, overwrite=False)
    _study(config, options.load_model(config), path, overwrite=False, as_json=False)
    return path


def _compare(paths: list[Path], page: Path, *, quiet: bool) -> None:
    if importlib.util.find_spec("plotly") is None:
        return
    from sinkscope.report.comparison import write_comparison_page

    write_comparison_page(paths, page)
    if not quiet:
        print(f"Side by side: {page}")


def _study(config: StudyConfig, loaded, path: Path, overwrite: bool, as_json: bool) -> None:
    from sinkscope import __version__
    from sinkscope.report import terminal
    from sinkscope.results.parts import Parts
    from sinkscope.results.run_folder import run_folder
    from sinkscope.studies.study import study

    parts = Parts(path, {**asdict(config), "weights": loaded.weight_hash, "version": __version__})
    with terminal.progress("conditions") as progress:
        result = study(
            loaded,
            tokens=config.tokens,
            bos=BOS[config.bos],
            length=config.length,
            num_sequences=config.num_sequences,
            seed=config.seed,
            parts=parts,
            progress=progress,
        )
    with terminal.working("writing tables and the report"), run_folder(path, overwrite) as folder:
        folder.write_yaml("config.yaml", {**asdict(config), "command": shlex.join(["sinkscope", *sys.argv[1:]])})
        path_of_attention = result.trace.reading.attention_path
        folder.write_json("environment.json", options.run_environment(loaded, attention_path=path_of_attention))
        result.write(folder)
        if importlib.util.find_spec("matplotlib") is not None:
            from sinkscope.report.figures import chain_figure

            chain_figure(result.trace.tables, result.trace.summary, folder.path / "chain.png")
        if importlib.util.find_spec("plotly") is not None:
            from sinkscope.report.page import write_study_page

            write_study_page(folder.path, folder.path / "report.html")
    parts.discard()
    if as_json:
        print((path / "summary.json").read_text(encoding="utf-8"), end="")
    else:
        terminal.show_study(result, path)
