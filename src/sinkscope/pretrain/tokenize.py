"""Text to token shards: trains a byte-level BPE on the training documents and encodes every document with it.

Validation text is held out by document. A hash of its text decides whether a document is held out. So the choice does
not depend on the order of the documents, a document that occurs twice is never on both sides, and the tokenizer is
never trained on held-out text. At most twice the chosen share is held out, in characters; in tokens the share is a
little larger or smaller.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sinkscope.arguments import SEPARATOR
from sinkscope.errors import InputError
from sinkscope.pretrain.text_sources import TokenizeConfig, documents
from sinkscope.pretrain.tokens import SPLITS, ShardWriter, Split, TokenShards, open_shards
from sinkscope.progress import Say
from sinkscope.results.run_folder import run_folder
from sinkscope.user_paths import user_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


BPE_TRAINING_CHARACTERS = 1 << 26
"""The BPE is trained on at most this many characters of the training documents; more hardly change its merges."""
BATCH_CHARACTERS = 1 << 22
"""Characters encoded in one call, which the tokenizer spreads over the cores."""
MOST_HELD_OUT = 2
"""At most this many times `validation_share` is held out: one long document could exceed the share by itself."""
MOST_CHARACTERS_PER_TOKEN = 32
"""With `max_tokens`, at most this many characters for each token are read: a streamed dataset may have no end."""


def count_text(number: int) -> str:
    """A count as text: whole below a million, else in millions."""
    return f"{number:,}" if number < 10**6 else f"{number / 1e6:,.1f} M"


def tokenize(config: TokenizeConfig, out: Path, *, overwrite: bool = False, progress: Say) -> TokenShards:
    """Writes shards, tokenizer and a manifest to `out`, which appears whole or not at all; returns the shards.

    The texts are read several times, once for each pass: to choose what is held out, to train the BPE, to encode. Only
    one batch of documents is in memory.
    """
    config.check()
    out = user_path(out)
    with run_folder(out, overwrite) as folder:
        if config.tokenizer is None:
            progress(f"training a byte-level BPE of {config.vocab_size} tokens")
            tokenizer = train_bpe((text for split, text in _split_documents(config) if split == "train"), config)
        else:
            tokenizer = load_tokenizer(config.tokenizer)
        end = tokenizer.eos_token_id
        if end is None:
            raise InputError(
                f"The tokenizer {config.tokenizer} has no end-of-text token. "
                "Choose another `tokenizer`, or leave it out to train one."
            )
        writer = ShardWriter(folder, len(tokenizer), config.shard_tokens)
        # By split: the most tokens to write, and how many are enough to stop reading.
        most = dict.fromkeys(SPLITS, sys.maxsize)
        enough = dict(most)
        if config.max_tokens is not None:
            most["train"] = enough["train"] = config.max_tokens
            enough["validation"] = 0  # texts given as `validation` come first and are written whole
            if not config.validation:
                # Held-out documents are chosen among 32 characters a token, more text than `max_tokens` lets in.
                enough["validation"] = int(config.validation_share * config.max_tokens)
                most["validation"] = int(MOST_HELD_OUT * config.validation_share * config.max_tokens)
        not_full = (pair for pair in _split_documents(config) if writer.num_tokens[pair[0]] < most[pair[0]])
        for batch in _batches(not_full):
            texts = [text for _, text in batch]
            encoded = tokenizer(texts, add_special_tokens=False, verbose=False, return_attention_mask=False)
            for (split, _), ids in zip(batch, encoded["input_ids"], strict=True):
                room = max(0, most[split] - writer.num_tokens[split])
                if room:
                    writer.add(split, [*ids, end][:room])  # type: ignore[list-item]
            progress(f"{count_text(writer.num_tokens['train'])} training tokens")
            if all(writer.num_tokens[split] >= enough[split] for split in SPLITS):
                break
        for split in SPLITS:
            if not writer.num_tokens[split]:
                advice = "Give more `data`" if most[split] else "Raise `max_tokens`"
                raise InputError(f"There is no {split} document. {advice}, or give other text as `validation`.")
        tokenizer.save_pretrained(folder.path)
        folder.write_yaml("config.yaml", config)
        writer.finish(end_of_text=end)
    return open_shards(out)


def train_bpe(texts: Iterator[str], config: TokenizeConfig) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on the first `BPE_TRAINING_CHARACTERS` of the texts.

    Its alphabet has all 256 bytes, so it can encode any text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_first_characters(texts, BPE_TRAINING_CHARACTERS), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=SEPARATOR, eos_token=SEPARATOR)


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer in a folder or at a Hugging Face name; code that comes with it is never run."""
    from transformers import AutoTokenizer

    from sinkscope.models.checkpoint_checks import ask, looks_like_hub_name

    if not user_path(name).is_dir() and not looks_like_hub_name(str(name)):
        raise InputError(
            f"There is no folder {str(name)!r}, and it is not a Hugging Face name. Give another as `tokenizer`."
        )
    problem, advice = f"Transformers cannot read the tokenizer {str(name)!r}", "Give another as `tokenizer`."
    return ask(problem, advice, AutoTokenizer.from_pretrained, str(name), trust_remote_code=False)


