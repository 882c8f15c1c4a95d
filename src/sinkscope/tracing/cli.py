"""sinkscope trace: the whole chain of a model, from one forward pass."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from sinkscope.arguments import check_keys
from sinkscope.cli_options import BatchOptions, ModelOptions, PromptOptions, integers
from sinkscope.cli_output import Output, first_process_writes, run_environment, write_pictures, write_request


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """What is recorded of a batch."""

    keys: Annotated[
        str | None, typer.Option(help="Record attention on these keys only, such as 0,10; faster for long contexts.")
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
    from sinkscope.pages import progress, terminal
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
        write_request(folder, source, *([] if texts.prompt else [tokens]), texts, asked)
        recording = result.recording
        environment = run_environment(loaded, attention_path=recording.attention_path, elapsed_s=recording.elapsed_s)
        folder.write_json("environment.json", environment)
        result.write(folder)
        write_pictures(folder, result)
    output.show(path, lambda: terminal.show_trace(result, loaded, path))
