"""Token shards on disk, and the batches that training takes from them.

Shards are a folder of token files, a manifest with their hashes, and the tokenizer. Each file holds tokens of one split
as little-endian uint16, or uint32 if the vocabulary needs it, and is memory-mapped. Every document ends with the
end-of-text token.

The order of batches depends on nothing but seed and step, so a run that resumes needs no other state. A split is cut
into windows of `length` tokens; the token after a window is only a target. An epoch visits every window once, in an
order drawn from (seed, epoch). The permutation is computed entry by entry and never held, so that the first batch of a
hundred billion tokens costs no more than that of a thousand.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from annotated_types import Interval

from sinkscope.errors import InputError
from sinkscope.pretrain.text_sources import LARGEST_VOCABULARY
from sinkscope.results.run_folder import RunFolder
from sinkscope.results.validated import Count, Name, Whole, read_json, shortened, strictly
from sinkscope.user_paths import user_path

if TYPE_CHECKING:
    from torch import Tensor


MANIFEST = "manifest.json"
VERSION = 1
DTYPES = ("<u2", "<u4")
Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")

ROUNDS = 4
"""Of the Feistel network that permutes windows: four make a strong pseudo-random permutation (Luby, Rackoff 1988)."""


@dataclass(frozen=True)
class Shard:
    file: Name
    split: Split
    num_tokens: Count
    num_documents: Whole
    sha256: Name


@dataclass(frozen=True)
class Manifest:
    """What manifest.json must hold; it may hold more."""

    version: Whole
    dtype: Literal["<u2", "<u4"]
    vocab_size: Annotated[int, Interval(ge=1, le=LARGEST_VOCABULARY)]
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class TokenShards:
    """The shards of a folder, by their manifest."""

    path: Path
    dtype: str
    vocab_size: int
    shards: tuple[Shard, ...]

    @property
    def fingerprint(self) -> str:
        """A hash of all tokens and their order; runs with the same one were trained on the same data."""
        text = json.dumps([self.dtype, self.vocab_size, [[s.split, s.sha256] for s in self.shards]])
        return hashlib.sha256(text.encode()).hexdigest()

    def tokens(self, split: Split) -> list[np.ndarray]:
        """The shards of a split as memory-mapped arrays."""
        return [
            np.memmap(self.path / shard.file, dtype=np.dtype(self.dtype), mode="r")
            for shard in self.shards
            if shard.split == split
        ]

    def num_tokens(self, split: Split) -> int:
        return sum(shard.num_tokens for shard in self.shards if shard.split == split)

    def verify(self) -> None:
        """Returns if every shard has its hash and no token outside of the vocabulary, else raises InputError.

        Reads every byte.
        """
        for shard in self.shards:
            if file_sha256(self.path / shard.file) != shard.sha256:
                raise _damaged(self.path, f"{shard.file} has other bytes")
            tokens = np.memmap(self.path / shard.file, dtype=np.dtype(self.dtype), mode="r")
            if (largest := int(tokens.max())) >= self.vocab_size:
                reason = f"{shard.file} has a token {largest}, beyond a vocabulary of {self.vocab_size}"
                raise _damaged(self.path, reason)


class ShardWriter:
    """Writes documents of tokens into the shards of a run folder; `finish` writes the manifest."""

    def __init__(self, folder: RunFolder, vocab_size: int, shard_tokens: int) -> None:
        self.folder = folder
        self.vocab_size = vocab_size
        self.shard_tokens = shard_tokens
        self.dtype = DTYPES[vocab_size > 1 << 16]
        self.num_tokens: dict[Split, int] = dict.fromkeys(SPLITS, 0)
        self._shards: list[Shard] = []
        self._pending: dict[Split, list[np.ndarray]] = {split: [] for split in SPLITS}
        self._num_pending: dict[Split, int] = dict.fromkeys(SPLITS, 0)

    def add(self, split: Split, tokens: Iterable[int]) -> None:
        """Appends a document. A shard is written when it is full, and always ends with a whole document."""
        array = np.asarray(tokens, dtype=np.int64)
        if array.size and not 0 <= int(array.min()) <= int(array.max()) < self.vocab_size:
            raise InputError(
                f"Token ids from {array.min()} to {array.max()} do not fit a vocabulary of {self.vocab_size}. "
                "Use the tokenizer that belongs to the vocabulary."
            )
        self._pending[split].append(array.astype(self.dtype))
        self.num_tokens[split] += array.size
        self._num_pending[split] += array.size
        if self._num_pending[split] >= self.shard_tokens:
            self._flush(split)

    def finish(self, **provenance: Any) -> None:
        """Writes the last shards and the manifest, with `provenance` in it."""
        for split in SPLITS:
            self._flush(split)
        self.folder.write_json(
            MANIFEST,
            {
                "version": VERSION,
                "dtype": self.dtype,
                "vocab_size": self.vocab_size,
                "num_tokens": self.num_tokens,
                "shards": [asdict(shard) for shard in self._shards],
                **provenance,
            },
        )

    def _flush(self, split: Split) -> None:
        documents = self._pending[split]
        if not documents:
            return
        number = sum(shard.split == split for shard in self._shards)
        path = self.folder.path / f"{split}-{number:05d}.tokens"
        tokens = np.concatenate(documents)
        with path.open("wb") as file:
            file.write(tokens.data)  # numpy's tofile would not say that the disk is full
        self._shards.append(Shard(path.name, split, tokens.size, len(documents), file_sha256(path)))
        self._pending[split], self._num_pending[split] = [], 0


def is_shards(data: Sequence[str]) -> bool:
    """Whether `data` of a training run is one folder of token shards; if not, it is texts."""
    folders = [source for source in data if (user_path(source) / MANIFEST).is_file()]
    if folders and len(data) > 1:
        raise InputError(
            f"{folders[0]} is a folder of token shards, which cannot be mixed with other sources. "
            "Give it alone as `data`."
        )
    return bool(folders)


def open_shards(path: Path) -> TokenShards:
    """The shards in a folder, their sizes checked against the manifest; no token is read."""
    manifest = strictly(Manifest, read_json(path / MANIFEST, Manifest))
    if manifest.version != VERSION:
        raise _damaged(path, f"they have version {manifest.version}, and this sinkscope reads version {VERSION}")
    for shard in manifest.shards:
        if problem := _problem(path, shard, np.dtype(manifest.dtype).itemsize):
            raise _damaged(path, f"{shortened(shard.file)!r} {problem}")
    return TokenShards(path, manifest.dtype, manifest.vocab_size, manifest.shards)


def _problem(path: Path, shard: Shard, width: int) -> str | None:
    """What is wrong with a shard, by its entry in the manifest and its file's size; None if nothing is."""
    if shard.file in ("", ".", "..") or {"/", "\\", "\0"} & set(shard.file):
        return "is not the name of a file in the folder"
    file = path / shard.file
    if not file.is_file():
        return "is missing"
    return None if file.stat().st_size == shard.num_tokens * width else "does not have the size that the manifest says"


