"""Turns the parts of `text.py` into tokens: train.npy, and valid-prose.npy and valid-code.npy with their bytes.

python lab/ladder/prepare.py --parts DIR --to DIR --only prose
"""

from __future__ import annotations

import argparse
import bz2
import json
import lzma
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

SEPARATOR = "<|endoftext|>"
TOKENIZER = Path(__file__).resolve().parents[2] / "src/sinkscope/reference/softmax/model/tokenizer.json"
PIECE = 200_000
"""Characters at a time, so that a book does not keep one core busy while the others wait."""
BATCH = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True)
    options = parser.parse_args()
    options.to.mkdir(parents=True, exist_ok=True)
    paths = sorted(path for path in options.parts.iterdir() if path.suffix in (".bz2", ".xz"))
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    with ThreadPoolExecutor(8) as pool:
        for path, text in zip(paths, pool.map(unpacked, paths), strict=True):
            name = path.name.split(".")[0]
            tokens = encoded(tokenizer, text)
            np.save(options.to / f"{name}.npy", tokens)
            counts = {"bytes": len(text.replace(f"\n{SEPARATOR}\n", "\n").encode()), "tokens": len(tokens)}
            (options.to / f"{name}.json").write_text(json.dumps(counts))
            print(name, counts, flush=True)


def unpacked(path: Path) -> str:
    return (bz2 if path.suffix == ".bz2" else lzma).decompress(path.read_bytes()).decode()


def encoded(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """The tokens of all documents, each followed by the end of text."""
    pieces = list(documents_in_pieces(text))
    end = tokenizer.token_to_id(SEPARATOR)
    parts = []
    for first in range(0, len(pieces), BATCH):
        batch = pieces[first : first + BATCH]
        for (_, last), encoding in zip(batch, tokenizer.encode_batch_fast([text for text, _ in batch]), strict=True):
            parts.append(np.array(encoding.ids + [end] * last, dtype=np.uint16))
    return np.concatenate(parts)


def documents_in_pieces(text: str) -> Iterator[tuple[str, bool]]:
    """(piece, whether a document ends with it); pieces end at the end of a line."""
    for document in text.split(SEPARATOR):
        document = document.strip()
        while len(document) > PIECE and (cut := document.rfind("\n", 0, PIECE) + 1):
            yield document[:cut], False
            document = document[cut:]
        if document:
            yield document, True


if __name__ == "__main__":
    main()
