"""sinkscope bias: which tokens a model prefers before any training, what causes it, and what training leaves of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sinkscope.arguments import CONTROLS, check_bias, check_choice
from sinkscope.cli_options import Length, ModelOptions, NumSequences, Seed, bound_memory_of
from sinkscope.cli_output import Output, first_process_writes, run_environment, write_config, write_page

if TYPE_CHECKING:
    from pathlib import Path

    from sinkscope.initial_bias.bias import Bias


@dataclass(frozen=True, kw_only=True)
class BiasOptions:
    """What is measured of a model, or of models that are drawn from a configuration."""

    seeds: Annotated[
        int | None,
        typer.Option(help="Models to draw from a configuration, one per seed; default 8.", show_default=False),
    ] = None
    num_sequences: NumSequences = 128
    length: Length = 32
    seed: Seed = 0
    controls: Annotated[str, typer.Option(help="all, none, or names separated by commas, such as no_attention.")] = (
        "all"
    )
    along: Annotated[
        list[str] | None,
        typer.Option(help="A later checkpoint of the model; may be repeated. A training run brings its own."),
    ] = None

    def __post_init__(self) -> None:
        seeds = 1 if self.seeds is None else self.seeds
        check_bias(seeds=seeds, length=self.length, num_sequences=self.num_sequences, seed=self.seed)
        for name in self.chosen_controls or ():
            check_choice("controls", name, CONTROLS)

    @property
    def chosen_controls(self) -> list[str] | None:
        """The names of the controls; None for all of them."""
        if self.controls == "all":
            return None
        return [] if self.controls == "none" else [name.strip() for name in self.controls.split(",")]


def bias_command(options: BiasOptions, source: ModelOptions, output: Output) -> None:
    """Show which tokens a model prefers, whatever it reads.

    It also shows what causes this, and what training leaves of it. The model may also be a configuration (config.json
    or its folder, a preset of pretrain, a training run): its weights are then drawn from seeds.

    Example: sinkscope bias tiny --seeds 8
    """
    path = output.path(source.model)
    from sinkscope.initial_bias.bias import bias
    from sinkscope.pages import progress
    from sinkscope.results.run_folder import run_folder

    bound_memory_of(source.device)
    arguments: dict[str, Any] = asdict(source) | asdict(options)
    arguments |= {"controls": options.chosen_controls, "along": options.along or []}
    with progress.bar("measurements") as move:
        result = bias(arguments.pop("model"), **arguments, progress=move)
    first_process_writes()
    with progress.working("writing tables"), run_folder(path, output.overwrite) as folder:
        write_config(folder, source, options)
        folder.write_json("environment.json", run_environment(result.measurements.model))
        result.write(folder)
        write_page(folder)
    output.show(path, lambda: show(result, path))


def show(result: Bias, path: Path) -> None:
    """The preferred tokens, what each control changes, what training leaves, and the answer in sentences."""
    from sinkscope.pages.terminal import Terminal, ends

    out, summary = Terminal(), result.summary
    rows = [
        (name, f"{entry['value']:.4g}", ends(entry["low"], entry["high"])) for name, entry in summary["bias"].items()
    ]
    out.table("bias", ("quantity", "value", "95 % interval"), rows)
    rows = []
    for name, entry in summary["controls"].items():
        if "refused" in entry:
            rows.append((name, "refused", "", ""))
            continue
        deficit, cosine = entry["entropy_deficit"], entry["inter_cosine"]
        change = f"{deficit['difference']:+.3g}"
        rows.append(
            (name, change, ends(deficit["difference_low"], deficit["difference_high"]), f"{cosine['difference']:+.3g}")
        )
    if rows:
        out.table("change under each control", ("control", "entropy deficit", "interval", "inter cosine"), rows)
    rows = [
        (
            row["checkpoint"],
            f"{row['value']:.3f}",
            ends(row["low"], row["high"]),
            _number(row["ceiling"]),
            _number(row["other_seeds"]),
        )
        for row in summary["persistence"]
    ]
    if rows:
        columns = ("checkpoint", "correlation", "interval", "ceiling", "other seeds")
        out.table("rank correlation with the initial weights", columns, rows, limit=len(rows))
    for name, entry in summary["controls"].items():
        if "refused" in entry:
            out.say(f"{name}: {entry['refused']}")
    out.say(result.story)
    out.say_where(path)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
