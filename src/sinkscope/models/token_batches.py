"""Batches of token ids: uniformly random, from a text, one token repeated, or the caller's own.

Every sequence of a batch has the same length, so there is no padding anywhere; `prompts` makes batches of texts.
B sequences, T positions.
"""

from __future__ import annotations

import codecs
import reprlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from sinkscope.arguments import STANDARD_INPUT, check_batch
from sinkscope.errors import InputError
from sinkscope.models.checkpoint_checks import CHUNK, each_weight
from sinkscope.models.loaded import ModelLike
from sinkscope.models.loading import LoadedModel, bare_model, bos_id, load, text_config
from sinkscope.runtime import check_torch_defaults
from sinkscope.user_paths import user_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenBatch:
    """Token ids on the CPU, and how they came about."""

    ids: Int64[Tensor, "B T"]
    kind: Literal["random", "text", "repeat", "given"]
    seed: int | None = None
    bos: bool = False
    source: str | None = None
    """The name of the text file, without its folder."""
    whole: tuple[Tensor, ...] = ()
    """Texts of unequal length, of which `ids` holds the beginnings, as long as the shortest; empty where all are as
    long as `ids`."""
    left_out: int | None = None
    """For random tokens: how many ids, special ones aside, were left out because the tokenizer has no token for
    them or their embedding is zero or equal to another's."""

    @property
    def num_sequences(self) -> int:
        return self.ids.shape[0]

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    @property
    def shared_first_token(self) -> bool:
        """Whether all sequences begin with the same token: position 0 then has no variance across the batch."""
        return bool((self.ids[:, 0] == self.ids[0, 0]).all())

    def describe(self) -> dict[str, Any]:
        """The entry `tokens` of summary.json."""
        return {
            "kind": self.kind,
            "length": self.length,
            "count": self.num_sequences,
            "seed": self.seed,
            "bos": self.bos,
            **({"whole": [len(ids) for ids in self.whole]} if self.whole else {}),
            **({} if self.left_out is None else {"left_out": self.left_out}),
        }


def token_batch(
    model: ModelLike,
    tokens: str = "random",
    *,
    bos: bool | None = None,
    length: int = 64,
    num_sequences: int = 32,
    seed: int = 0,
) -> TokenBatch:
    """`num_sequences` sequences of `length` tokens, a BOS token at position 0 included where `bos` asks for one.

        batch = sinkscope.token_batch(model, "text:book.txt", length=128)

    bos=None means no BOS for random and repeated tokens, and for text what the tokenizer itself does with a text.
    Random tokens are uniform over the vocabulary without special and unused ids; sequence i depends on the seed and i
    alone, and with BOS its later positions are the ones it has without. The global random state is neither read nor
    changed.
    """
    return batch_with_others(model, tokens, bos=bos, length=length, num_sequences=num_sequences, seed=seed)


def batch_with_others(
    model: ModelLike,
    tokens: str,
    *,
    bos: bool | None,
    length: int,
    num_sequences: int,
    seed: int,
    others: int = 0,
    least: tuple[int, int] = (2, 1),
) -> TokenBatch:
    """A batch as `token_batch` makes it, with `others` more sequences after it, which calibrate.

    `least`: the length and the number of sequences that the caller needs, so that no less is advised for a short text.
    """
    check_torch_defaults()
    kind, argument = check_batch(tokens, length=length, num_sequences=num_sequences + others, seed=seed)
    loaded = load(model)
    _check_length(loaded.model, length)
    if bos is None:
        bos = kind == "text" and tokenizer_adds_bos(loaded)
    first = None
    if bos:
        first = bos_id(loaded)
        _check_vocabulary(torch.tensor([first]), num_embeddings(loaded.model))
    source = left_out = None
    if kind == "random":
        ids, left_out = _random_ids(loaded, length, num_sequences + others, seed)
    elif kind == "repeat":
        ids = _repeated_id(loaded, argument).expand(num_sequences + others, length).clone()
    else:
        source, total, window = source_of(argument), num_sequences + others, length - bos
        read = partial(read_text, argument)
        text = torch.tensor(first_ids(tokenizer_of(loaded), read, total * window), dtype=torch.int64)
        _check_vocabulary(text, num_embeddings(loaded.model))
        if total * window > len(text):
            beside = f" and {others} others" if others else ""
            raise InputError(
                expected=f"{total * window} tokens for {num_sequences} sequences of {length}{beside}",
                found=f"{len(text)} tokens in {source}",
                next_step=_shorter(len(text), window, num_sequences, bos=bos, others=others, least=least),
            )
        # Consecutive windows of the text.
        ids = torch.nn.functional.pad(text[: total * window].view(total, window), (int(bos), 0))
    if first is not None:
        ids[:, 0] = first
    seed_used = int(seed) if kind == "random" else None
    return TokenBatch(ids=ids, kind=kind, seed=seed_used, bos=bos, source=source, left_out=left_out)


