"""sink_prefix(model, ids): the cache that a model's own sink tokens leave, to be put before any text.

A text that is read after it finds its sinks there, and none of its own tokens becomes one: no activation is large, and
one static scale fits all. Sink tokens are found by where the super neurons fire. One token is enough where only the
first position is a sink. Other sinks need words before them, so beginnings of texts that end with such a token (heads)
are tried too. The prefix is the one with which the losses under static 8-bit activations stay nearest to the
baseline's, token by token. The lowest loss would be the wrong rule: it rewards what a head says about the texts'
subject.

Axes: B texts, T positions, P tokens of the prefix, K key-value heads, D head size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from sinkscope.arguments import AUDIT_LENGTH
from sinkscope.atomic import whole_file
from sinkscope.audits.damage import Prefix, losses, scheme_losses
from sinkscope.audits.formats import W8A8_STATIC
from sinkscope.audits.schemes import linear_scheme
from sinkscope.audits.sink_neurons import SinkNeurons
from sinkscope.audits.sink_tokens import neuron_sinks, sink_neurons
from sinkscope.audits.static_scales import least_error_ranges
from sinkscope.errors import InputError
from sinkscope.models.anatomy import anatomy_of, check_every_layer
from sinkscope.models.loaded import LoadedModel, ModelLike
from sinkscope.models.loading import load
from sinkscope.models.prompts import Tokens, as_batch
from sinkscope.models.token_batches import context_length, token_batch
from sinkscope.models.weights import check_in_memory
from sinkscope.progress import Progress
from sinkscope.tracing.single_reader import evaluation_mode

MOST_TOKENS = 32
"""Longest prefix that is tried."""
MOST_HEADS = 8
"""Heads of texts that are tried, the shortest first."""

LOADER = """\
from safetensors.torch import load_file
from transformers import DynamicCache
cache, kept = DynamicCache(config=model.config), load_file("prefix.safetensors", device=str(model.device))
for i in range(len(kept) // 2):
    cache.update(*(kept[f"{part}.{i}"].to(model.dtype).repeat(len(ids), 1, 1, 1) for part in ("key", "value")), i)
"""
"""Code for users: fills the cache of a batch `ids` from the file that `SinkPrefix.save` writes, in the model's dtype
and on its device."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class SinkPrefix:
    """Tokens and the cache that they leave; without tokens if none help, and then `why_none` says why."""

    ids: tuple[int, ...]
    layers: tuple[tuple[Tensor, Tensor], ...]
    """[1, K, P, D] keys and values, by layer."""
    fired: tuple[float, float]
    """At how many tokens of a text super neurons fire: without the prefix, and with it."""
    config: Any

    @property
    def why_none(self) -> str:
        return "no tokens before a text keep its super neurons silent" if self.fired[0] else "no token is a sink"

    @property
    def generation(self) -> str:
        """Code for users: generates after the cache: `generate` counts the tokens in it among its ids."""
        return (
            "import torch\n"
            f"prefix = torch.tensor([{list(self.ids)}], device=ids.device).expand(len(ids), -1)\n"
            "both = torch.cat([prefix, ids], 1)\n"
            "written = model.generate(both, attention_mask=torch.ones_like(both), past_key_values=cache)\n"
        )

    def cache(self, num_sequences: int = 1) -> Any:
        """A new cache for so many texts, to give to a forward pass as `past_key_values`; a pass adds to it."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.config)
        for layer, (key, value) in enumerate(self.layers):
            cache.update(key.expand(num_sequences, -1, -1, -1), value.expand(num_sequences, -1, -1, -1), layer)
        return cache

    def save(self, path: Path) -> None:
        """A safetensors file with `key.0`, `value.0` and so on; LOADER reads it."""
        tensors = {f"key.{layer}": key.contiguous() for layer, (key, _) in enumerate(self.layers)}
        tensors |= {f"value.{layer}": value.contiguous() for layer, (_, value) in enumerate(self.layers)}
        with whole_file(path) as partial:
            save_file(tensors, partial, metadata={"token_ids": " ".join(map(str, self.ids))})

    def __repr__(self) -> str:
        before, after = self.fired
        return f"SinkPrefix({len(self.ids)} tokens; super neurons fire at {before:.1f} -> {after:.1f} tokens a text)"


def sink_prefix(
    model: ModelLike, ids: Tokens, *, neurons: SinkNeurons | None = None, progress: Progress | None = None
) -> SinkPrefix:
    """The prefix of a model, found on some texts; `neurons` are those of `sink_neurons`, found here if not given.

    `progress` is called with (prefixes tried, prefixes to try)."""
    loaded = load(model)
    check_in_memory(loaded.model, "A prefix")
    batch = as_batch(loaded, ids)
    most = room_for_prefix(loaded.model, batch.length)
    neurons = neurons or sink_neurons(loaded, batch)
    _, fired_BT = neuron_sinks(loaded, batch.ids, neurons)
    before = float(fired_BT.sum(1).double().mean())
    none = SinkPrefix(ids=(), layers=(), fired=(before, before), config=loaded.model.config)
    if not before:
        return none
    start = len(batch.leading_ids)  # a text that follows a prefix has none of its own
    texts_BT, baseline_BT = batch.ids[:, start:], losses(loaded.model, batch.ids)[:, start:]
    candidates: dict[tuple[int, ...], tuple[float, SinkPrefix]] = {}  # with the distance from the baseline
    heads = _heads(batch.ids, fired_BT, most)
    step = progress or (lambda done, total: None)
    step(0, len(heads))
    for number, (head, text) in enumerate(heads):
        # A text does not judge its own head, which would tell it what comes.
        others = [other for other in range(len(texts_BT)) if other != text]
        prefix = replace(none, ids=head, layers=cache_of(loaded, head))
        static_BT = _static_losses(loaded, texts_BT[others], prefix.cache)
        candidates[head] = float(np.abs(static_BT - baseline_BT[others]).mean()), prefix
        step(number + 1, len(heads))
    _, best = min(candidates.values(), key=lambda candidate: candidate[0])
    head_BP = torch.tensor(best.ids).expand(len(texts_BT), -1)
    _, fires_BT = neuron_sinks(loaded, torch.cat([head_BP, texts_BT], 1), neurons)
    after = float(fires_BT[:, len(best.ids) :].sum(1).double().mean())
    return replace(best, fired=(before, after)) if after < before else none


def room_for_prefix(model: Any, length: int) -> int:
    """How many tokens a prefix may have before texts of this length.

    Refuses texts that fill the model's context, and a model with sliding windows, which forgets a prefix."""
    from transformers import DynamicCache

    check_every_layer(anatomy_of(model), "A prefix")
    if any(getattr(layer, "is_sliding", False) for layer in DynamicCache(config=model.config).layers):
        raise InputError(
            "This model has layers with a sliding window, which soon forget a prefix. Leave `prefix` out, or choose a "
            "model whose layers see all earlier tokens."
        )
    context = context_length(model)
    if context is None or length < context:
        return MOST_TOKENS if context is None else min(MOST_TOKENS, context - length)
    shorter = max(AUDIT_LENGTH, context - MOST_TOKENS)
    advice = f"Give `length={shorter}`." if shorter < context else "Leave `prefix` out."
    raise InputError(
        f"`length={length}` leaves no room for a prefix in the model's context of {context} tokens. {advice}"
    )


def _static_losses(loaded: LoadedModel, ids_BT: Tensor, prefix: Prefix) -> np.ndarray:
    """[B, T - 1] the losses after a prefix, under static 8-bit activations with scales from the same texts."""
    ranges = least_error_ranges(loaded.model, ids_BT, prefix=prefix)
    return scheme_losses(loaded.model, linear_scheme(W8A8_STATIC), ids_BT, ranges=ranges, prefix=prefix)


def _heads(ids_BT: Tensor, fired_BT: Tensor, most: int) -> list[tuple[tuple[int, ...], int | None]]:
    """What is tried as a prefix, with the number of the text that it is from.

    First the token at which super neurons fire most often, from no single text; then heads of texts that end with a
    token at which they fire. A head must be judged by another text, so a single text has none.
    """
    foremost = Counter(ids_BT[fired_BT].tolist()).most_common(1)[0][0]
    places = sorted((place, text) for text, place in fired_BT.nonzero().tolist() if 0 < place < most)
    places = places if len(ids_BT) > 1 else []
    heads = [(tuple(ids_BT[text, : place + 1].tolist()), text) for place, text in places[:MOST_HEADS]]
    return [((foremost,), None), *heads]


def other_prefix(loaded: LoadedModel, prefix: SinkPrefix, *, seed: int = 0) -> SinkPrefix:
    """The control: the cache of as many random tokens, from the middle of a sequence, where none of them is a sink."""
    size = len(prefix.ids)
    ids = token_batch(loaded, length=max(2, 2 * size), num_sequences=1, seed=seed).ids[0].tolist()
    layers = tuple((key[:, :, -size:], value[:, :, -size:]) for key, value in cache_of(loaded, ids))
    return SinkPrefix(ids=tuple(ids[-size:]), layers=layers, fired=prefix.fired, config=prefix.config)


def cache_of(loaded: LoadedModel, ids: Sequence[int]) -> tuple[tuple[Tensor, Tensor], ...]:
    """[1, K, P, D] the keys and values that some tokens leave, by layer."""
    from transformers import DynamicCache

    model: Any = loaded.model
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), evaluation_mode(model):
        model(torch.tensor([list(ids)], device=model.get_input_embeddings().weight.device), past_key_values=cache)
    if not cache.get_seq_length() == len(ids):
        raise InputError(
            f"{type(model).__name__} keeps no keys and values in a cache, so it can have no prefix. Leave `prefix` "
            "out, or choose another model."
        )
    kept: Any = cache.layers
    return tuple((layer.keys.detach(), layer.values.detach()) for layer in kept)
