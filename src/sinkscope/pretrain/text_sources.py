"""Reads documents from text files, folders and Hugging Face datasets, one at a time, always in the same order.

In a text file documents are separated by `<|endoftext|>`; a file without it is one document. A .jsonl file holds one
JSON object with a `text` on each line. Both may be compressed (.gz, .xz).
"""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated

from sinkscope.arguments import SEPARATOR, check_count
from sinkscope.errors import InputError, check_installed
from sinkscope.user_paths import user_path

SUFFIXES = (".txt", ".md", ".jsonl")
BLOCK_CHARACTERS = 1 << 20
FORMS = "a text file, a folder of them, hf:NAME, hf:NAME:CONFIG or hf:FILE"
DATA = "Text files or folders, or hf:NAME"
VALIDATION = "Texts to hold out; by default a share of the documents"
HF_BUILDERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".txt": "text"}


SMALLEST_VOCABULARY = 257
"""256 bytes and the end-of-text token."""
LARGEST_VOCABULARY = 1 << 24


@dataclass(frozen=True, kw_only=True)
class TokenizeConfig:
    """What one tokenisation is asked to do, each field with its help; written to config.yaml."""

    data: Annotated[Sequence[str], DATA]
    validation: Annotated[Sequence[str], VALIDATION] = ()
    validation_share: Annotated[float, "Share to hold out, by document, if no texts are given; at most twice that"] = (
        0.01
    )
    vocab_size: Annotated[int, "Tokens of the byte-level BPE that is trained"] = 8192
    tokenizer: Annotated[str | None, "Folder or Hugging Face name of a tokenizer to use instead"] = None
    max_tokens: Annotated[int | None, "Stop after this many training tokens; a streamed dataset may have no end"] = None
    shard_tokens: Annotated[int, "Tokens in a shard"] = 1 << 27

    def check(self) -> None:
        check_sources(self.data)
        if self.validation:
            check_sources(self.validation)
        if not 0 < self.validation_share < 1:
            raise InputError(
                f"`validation_share` must be between 0 and 1, not {self.validation_share}. "
                "Give, for example, `validation_share=0.01`."
            )
        if self.tokenizer is None:
            check_count("vocab_size", self.vocab_size, SMALLEST_VOCABULARY, LARGEST_VOCABULARY)
        if self.max_tokens is not None:
            check_count("max_tokens", self.max_tokens, 1)
        check_count("shard_tokens", self.shard_tokens, 1)


def documents(sources: Sequence[str]) -> Iterator[str]:
    """Every document of the sources, in the order of the sources and, within a folder, of the sorted paths.

    A source without any text is refused, as is a file that is not text.
    """
    for source in sources:
        num_documents = 0
        for document in _source_documents(source):
            if document.strip():
                num_documents += 1
                yield document
        if not num_documents:
            raise InputError(f"There is no text in {source}. Give {FORMS} as `data`.")


def check_sources(sources: Sequence[str]) -> None:
    """Returns if every source exists, else raises InputError; no file is opened."""
    if not sources:
        raise InputError(f"No text was given. Give {FORMS} as `data`.")
    for source in sources:
        if source.startswith("hf:"):
            _datasets_package()
        else:
            _files(source)


def _source_documents(source: str) -> Iterator[str]:
    if source.startswith("hf:"):
        yield from _hugging_face_documents(source)
        return
    for path in _files(source):
        yield from _file_documents(path)


def _files(source: str) -> list[Path]:
    path = user_path(source)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise InputError(f"There is no file or folder {source!r}. Give {FORMS} as `data`.")
    files = sorted(file for file in path.rglob("*") if file.is_file() and _suffix(file) in SUFFIXES)
    if not files:
        raise InputError(
            f"The folder {source} has no files that end in {', '.join(SUFFIXES)} (or these with .gz, .xz). "
            "Give the files themselves as `data`."
        )
    return files


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix in (".gz", ".xz") else path.suffix


def _file_documents(path: Path) -> Iterator[str]:
    try:
        with _opened(path) as file:
            yield from _json_documents(file, path) if _suffix(path) == ".jsonl" else _separated_documents(file, path)
    except UnicodeDecodeError as error:
        raise _not_text(path, "its bytes are not UTF-8") from error
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise _not_text(path, str(error) or type(error).__name__) from error


def _opened(path: Path) -> IO[str]:
    # newline="" leaves line endings as they are.
    openers = {".gz": gzip.open, ".xz": lzma.open}
    return openers.get(path.suffix, open)(path, "rt", encoding="utf-8-sig", newline="")


def _separated_documents(file: IO[str], path: Path) -> Iterator[str]:
    """Reads a file block by block, so it may be larger than memory; each document must fit."""
    pending: list[str] = []  # what was read of the current document
    tail = ""
    while block := file.read(BLOCK_CHARACTERS):
        if "\0" in block:
            raise _not_text(path, "it has a zero byte")
        first, *others = (tail + block).split(SEPARATOR)
        for other in others:
            yield "".join([*pending, first]).strip("\r\n")
            pending, first = [], other
        # A separator may lie across two blocks, so the end of a block waits for the next one.
        keep = len(SEPARATOR) - 1
        pending.append(first[:-keep])
        tail = first[-keep:]
    yield "".join([*pending, tail]).strip("\r\n")


def _json_documents(file: IO[str], path: Path) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
            text.encode()
        except UnicodeEncodeError as error:  # JSON can write half of a surrogate pair, UTF-8 cannot
            raise _not_text(path, f"the text of line {number} holds a lone surrogate") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise _not_text(path, f"line {number} is not an object with a 'text'") from None
        yield text


def _hugging_face_documents(source: str) -> Iterator[str]:
    load_dataset = _datasets_package().load_dataset
    name, _, config = source.removeprefix("hf:").partition(":")
    path = user_path(name)
    options = {"split": "train", "streaming": True}
    if path.is_file() and path.suffix not in HF_BUILDERS:
        raise InputError(
            f"hf: reads files that end in {', '.join(HF_BUILDERS)}, not {path.name}. "
            "Give it without hf:, or in another format."
        )
    try:
        if path.is_file():
            stream = load_dataset(HF_BUILDERS[path.suffix], data_files=str(path), **options)
        else:
            stream = load_dataset(name, config or None, **options)
        for row in stream:  # inside the try: the package opens its files only now
            if not isinstance(row.get("text"), str):
                raise InputError(
                    f"{source} has no text in a column 'text'; its columns are {', '.join(row)}. "
                    "Choose another dataset."
                )
            yield row["text"]
    except (OSError, ValueError) as error:  # the package's own errors for a missing dataset are among these
        reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
        raise InputError(f"Cannot read the dataset {source}: {reason}. Give {FORMS} as `data`.") from error


def _datasets_package():
    check_installed("A source that begins with hf:", "train", "datasets")
    import datasets  # pyright: ignore[reportMissingImports]

    return datasets


def _not_text(path: Path, reason: str) -> InputError:
    return InputError(f"{path.name} cannot be read as text: {reason}. Give {FORMS} as `data`.")
