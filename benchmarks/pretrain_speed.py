"""Prints how fast `sinkscope pretrain` trains, beside a plain loop over the same model, and where the time goes.

    python benchmarks/pretrain_speed.py --config 152m               # as it trains: 8 forward passes of 64 a step
    python benchmarks/pretrain_speed.py --config 152m --batch 64    # one

Contestants, each in a process of its own with an empty compilation cache:
- sinkscope: the trainer's own step (regional compilation, chunked vocabulary loss, token shards from disk), recorded as
  a CUDA graph after its first updates.
- launched: the same without the graph; its losses must be the same, and its profile says where a step goes.
- plain: the loop as nanoGPT writes it (the whole model compiled with its loss, logits of a whole pass, vocabulary
  padded to a multiple of 64, fused AdamW, bfloat16 autocast, clipping), on the same batches.
Start-up is from the first line after the imports to the end of the first update. Model FLOPs are 6 N + 6 L T E a token.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from sinkscope.pretrain import step as training_step
from sinkscope.pretrain.config import PretrainConfig
from sinkscope.pretrain.decoder import Decoder
from sinkscope.pretrain.parallel import Processes
from sinkscope.pretrain.presets import decoder_config, resolve
from sinkscope.pretrain.probes import probe, random_batch
from sinkscope.pretrain.tokens import ShardWriter, TokenStream, open_shards
from sinkscope.results.run_folder import run_folder

LARGEST_LOSS_DIFFERENCE = 0.02
"""Between two runs of the same updates: sums in another order grow with each of them."""
LARGEST_PROBE_SHARE = 0.02
KERNELS = {
    "attention": r"flash|fmha|attention",
    "matrix products": r"gemm|nvjet|cutlass|matmul|_mm_",
    "optimiser and clipping": r"adam|multi_tensor|lpnorm|foreach",
    "compiled pointwise and norms": r"triton",
}


def main() -> None:
    arguments = parsed()
    if arguments.contestant:
        print(json.dumps(measure(arguments)))
        return
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    print(f"- Device: {device}; torch {torch.__version__}, Python {sys.version.split()[0]}")
    results = {}
    for contestant in arguments.contestants.split(","):
        with tempfile.TemporaryDirectory() as cache:
            environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
            command = [sys.executable, __file__, *sys.argv[1:], "--contestant", contestant]
            finished = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            results[contestant] = json.loads(finished.stdout.splitlines()[-1])
            print(f"- {contestant}: {finished.stdout.splitlines()[-1]}", file=sys.stderr, flush=True)
    show(arguments, results)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="152m", help="a preset or a YAML file, as sinkscope pretrain takes it")
    parser.add_argument("--variant", default="softmax")
    parser.add_argument("--length", type=int, help="tokens of a sequence; the configuration's without it")
    parser.add_argument("--batch", type=int, help="sequences of a step, in one pass; else as configured")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="steps of a round")
    parser.add_argument("--peak", type=float, default=790e12, help="FLOP/s that MFU is taken of")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--contestants", default="sinkscope,launched,plain")
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    return parser.parse_args()


def configured(arguments: argparse.Namespace) -> PretrainConfig:
    """What is trained: the configuration, or the batch that was asked for in one forward pass."""
    asked = {"batch_size": arguments.batch, "micro_batch_size": arguments.batch, "sequence_length": arguments.length}
    training = {name: value for name, value in asked.items() if value is not None}
    return resolve(arguments.config, variant=arguments.variant, data=[], training=training)


def measure(arguments: argparse.Namespace) -> dict:
    """Start-up, seconds a step, tokens/s and, of the trainer, a profile."""
    config = configured(arguments)
    length, batch_size = config.training.sequence_length, config.training.batch_size
    with tempfile.TemporaryDirectory() as folder:
        shards = random_shards(Path(folder) / "tokens", config.vocab_size, 40 * batch_size * length)
        stream = TokenStream(shards, "train", length=length, batch_size=batch_size, seed=0)
        started_at = time.perf_counter()
        build = {"sinkscope": trainer, "launched": trainer, "plain": plain_loop}[arguments.contestant]
        model, step = build(arguments, config, stream)
        step(0)
        wait(arguments)
        startup_s = time.perf_counter() - started_at
        losses = [float(step(number)) for number in range(1, 1 + arguments.warmup)]
        seconds = []
        for _ in range(arguments.rounds):
            began_at = time.perf_counter()
            for number in range(arguments.steps):
                step(number)
            wait(arguments)
            seconds.append((time.perf_counter() - began_at) / arguments.steps)
        result = {
            "startup_s": startup_s,
            "losses": losses,
            "seconds": seconds,
            "flops_per_token": training_step.flops_per_token(model, length),
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if arguments.device == "cuda" else None,
        }
        if arguments.contestant == "sinkscope":
            result["probe_s"] = probe_seconds(model)
        if arguments.contestant == "launched" and arguments.device == "cuda":
            result["profile"] = profile(step)
        return result


def probe_seconds(model: Decoder) -> float:
    """What the probe of both batches takes that a training run makes."""
    batch = random_batch(model, length=64, num_sequences=32)
    seconds = []
    for _ in range(4):
        began_at = time.perf_counter()
        probe(model, batch)
        probe(model, batch, effective_rank=False)
        seconds.append(time.perf_counter() - began_at)
    return min(seconds[1:])


def random_shards(path: Path, vocab_size: int, num_tokens: int):
    generator = np.random.default_rng(0)
    with run_folder(path) as folder:
        writer = ShardWriter(folder, vocab_size, 1 << 27)
        writer.add("train", generator.integers(vocab_size, size=num_tokens))
        writer.finish()
    return open_shards(path)


def trainer(arguments: argparse.Namespace, config: PretrainConfig, stream: TokenStream):
    model = Decoder(decoder_config(config.model | {"vocab_size": config.vocab_size}))
    group = Processes(mode="single", rank=0, num_processes=1, device=torch.device(arguments.device))
    record, compile = arguments.contestant == "sinkscope", arguments.device == "cuda"
    step = training_step.TrainingStep(model, config.training, group, compile=compile, record=record)
    return model, lambda number: step.update(number, stream)[0]


def plain_loop(arguments: argparse.Namespace, config: PretrainConfig, stream: TokenStream):
    torch.set_float32_matmul_precision("high")
    training, padded = config.training, config.vocab_size + -config.vocab_size % 64
    model = Decoder(decoder_config(config.model | {"vocab_size": padded})).to(arguments.device)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimiser = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": training.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=training.learning_rate,
        betas=(training.beta1, training.beta2),
        fused=True,
    )
    compiled, micro_batches = torch.compile(model), training.rows(0, 1)

    def step(number: int) -> torch.Tensor:
        total = torch.zeros((), device=arguments.device)
        for rows in micro_batches:
            tokens, targets = stream.batch(number, rows)
            if arguments.device == "cuda":
                tokens, targets = (x.contiguous().pin_memory().to("cuda", non_blocking=True) for x in (tokens, targets))
            with torch.autocast(arguments.device, torch.bfloat16, enabled=arguments.device == "cuda"):
                logits = compiled(tokens, use_cache=False).logits
                loss = functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))
            (loss / len(micro_batches)).backward()
            total += loss.detach() / len(micro_batches)
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        return total

    return model, step


def profile(step, num_steps: int = 3) -> dict[str, float]:
    """Milliseconds a step of the device by kind of kernel, and what it idled."""
    inner = training_step.vocabulary_loss

    def labelled(*values):
        with torch.profiler.record_function("vocabulary"):
            return inner(*values)

    training_step.vocabulary_loss = labelled
    torch.cuda.synchronize()
    with torch.profiler.profile() as profiler:
        began_at = time.perf_counter()
        for number in range(num_steps):
            step(number)
        torch.cuda.synchronize()
        wall_ms = 1e3 * (time.perf_counter() - began_at) / num_steps
    training_step.vocabulary_loss = inner
    kinds: dict[str, float] = dict.fromkeys([*KERNELS, "other"], 0.0)
    names: dict[str, float] = {}
    in_vocabulary = 0.0
    for event in profiler.key_averages():
        if event.key == "vocabulary" and event.device_type == torch.autograd.DeviceType.CPU:
            in_vocabulary = event.device_time_total / 1e3 / num_steps
        if event.device_type != torch.autograd.DeviceType.CUDA or event.key == "vocabulary":
            continue
        milliseconds = event.self_device_time_total / 1e3 / num_steps
        kind = next((kind for kind, pattern in KERNELS.items() if re.search(pattern, event.key, re.I)), "other")
        kinds[kind] += milliseconds
        names[event.key] = milliseconds
    for name, milliseconds in sorted(names.items(), key=lambda item: -item[1])[:14]:
        print(f"  {milliseconds:8.3f} ms  {name[:110]}", file=sys.stderr)
    kinds["idle (launch gaps)"] = wall_ms - sum(kinds.values())
    kinds["of all: loss over the vocabulary, gradients included"] = in_vocabulary
    kinds["whole step under the profiler"] = wall_ms
    return kinds


def wait(arguments: argparse.Namespace) -> None:
    if arguments.device == "cuda":
        torch.cuda.synchronize()


def show(arguments: argparse.Namespace, results: dict[str, dict]) -> None:
    config = configured(arguments).training
    tokens, a_pass = config.batch_size * config.sequence_length, config.rows(0, 1)[0]
    print(
        f"- {arguments.config}, {arguments.variant}, {config.batch_size} x {config.sequence_length} tokens a step, "
        f"{a_pass.stop} sequences a pass, bfloat16 autocast, {config.optimiser}; {arguments.warmup} steps of warm-up, "
        f"then {arguments.rounds} rounds of {arguments.steps}; MFU of {arguments.peak / 1e12:.0f} TFLOP/s\n"
    )
    print("| | ms a step, median [min, max] | tokens/s | MFU | start-up to first step, s | peak GiB |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, result in results.items():
        median = statistics.median(result["seconds"])
        rate = tokens / median
        spread = f"{1e3 * median:.1f} [{1e3 * min(result['seconds']):.1f}, {1e3 * max(result['seconds']):.1f}]"
        memory = "" if result["peak_gib"] is None else f"{result['peak_gib']:.1f}"
        mfu = rate * result["flops_per_token"] / arguments.peak
        print(f"| {name} | {spread} | {rate:,.0f} | {mfu:.1%} | {result['startup_s']:.1f} | {memory} |")
    if {"sinkscope", "launched"} <= results.keys():
        pairs = zip(results["sinkscope"]["losses"], results["launched"]["losses"], strict=True)
        difference = max(abs(a - b) for a, b in pairs)
        verdict = "PASS" if difference <= LARGEST_LOSS_DIFFERENCE else "FAIL"
        print(f"\n- {verdict}: losses of recorded and launched updates differ by at most {difference:.4f}")
    if "sinkscope" in results:
        own, result = resolve(arguments.config, data=[], training={}).training, results["sinkscope"]
        rate = tokens / statistics.median(result["seconds"])
        between_s = own.probe_every * own.batch_size * own.sequence_length / rate
        share = result["probe_s"] / (result["probe_s"] + between_s)
        verdict = "PASS" if share < LARGEST_PROBE_SHARE else "FAIL"
        takes = f"a probe takes {result['probe_s']:.2f} s, {share:.2%} of training"
        print(f"- {verdict}: {takes} at the configuration's interval")
    for name, result in results.items():
        if "profile" in result:
            print(f"\n| {name}: where a step goes | ms |\n| --- | ---: |")
            for kind, milliseconds in result["profile"].items():
                print(f"| {kind} | {milliseconds:.1f} |")


if __name__ == "__main__":
    main()
