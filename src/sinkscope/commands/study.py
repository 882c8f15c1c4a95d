"""sinkscope study: whether the chain holds in a model, link by link, with causal evidence and controls."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sinkscope.arguments import check_study
from sinkscope.commands import options
from sinkscope.errors import InputError

if TYPE_CHECKING:
    from sinkscope.models.loading import LoadedModel
    from sinkscope.studies.study import Study


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """What one study was asked to do; written to config.yaml."""

    model: str | None
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    device_map: str | None = None
    trust_remote_code: bool = False
    tokens: str = "random"
    bos: str = "auto"
    length: int = 64
    num_sequences: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if self.bos not in (*BOS, "both"):
            raise InputError(
                expected="`bos` as yes, no, both or auto", found=f"'{self.bos}'", next_step="Choose one of them"
            )
        options.check_model_and_batch(self)
        check_study(self.length, self.num_sequences)


BOS = {"auto": None, "yes": True, "no": False}


def study_command(
    model: options.Model = None,
    tokens: options.Tokens = StudyConfig.tokens,
    bos: Annotated[
        str, typer.Option(help="A BOS token at position 0: yes, no, both (two studies side by side) or auto.")
    ] = StudyConfig.bos,
    length: options.Length = StudyConfig.length,
    num_sequences: Annotated[
        int, typer.Option(help="Sequences that judge; 96 others choose and calibrate.")
    ] = StudyConfig.num_sequences,
    seed: options.Seed = StudyConfig.seed,
    revision: options.Revision = StudyConfig.revision,
    dtype: options.Dtype = StudyConfig.dtype,
    device: options.Device = StudyConfig.device,
    device_map: options.DeviceMap = StudyConfig.device_map,
    trust_remote_code: options.TrustRemoteCode = StudyConfig.trust_remote_code,
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
    path = options.run_path(out, model, overwrite)
    if bos == "both":
        runs, page = _both(config, path, overwrite)
    else:
        runs, page = {path: config}, None
    with options.finished_parts_are_kept(f"the same command with --out {path} goes on"):
        _study(runs, page, options.load_model(config), overwrite, quiet=as_json)
    if as_json:
        texts = [(run / "summary.json").read_text(encoding="utf-8") for run in runs]
        print(texts[0] if page is None else f"[{', '.join(texts)}]")


def _both(config: StudyConfig, path: Path, overwrite: bool) -> tuple[dict[Path, StudyConfig], Path]:
    """The studies without and with BOS by their run folders, and the page with both; checked before any work."""
    from sinkscope.results.run_folder import check_page

    names = {"bos": "yes", "no-bos": "no"}  # in this order, a model that has no BOS is refused at once
    runs = {path.with_name(f"{path.name}-{name}"): replace(config, bos=choice) for name, choice in names.items()}
    for run in runs:
        options.run_path(run, config.model, overwrite)
    page = path.with_name(f"{path.name}.html")
    check_page(page, overwrite)
    return runs, page


def study_run(model: str) -> Path:
    """The run folder of a study of a model with every option at its default, made now."""
    config = StudyConfig(model=model)
    path = options.run_path(None, model, overwrite=False)
    command = shlex.join(["sinkscope", "study", model, "--out", str(path)])
    with options.finished_parts_are_kept(f"{command} goes on, and {path} can be compared"):
        _study({path: config}, None, options.load_model(config), overwrite=False, quiet=False)
    return path


def _study(
    runs: dict[Path, StudyConfig], page: Path | None, loaded: LoadedModel, overwrite: bool, *, quiet: bool
) -> None:
    """Studies one model in one way or several. No run is written before all studies are done: a command that was
    interrupted can be given again as it was."""
    from sinkscope import __version__
    from sinkscope.report import terminal
    from sinkscope.results.parts import Parts
    from sinkscope.studies.study import study

    environment = {"weights": loaded.weight_hash, "version": __version__}
    parts = {path: Parts(path, {**asdict(config), **environment}) for path, config in runs.items()}
    results: dict[Path, Study] = {}
    for path, config in runs.items():
        with terminal.progress("conditions") as progress:
            results[path] = study(
                loaded,
                tokens=config.tokens,
                bos=BOS[config.bos],
                length=config.length,
                num_sequences=config.num_sequences,
                seed=config.seed,
                parts=parts[path],
                progress=progress,
            )
    for path, result in results.items():
        with terminal.working("writing tables and the report"):
            _write(path, runs[path], result, overwrite)
        if not quiet:
            terminal.show_study(result, path)
    if page is not None and importlib.util.find_spec("plotly") is not None:
        from sinkscope.report.comparison import write_comparison_page

        write_comparison_page(list(runs), page)
        if not quiet:
            print(f"Side by side: {page}")
    for each in parts.values():
        each.discard()


def _write(path: Path, config: StudyConfig, result: Study, overwrite: bool) -> None:
    from sinkscope.results.run_folder import run_folder

    with run_folder(path, overwrite) as folder:
        folder.write_yaml("config.yaml", {**asdict(config), "command": shlex.join(["sinkscope", *sys.argv[1:]])})
        path_of_attention = result.trace.recording.attention_path
        folder.write_json("environment.json", options.run_environment(result.loaded, attention_path=path_of_attention))
        result.write(folder)
        options.write_pictures(folder, result.trace)
