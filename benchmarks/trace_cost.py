"""What tracing costs beside a plain forward pass: seconds and peak memory, as ratios within one run.

    python benchmarks/trace_cost.py --shape 135m                      # CPU
    python benchmarks/trace_cost.py --shape reference                 # the bundled model, 32 sequences of 64 tokens
    python benchmarks/trace_cost.py --shape 1b --device cuda          # one H200

A model with random weights is built from a configuration, or the bundled one is loaded. For each length, random tokens
go through:

    plain             the decoder with sdpa, no cache and no logits (nothing here needs them, so nobody computes them)
    trace             all of sinkscope.trace: the pass, the findings, the effective rank, tables and summary
    recording alone   the pass of it
    trace, 2 keys     all of it with keys 0 and 10 only
    eager maps        output_attentions=True, then attention received per key and the sink rate from all the maps
    TransformerLens   run_with_cache of the attention patterns alone, and of everything, reduced likewise
    nnsight           attention maps of every layer, reduced likewise inside its trace

All that read every key must agree on attention received, or the run fails. Contestants take turns, so that what
disturbs the machine disturbs all; a ratio is taken within one round. The other tools are optional:
pip install -c constraints.txt -r benchmarks/peers.txt.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import importlib.metadata
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import transformers
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from sinkscope.measures.sink_score import RECEIVED_THRESHOLD, mean_received
from sinkscope.models.given_ids import given_batch
from sinkscope.models.loading import LoadedModel, load
from sinkscope.models.token_batches import TokenBatch
from sinkscope.tracing.observables import CHAIN
from sinkscope.tracing.recorder import record
from sinkscope.tracing.trace import trace

SHAPES = {
    "135m": {
        "num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3,
        "head_dim": 64, "intermediate_size": 1536, "vocab_size": 49152, "max_position_embeddings": 8192,
    },
    "1b": {
        "num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "intermediate_size": 8192, "vocab_size": 128256, "max_position_embeddings": 131072,
    },
    "reference": {},
}  # fmt: skip
SEQUENCES = {"reference": 32}
"""One where it is not said."""
LENGTHS = {"cpu": (512, 1024, 2048, 4096), "cuda": (4096, 16384, 65536, 131072)}
LENGTHS_OF_SHAPE = {"reference": (64,)}
TIME_TARGETS = {
    ("cpu", "135m"): {"trace": {512: 1.5, 2048: 1.4, 4096: 1.3}},
    ("cpu", "reference"): {"trace": {64: 1.5}},
    ("cuda", "1b"): {"trace": {4096: 3.0, 16384: 1.5, 65536: 1.6, 131072: 1.6}},
}
MEMORY_TARGET = {("cuda", "1b"): 1.25}
AHEAD_FROM = {"eager maps": 1024, "TransformerLens, patterns": 1024, "TransformerLens, everything": 1024}
"""From which length on the trace must take less time than the others."""
AGREEMENT = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}
"""Largest difference in attention received, a number up to 1: what rounding one weight to the maps' dtype can do."""
OURS = ("plain", "trace", "recording alone", "trace, 2 keys", "eager maps")
"""Contestants that need no other tool."""
MIN_ROUNDS = 3
GIB = 2**30


@dataclass(frozen=True)
class Text:
    ids: Tensor
    batch: TokenBatch


@dataclass(frozen=True)
class Contestant:
    run: Callable[[Text], Tensor | None]
    """Gives [L, H, T] mean attention received where it reads every key."""
    held_bytes: Callable[[int], float] = lambda length: 0.0
    """What it holds beyond a plain forward at a length."""


@dataclass
class Row:
    length: int
    contestant: str
    note: str = ""
    """Why it was not run, if so."""
    seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    """All memory in use at the worst moment, weights included."""
    own_bytes: int | None = None
    """The part of it that was not in use before the call."""


def main() -> None:
    options = parsed_options()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    model = build_model(options)
    if options.memory_of:
        print(json.dumps(memory_on_cpu(options, model)))
        return
    loaded = load(model)
    contestants, missing = all_contestants(loaded, options.peers)
    path = record(loaded, random_text(model, 64).batch, CHAIN).attention_path
    described = describe_run(options, path)
    print("\n".join(f"- {line}" for line in described), flush=True)

    rows = []
    for length in options.lengths:
        text = random_text(model, length, SEQUENCES.get(options.shape, 1))
        new = time_length(options, contestants, text)
        new += [Row(length, name, note="not installed") for name in missing]
        progress(table(new))  # a run that is stopped has shown what it had
        rows += new
    if options.device == "cpu" and not options.no_memory:
        fill_memory_on_cpu(options, contestants, rows)
    print(f"\n{table(rows)}\n")
    print("\n".join(verdicts(options, rows)))
    if options.json:
        kept = {"run": described, "options": vars(options), "rows": [asdict(row) for row in rows]}
        Path(options.json).write_text(json.dumps(kept, indent=1) + "\n")


