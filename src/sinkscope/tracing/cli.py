"""sinkscope trace: the whole chain of a model, from one forward pass."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from sinkscope.arguments import check_keys
from sinkscope.cli_options import BatchOptions, ModelOptions, PromptOptions, integers
from sinkscope.cli_output import Output, first_process_writes, run_environment, write_config, write_pictures

if TYPE_CHECKING:
    from pathlib import Path

    from sinkscope.models.loaded import LoadedModel
    from sinkscope.tracing.findings import Findings
    from sinkscope.tracing.super_neurons import SuperNeuron
    from sinkscope.tracing.trace import Trace


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """The options of `sinkscope trace` alone."""

    keys: Annotated[
        str | None,
        typer.Option(help="Record attention on these key positions only, such as 0,10. Faster for long contexts."),
    ] = None
    effective_rank: Annotated[
        bool,
        typer.Option(
            "--effective-rank/--no-effective-rank", help="Measure the effective rank, which needs a decomposition."
        ),
    ] = True


def trace_command(
    asked: TraceOptions, tokens: BatchOptions, texts: PromptOptions, source: ModelOptions, output: Output
) -> None:
    """Show the whole sink chain of a model, from one forward pass.

    Example: sinkscope trace HuggingFaceTB/SmolLM2-135M --prompt "The cat sat on the mat."
    """
    texts.check(tokens)
    keys = None if asked.keys is None else integers(asked.keys, "keys", [0, 10])
    if not texts.prompt:
        check_keys(keys, tokens.length)
    path = output.path(source.model)
    from sinkscope.models.prompts import prompt_batch
    from sinkscope.models.token_batches import token_batch
    from sinkscope.pages import progress
    from sinkscope.results.run_folder import run_folder
    from sinkscope.tracing.trace import trace

    loaded = source.load()
    if texts.prompt:
        batch = prompt_batch(loaded, texts.prompt, bos=texts.bos)
    else:
        batch = token_batch(loaded, bos=texts.bos, **asdict(tokens))
    with progress.bar("forward passes") as move:
        result = trace(loaded, batch, keys=keys, effective_rank=asked.effective_rank, progress=move)
    first_process_writes()
    with progress.working("finding sinks, dimensions and neurons"), run_folder(path, output.overwrite) as folder:
        write_config(folder, source, *([] if texts.prompt else [tokens]), texts, asked)
        recording = result.recording
        environment = run_environment(loaded, attention_path=recording.attention_path, elapsed_s=recording.elapsed_s)
        folder.write_json("environment.json", environment)
        result.write(folder)
        write_pictures(folder)
    output.show(path, lambda: show(result, loaded, path))


def show(trace: Trace, loaded: LoadedModel, path: Path) -> None:
    """Prints what a trace shows."""
    import math

    from sinkscope.pages.terminal import Terminal, spans
    from sinkscope.pages.text import number

    out, findings, recording = Terminal(soft_wrap=True), trace.findings, trace.recording
    tokens = recording.batch.describe()
    kind = {"repeat": "repeated"}.get(tokens["kind"], tokens["kind"])
    out.say(
        (
            f"{loaded.name} ({recording.anatomy.family.name}, {recording.num_layers} layers, {loaded.dtype}), "
            f"{tokens['count']} sequence{'s' * (tokens['count'] != 1)} of {_length(tokens)} {kind} tokens"
            f"{', BOS first' if tokens['bos'] else ''}; "
            f"attention by {recording.attention_path}, {recording.elapsed_s:.1f} s"
        ),
    )
    if findings.sinks:
        rows = [
            (
                str(s.position),
                f"{s.rate:.1%}",
                "" if math.isnan(s.low) else f"{s.low:.1%} to {s.high:.1%}",
                f"{s.mean_attention:.3f}",
                spans(s.layers),
            )
            for s in findings.sinks
        ]
        out.table("sinks", ("position", "sink rate", "95 % interval", "mean attention", "layers"), rows)
    if trace.token_sinks:
        rows = [
            (f"'{trace.token_text(s.id)}'", f"{s.num_sequences} of {s.num_with} with it", spans(list(s.positions)))
            for s in trace.token_sinks
        ]
        out.table("sinks within texts, by token", ("token", "texts", "positions"), rows)
    if findings.super_neurons:
        rows = [
            (
                str(u.layer),
                "-" if u.expert is None else str(u.expert),
                str(u.neuron),
                str(u.dimension),
                u.role,
                number(u.write),
                f"{u.write_share:.1%}",
                f"{number(u.contrast)}x",
                f"{float(u.sparsity.top_share):.1%}",
            )
            for u in _listed_neurons(findings)
        ]
        columns = ("layer", "expert", "neuron", "dimension", "role", "write", "share", "contrast", "top share")
        out.table(f"super neurons at position {findings.focus[0]}", columns, rows)
    out.say(trace.story, style="bold")
    out.say(f"Tables and summary: {path}")


def _listed_neurons(findings: Findings) -> list[SuperNeuron]:
    """The super neurons at the foremost position. Those that first write the disparity, which the story names, lead."""
    appears_in = findings.appears_in
    neurons = [neuron for neuron in findings.super_neurons if neuron.position == findings.focus[0]]
    return sorted(
        neurons,
        key=lambda u: appears_in.index(u.layer) if u.layer in appears_in and u.role == "writes" else len(appears_in),
    )


def _length(tokens: dict) -> str:
    """How long the sequences are, such as 12 to 30 for texts of unequal length."""
    lengths = tokens.get("whole") or [tokens["length"]]
    return str(min(lengths)) if min(lengths) == max(lengths) else f"{min(lengths)} to {max(lengths)}"
