"""The observables of the sink chain, traced on fixed batches while a model trains.

All of them describe one position: the strongest sink or, while there is none, the key that receives the most attention.
So each link can be followed before it is strong, and the links can be ordered by when they appear.

`SinkProbe` does the same inside the Hugging Face Trainer:

    trainer = Trainer(model, args, train_dataset=...)
    trainer.add_callback(sinkscope.SinkProbe(trainer.log, every=100))

Its rows go to probes.jsonl in the output folder, the numbers of the whole model also through the trainer's log to
wherever it reports (report_to), as sinkscope/sink_rate and so on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sinkscope.errors import InputError
from sinkscope.measures.sink_score import eligible_positions
from sinkscope.measures.super_neurons import channel_sparsity
from sinkscope.models.loaded import LoadedModel, ModelLike, bare_model
from sinkscope.models.loading import load
from sinkscope.models.prompts import Tokens
from sinkscope.models.sharded import is_sharded
from sinkscope.models.token_batches import TokenBatch, token_batch
from sinkscope.pretrain.config import check_probe_length
from sinkscope.pretrain.metrics import JsonLines, read_rows
from sinkscope.tracing.findings import Findings
from sinkscope.tracing.layer_call import LayerCall
from sinkscope.tracing.observables import CHAIN, HookPoint, Observable
from sinkscope.tracing.reducers import Largest
from sinkscope.tracing.single_reader import evaluation_mode
from sinkscope.tracing.trace import trace

# The numbers are the links of the chain (docs/concepts.md); lines without one give context to the link above them.
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
"""What each quantity means; there is one value for each layer."""


PREFIX = "sinkscope/"
"""Before the names that SinkProbe adds to the Trainer's log."""


@dataclass(frozen=True, repr=False)
class Probe:
    """One probe: numbers for the whole model and for each layer."""

    whole: dict[str, float | None]
    """For a logger. The position of the strongest sink or, if there is none, of the key that receives the most
    attention; its sink rate; the number of sinks; how many massive dimensions and super neurons that position has; its
    largest DomRatio in any layer (`disparity`); and over all tokens and layers the largest magnitude in the residual
    stream and the largest attention logit."""
    layers: dict[str, list[float | None]]
    """The quantities of QUANTITIES at that position, by layer."""

    def row(self) -> dict[str, Any]:
        return {"whole": self.whole, "layers": self.layers}

    def __repr__(self) -> str:
        return f"Probe(whole={self.whole}, layers of {', '.join(self.layers)})"


def probe(model: ModelLike, batch: Tokens, *, effective_rank: bool = True) -> Probe:
    """The observables of the sink chain of a model in training, on a batch; for any training loop.

        tracker.log(sinkscope.probe(model, batch).whole)

    `.whole` holds numbers to log, `.layers` those of each layer; QUANTITIES says what they mean. The model runs in the
    dtype of its weights, not compiled. Its mode, its gradients and the random state are left as they were.
    """
    model = bare_model(model)
    loaded = loaded_model(model) if isinstance(model, nn.Module) else load(model)
    findings = trace(loaded, batch, observables=[*CHAIN, LARGEST_LOGIT], effective_rank=effective_rank).findings
    with evaluation_mode(loaded.model):
        # Without a sink the key with the largest rate would be a late one: few queries see it, so it passes the
        # threshold by chance. The key that receives the most attention is taken instead.
        position, rate = findings.strongest if findings.sinks else findings.most_attended
        layers = _layers(findings, position)
        num_super_neurons = sum(neuron.position == position for neuron in findings.super_neurons)
    whole: dict[str, float | None] = {"sink_position": position, "sink_rate": _finite(rate)}
    # In a short batch no key has enough later queries to be a sink: the number of sinks is not 0, but unknown.
    has_eligible = bool(eligible_positions(findings.recording.batch.length).any())
    whole["num_sinks"] = len(findings.sinks) if has_eligible else None
    whole["num_massive_dimensions"] = len({e.dimension for e in findings.massive if e.position == position})
    whole["num_super_neurons"] = num_super_neurons
    whole["disparity"] = _finite(float(torch.as_tensor(layers["dom_ratio"]).max()))
    whole["largest_activation"] = float(torch.as_tensor(layers["largest_residual"]).max())
    whole["largest_logit"] = float(findings.recording["largest_logit"].max())
    by_layer = {}
    for name, values in layers.items():
        listed = values.tolist() if isinstance(values, Tensor) else values
        by_layer[name] = [_finite(value) for value in listed]
    return Probe(whole, by_layer)


