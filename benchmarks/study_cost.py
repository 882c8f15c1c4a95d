"""What a study costs in plain forward passes on the batch that it judges.

    python benchmarks/study_cost.py SmolLM2-135M-Instruct.Q4_1.gguf
    python benchmarks/study_cost.py                                   # random weights of that shape: no sink

A plain forward is model(input_ids) with sdpa, no cache and all logits, on the study's own 32 x 64 tokens. It is timed
before the study, after it and between its conditions, so that what disturbs the machine disturbs both; that time is
taken off the study's. Without a sink there is nothing to intervene on: random weights show what the reading costs.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from sinkscope.models.loading import LoadedModel, load
from sinkscope.models.token_batches import token_batch
from sinkscope.studies.study import Study, study

SHAPE = {
    "num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3,
    "head_dim": 64, "intermediate_size": 1536, "vocab_size": 49152, "max_position_embeddings": 8192,
}  # fmt: skip
LIMIT = 300
"""Plain forwards that a study of SmolLM2-135M may cost."""
EVERY = 10
"""Conditions between two plain forwards."""


def main() -> None:
    options = parsed_options()
    torch.set_num_threads(options.threads)
    loaded = load(options.model, device=options.device) if options.model else load(random_model().to(options.device))
    ids_BT = token_batch(loaded, length=options.length, num_sequences=options.num_sequences).ids.to(loaded.model.device)
    plain_forward(loaded, ids_BT)  # a warm-up
    plain_s = [plain_forward(loaded, ids_BT)]
    studies_s, result = [], None
    for _ in range(options.rounds):
        elapsed_s, between_s, result = timed_study(loaded, ids_BT)
        studies_s.append(elapsed_s)
        plain_s += [*between_s, plain_forward(loaded, ids_BT)]
    assert result is not None
    print("\n".join(describe(options, loaded, result)))
    print()
    print(table(plain_s, studies_s))
    print()
    worth = statistics.median(studies_s) / statistics.median(plain_s)
    print(f"{'PASS' if worth <= LIMIT else 'FAIL'}: a study is worth {worth:.0f} plain forwards, at most {LIMIT}")


def parsed_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="folder, .gguf file or name; without it random weights")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--num-sequences", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=1, help="studies; plain forwards are timed throughout each")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def random_model() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, attn_implementation="sdpa")).eval()


@torch.no_grad()
def plain_forward(loaded: LoadedModel, ids_BT: torch.Tensor) -> float:
    """Seconds of one plain forward."""
    synchronize(ids_BT.device)
    started_at = time.perf_counter()
    loaded.model(ids_BT, use_cache=False)
    synchronize(ids_BT.device)
    return time.perf_counter() - started_at


def timed_study(loaded: LoadedModel, ids_BT: torch.Tensor) -> tuple[float, list[float], Study]:
    """(seconds of one study, seconds of the plain forwards within it, which are not counted, the study)."""
    between_s: list[float] = []

    def progress(done: int, total: int) -> None:
        if done % EVERY == 0:
            print(f"{done} of {total} conditions", file=sys.stderr, flush=True)
            between_s.append(plain_forward(loaded, ids_BT))

    num_sequences, length = ids_BT.shape
    synchronize(ids_BT.device)
    started_at = time.perf_counter()
    result = study(loaded, length=length, num_sequences=num_sequences, progress=progress)
    synchronize(ids_BT.device)
    return time.perf_counter() - started_at - sum(between_s), between_s, result


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def describe(options: argparse.Namespace, loaded: LoadedModel, result: Study) -> list[str]:
    on_cuda = loaded.model.device.type == "cuda"
    device = torch.cuda.get_device_name() if on_cuda else f"{processor_name()}, {torch.get_num_threads()} threads"
    weights = loaded.name if options.model else "Llama of the shape of SmolLM2-135M, random weights"
    return [
        f"Device: {device}",
        f"Model: {weights}, {loaded.dtype}, {len(result.trace.recording.anatomy.layers)} layers",
        f"Versions: Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
        f"Batch: {options.num_sequences} x {options.length} random tokens; {len(result.data.results)} conditions, "
        f"interventions on the aggregation in layers 0 to {result.plan.last_layer}, "
        f"a minimal set of {len(result.minimal_set)} neurons",
        "Seconds are medians with [smallest, largest]",
    ]


def processor_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def table(plain_s: list[float], studies_s: list[float]) -> str:
    lines = ["| | runs | seconds | plain forwards' worth |", "| --- | ---: | ---: | ---: |"]
    for name, seconds in (("plain forward", plain_s), ("study", studies_s)):
        worth = statistics.median(seconds) / statistics.median(plain_s)
        spread = f"{statistics.median(seconds):.3g} [{min(seconds):.3g}, {max(seconds):.3g}]"
        lines.append(f"| {name} | {len(seconds)} | {spread} | {worth:.3g} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
