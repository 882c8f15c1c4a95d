"""sinkscope intervene: any combination of interventions, with every observable before, after and under a control."""

from __future__ import annotations

from dataclasses import asdict, dataclass, make_dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sinkscope.cli_options import BatchOptions, ModelOptions, PromptOptions
from sinkscope.cli_output import Output, run_environment, write_config, write_page
from sinkscope.interventions.kinds import KINDS
from sinkscope.interventions.specs import read_specs

if TYPE_CHECKING:
    from pathlib import Path

    from sinkscope.interventions.intervene import InterventionResult

    Interventions = Any
else:
    # One option for each kind of intervention.
    Interventions = make_dataclass(
        "Interventions",
        [
            (name, Annotated[list[str] | None, typer.Option(help=kind.help, show_default=False)], None)
            for name, kind in KINDS.items()
        ],
        frozen=True,
        kw_only=True,
    )


@dataclass(frozen=True, kw_only=True)
class InterveneOptions:
    """Where interventions act."""

    layers: Annotated[
        str | None, typer.Option(help="Layers of interventions on masks, aggregations and dimensions, such as 0-2.")
    ] = None
    heads: Annotated[
        str | None, typer.Option(help="Heads of interventions on masks and aggregations, such as 0,3.")
    ] = None


def intervene_command(
    interventions: Interventions,
    places: InterveneOptions,
    tokens: BatchOptions,
    texts: PromptOptions,
    source: ModelOptions,
    output: Output,
) -> None:
    """Intervene in a model's forward pass and show what changes.

    Every observable is shown before and after the interventions, and under a control. Interventions on the value
    aggregation act in all layers up to the one where disparity appears, unless --layers says otherwise. The means that
    they need come from 64 other sequences; with --prompt, --tokens says of what kind. The control replaces each
    intervention: a mask by its opposite, amplification by a shift of the mean that leaves the variance, neurons by
    random ones that match them.

    Example: sinkscope intervene gpt2 --mask-to-self 10 --clamp-dimension 447@10
    """
    texts.check(tokens, calibrates=True)
    by_kind = {kind: values for kind, values in asdict(interventions).items() if values}
    read_specs(by_kind, **asdict(places))  # refuses what cannot be parsed before a model is loaded
    path = output.path(source.model)
    from sinkscope.interventions.intervene import intervene
    from sinkscope.pages import progress
    from sinkscope.results.run_folder import run_folder

    loaded = source.load()
    with progress.working("tracing before, after and under the control"):
        result = intervene(loaded, by_kind, **asdict(places), **asdict(texts), **asdict(tokens))
    with run_folder(path, output.overwrite) as folder:
        write_config(folder, source, tokens, texts, places, interventions=by_kind)
        attention = result.after.recording.attention_path
        folder.write_json("environment.json", run_environment(loaded, attention_path=attention))
        result.write(folder)
        write_page(folder)
    output.show(path, lambda: show(result, path))


def show(result: InterventionResult, path: Path) -> None:
    """Every observable at the positions acted on and at the sinks, before, after and under the control."""
    from sinkscope.interventions.page import position_texts
    from sinkscope.pages.terminal import Terminal

    out, texts = Terminal(), position_texts(result.summary)
    rows = []
    for quantity, position, *values in zip(*result.tables["means"].values(), strict=True):
        name = f"{position} {texts.get(position, '')}".strip()
        rows.append((quantity, name, *(f"{value:.4g}" for value in values)))
    columns = ("quantity", "position", "before", "after", "control")
    out.table("means over layers", columns, rows, limit=len(rows))
    for arm in ("before", "after", "control"):
        out.say(f"{arm.capitalize()}: {getattr(result, arm).story}")
    for check in result.checks:
        out.say(check.text)
    out.say(f"The control: {result.control_is}. Calibrated on {result.calibrated_on}.")
    out.say_where(path)
