"""Token shards: a folder of memory-mapped token files, a manifest with their hashes, and the tokenizer beside them.

Each shard holds the tokens of one split as little-endian uint16, or uint32 where the vocabulary needs it. Every
document ends with the end-of-text token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sinkscope.errors import InputError
from sinkscope.results.run_folder import RunFolder

MANIFEST = "manifest.json"
VERSION = 1
Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")


@dataclass(frozen=True)
class Shard:
    file: str
    split: Split
    num_tokens: int
    num_documents: int
    sha256: str


@dataclass(frozen=True)
class TokenShards:
    """Shards on disk. Tokens are mapped, not read, when they are asked for."""

    path: Path
    dtype: str
    vocab_size: int
    shards: tuple[Shard, ...]

    @property
    def fingerprint(self) -> str:
        """A hash of all tokens and their order: runs on equal fingerprints saw the same data."""
        text = json.dumps([self.dtype, self.vocab_size, [[s.split, s.sha256] for s in self.shards]])
        return hashlib.sha256(text.encode()).hexdigest()

    def tokens(self, split: Split) -> list[np.ndarray]:
        """The shards of a split as arrays mapped from disk."""
        return [
            np.memmap(self.path / shard.file, dtype=np.dtype(self.dtype), mode="r")
            for shard in self.shards
            if shard.split == split
        ]

    def num_tokens(self, split: Split) -> int:
        return sum(shard.num_tokens for shard in self.shards if shard.split == split)

    def verify(self) -> None:
        """Returns if every shard has the hash in the manifest, else raises InputError; reads every byte."""
        for shard in self.shards:
            if file_sha256(self.path / shard.file) != shard.sha256:
                raise _damaged(self.path, f"other bytes in {shard.file}")


class ShardWriter:
    """Writes documents of tokens into the shards of a run folder; `finish` writes the manifest."""

    def __init__(self, folder: RunFolder, vocab_size: int, shard_tokens: int) -> None:
        self.folder = folder
        self.vocab_size = vocab_size
        self.shard_tokens = shard_tokens
        self.dtype = "<u2" if vocab_size <= 1 << 16 else "<u4"
        self.num_tokens: dict[Split, int] = dict.fromkeys(SPLITS, 0)
        self._shards: list[Shard] = []
        self._pending: dict[Split, list[np.ndarray]] = {split: [] for split in SPLITS}

    def add(self, split: Split, tokens: Iterable[int]) -> None:
        """Appends a document; a shard ends with the document that fills it."""
        array = np.asarray(tokens, dtype=np.int64)
        if array.size and not 0 <= int(array.min()) <= int(array.max()) < self.vocab_size:
            raise InputError(
                expected=f"token ids below the vocabulary's size, {self.vocab_size}",
                found=str(int(array.max())),
                next_step="Use the tokenizer that belongs to the vocabulary",
            )
        self._pending[split].append(array.astype(self.dtype))
        self.num_tokens[split] += array.size
        if sum(document.size for document in self._pending[split]) >= self.shard_tokens:
            self._flush(split)

    def finish(self, **provenance: Any) -> None:
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
        tokens.tofile(path)
        self._shards.append(Shard(path.name, split, tokens.size, len(documents), file_sha256(path)))
        self._pending[split] = []


def open_shards(path: Path) -> TokenShards:
    """The shards in a folder, their sizes checked against the manifest."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        version = manifest["version"]
        shards = tuple(Shard(**shard) for shard in manifest["shards"])
        result = TokenShards(path, manifest["dtype"], manifest["vocab_size"], shards)
        width = np.dtype(result.dtype).itemsize
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(path, f"{MANIFEST} that cannot be read: {error}") from error
    if version != VERSION:
        raise _damaged(path, f"version {version}, this release reads {VERSION}")
    for shard in shards:
        file = path / shard.file
        if not file.is_file() or file.stat().st_size != shard.num_tokens * width:
            raise _damaged(path, f"{shard.file} {'cut short or grown' if file.is_file() else 'missing'}")
    return result


def file_sha256(path: Path) -> str:
    """The hash of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _damaged(path: Path, found: str) -> InputError:
    return InputError(
        expected=f"whole token shards in {path}",
        found=found,
        next_step="Write them again with: sinkscope tokenize --data FILES --out FOLDER",
    )
