"""Writes a text to train on that is part prose, part source code: the Python files of installed packages.

    python lab/experiments/mixed_text.py --prose train.txt --out text.txt

Whether sinks are born sooner where the text repeats itself (lab/results.md). All packages are under permissive
licences (BSD, Apache 2.0, PSF); their versions are printed, and --seed decides the order of the documents.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform
import random
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from sinkscope.errors import InputError
from sinkscope.pretrain.text_sources import SEPARATOR, documents

PACKAGES = ("torch", "transformers", "numpy", "scipy", "sympy", "networkx", "matplotlib")
LEAST_BYTES = 2000
"""Shorter files are mostly lists of imports."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--prose", required=True, help="a text file or a folder of them, as sinkscope tokenize takes it"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prose-characters", type=int, default=110_000_000)
    parser.add_argument("--code-characters", type=int, default=110_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    shuffled = random.Random(options.seed).shuffle
    files = [path for root in roots() for path in source_files(root)]
    shuffled(files)
    sources = (path.read_text(encoding="utf-8", errors="ignore") for path in files)
    try:
        books = [*until(options.prose_characters, documents([options.prose]))]
    except InputError as error:
        print(f"mixed_text: {error}", file=sys.stderr)
        sys.exit(2)
    mixed = [*until(options.code_characters, sources), *books]
    shuffled(mixed)
    with options.out.open("w", encoding="utf-8") as out:
        out.writelines(f"{document.strip()}\n{SEPARATOR}\n" for document in mixed)
    versions = {name: importlib.metadata.version(name) for name in PACKAGES} | {"python": platform.python_version()}
    print(
        f"{len(mixed)} documents, {options.out.stat().st_size:,} bytes:",
        *(f"{k}=={v}" for k, v in versions.items()),
    )


def roots() -> Iterator[Path]:
    """The folders of the packages, and of the standard library."""
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise SystemExit(f"mixed_text: {name} is not installed. Try: pip install -c constraints.txt {name}")
        yield Path(spec.origin).parent
    yield Path(sysconfig.get_path("stdlib"))


def until(num_characters: int, texts: Iterable[str]) -> Iterator[str]:
    """The first documents, as many as make up that many characters."""
    for text in texts:
        if num_characters <= 0:
            return
        num_characters -= len(text)
        yield text


def source_files(root: Path) -> list[Path]:
    """The Python files under a folder by name; of the standard library without what is installed beside it."""
    found = (path for path in root.rglob("*.py") if "site-packages" not in path.relative_to(root).parts)
    return sorted(path for path in found if path.stat().st_size >= LEAST_BYTES)


if __name__ == "__main__":
    main()
