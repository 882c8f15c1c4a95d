"""Head-wise RMSNorm of the value aggregation: a Triton kernel, forward and backward, as a torch operator.

Per token and head, over the D channels of the head, with r = 1 / sqrt(mean x^2 + eps) and n = x r:

    y = n * weight + offset
    dx = r (g - n * mean(g n)), g = dy * weight        dweight = sum dy n        doffset = sum dy

The input is read in the layout that attention left it in, whatever its strides, and the output is written as the
output projection reads it, with the heads of a token side by side. The backward pass reads x and dy once each: what it
needs of the forward pass it computes again from the row it holds.
Axes: B batch, T position, H heads, D head size, P programs that sum the gradient of the weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from sinkscope.errors import InputError
from sinkscope.kernels.jit import HAS_TRITON, is_interpreted, jit

if TYPE_CHECKING or HAS_TRITON:
    import triton.language as tl

EPS = 1e-6
TILE_ELEMENTS = 2048
"""Of one program: 16 values in each of the threads of its warps."""
NUM_WARPS = 4
NUM_STAGES = 3
"""Of the loop of the backward pass: tiles that are on their way while one is worked on."""
LARGEST_HEAD = 1024
PROGRAMS_PER_PROCESSOR = 4
"""Of the backward pass, whose programs each leave one partial sum of the weight's gradient."""

Path = Literal["auto", "triton", "torch"]


def head_rms_norm(
    x_BTHD: Tensor, weight: Tensor, offset: Tensor | None = None, *, eps: float = EPS, path: Path = "auto"
) -> Tensor:
    """[B, T, H * D] the normalised heads side by side, in the type of the input.

    `weight` and `offset` are [D], shared by the heads, or [H, D].
    """
    shapes = (x_BTHD.shape[-1:], x_BTHD.shape[-2:])
    if x_BTHD.dim() != 4 or weight.shape not in shapes or (offset is not None and offset.shape != weight.shape):
        offset_shape = None if offset is None else list(offset.shape)
        raise InputError(
            "The input must be heads [B, T, H, D], and weight and offset of one shape, [D] or [H, D]. "
            f"Theirs are {list(x_BTHD.shape)}, {list(weight.shape)} and {offset_shape}. "
            "Split the last axis into heads with .unflatten(-1, (num_heads, head_size))."
        )
    if head_rms_norm_path(x_BTHD, path) == "torch":
        return head_rms_norm_plain(_GradientInLayout.apply(x_BTHD), weight, offset, eps=eps)
    return _operator(x_BTHD, weight, offset, eps)


def head_rms_norm_path(x_BTHD: Tensor, path: Path = "auto") -> Literal["triton", "torch"]:
    """Which path runs: with "auto" the kernel for CUDA tensors of at most 32 bits, torch for the rest."""
    fits = HAS_TRITON and x_BTHD.is_floating_point() and x_BTHD.element_size() <= 4 and x_BTHD.shape[-1] <= LARGEST_HEAD
    if path == "auto":
        return "triton" if fits and x_BTHD.is_cuda else "torch"
    if path == "triton" and not (fits and (x_BTHD.is_cuda or INTERPRETED)):
        raise InputError(
            f"The kernel needs Triton, and heads of at most 32 bits and {LARGEST_HEAD} channels on a CUDA device. "
            f"Triton is {'present' if HAS_TRITON else 'missing'}, and the heads are {x_BTHD.dtype} "
            f'{list(x_BTHD.shape)} on {x_BTHD.device.type}. Pass path="torch".'
        )
    return path


def head_rms_norm_plain(x_BTHD: Tensor, weight: Tensor, offset: Tensor | None = None, *, eps: float = EPS) -> Tensor:
    """The definition, in float32, or in float64 for float64 input."""
    wide_BTHD = x_BTHD.to(torch.promote_types(x_BTHD.dtype, torch.float32))
    y_BTHD = wide_BTHD * torch.rsqrt(wide_BTHD.square().mean(-1, keepdim=True) + eps) * weight
    return (y_BTHD if offset is None else y_BTHD + offset).to(x_BTHD.dtype).flatten(-2)


