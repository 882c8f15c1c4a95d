"""Batches of token ids: uniformly random, from a text, or one token repeated.

Every sequence of a batch has the same length, so there is no padding anywhere; `prompts` makes batches of texts, and
`given_ids` of the caller's own ids.
B sequences, T positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from sinkscope.arguments import check_batch, check_context
from sinkscope.errors import InputError
from sinkscope.models.checkpoint_checks import CHUNK
from sinkscope.models.loaded import LoadedModel, ModelLike, text_config
from sinkscope.models.loading import load
from sinkscope.models.tokenized_text import (
    first_ids,
    leading_ids,
    read_text,
    source_of,
    tokenizer_of,
    without_leading,
)
from sinkscope.models.weights import each_weight
from sinkscope.runtime import check_torch_defaults


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenBatch:
    """Token ids on the CPU, and where they are from."""

    ids: Int64[Tensor, "B T"]
    kind: Literal["random", "text", "repeat", "given"]
    seed: int | None = None
    leading_ids: tuple[int, ...] = ()
    """The ids in front of every text: BOS, or all that the tokenizer puts there."""
    source: str | None = None
    """The name of the text file, without its folder."""
    whole: tuple[Tensor, ...] = ()
    """Texts of unequal length as a whole; `ids` then holds their beginnings, as long as the shortest. Else empty."""
    left_out: int | None = None
    """For random tokens: how many ids, beside special ones, are never drawn, since the tokenizer has no token for them
    or their embedding is zero or equal to another's."""
    beside: Mapping[str, Tensor] = field(default_factory=dict)
    """What the model is given beside ids where there are images: their pixels, and what says where they stand."""
    image_ids: tuple[int, ...] = ()
    """The ids in whose place image features stand; empty without images."""

    @property
    def bos(self) -> bool:
        """Whether BOS, or what the tokenizer puts in its place, stands before the text."""
        return bool(self.leading_ids)

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

    @property
    def image_tokens(self) -> Bool[Tensor, "B T"]:
        """At which positions image features stand."""
        return torch.isin(self.ids, torch.tensor(self.image_ids, dtype=self.ids.dtype))

    @property
    def told_apart(self) -> Int64[Tensor, "B T"]:
        """The ids, with -1 - n in place of that of the n-th image token of a sequence, which all have one id."""
        numbers_BT = self.image_tokens.long().cumsum(1) - 1
        return torch.where(self.image_tokens, -1 - numbers_BT, self.ids)

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
            **({"image_tokens": int(self.image_tokens.sum())} if self.image_ids else {}),
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
    """A batch of `num_sequences` sequences of `length` tokens each, BOS included.

        batch = sinkscope.token_batch(model, "text:book.txt", length=128)

    `tokens` is random, text:FILE or repeat:ID. bos=True puts in front what the tokenizer puts before a text, or the BOS
    token if it puts nothing; bos=False puts nothing. bos=None does with a text what the tokenizer does, and puts
    nothing before random and repeated tokens. Random tokens are uniform over the vocabulary without special and unused
    ids; sequence i depends only on the seed and on i, and has the same tokens with and without BOS. The global random
    state is neither read nor changed.
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
    """A batch as `token_batch` makes it, followed by `others` more sequences, which calibrate.

    `least` is the smallest length and number of sequences that the caller can use. If a text is too short, the advice
    in the refusal stays above them.
    """
    check_torch_defaults()
    kind, argument = check_batch(tokens, length=length, num_sequences=num_sequences + others, seed=seed)
    loaded = load(model)
    check_context(length, context_length(loaded.model))
    if bos is None and kind != "text":
        bos = False
    leading = leading_ids(loaded, bos)
    _check_vocabulary(torch.tensor(leading, dtype=torch.int64), num_embeddings(loaded.model))
    if (window := length - len(leading)) < 1:
        raise InputError(f"{len(leading)} ids stand before each text. Give `length={len(leading) + 1}` or more.")
    source = left_out = None
    if kind == "random":
        ids, left_out = _random_ids(loaded, length, num_sequences + others, seed)
    elif kind == "repeat":
        ids = _repeated_id(loaded, argument).expand(num_sequences + others, length).clone()
    else:
        source, total = source_of(argument), num_sequences + others
        read, tokenizer = partial(read_text, argument), tokenizer_of(loaded)
        text = without_leading(first_ids(tokenizer, read, total * window + len(leading)), leading)
        ids = torch.tensor(text, dtype=torch.int64)
        _check_vocabulary(ids, num_embeddings(loaded.model))
        if total * window > len(ids):
            beside = f" and {others} others" if others else ""
            raise InputError(
                f"{num_sequences} sequences of {length}{beside} need {total * window} tokens; {source} has {len(ids)}. "
                + _shorter(len(ids), window, num_sequences, leading=len(leading), others=others, least=least)
            )
        # Consecutive windows of the text.
        ids = torch.nn.functional.pad(ids[: total * window].view(total, window), (len(leading), 0))
    ids[:, : len(leading)] = torch.tensor(leading, dtype=torch.int64)
    seed_used = int(seed) if kind == "random" else None
    return TokenBatch(ids=ids, kind=kind, seed=seed_used, leading_ids=leading, source=source, left_out=left_out)


def batch_of_rows(rows: Sequence[Tensor], **about: Any) -> TokenBatch:
    """Sequences as a batch; those of unequal length are cut to the shortest, and kept whole beside that."""
    lengths = {len(row) for row in rows}
    ids = torch.stack([row[: min(lengths)] for row in rows])
    return TokenBatch(ids=ids, whole=tuple(rows) if len(lengths) > 1 else (), **about)


def special_ids(loaded: LoadedModel) -> set[int]:
    """Ids that stand for no text: the tokenizer's special tokens, and BOS, EOS and padding of the configurations."""
    special: set[int] = set()
    if loaded.tokenizer is not None:
        special.update(loaded.tokenizer.all_special_ids)
        added = getattr(loaded.tokenizer, "added_tokens_decoder", {})
        special.update(token_id for token_id, token in added.items() if token.special)
    return special | named_ids([loaded.model], "bos_token_id", "eos_token_id", "pad_token_id")


