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
    test: Annotated[
        bool,
        typer.Option(
            "--test/--no-test",
            help="Read at most eight sequences again, without the neurons that are named and without random ones.",
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
    from sinkscope.interventions.tested_trace import trace
    from sinkscope.models.prompts import prompt_batch
    from sinkscope.models.token_batches import token_batch
    from sinkscope.pages import progress
    from sinkscope.results.run_folder import run_folder

    loaded = source.load()
    if texts.prompt:
        batch = prompt_batch(loaded, texts.prompt, bos=texts.bos)
    else:
        batch = token_batch(loaded, bos=texts.bos, **asdict(tokens))
    with progress.bar("forward passes") as move:
        result = trace(loaded, batch, keys=keys, effective_rank=asked.effective_rank, test=asked.test, progress=move)
    first_process_writes()
    with progress.working("finding sinks, dimensions and neurons"), run_folder(path, output.overwrite) as folder:
        write_config(folder, source, *([] if texts.prompt else [tokens]), texts, asked)
        recording = result.recording
        environment = run_environment(loaded, attention_path=recording.attention_path, elapsed_s=recording.elapsed_s)
        folder.write_json("environment.json", environment)
        result.write(folder)
        write_pictures(folder)
    output.show(path, lambda: show(result, loaded, path))


CERTAINTY = {"sink": "yes", "maybe": "maybe", "in some": "in some sequences"}
"""How sure it is that a position is a sink, in words."""


def show(trace: Trace, loaded: LoadedModel, path: Path) -> None:
    """Prints what a trace shows."""
    import math

    from sinkscope.pages.terminal import Terminal, spans
    from sinkscope.pages.text import number
    from sinkscope.tracing.story import shared_token

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
    batch = recording.batch
    if findings.sinks:
        rows = []
        for sink in findings.sinks:
            token = shared_token(batch, sink.position)
            rows.append(
                (
                    str(sink.position),
                    "" if token is None else repr(trace.token_text(token)),
                    f"{sink.rate:.1%}",
                    "" if math.isnan(sink.low) else f"{sink.low:.1%} to {sink.high:.1%}",
                    CERTAINTY[sink.certainty(batch.num_sequences)],
                    f"{len(sink.sequences)} of {batch.num_sequences}",
                    spans(sink.layers),
                )
            )
        columns = ("position", "token", "sink rate", "95 % interval", "a sink", "sequences", "layers")
        out.table("sinks", columns, rows)
    if trace.token_sinks:
        rows = [
            (f"'{trace.token_text(s.id)}'", f"{s.num_sequences} of {s.num_with} with it", spans(list(s.positions)))
            for s in trace.token_sinks
        ]
        out.table("sinks within texts, by token", ("token", "texts", "positions"), rows)
    for role in ("writes", "erases"):
        rows = [
            (
                str(u.layer),
                "-" if u.expert is None else str(u.expert),
                str(u.neuron),
                str(u.dimension),
                number(u.write),
                f"{u.write_share:.1%}",
                f"{number(u.contrast)}x",
                f"{float(u.sparsity.top_share):.1%}",
            )
            for u in findings.super_neurons
            if u.position == findings.focus[0] and u.role == role
        ]
        if rows:
            columns = ("layer", "expert", "neuron", "dimension", "write", "share", "contrast", "top share")
            out.table(f"neurons that {role[:-1]} massive dimensions at position {findings.focus[0]}", columns, rows)
    out.say(trace.story, style="bold")
    out.say(f"Tables and summary: {path}")


def _length(tokens: dict) -> str:
    """How long the sequences are, such as 12 to 30 for texts of unequal length."""
    lengths = tokens.get("whole") or [tokens["length"]]
    return str(min(lengths)) if min(lengths) == max(lengths) else f"{min(lengths)} to {max(lengths)}"