def parsed_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--device", choices=LENGTHS, default="cpu")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="float32 on the CPU, bfloat16 on CUDA"
    )
    parser.add_argument("--lengths", help="comma-separated; 512 to 4,096 on the CPU, 4,096 to 131,072 on CUDA")
    parser.add_argument("--repeats", type=int, default=7, help="rounds at most")
    parser.add_argument(
        "--budget", type=float, default=10.0, help="seconds for one contestant and length, beyond 3 rounds"
    )
    parser.add_argument("--threads", type=int, help="CPU threads of torch")
    parser.add_argument("--memory-limit", type=float, help="GiB that attention maps may take; 80 %% of what is free")
    parser.add_argument(
        "--no-memory", action="store_true", help="skip peak memory, which on the CPU needs fresh processes"
    )
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="leave TransformerLens and nnsight out")
    parser.add_argument("--json", metavar="FILE", help="write the raw numbers there")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    usual = LENGTHS_OF_SHAPE.get(options.shape, LENGTHS[options.device])
    options.lengths = sorted(map(int, options.lengths.split(",")) if options.lengths else usual)
    options.dtype = options.dtype or {"cpu": "float32", "cuda": "bfloat16"}[options.device]
    if options.memory_limit is None:
        options.memory_limit = 0.8 * free_bytes(options.device) / GIB
    return options


def build_model(options: argparse.Namespace) -> transformers.PreTrainedModel:
    if options.shape == "reference":
        return load("reference:softmax", dtype=options.dtype, device=options.device).model
    shape = SHAPES[options.shape]
    context = max(shape["max_position_embeddings"], *options.lengths)
    config = transformers.LlamaConfig(**{**shape, "max_position_embeddings": context, "tie_word_embeddings": True})
    with torch.device(options.device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, options.dtype), attn_implementation="sdpa"
        )
    return model.eval().requires_grad_(False)


def random_text(model: transformers.PreTrainedModel, length: int, num_sequences: int = 1) -> Text:
    shape = (num_sequences, length)
    ids = torch.randint(0, model.config.vocab_size, shape, generator=torch.Generator().manual_seed(length))
    return Text(ids.to(model.device), given_batch(ids, model=model))


# Contestants


def all_contestants(loaded: LoadedModel, with_peers: bool) -> tuple[dict[str, Contestant], list[str]]:
    """(those that can run, by name; the names of those whose package is not installed)."""
    model = loaded.model
    contestants = {
        "plain": Contestant(lambda text: plain_forward(model, text)),
        "trace": Contestant(lambda text: whole_trace(loaded, text)),
        "recording alone": Contestant(lambda text: record(loaded, text.batch, CHAIN)["received"]),
        "trace, 2 keys": Contestant(lambda text: whole_trace(loaded, text, [0, 10])),
        "eager maps": eager_maps(model),
    }
    missing = []
    for package, build in (("transformer_lens", transformer_lens), ("nnsight", nnsight)) if with_peers else ():
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
        else:
            contestants |= build(model)
    return contestants, missing


def plain_forward(model: transformers.PreTrainedModel, text: Text) -> None:
    model.get_decoder()(text.ids, use_cache=False)


def whole_trace(loaded: LoadedModel, text: Text, keys: list[int] | None = None) -> Tensor | None:
    """From a loaded model to a result in hand."""
    found = trace(loaded, text.batch, keys=keys)
    _ = found.tables, found.summary
    return found.recording["received"] if keys is None else None


def sink_numbers(maps: list[Tensor]) -> Tensor:
    """[L, H, T] mean attention received, and from it the sink rate by position, which the caller has no use for."""
    return with_sink_rate(torch.stack([attention.sum(2, dtype=torch.float32).mean(0) for attention in maps]))


def with_sink_rate(received_LHT: Tensor) -> Tensor:
    alpha_LHT = mean_received(received_LHT)
    (alpha_LHT > RECEIVED_THRESHOLD).float().mean((0, 1)).max().item()
    return alpha_LHT


