"""What the sink is for: what a model loses on text without it, and what the heads that have it do there.

What a head is worth is the rise of the loss if its value aggregation is replaced, at every token but the sink, by its
mean over tokens of other documents. It is estimated to first order: the gradient of the loss times the change, summed
over tokens, which takes one backward pass for all heads.

Axes: B sequences, T positions, L layers, H heads, D head size, K kinds of text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sinkscope.interventions.base import Intervention, together
from sinkscope.interventions.neurons import ablate_neurons
from sinkscope.interventions.residual import set_dimensions
from sinkscope.models.anatomy import Anatomy, anatomy_of
from sinkscope.models.loading import LoadedModel
from sinkscope.models.token_batches import TokenBatch
from sinkscope.results.parts import Parts
from sinkscope.statistics import bootstrap_mean_interval
from sinkscope.studies.study_data import StudyData
from sinkscope.tracing.replay import Replay
from sinkscope.tracing.single_reader import evaluation_mode

BASELINE = "baseline"
ROLES = ("dormant", "active", "depends", "undecided")
SAID = {
    "neurons_at_sink": "Without these neurons at the sink",
    "dimensions_at_sink": "With an ordinary token's massive dimensions at the sink",
}
"""What the sentence gives of what was removed: the first that was."""
DORMANT = 0.1
"""A head is dormant if it is worth less than this share of what the heads of its model are worth on average."""
TOKENS_AT_ONCE = 512
"""Most tokens of a backward pass, which holds all their activations."""
NUM_SETS = 3
"""How many random sets of neurons are removed as a control."""


@dataclass(frozen=True, kw_only=True)
class HeadRole:
    """What one head with the sink does on text."""

    layer: int
    head: int
    role: str
    """One of ROLES."""
    by_kind: dict[str, tuple[float, float, float]]
    """By kind of text: (what it is worth, low, high), over what the heads of the model are worth on average."""


@dataclass(frozen=True, kw_only=True)
class Purpose:
    """What was measured on text, by sequence."""

    losses: dict[str, np.ndarray]
    """[B] the loss of each sequence: `baseline`, and by what was removed."""
    worth: dict[str, np.ndarray]
    """By kind of text, [B, L, H]: what each head is worth in nats, to first order."""
    heads: tuple[tuple[int, int], ...]
    """(layer, head) of those that have the sink."""

    @cached_property
    def changes(self) -> dict[str, tuple[float, float, float]]:
        """By what was removed: (change of the loss in nats, low, high), paired by sequence."""
        changes = {}
        for removed, loss_B in self.losses.items():
            if removed != BASELINE:
                change_B = loss_B - self.losses[BASELINE]
                low, high = bootstrap_mean_interval(change_B)
                changes[removed] = (float(change_B.mean()), float(low), float(high))
        return changes

    @cached_property
    def roles(self) -> list[HeadRole]:
        """Of each head with the sink: dormant or active on every kind of text, or as the kind has it (depends);
        undecided if the interval on a kind does not say."""
        worth = {}
        for kind, worth_BLH in self.worth.items():
            average = np.abs(worth_BLH.mean(0)).mean() or 1.0
            worth[kind] = np.stack([worth_BLH.mean(0), *bootstrap_mean_interval(worth_BLH)]) / average
        roles = []
        for layer, head in self.heads:
            by_kind = {}
            for kind, worth_3LH in worth.items():
                value, low, high = worth_3LH[:, layer, head].tolist()
                by_kind[kind] = (value, low, high)
            on_kinds = {_role(low, high) for _, low, high in by_kind.values()}
            role = "undecided" if "undecided" in on_kinds else "depends"
            if len(on_kinds) == 1:
                (role,) = on_kinds
            roles.append(HeadRole(layer=layer, head=head, role=role, by_kind=by_kind))
        return roles

    def summary(self) -> dict[str, Any]:
        """The entry `purpose` of summary.json."""
        changes = {name: dict(zip(("change", "low", "high"), each, strict=True)) for name, each in self.changes.items()}
        return {"loss": float(self.losses[BASELINE].mean()), "changes": changes, "heads": self._counts()}

    def _counts(self) -> dict[str, int]:
        return {role: sum(each.role == role for each in self.roles) for role in ROLES}

    def in_words(self) -> str:
        """What is lost on text without the sink, and how many of its heads do anything there."""
        text = ""
        for removed, words in SAID.items():
            if removed in self.changes and f"random_{removed}" in self.changes:
                change, low, high = self.changes[removed]
                random, *_ = self.changes[f"random_{removed}"]
                text = f"{words} the loss on text changes by {change:+.2f} nats ({low:+.2f} to {high:+.2f}; "
                text += f"random ones: {random:+.2f}). "
                break
        if not self.heads:
            return text.rstrip()
        counts = [f"{count} {role}" for role, count in self._counts().items() if count]
        return f"{text}Of its {len(self.heads)} heads, {', '.join(counts)} on text and code."


def _role(low: float, high: float) -> str:
    """The role on one kind of text, by an interval of what a head is worth."""
    if low > -DORMANT and high < DORMANT:
        return "dormant"
    return "active" if low > DORMANT or high < -DORMANT else "undecided"


def read_purpose(
    loaded: LoadedModel, study: StudyData, kinds: Mapping[str, tuple[TokenBatch, TokenBatch]], parts: Parts
) -> Purpose:
    """What the sink of a text is for; `kinds` are (judging, calibration) sequences. Kept as finished parts."""
    judging, _ = kinds["text"]
    losses = parts.kept("text-losses", (BASELINE,), lambda: text_losses(loaded, judging.ids, study))

    def worths() -> dict[str, np.ndarray]:
        return {kind: head_worths(loaded, *batches, study.plan.sink) for kind, batches in kinds.items()}

    worth = parts.kept("text-heads", tuple(kinds), worths)
    assert losses is not None
    assert worth is not None
    return Purpose(losses=losses, worth=worth, heads=study.plan.sink_heads)


def text_losses(loaded: LoadedModel, ids_BT: Tensor, study: StudyData) -> dict[str, np.ndarray]:
    """[B] losses by what was removed: neurons everywhere and at the sink alone, the massive dimensions at the sink, and
    as many random ones of each, which are the controls."""
    plan, controls, removed = study.plan, study.controls, study.removed
    replay = Replay(study.anatomy, loaded.model, ids_BT, restarts={neuron.layer for neuron in removed}, loss=True)

    def under(change: Intervention) -> np.ndarray:
        with together([change]) as first_layer:
            return _loss(replay.read(first_layer, loss=True))

    losses = {BASELINE: _loss(replay.baseline)}
    for where, positions in (("", None), ("_at_sink", plan.sink)):
        if removed:
            losses[f"neurons{where}"] = under(ablate_neurons(loaded, removed, positions=positions))
        random = [under(ablate_neurons(loaded, each, positions=positions)) for each in controls.sets[:NUM_SETS]]
        if random:
            losses[f"random_neurons{where}"] = np.mean(random, 0)
    for name, dimensions in (("dimensions", plan.dimensions), ("random_dimensions", controls.dimensions)):
        if dimensions and plan.targets:
            place: Any = dict(source=plan.targets[0], positions=plan.sink, layers=plan.layers_with_disparity)
            losses[f"{name}_at_sink"] = under(set_dimensions(loaded, dimensions, "transplant", **place))
    return losses


def _loss(reading: Any) -> np.ndarray:
    assert reading.loss_B is not None
    return reading.loss_B.double().numpy()


def head_worths(loaded: LoadedModel, judging: TokenBatch, calibration: TokenBatch, sink: int) -> np.ndarray:
    """[B, L, H] by how much the loss of each sequence would rise without each head, in nats, to first order."""
    anatomy = anatomy_of(loaded.model)
    ordinary = [position for position in range(judging.length) if position != sink]
    totals: list[Tensor] = [torch.zeros(())] * len(anatomy.layers)
    for ids_BT in calibration.ids.split(max(1, TOKENS_AT_ONCE // calibration.length)):
        with torch.no_grad(), _aggregations(anatomy, loaded.model) as read:
            loaded.model(ids_BT.to(_device(loaded)), use_cache=False)
        for layer, aggregation_BTE in enumerate(read):
            totals[layer] = totals[layer].to(aggregation_BTE.device) + aggregation_BTE[:, ordinary].double().sum((0, 1))
    means = [total / (calibration.num_sequences * len(ordinary)) for total in totals]
    worths = []
    for ids_BT in judging.ids.split(max(1, TOKENS_AT_ONCE // judging.length)):
        with torch.enable_grad(), _aggregations(anatomy, loaded.model) as read:
            ids_BT = ids_BT.to(_device(loaded))
            logits_BTV = loaded.model(ids_BT, use_cache=False).logits[:, :-1].float()
            loss = nn.functional.cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, 1:].flatten().to(logits_BTV.device))
            # The mean over sequences and tokens: times the sequences it is the sum of each sequence's own loss.
            gradients = torch.autograd.grad(loss * len(ids_BT), read)
        rows = []
        for gradient_BTE, read_BTE, mean_E in zip(gradients, read, means, strict=True):
            change_BTE = gradient_BTE[:, ordinary].double() * (mean_E - read_BTE[:, ordinary].detach().double())
            rows.append(change_BTE.unflatten(-1, (anatomy.num_heads, -1)).sum((1, 3)).cpu())
        worths.append(torch.stack(rows, 1))
    return torch.cat(worths).numpy()


def _device(loaded: LoadedModel) -> torch.device:
    weight: Any = loaded.model.get_input_embeddings().weight
    return weight.device


@contextlib.contextmanager
def _aggregations(anatomy: Anatomy, model: Any) -> Iterator[list[Tensor]]:
    """While open, a pass leaves what enters each output projection in the list. Where gradients are on, the graph
    begins at the embeddings."""
    read: list[Tensor] = []

    def on_embedding(module: Any, args: Any, output_BTE: Tensor) -> Tensor | None:
        return output_BTE.detach().requires_grad_() if torch.is_grad_enabled() else None

    with contextlib.ExitStack() as stack:
        stack.enter_context(evaluation_mode(model))
        stack.callback(model.get_input_embeddings().register_forward_hook(on_embedding).remove)
        for layer in anatomy.layers:
            hook = layer.output_projection.register_forward_pre_hook(lambda module, args: read.append(args[0]))
            stack.callback(hook.remove)
        yield read
