"""The command `sinkscope fingerprint`: which models began with the same weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sinkscope.arguments import check_fingerprint, check_inputs
from sinkscope.cli_options import Device, Dtype, TrustRemoteCode, bound_memory_of
from sinkscope.cli_output import Output, finished_parts_are_kept, first_process_writes, write_config, write_page
from sinkscope.errors import InputError
from sinkscope.runtime import check_placement

if TYPE_CHECKING:
    from pathlib import Path

    from sinkscope.fingerprints.fingerprint import Fingerprint


@dataclass(frozen=True, kw_only=True)
class FingerprintOptions:
    """Which models are compared, and how."""

    models: Annotated[
        list[str],
        typer.Argument(
            help="A base model and suspects: Hugging Face names, folders, .gguf files, training runs, init:RUN for a "
            "run's first weights, or signatures (.safetensors) of earlier runs.",
            metavar="BASE SUSPECT...",
            show_default=False,
        ),
    ]
    matrix: Annotated[bool, typer.Option("--matrix", help="Compare all pairs, not each with the first.")] = False
    method: Annotated[str, typer.Option(help="alignment, or seedprint: the published test.")] = "alignment"
    unrelated: Annotated[
        list[str] | None, typer.Option(help="A model known to be unrelated; may be repeated.", show_default=False)
    ] = None
    fresh: Annotated[int, typer.Option(help="Fresh initialisations drawn as unrelated models.")] = 4
    vocabulary: Annotated[
        int | None, typer.Option(help="Draw ids below this only; needed where vocabularies differ.", show_default=False)
    ] = None
    length: Annotated[int | None, typer.Option(help="Tokens in each sequence; default 64.", show_default=False)] = None
    num_sequences: Annotated[int | None, typer.Option(help="Sequences; default 512.", show_default=False)] = None
    seed: Annotated[int | None, typer.Option(help="Seed of the sequences; default 0.", show_default=False)] = None
    dtype: Dtype = "auto"
    device: Device = "auto"
    trust_remote_code: TrustRemoteCode = False

    def __post_init__(self) -> None:
        check_placement(self.dtype, self.device)
        check_fingerprint(self.models, method=self.method, unrelated=self.unrelated or (), fresh=self.fresh)
        given = {name: getattr(self, name) for name in ("vocabulary", "length", "num_sequences", "seed")}
        check_inputs(**{name: value for name, value in given.items() if value is not None})


def fingerprint_command(options: FingerprintOptions, output: Output) -> None:
    """Say which models began with the same weights.

    Each verdict comes with an effect, an interval and a false-discovery rate. The same command with the same --out
    resumes an interrupted run. Signatures are kept in the run folder: give them in place of models to compare again
    without weights.

    Example: sinkscope fingerprint init:runs/a runs/a runs/b --out runs/origins
    """
    path = output.path("fingerprint")
    from sinkscope import __version__, processes
    from sinkscope.fingerprints.fingerprint import fingerprint
    from sinkscope.pages import progress
    from sinkscope.results.parts import Parts
    from sinkscope.results.run_folder import run_folder
    from sinkscope.runtime import environment, resolve_device

    bound_memory_of(options.device)
    # Parts are named by weights and inputs, so a model runs once, whatever else changes.
    parts = Parts(path, {"command": "fingerprint", "version": __version__})
    arguments: dict[str, Any] = asdict(options) | {"unrelated": options.unrelated or []}
    goes_on = parts.path is not None and parts.path.exists()
    try:
        way_on = f"the same command with --out {path} goes on"
        with finished_parts_are_kept(way_on), progress.bars() as work:
            if processes.count() > 1:
                processes.from_first(parts.prepare)
            result = fingerprint(arguments.pop("models"), **arguments, parts=parts, work=work)
    except InputError:
        if not goes_on:
            parts.discard()  # a refused command must change nothing
        raise
    first_process_writes()
    with run_folder(path, output.overwrite) as folder:
        write_config(folder, options)
        folder.write_json("environment.json", environment(device=resolve_device(options.device)))
        result.write(folder)
        write_page(folder)
    parts.discard()
    output.show(path, lambda: show(result, path))


def show(result: Fingerprint, path: Path) -> None:
    """The pairs as a table, surest relations first, and the answer in a sentence."""
    import math

    from sinkscope.pages.terminal import NUM_SHOWN, Terminal

    out = Terminal()
    pairs = sorted(result.pairs, key=lambda pair: (math.isnan(pair.z), -pair.z))
    rows = [
        (
            pair.base,
            pair.suspect,
            pair.verdict,
            f"{pair.effect:.3f}",
            "" if math.isnan(pair.low) else f"{pair.low:.3f} to {pair.high:.3f}",
            f"{pair.z:.1f}",
            _tail(pair.p if math.isnan(pair.q) else pair.q),
        )
        for pair in pairs
    ]
    columns = (
        "base",
        "suspect",
        "verdict",
        "tau" if result.method == "seedprint" else "alignment",
        "95 % interval",
        "z",
        "p" if result.method == "seedprint" else "q",
    )
    out.table(f"pairs by {result.method}", columns, rows, limit=4 * NUM_SHOWN)
    out.say(result.story, style="bold")
    out.say(result.caveat)
    out.say(f"Written to {path}")


def _tail(probability: float) -> str:
    """A p-value as text; far tails are not to be taken literally."""
    return "< 1e-12" if probability < 1e-12 else f"{probability:.2g}"
