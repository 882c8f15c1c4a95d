"""Text to token shards: trains a byte-level BPE on the training documents and encodes every document with it.

Validation is held out by document, never more than twice the share asked for, in characters (the share in tokens is a
little above or below). Which documents are held out depends on the texts and not on their order: one that occurs twice
is never on both sides, and the tokenizer is never trained on one that is held out.
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
"""Characters of the training documents that the BPE is trained on: merges hardly change beyond that."""
BATCH_CHARACTERS = 1 << 22
"""Characters encoded in one call, which the tokenizer spreads over the cores."""
MOST_HELD_OUT = 2
"""Times the share asked for: no more than this is held out."""
MOST_CHARACTERS_PER_TOKEN = 32
"""With a bound on tokens, no more text than this a token is read: for the BPE, to choose what to hold out, and to find
it again."""


def counted(number: int) -> str:
    """A count: whole below a million, then in millions."""
    return f"{number:,}" if number < 10**6 else f"{number / 1e6:,.1f} M"


def tokenize(config: TokenizeConfig, out: Path, *, overwrite: bool = False, progress: Say) -> TokenShards:
    """The shards written to `out`, with the tokenizer and a manifest of hashes; `out` appears whole or not at all."""
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
        most = dict.fromkeys(SPLITS, sys.maxsize)
        enough = dict(most)
        if config.max_tokens is not None:
            most["train"] = enough["train"] = config.max_tokens
            enough["validation"] = 0  # all that was given lies before the training text
            if not config.validation:
                # What is held out was drawn from more text than `max_tokens` lets in.
                enough["validation"] = int(config.validation_share * config.max_tokens)
                most["validation"] = int(MOST_HELD_OUT * config.validation_share * config.max_tokens)
        wanted = (pair for pair in _split_documents(config) if writer.num_tokens[pair[0]] < most[pair[0]])
        for batch in _batches(wanted):
            texts = [text for _, text in batch]
            encoded = tokenizer(texts, add_special_tokens=False, verbose=False, return_attention_mask=False)
            for (split, _), ids in zip(batch, encoded["input_ids"], strict=True):
                if room := max(0, most[split] - writer.num_tokens[split]):
                    writer.add(split, [*ids, end][:room])  # type: ignore[list-item]
            progress(f"{counted(writer.num_tokens['train'])} training tokens")
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
    """A byte-level BPE trained on the first `BPE_TRAINING_CHARACTERS` of the texts; it can encode any text."""
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
    """The tokenizer in a folder, or of a Hugging Face name; code that comes with it is never run."""
    from transformers import AutoTokenizer

    from sinkscope.models.checkpoint_checks import ask, looks_like_hub_name

    if not user_path(name).is_dir() and not looks_like_hub_name(str(name)):
        raise InputError(
            f"There is no folder {str(name)!r}, and it is not a Hugging Face name. Give another as `tokenizer`."
        )
    problem, advice = f"Transformers cannot read the tokenizer {str(name)!r}", "Give another as `tokenizer`."
    return ask(problem, advice, AutoTokenizer.from_pretrained, str(name), trust_remote_code=False)


def _split_documents(config: TokenizeConfig) -> Iterator[tuple[Split, str]]:
    if config.validation:
        held_out_draws = set()
        for text in documents(config.validation):
            held_out_draws.add(_draw(text))
            yield "validation", text
        for text in _texts(config):
            if _draw(text) not in held_out_draws:  # what is held out is not trained on
                yield "train", text
        return
    total, held_out = _chosen(config)
    # The last document waits: of it something is held out if nothing else was.
    waiting: str | None = None
    for text in _texts(config):
        if _draw(text) in held_out:
            yield "validation", text
            continue
        if waiting is not None:
            yield "train", waiting
        waiting = text
    if waiting is None:
        return
    if held_out:
        yield "train", waiting
        return
    most = int(MOST_HELD_OUT * config.validation_share * total)
    if len(waiting) <= most:
        yield "validation", waiting
        return
    # It is cut at the end of a line, else of a word, else anywhere; the alternative would be to refuse it.
    end = len(waiting) - int(config.validation_share * total)
    cuts = [waiting.rfind("\n", 0, end) + 1, waiting.rfind(" ", 0, end) + 1, end]
    cut = next(place for place in cuts if len(waiting) - place <= most)
    yield "train", waiting[:cut]
    if cut < len(waiting):
        yield "validation", waiting[cut:]


def _chosen(config: TokenizeConfig) -> tuple[int, set[int]]:
    """(characters of all documents, the draws of those to hold out).

    A document is drawn by its text alone, and left to training where it would take the held-out text over the bound.
    """
    total, sizes = 0, Counter[int]()
    for text in _texts(config):
        total += len(text)
        if (draw := _draw(text)) < config.validation_share * 2**64:
            sizes[draw] += len(text)
    held_out, size = set(), 0
    for draw in sorted(sizes):
        if size + sizes[draw] <= MOST_HELD_OUT * config.validation_share * total:
            held_out.add(draw)
            size += sizes[draw]
    return total, held_out


def _texts(config: TokenizeConfig) -> Iterator[str]:
    """The documents of `data`, as far as they are read."""
    left = sys.maxsize if config.max_tokens is None else MOST_CHARACTERS_PER_TOKEN * config.max_tokens
    for text in documents(config.data):
        yield text
        left -= len(text)
        if left < 0:
            return


def _draw(text: str) -> int:
    """A number below 2^64 that follows from the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _batches(split_documents: Iterator[tuple[Split, str]]) -> Iterator[list[tuple[Split, str]]]:
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
    seen = 0
    for text in texts:
        # Lines, since the trainer counts the words of one text at a time on one core.
        yield from text[: limit - seen].splitlines(keepends=True)
        seen += len(text)
        if seen >= limit:
            return
