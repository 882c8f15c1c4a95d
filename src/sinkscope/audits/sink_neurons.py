"""The super neurons that recognise a model's sinks without reading its attention, with a threshold for each.

Attention is shared: where a neuron fires at several tokens of a text, a query that sees them all gives each a part. So
a token is a sink where its share (`attention_share`), the mean over the queries from it on, is above the neuron's
threshold.

Candidates are the neurons of each layer that write most at nearly all sinks. Of these a few are chosen, one after the
other and at most one a layer: the neuron and the threshold that bring the mask "a sink by any of them" nearest to the
sinks (by F1, the harmonic mean of precision and recall), as long as it gets clearly nearer.
Axes: B sequences, T positions, N = B * T tokens, n sinks, U neurons of a layer, C candidates.
"""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sinkscope.errors import InputError
from sinkscope.measures.sink_score import eligible_positions
from sinkscope.models.anatomy import SHARED_EXPERT, AnyModule, Layer, Neuron, anatomy_of, checked_neurons
from sinkscope.models.loaded import LoadedModel, Model, bare_model
from sinkscope.models.token_batches import TokenBatch
from sinkscope.tracing.hooks import leaving
from sinkscope.tracing.layer_call import LayerCall
from sinkscope.tracing.layer_neurons import LayerNeurons
from sinkscope.tracing.observables import HookPoint, Observable
from sinkscope.tracing.recorder import record
from sinkscope.tracing.reducers import Rows

NUM_CANDIDATES = 8
"""Neurons of a layer that are tried."""
MOST_NEURONS = 4
NEARLY_ALL = 0.25
"""Neurons are ranked by the write that all but this share of the sinks reach: what fires for one sink is of no use."""
CLEARLY_NEARER = 0.02
"""Of F1: what a further neuron must bring. Less than that is chance on a few texts."""
NEARLY_BEST = 0.01
"""Of F1: among thresholds that are so near the best, the one that finds as many sinks as there are. On a few texts the
best alone favours precision or recall by chance."""
OTHERS = 0.1
"""What all tokens at which a neuron does not fire claim of a query together, where a sink claims 1 at most."""


class SinkNeuron(NamedTuple):
    """A neuron, and the two thresholds by which its activations tell a sink."""

    neuron: Neuron
    fires_beyond: float
    """It fires where its activation is above this; if this is negative, where the activation is below it.

    Of all such thresholds it is the one that recognises sinks best."""
    threshold: float
    """A token is a sink where its share of attention (`attention_share`) is above this."""

    def fires(self, values_BT: Tensor) -> Tensor:
        """[B, T] at which tokens the neuron fires, from its activations."""
        return _beyond(values_BT, self.fires_beyond)

    def sinks(self, values_BT: Tensor) -> Tensor:
        """[B, T] which tokens are sinks by this neuron, from its activations."""
        return attention_share(values_BT, self.fires_beyond) > self.threshold


def _beyond(values: Tensor, threshold: float) -> Tensor:
    return values > threshold if threshold > 0 else values < threshold


def attention_share(values_BT: Tensor, fires_beyond: float) -> Tensor:
    """[B, T] the share of attention that each token can get, mean over the queries from it on.

    Heads read a state after its norm. If the neuron's write is x times as large as the rest of the state, it holds
    x^2 / (1 + x^2) of the energy after the norm, at most all of it: that is what the token claims of a query, with
    x = 1 where the neuron begins to fire. The attention of a query is divided among the claims of all tokens up to it,
    and OTHERS.
    """
    energy_BT = (values_BT.double() / fires_beyond).clamp(min=0).square()
    claim_BT = energy_BT / (1 + energy_BT)
    part_BT = 1 / (OTHERS + claim_BT.cumsum(1))
    # A sum over all later queries: the sum from the end, backwards.
    num_queries_T = torch.arange(values_BT.shape[1], 0, -1, device=values_BT.device)
    return claim_BT * part_BT.flip(1).cumsum(1).flip(1) / num_queries_T


@dataclass(frozen=True, kw_only=True, repr=False)
class SinkNeurons:
    """Neurons that recognise sinks: at every sink at least one of them fires. No neurons for texts without sinks."""

    neurons: tuple[SinkNeuron, ...]
    precision: float
    """Of the tokens that the neurons call sinks, the share that are, on the texts that they were found on.

    NaN without neurons or without sinks."""
    recall: float
    """Of the sinks of those texts, the share that the neurons find; NaN without sinks."""
    num_sinks: int
    model: str
    """The name of the model that they were found in. They serve another one only if its neurons are the same, such as a
    copy in fewer bits."""

    def __repr__(self) -> str:
        fire = ", ".join(f"{neuron} beyond {fires:.3g}, share {share:.2f}" for neuron, fires, share in self.neurons)
        found = f"{self.num_sinks} sinks, precision {self.precision:.2f}, recall {self.recall:.2f}"
        return f"SinkNeurons({fire or 'none'}; found in {self.model} on {found})"


