"""Texts as batches of token ids: one prompt, or several of any length.

What is averaged by position needs sequences of one length. Texts of unequal length are cut to the shortest for it, and
kept whole beside that (`TokenBatch.whole`), so that each can be read as it would be alone. Nothing is padded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sinkscope.errors import InputError
from sinkscope.models.loading import LoadedModel, bos_id
from sinkscope.models.token_batches import (
    TokenBatch,
    check_ids,
    context_length,
    given_batch,
    tokenizer_adds_bos,
    tokenizer_of,
)

MOST_IN_A_NAME = 256
"""Characters of a text that is looked up as a file's name."""
Tokens = TokenBatch | Tensor | str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | Mapping[str, Any]
"""What a model can be given to read: a batch, a text, texts, ids, or what a tokenizer returned."""


def as_batch(loaded: LoadedModel, tokens: Tokens) -> TokenBatch:
    """What is given, as a batch."""
    if isinstance(tokens, TokenBatch):  # perhaps made for another model
        for ids in (tokens.ids, *tokens.whole):
            check_ids(loaded.model, ids)
        return tokens
    if isinstance(tokens, str):
        return prompt_batch(loaded, [tokens])
    if isinstance(tokens, list | tuple) and tokens and all(isinstance(text, str) for text in tokens):
        return prompt_batch(loaded, tokens)  # type: ignore[arg-type]
    return given_batch(tokens, model=loaded.model)


def prompt_batch(loaded: LoadedModel, texts: Sequence[str], *, bos: bool | None = None) -> TokenBatch:
    """The tokens of some texts, at least two each; bos=None means what the tokenizer itself does with a text."""
    tokenizer = tokenizer_of(loaded)
    bos = tokenizer_adds_bos(loaded) if bos is None else bos
    first = [bos_id(loaded)] if bos else []
    whole: list[Tensor] = []
    if not texts:
        raise InputError(expected="a text, or several", found="none", next_step="Give one")
    for text in texts:
        if _names_a_file(text):
            file = text.removeprefix("text:")
            raise InputError(
                expected="a text itself",
                found=f"the name of a file, {file!r}",
                next_step=f"Give `tokens='text:{file}'`, or in Python `token_batch(model, 'text:{file}')`",
            )
        if any("\ud800" <= character <= "\udfff" for character in text):  # what bytes that are no UTF-8 become
            raise InputError(
                expected="text in UTF-8",
                found=f"other bytes in {text[:40]!r}",
                next_step="Save or paste it as UTF-8, or give the text to `tokens` as a file",
            )
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # type: ignore[assignment]
        whole.append(torch.tensor([*first, *ids], dtype=torch.int64))
        if len(whole[-1]) < 2:
            raise InputError(
                expected="a text of at least 2 tokens",
                found=f"{len(whole[-1])} in {text[:40]!r}",
                next_step="Give a longer text",
            )
        if (most := context_length(loaded.model)) is not None and len(whole[-1]) > most:
            raise InputError(
                expected=f"a text of at most {most} tokens, the model's context",
                found=f"{len(whole[-1])} in {text[:40]!r}",
                next_step="Give a shorter text",
            )
        check_ids(loaded.model, whole[-1])
    lengths = {len(ids) for ids in whole}
    return TokenBatch(
        ids=torch.stack([ids[: min(lengths)] for ids in whole]),
        kind="text",
        bos=bos,
        whole=tuple(whole) if len(lengths) > 1 else (),
    )


def _names_a_file(text: str) -> bool:
    """Whether a text is more likely meant as the name of a file than as a text."""
    name = text.removeprefix("text:")
    try:
        return len(name) < MOST_IN_A_NAME and Path(name).is_file()
    except (OSError, ValueError):  # no name that a file could have
        return False


def check_one_length(batch: TokenBatch, why: str) -> None:
    """Refuses texts of unequal length, which are cut to the shortest, where something cannot go by each alone."""
    if batch.whole:
        raise InputError(
            expected=f"texts of one length, since {why}",
            found=f"{', '.join(str(len(ids)) for ids in batch.whole[:8])} tokens",
            next_step="Give one text at a time",
        )
