"""sinkscope audit: what in a model breaks when it is made cheaper, where, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from sinkscope.arguments import AUDIT_LENGTH, CALIBRATION, check_audit, check_batch
from sinkscope.cli_options import Bos, ModelOptions, Seed, bound_memory_of
from sinkscope.cli_output import Output, command_text, run_environment, write_request


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """The texts that a model is audited on."""

    text: Annotated[
        Path | None,
        typer.Option(
            help="Text file, read in windows spread over it; without one the model writes its own.", show_default=False
        ),
    ] = None
    bos: Bos = None
    length: Annotated[
        int | None,
        typer.Option(
            help="Tokens in each text; without it 128, or what leaves a prefix room in a shorter context.",
            show_default=False,
        ),
    ] = None
    num_sequences: Annotated[int, typer.Option(help=f"Held-out texts, after {CALIBRATION} that calibrate.")] = 16
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_audit(length=self.length, num_sequences=self.num_sequences, seed=self.seed)
        if self.text is not None:
            check_batch(f"text:{self.text}", length=self.length or AUDIT_LENGTH, num_sequences=self.num_sequences)


def audit_command(asked: AuditOptions, source: ModelOptions, output: Output) -> None:
    """Show what breaks in a model in 8 or 4 bits, and what helps.

    A small cache and a window are tried too. The page says where the damage is, and what to do about it.

    Example: sinkscope audit HuggingFaceTB/SmolLM2-135M --text book.txt
    """
    path = output.path(source.model)
    from sinkscope.audits.audit import audit
    from sinkscope.pages import progress, terminal
    from sinkscope.pages.html import can_write_pages
    from sinkscope.results.run_folder import run_folder

    bound_memory_of(source.device)
    named: dict[str, Any] = asdict(source) | asdict(asked)
    with progress.bar("measurements") as move:
        result = audit(named.pop("model"), named.pop("text"), **named, progress=move)
    with progress.working("writing tables"), run_folder(path, output.overwrite) as folder:
        write_request(folder, source, asked)
        folder.write_json("environment.json", run_environment(result.loaded))
        result.write(folder)
        if can_write_pages():
            from sinkscope.audits.audit_page import write_audit_page

            write_audit_page(result.tables, result.summary, command_text(), folder.path / "report.html")
    output.show(path, lambda: terminal.show_audit(result, path))
