"""The texts that an audit or a remedy reads: the first 16 calibrate, and the others are held out.

From a file they are windows, spread evenly over all of it. Those that calibrate are from its beginning and the others
from the rest; the cut between the two is at the end of a document, if one ends nearby.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sinkscope.arguments import AUDIT_LENGTH, AUDIT_SEQUENCES, CALIBRATION, SEPARATOR, check_batch
from sinkscope.audits.prefix import MOST_TOKENS, room_for_prefix
from sinkscope.errors import InputError
from sinkscope.models.loaded import LoadedModel
from sinkscope.models.prompts import Tokens, as_batch, check_one_length
from sinkscope.models.token_batches import TokenBatch, check_ids, context_length, token_batch
from sinkscope.models.tokenized_text import (
    first_ids,
    leading_ids,
    read_text,
    source_of,
    tokenizer_of,
    without_leading,
)
from sinkscope.tracing.overflow import overflow
from sinkscope.tracing.single_reader import evaluation_mode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

USUAL_LENGTH = 128
WRITTEN = "written by the model itself"
"""The source of texts, where no file is named."""
WHITE_SPACE = re.compile(r"\s")


def texts_to_measure(
    loaded: LoadedModel,
    text: Tokens | Path | None,
    *,
    bos: bool | None,
    length: int | None,
    num_sequences: int,
    seed: int,
    prefix: bool = False,
) -> TokenBatch:
    """The calibration texts and, after them, the held-out ones.

    With `prefix`, texts so long that they leave no room for one in the model's context are refused.
    """
    if text is not None and not isinstance(text, str | Path):
        if bos is not None:
            raise InputError(
                f"`bos={bos}` is for a text file, or for what the model writes itself, but ids begin as they are. "
                "Leave `bos` out."
            )
        batch = as_batch(loaded, text)
        check_one_length(batch, "losses are compared by position")
        if batch.num_sequences <= CALIBRATION + 1:
            raise InputError(
                f"There are {batch.num_sequences} texts, but at least {CALIBRATION + 2} are needed: {CALIBRATION} "
                "calibrate, and two or more are held out. Give more rows of ids."
            )
        if prefix:
            room_for_prefix(loaded.model, batch.length)
        return batch
    length = usual_length(loaded.model) if length is None else length
    if prefix:
        room_for_prefix(loaded.model, length)
    count = CALIBRATION + num_sequences
    if text is None:
        return _generate_texts(loaded, bos=bos, length=length, num_sequences=count, seed=seed)
    check_batch(f"text:{text}", length=length, num_sequences=count)
    return spread_batch(loaded, str(text), bos=bos, length=length, num_sequences=num_sequences)


def usual_length(model: Any) -> int:
    """The default number of tokens of a text: 128, or what leaves room for a prefix in a shorter context."""
    context = context_length(model)
    return USUAL_LENGTH if context is None else max(AUDIT_LENGTH, min(USUAL_LENGTH, context - MOST_TOKENS))


def _generate_texts(loaded: LoadedModel, *, bos: bool | None, length: int, num_sequences: int, seed: int) -> TokenBatch:
    """Texts that the model writes itself, each after two random tokens, or after BOS and one random token."""
    model: Any = loaded.model
    num_first = max(2, len(leading_ids(loaded, bool(bos))) + 1)
    first = token_batch(loaded, "random", bos=bos, length=num_first, num_sequences=num_sequences, seed=seed)

    def finite(ids_BT: Tensor, logits_BV: Tensor) -> Tensor:
        # Only the largest must be finite: `min_new_tokens` gives the end of a text a logit of minus infinity.
        if not logits_BV.amax(-1).isfinite().all():
            raise overflow(model, f"in the logits, at position {ids_BT.shape[1] - 1} of a text that it writes")
        return logits_BV

    with torch.random.fork_rng(), torch.no_grad(), evaluation_mode(model):
        torch.manual_seed(seed)
        ids_NT = model.generate(
            first.ids.to(model.get_input_embeddings().weight.device),
            attention_mask=torch.ones_like(first.ids),
            do_sample=True,
            top_k=0,
            top_p=1.0,
            temperature=1.0,
            min_new_tokens=length - num_first,
            max_new_tokens=length - num_first,
            logits_processor=[finite],
        )
    return TokenBatch(ids=ids_NT.cpu(), kind="given", seed=seed, leading_ids=first.leading_ids, source=WRITTEN)


def held_out_in_words(count: int, length: int, source: str | None) -> str:
    """The held-out texts in words: how many, how long and from where."""
    origin = "" if source is None else f", {source if source == WRITTEN else f'from {source}'}"
    return f"{count} held-out texts of {length} tokens{origin}"


def spread_batch(loaded: LoadedModel, name: str, *, bos: bool | None, length: int, num_sequences: int) -> TokenBatch:
    """16 windows from the beginning of a text file, to calibrate, and `num_sequences` from the rest, spread evenly."""
    tokenizer, (text, _) = tokenizer_of(loaded), read_text(name)
    leading, cut = leading_ids(loaded, bos), _cut(text, CALIBRATION / (CALIBRATION + num_sequences))
    parts = (*_parts(text[:cut], CALIBRATION), *_parts(text[cut:], num_sequences))
    rows = [[*leading, *_window(tokenizer, part, length - len(leading), leading)] for part in parts]
    if (shortest := min(map(len, rows))) < length:
        most = shortest * len(rows) // length - CALIBRATION
        ways = [f"`num_sequences={most}`"] * (most >= AUDIT_SEQUENCES)
        ways += [f"`length={shortest}`"] * (shortest >= AUDIT_LENGTH)
        advice = f"Use at most {' or '.join(ways)}, or a longer text." if ways else "Use a longer text."
        raise InputError(
            f"Each of {len(rows)} parts of {source_of(name)} needs {length} tokens, but one has {shortest}. {advice}"
        )
    ids = torch.tensor(rows)
    check_ids(loaded.model, ids)
    return TokenBatch(ids=ids, kind="text", leading_ids=leading, source=source_of(name))


def _cut(text: str, share: float) -> int:
    """Where a text is cut, after about that share of its characters.

    At the nearest end of a document, if both sides keep at least half of what they should have; else right there.
    """
    place = int(share * len(text))
    ends = [found.end() for found in re.finditer(re.escape(SEPARATOR), text)]
    near = [end for end in ends if abs(end - place) <= min(place, len(text) - place) / 2]
    return min(near, key=lambda end: abs(end - place), default=place)


def _parts(text: str, count: int) -> Iterator[str]:
    """The text in `count` parts of equal length, each of which begins with a whole word."""
    for number in range(count):
        start, end = (len(text) * place // count for place in (number, number + 1))
        space = WHITE_SPACE.search(text, start, end)
        yield text[space.start() if space else start : end]


def _window(tokenizer: PreTrainedTokenizerBase, part: str, size: int, leading: tuple[int, ...]) -> list[int]:
    """The first `size` ids of the first document in a part that is so long; fewer if none is.

    The first document of a part usually began before it. The others begin with their title pages.
    """
    longest: list[int] = []
    for document in part.split(SEPARATOR):

        def read(amount: int, text: str = document) -> tuple[str, bool]:
            return text[:amount], amount >= len(text)

        ids = without_leading(first_ids(tokenizer, read, size + len(leading)), leading)
        longest = max(longest, ids[:size], key=len)
        if len(longest) == size:
            break
    return longest
