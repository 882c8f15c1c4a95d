"""Loads a tokenizer, and refuses one that could not read a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinkscope.errors import InputError
from sinkscope.models.checkpoint_checks import ask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_GROWTH = 1000.0
"""How many times as long as a text its replacement may be."""


def load_tokenizer(source: Any, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase | None:
    """The tokenizer in a folder, or an object as it is; None stays None."""
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    if source is None:
        return None
    unreadable = (
        "Transformers cannot read the tokenizer in this folder",
        "Fetch the tokenizer again, or remove its files to go without.",
    )
    if not isinstance(source, str | Path):
        if not isinstance(source, PreTrainedTokenizerBase):
            raise InputError(
                f"`tokenizer` is a {type(source).__name__}. Pass a tokenizer of transformers, such as "
                "PreTrainedTokenizerFast(tokenizer_object=...), or the folder of one."
            )
        if (backend := getattr(source, "backend_tokenizer", None)) is not None:
            _check_replacements(json.loads(backend.to_str()))
    elif (file := Path(source) / "tokenizer.json").is_file():
        # Before it is loaded: its added tokens are replaced then.
        ask(*unreadable, lambda: _check_replacements(json.loads(file.read_bytes())))
    if isinstance(source, str | Path):
        source = ask(
            *unreadable,
            AutoTokenizer.from_pretrained,
            Path(source),
            local_files_only=True,
            trust_remote_code=trust_remote_code,
        )
    longest = source.model_max_length
    if isinstance(longest, bool) or not isinstance(longest, int | float):
        raise InputError(
            f"The tokenizer's `model_max_length` is {longest!r:.40}, and no number. "
            "Correct it in tokenizer_config.json, or remove it there."
        )
    return source


def _check_replacements(described: Any) -> None:
    """Refuses replacements that feed each other: 40 of "a" by "aa" make one letter a terabyte."""
    for part in ("normalizer", "decoder"):
        if _growth(described.get(part)) > MOST_GROWTH:
            raise InputError(
                f"The replacements in the {part} of this tokenizer make a text over {MOST_GROWTH:g} times as long. "
                "Fetch the tokenizer again, or pass another: load(model, tokenizer=...)."
            )


def _growth(part: Any) -> float:
    """How many times as long a text becomes at most.

    Backwards from the last replacement: the final length of each character. What is replaced is as long, in the end,
    as what stands for it.
    """
    default: float = 1.0
    lengths: dict[str, float] = {}
    for rule in reversed(_replacements(part)):
        pattern, content = rule["pattern"], rule["content"]
        final = sum(lengths.get(character, default) for character in content)
        if text := pattern.get("String"):
            for character in text:
                lengths[character] = max(lengths.get(character, default), final / len(text))
        else:  # a regular expression may match anywhere, and also between two characters
            default += final
            lengths = {character: length + final for character, length in lengths.items()}
    return max(default, *lengths.values(), 0.0)


def _replacements(part: Any) -> list[dict[str, Any]]:
    if not isinstance(part, dict):
        return []
    if part.get("type") == "Replace":
        return [part]
    members = [member for key in ("normalizers", "decoders") for member in part.get(key) or ()]
    return [rule for member in members for rule in _replacements(member)]