def file_sha256(path: Path) -> str:
    """The hash of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _damaged(path: Path, reason: str) -> InputError:
    return InputError(
        f"Cannot use the token shards in {path}: {reason}. Write them again from the texts with sinkscope tokenize."
    )


class TokenStream:
    """The batches of one split: which windows each step trains on."""

    def __init__(self, shards: TokenShards, split: Split, *, length: int, batch_size: int, seed: int) -> None:
        self.length = length
        self.batch_size = batch_size
        self.seed = seed
        self._arrays = shards.tokens(split)
        # One token more than `length`: the target of the last one. No window spans two shards.
        windows = [max(0, (len(array) - 1) // length) for array in self._arrays]
        self._starts = np.cumsum([0, *windows])  # the number of the first window of each shard, and of all windows
        self.num_windows = int(self._starts[-1])
        if not self.num_windows:
            longest = max((len(array) for array in self._arrays), default=0)
            raise InputError(
                f"Sequences of {length} tokens need a {split} shard of at least {length + 1} tokens, "
                f"and the longest has {longest}. Give more text, or a shorter `sequence_length`."
            )

    def batch(self, step: int, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """(tokens [b, T], targets [b, T]): the chosen rows of a step's batch. The first step is 0."""
        # Windows are numbered through all epochs; a batch may lie in two of them.
        numbers = np.arange(step * self.batch_size, (step + 1) * self.batch_size)[rows]
        epochs, places = np.divmod(numbers, self.num_windows)
        windows = np.empty_like(places)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            windows[in_epoch] = permuted(places[in_epoch], self.num_windows, (self.seed, int(epoch)))
        return self._windows(windows)

    def evenly_spaced(self, count: int, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """(tokens, targets) of at most `count` windows, evenly spread over the split and always the same."""
        windows = np.linspace(0, self.num_windows - 1, min(count, self.num_windows)).round().astype(np.int64)
        return self._windows(windows[rows])

    def _windows(self, windows: np.ndarray) -> tuple[Tensor, Tensor]:
        """(tokens, targets) of windows by their number; targets are the tokens, one further."""
        shards = np.searchsorted(self._starts, windows, side="right") - 1
        result = np.empty((len(windows), self.length + 1), dtype=np.int64)
        for row, (shard, window) in enumerate(zip(shards.tolist(), windows.tolist(), strict=True)):
            start = (window - int(self._starts[shard])) * self.length
            result[row] = self._arrays[shard][start : start + self.length + 1]
        import torch  # here: the command line asks about shards before it waits for torch

        tokens = torch.from_numpy(result)
        return tokens[:, :-1], tokens[:, 1:]


def permuted(places: np.ndarray, size: int, key: tuple[int, int]) -> np.ndarray:
    """Where a permutation of range(size), chosen by the key, sends some places.

    A Feistel network permutes the numbers below the next power of four, whatever its round function is. A place that it
    sends out of range is sent through it again until it falls into range ("cycle walking"); so no two places meet, and
    the result is a permutation of range(size).
    """
    half_bits = max(1, (int(size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half_bits) - 1)
    keys = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64)

    def network(x: np.ndarray) -> np.ndarray:
        left, right = x >> np.uint64(half_bits), x & mask
        for round_key in keys:
            left, right = right, left ^ (_hash_64(right ^ round_key) & mask)
        return left << np.uint64(half_bits) | right

    result = network(places.astype(np.uint64))
    while (outside := result >= size).any():
        result[outside] = network(result[outside])
    return result.astype(np.int64)


def _hash_64(x: np.ndarray) -> np.ndarray:
    """A 64-bit hash of each number: the finaliser of splitmix64. Its products are meant to overflow."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)
