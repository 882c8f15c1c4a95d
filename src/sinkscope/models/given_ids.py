"""A caller's own token ids as a batch: padding is left out by the attention mask, or refused."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sinkscope.errors import InputError
from sinkscope.models.loaded import PIXELS, bare_model, reads_images
from sinkscope.models.token_batches import TokenBatch, batch_of_rows, check_ids, named_ids
from sinkscope.models.tokenized_text import found_leading

READ = ("input_ids", "attention_mask")
ABOUT_THE_TEXT = (
    *("labels", "length", "special_tokens_mask", "offset_mapping"),
    *("overflowing_tokens", "num_truncated_tokens", "overflow_to_sample_mapping"),
)
"""What may stand beside ids and changes no state of a model."""


def given_batch(ids: Any, attention_mask: Any = None, *, model: Any = None, with_images: bool = False) -> TokenBatch:
    """A batch of the caller's own ids: a tensor, lists of any lengths, or what a tokenizer returned.

    A single sequence may come without its batch axis. What the attention mask leaves out is padding, and is left out
    here. Positions count from 0. Other positions, and other inputs that would change the pass, are refused, because
    they are not read. With a model, ids and length are checked against it. `with_images`: whether the caller reads
    images; they, and all that the processor returned for them, are then kept beside the ids.
    """
    is_given = isinstance(ids, Mapping) and any(ids.get(name) is not None for name in PIXELS)
    if with_images and is_given and reads_images(bare_model(model)):
        return _with_images(ids, bare_model(model))
    if isinstance(ids, Mapping):
        if "input_ids" not in ids:
            raise InputError(
                f"The batch holds {', '.join(map(str, ids)) or 'nothing'}, and no input_ids. Pass what the tokenizer "
                "returned."
            )
        attention_mask = ids.get("attention_mask") if attention_mask is None else attention_mask
    rows = _as_rows(ids["input_ids"] if isinstance(ids, Mapping) else ids)
    masks = None if attention_mask is None else _as_rows(attention_mask)
    if isinstance(ids, Mapping):
        _check_others(ids, rows, masks)
    if masks is not None:
        rows = _without_padding(rows, masks)
    _check_rows(rows)
    rows = [row.long() for row in rows]
    leading: tuple[int, ...] = ()
    if model is not None:
        for row in rows:
            check_ids(bare_model(model), row)
        if attention_mask is None:
            _check_padding(rows, model)
        leading = found_leading(model, rows)
    return batch_of_rows(rows, kind="given", leading_ids=leading)


def _with_images(given: Mapping[str, Any], model: Any) -> TokenBatch:
    """The batch of what a processor returned for texts with images; the model's own pass is given all of it."""
    batch = given_batch(given["input_ids"], given.get("attention_mask"), model=model)
    if batch.whole or batch.ids.numel() != torch.as_tensor(given["input_ids"]).numel():
        raise InputError("Texts with images must have one length, without padding. Give one at a time.")
    read = inspect.signature(model.forward).parameters
    beside = {name: value for name, value in given.items() if name not in (*READ, *ABOUT_THE_TEXT)}
    if unread := [name for name in beside if name not in read]:
        raise InputError(f"{type(model).__name__} does not read `{unread[0]}`. Leave it out, or use its own processor.")
    names = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
    image_ids = [getattr(model.config, name) for name in names if hasattr(model.config, name)]
    images = replace(batch, beside=beside, image_ids=tuple(number for number in image_ids if isinstance(number, int)))
    if not images.image_tokens.any():
        raise InputError(
            "There are images, but no image tokens among the ids where they would stand. Pass what the model's "
            "processor returns for a text that names its images."
        )
    return images


def _as_rows(values: Any) -> list[Tensor]:
    """Each sequence of ids, or its mask, as a tensor of its own on the CPU."""
    try:
        several = isinstance(values, list | tuple) and any(
            isinstance(row, list | tuple) or getattr(row, "ndim", 0) for row in values
        )
        rows = [torch.as_tensor(row) for row in values] if several else torch.atleast_2d(torch.as_tensor(values))
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(
            f"Texts or token ids are needed, not {reprlib.repr(values)}. Pass a text, several, or the ids a tokenizer "
            "returns."
        ) from error
    return [row.to(device="cpu", copy=True) for row in rows]


