"""Checks and times head-wise RMSNorm on a CUDA device, alone and in a whole training step.

    python benchmarks/head_norm_speed.py              all three parts (about 90 s, most of it compiling)
    python benchmarks/head_norm_speed.py --parts kernel
    python benchmarks/head_norm_speed.py --dry-run    the same code at toy sizes on a CPU, in Triton's interpreter

gradients: against float64, in the setting in which torch 2.11 is wrong: bf16 autocast on the transposed output of
attention, laid out with heads first. A row without any norm tells whether the norm is to blame.
kernel: forward and backward at training shapes (others at the smallest of them), as gigabytes that must move
(forward: read x, write y; backward: read x and dy, write dx) a second, beside a plain copy of the same tensors. Each
call takes other tensors than the last, so that nothing is found in the cache; calls are captured in a CUDA graph, so
that no launch is timed.
step: forward, backward and AdamW of the 152m decoder at T = 1,024, compiled block by block, variants in turn.
Prints Markdown tables, and PASS or FAIL for each promise; exits with 1 when one fails.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "--parts", nargs="+", choices=["gradients", "kernel", "sweep", "step"], default=["gradients", "kernel", "step"]
)
parser.add_argument("--variants", nargs="+", default=["softmax", "head_norm"], help="of the training step")
parser.add_argument("--rounds", type=int, default=7)
parser.add_argument("--dry-run", action="store_true", help="toy sizes on a CPU")
arguments = parser.parse_args()
if arguments.dry_run:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton and the kernels are imported
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from sinkscope.kernels import head_rms_norm as kernel  # noqa: E402
from sinkscope.kernels.head_rms_norm import head_rms_norm, head_rms_norm_plain  # noqa: E402
from sinkscope.pretrain.decoder import Decoder  # noqa: E402
from sinkscope.pretrain.presets import decoder_config, preset  # noqa: E402
from sinkscope.pretrain.step import LanguageModelLoss, compile_blocks  # noqa: E402

DEVICE = torch.device("cpu" if arguments.dry_run else "cuda")
BACKEND = "aot_eager" if arguments.dry_run else "inductor"
EXCERPT_BYTES = 1 << 12 if arguments.dry_run else 1 << 30
"""Tensors that the calls of one measurement go through in turn: twenty times the level-2 cache of an H200."""
SHAPES = {  # B, T, H, D
    "152m": (32, 1024, 12, 64),
    "1b": (8, 2048, 32, 64),
    "7b": (4, 4096, 32, 128),
}
SMALL = (1, 5, 2, 16)
# tile elements, warps, programs of the backward pass for each multiprocessor, stages of its loop
SWEEP = [
    *((1024, 2, programs, 3) for programs in (4, 6, 8, 12, 16, 64)),
    *((2048, 4, programs, 3) for programs in (2, 4, 6, 32)),
    (1024, 2, 8, 4),
    (2048, 4, 4, 2),
    (4096, 8, 64, 1),
]
LARGEST_ERROR = 0.02
"""Of a gradient as a whole, relative: bf16 rounds to 2^-9, and independent errors of many entries average out."""
LEAST_BANDWIDTH, LARGEST_SLOWDOWN = 0.80, 1.03

Norm = Callable[[Tensor, Tensor], Tensor]


KERNEL: Norm = partial(head_rms_norm, path="triton")


def torch_rms_norm(x_BTHD: Tensor, weight_D: Tensor) -> Tensor:
    """torch's own, which has a fused kernel for a weight of the input's type only."""
    return functional.rms_norm(x_BTHD, weight_D.shape, weight_D.to(x_BTHD.dtype), 1e-6).flatten(-2)


def torch_rms_norm_of_module(x_BTHD: Tensor, weight_D: Tensor) -> Tensor:
    """As nn.RMSNorm calls it under autocast, with its weight in float32."""
    return functional.rms_norm(x_BTHD, weight_D.shape, weight_D, 1e-6).flatten(-2)


def without_norm(x_BTHD: Tensor, weight_D: Tensor) -> Tensor:
    return (x_BTHD * weight_D).flatten(-2)


def all_norms() -> dict[str, Norm]:
    norms: dict[str, Norm] = {
        "kernel": KERNEL,
        "path torch": partial(head_rms_norm, path="torch"),
        "plain torch, eager": head_rms_norm_plain,
        "plain torch, compiled": torch.compile(head_rms_norm_plain, backend=BACKEND, dynamic=False),
        "torch rms_norm, eager": torch_rms_norm,
        "torch rms_norm, compiled": torch.compile(torch_rms_norm, backend=BACKEND, dynamic=False),
    }
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # pyright: ignore[reportMissingImports]
    except ImportError:
        print("- Liger is not installed here, so it is not compared")
    else:
        norms["Liger"] = lambda x, weight: LigerRMSNormFunction.apply(x.contiguous(), weight, 1e-6).flatten(-2)
    return norms


def check_gradients() -> list[tuple[str, bool]]:
    """Gradients of the projections before attention, through attention and the norm, in bf16 autocast."""
    num_batch, length, num_heads, size = (1, 9, 2, 16) if arguments.dry_run else (2, 256, 4, 64)
    width = num_heads * size
    torch.manual_seed(0)
    layers = [nn.Linear(width, rows, bias=False, device=DEVICE) for rows in (3 * width, width)]
    x = torch.randn(num_batch, length, width, device=DEVICE)
    target = torch.randn_like(x)
    weight = torch.linspace(0.5, 1.5, size, device=DEVICE)

    def gradients(norm: Norm, dtype: torch.dtype, autocast: bool, heads_first: bool = False) -> list[Tensor]:
        leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in (layers[0].weight, layers[1].weight, weight)]
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
            fused = functional.linear(x.to(dtype), leaves[0]).unflatten(-1, (3, num_heads, size))
            q, k, v = (part.transpose(1, 2) for part in fused.unbind(2))
            if heads_first:  # as after a rotation; attention's output then has this layout too
                q, k, v = (part.contiguous() for part in (q, k, v))
            o_BTHD = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
            y = functional.linear(norm(o_BTHD, leaves[2]), leaves[1])
        return list(torch.autograd.grad((y.to(dtype) * target.to(dtype)).sum(), leaves))

    right = gradients(head_rms_norm_plain, torch.float64, False)
    print(
        "\n| norm in bf16 autocast behind attention | layout | error: input projection | output projection | lambda |"
    )
    print("| --- | --- | ---: | ---: | ---: |")
    promises = []
    others = {"nn.RMSNorm, eager": torch_rms_norm_of_module, "no norm": without_norm}
    for name, norm in (all_norms() | others).items():
        right = gradients(without_norm if name == "no norm" else head_rms_norm_plain, torch.float64, False)
        for heads_first in (False, True):
            found = gradients(norm, torch.float32, True, heads_first)
            errors = [((a - b).norm() / b.norm()).item() for a, b in zip(found, right, strict=True)]
            layout = "BHTD" if heads_first else "BTHD"
            print(f"| {name} | {layout} | " + " | ".join(f"{error:.4f}" for error in errors) + " |")
            if name == "kernel":
                text = f"largest error of a gradient, {layout}: {max(errors):.4f}, at most {LARGEST_ERROR}"
                promises.append((text, max(errors) <= LARGEST_ERROR))
    return promises


def seconds(calls: list[Callable[[], object]]) -> list[float]:
    """Seconds a call, one number a round."""
    for call in calls[:3]:
        call()
    if DEVICE.type == "cpu":
        return [time_once(calls) for _ in range(arguments.rounds)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # On the stream that everything runs on: a backward pass goes to the stream of its forward pass.
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for call in calls:
            call()
    graph.replay()
    found = []
    for _ in range(arguments.rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / 1e3 / len(calls))
    return found


def time_once(calls: list[Callable[[], object]]) -> float:
    started_at = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - started_at) / len(calls)


def time_kernel() -> list[tuple[str, bool]]:
    promises = []
    print("\n| shape | layout | | forward us | GB/s | of copy | backward us | GB/s | of copy |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for shape_name, shape in SHAPES.items():
        for layout in ("BTHD", "BHTD"):
            torch._dynamo.reset()  # one function compiled for many shapes would pass the limit of recompilations
            tensors = Tensors(SMALL if arguments.dry_run else shape, layout)
            copy = tensors.copy_rate()
            print(f"| {shape_name} {list(shape)} | {layout} | copy | | {copy / 1e9:.0f} | 1.00 | | | |")
            norms = all_norms() if shape_name == "152m" else {"kernel": KERNEL}
            for name, norm in norms.items():
                cells = []
                for what, (times, rate) in tensors.rates(norm).items():
                    cells.append(f"{times * 1e6:.1f} | {rate / 1e9:.0f} | {rate / copy:.2f}")
                    if name == "kernel":
                        text = f"{what} {shape_name} {layout}: {rate / copy:.2f} of copy bandwidth"
                        promises.append((f"{text}, at least {LEAST_BANDWIDTH}", rate >= LEAST_BANDWIDTH * copy))
                print(f"| | | {name} | {' | '.join(cells)} |", flush=True)
    return promises


def sweep() -> list[tuple[str, bool]]:
    """Constants of the kernel, the best first; the parts after it run with those."""
    rates: dict[tuple[int, ...], list[float]] = {constants: [] for constants in SWEEP}
    for shape_name in ("152m", "7b"):
        tensors = Tensors(SMALL if arguments.dry_run else SHAPES[shape_name], "BTHD")
        copy = tensors.copy_rate()
        for constants, found in rates.items():
            set_constants(constants)
            found += [rate / copy for _, rate in tensors.rates(KERNEL).values()]
    ranking = sorted(rates, key=lambda constants: math.prod(rates[constants]), reverse=True)
    print("\n| tile elements, warps, programs, stages | forward 152m | backward 152m | forward 7b | backward 7b |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for constants in ranking:
        print(f"| {constants} | " + " | ".join(f"{rate:.2f}" for rate in rates[constants]) + " |", flush=True)
    set_constants(ranking[0])
    return []


def set_constants(constants: tuple[int, ...]) -> None:
    kernel.TILE_ELEMENTS, kernel.NUM_WARPS, kernel.PROGRAMS_PER_PROCESSOR, kernel.NUM_STAGES = constants


class Tensors:
    """Inputs and gradients of many calls, in turn, so that none finds the last one's in the cache."""

    def __init__(self, shape: tuple[int, ...], layout: str) -> None:
        self.num_bytes = 2 * math.prod(shape)
        indices = range(max(2, EXCERPT_BYTES // self.num_bytes))
        self.x = [heads(shape, layout).requires_grad_() for _ in indices]
        self.dy = [torch.randn(*shape[:2], shape[2] * shape[3], device=DEVICE, dtype=torch.bfloat16) for _ in indices]
        self.weight = torch.full(shape[3:], 0.25, device=DEVICE, requires_grad=True)

    def copy_rate(self) -> float:
        """Bytes a second that a copy reads and writes."""
        targets = [torch.empty_like(dy) for dy in self.dy]
        calls = [partial(target.copy_, dy) for target, dy in zip(targets, self.dy, strict=True)]
        return 2 * self.num_bytes / min(seconds(calls))

    def rates(self, norm: Norm) -> dict[str, tuple[float, float]]:
        """(seconds a call, bytes a second that must move) of the forward and the backward pass, medians."""
        forward = statistics.median(seconds([partial(norm, x, self.weight) for x in self.x]))
        calls = [
            partial(torch.autograd.grad, norm(x, self.weight), [x, self.weight], dy, retain_graph=True)
            for x, dy in zip(self.x, self.dy, strict=True)
        ]
        backward = statistics.median(seconds(calls))
        return {
            "forward": (forward, 2 * self.num_bytes / forward),
            "backward": (backward, 3 * self.num_bytes / backward),
        }


def heads(shape: tuple[int, ...], layout: str) -> Tensor:
    """[B, T, H, D] random heads as fused attention leaves them (BTHD) or as a product of matrices does (BHTD)."""
    x_BTHD = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
    return x_BTHD if layout == "BTHD" else x_BTHD.transpose(1, 2).contiguous().transpose(1, 2)


def time_step() -> list[tuple[str, bool]]:
    num_batch, length = (2, 16) if arguments.dry_run else (32, 1024)
    shape = preset("tiny" if arguments.dry_run else "152m")
    steps: dict[str, Callable[[], None]] = {}
    for variant in arguments.variants:
        steps[variant] = training_step(shape | {"attention_variant": variant}, num_batch, length)
    times: dict[str, list[float]] = {variant: [] for variant in steps}
    for variant, step in steps.items():
        started_at = time.perf_counter()
        step()
        wait()
        print(f"- {variant}: first step after {time.perf_counter() - started_at:.1f} s", flush=True)
        step()
    for _ in range(arguments.rounds):
        for variant, step in steps.items():
            wait()
            times[variant].append(time_once([step] * 12 + [wait]) * 13 / 12)
    print(f"\n| variant | ms a step of {num_batch} x {length} tokens | tokens/s | x softmax, median over rounds |")
    print("| --- | ---: | ---: | ---: |")
    ratios = {}
    for variant, found in times.items():
        base = times[arguments.variants[0]]
        paired = [a / b for a, b in zip(found, base, strict=True)]
        ratios[variant] = statistics.median(paired)
        tokens = num_batch * length / statistics.median(found)
        spread = f"{ratios[variant]:.3f} [{min(paired):.3f}, {max(paired):.3f}]"
        print(f"| {variant} | {statistics.median(found) * 1e3:.2f} | {tokens:,.0f} | {spread} |")
    if "head_norm" not in ratios:
        return []
    text = f"a training step with head_norm: {ratios['head_norm']:.3f} of softmax, at most {LARGEST_SLOWDOWN}"
    return [(text, ratios["head_norm"] <= LARGEST_SLOWDOWN)]


def training_step(fields: dict, num_batch: int, length: int) -> Callable[[], None]:
    model = Decoder(decoder_config(fields)).to(DEVICE).train()
    if not arguments.dry_run:
        compile_blocks(model)
    loss_of = LanguageModelLoss(model)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, model.config.vocab_size, (num_batch, length + 1), device=DEVICE)

    def step() -> None:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
            loss_of(tokens[:, :-1], tokens[:, 1:]).backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    return step


def wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU, dry run"
    print(f"- {name}, torch {torch.__version__}, bfloat16, {arguments.rounds} rounds")
    if DEVICE.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # graphs cannot be captured on the default one
    parts = {"gradients": check_gradients, "kernel": time_kernel, "sweep": sweep, "step": time_step}
    promises = [promise for part in arguments.parts for promise in parts[part]()]
    print()
    for text, kept in promises:
        print(f"- {'PASS' if kept else 'FAIL'}: {text}")
    sys.exit(not (all(kept for _, kept in promises) or arguments.dry_run))


if __name__ == "__main__":
    main()
