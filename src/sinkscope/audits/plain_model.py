"""A model as a folder that transformers loads, which is tried before the folder appears. Decoders of sinkscope's own
need its import first, as their card says."""

from __future__ import annotations

from typing import Any

import torch

from sinkscope.errors import InputError
from sinkscope.models.checkpoint_checks import first_line
from sinkscope.models.loading import LoadedModel, quiet
from sinkscope.results.run_folder import RunFolder
from sinkscope.tracing.sole_reader import evaluation_mode


def write_plain(loaded: LoadedModel, folder: RunFolder) -> None:
    """Writes the model, and its tokenizer if it has one, into an open run folder."""
    model: Any = loaded.model
    with quiet():
        model.save_pretrained(folder.path)
        if loaded.tokenizer is not None:
            loaded.tokenizer.save_pretrained(folder.path)
    _check_plain(model, folder)


@torch.no_grad()
def _check_plain(model: Any, folder: RunFolder) -> None:
    """What was written must be the same function when transformers loads it."""
    from transformers import AutoModelForCausalLM

    ids = torch.arange(4)[None]
    try:
        with quiet():
            again: Any = AutoModelForCausalLM.from_pretrained(folder.path, dtype=model.dtype, local_files_only=True)
        with evaluation_mode(model):
            logits = model(ids.to(model.device)).logits.cpu()
        apart = float((again.eval()(ids).logits - logits).abs().max())
    except (OSError, ValueError, RuntimeError) as error:
        raise _not_plain(first_line(error)) from error
    if apart > 1e-3 * float(logits.abs().max()):
        raise _not_plain(f"logits that differ by {apart:.1e} when it is loaded again")


def _not_plain(found: str) -> InputError:
    return InputError(
        expected="a model that plain transformers can save and load",
        found=found,
        next_step="Choose a model of a family that transformers has, without parts of sinkscope's own",
    )
