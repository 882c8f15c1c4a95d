"""The six observables of the sink chain on fixed batches while a model trains, read by the tracing code.

Everything is told about one position, the strongest sink or, while there is none, the key that receives most attention,
so that the links can be put in the order of their birth before any of them is strong enough to be called found.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sinkscope.capture.findings import Findings
from sinkscope.capture.recorder import evaluation_mode
from sinkscope.capture.trace import trace
from sinkscope.measures.super_neurons import channel_sparsity
from sinkscope.models.loading import LoadedModel
from sinkscope.models.token_batches import TokenBatch, token_batch

QUANTITIES = {
    "variance_ratio": "1. variance of the value aggregation across sequences, position 0 over the later half",
    "write_contrast": "2. largest write of a neuron at the sink over its median at other positions",
    "top_share": "3. energy share of the top dimension in that neuron's output vector",
    "dom_ratio": "4. largest over mean magnitude of the residual at the sink",
    "dom_ratio_elsewhere": "   the same at positions that are no sink",
    "largest_residual": "   largest magnitude in the residual, over all tokens",
    "effective_rank": "   effective rank of the residuals",
    "cosine": "5. mean cosine of the sink's state over pairs of sequences",
    "positive_queries": "   share of later queries that agree with the sink's key, over heads",
    "sink_rate": "6. share of heads and sequences that count the position as a sink",
    "attention": "   mean attention on the position",
}
"""What each quantity says; all are per layer."""


@dataclass(frozen=True)
class Probe:
    """One reading: numbers of the whole model and of each layer."""

    whole: dict[str, float | None]
    layers: dict[str, list[float | None]]

    def row(self) -> dict[str, Any]:
        return {"whole": self.whole, "layers": self.layers}


def probe(model: PreTrainedModel, batch: TokenBatch, *, effective_rank: bool = True) -> Probe:
    """The six observables of a model in memory on a batch, eagerly and in the dtype of its weights."""
    loaded = loaded_model(model)
    findings = trace(loaded, batch, effective_rank=effective_rank).findings
    with evaluation_mode(model):
        # Not the key of the largest rate where none is a sink's: late keys, which few queries see, pass its
        # threshold by chance.
        position, rate = findings.strongest if findings.sinks else findings.most_attended
        layers = _layers(findings, position)
        num_super_neurons = len(findings.super_neurons)
    whole: dict[str, float | None] = {"sink_position": position, "sink_rate": _number(rate)}
    whole["num_sinks"] = len(findings.sinks)
    whole["num_massive_dimensions"] = len({entry.dimension for entry in findings.massive})
    whole["num_super_neurons"] = num_super_neurons
    return Probe(whole, {name: _numbers(values) for name, values in layers.items()})


def random_batch(model: PreTrainedModel, *, length: int, num_sequences: int, seed: int = 0) -> TokenBatch:
    """Uniformly random tokens, the same at every step."""
    return token_batch(loaded_model(model), "random", length=length, num_sequences=num_sequences, seed=seed)


def text_batch(windows_BT: Tensor, *, length: int) -> TokenBatch:
    """The beginnings of some windows of held-out text."""
    return TokenBatch(ids=windows_BT[:, :length].clone(), kind="text", source="validation")


def loaded_model(model: PreTrainedModel) -> LoadedModel:
    """A model in memory as tracing takes it; unlike `load`, it doesn't hash the weights, which change anyway."""
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return LoadedModel(
        model=model,
        tokenizer=None,
        name="model in training",
        source="given",
        weight_hash="",
        dtype=dtype,
        trust_remote_code=False,
    )


def _layers(findings: Findings, position: int) -> dict[str, Tensor | list[float]]:
    recording = findings.recording
    write_LT = recording["largest_write"]
    others = torch.arange(write_LT.shape[1]) != position
    key = int((recording.keys == position).nonzero()[0])
    layers: dict[str, Tensor | list[float]] = {
        "write_contrast": write_LT[:, position] / write_LT[:, others].median(1).values,
        "top_share": _top_shares(findings, recording["largest_write_unit"][:, position]),
        "sink_rate": recording["head_sink_rate"][:, :, key].float().mean(1),
        "attention": recording["received"][:, :, key].mean(1),
        "positive_queries": _at_lock(findings, position),
    }
    layers["dom_ratio"], layers["dom_ratio_elsewhere"] = findings.dom_ratio_at(position)
    layers["largest_residual"] = recording["largest_residual"].amax(1)
    if findings.variance_ratio is not None:
        layers["variance_ratio"] = findings.variance_ratio
    if "cosine" in recording:
        layers["cosine"] = recording["cosine"][:, position]
    if (ranks := findings.effective_ranks[0]) is not None:
        layers["effective_rank"] = ranks
    return {name: layers[name] for name in QUANTITIES if name in layers}


def _top_shares(findings: Findings, units_L: Tensor) -> list[float]:
    """[L] how channel-sparse the output vector of each layer's strongest writer is."""
    layers = findings.recording.anatomy.layers
    vectors = [layer.output_vectors(unit[None].cpu()) for layer, unit in zip(layers, units_L, strict=True)]
    return [float(channel_sparsity(vector.cpu()).top_share) for vector in vectors]


def _at_lock(findings: Findings, position: int) -> list[float]:
    """[L] the share of later queries with q . k > 0, where the lock was read at the position; NaN elsewhere."""
    positive_LHQ, _ = findings.lock
    at_LQ = findings.lock_positions == position
    return [
        float(positive_HQ[:, at_Q].mean()) if bool(at_Q.any()) else float("nan")
        for positive_HQ, at_Q in zip(positive_LHQ, at_LQ, strict=True)
    ]


def _numbers(values: Tensor | list[float]) -> list[float | None]:
    return [_number(value) for value in (values.tolist() if isinstance(values, Tensor) else values)]


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
