"""Which positions stand out: by the DomRatio of their residual and by the attention that they have received so far.

Axes: B sequences, H heads, T positions, N = B * T tokens, S keys read, Q positions that one signal points at, F first
positions, P = 3 Q + F candidates.
On CUDA each function is one launch for a single sequence: the half dozen small operations that it stands for cost more
than they compute. Its few programs would take long over many sequences, whose operations are worth their launches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sinkscope.kernels.launch import HAS_TRITON, launch

if TYPE_CHECKING or HAS_TRITON:
    import triton
    import triton.language as tl

NUM_POINTED_AT = 8
"""Q: positions that each signal points at in each layer, to be kept in full."""
NUM_FIRST = 4
"""F: first positions, kept in full in every layer: where nothing stands out, they are what a reader looks for."""


def add_received(so_far_T: Tensor, received_BHS: Tensor, weight_S: Tensor, keys_S: Tensor) -> None:
    """Adds, in place, what each key read received from all heads and sequences, times its weight."""
    if _has_kernel(received_BHS) and received_BHS.shape[0] == 1:
        triton_add_received(so_far_T, received_BHS, weight_S, keys_S)
    else:
        so_far_T.index_add_(0, keys_S, received_BHS.sum((0, 1)) * weight_S)


def candidates(
    largest_N: Tensor, mean_abs_N: Tensor, length: int, received_T: Tensor | None, before_P: Tensor | None
) -> Tensor:
    """[P] what DomRatio and attention received point at, what DomRatio pointed at a layer before, the first positions.

    Where nothing was received yet, or no layer stands before, DomRatio speaks for both.
    """
    if _has_kernel(largest_N) and largest_N.shape[0] == length:
        return triton_candidates(largest_N, mean_abs_N, received_T, before_P)
    ratio_T = (largest_N / mean_abs_N).view(-1, length).sum(0)
    return joined_candidates(point_at(ratio_T, ratio_T if received_T is None else received_T), before_P)


def point_at(dom_ratio_T: Tensor, received_T: Tensor) -> Tensor:
    """[2, Q] the positions of the largest values of each."""
    return torch.stack([dom_ratio_T, received_T]).topk(NUM_POINTED_AT, dim=1).indices


def joined_candidates(pointed_at_2Q: Tensor, before_P: Tensor | None) -> Tensor:
    """[P] candidates of one layer from what is pointed at there, and from the candidates a layer before."""
    before_Q = pointed_at_2Q[0] if before_P is None else before_P[:NUM_POINTED_AT]
    return torch.cat([pointed_at_2Q.flatten(), before_Q, torch.arange(NUM_FIRST, device=pointed_at_2Q.device)])


def _has_kernel(values: Tensor) -> bool:
    return values.is_cuda and HAS_TRITON and values.dtype == torch.float32


def triton_add_received(so_far_T: Tensor, received_BHS: Tensor, weight_S: Tensor, keys_S: Tensor) -> None:
    """The sum in the order of sequences and heads, so the same in every run."""
    batch, num_heads, num_keys = received_BHS.shape
    launch(
        _add_received_kernel,
        (-(-num_keys // 128), 1, 1),
        (so_far_T, received_BHS.contiguous(), weight_S, keys_S),
        (batch * num_heads, num_keys),
        (128,),
        num_warps=4,
    )


def triton_candidates(
    largest_T: Tensor, mean_abs_T: Tensor, received_T: Tensor | None, before_P: Tensor | None
) -> Tensor:
    """Of equal values the first position is taken, and nan counts as the largest value."""
    candidates_P = largest_T.new_empty(3 * NUM_POINTED_AT + NUM_FIRST, dtype=torch.int64)
    launch(
        _candidates_kernel,
        (2, 1, 1),
        (
            largest_T.contiguous(),
            mean_abs_T.contiguous(),
            largest_T if received_T is None else received_T,
            candidates_P if before_P is None else before_P,
            candidates_P,
        ),
        (largest_T.shape[0],),
        (received_T is not None, before_P is not None, NUM_POINTED_AT, NUM_FIRST, 4096),
        num_warps=16,
    )
    return candidates_P


def _jit(function: Any) -> Any:
    """Compiles once for all lengths."""
    return triton.jit(do_not_specialize=["num_rows", "num_keys", "length"])(function) if HAS_TRITON else function


@_jit
def _add_received_kernel(so_far, received, weight, keys, num_rows, num_keys, BLOCK_S: tl.constexpr):
    s = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    exists = s < num_keys
    total = tl.zeros([BLOCK_S], tl.float32)
    for row in range(0, num_rows):
        total += tl.load(received + tl.cast(row, tl.int64) * num_keys + s, mask=exists, other=0.0)
    place = so_far + tl.load(keys + s, mask=exists, other=0)
    before = tl.load(place, mask=exists, other=0.0)
    tl.store(place, before + total * tl.load(weight + s, mask=exists, other=0.0), mask=exists)


@_jit
def _candidates_kernel(
    largest, mean_abs, received, before, candidates, length,
    RECEIVED: tl.constexpr, BEFORE: tl.constexpr, Q: tl.constexpr, F: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One program: the positions of one signal's Q largest values, the next one found by one more read of them all.

    The signal lies in the cache, and a program that kept its Q largest values on the way would do more work.
    """
    signal = tl.program_id(0)
    is_ratio = (signal == 0) | (not RECEIVED)
    last_value = float("inf")
    last_t = -1
    for number in range(Q):
        top = tl.full([BLOCK_T], float("-inf"), tl.float32)
        top_t = tl.full([BLOCK_T], 2147483647, tl.int32)
        for start in range(0, length, BLOCK_T):
            t = start + tl.arange(0, BLOCK_T)
            value = tl.load(received + t, mask=(t < length) & (is_ratio == 0), other=0.0)
            if is_ratio:
                value = tl.load(largest + t, mask=t < length, other=0.0) / tl.load(
                    mean_abs + t, mask=t < length, other=1.0
                )
            value = tl.where(value == value, value, float("inf"))
            still = (value < last_value) | ((value == last_value) & (t > last_t))
            better = still & (t < length) & (value > top)
            top = tl.where(better, value, top)
            top_t = tl.where(better, t, top_t)
        last_value = tl.max(top, 0)
        last_t = tl.min(tl.where(top == last_value, top_t, 2147483647), 0)
        tl.store(candidates + signal * Q + number, last_t.to(tl.int64))
        if signal == 0:
            again = tl.load(before + number) if BEFORE else last_t.to(tl.int64)
            tl.store(candidates + 2 * Q + number, again)
    if signal == 0:
        first = tl.arange(0, F)
        tl.store(candidates + 3 * Q + first, first.to(tl.int64))