def _largest_logits(call: LayerCall) -> tuple[Tensor, Tensor]:
    """([B, H] the largest q . k * scaling over the keys that each query sees, [B, H] the query it is of), a few queries
    at a time."""
    grouped_BKGTD = call.query.unflatten(1, (call.key.shape[1], -1))
    keys_BK1DS, length = call.key.unsqueeze(2).transpose(3, 4), call.query.shape[2]
    positions = torch.arange(length, device=call.query.device)
    largest = []
    for queries_n in positions.split(QUERIES_AT_ONCE):
        hidden_nS = positions > queries_n[:, None]
        if call.rule.window is not None:
            hidden_nS |= positions <= queries_n[:, None] - call.rule.window
        logits_BKGnS = (grouped_BKGTD[..., queries_n, :] @ keys_BK1DS).float() * call.rule.scaling
        largest.append(logits_BKGnS.masked_fill(hidden_nS, -math.inf).amax(-1))
    of_query = torch.cat(largest, dim=-1).flatten(1, 2).max(-1)
    return of_query.values, of_query.indices


QUERIES_AT_ONCE = 256
LARGEST_LOGIT = Observable(
    name="largest_logit",
    hook_point=HookPoint.ATTENTION,
    value=_largest_logits,
    reducer=Largest("query"),
    axes="LH",
    meaning="Largest q . k * scaling of any sequence",
)


def random_batch(model: PreTrainedModel, *, length: int, num_sequences: int, seed: int = 0) -> TokenBatch:
    """Uniformly random tokens, the same at every step."""
    return token_batch(loaded_model(model), "random", length=length, num_sequences=num_sequences, seed=seed)


def text_batch(windows_BT: Tensor, *, length: int) -> TokenBatch:
    """The beginnings of some windows of held-out text."""
    return TokenBatch(ids=windows_BT[:, :length].clone(), kind="text", source="validation")


def loaded_model(model: Any) -> LoadedModel:
    """A model in memory, ready to trace; unlike `load`, without a look at the weights, which keep changing."""
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return LoadedModel(
        model=model,
        tokenizer=None,
        name="model in training",
        source="given",
        dtype=dtype,
        trust_remote_code=False,
    )