def find_sink_neurons(loaded: LoadedModel, batch: TokenBatch, mask_BT: Tensor) -> SinkNeurons:
    """The neurons that agree best with a mask of sinks, from one pass over its texts."""
    num_sinks = int(mask_BT.sum())
    if not num_sinks:
        nothing = float("nan")
        return SinkNeurons(neurons=(), precision=nothing, recall=nothing, num_sinks=0, model=loaded.name)
    candidates: dict[Neuron, Tensor] = {}  # with their activations, [B, T]
    sinks_n = mask_BT.flatten().nonzero().flatten()

    def keep_candidates(call: LayerCall) -> Tensor:
        writes_nU = call.neurons.at(sinks_n.to(call.residual.device)).float().abs() * call.neurons.output_norms()
        reached_U = writes_nU.quantile(NEARLY_ALL, dim=0)
        for number in reached_U.topk(min(NUM_CANDIDATES, len(reached_U))).indices.tolist():
            expert, neuron = call.layer.locate_neuron(number)
            values_N1 = call.neurons.values(expert, torch.tensor([neuron], device=call.residual.device))
            candidates[Neuron(call.index, expert, neuron)] = values_N1.view(call.passing.shape).cpu()
        return torch.zeros(1)  # an observable must give a value

    listener = Observable(name="candidates", hook_point=HookPoint.NEURONS, value=keep_candidates, reducer=Rows())
    record(loaded, batch, [listener], chunk_tokens=batch.ids.numel())
    return _choose(candidates, mask_BT, loaded.name)


def _choose(candidates: dict[Neuron, Tensor], mask_BT: Tensor, model: str) -> SinkNeurons:
    """The few of the candidates that together agree best with the mask of sinks, added one after the other."""
    # A token that comes too late to be judged by attention says nothing about a neuron that fires there.
    early_T = eligible_positions(mask_BT.shape[1])
    mask_BT = mask_BT[:, early_T]
    shares: dict[Neuron, tuple[float, Tensor]] = {}  # beyond what it fires, and the shares [B, T] of attention
    for neuron, values_BT in candidates.items():
        *_, fires_beyond = _best_threshold(values_BT[:, early_T], mask_BT, torch.zeros_like(mask_BT))
        if fires_beyond:  # zero where a neuron is silent at most sinks
            shares[neuron] = fires_beyond, attention_share(values_BT, fires_beyond)[:, early_T]
    predicted_BT, neurons, best = torch.zeros_like(mask_BT), [], 0.0
    while len(neurons) < MOST_NEURONS:
        layers = {chosen.neuron.layer for chosen in neurons}
        tried = [
            (*_best_threshold(shared_BT, mask_BT, predicted_BT), neuron)
            for neuron, (_, shared_BT) in shares.items()
            if neuron.layer not in layers
        ]
        score, _, threshold, neuron = max(tried, default=(0.0, 0.0, 0.0, None))
        if neuron is None or score <= best + CLEARLY_NEARER * bool(neurons):
            break
        best = score
        fires_beyond, shared_BT = shares[neuron]
        neurons.append(SinkNeuron(neuron, fires_beyond, threshold))
        predicted_BT |= shared_BT > threshold
    hits, num_predicted, num_sinks = (int(x_BT.sum()) for x_BT in (predicted_BT & mask_BT, predicted_BT, mask_BT))
    precision = hits / num_predicted if neurons else float("nan")
    return SinkNeurons(
        neurons=tuple(neurons), precision=precision, recall=hits / num_sinks, num_sinks=num_sinks, model=model
    )


def _best_threshold(values_BT: Tensor, mask_BT: Tensor, predicted_BT: Tensor) -> tuple[float, float, float]:
    """The threshold on some values that brings the mask of sinks nearest, beside tokens that other neurons predict.

    (F1 of the tokens beyond it together with `predicted_BT`, how wide the gap of values around it is as a share of the
    value above it, the threshold itself: the middle of that gap).
    """
    sign = -1.0 if float(values_BT[mask_BT].median()) < 0 else 1.0
    values_N, order_N = (sign * values_BT[~predicted_BT].double()).sort(descending=True)
    hits_N = (predicted_BT & mask_BT).sum() + mask_BT[~predicted_BT][order_N].cumsum(0)
    num_N = predicted_BT.sum() + torch.arange(1, len(values_N) + 1)
    score_N = 2 * hits_N / (num_N + mask_BT.sum())
    score_N[values_N <= 0] = 0
    near_N = score_N[:-1] >= score_N.max() - NEARLY_BEST
    last = int((num_N - mask_BT.sum())[:-1].abs().masked_fill(~near_N, len(num_N)).argmin())
    upper, lower = float(values_N[last]), max(float(values_N[last + 1]), 0.0)
    gap = 0.0 if upper <= 0 else 1 - lower / upper
    return float(score_N[last]), gap, sign * (upper + lower) / 2


