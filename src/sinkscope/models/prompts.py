"""Texts and chats as batches of token ids: one prompt, or several of any length.

An average by position needs sequences of one length. So texts of unequal length are cut to the shortest, and also kept
whole (`TokenBatch.whole`), so that each can be read as it would be alone. Nothing is padded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sinkscope.errors import InputError
from sinkscope.models.given_ids import given_batch
from sinkscope.models.loaded import LoadedModel
from sinkscope.models.token_batches import TokenBatch, batch_of_rows, check_ids, context_length
from sinkscope.models.tokenized_text import (
    chat_ids,
    found_leading,
    leading_ids,
    text_ids,
    tokenizer_of,
    without_leading,
)

MOST_IN_A_NAME = 256
"""Characters of a text that is looked up as a file's name."""
Chat = Sequence[Mapping[str, Any]]
"""Messages, each with its role and content."""
Tokens = TokenBatch | Tensor | str | Sequence[str] | Chat | Sequence[int] | Sequence[Sequence[Any]] | Mapping[str, Any]
"""What a model can be given to read: a batch, a text, texts, chats, ids, or what a tokenizer returned."""


def as_batch(loaded: LoadedModel, tokens: Tokens, *, with_images: bool = False) -> TokenBatch:
    """Whatever a model can be given to read, as a batch that this model can read."""
    if isinstance(tokens, TokenBatch):  # checked, as it may have been made for another model
        for ids in (tokens.ids, *tokens.whole):
            check_ids(loaded.model, ids)
        return tokens
    if isinstance(tokens, str):
        return prompt_batch(loaded, [tokens])
    if isinstance(tokens, list | tuple) and tokens and (_is_chat(tokens) or all(map(_is_text, tokens))):
        return prompt_batch(loaded, tokens)  # type: ignore[arg-type]
    return given_batch(tokens, model=loaded, with_images=with_images)


def prompt_batch(
    loaded: LoadedModel, texts: Sequence[str] | Chat | Sequence[Chat], *, bos: bool | None = None
) -> TokenBatch:
    """The tokens of some texts or chats, at least two each.

    bos=None does what the tokenizer does with a text. A text that already begins with the ids in front gets them once,
    and a chat has them from its template.
    """
    tokenizer = tokenizer_of(loaded)
    leading = leading_ids(loaded, bos)
    several: Sequence[Any] = [texts] if _is_chat(texts) else texts
    rows: list[Tensor] = []
    if not several:
        raise InputError("Give at least one text.")
    for text in several:
        if isinstance(text, str):
            _check_text(text)
            ids = [*leading, *without_leading(text_ids(tokenizer, text), leading)]
        else:
            ids = chat_ids(tokenizer, text)
        name = repr(text if isinstance(text, str) else text[0].get("content"))[:40]
        if len(ids) < 2:
            raise InputError(f"A text needs at least 2 tokens, and {name} has {len(ids)}. Give a longer text.")
        if (most := context_length(loaded.model)) is not None and len(ids) > most:
            raise InputError(
                f"A text may have at most {most} tokens, the model's context, and {name} has {len(ids)}. "
                "Give a shorter text."
            )
        rows.append(torch.tensor(ids, dtype=torch.int64))
        check_ids(loaded.model, rows[-1])
    return batch_of_rows(rows, kind="text", leading_ids=found_leading(loaded, rows))


def _is_chat(tokens: Any) -> bool:
    """Whether these are the messages of a chat."""
    return isinstance(tokens, list | tuple) and bool(tokens) and all(isinstance(message, Mapping) for message in tokens)


def _is_text(value: Any) -> bool:
    """Whether this is a text or a chat."""
    return isinstance(value, str) or _is_chat(value)


def _check_text(text: str) -> None:
    """Refuses the name of a file in the place of a text, and a text that is not UTF-8."""
    if _names_a_file(text):
        file = text.removeprefix("text:")
        raise InputError(
            f"A text was expected, but {file!r} is the name of a file. Give `tokens='text:{file}'`, or in Python "
            f"`token_batch(model, 'text:{file}')`."
        )
    if any("\ud800" <= character <= "\udfff" for character in text):  # what Python makes of bytes that are not UTF-8
        raise InputError(
            f"The text {text[:40]!r} is not UTF-8. Save or paste it as UTF-8, or give the text to `tokens` as a file."
        )


def _names_a_file(text: str) -> bool:
    """Whether a text is more likely meant as the name of a file than as a text."""
    name = text.removeprefix("text:")
    try:
        return len(name) < MOST_IN_A_NAME and Path(name).is_file()
    except (OSError, ValueError):  # no name that a file could have
        return False


def check_one_length(batch: TokenBatch, why: str) -> None:
    """Refuses texts of unequal length; `why` ends the sentence "The texts must have one length, since ..."."""
    if batch.whole:
        raise InputError(
            f"The texts must have one length, since {why}, and they have "
            f"{', '.join(str(len(ids)) for ids in batch.whole[:8])} tokens. Give one text at a time."
        )
