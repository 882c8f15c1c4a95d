"""Writes the ladder's text: books, and the sources of installed packages, in parts that are small enough to travel.

    python lab/ladder/text.py --books train.txt.xz.part* --valid valid.txt.xz --out carry

Training documents are written in the order in which they are found, each file once (by its hash). Held out are other
books, and every file of a few whole packages: copies within a package are then never on both sides.
DIR/a gets the books, DIR/b the rest, DIR/text.json counts, hashes and versions. A part that is right is left alone.
"""

from __future__ import annotations

import argparse
import bz2
import hashlib
import importlib.metadata
import json
import lzma
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SEPARATOR = "<|endoftext|>"
SUFFIXES = {".py", ".pyi", ".h", ".hpp", ".cuh", ".c", ".cpp", ".md", ".rst"}
HELD_OUT = {"networkx", "fontTools"}
LEFT_OUT = {"plotly", "__pycache__", "site-packages", "dist-packages", "idlelib"}
"""plotly's files are written by a program, and say the same thing a thousand times."""
SMALLEST, LARGEST = 500, 300_000
"""Bytes of a file: shorter ones are lists of imports, longer ones tables of numbers."""
BOOK_PART = 45_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--books", type=Path, nargs="+", required=True, help="parts of one xz stream")
    parser.add_argument("--valid", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--book-parts", type=int, default=4, help=f"parts of {BOOK_PART} bytes")
    options = parser.parse_args()
    for folder in ("a", "b"):
        (options.out / folder).mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"parts": {}, "packages": {}}

    def keep(path: Path, data: bytes) -> None:
        packing = bz2 if path.suffix == ".bz2" else lzma
        if not path.exists() or packing.decompress(path.read_bytes()) != data:
            path.write_bytes(packing.compress(data))
        digest, packed = hashlib.sha256(data).hexdigest(), path.stat().st_size
        record["parts"][path.name] = {"bytes": len(data), "packed": packed, "sha256": digest}
        print(path, len(data), packed, flush=True)

    roots = [Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("stdlib"))]
    code, held_out = sources(roots, record["packages"])
    keep(options.out / "b" / "code-valid.xz", code_text(held_out))
    keep(options.out / "b" / "code.xz", code_text(code))
    keep(options.out / "b" / "prose-valid.bz2", lzma.decompress(options.valid.read_bytes()))
    for number, part in enumerate(book_parts(options.books, options.book_parts)):
        keep(options.out / "a" / f"prose-{number}.bz2", part)
    (options.out / "text.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def sources(roots: Sequence[Path], packages: dict[str, Any]) -> tuple[list[str], list[str]]:
    """(texts to train on, texts held out): every file once."""
    seen: set[str] = set()
    texts: tuple[list[str], list[str]] = ([], [])
    for root in roots:
        for path in sorted(path for path in root.rglob("*") if path.suffix in SUFFIXES and path.is_file()):
            parts = path.relative_to(root).parts
            if LEFT_OUT & set(parts) or not SMALLEST <= path.stat().st_size <= LARGEST:
                continue
            text = path.read_text(encoding="utf-8", errors="ignore").strip()
            digest = hashlib.sha256(text.encode()).hexdigest()
            if digest in seen or not is_code(text):
                continue
            seen.add(digest)
            package = parts[0] if root is roots[0] else "python"
            packages[package] = packages.get(package, 0) + len(text.encode())
            texts[package in HELD_OUT].append(text)
    for name in [name for name in packages if packages[name] > 1_000_000]:
        try:
            packages[f"{name} version"] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return texts


def is_code(text: str) -> bool:
    """No table of numbers: most characters are letters and spaces, and lines are short."""
    letters = sum(map(str.isalpha, text)) + sum(map(str.isspace, text))
    return letters > 0.6 * len(text) and len(text) < 150 * (text.count("\n") + 1)


def code_text(texts: Sequence[str]) -> bytes:
    return "".join(f"{text}\n{SEPARATOR}\n" for text in texts).encode()


def book_parts(paths: Sequence[Path], number: int) -> Iterator[bytes]:
    """The first parts of the books, each ending where a book ends."""
    unpack, ends = lzma.LZMADecompressor(), f"\n{SEPARATOR}\n".encode()
    rest = b""
    for path in sorted(paths):
        rest += unpack.decompress(path.read_bytes())
        while len(rest) > BOOK_PART and number:
            cut = rest.rfind(ends, 0, BOOK_PART) + len(ends)
            yield rest[:cut]
            rest, number = rest[cut:], number - 1
        if not number:
            return


if __name__ == "__main__":
    main()