def given_batch(ids: Any, attention_mask: Any = None, *, model: Any = None) -> TokenBatch:
    """The caller's own ids as a batch: a tensor, nested lists, or what a tokenizer returned.

    One sequence may come without its batch axis. With a model, ids and length are checked against it.
    """
    model = bare_model(model)
    if isinstance(ids, Mapping):
        if "input_ids" not in ids:
            raise InputError(
                expected="input_ids in the batch",
                found=", ".join(map(str, ids)) or "an empty mapping",
                next_step="Pass what the tokenizer returned",
            )
        attention_mask = ids.get("attention_mask") if attention_mask is None else attention_mask
        ids = ids["input_ids"]
    ids = _as_tensor(ids)
    if ids.shape == (0,):
        raise InputError(
            expected="token ids or texts",
            found="none",
            next_step="Pass a text, several, or the ids a tokenizer returns",
        )
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise InputError(
            expected="integer token ids",
            found=f"a tensor of {str(ids.dtype).removeprefix('torch.')}",
            next_step="Pass the ids a tokenizer returns",
        )
    if ids.ndim == 1:
        ids = ids[None]
    if ids.ndim != 2 or ids.shape[0] < 1 or ids.shape[1] < 2:
        raise InputError(
            expected="ids of shape [sequences, positions] with at least 2 positions",
            found=f"shape {list(ids.shape)}",
            next_step="Pass one row of ids for each sequence",
        )
    if attention_mask is not None:
        mask = _as_tensor(attention_mask)
        fits = mask.numel() == ids.numel()
        if not fits or not mask.bool().all():
            raise InputError(
                expected="sequences without padding",
                found=f"an attention mask {'with zeros' if fits else f'of shape {list(mask.shape)}'}",
                next_step="Pass sequences of equal length, one batch for each length, without a mask",
            )
    ids = ids.to(device="cpu", dtype=torch.int64, copy=True)
    begins_with_bos = False
    if model is not None:
        check_ids(model, ids)
        bos = getattr(text_config(model), "bos_token_id", None)
        begins_with_bos = isinstance(bos, int) and bool((ids[:, 0] == bos).all())
    return TokenBatch(ids=ids, kind="given", bos=begins_with_bos)


def special_ids(loaded: LoadedModel) -> set[int]:
    """Ids that stand for no text: the tokenizer's special tokens, and BOS, EOS and padding of the configurations."""
    special: set[int] = set()
    if loaded.tokenizer is not None:
        special.update(loaded.tokenizer.all_special_ids)
        added = getattr(loaded.tokenizer, "added_tokens_decoder", {})
        special.update(token_id for token_id, token in added.items() if token.special)
    for config in (text_config(loaded.model), getattr(loaded.model, "generation_config", None)):
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(config, key, None)
            # What is no number is no id: these files come from strangers.
            special.update(each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int))
    return special


def _random_ids(loaded: LoadedModel, length: int, num_sequences: int, seed: int) -> tuple[Int64[Tensor, "B T"], int]:
    """(ids, how many of the vocabulary were left out beside the special ones)."""
    ordinary = torch.ones(num_embeddings(loaded.model), dtype=torch.bool)
    ordinary[[token_id for token_id in special_ids(loaded) if 0 <= token_id < len(ordinary)]] = False
    used = ordinary & _used_ids(loaded)
    choices = used.nonzero()[:, 0]
    if not len(choices):
        raise InputError(
            expected="ordinary tokens in the vocabulary",
            found="only special tokens, unused ones, and ones that share an embedding",
            next_step="Choose another model, or give ids or a text",
        )
    generator = torch.Generator().manual_seed(int(seed))
    # Row by row: a row's numbers then never depend on how many rows follow.
    rows = [torch.randint(len(choices), (length,), generator=generator) for _ in range(num_sequences)]
    return choices[torch.stack(rows)], int(ordinary.sum() - used.sum())


