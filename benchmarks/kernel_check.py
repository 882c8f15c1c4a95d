"""Checks the kernels on a CUDA device against their float64 definitions, then times them.

    python benchmarks/kernel_check.py                 correctness, then timings (about a minute, most of it compiling)
    python benchmarks/kernel_check.py --sweep         block sizes of attention_received at T = 32,768, fastest first
    python benchmarks/kernel_check.py --dry-run       the same code at toy sizes in Triton's interpreter, no GPU

Prints one row per check with its largest error, and exits with 1 when a check fails. The Llama-3.2-1B shape is 32 query
and 8 key-value heads of size 64, batch 1, bfloat16. Timed are `all keys`, what every key receives together with the
entropy and mixing of every row, which one kernel makes at once; `weighted`, the same with key weights; and `two keys`,
what two chosen keys receive and nothing of the rows.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--sweep", action="store_true", help="only time configurations of attention_received")
parser.add_argument("--weighted", action="store_true", help="in the sweep, with key weights")
parser.add_argument("--head-size", type=int, default=64, help="in the sweep")
parser.add_argument("--dry-run", action="store_true", help="toy sizes in Triton's interpreter")
arguments = parser.parse_args()
if arguments.dry_run:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton and the kernels are imported
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch  # noqa: E402
import triton  # noqa: E402
from torch import Tensor  # noqa: E402

from sinkscope.kernels.attention_received import (  # noqa: E402
    Blocks,
    attention_received,
    attention_received_plain,
    received_by_keys,
)
from sinkscope.kernels.token_statistics import _by_kernel  # noqa: E402
from sinkscope.measures.dimension_disparity import kurtosis, participation_ratio  # noqa: E402

DEVICE = torch.device("cpu" if arguments.dry_run else "cuda")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
EXPONENTIALS_PER_SECOND = 16 * 132 * 1.71e9  # 16 a clock on each of an H200's multiprocessors
TOLERANCE = 3e-5  # float32 scores of about 8 from 22-bit products are good to 4e-6; see tests/kernels for the reasons
STATISTICS_TOLERANCE = 1e-4  # relative; the promise for the kurtosis is 1e-3

# length, query heads, key-value heads, head size, dtype, window, learned sink, transposed
ATTENTION_CASES = [
    (1, 4, 2, 64, "bf16", None, False, False),
    (17, 4, 2, 64, "bf16", None, False, True),
    (67, 6, 2, 64, "bf16", None, True, False),
    (130, 4, 1, 64, "bf16", None, False, False),
    (1000, 4, 2, 64, "bf16", None, False, True),
    (1000, 4, 2, 64, "bf16", 50, False, False),
    (1000, 4, 2, 64, "bf16", 333, True, False),
    (1000, 4, 4, 64, "bf16", None, False, False),
    (700, 2, 2, 64, "fp32", 200, False, False),
    (300, 2, 1, 16, "fp16", None, False, False),
    (300, 2, 1, 96, "bf16", None, False, False),
    (300, 2, 1, 128, "fp32", None, True, False),
    (300, 2, 1, 192, "bf16", 100, False, False),
]
# block_t, block_s, num_warps, num_stages, max_registers
SWEEP = [
    *((64, 128, 4, num_stages, 128) for num_stages in (2, 3, 4)),
    *((64, 128, 4, 3, registers) for registers in (112, 144, 168, None)),
    *((128, 128, 8, num_stages, 128) for num_stages in (2, 3)),
    (128, 128, 8, 3, 168),
    (128, 128, 4, 3, None),
    (64, 256, 8, 3, 128),
    (128, 256, 8, 2, None),
    (64, 64, 4, 3, 96),
]
# tokens, channels, dtype, weighted
STATISTICS_CASES = [
    (1, 17, "fp32", False),
    (67, 576, "bf16", True),
    (130, 1536, "fp32", False),
    (300, 2048, "bf16", False),
    (33, 16384, "bf16", True),
]


def attention_inputs(length, num_heads, num_key_heads, head_size, dtype, window, sink, transposed):
    """q, k, the float32 log-sum-exp and the options of one case, the log-sum-exp by softmax in float64."""
    generator = torch.Generator(DEVICE).manual_seed(length)
    shapes = ((2, length, heads, head_size) for heads in (num_heads, num_key_heads))
    query, key = (
        (1.5 * torch.randn(shape, generator=generator, device=DEVICE)).to(DTYPES[dtype]).transpose(1, 2)
        for shape in shapes
    )
    if not transposed:
        query, key = query.contiguous(), key.contiguous()
    score = query.double() @ key.double().repeat_interleave(num_heads // num_key_heads, dim=1).mT * head_size**-0.5
    position = torch.arange(length, device=DEVICE)
    distance = position[:, None] - position
    score = score.masked_fill((distance < 0) | (distance >= (window or length)), -math.inf)
    if sink:
        score = torch.cat([score, torch.ones_like(score[..., :1])], dim=-1)
    return (query, key, score.logsumexp(-1).float()), dict(scaling=head_size**-0.5, window=window)


def checks() -> Iterator[tuple[str, dict[str, float], float]]:
    """Name, relative error of each result and tolerance of every check."""
    for case in ATTENTION_CASES:
        if arguments.dry_run and (case[0] > 200 or case[3] > 64):
            continue
        qkl, options = attention_inputs(*case)
        length = case[0]
        weights = torch.rand(length, device=DEVICE).expand(2, case[1], length)
        plain = attention_received_plain(*qkl, key_weights_BHS=weights, **options)
        if case[3] != 64 or case[4] != "bf16":  # another kernel to compile for each head size and dtype
            weights = None
        errors = errors_of(attention_received(*qkl, key_weights_BHS=weights, **options), plain)
        positions = torch.tensor([0, length - 1, length // 2], device=DEVICE)
        chosen = received_by_keys(*qkl, positions, **options)
        errors["chosen_keys"] = relative_error(chosen, plain.received_sum[..., positions])
        yield "T{} H{} K{} D{} {} window={} sink={} strided={}".format(*case), errors, TOLERANCE
    for num_tokens, num_channels, dtype, weighted in STATISTICS_CASES:
        if arguments.dry_run and num_channels > 2000:
            continue
        x = torch.randn(num_tokens, num_channels, device=DEVICE)
        x[1::2, num_channels // 3] *= 1e4
        x = x.to(DTYPES[dtype])
        weight = torch.rand(num_channels, device=DEVICE) if weighted else None
        stats_SN, places_N, channel_C = _by_kernel(x, weight)
        exact = x.double()
        weighed = exact if weight is None else exact * weight.double()
        largest_N, channels = weighed.abs().amax(1), exact.square() if weighted else exact.abs()
        errors = {
            "largest": relative_error(stats_SN[0], largest_N),
            "places": relative_error(weighed.abs().gather(1, places_N[:, None])[:, 0], largest_N),
            "channels": relative_error(channel_C, channels.sum(0)),
        }
        if not weighted:
            defined = (exact.square().sum(1), exact.abs().mean(1), kurtosis(exact), participation_ratio(exact))
            names = ("energy", "mean_abs", "kurtosis", "participation_ratio")
            errors |= {n: relative_error(a, b) for n, a, b in zip(names, stats_SN[1:], defined, strict=True)}
        yield f"N{num_tokens} C{num_channels} {dtype} weighted={weighted}", errors, STATISTICS_TOLERANCE


def controls() -> Iterator[tuple[str, float]]:
    """Errors that must be large: what the checks would see if an option were ignored."""
    qkl, options = attention_inputs(130, 6, 2, 64, "bf16", 40, False, False)
    plain = attention_received_plain(*qkl, **options).received_sum
    everywhere = attention_received(*qkl, **{**options, "window": None}).received_sum
    yield "control: window dropped", relative_error(everywhere, plain)
    flipped = attention_received(qkl[0], qkl[1].flip(1), qkl[2], **options).received_sum
    yield "control: key-value heads exchanged", relative_error(flipped, plain)


def errors_of(found, expected) -> dict[str, float]:
    pairs = zip(found._fields, found, expected, strict=True)
    return {field: relative_error(a, b) for field, a, b in pairs if a is not None}


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest |difference| / (|expected| + 1/3): near zero, as for entropies, an absolute error of tolerance / 3."""
    error = (found.double() - expected.double()).abs() / (expected.double().abs() + 1 / 3)
    return error.max().item() if not error.isnan().any() else math.inf


