"""GGUF files: the header, checked before any weight is read, and the file as a model and tokenizer, dequantised."""

from __future__ import annotations

import contextlib
import io
import mmap
import shutil
import struct
import tempfile
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sinkscope.errors import InputError, check_installed
from sinkscope.models.checkpoint_checks import CHUNK, ask, check_causal, check_counts, check_loading_info, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

GGUF_COPY_LIMIT = 2 << 30
"""Bytes up to which a GGUF file is copied without its vocabulary, which transformers reads twice at 20 us a token."""


@dataclass(frozen=True, kw_only=True)
class GgufHeader:
    """What the head of a GGUF file says, and where its arrays and tensors lie."""

    path: Path
    metadata: dict[str, Any]
    """Scalars and strings; arrays are left out."""
    num_entries: int
    tokenizer_arrays: list[tuple[int, int]]
    """Byte ranges of the metadata entries that hold the vocabulary."""
    num_tensors: int
    num_embeddings: int | None
    tensors_end: int
    alignment: int
    data_start: int


class _Cursor:
    """Reads a GGUF header front to back; running past the end is a ValueError, whatever a corrupt count says."""

    FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # noqa: RUF012

    def __init__(self, blob: mmap.mmap) -> None:
        self.blob, self.at = blob, 0

    def skip(self, num_bytes: int) -> int:
        start, self.at = self.at, self.at + num_bytes
        if self.at > len(self.blob):
            raise ValueError("the file ends inside its header")
        return start

    def take(self, fmt: str) -> Any:
        return struct.unpack_from(f"<{fmt}", self.blob, self.skip(struct.calcsize(f"<{fmt}")))[0]

    def string(self) -> str:
        start = self.skip(self.take("Q"))
        return self.blob[start : self.at].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == 8:
            return self.string()
        if kind != 9:
            return self.take(self.FORMATS[kind])
        kind, count = self.take("I"), self.take("Q")
        if kind in self.FORMATS:
            self.skip(count * struct.calcsize(self.FORMATS[kind]))
        else:
            for _ in range(count):
                self.skip(self.take("Q")) if kind == 8 else self.value(kind)
        return None


def read_gguf_header(path: Path) -> GgufHeader:
    """The header of a GGUF file whose tensors all lie inside it."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as blob:
            header = _walk_gguf(path, blob)
    except (ValueError, LookupError, RecursionError, OSError) as error:
        raise InputError(
            f"The GGUF file {path.name} is corrupt or truncated ({first_line(error)}). Fetch the file again."
        ) from error
    check_counts(header.metadata)
    if isinstance(parts := header.metadata.get("split.count"), int) and parts > 1:
        raise InputError(
            f"{path.name} is one of {parts} parts of a model. Join the parts with llama-gguf-split --merge."
        )
    return header


def load_gguf(header: GgufHeader, *, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    """The model in a GGUF file, its weights dequantised to `dtype`."""
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

    path = header.path
    problem = f"Transformers cannot read the GGUF architecture {header.metadata['general.architecture']!r}"
    advice = "Use the model's safetensors checkpoint instead."
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder, known = path.parent, {}
        size = path.stat().st_size
        if header.num_embeddings and size < min(GGUF_COPY_LIMIT, shutil.disk_usage(scratch).free // 2):
            _copy_without_vocabulary(header, Path(scratch, path.name))
            # transformers counts the vocabulary for this where the file does not say it.
            folder, known = Path(scratch), {"vocab_size": header.num_embeddings}
        config = ask(
            problem, advice, AutoConfig.from_pretrained, folder, gguf_file=path.name, trust_remote_code=False, **known
        )
        check_causal(config, path.name)
        # Its progress bar cannot be switched off otherwise.
        with contextlib.redirect_stderr(io.StringIO()):
            model, info = ask(
                problem,
                advice,
                AutoModelForCausalLM.from_pretrained,
                folder,
                gguf_file=path.name,
                config=config,
                dtype=dtype,
                # Without this, transformers may leave weights packed for a kernel of its own.
                quantization_config=GgufConfig(dequantize=True),
                output_loading_info=True,
                **options,
            )
    check_loading_info(info, path.name)
    model.config.name_or_path = path.name
    return model


def gguf_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a GGUF file."""
    from transformers import PreTrainedTokenizerFast

    # Not AutoTokenizer, which first reads the whole file again to choose a class; the tokens are the same.
    unreadable = "Transformers cannot read the tokenizer in the GGUF file", "Pass another tokenizer= to load()."
    where = {"gguf_file": path.name, "trust_remote_code": False}
    return ask(*unreadable, PreTrainedTokenizerFast.from_pretrained, path.parent, **where)


def _walk_gguf(path: Path, blob: mmap.mmap) -> GgufHeader:
    check_installed("A .gguf file", "gguf", "gguf", "accelerate")
    # gguf.GGUFReader would do, but makes several array views for every string of the vocabulary, 20 s for 262k tokens.
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    cursor = _Cursor(blob)
    if blob[: len(b"GGUF")] != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    cursor.skip(4)
    if (version := cursor.take("I")) not in (2, 3):
        raise ValueError(f"GGUF version {version}, where 2 and 3 are known")
    num_tensors, num_entries = cursor.take("Q"), cursor.take("Q")
    metadata, tokenizer_arrays = {}, []
    for _ in range(num_entries):
        start, key, kind = cursor.at, cursor.string(), cursor.take("I")
        metadata[key] = cursor.value(kind)
        if kind == 9 and key.startswith("tokenizer."):
            tokenizer_arrays.append((start, cursor.at))
    if not isinstance(metadata.get("general.architecture"), str):
        raise ValueError("it names no architecture")
    shapes, ends = {}, {}
    for _ in range(num_tensors):
        name = cursor.string()
        shapes[name] = [cursor.take("Q") for _ in range(cursor.take("I"))]
        block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(cursor.take("I"))]
        ends[name] = cursor.take("Q") + prod(shapes[name]) // block_size * block_bytes
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 16:
        raise ValueError(f"an alignment of {alignment!r}")
    data_start = -(-cursor.at // alignment) * alignment
    for name, end in ends.items():
        if data_start + end > len(blob):
            raise ValueError(f"tensor {name} ends {data_start + end - len(blob)} bytes past the end of the file")
    return GgufHeader(
        path=path,
        metadata={key: value for key, value in metadata.items() if value is not None},
        num_entries=num_entries,
        tokenizer_arrays=tokenizer_arrays,
        num_tensors=num_tensors,
        num_embeddings=shapes["token_embd.weight"][-1] if "token_embd.weight" in shapes else None,
        tensors_end=cursor.at,
        alignment=alignment,
        data_start=data_start,
    )


def _copy_without_vocabulary(header: GgufHeader, target: Path) -> None:
    """Writes the GGUF file again without the arrays of its tokenizer; weights and all other entries are the same."""
    with header.path.open("rb") as source, target.open("wb") as copy:
        copy.write(source.read(8))
        copy.write(struct.pack("<QQ", header.num_tensors, header.num_entries - len(header.tokenizer_arrays)))
        source.seek(copy.tell())
        for start, end in header.tokenizer_arrays:
            copy.write(source.read(start - source.tell()))
            source.seek(end)
        copy.write(source.read(header.tensors_end - source.tell()))
        copy.write(bytes(-copy.tell() % header.alignment))
        source.seek(header.data_start)
        shutil.copyfileobj(source, copy, CHUNK)