class SinkWatch:
    """While open, follows the sinks of a text as a model reads or writes it, step by step with a cache.

        with sinkscope.SinkWatch(model, neurons) as watch:
            model.generate(...)
        watch.mask  # [B, T], up to the last token that the model has read

    It begins anew when it is opened, and with each call without a filled cache. Sequences must keep their places in the
    batch, as they do unless beams are searched.
    """

    def __init__(self, model: Model, neurons: SinkNeurons) -> None:
        if not isinstance(neurons, SinkNeurons):
            raise InputError(
                f"`neurons` must be what `sink_neurons` returns, not {reprlib.repr(neurons)}. Give "
                "`neurons=sinkscope.sink_neurons(model, texts)`."
            )
        self.anatomy = anatomy_of(bare_model(model))
        checked_neurons(self.anatomy, [sink_neuron.neuron for sink_neuron in neurons.neurons])
        self.neurons = neurons.neurons
        self._shapes: list[tuple[int, int]] = []
        self._seen: list[list[Tensor]] = [[] for _ in self.neurons]
        """By neuron, the activations of each call, flat."""
        self._stack = contextlib.ExitStack()

    @property
    def mask(self) -> Tensor:
        """[B, T] which tokens are sinks of the text so far, on the CPU."""
        return self._any(SinkNeuron.sinks)

    @property
    def fired(self) -> Tensor:
        """[B, T] at which tokens one of the neurons fired, on the CPU."""
        return self._any(SinkNeuron.fires)

    def _any(self, tell: Callable[[SinkNeuron, Tensor], Tensor]) -> Tensor:
        if len({num_sequences for num_sequences, _ in self._shapes}) != 1:
            why = "One cache joins batches of several sizes" if self._shapes else "No text was read yet"
            raise InputError(
                f"{why}. Call the model, or model.generate, inside the with block, for one batch at a time."
            )
        mask_BT = torch.zeros(self._shapes[0][0], sum(length for _, length in self._shapes), dtype=torch.bool)
        for neuron, steps in zip(self.neurons, self._seen, strict=True):
            values = [values_N.view(shape).cpu() for values_N, shape in zip(steps, self._shapes, strict=True)]
            mask_BT |= tell(neuron, torch.cat(values, 1))
        return mask_BT

    def __enter__(self) -> SinkWatch:
        self._begin_anew()
        handles = [
            self.anatomy.decoder.register_forward_pre_hook(self._enter, with_kwargs=True),
            self.anatomy.layers[0].block.register_forward_hook(self._leave_first),
        ]
        for (neuron, *_), steps in zip(self.neurons, self._seen, strict=True):
            handles += _keep_activation(self.anatomy.layers[neuron.layer], neuron, steps)
        for handle in handles:
            self._stack.callback(handle.remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _begin_anew(self) -> None:
        for steps in (self._shapes, *self._seen):
            steps.clear()

    def _enter(self, module, args, kwargs) -> None:
        cache = kwargs.get("past_key_values")
        if cache is None or not cache.get_seq_length():
            self._begin_anew()

    def _leave_first(self, module, args, output) -> None:
        num_sequences, length = leaving(output).shape[:2]
        self._shapes.append((num_sequences, length))


def _keep_activation(layer: Layer, neuron: Neuron, steps: list[Tensor]) -> list[Any]:
    """Hooks that keep a neuron's activation at every token. Thresholds wait until the mask is asked for: a step of
    decoding pays for one small copy a neuron."""
    if neuron.expert in (None, SHARED_EXPERT):
        projection: AnyModule = layer.down_projection if neuron.expert is None else layer.shared_down_projection
        handles = [
            projection.register_forward_pre_hook(
                lambda module, args: steps.append(args[0][..., neuron.neuron].flatten().clone())
            )
        ]
        if neuron.expert == SHARED_EXPERT and layer.shared_gate is not None:
            gate: list[Tensor] = []
            keep_gate = layer.shared_gate.register_forward_hook(
                lambda module, args, output: gate.append(output.flatten().sigmoid())
            )
            # The gate may run before the shared expert or after it.
            multiply = layer.block.register_forward_hook(
                lambda module, args, output: steps.append(steps.pop() * gate.pop())
            )
            handles += [keep_gate, multiply]
        return handles
    layer_neurons = LayerNeurons(layer)

    def keep_routed(module, args, kwargs) -> None:
        layer_neurons.keep_routed(module, args, kwargs)
        chosen = torch.tensor([neuron.neuron], device=layer.down_weights()[0][1].device)
        steps.append(layer_neurons.values(neuron.expert, chosen).flatten())
        layer_neurons.clear()

    experts: AnyModule = layer.experts
    return [experts.register_forward_pre_hook(keep_routed, with_kwargs=True)]