def _split_documents(config: TokenizeConfig) -> Iterator[tuple[Split, str]]:
    """(split, text) of every document, the same ones each time it is called."""
    if config.validation:
        held_out = set()
        for text in documents(config.validation):
            held_out.add(_hash(text))
            yield "validation", text
        for text in _texts(config):
            if _hash(text) not in held_out:
                yield "train", text
        return
    num_characters, held_out = _choose_held_out(config)
    # The last training document is kept back: if no document was held out, part of this one is.
    last: str | None = None
    for text in _texts(config):
        if _hash(text) in held_out:
            yield "validation", text
            continue
        if last is not None:
            yield "train", last
        last = text
    if last is None:
        return
    if held_out:
        yield "train", last
        return
    most = int(MOST_HELD_OUT * config.validation_share * num_characters)
    if len(last) <= most:
        yield "validation", last
        return
    # Cut at the end of a line, else of a word, else anywhere, so that a single document can be trained on too.
    end = len(last) - int(config.validation_share * num_characters)
    cuts = [last.rfind("\n", 0, end) + 1, last.rfind(" ", 0, end) + 1, end]
    cut = next(place for place in cuts if len(last) - place <= most)
    yield "train", last[:cut]
    if cut < len(last):
        yield "validation", last[cut:]


def _choose_held_out(config: TokenizeConfig) -> tuple[int, set[int]]:
    """(characters of all documents, the hashes of those to hold out).

    Hashes are uniform below 2^64, so those below `validation_share` of it make up that share of the documents. A
    document stays in training if it would take the held-out text over the bound.
    """
    num_characters, sizes = 0, Counter[int]()
    for text in _texts(config):
        num_characters += len(text)
        number = _hash(text)
        if number < config.validation_share * 2**64:
            sizes[number] += len(text)
    held_out, num_held_out = set(), 0
    for number in sorted(sizes):
        if num_held_out + sizes[number] <= MOST_HELD_OUT * config.validation_share * num_characters:
            held_out.add(number)
            num_held_out += sizes[number]
    return num_characters, held_out


def _texts(config: TokenizeConfig) -> Iterator[str]:
    """The documents of `data`; with `max_tokens`, no more than could be needed."""
    remaining = sys.maxsize if config.max_tokens is None else MOST_CHARACTERS_PER_TOKEN * config.max_tokens
    for text in documents(config.data):
        yield text
        remaining -= len(text)
        if remaining < 0:
            return


def _hash(text: str) -> int:
    """A number below 2^64 from the text alone; Python's own hash() differs from run to run."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _batches(split_documents: Iterator[tuple[Split, str]]) -> Iterator[list[tuple[Split, str]]]:
    """Documents in lists of about BATCH_CHARACTERS characters."""
    batch, size = [], 0
    for document in split_documents:
        batch.append(document)
        size += len(document[1])
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _first_characters(texts: Iterator[str], limit: int) -> Iterator[str]:
    """The first `limit` characters of the texts, line by line."""
    num_characters = 0
    for text in texts:
        # In lines, because the BPE trainer spreads texts over the cores, each whole to one core.
        yield from text[: limit - num_characters].splitlines(keepends=True)
        num_characters += len(text)
        if num_characters >= limit:
            return
