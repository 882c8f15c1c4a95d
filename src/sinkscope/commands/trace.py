"""sinkscope trace: the whole chain of a model, read in one forward pass."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from sinkscope.arguments import check_keys, check_trace_length
from sinkscope.commands import options


@dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """What one trace was asked to do; written to config.yaml."""

    model: str | None
    revision: str | None
    dtype: str
    device: str
    device_map: str | None
    trust_remote_code: bool
    tokens: str
    bos: bool | None
    length: int
    num_sequences: int
    seed: int
    keys: str | None
    effective_rank: bool

    def __post_init__(self) -> None:
        options.check_model_and_batch(self)
        check_trace_length(self.length)
        check_keys(self.key_positions, self.length)

    @property
    def key_positions(self) -> list[int] | None:
        return None if self.keys is None else options.integers(self.keys, "keys", [0, 10])


def trace_command(
    model: options.Model = None,
    tokens: options.Tokens = "random",
    bos: options.Bos = None,
    length: options.Length = 64,
    num_sequences: options.NumSequences = 32,
    seed: options.Seed = 0,
    keys: Annotated[
        str | None, typer.Option(help="Read chosen key positions only, such as 0,10: O(length) each.")
    ] = None,
    effective_rank: Annotated[
        bool, typer.Option("--effective-rank/--no-effective-rank", help="Effective rank, by a decomposition.")
    ] = True,
    revision: options.Revision = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
    trust_remote_code: options.TrustRemoteCode = False,
    out: options.Out = None,
    overwrite: options.Overwrite = False,
    as_json: options.AsJson = False,
) -> None:
    """Show the whole sink chain of a model, read in one forward pass.

    Example: sinkscope trace HuggingFaceTB/SmolLM2-135M --length 64 --num-sequences 32
    """
    config = TraceConfig(
        model=model,
        revision=revision,
        dtype=dtype,
        device=device,
        device_map=device_map,
        trust_remote_code=trust_remote_code,
        tokens=tokens,
        bos=bos,
        length=length,
        num_sequences=num_sequences,
        seed=seed,
        keys=keys,
        effective_rank=effective_rank,
    )
    path = options.run_path(out, model, overwrite)
    from sinkscope.capture.trace import trace
    from sinkscope.models.token_batches import token_batch
    from sinkscope.report import terminal
    from sinkscope.results.run_folder import run_folder

    loaded = options.load_model(config)
    batch = token_batch(loaded, tokens, bos=bos, length=length, num_sequences=num_sequences, seed=seed)
    with terminal.progress("forward passes") as progress:
        result = trace(loaded, batch, keys=config.key_positions, effective_rank=effective_rank, progress=progress)
    with terminal.working("finding sinks, dimensions and neurons"), run_folder(path, overwrite) as folder:
        folder.write_yaml("config.yaml", asdict(config))
        recording = result.recording
        environment = options.run_environment(
            loaded, attention_path=recording.attention_path, elapsed_s=recording.elapsed_s
        )
        folder.write_json("environment.json", environment)
        result.write(folder)
        options.write_pictures(folder, result)
    if as_json:
        print((path / "summary.json").read_text(encoding="utf-8"), end="")
    else:
        terminal.show_trace(result, loaded, path)