def _check_others(given: Mapping[str, Any], rows: Sequence[Tensor], masks: Sequence[Tensor] | None) -> None:
    """Refuses other inputs beside ids that would change the pass, since they are not read."""
    for name in given:
        if name in (*READ, *ABOUT_THE_TEXT) or given[name] is None:
            continue
        if name == "token_type_ids" and not any(bool(row.any()) for row in _as_rows(given[name])):
            continue
        if name == "position_ids" and _count_from_0(_as_rows(given[name]), rows, masks):
            continue
        raise InputError(
            f"`{name}` beside `input_ids` is not read: only `attention_mask` is, and positions count from 0. Leave "
            f"`{name}` out to read the ids alone."
        )


def _count_from_0(positions: Sequence[Tensor], rows: Sequence[Tensor], masks: Sequence[Tensor] | None) -> bool:
    """Whether positions count from 0 over the ids that are no padding."""
    masks = [torch.ones_like(row) for row in rows] if masks is None else masks
    if len(positions) == 1:
        positions = [positions[0]] * len(rows)
    if len(positions) != len(masks):
        return False
    for place, mask in zip(positions, masks, strict=True):
        num_ids = int(mask.bool().sum())
        if place.shape != mask.shape or not torch.equal(place[mask.bool()].long(), torch.arange(num_ids)):
            return False
    return True


def _check_rows(rows: Sequence[Tensor]) -> None:
    """Refuses no ids at all, numbers that are no ids, and sequences of another shape than [positions]."""
    if not any(row.numel() for row in rows):
        raise InputError("There are no token ids or texts. Pass a text, several, or the ids a tokenizer returns.")
    for row in rows:
        if row.dtype == torch.bool or row.is_floating_point() or row.is_complex():
            raise InputError(
                f"Token ids must be integers, not {str(row.dtype).removeprefix('torch.')}. Pass the ids a tokenizer "
                "returns."
            )
        if row.ndim != 1 or len(row) < 2:
            raise InputError(
                "Token ids must have the shape [sequences, positions] with at least 2 positions, and a sequence here "
                f"has shape {list(row.shape)}. Pass one row of ids for each sequence."
            )


def _without_padding(rows: Sequence[Tensor], masks: Sequence[Tensor]) -> list[Tensor]:
    """The ids that the masks keep; refused if they are not next to each other in a sequence."""
    if [row.shape for row in rows] != [mask.shape for mask in masks]:
        raise InputError(
            "The attention mask must have one number for each id, and it has other rows. Pass the one that the "
            "tokenizer returns."
        )
    places = [mask.nonzero().flatten() for mask in masks]
    if any(len(place) and int(place[-1] - place[0]) >= len(place) for place in places):
        raise InputError(
            "The attention mask leaves out ids within a sequence, which are no padding. Pass sequences without them."
        )
    return [row[place] for row, place in zip(rows, places, strict=True)]


def _check_padding(rows: Sequence[Tensor], model: Any) -> None:
    """Refuses padding at either end. If its id is also that of BOS or EOS, a single one is taken for that."""
    tokenizer = getattr(model, "tokenizer", None)
    places = [bare_model(model)] if tokenizer is None else [tokenizer]
    for pad in named_ids(places, "pad_token_id"):
        also = named_ids([tokenizer, bare_model(model)], "bos_token_id", "eos_token_id")
        for number, row in enumerate(rows):
            others = (row != pad).nonzero().flatten().tolist() or [len(row)]
            for run, end in ((others[0], "begins"), (len(row) - 1 - others[-1], "ends")):
                if run > (pad in also):
                    raise InputError(
                        f"Sequence {number} {end} with padding (id {pad}, {run} times), which would be read as text. "
                        "Pass the ids without it, or all that the tokenizer returns, with the `attention_mask`."
                    )
