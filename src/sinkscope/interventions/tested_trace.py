"""trace(model, batch): the sink chain, with the neurons that it names removed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from sinkscope import processes
from sinkscope.interventions.neurons import ablate_neurons, matched_neurons
from sinkscope.models.anatomy import Group, Neuron, anatomy_of, as_neuron
from sinkscope.models.loaded import LoadedModel, ModelLike
from sinkscope.models.loading import load
from sinkscope.models.prompts import Tokens
from sinkscope.models.sharded import is_sharded
from sinkscope.progress import Progress
from sinkscope.tracing import trace as plain
from sinkscope.tracing.findings import Findings
from sinkscope.tracing.observables import SINK_HEADS, Observable
from sinkscope.tracing.open_interventions import check_is_object, open_interventions
from sinkscope.tracing.recorder import CHUNK_TOKENS, record
from sinkscope.tracing.removal import MOST_SEQUENCES, Removal, rates


def trace(
    model: ModelLike,
    batch: Tokens | None = None,
    *,
    observables: Iterable[Observable | str] | None = None,
    keys: Sequence[int] | None = None,
    effective_rank: bool = True,
    test: bool = True,
    chunk_tokens: int = CHUNK_TOKENS,
    progress: Progress | None = None,
) -> plain.Trace:
    """The sink chain of a model on a batch of tokens, a text, a chat, a list of these, or ids. Without a batch, random
    tokens are read, as `token_batch` draws them.

        result = sinkscope.trace(model, "The cat sat on the mat.")
        result.story, result.findings.sinks, result.table("heads")

    `observables`: what to record, by name or as records of your own; all of CHAIN by default. `keys`: record attention
    on these key positions alone. `effective_rank=False` leaves out the one number that needs a decomposition. Batches
    of more than `chunk_tokens` tokens are run in chunks, and joining them is exact.

    `test`: read at most eight of the sequences twice more, without the neurons that the story names and without as many
    random ones. Inside an intervention, and of a model that is sharded over processes, nothing is tested, and the story
    says only what is observed.
    """
    check_is_object(model)  # before a name is loaded: what an intervention changes is an object
    loaded = load(model)
    result = plain.trace(
        loaded,
        batch,
        observables=observables,
        keys=keys,
        effective_rank=effective_rank,
        chunk_tokens=chunk_tokens,
        progress=progress,
    )
    return with_neurons_removed(loaded, result, chunk_tokens) if test else result


def with_neurons_removed(loaded: LoadedModel, trace: plain.Trace, chunk_tokens: int = CHUNK_TOKENS) -> plain.Trace:
    """The trace with what is left of its sinks without the neurons that it names; as it is where it names none, and
    where nothing can be removed: inside an intervention, and from weights that are spread over processes."""
    is_shared = is_sharded(loaded.model)
    if not trace.has_findings or is_shared or open_interventions(anatomy_of(loaded.model).decoder):
        return trace
    findings = trace.findings
    named = processes.from_first(lambda: _named(findings))
    if not named:
        return trace
    batch, positions = findings.recording.batch, sorted(sink.position for sink in findings.sinks)
    num_sequences = min(MOST_SEQUENCES, batch.num_sequences, max(1, chunk_tokens // batch.length))
    if batch.beside:
        num_sequences = batch.num_sequences  # pixels are not told apart by sequence, so they cannot be cut
    few = replace(batch, ids=batch.ids[:num_sequences], whole=())
    random = processes.from_first(lambda: _random(findings, named))

    def without(neurons: Iterable[Neuron]) -> Tensor:
        with ablate_neurons(loaded, neurons):
            return record(loaded, few, [SINK_HEADS], keys=positions).sequence_sink_rate

    columns = torch.searchsorted(findings.recording.keys, torch.tensor(positions))
    removal = Removal(
        neurons=tuple(named),
        random=tuple(random),
        num_sequences=num_sequences,
        before=rates(findings.recording.sequence_sink_rate[:num_sequences, columns], positions),
        without_neurons=rates(without(named), positions),
        without_random=rates(without(random), positions),
    )
    return replace(trace, removal=removal)


def _named(findings: Findings) -> dict[Neuron, int]:
    """The neurons that are named for any sink, each with the first of its sinks."""
    named: dict[Neuron, int] = {}
    for sink in findings.sinks:
        writers, _ = findings.named_neurons[sink.position]
        for neuron in writers:
            named.setdefault(as_neuron(neuron), sink.position)
    return named


def _random(findings: Findings, named: Mapping[Neuron, int]) -> list[Neuron]:
    """As many others, matched by what they write at the same sink."""
    excluded = [*map(as_neuron, findings.moving_neurons), *named]
    writes = cache(lambda position, group: _writes(findings, position, group))
    random: list[Neuron] = []
    for number, (neuron, position) in enumerate(named.items()):
        sizes = {neuron[:2]: writes(position, neuron[:2])}
        anatomy = findings.recording.anatomy
        random += matched_neurons(anatomy, [neuron], [*excluded, *random], seed=number, sizes=sizes)
    return random


def _writes(findings: Findings, position: int, group: Group) -> Tensor:
    """[F] root mean square activation times the norm of the output vector, of each neuron of a group at a position."""
    number, expert = group
    layer = findings.recording.anatomy.layers[number]
    square_U = findings.recording.at_layers("neuron_square")[number][findings.slot(number, position)].float().cpu()
    sizes = {group_of: weight.shape[1] for group_of, weight in layer.down_weights()}
    squares = dict(zip(sizes, square_U.split(list(sizes.values())), strict=True))
    return squares[expert].sqrt() * torch.linalg.vector_norm(layer.written_vectors(expert).cpu(), dim=0)
