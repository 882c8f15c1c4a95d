"""Attention received per key, and row entropy and mixing, from q, k and each query's log-sum-exp; never the square.

Axes: B batch, H query heads, K key-value heads, T query position, S key position, D head size, P chosen keys.
With a_ts = exp(score_ts - lse_t) and score = scaling * q.k:

    received_sum_s = sum over t of a_ts     entropy_t = sum over s of a_ts * (lse_t - score_ts)
    mixing_t = sum over s of a_ts^2         weighted_mixing_t = sum over s of a_ts^2 * weight_s

A query t sees the keys t - window < s <= t. A learned sink is already inside lse, so its rows sum to less than one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sinkscope.errors import InputError
from sinkscope.kernels.jit import HAS_TRITON, is_interpreted, jit

if TYPE_CHECKING or HAS_TRITON:
    import triton.language as tl

LOG2_E = math.log2(math.e)  # scores reach the kernels in base-2 units: exp2 is one instruction, exp is not
QUERIES_PER_STRIP = 512  # at T = 65,536 and 32 heads 4,096 programs read q: every multiprocessor has several at work


class AttentionReductions(NamedTuple):
    """What one pass over the attention map leaves, in float32."""

    received_sum: Tensor  # [B, H, S]
    entropy: Tensor  # [B, H, T], in nats
    mixing: Tensor  # [B, H, T]
    weighted_mixing: Tensor | None  # [B, H, T]; None without key weights


class Blocks(NamedTuple):
    """How one program works: block_t queries at a time against block_s keys (a multiple of block_t)."""

    block_t: int
    block_s: int
    num_warps: int
    num_stages: int
    max_registers: int | None


def attention_received(
    query_BHTD: Tensor,
    key_BKSD: Tensor,
    log_sum_exp_BHT: Tensor,
    *,
    scaling: float,
    window: int | None = None,
    key_weights_BHS: Tensor | None = None,
    _blocks: Blocks | None = None,
) -> AttentionReductions:
    """Column sums of causal self attention, and entropy and mixing of each query's row.

    Column sums are deterministic. Row results are summed over key blocks with float32 atomics, so their last bits
    differ between runs. Differentiates nothing: the results carry no gradient.
    """
    batch, num_heads, length, head_size = _check(query_BHTD, key_BKSD, log_sum_exp_BHT, window)
    if key_weights_BHS is not None and key_weights_BHS.shape != (batch, num_heads, length):
        raise InputError(
            f"Key weights must have the shape [{batch}, {num_heads}, {length}], not {list(key_weights_BHS.shape)}. "
            "Expand them to batch and heads, which is free."
        )
    received_BHS = query_BHTD.new_empty(batch, num_heads, length, dtype=torch.float32)
    num_rows = 2 if key_weights_BHS is None else 3
    rows_NBHT = query_BHTD.new_zeros(num_rows, batch, num_heads, length, dtype=torch.float32)
    weighted_BHT = None if key_weights_BHS is None else rows_NBHT[2]
    results = AttentionReductions(received_BHS, rows_NBHT[0], rows_NBHT[1], weighted_BHT)
    if received_BHS.numel() == 0:
        return results
    blocks = _blocks or _blocks_for(head_size, query_BHTD.element_size(), weighted=key_weights_BHS is not None)
    num_key_blocks = -(-length // blocks.block_s)
    # Where there is nothing to read or write, any pointer will do; zero strides keep it one compiled kernel.
    weights, weighted = (received_BHS if x is None else x for x in (key_weights_BHS, weighted_BHT))
    weight_strides = (0, 0, 0) if key_weights_BHS is None else key_weights_BHS.stride()
    with torch.cuda.device_of(query_BHTD):
        _received_kernel[(num_key_blocks * batch * num_heads,)](
            query_BHTD, key_BKSD, log_sum_exp_BHT.contiguous(), weights, *results[:3], weighted,
            *query_BHTD.stride()[:3], *key_BKSD.stride()[:3], *weight_strides, num_heads,
            num_heads // key_BKSD.shape[1], length, min(window or length, length), num_key_blocks,
            scaling * LOG2_E,
            head_size, _padded(head_size), blocks.block_t, blocks.block_s,
            key_weights_BHS is not None, is_interpreted(_received_kernel),
            num_warps=blocks.num_warps, num_stages=blocks.num_stages, maxnreg=blocks.max_registers,
        )  # fmt: skip
    return results


def received_by_keys(
    query_BHTD: Tensor,
    key_BKSD: Tensor,
    log_sum_exp_BHT: Tensor,
    positions_P: Tensor,
    *,
    scaling: float,
    window: int | None = None,
) -> Tensor:
    """Column sums [B, H, P] of the chosen keys alone: one read of q. A position outside [0, S) gives nan.

    Out-of-range positions are answered with nan because looking at them on the host would wait for the device.
    """
    batch, num_heads, length, head_size = _check(query_BHTD, key_BKSD, log_sum_exp_BHT, window)
    if positions_P.dtype != torch.int64 or positions_P.dim() != 1 or positions_P.device != query_BHTD.device:
        raise InputError(
            f"Positions must be a one-dimensional int64 tensor on {query_BHTD.device}, "
            f"not {positions_P.dtype} with {positions_P.dim()} dimensions on {positions_P.device}. "
            "Pass torch.tensor([...], device=query.device)."
        )
    num_keys = positions_P.numel()
    num_strips = -(-length // QUERIES_PER_STRIP)
    partial_BHPN = query_BHTD.new_empty(batch, num_heads, num_keys, num_strips, dtype=torch.float32)
    if partial_BHPN.numel() == 0:
        return partial_BHPN.sum(-1)
    # tl.dot wants at least 16 columns; the idle ones cost nothing because reading q is the bottleneck.
    block_p = min(64, _padded(num_keys))
    wide = query_BHTD.element_size() == 4 or head_size > 128
    with torch.cuda.device_of(query_BHTD):
        _by_keys_kernel[(num_strips * batch * num_heads, -(-num_keys // block_p))](
            query_BHTD, key_BKSD, log_sum_exp_BHT.contiguous(), positions_P.contiguous(), partial_BHPN,
            *query_BHTD.stride()[:3], *key_BKSD.stride()[:3], num_heads, num_heads // key_BKSD.shape[1], length,
            min(window or length, length), num_keys, num_strips, scaling * LOG2_E,
            head_size, _padded(head_size), 64 if wide else 128, block_p, QUERIES_PER_STRIP,
            is_interpreted(_by_keys_kernel),
            num_warps=4, num_stages=2 if wide else 3,
        )  # fmt: skip
    return partial_BHPN.sum(-1)


def attention_received_plain(
    query_BHTD: Tensor,
    key_BKSD: Tensor,
    log_sum_exp_BHT: Tensor,
    *,
    scaling: float,
    window: int | None = None,
    key_weights_BHS: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> AttentionReductions:
    """The definition, which the kernel is tested against: the same reductions from the whole square, in `dtype`."""
    key_BHSD = key_BKSD.to(dtype).repeat_interleave(query_BHTD.shape[1] // key_BKSD.shape[1], dim=1)
    score_BHTS = query_BHTD.to(dtype) @ key_BHSD.mT * scaling
    position = torch.arange(query_BHTD.shape[2], device=query_BHTD.device)
    distance_TS = position[:, None] - position
    visible_TS = (distance_TS >= 0) & (distance_TS < (len(position) if window is None else window))
    surprise_BHTS = log_sum_exp_BHT.to(dtype)[..., None] - score_BHTS
    a_BHTS = torch.exp(-surprise_BHTS).where(visible_TS, 0)
    weighted = None if key_weights_BHS is None else (a_BHTS.square() * key_weights_BHS.to(dtype)[:, :, None]).sum(-1)
    return AttentionReductions(a_BHTS.sum(2), (a_BHTS * surprise_BHTS).sum(-1), a_BHTS.square().sum(-1), weighted)


def reason_not_to_run(query: Tensor) -> str | None:
    """Why the kernels cannot run on this tensor, or None when they can."""
    if not HAS_TRITON:
        return "triton is not installed"
    if not query.is_cuda and not is_interpreted(_received_kernel):
        return f"the tensor is on {query.device}, and Triton was imported without TRITON_INTERPRET=1"
    if query.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"{query.dtype} has no kernel (float32, bfloat16 and float16 have)"
    return None


def _check(query: Tensor, key: Tensor, lse: Tensor, window: int | None) -> torch.Size:
    """The shape of the query, once it is checked that every property holds that the kernels rely on."""
    reason = reason_not_to_run(query)
    if reason is not None:
        raise InputError(f"The Triton kernels cannot read this tensor: {reason}. Use the tiled torch path.")
    grouped = query.dim() == key.dim() == 4 and key.shape[1] > 0 and query.shape[1] % key.shape[1] == 0
    if (
        not grouped
        or query.shape[2:] != key.shape[2:]
        or query.shape[0] != key.shape[0]
        or lse.shape != query.shape[:3]
    ):
        raise InputError(
            "The kernels read self attention: query [B, H, T, D], key [B, K, T, D] with K dividing H, "
            f"log-sum-exp [B, H, T]. Here are query {list(query.shape)}, key {list(key.shape)}, "
            f"log-sum-exp {list(lse.shape)}. Pass the whole sequence, without a cache and with keys not repeated."
        )
    if query.dtype != key.dtype or lse.dtype != torch.float32 or not query.device == key.device == lse.device:
        raise InputError(
            "Query and key must have one dtype, and the float32 log-sum-exp their device. Here they are "
            f"{query.dtype} on {query.device}, {key.dtype} on {key.device} and {lse.dtype} on {lse.device}. "
            "Convert them first."
        )
    # Within a tile the kernels count elements in 32 bits, and the widest tile has 128 rows.
    if query.stride(3) != 1 or key.stride(3) != 1 or query.stride(2) >= 2**24:
        raise InputError(
            "Query and key must be contiguous along D, and query rows less than 2^24 elements apart. "
            f"Their strides are {query.stride()} and {key.stride()}. Call .contiguous() on them."
        )
    max_head_size = 1024 // query.element_size()  # what shared memory holds
    if query.shape[3] > max_head_size:
        raise InputError(
            f"The kernels read a head size of at most {max_head_size}, not {query.shape[3]}. Use the tiled torch path."
        )
    if window is not None and window < 1:
        raise InputError(f"`window` must be at least 1, not {window}. Pass None where the model has no window.")
    return query.shape


# Specialising on these values gains nothing here.
_once_for_all_sizes = jit(
    *("num_heads", "group_size", "length", "window", "num_key_blocks", "num_keys", "num_strips"),
    *("stride_wb", "stride_wh"),
)


def _padded(size: int) -> int:
    """The next power of two, at least 16: what Triton can index and tl.dot can multiply."""
    return max(16, 1 << (size - 1).bit_length())


def _blocks_for(head_size: int, element_size: int, *, weighted: bool) -> Blocks:
    """Fixed choices for Hopper by the padded head size.

    128 keys, because every block of keys streams all later queries out of the level-2 cache. Several small programs on
    a multiprocessor, because one multiplies while another takes exponentials: 128 registers let four of 4 warps live
    together, 168 (what the masked loops would take) three. From head size 256 on, shared memory holds only one.
    """
    padded = _padded(head_size)
    if element_size == 4:  # each float32 operand is held three times: as it came, and as two TF32 parts
        return Blocks(64, 64, 4, 2 if padded <= 64 else 1, None)
    if padded <= 64:
        return Blocks(64, 128, 4, 3, 168 if weighted else 128)
    if padded <= 128:
        return Blocks(64, 128, 4, 2, 168)
    return Blocks(128, 128, 8, 2, None) if padded <= 256 else Blocks(64, 64, 4, 2, None)


@_once_for_all_sizes
def _product(query_TD, key_DS, INTERPRETED: tl.constexpr):
    if INTERPRETED:  # Triton's interpreter multiplies bfloat16 as if its bits were integers
        query_TD = query_TD.to(tl.float32)
        key_DS = key_DS.to(tl.float32)
    # Of float32 operands, three TF32 products keep 22 bits. An "ieee" product would run outside the tensor cores and
    # spills kilobytes of registers from head size 128 on. Sixteen-bit operands ignore this setting.
    return tl.dot(query_TD, key_DS, input_precision="tf32x3")


@_once_for_all_sizes
def _received_kernel(
    query, key, lse, weights, received, entropy, mixing, weighted,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_ks, stride_wb, stride_wh, stride_ws,
    num_heads, group_size, length, window, num_key_blocks, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    WEIGHTS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One program: the column sums of BLOCK_S keys of one head, over the queries from the diagonal on.

    Key blocks vary fastest, so the programs at work at one time stream the same head's queries out of the cache, and
    within a head the longest columns start first, which leaves short ones to fill the end.
    """
    first = tl.program_id(0) % num_key_blocks * BLOCK_S
    bh = (tl.program_id(0) // num_key_blocks).to(tl.int64)
    b = bh // num_heads
    h = bh % num_heads
    query += b * stride_qb + h * stride_qh
    key += b * stride_kb + h // group_size * stride_kh
    lse += bh * length
    entropy += bh * length
    mixing += bh * length
    weighted += bh * length

    s = first + tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    key_exists = s < length
    columns = key + s.to(tl.int64)[None, :] * stride_ks + d[:, None]
    key_DS = tl.load(columns, mask=key_exists[None, :] & (d[:, None] < D), other=0.0)
    if WEIGHTS:
        weights += b * stride_wb + h * stride_wh + s.to(tl.int64) * stride_ws

    # Three stretches of queries: the diagonal, the interior where every query of a tile sees every key of the block,
    # and the rest, where the window closes or the sequence ends. Only the interior is long, and it has no mask.
    diagonal_end = first + BLOCK_S
    interior_tiles = tl.maximum(tl.minimum(length, first + window) - diagonal_end, 0) // BLOCK_T
    interior_end = diagonal_end + interior_tiles * BLOCK_T
    last_end = tl.minimum(length, diagonal_end - 1 + window)
    offset_TD = tl.arange(0, BLOCK_T)[:, None] * stride_qt + d[None, :]
    sums = tl.zeros([BLOCK_T // 16, 8, BLOCK_S], tl.float32)
    for stretch in tl.static_range(3):
        if stretch == 0:
            begin = first
            end = tl.minimum(diagonal_end, last_end)
        elif stretch == 1:
            begin = diagonal_end
            end = interior_end
        else:
            begin = interior_end
            end = last_end
        for start in tl.range(begin, end, BLOCK_T):
            t = start + tl.arange(0, BLOCK_T)
            tile = query + tl.cast(start, tl.int64) * stride_qt + offset_TD
            if stretch == 1:
                query_TD = tl.load(tile) if D == BLOCK_D else tl.load(tile, mask=d[None, :] < D, other=0.0)
                lse_T = tl.load(lse + t)
            else:
                query_TD = tl.load(tile, mask=(t[:, None] < length) & (d[None, :] < D), other=0.0)
                lse_T = tl.load(lse + t, mask=t < length, other=0.0)
            product_TS = _product(query_TD, key_DS, INTERPRETED)
            log_TS = product_TS * scale_log2 - (lse_T * 1.4426950408889634)[:, None]  # 1 / ln 2: to base 2
            if stretch != 1:
                # A finite stand-in for minus infinity: a * log a below must come out as zero, not nan.
                distance = t[:, None] - s[None, :]
                visible = (distance >= 0) & (distance < window) & (t[:, None] < length)
                log_TS = tl.where(visible, log_TS, -1e30)
            a_TS = tl.math.exp2(log_TS)
            # Rows 8 apart lie in one thread, in the layout that tensor cores leave: adding those pairs halves the
            # registers of the column sums, and every other addition along the queries waits until the end.
            sums += tl.sum(tl.reshape(a_TS, [BLOCK_T // 16, 2, 8, BLOCK_S]), 1)
            # One relaxed add per row and tile: nothing reads the buffers before the kernel ends.
            square_TS = a_TS * a_TS
            entropy_T = tl.sum(a_TS * log_TS, 1) * -0.6931471805599453  # -ln 2: back to nats
            tl.atomic_add(entropy + t, entropy_T, mask=t < length, sem="relaxed")
            tl.atomic_add(mixing + t, tl.sum(square_TS, 1), mask=t < length, sem="relaxed")
            if WEIGHTS:
                weight_S = tl.load(weights, mask=key_exists, other=0.0).to(tl.float32)
                weighted_T = tl.sum(square_TS * weight_S[None, :], 1)
                tl.atomic_add(weighted + t, weighted_T, mask=t < length, sem="relaxed")
    tl.store(received + bh * length + s, tl.sum(tl.sum(sums, 0), 0), mask=key_exists)


@_once_for_all_sizes
def _by_keys_kernel(
    query, key, lse, positions, partial,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_ks,
    num_heads, group_size, length, window, num_keys, num_strips, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr,
    STRIP: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One program: what BLOCK_P chosen keys receive from one strip of one head's queries."""
    strip = tl.program_id(0) % num_strips
    bh = (tl.program_id(0) // num_strips).to(tl.int64)
    b = bh // num_heads
    h = bh % num_heads
    query += b * stride_qb + h * stride_qh
    key += b * stride_kb + h // group_size * stride_kh
    p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    d = tl.arange(0, BLOCK_D)
    position = tl.load(positions + p, mask=p < num_keys, other=-1)
    exists = (position >= 0) & (position < length)
    columns = key + position[None, :] * stride_ks + d[:, None]
    key_DP = tl.load(columns, mask=exists[None, :] & (d[:, None] < D), other=0.0)
    s = tl.where(exists, position, length).to(tl.int32)
    sums_TP = tl.zeros([BLOCK_T, BLOCK_P], tl.float32)
    # Queries before the first chosen key see none of them.
    begin = tl.maximum(strip * STRIP, tl.min(s) // BLOCK_T * BLOCK_T)
    for start in tl.range(begin, tl.minimum(strip * STRIP + STRIP, length), BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        tile = query + tl.cast(start, tl.int64) * stride_qt + tl.arange(0, BLOCK_T)[:, None] * stride_qt + d[None, :]
        query_TD = tl.load(tile, mask=(t[:, None] < length) & (d[None, :] < D), other=0.0)
        lse_T = tl.load(lse + bh * length + t, mask=t < length, other=0.0)
        product_TP = _product(query_TD, key_DP, INTERPRETED)
        log_TP = product_TP * scale_log2 - (lse_T * 1.4426950408889634)[:, None]
        distance = t[:, None] - s[None, :]
        visible = (distance >= 0) & (distance < window) & (t[:, None] < length)
        sums_TP += tl.math.exp2(tl.where(visible, log_TP, -1e30))
    sums = tl.where(exists, tl.sum(sums_TP, 0), float("nan"))
    tl.store(partial + (bh * num_keys + p) * num_strips + strip, sums, mask=p < num_keys)
