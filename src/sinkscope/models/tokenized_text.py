"""What a tokenizer makes of a text, of a text file and of a chat, and the ids that it puts in front."""

from __future__ import annotations

import codecs
import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sinkscope.arguments import STANDARD_INPUT
from sinkscope.errors import InputError
from sinkscope.models.checkpoint_checks import ask, first_line
from sinkscope.models.loaded import LoadedModel, bos_id, find_bos
from sinkscope.user_paths import user_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NAME_A_TEXT = "Name a text file in UTF-8."
ANY_TEXT = "a A 1 . \u4e2d"
"""Whatever a tokenizer knows, some of it stays a token."""


def leading_ids(loaded: LoadedModel, bos: bool | None) -> tuple[int, ...]:
    """The ids that stand before a text: those that the tokenizer puts there.

    With bos=True also BOS if the tokenizer puts nothing there; with bos=False no ids.
    """
    if bos is False:
        return ()
    leading = () if loaded.tokenizer is None else _ids_in_front(loaded.tokenizer)
    return leading or ((bos_id(loaded),) if bos else ())


def without_leading(ids: list[int], leading: tuple[int, ...]) -> list[int]:
    """The ids of a text without those in front, if the text itself was written with them, as by a chat template."""
    return ids[len(leading) :] if tuple(ids[: len(leading)]) == leading else ids


def found_leading(model: Any, rows: Sequence[Tensor]) -> tuple[int, ...]:
    """The ids with which all these sequences begin, if they are what the tokenizer puts before a text, or BOS."""
    candidates: list[tuple[int, ...]] = []
    if (tokenizer := getattr(model, "tokenizer", None)) is not None:
        with contextlib.suppress(InputError):  # one that reads no text at all puts nothing before it
            candidates.append(_ids_in_front(tokenizer))
    if (bos := find_bos(model)) is not None:
        candidates.append((bos,))
    for leading in candidates:
        if leading and all(tuple(row[: len(leading)].tolist()) == leading for row in rows):
            return leading
    return ()


def _ids_in_front(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The ids that a tokenizer puts before a text, told from a text that it reads with and without them."""
    ids, text = text_ids(tokenizer, ANY_TEXT, special=True), text_ids(tokenizer, ANY_TEXT)
    starts = (start for start in reversed(range(len(ids))) if ids[start : start + len(text)] == text)
    if (start := next(starts, None)) is None:
        raise InputError(
            "This tokenizer makes other tokens of a text where it puts special ones around it, so those in front "
            "cannot be told from the text. Give `bos=False`, or ids."
        )
    return tuple(ids[:start])


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool = False) -> list[int]:
    """The ids of a text, with the special tokens around it or without."""
    problem = "The tokenizer cannot read this text"
    advice = "Give ids, or a model with another tokenizer: load(model, tokenizer=...)."
    try:
        # Without verbose=False the tokenizer warns that a text is longer than the model's context.
        encoding = ask(problem, advice, tokenizer, text, add_special_tokens=special, verbose=False)
    except BaseException as error:
        # What Rust raises when a search takes too long. Its class is in no module, so it is known by its name.
        if type(error).__name__ != "PanicException":
            raise
        raise InputError(f"{problem} ({first_line(error)}). {advice}") from error
    return encoding["input_ids"]


def chat_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """The ids of a chat, as the tokenizer's template writes it."""
    if not getattr(tokenizer, "chat_template", None):
        raise InputError("The tokenizer has no chat template to read messages with. Give the text itself, or ids.")
    return ask(
        "The chat template cannot write these messages",
        "Give each its `role` and `content`, in the order that the model expects.",
        lambda: tokenizer.apply_chat_template(list(messages), tokenize=True, return_dict=False),  # type: ignore[arg-type]
    )


def tokenizer_of(loaded: LoadedModel) -> PreTrainedTokenizerBase:
    """The tokenizer that came with a model."""
    if loaded.tokenizer is None:
        raise InputError(
            f"{loaded.name} has no tokenizer to read text with. Give ids or `tokens='random'`, or a model that has "
            "one: load(model, tokenizer=...)."
        )
    return loaded.tokenizer


def first_ids(tokenizer: PreTrainedTokenizerBase, read: Callable[[int], tuple[str, bool]], count: int) -> list[int]:
    """At least the first `count` ids of a text, as the tokenizer gives them for the whole text; all of a short one.

    `read(amount)` gives that much of the text's beginning, and whether it is all. A long text is not read to its end. A
    cut changes the tokens near it, so twice as much is read until the first `count` ids no longer change.
    """
    amount, before = 8 * count, []
    while True:
        text, is_all = read(amount)
        ids = text_ids(tokenizer, text)
        if is_all or (len(before) >= count and before[:count] == ids[:count]):
            return ids
        amount, before = 2 * amount, ids


@cache
def _standard_input() -> bytes:
    """All bytes of standard input, kept because a text is read more than once."""
    return sys.stdin.buffer.read()


def read_text(name: str, num_bytes: int | None = None) -> tuple[str, bool]:
    """(the text in the file's first bytes, or in all of them, whether that is all of it)."""
    source = source_of(name)
    limit = None if num_bytes is None else num_bytes + 1
    try:
        if name == STANDARD_INPUT:
            content = _standard_input()[:limit]
        else:
            with user_path(name).open("rb") as file:  # bytes, so that line endings stay as they are
                content = file.read(limit)
        is_all = num_bytes is None or len(content) <= num_bytes
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(content[:num_bytes], final=is_all)
    except (UnicodeDecodeError, OSError) as error:
        reason = "" if isinstance(error, OSError) else f": it is not UTF-8 at byte {error.start}"
        raise InputError(f"Cannot read {source}{reason}. {NAME_A_TEXT}") from error
    if "\0" in text:
        raise InputError(f"Cannot read {source}: it is a binary file. {NAME_A_TEXT}")
    if is_all and not text.strip():
        raise InputError(f"There is no text in {source}: it is empty. {NAME_A_TEXT}")
    return text, is_all


def source_of(name: str) -> str:
    """What a text file is called in sentences."""
    return "standard input" if name == STANDARD_INPUT else user_path(name).name