def eager_maps(model: transformers.PreTrainedModel) -> Contestant:
    decoder = eager_twin(model).get_decoder()

    def run(text: Text) -> Tensor:
        return sink_numbers(decoder(text.ids, use_cache=False, output_attentions=True).attentions)

    return Contestant(run, held_bytes(model, num_maps=model.config.num_hidden_layers))


def transformer_lens(model: transformers.PreTrainedModel) -> dict[str, Contestant]:
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    twin = eager_twin(model)
    bridge = build_bridge_from_module(twin, "LlamaForCausalLM", hf_config=twin.config)
    num_layers = model.config.num_hidden_layers
    width, num_neurons = model.config.hidden_size, model.config.intermediate_size

    def run(text: Text, names_filter: Callable[[str], bool] | None) -> Tensor:
        # It has no way round the logits; one row of them keeps what it must compute like the others'.
        _, cache = bridge.run_with_cache(text.ids, names_filter=names_filter, logits_to_keep=1, use_cache=False)
        return sink_numbers([cache[f"blocks.{layer}.attn.hook_pattern"] for layer in range(num_layers)])

    return {
        "TransformerLens, patterns": Contestant(
            lambda text: run(text, lambda name: name.endswith("hook_pattern")), held_bytes(model, num_maps=num_layers)
        ),
        "TransformerLens, everything": Contestant(
            lambda text: run(text, None),
            held_bytes(model, num_maps=2 * num_layers, values_per_token=num_layers * (25 * width + 6 * num_neurons)),
        ),
    }


def nnsight(model: transformers.PreTrainedModel) -> dict[str, Contestant]:
    import nnsight

    decoder = nnsight.NNsight(eager_twin(model).get_decoder())

    def run(text: Text) -> Tensor:
        with decoder.trace(text.ids, use_cache=False):
            received = nnsight.save([])
            for layer in decoder.layers:
                received.append(layer.self_attn.output[1].sum(2, dtype=torch.float32)[0])
        return with_sink_rate(torch.stack(received))

    return {"nnsight": Contestant(run, held_bytes(model, num_maps=0))}


