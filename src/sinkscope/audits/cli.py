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
class SchemeOptions:
    """What is tried to make a model cheaper."""

    schemes: Annotated[
        list[str] | None,
        typer.Option(
            help="Scheme of compressed-tensors, such as FP8_DYNAMIC, W8A8, W4A16 or NVFP4; W8A8_STATIC; a file with a "
            "configuration of it, or a checkpoint that has one. May be repeated. Without it and --cache, those that "
            "are deployed most.",
            show_default=False,
        ),
    ] = None
    cache: Annotated[
        list[str] | None,
        typer.Option(
            help="Format of the KV cache: fp8, fp8-per-head, int8, q8_0, q4_0, kivi-8, kivi-4, nvfp4; or window, "
            "window-with-sinks. May be repeated.",
            show_default=False,
        ),
    ] = None
    budget: Annotated[float, typer.Option(help="Bits a weight, on average, that modules left in 16 bits may add.")] = (
        1.0
    )


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


def audit_command(schemes: SchemeOptions, texts: AuditOptions, source: ModelOptions, output: Output) -> None:
    """Show what a model loses in fewer bits: safe, repair or avoid.

    Linear layers are rounded as engines do, and the KV cache. The page says which modules break, and the files beside
    it leave them in 16 bits.

    Example: sinkscope audit HuggingFaceTB/SmolLM2-135M --text book.txt --schemes FP8_DYNAMIC --schemes W4A16
    """
    path = output.path(source.model)
    from sinkscope.audits.audit import audit
    from sinkscope.pages import progress
    from sinkscope.results.run_folder import run_folder

    bound_memory_of(source.device)
    named: dict[str, Any] = asdict(source) | asdict(texts) | asdict(schemes)
    named["caches"] = named.pop("cache")
    with progress.bar("measurements") as move:
        result = audit(named.pop("model"), named.pop("text"), **named, progress=move)
    with progress.working("writing tables"), run_folder(path, output.overwrite) as folder:
        write_config(folder, source, texts, schemes)
        folder.write_json("environment.json", run_environment(result.loaded))
        result.write(folder)
        write_page(folder)
    output.show(path, lambda: show(result, path))


def show(result: AuditResult, path: Path) -> None:
    """Prints what to do with each scheme, what it costs, and the answer in sentences."""
    from sinkscope.audits.texts import held_out_in_words
    from sinkscope.pages.terminal import NUM_SHOWN, Terminal, ends

    out, batch = Terminal(), result.batch
    out.say(f"{result.loaded.name}, {held_out_in_words(batch.num_sequences, batch.length, batch.source)}")
    rows = []
    cells = {cell.scheme: cell for cell in result.at("model")}
    for decision in result.decisions:
        cell = cells[decision.scheme]
        assert cell.divergence is not None
        assert cell.same_top is not None
        rows.append(
            (
                decision.scheme,
                decision.verdict,
                f"{decision.bits:.2f}",
                f"{cell.measured.change:+.3f}",
                f"{cell.measured.low:+.3f} to {cell.measured.high:+.3f}",
                f"{cell.divergence.change:.3f}",
                f"{cell.same_top.change:.0%}",
            )
        )
    columns = ("scheme", "verdict", "bits", "nats", "95 % interval", "KL", "same top")
    out.table("change of the loss, in nats a token", columns, rows, limit=len(rows))
    for cell in result.failed_controls:
        out.say(f"The control of {cell.scheme}, in 24 bits, changed the loss by {cell.control:+.4f}: it fails.")
    rows = [
        (
            trial.remedy + " (experiment)" * (not trial.is_loaded),
            trial.scheme,
            f"{trial.recovered.change:.4f} of {trial.damage.change:.4f}",
            ends(trial.recovered.low, trial.recovered.high),
            f"{trial.control.change:+.4f}",
        )
        for trial in result.advice
    ]
    if rows:
        columns = ("remedy", "scheme", "recovers", "95 % interval", "control recovers")
        out.table("what helps, the largest effect first, in nats a token", columns, rows, limit=2 * NUM_SHOWN)
    for name, reason in result.not_possible.items():
        out.say(f"{name} is not possible here: {reason}")
    out.say(
        f"Rank correlation of prediction and measurement over {len(result.at('group'))} cells: "
        f"{result.rank_correlation:.2f}. Of the measurements on one half of the texts with those on the other: "
        f"{result.repeatability:.2f}.",
    )
    out.say(result.story, style="bold")
    out.say_where(path)