class _GradientInLayout(torch.autograd.Function):
    """Passes x on, and its gradient back in the layout of x, as the kernel does.

    On CUDA (torch 2.11, bf16) attention's input was seen to get a wrong gradient where its output lay as [B, H, T, D]
    in memory and the norm passed back a gradient that lay as [B, T, H, D]; the kernel, which keeps the layout, did not.
    """

    @staticmethod
    def forward(ctx: Any, x_BTHD: Tensor) -> Tensor:
        ctx.stride = x_BTHD.stride()
        return x_BTHD.view_as(x_BTHD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (dx_BTHD,) = gradients
        if dx_BTHD.stride() == ctx.stride or 0 in ctx.stride:
            return dx_BTHD
        order = sorted(range(4), key=lambda axis: ctx.stride[axis], reverse=True)
        return dx_BTHD.permute(order).contiguous().permute([order.index(axis) for axis in range(4)])


@torch.library.custom_op("sinkscope::head_rms_norm", mutates_args=())
def _operator(x_BTHD: Tensor, weight: Tensor, offset: Tensor | None, eps: float) -> Tensor:
    x_BTHD = _channels_adjacent(x_BTHD)
    num_batch, length, num_heads, head_size = x_BTHD.shape
    y_BTC = x_BTHD.new_empty(num_batch, length, num_heads * head_size)
    blocks = _blocks(head_size)
    if x_BTHD.numel() > 0:
        with torch.cuda.device_of(x_BTHD):
            _forward_kernel[(num_heads, -(-num_batch * length // blocks["BLOCK_N"]))](
                x_BTHD, weight.contiguous(), weight if offset is None else offset.contiguous(), y_BTC,
                *x_BTHD.stride()[:3], length, num_batch * length, eps,
                D=head_size, PER_HEAD=weight.dim() == 2, OFFSET=offset is not None, **blocks, num_warps=NUM_WARPS,
            )  # fmt: skip
    return y_BTC


@_operator.register_fake
def _(x_BTHD: Tensor, weight: Tensor, offset: Tensor | None, eps: float) -> Tensor:
    return x_BTHD.new_empty(*x_BTHD.shape[:2], x_BTHD.shape[2] * x_BTHD.shape[3])


@torch.library.custom_op("sinkscope::head_rms_norm_backward", mutates_args=())
def _backward_operator(
    dy_BTC: Tensor, x_BTHD: Tensor, weight: Tensor, with_offset: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx in the layout of x, dweight, doffset or nothing); sums over tokens take two stages, always in one order."""
    dx_BTHD = torch.empty_like(x_BTHD)
    x_BTHD, out_BTHD = _channels_adjacent(x_BTHD), _channels_adjacent(dx_BTHD)
    num_batch, length, num_heads, head_size = x_BTHD.shape
    blocks = _blocks(head_size)
    num_tiles = -(-num_batch * length // blocks["BLOCK_N"])
    # Rounded up: a few programs more than the device holds at a time would take as long as a second round of all.
    tiles_each = max(1, -(-num_tiles * num_heads // (PROGRAMS_PER_PROCESSOR * _num_processors(x_BTHD.device))))
    num_programs = -(-num_tiles // tiles_each)
    # Programs last: torch adds up adjacent numbers in half the time of those a row apart.
    sums_SDHP = x_BTHD.new_empty(1 + with_offset, head_size, num_heads, num_programs, dtype=torch.float32)
    if x_BTHD.numel() > 0:
        with torch.cuda.device_of(x_BTHD):
            _backward_kernel[(num_heads, num_programs)](
                dy_BTC.contiguous(), x_BTHD, weight.contiguous(), out_BTHD, sums_SDHP,
                *x_BTHD.stride()[:3], *out_BTHD.stride()[:3], length, num_batch * length, tiles_each, eps,
                D=head_size, PER_HEAD=weight.dim() == 2, OFFSET=with_offset, **blocks,
                STAGES=NUM_STAGES, num_warps=NUM_WARPS,
            )  # fmt: skip
    if out_BTHD.data_ptr() != dx_BTHD.data_ptr():
        dx_BTHD.copy_(out_BTHD)
    totals = [(part.sum(2).T if weight.dim() == 2 else part.flatten(1).sum(1)).to(weight) for part in sums_SDHP]
    return dx_BTHD, totals[0].contiguous(), totals[1].contiguous() if with_offset else weight.new_empty(0)


@_backward_operator.register_fake
def _(dy_BTC: Tensor, x_BTHD: Tensor, weight: Tensor, with_offset: bool, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    doffset = weight.new_empty(weight.shape if with_offset else 0)
    return torch.empty_like(x_BTHD), weight.new_empty(weight.shape), doffset


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_BTHD, weight, offset, ctx.eps = inputs
    ctx.with_offset = offset is not None
    ctx.save_for_backward(x_BTHD, weight)


def _backward(ctx: Any, dy_BTC: Tensor) -> tuple[Tensor | None, ...]:
    dx_BTHD, dweight, doffset = _backward_operator(dy_BTC, *ctx.saved_tensors, ctx.with_offset, ctx.eps)
    return dx_BTHD, dweight, doffset if ctx.with_offset else None, None


_operator.register_autograd(_backward, setup_context=_keep_for_backward)


def _channels_adjacent(x_BTHD: Tensor) -> Tensor:
    return x_BTHD if x_BTHD.stride(3) == 1 else x_BTHD.contiguous()


def _blocks(head_size: int) -> dict[str, int]:
    block_d = max(16, 1 << (head_size - 1).bit_length())
    return {"BLOCK_N": max(1, TILE_ELEMENTS // block_d), "BLOCK_D": block_d}


def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


_once_for_all_lengths = jit("length", "num_tokens", "tiles_each")


@_once_for_all_lengths
def _forward_kernel(
    x, weight, offset, y, stride_b, stride_t, stride_h, length, num_tokens, eps,
    D: tl.constexpr, PER_HEAD: tl.constexpr, OFFSET: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N tokens of one head. Programs that run together hold the heads of the same tokens."""
    head, num_heads = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    inside = (n < num_tokens)[:, None] & (d < D)[None, :]
    rows = (n // length).to(tl.int64) * stride_b + (n % length).to(tl.int64) * stride_t + head * stride_h
    x_ND = tl.load(x + rows[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
    # Pinned to float32: a Python number may arrive as float64, which would take the whole row with it.
    scale_N = tl.rsqrt(tl.sum(x_ND * x_ND, 1) * tl.cast(1.0 / D, tl.float32) + tl.cast(eps, tl.float32))
    of_head = head * D if PER_HEAD else 0
    y_ND = x_ND * scale_N[:, None] * tl.load(weight + of_head + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    if OFFSET:
        y_ND += tl.load(offset + of_head + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    out = (n.to(tl.int64) * num_heads + head) * D
    tl.store(y + out[:, None] + d[None, :], y_ND.to(y.dtype.element_ty), mask=inside)


@_once_for_all_lengths
def _backward_kernel(
    dy, x, weight, dx, sums, stride_b, stride_t, stride_h, out_stride_b, out_stride_t, out_stride_h,
    length, num_tokens, tiles_each, eps,
    D: tl.constexpr, PER_HEAD: tl.constexpr, OFFSET: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One program: tiles_each tiles of BLOCK_N tokens of one head, and its partial sums of dy n and dy."""
    head, num_heads = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    first = tl.program_id(1) * tiles_each * BLOCK_N
    d = tl.arange(0, BLOCK_D)
    weight_D = tl.load(weight + (head * D if PER_HEAD else 0) + d, mask=d < D, other=0.0).to(tl.float32)
    # Summed over the tile's tokens only at the end: a sum across warps in every round would cost more than the rest.
    dweight_ND = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    doffset_ND = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    inverse_size = tl.cast(1.0 / D, tl.float32)
    stop = tl.minimum(first + tiles_each * BLOCK_N, num_tokens)
    for start in tl.range(first, stop, BLOCK_N, num_stages=STAGES):
        n = start + tl.arange(0, BLOCK_N)
        inside = (n < num_tokens)[:, None] & (d < D)[None, :]
        b, t = (n // length).to(tl.int64), (n % length).to(tl.int64)
        rows = b * stride_b + t * stride_t + head * stride_h
        x_ND = tl.load(x + rows[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
        given = (n.to(tl.int64) * num_heads + head) * D
        dy_ND = tl.load(dy + given[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
        scale_N = tl.rsqrt(tl.sum(x_ND * x_ND, 1) * inverse_size + tl.cast(eps, tl.float32))
        normed_ND = x_ND * scale_N[:, None]
        dweight_ND += dy_ND * normed_ND
        if OFFSET:
            doffset_ND += dy_ND
        g_ND = dy_ND * weight_D[None, :]
        along_N = tl.sum(g_ND * normed_ND, 1) * inverse_size
        dx_ND = (g_ND - normed_ND * along_N[:, None]) * scale_N[:, None]
        out = b * out_stride_b + t * out_stride_t + head * out_stride_h
        tl.store(dx + out[:, None] + d[None, :], dx_ND.to(dx.dtype.element_ty), mask=inside)
    place = (d * num_heads + head) * tl.num_programs(1) + tl.program_id(1)
    tl.store(sums + place, tl.sum(dweight_ND, 0), mask=d < D)
    if OFFSET:
        tl.store(sums + num_heads * D * tl.num_programs(1) + place, tl.sum(doffset_ND, 0), mask=d < D)


INTERPRETED = is_interpreted(_forward_kernel)
"""Whether Triton runs kernels on the CPU (TRITON_INTERPRET=1 at import)."""
