"""Sequences of a text for a study: several sets, each of other documents.

The texts of the package lie in `sinkscope/texts`, with their sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest
from pathlib import Path

import torch

from sinkscope.arguments import SEPARATOR, STUDY_LENGTH
from sinkscope.errors import InputError
from sinkscope.models.loading import LoadedModel
from sinkscope.models.token_batches import TokenBatch, check_ids
from sinkscope.models.tokenized_text import leading_ids, read_text, source_of, text_ids, tokenizer_of

SHIPPED = Path(__file__).parent.parent / "texts"
PROSE, CODE = SHIPPED / "prose.txt", SHIPPED / "code.txt"
MOST_READ = 20_000_000
"""Bytes of a text file that are read."""
CHARACTERS = 20
"""That many characters of a document are read for each token that it should give."""


def text_batches(
    loaded: LoadedModel, file: str | Path, *, bos: bool | None, length: int, counts: Sequence[int]
) -> list[TokenBatch]:
    """Batches of so many sequences, no two of the same document where the text has enough of them.

    If the text is too short for sequences of `length` tokens, they are shorter.
    """
    tokenizer, leading = tokenizer_of(loaded), leading_ids(loaded, bos)
    text, _ = read_text(str(file), MOST_READ)
    sets = []
    for documents, count in zip(_dealt(_documents(text, len(counts)), counts), counts, strict=True):
        most = CHARACTERS * length * (1 + count // len(documents))
        sets.append([text_ids(tokenizer, document[:most]) for document in documents])
    window = length - len(leading)
    while any(sum(len(ids) // window for ids in each) < count for each, count in zip(sets, counts, strict=True)):
        window -= 1
        if window + len(leading) < STUDY_LENGTH:
            raise InputError(
                f"{source_of(str(file))} is too short for {sum(counts)} sequences of {STUDY_LENGTH} tokens or more, in "
                f"{len(counts)} sets of different documents. Give a longer text, or fewer sequences."
            )
    batches = []
    for each, count in zip(sets, counts, strict=True):
        rows = [[*leading, *ids] for ids in _windows(each, window)[:count]]
        ids_BT = torch.tensor(rows)
        check_ids(loaded.model, ids_BT)
        batches.append(TokenBatch(ids=ids_BT, kind="text", leading_ids=leading, source=source_of(str(file))))
    return batches


def _documents(text: str, least: int) -> list[str]:
    """The documents of a text; of one with fewer than `least`, as many parts of equal length."""
    documents = [document.strip() for document in text.split(SEPARATOR) if document.strip()]
    if len(documents) >= least:
        return documents
    whole = "\n".join(documents)
    return [whole[len(whole) * part // least : len(whole) * (part + 1) // least] for part in range(least)]


def _dealt(documents: Sequence[str], counts: Sequence[int]) -> list[list[str]]:
    """The documents dealt to as many sets as there are counts, in proportion to these."""
    sets: list[list[str]] = [[] for _ in counts]
    sizes = [0] * len(counts)
    for document in documents:
        poorest = min(range(len(counts)), key=lambda number: (sizes[number] / counts[number], number))
        sets[poorest].append(document)
        sizes[poorest] += len(document)
    return sets


def _windows(documents: Sequence[list[int]], size: int) -> list[list[int]]:
    """The first window of each document, then the second of each that has one, and so on."""
    by_document = [[ids[at : at + size] for at in range(0, len(ids) - size + 1, size)] for ids in documents]
    return [window for window in chain.from_iterable(zip_longest(*by_document)) if window is not None]