def _used_ids(loaded: LoadedModel) -> Bool[Tensor, " V"]:
    """Which ids stand for a token and have an embedding of their own: padded vocabularies have unused rows."""
    # Rows are equal where their products with a random vector are; a zero row's product is zero.
    _, weight_VE = next(each_weight(loaded.model.get_input_embeddings()))
    generator = torch.Generator().manual_seed(0)
    direction_E = torch.randn(weight_VE.shape[1], generator=generator, dtype=torch.float64).to(weight_VE.device)
    rows_at_once = max(1, CHUNK // weight_VE.shape[1])
    product_V = torch.cat([(rows.double() * direction_E).sum(1) for rows in weight_VE.split(rows_at_once)]).cpu()
    _, group_V, sizes = product_V.unique(return_inverse=True, return_counts=True)
    used_V = (product_V != 0) & (sizes[group_V] == 1)
    if loaded.tokenizer is not None:
        has_token_V = torch.zeros_like(used_V)
        has_token_V[[token_id for token_id in loaded.tokenizer.get_vocab().values() if token_id < len(used_V)]] = True
        used_V &= has_token_V
    return used_V


def _repeated_id(loaded: LoadedModel, argument: str) -> Int64[Tensor, ""]:
    token = torch.tensor(int(argument))
    _check_vocabulary(token, num_embeddings(loaded.model))
    return token


def _shorter(num_ids: int, window: int, num_sequences: int, *, bos: bool, others: int, least: tuple[int, int]) -> str:
    """What to ask for of a text that has too few tokens."""
    least_length, least_sequences = least
    most, longest = num_ids // window - others, num_ids // (num_sequences + others) + bos
    ways = [f"`num_sequences={most}`"] * (most >= least_sequences) + [f"`length={longest}`"] * (longest >= least_length)
    longest = num_ids // (least_sequences + others) + bos
    if not ways and longest >= least_length:
        ways = [f"`length={longest}` with `num_sequences={least_sequences}`"]
    return f"Use at most {' or '.join(ways)}, or a longer text" if ways else "Use a longer text"


def source_of(name: str) -> str:
    """A text file as it is called in words."""
    return "standard input" if name == STANDARD_INPUT else user_path(name).name


def tokenizer_of(loaded: LoadedModel) -> PreTrainedTokenizerBase:
    """The tokenizer that came with a model."""
    if loaded.tokenizer is None:
        raise InputError(
            expected="a tokenizer, to read text with",
            found=f"none with {loaded.name}",
            next_step="Give ids or `tokens='random'`, or a model that has one: load(model, tokenizer=...)",
        )
    return loaded.tokenizer


def first_ids(tokenizer: PreTrainedTokenizerBase, read: Callable[[int], tuple[str, bool]], wanted: int) -> list[int]:
    """At least the first `wanted` ids of a text, as the tokenizer gives them for the whole text; all of a short one.

    `read` gives so much of the text's beginning, and whether that is all. A long text is not read to its end. A cut
    changes the tokens near it, so twice as much is read until the wanted ones stay as they are.
    """
    amount, before = 8 * wanted, []
    while True:
        text, is_all = read(amount)
        # Without verbose=False the tokenizer warns that a text is longer than the model's context.
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # type: ignore
        if is_all or (len(before) >= wanted and before[:wanted] == ids[:wanted]):
            return ids
        amount, before = 2 * amount, ids


@cache
def _standard_input() -> bytes:
    """All of it, kept: a text is read more than once."""
    return sys.stdin.buffer.read()


def read_text(name: str, num_bytes: int | None = None) -> tuple[str, bool]:
    """(the text in the file's first bytes, or in all of them, whether that is all of it)."""
    source, next_step = source_of(name), "Name a text file"
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
        reason = "cannot be read" if isinstance(error, OSError) else f"is not, at byte {error.start}"
        raise InputError(expected="text in UTF-8", found=f"{source}, which {reason}", next_step=next_step) from error
    if "\0" in text:
        raise InputError(expected="text in UTF-8", found=f"{source}, a binary file", next_step=next_step)
    if is_all and not text.strip():
        raise InputError(expected="a text file with text in it", found=f"{source}, empty", next_step=next_step)
    return text, is_all


def tokenizer_adds_bos(loaded: LoadedModel) -> bool:
    """Whether the tokenizer puts a BOS token before a text."""
    if loaded.tokenizer is None or loaded.tokenizer.bos_token_id is None:
        return False
    return loaded.tokenizer("a")["input_ids"][:1] == [loaded.tokenizer.bos_token_id]


def num_embeddings(model: Any) -> int:
    """How many ids a model has embeddings for."""
    return model.get_input_embeddings().weight.shape[0]


def context_length(model: Any) -> int | None:
    """The most tokens that a model's configuration allows; None where it does not say."""
    config = text_config(model)
    limits = [getattr(config, key, None) for key in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")]
    return next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)


def check_ids(model: Any, ids: Tensor) -> None:
    """Refuses ids that a model has no embedding for, and more of them in a sequence than its context."""
    _check_vocabulary(ids, num_embeddings(model))
    _check_length(model, ids.shape[-1])


def _check_length(model: Any, length: int) -> None:
    context = context_length(model)
    if context is not None and length > context:
        raise InputError(
            expected=f"at most {context} tokens, the model's context",
            found=f"`length={length}`",
            next_step=f"Give `length={context}` or less",
        )


def _check_vocabulary(ids: Tensor, num_embeddings: int) -> None:
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < num_embeddings:
        bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise InputError(
            expected=f"token ids from 0 to {num_embeddings - 1}",
            found=str(bad),
            next_step="Use an id, or a tokenizer, of this model's vocabulary",
        )


def _as_tensor(values: Any) -> Tensor:
    try:
        if isinstance(values, list | tuple) and values and all(isinstance(row, Tensor) for row in values):
            return torch.stack(list(values))
        return torch.as_tensor(values)
    except (ValueError, TypeError, RuntimeError) as error:
        lengths = {len(row) for row in values if hasattr(row, "__len__")} if isinstance(values, list | tuple) else ()
        if len(lengths) > 1:
            raise InputError(
                expected="sequences of equal length",
                found=f"rows of {min(lengths)} to {max(lengths)} ids",
                next_step="Pass one batch for each length",
            ) from error
        raise InputError(
            expected="texts or token ids",
            found=reprlib.repr(values),
            next_step="Pass a text, several, or the ids a tokenizer returns",
        ) from error
