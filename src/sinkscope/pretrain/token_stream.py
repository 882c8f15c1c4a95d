"""Batches of tokens whose order is a pure function of seed and step: resuming needs no state but the step.

A split is cut into windows of `length` tokens and the one after each, which is a target only. An epoch visits every
window once, in an order drawn from (seed, epoch); the permutation is computed where it is asked for, so that the first
batch of a hundred billion tokens costs as much as that of a thousand.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sinkscope.errors import InputError
from sinkscope.pretrain.token_shards import Split, TokenShards

ROUNDS = 4


class TokenStream:
    """The windows of one split, by step."""

    def __init__(self, shards: TokenShards, split: Split, *, length: int, batch_size: int, seed: int) -> None:
        self.length = length
        self.batch_size = batch_size
        self.seed = seed
        self._arrays = shards.tokens(split)
        windows = [max(0, (len(array) - 1) // length) for array in self._arrays]
        self._starts = np.cumsum([0, *windows])
        self.num_windows = int(self._starts[-1])
        if not self.num_windows:
            longest = max((len(array) for array in self._arrays), default=0)
            raise InputError(
                expected=f"a {split} shard of at least {length + 1} tokens, for sequences of {length}",
                found=f"{longest} tokens in the longest",
                next_step="Give more text, or a shorter sequence with --sequence-length",
            )

    def batch(self, step: int, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """(tokens [b, T], targets [b, T]) of some rows of the batch of a step, steps counting from 0."""
        numbers = np.arange(step * self.batch_size, (step + 1) * self.batch_size)[rows]
        epochs, places = np.divmod(numbers, self.num_windows)
        windows = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            windows[here] = permuted(places[here], self.num_windows, (self.seed, int(epoch)))
        return self._windows(windows)

    def evenly_spaced(self, count: int, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """(tokens, targets) of at most `count` windows spread over the split: the same ones at every step."""
        windows = np.linspace(0, self.num_windows - 1, min(count, self.num_windows)).round().astype(np.int64)
        return self._windows(windows[rows])

    def _windows(self, windows: np.ndarray) -> tuple[Tensor, Tensor]:
        shards = np.searchsorted(self._starts, windows, side="right") - 1
        result = np.empty((len(windows), self.length + 1), dtype=np.int64)
        for row, (shard, window) in enumerate(zip(shards.tolist(), windows.tolist(), strict=True)):
            start = (window - int(self._starts[shard])) * self.length
            result[row] = self._arrays[shard][start : start + self.length + 1]
        tokens = torch.from_numpy(result)
        return tokens[:, :-1], tokens[:, 1:]


def permuted(places: np.ndarray, size: int, key: tuple[int, int]) -> np.ndarray:
    """Where a permutation of range(size), drawn from a key, sends some places.

    A Feistel network over the next power of four is a bijection for any round function; a place that it sends outside
    of the range is sent on until it falls inside, which keeps it one.
    """
    half_bits = max(1, (int(size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half_bits) - 1)
    keys = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64)

    def network(x: np.ndarray) -> np.ndarray:
        left, right = x >> np.uint64(half_bits), x & mask
        for round_key in keys:
            left, right = right, left ^ (_mixed(right ^ round_key) & mask)
        return left << np.uint64(half_bits) | right

    result = network(places.astype(np.uint64))
    while (outside := result >= size).any():
        result[outside] = network(result[outside])
    return result.astype(np.int64)


def _mixed(x: np.ndarray) -> np.ndarray:
    """A 64-bit hash (the finaliser of splitmix64); unsigned products wrap around, as they should."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)