def _layers(findings: Findings, position: int) -> dict[str, Tensor | list[float]]:
    """The quantities at a position, [L] each, in the order of QUANTITIES; what the pass did not record is left out."""
    recording = findings.recording
    write_LT = recording["largest_write"]
    others = torch.arange(write_LT.shape[1]) != position
    key = int((recording.keys == position).nonzero()[0])  # attention is recorded for some keys, in this order
    rate_L = recording["head_sink_rate"][:, :, key].float().mean(1)
    is_eligible = bool(eligible_positions(recording.batch.length)[position])
    layers: dict[str, Tensor | list[float]] = {
        "write_contrast": write_LT[:, position] / write_LT[:, others].median(1).values,
        "top_share": _top_shares(findings, recording["largest_write_neuron"][:, position]),
        "sink_rate": rate_L if is_eligible else torch.full_like(rate_L, math.nan),
        "attention": recording["received"][:, :, key].mean(1),
        "positive_queries": _positive_queries(findings, position),
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


def _top_shares(findings: Findings, neurons_L: Tensor) -> list[float]:
    """[L] the energy share of the top dimension in the output vector of each layer's strongest neuron."""
    shares = [math.nan] * len(neurons_L)
    for layer in findings.recording.anatomy.feed_forward_layers:
        vector = layer.output_vectors(neurons_L[layer.index][None].cpu())
        shares[layer.index] = float(channel_sparsity(vector.cpu()).top_share)
    return shares


def _positive_queries(findings: Findings, position: int) -> list[float]:
    """[L] the share of later queries with q . k > 0 at a position, mean over heads.

    NaN in layers where the position is not among the few, Q, whose keys a layer was asked about.
    """
    positive_AHQ, _ = findings.lock
    at_AQ = findings.lock_positions == position
    shares = [math.nan] * findings.recording.num_layers
    for layer, positive_HQ, at_Q in zip(findings.recording.attention_layers, positive_AHQ, at_AQ, strict=True):
        if bool(at_Q.any()):
            shares[layer] = float(positive_HQ[:, at_Q].mean())
    return shares


def _finite(value: float) -> float | None:
    """The value; None for NaN and infinity, which JSON does not have."""
    return value if math.isfinite(value) else None


class SinkProbe(TrainerCallback):
    """Probes the model before training and every `every` steps, on random tokens or on a given batch.

        trainer.add_callback(sinkscope.SinkProbe(trainer.log, every=100))

    `log` is the method of the trainer, because a callback is not given its trainer.
    """

    def __init__(
        self,
        log: Callable[[dict[str, float]], None],
        *,
        every: int = 100,
        batch: TokenBatch | None = None,
        length: int = 64,
        num_sequences: int = 32,
    ) -> None:
        if every < 1:
            raise InputError(f"`every` must be at least 1 step, not {every}.")
        if batch is None:
            check_probe_length(length, "Raise `length`.")
        else:
            check_probe_length(batch.length, "Give longer sequences as `batch`.")
        self.log = log
        self.every = every
        self.batch = batch
        self.length = length
        self.num_sequences = num_sequences
        self.rows: list[dict[str, Any]] = []
        """The probes so far, as in probes.jsonl."""
        self._file: JsonLines | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        if args.include_num_input_tokens_seen == "no":
            # Else the Trainer counts no tokens, and rows of two runs could not be compared at equal tokens. The count
            # adds up over processes, so it is turned on in each of them.
            args.include_num_input_tokens_seen = "all"
        if not self._takes_part(state, kwargs["model"]):
            return
        if self.batch is None:
            self.batch = random_batch(kwargs["model"], length=self.length, num_sequences=self.num_sequences)
        if state.is_world_process_zero:
            self._open(Path(args.output_dir or "."), state.global_step)
        if not state.global_step:
            self._probe(state, control, kwargs["model"])

    def _open(self, folder: Path, step: int) -> None:
        """Opens probes.jsonl. When training resumes, rows up to its step stay; later ones are dropped, since those
        steps are done again."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "probes.jsonl"
        earlier = read_rows(path) if step and path.exists() else []
        self._file = JsonLines(path, [row for row in earlier if row["step"] <= step])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        if state.global_step % self.every == 0 and self._takes_part(state, kwargs["model"]):
            self._probe(state, control, kwargs["model"])

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _takes_part(self, state: TrainerState, model: Any) -> bool:
        """Whether this process probes: the first one or, if they share the weights, each of them."""
        return state.is_world_process_zero or is_sharded(model)

    def _probe(self, state: TrainerState, control: TrainerControl, model: Any) -> None:
        assert self.batch is not None
        result = probe(model, self.batch)
        if self._file is None:  # only the first process writes
            return
        tokens = int(state.num_input_tokens_seen)
        row = {"step": state.global_step, "tokens": tokens, "batch": self.batch.kind, **result.row()}
        self.rows.append(row)
        self._file.write(row)
        # Trainer.log() clears should_log, which would drop this step's loss, so it is restored.
        should_log = control.should_log
        self.log({f"{PREFIX}{name}": value for name, value in result.whole.items() if value is not None})
        control.should_log = should_log