def named_ids(places: Sequence[Any], *names: str) -> set[int]:
    """The ids that tokenizers, or the configurations of models, give these names."""
    ids: set[int] = set()
    for place in places:
        for config in (place, text_config(place), getattr(place, "generation_config", None)):
            for value in (getattr(config, name, None) for name in names):
                # These files come from strangers: what is no number is no id.
                values = value if isinstance(value, list) else [value]
                ids.update(token_id for token_id in values if isinstance(token_id, int))
    return ids


def _random_ids(loaded: LoadedModel, length: int, num_sequences: int, seed: int) -> tuple[Int64[Tensor, "B T"], int]:
    """(uniform ids, how many ids of the vocabulary are never drawn, beside the special ones)."""
    ordinary = torch.ones(num_embeddings(loaded.model), dtype=torch.bool)
    ordinary[[token_id for token_id in special_ids(loaded) if 0 <= token_id < len(ordinary)]] = False
    used = ordinary & _used_ids(loaded)
    choices = used.nonzero()[:, 0]
    if not len(choices):
        raise InputError(
            "The vocabulary has no ordinary tokens, only special ones, unused ones, and ones that share an embedding. "
            "Choose another model, or give ids or a text."
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
    """The id of repeat:ID, which the model must have."""
    token = torch.tensor(int(argument))
    _check_vocabulary(token, num_embeddings(loaded.model))
    return token


def _shorter(
    num_ids: int, window: int, num_sequences: int, *, leading: int, others: int, least: tuple[int, int]
) -> str:
    """What to ask for instead of a text with too few tokens, as a sentence."""
    least_length, least_sequences = least
    most, longest = num_ids // window - others, num_ids // (num_sequences + others) + leading
    ways = []
    if most >= least_sequences:
        ways.append(f"`num_sequences={most}`")
    if longest >= least_length:
        ways.append(f"`length={longest}`")
    longest = num_ids // (least_sequences + others) + leading
    if not ways and longest >= least_length:
        ways = [f"`length={longest}` with `num_sequences={least_sequences}`"]
    return f"Use at most {' or '.join(ways)}, or a longer text." if ways else "Use a longer text."


def num_embeddings(model: Any) -> int:
    """How many ids a model has embeddings for."""
    return model.get_input_embeddings().weight.shape[0]


def context_length(model: Any) -> int | None:
    """The most tokens that a model's configuration allows; None where it does not say."""
    config = text_config(model)
    limits = [getattr(config, key, None) for key in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")]
    return next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)


def check_ids(model: Any, ids: Tensor) -> None:
    """Refuses ids without an embedding in the model, and sequences longer than its context."""
    _check_vocabulary(ids, num_embeddings(model))
    check_context(ids.shape[-1], context_length(model))


def _check_vocabulary(ids: Tensor, num_embeddings: int) -> None:
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < num_embeddings:
        bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise InputError(
            f"Token ids must be from 0 to {num_embeddings - 1}, not {bad}. Use an id, or a tokenizer, of this model's "
            "vocabulary."
        )
