"""The command `sinkscope audit`: what in a model breaks in fewer bits, where, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sinkscope.arguments import AUDIT_LENGTH, CALIBRATION, check_audit, check_batch
from sinkscope.cli_options import Bos, ModelOptions, Seed, bound_memory_of
from sinkscope.cli_output import Output, run_environment, write_config, write_page

if TYPE_CHECKING:
    from sinkscope.audits.audit_result import AuditResult


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """The texts that a model is audited on."""

    text: Annotated[
        Path | None,
        typer.Option(
            help="Text file, read in windows spread over all of it; without one the model writes its own texts.",
            show_default=False,
        ),
    ] = None
    bos: Bos = None
    length: Annotated[
        int | None,
        typer.Option(
            help="Tokens in each text. Default 128, or fewer if the model's context is short, so that a prefix fits.",
            show_default=False,
        ),
    ] = None
    num_sequences: Annotated[int, typer.Option(help=f"Held-out texts to measure on; {CALIBRATION} more calibrate.")] = (
        16
    )
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_audit(length=self.length, num_sequences=self.num_sequences, seed=self.seed)
        if self.text is not None:
            check_batch(f"text:{self.text}", length=self.length or AUDIT_LENGTH, num_sequences=self.num_sequences)


def audit_command(texts: AuditOptions, source: ModelOptions, output: Output) -> None:
    """Show what breaks in a model in 8 or 4 bits, and what helps.

    Activations, weights and the KV cache are rounded, and a sliding window is tried. The page says which modules break,
    and what to do about it.

    Example: sinkscope audit HuggingFaceTB/SmolLM2-135M --text book.txt
    """
    path = output.path(source.model)
    from sinkscope.audits.audit import audit
    from sinkscope.pages import progress
    from sinkscope.results.run_folder import run_folder

    bound_memory_of(source.device)
    named: dict[str, Any] = asdict(source) | asdict(texts)
    with progress.bar("measurements") as move:
        result = audit(named.pop("model"), named.pop("text"), **named, progress=move)
    with progress.working("writing tables"), run_folder(path, output.overwrite) as folder:
        write_config(folder, source, texts)
        folder.write_json("environment.json", run_environment(result.loaded))
        result.write(folder)
        write_page(folder)
    output.show(path, lambda: show(result, path))


def show(result: AuditResult, path: Path) -> None:
    """Prints what each scheme costs, what to do about it, and the answer in sentences."""
    from sinkscope.audits.schemes import scheme_in_words
    from sinkscope.audits.texts import held_out_in_words
    from sinkscope.pages.terminal import NUM_SHOWN, Terminal, ends

    out, batch = Terminal(), result.batch
    out.say(f"{result.loaded.name}, {held_out_in_words(batch.num_sequences, batch.length, batch.source)}")
    rows = [
        (
            scheme_in_words(cell.scheme),
            f"{cell.measured.change:+.4f}",
            ends(cell.measured.low, cell.measured.high),
            f"{cell.predicted:.4f}",
        )
        for cell in result.at("model")
    ]
    columns = ("scheme", "damage", "95 % interval", "predicted")
    out.table("change of the loss, in nats a token", columns, rows, limit=len(rows))
    rows = [
        (
            trial.remedy,
            scheme_in_words(trial.scheme),
            f"{trial.recovered.change:.4f} of {trial.damage.change:.4f}",
            ends(trial.recovered.low, trial.recovered.high),
            f"{trial.control.change:+.4f}",
        )
        for trial in result.advice
    ]
    if rows:
        columns = ("remedy", "scheme", "recovers", "95 % interval", "control recovers")
        out.table("advice, the largest effect first, in nats a token", columns, rows, limit=2 * NUM_SHOWN)
    for name, reason in result.not_possible.items():
        out.say(f"{name.capitalize()} is not possible here: {reason}")
    out.say(
        f"Rank correlation of prediction and measurement over {len(result.at('group'))} cells: "
        f"{result.rank_correlation:.2f}. Of the measurements on one half of the texts with those on the other: "
        f"{result.repeatability:.2f}.",
    )
    if result.torchao_says is not None:
        out.say(result.torchao_says)
    out.say(result.story, style="bold")
    out.say_where(path)
