"""A GGUF file as a model and a tokenizer of transformers, dequantised."""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sinkscope.models.checkpoint_checks import ask, check_causal, check_loading_info
from sinkscope.models.gguf_header import GgufHeader, copy_without_vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

GGUF_COPY_LIMIT = 2 << 30
"""Bytes up to which a GGUF file is copied without its vocabulary, which transformers reads twice at 20 us a token."""


def load_gguf(header: GgufHeader, *, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

    path = header.path
    what = f"a GGUF architecture that transformers can read, not {header.metadata['general.architecture']!r}"
    next_step = "Use the model's safetensors checkpoint instead"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder, known = path.parent, {}
        size = path.stat().st_size
        if header.num_embeddings and size < min(GGUF_COPY_LIMIT, shutil.disk_usage(scratch).free // 2):
            copy_without_vocabulary(header, Path(scratch, path.name))
            # transformers counts the vocabulary for this where the file does not say it.
            folder, known = Path(scratch), {"vocab_size": header.num_embeddings}
        config = ask(
            what, next_step, AutoConfig.from_pretrained, folder, gguf_file=path.name, trust_remote_code=False, **known
        )
        check_causal(config, path.name)
        # Its progress bar cannot be switched off otherwise.
        with contextlib.redirect_stderr(io.StringIO()):
            model, info = ask(
                what,
                next_step,
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
    from transformers import PreTrainedTokenizerFast

    # Not AutoTokenizer, which first reads the whole file again to choose a class; the tokens are the same.
    readable = "a tokenizer that transformers can read in the GGUF file", "Pass another tokenizer= to load()"
    where = {"gguf_file": path.name, "trust_remote_code": False}
    return ask(*readable, PreTrainedTokenizerFast.from_pretrained, path.parent, **where)