def eager_twin(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """The same weights, not copied, in modules of their own: other tools change modules for good."""
    twin = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    twin.set_attn_implementation("eager")
    return twin


def held_bytes(
    model: transformers.PreTrainedModel, *, num_maps: int, values_per_token: int = 0
) -> Callable[[int], float]:
    """Maps that are kept, those that eager attention holds of one layer (scores and weights, and float32 of both), and
    activations that are kept, as values per token."""
    size, num_heads = model.dtype.itemsize, model.config.num_attention_heads
    per_pair = num_heads * ((num_maps + 2) * size + 2 * 4)
    return lambda length: length**2 * per_pair + length * values_per_token * size


# Time


def time_length(options: argparse.Namespace, contestants: dict[str, Contestant], text: Text) -> list[Row]:
    length = text.ids.shape[1]
    rows, warm_s, received = {}, {}, {}
    for name, contestant in contestants.items():
        rows[name] = Row(length, name, note=too_large(options, contestant, length))
        if rows[name].note:
            continue
        progress(f"T = {length}: warming up {name}")
        started_at = time.perf_counter()
        output = contestant.run(text)
        received[name] = None if output is None else output.cpu()
        warm_s[name] = time.perf_counter() - started_at
        del output
        if options.device == "cuda":  # the first call may have compiled kernels, and says little about the next
            warm_s[name], _, _ = measured(options.device, contestant, text)
    check_agreement(received, getattr(torch, options.dtype), length)
    received.clear()
    gc.collect()
    gc.freeze()  # a collection before each call would walk all that is there, and drive the code out of the caches

    rounds = {name: max(MIN_ROUNDS, min(options.repeats, int(options.budget / s))) for name, s in warm_s.items()}
    rounds["plain"] = max(rounds.values())
    for number in range(rounds["plain"]):
        progress(f"T = {length}: round {number + 1} of {rounds['plain']}")
        taking_part = [name for name in rounds if number < rounds[name]]
        # Each round begins with another contestant, so that none always follows the same one.
        shift = number % len(taking_part)
        seconds = {}
        for name in taking_part[shift:] + taking_part[:shift]:
            seconds[name], peak_bytes, own_bytes = measured(options.device, contestants[name], text)
            if peak_bytes is not None:
                rows[name].peak_bytes = max(peak_bytes, rows[name].peak_bytes or 0)
                rows[name].own_bytes = max(own_bytes, rows[name].own_bytes or 0)
        for name in taking_part:
            rows[name].seconds.append(seconds[name])
            rows[name].ratios.append(seconds[name] / seconds["plain"])
    return list(rows.values())


def measured(device: str, contestant: Contestant, text: Text) -> tuple[float, int | None, int | None]:
    """(seconds, peak bytes, those of them that were not in use before) of one call; bytes on CUDA only."""
    gc.collect()
    gc.disable()  # as timeit does: a collection of all that was ever imported takes 10 ms, whoever happens to cause it
    try:
        if device == "cpu":
            started_at = time.perf_counter()
            contestant.run(text)
            return time.perf_counter() - started_at, None, None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        started_at = time.perf_counter()
        contestant.run(text)
        torch.cuda.synchronize()
        elapsed_s = time.perf_counter() - started_at
        peak = torch.cuda.max_memory_allocated()
        return elapsed_s, peak, peak - before
    finally:
        gc.enable()


def check_agreement(received: dict[str, Tensor | None], dtype: torch.dtype, length: int) -> None:
    ours = received["trace"]
    assert ours is not None
    for name, theirs in received.items():
        if theirs is None or name == "trace":
            continue
        difference = float((theirs.float() - ours.float()).abs().max())
        progress(f"T = {length}: attention received, {name} and trace differ by at most {difference:.1e}")
        if not difference <= AGREEMENT[dtype]:
            raise RuntimeError(
                f"{name} and the trace differ by {difference:.1e} in attention received at T = {length}; "
                f"expected at most {AGREEMENT[dtype]:.0e}. Times of different numbers cannot be compared"
            )


# Memory


def too_large(options: argparse.Namespace, contestant: Contestant, length: int) -> str:
    needed = contestant.held_bytes(length) / GIB
    return f"not run: maps need {needed:,.0f} GiB" if needed > options.memory_limit else ""


def free_bytes(device: str) -> int:
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    return kernel_bytes("/proc/meminfo", "MemAvailable")


def fill_memory_on_cpu(options: argparse.Namespace, contestants: dict[str, Contestant], rows: list[Row]) -> None:
    """Resident set at its highest, each contestant in a process of its own: what one frees another would reuse."""
    for name in contestants:
        own = [row for row in rows if row.contestant == name and not row.note]
        if not own:
            continue
        progress(f"peak memory of {name}")
        command = [
            *(sys.executable, __file__, "--memory-of", name, "--shape", options.shape, "--dtype", options.dtype),
            *("--lengths", ",".join(str(row.length) for row in own), "--threads", str(torch.get_num_threads())),
            *(["--no-peers"] if name in OURS else []),
        ]
        answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        for row, (peak_bytes, before_bytes) in zip(own, json.loads(answer.splitlines()[-1]), strict=True):
            row.peak_bytes, row.own_bytes = peak_bytes, peak_bytes - before_bytes


def memory_on_cpu(options: argparse.Namespace, model: transformers.PreTrainedModel) -> list[tuple[int, int]]:
    """(highest resident set, resident set before) of one contestant at each length."""
    contestants, _ = all_contestants(load(model), options.peers)
    contestant = contestants[options.memory_of]
    result = []
    contestant.run(random_text(model, 64))  # loads libraries that are loaded on first use
    for length in options.lengths:
        text = random_text(model, length, SEQUENCES.get(options.shape, 1))
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
        before = kernel_bytes("/proc/self/status", "VmRSS")
        contestant.run(text)
        result.append((kernel_bytes("/proc/self/status", "VmHWM"), before))
    return result


def kernel_bytes(file: str, name: str) -> int:
    """A line such as `VmRSS:  1234 kB` of a file of the Linux kernel."""
    lines = dict(line.split(":", 1) for line in Path(file).read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


# Output


def describe_run(options: argparse.Namespace, attention_path: str) -> list[str]:
    on_cuda = options.device == "cuda"
    device = torch.cuda.get_device_name() if on_cuda else f"{processor_name()}, {torch.get_num_threads()} threads"
    copy_gb_s, matmul_tflops = machine_speed(options)
    shape = ", ".join(f"{name} {value}" for name, value in SHAPES[options.shape].items())
    weights = (
        "the bundled reference:softmax" if options.shape == "reference" else f"Llama {options.shape}, random weights"
    )
    packages = ["torch", "triton", "transformers", *(("transformer_lens", "nnsight") if options.peers else ())]
    versions = ", ".join(f"{name} {version}" for name in packages if (version := version_of(name)))
    memory = "allocated on the device" if on_cuda else "resident set of a fresh process, libraries included"
    return [
        f"Device: {device}; copies {copy_gb_s:,.0f} GB/s, multiplies {options.dtype} at {matmul_tflops:,.2f} TFLOP/s",
        f"Model: {weights}, {options.dtype}{', ' if shape else ''}{shape}",
        f"Versions: Python {platform.python_version()}, {versions}",
        f"Attention: sdpa in the plain forward, {attention_path} in the trace, eager in the others",
        f"Sequences of random tokens: {SEQUENCES.get(options.shape, 1)}",
        f"Warm-up, then {MIN_ROUNDS} to {options.repeats} rounds in turn",
        "Seconds are medians, ratios are medians over rounds with [smallest, largest]",
        f"Peak memory: {memory}, weights included; 'own' is what was not in use before the call",
    ]


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def processor_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def machine_speed(options: argparse.Namespace) -> tuple[float, float]:
    """(GB/s read and written by a copy, TFLOP/s of a large matrix product): the machine's own limits."""
    on_cuda = options.device == "cuda"
    num_bytes, size = (2**32, 8192) if on_cuda else (2**28, 2048)
    source = torch.empty(num_bytes, dtype=torch.uint8, device=options.device)
    target = torch.empty_like(source)
    square = torch.randn(size, size, device=options.device, dtype=getattr(torch, options.dtype))

    def fastest(call: Callable[[], object]) -> float:
        seconds = []
        for _ in range(5):
            started_at = time.perf_counter()
            call()
            if on_cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started_at)
        return min(seconds)

    copy_s, matmul_s = fastest(lambda: target.copy_(source)), fastest(lambda: square @ square)
    return 2 * num_bytes / copy_s / 1e9, 2 * size**3 / matmul_s / 1e12


def table(rows: list[Row]) -> str:
    lines = [
        "| T | | rounds | seconds | x plain | peak GiB | x plain | own GiB |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        if row.note:
            lines.append(f"| {row.length:,} | {row.contestant} | | {row.note} | | | | |")
            continue
        plain = find(rows, row.length, "plain")
        seconds = statistics.median(row.seconds)
        if row.ratios:
            ratio = f"{statistics.median(row.ratios):.2f} [{min(row.ratios):.2f}, {max(row.ratios):.2f}]"
        else:
            ratio = f"+ {seconds / statistics.median(plain.seconds):.2f}"
        memory = " | | "
        if row.peak_bytes is not None:
            memory = f"{row.peak_bytes / GIB:.2f} | {row.peak_bytes / plain.peak_bytes:.2f} | {row.own_bytes / GIB:.2f}"
        lines.append(f"| {row.length:,} | {row.contestant} | {len(row.seconds)} | {seconds:.4g} | {ratio} | {memory} |")
    return "\n".join(lines)


def verdicts(options: argparse.Namespace, rows: list[Row]) -> list[str]:
    kind = (options.device, options.shape)
    lines = []

    def judge(what: str, value: float, limit: float) -> None:
        lines.append(f"{'PASS' if value <= limit else 'FAIL'}: {what} {value:.3f}, at most {limit:.3f}")

    for name, limits in TIME_TARGETS.get(kind, {}).items():
        for length, limit in limits.items():
            row = find(rows, length, name)
            if row is not None and row.ratios:
                judge(f"{name} / plain, time at T = {length:,}:", statistics.median(row.ratios), limit)
    for row in rows:
        plain, ours = find(rows, row.length, "plain"), find(rows, row.length, "trace")
        if kind in MEMORY_TARGET and row.contestant.startswith("trace"):
            ratio = row.peak_bytes / plain.peak_bytes
            judge(f"{row.contestant} / plain, peak memory at T = {row.length:,}:", ratio, MEMORY_TARGET[kind])
        if row.ratios and row.length >= AHEAD_FROM.get(row.contestant, float("inf")):
            by_round = [a / b for a, b in zip(ours.seconds, row.seconds, strict=False)]
            judge(f"trace / {row.contestant}, time at T = {row.length:,}:", statistics.median(by_round), 1.0)
    return lines or ["No target is set for this device and shape."]


def find(rows: list[Row], length: int, contestant: str) -> Row | None:
    return next((row for row in rows if (row.length, row.contestant) == (length, contestant)), None)


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
