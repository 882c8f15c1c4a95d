"""sink_tokens(model, ids): which tokens of each text are sinks, as a boolean mask.

By attention, a token is a sink of its text if at least 5 % of all heads in all layers give it more than 0.3 of their
attention on average (`measures.sink_score`, the published rate, of one sequence alone). No attention map is ever kept.
By neurons, a token is a sink where a super neuron fires and few other tokens of the text share its attention
(`sink_neurons`), so no attention is read.
Axes: L layers, B sequences, T positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope.audits.damage import BATCH_TOKENS
from sinkscope.audits.sink_neurons import SinkNeurons, SinkWatch, find_sink_neurons
from sinkscope.measures.sink_score import are_sinks
from sinkscope.models.anatomy import anatomy_of, input_device
from sinkscope.models.loaded import LoadedModel, ModelLike
from sinkscope.models.loading import load
from sinkscope.models.prompts import Tokens, as_batch, check_one_length
from sinkscope.models.token_batches import TokenBatch
from sinkscope.tracing.observables import RECEIVED_BY_SEQUENCE, SINK_HEADS
from sinkscope.tracing.receipt import check_reading
from sinkscope.tracing.recorder import record, without_autograd
from sinkscope.tracing.single_reader import evaluation_mode


@dataclass(frozen=True, kw_only=True, repr=False)
class SinkTokens:
    """Which tokens of some texts are sinks; by attention, never one of the last 16: too few queries follow it."""

    mask: Bool[Tensor, "B T"]
    fired: Bool[Tensor, "B T"]
    """Whether a super neuron fired there."""
    rate: Float[Tensor, "B T"] | None
    """Share of layers and heads that count the token as their sink; None where no attention was read."""
    received: Float[Tensor, "B T"] | None
    """Attention received, mean over later queries, layers and heads; None likewise."""
    neurons: SinkNeurons

    def positions(self, sequence: int = 0) -> list[int]:
        """The sinks of one text."""
        return self.mask[sequence].nonzero().flatten().tolist()

    def __repr__(self) -> str:
        by = f"neurons of {self.neurons.model}" if self.rate is None else "attention"
        texts, length = self.mask.shape
        return f"SinkTokens(sinks by {by}: {int(self.mask.sum())} in {texts} x {length} tokens)"


def sink_tokens(model: ModelLike, ids: Tokens, *, neurons: SinkNeurons | None = None) -> SinkTokens:
    """The sinks of each text, anywhere in it.

        sinkscope.sink_tokens(model, ids).mask

    With `neurons`, which `sink_neurons` found on other text, the mask comes from them, and no attention is read.
    Without, it comes from attention, and `fired` from the neurons that agree best with it on these texts.
    """
    loaded = load(model)
    batch = as_batch(loaded, ids)
    check_one_length(batch, "a mask has a row for each")
    if neurons is not None:
        mask, fired = neuron_sinks(loaded, batch.ids, neurons)
        return SinkTokens(mask=mask, fired=fired, rate=None, received=None, neurons=neurons)
    mask, rate, received = attention_sinks(loaded, batch)
    neurons = find_sink_neurons(loaded, batch, mask)
    _, fired = neuron_sinks(loaded, batch.ids, neurons)
    return SinkTokens(mask=mask, fired=fired, rate=rate, received=received, neurons=neurons)


def sink_neurons(model: ModelLike, ids: Tokens) -> SinkNeurons:
    """The super neurons that recognise the sinks of a model, and their thresholds, found on some texts."""
    loaded = load(model)
    batch = as_batch(loaded, ids)
    check_one_length(batch, "a mask has a row for each")
    return find_sink_neurons(loaded, batch, attention_sinks(loaded, batch)[0])


def attention_sinks(loaded: LoadedModel, batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
    """[B, T] each: sink or not, share of layers and heads, attention received."""
    recording = record(loaded, batch, [SINK_HEADS, RECEIVED_BY_SEQUENCE])
    rate_BT = recording.sequence_sink_rate
    return are_sinks(rate_BT), rate_BT, recording.of_attention(RECEIVED_BY_SEQUENCE.name).float().mean(0)


def neuron_sinks(loaded: LoadedModel, ids_BT: Tensor, neurons: SinkNeurons) -> tuple[Tensor, Tensor]:
    """[B, T] each: which tokens are sinks, and at which one of the neurons fires; a few texts at a time."""
    anatomy = anatomy_of(loaded.model)
    masks, fired = [], []
    check_reading(loaded.model, anatomy)
    for ids in ids_BT.split(max(1, BATCH_TOKENS // ids_BT.shape[1])):
        with without_autograd(loaded), evaluation_mode(loaded.model), SinkWatch(loaded, neurons) as watch:
            anatomy.decoder(input_ids=ids.to(input_device(anatomy)), use_cache=False)
        masks.append(watch.mask)
        fired.append(watch.fired)
    return torch.cat(masks), torch.cat(fired)
