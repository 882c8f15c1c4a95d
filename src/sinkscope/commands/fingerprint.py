"""sinkscope fingerprint: which models began with the same weights."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from sinkscope.arguments import check_fingerprint, check_inputs
from sinkscope.commands import options
from sinkscope.errors import InputError
from sinkscope.runtime import check_placement


@dataclass(frozen=True, kw_only=True)
class FingerprintConfig:
    """What was asked for; written to config.yaml."""

    models: list[str]
    matrix: bool
    method: str
    unrelated: list[str]
    fresh: int
    vocabulary: int | None
    length: int | None
    num_sequences: int | None
    seed: int | None
    dtype: str
    device: str
    trust_remote_code: bool

    def __post_init__(self) -> None:
        check_placement(self.dtype, self.device)
        check_fingerprint(self.models, method=self.method, unrelated=self.unrelated, fresh=self.fresh)
        check_inputs(
            vocabulary=self.vocabulary,
            length=64 if self.length is None else self.length,
            num_sequences=512 if self.num_sequences is None else self.num_sequences,
            seed=0 if self.seed is None else self.seed,
        )


def fingerprint_command(
    models: Annotated[
        list[str],
        typer.Argument(
            help="A base model and suspects: Hugging Face names, folders, .gguf files, training runs, init:RUN for a "
            "run's first weights, or signatures (.safetensors) of earlier runs.",
            metavar="BASE SUSPECT...",
            show_default=False,
        ),
    ],
    matrix: Annotated[bool, typer.Option("--matrix", help="Compare all pairs, not each with the first.")] = False,
    method: Annotated[str, typer.Option(help="alignment, or seedprint: the published test.")] = "alignment",
    unrelated: Annotated[
        list[str] | None, typer.Option(help="A model known to be unrelated; may be repeated.", show_default=False)
    ] = None,
    fresh: Annotated[int, typer.Option(help="Fresh initialisations drawn as unrelated models.")] = 4,
    vocabulary: Annotated[
        int | None, typer.Option(help="Draw ids below this only; needed where vocabularies differ.", show_default=False)
    ] = None,
    length: Annotated[int | None, typer.Option(help="Tokens in each sequence; default 64.", show_default=False)] = None,
    num_sequences: Annotated[int | None, typer.Option(help="Sequences; default 512.", show_default=False)] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sequences; default 0.", show_default=False)] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    trust_remote_code: options.TrustRemoteCode = False,
    out: options.Out = None,
    overwrite: options.Overwrite = False,
    as_json: options.AsJson = False,
) -> None:
    """Say which models began with the same weights, and how sure that is.

    An interrupted run goes on where it stopped when it is given the same --out. Signatures are kept in the run folder:
    give them in place of models to compare again without weights.

    Example: sinkscope fingerprint init:runs/a runs/a runs/b --out runs/origins
    """
    config = FingerprintConfig(
        models=models,
        matrix=matrix,
        method=method,
        unrelated=unrelated or [],
        fresh=fresh,
        vocabulary=vocabulary,
        length=length,
        num_sequences=num_sequences,
        seed=seed,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    path = options.run_path(out, "fingerprint", overwrite)
    from sinkscope import __version__
    from sinkscope.origins.fingerprint import fingerprint
    from sinkscope.report import terminal
    from sinkscope.results.parts import Parts
    from sinkscope.results.run_folder import run_folder
    from sinkscope.runtime import environment, resolve_device

    # Parts are named by weights and inputs, so that whatever else changes, a model is read once.
    parts = Parts(path, {"command": "fingerprint", "version": __version__})
    asked = asdict(config)
    goes_on = parts.path is not None and parts.path.exists()
    try:
        way_on = f"the same command with --out {path} goes on"
        with options.finished_parts_are_kept(way_on), terminal.steps() as work:
            result = fingerprint(asked.pop("models"), **asked, parts=parts, work=work)  # type: ignore[arg-type]
    except InputError:
        if not goes_on:
            parts.discard()  # a command that is refused leaves all as it was
        raise
    with run_folder(path, overwrite) as folder:
        command = shlex.join(["sinkscope", *sys.argv[1:]])
        folder.write_yaml("config.yaml", {**asdict(config), "command": command})
        folder.write_json("environment.json", environment(device=resolve_device(device)))
        result.write(folder)
        if importlib.util.find_spec("plotly") is not None:
            from sinkscope.report.fingerprint_page import write_fingerprint_page

            write_fingerprint_page(result, command, folder.path / "report.html")
    parts.discard()
    if as_json:
        print((path / "summary.json").read_text(encoding="utf-8"), end="")
    else:
        terminal.show_fingerprint(result, path)