def print_checks() -> bool:
    any_failed = False
    for name, errors, tolerance in checks():
        failed = max(errors.values()) > tolerance
        any_failed |= failed
        details = " ".join(f"{field} {error:.0e}" for field, error in errors.items())
        print(f"{'FAIL' if failed else 'PASS'}  {max(errors.values()):.1e} <= {tolerance:.0e}  {name}: {details}")
    for name, error in controls():
        any_failed |= error < 0.05
        print(f"{'PASS' if error >= 0.05 else 'FAIL'}  {error:.1e} >= 5e-02  {name}", flush=True)
    return any_failed


def median_ms(function: Callable[[], object]) -> float:
    if not arguments.dry_run:
        return triton.testing.do_bench(function, warmup=20, rep=300, return_mode="median")
    started_at = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - started_at)


def llama_inputs(length: int, head_size: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    heads = (2, 1) if arguments.dry_run else (32, 8)
    query, key = (torch.randn(1, n, length, head_size, device=DEVICE).to(torch.bfloat16) for n in heads)
    # Any log-sum-exp of the right size will do: no time depends on the values.
    return query, key, torch.full(query.shape[:3], math.log(length) + 0.5, device=DEVICE)


def print_timings() -> None:
    print("\nattention_received, Llama-3.2-1B shape, one layer; floor: the exponentials alone")
    for length in (130,) if arguments.dry_run else (4096, 16384, 65536, 131072):
        qkl = llama_inputs(length)
        options = dict(scaling=0.125)
        weights = torch.rand(length, device=DEVICE).expand(1, qkl[0].shape[1], length)
        floor = 1e3 * qkl[0].shape[1] * length * (length + 1) / 2 / EXPONENTIALS_PER_SECOND
        times = {
            "all keys": median_ms(lambda: attention_received(*qkl, **options)),  # noqa: B023
            "weighted": median_ms(lambda: attention_received(*qkl, key_weights_BHS=weights, **options)),  # noqa: B023
        }
        row = "  ".join(f"{name} {ms:9.3f} ms ({floor / ms:4.0%} of floor)" for name, ms in times.items())
        positions = torch.tensor([0, length // 2], device=DEVICE)
        ms = median_ms(lambda: received_by_keys(*qkl, positions, **options))  # noqa: B023
        speed = qkl[0].numel() * 2 / ms / 1e6
        print(f"T {length:7,}  floor {floor:7.3f} ms  {row}  two keys {ms:7.3f} ms ({speed:5.0f} GB/s)", flush=True)
    print("\ntoken_statistics, bfloat16")
    for num_tokens, num_channels, weighted in ((65536, 8192, True), (65536, 2048, False), (4096, 2048, False)):
        if arguments.dry_run:
            num_tokens, num_channels = 8, 96
        x = torch.randn(num_tokens, num_channels, dtype=torch.bfloat16, device=DEVICE)
        weight = torch.rand(num_channels, device=DEVICE) if weighted else None
        ms = median_ms(lambda: _by_kernel(x, weight))  # noqa: B023
        speed = x.numel() * 2 / ms / 1e6
        print(
            f"[{num_tokens:6,}, {num_channels:5,}] weighted={weighted!s:5}  {ms:7.3f} ms  {speed:5.0f} GB/s", flush=True
        )


def print_sweep() -> None:
    length = 130 if arguments.dry_run else 32768
    qkl = llama_inputs(length, arguments.head_size)
    weights = torch.rand(length, device=DEVICE).expand(qkl[0].shape[:3]) if arguments.weighted else None
    rows = []
    for blocks in itertools.starmap(Blocks, SWEEP):
        try:
            ms = median_ms(
                lambda: attention_received(*qkl, scaling=0.125, key_weights_BHS=weights, _blocks=blocks)  # noqa: B023
            )
        except triton.runtime.errors.OutOfResources as error:
            print(f"{blocks}: {error}")
            continue
        rows.append((ms, blocks))
    floor = 1e3 * qkl[0].shape[1] * length * (length + 1) / 2 / EXPONENTIALS_PER_SECOND
    for ms, blocks in sorted(rows):
        print(f"{ms:9.3f} ms ({floor / ms:4.0%} of floor)  {blocks}")


if __name__ == "__main__":
    device_name = "interpreter" if arguments.dry_run else torch.cuda.get_device_name()
    print(f"{device_name}, torch {torch.__version__}, triton {triton.__version__}")
    if arguments.sweep:
        print_sweep()
        sys.exit(0)
    any_failed = print_checks()
    print_timings()
    sys.exit(1 if any_failed else 0)
