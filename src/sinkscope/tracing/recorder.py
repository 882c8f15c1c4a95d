"""record(model, batch, observables): records observables in one forward pass, reducing them while the model runs.

A large batch is run in chunks, and under torchrun each process runs its share of the sequences; the reducer of each
observable joins the parts. Two things must be known of all sequences beforehand: the variance of the values, for the
averaging law, and the positions of interest. If the batch runs in parts, a first pass, the survey, finds them.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope import processes
from sinkscope.arguments import check_context, check_count, check_keys
from sinkscope.errors import InputError
from sinkscope.models.anatomy import Anatomy, Layer, anatomy_of, input_device
from sinkscope.models.loaded import LoadedModel
from sinkscope.models.sharded import from_rank_0, is_sharded
from sinkscope.models.token_batches import TokenBatch
from sinkscope.processes import moved
from sinkscope.progress import Progress
from sinkscope.tracing.attention_rule import ReadingRequest, distances
from sinkscope.tracing.hooks import open_hooks
from sinkscope.tracing.layer_call import LayerCall, Passing, SurveyResult, blame, pick_positions, with_received
from sinkscope.tracing.observables import ENTERING, SURVEY, HookPoint, Observable, hook_points_of
from sinkscope.tracing.open_interventions import check_acted, check_chunks
from sinkscope.tracing.receipt import PassComparison, check_images, check_reading, run_pass
from sinkscope.tracing.reducers import Cosine, Moments
from sinkscope.tracing.single_reader import evaluation_mode, in_this_thread

CHUNK_TOKENS = 1 << 17
"""Most tokens in one forward pass: as many as a long context has, so a batch needs no more memory than one text."""


class Recorder:
    """Records some observables at the hook points of a model, and joins what several passes gave."""

    def __init__(
        self,
        anatomy: Anatomy,
        observables: Sequence[Observable],
        *,
        keys: Tensor | None = None,
        survey: SurveyResult | None = None,
        several: bool = True,
        joinable: bool = False,
    ) -> None:
        """`keys`: record attention on these keys alone. `several`: whether the whole batch has several sequences, which
        variances and cosines need. `joinable`: whether several passes will be joined, so that reducers keep what
        joining needs."""
        self.anatomy, self.keys, self.survey, self.several, self.joinable = anatomy, keys, survey, several, joinable
        self.observables = [o for o in observables if several or not _needs_several(o)]
        self.joined: dict[str, dict[int, Any]] = defaultdict(dict)
        """By observable and layer, the reducer's state over the passes so far."""
        self.attention_path = ""

    @contextlib.contextmanager
    def listening(self, shape: tuple[int, int], layers: Sequence[Layer] | None = None) -> Iterator[None]:
        """While open, records one pass of sequences of this shape. `layers`: the consecutive layers that the pass runs,
        if not all."""
        extra_data = {observable.asks for observable in self.observables}
        passing = Passing(
            anatomy=self.anatomy,
            shape=shape,
            request=ReadingRequest(
                keys=self.keys,
                distances=distances(shape[1]) if "distances" in extra_data else (),
                own="own weights" in extra_data,
            ),
            weigh_mixing=self.several and "averaging law" in extra_data,
            survey=self.survey,
        )
        of_pass: dict[str, dict[int, Any]] = defaultdict(dict)

        def on_hook(hook_point: HookPoint, call: LayerCall) -> None:
            for observable in self._at(hook_point, call.index):
                if (values := observable.value(call)) is not None:
                    of_pass[observable.name][call.index] = observable.reducer.of(values, self.joinable)

        layers = layers or self.anatomy.layers
        follow = any(map(_needs_positions, self.observables))
        with open_hooks(passing, layers, self._hook_points, on_hook, follow_positions=follow):
            yield
        self.attention_path = passing.attention_path
        self._check_complete(of_pass, layers)
        self.add(of_pass)

    def read(self, model: nn.Module, ids_BT: Tensor) -> dict[str, dict[int, Any]]:
        """The results of one pass of some sequences. It ends after the last layer with an observable."""
        last = max(layer.index for layer in self.anatomy.layers if self._hook_points(layer.index))
        layers, shape = self.anatomy.layers[: last + 1], (ids_BT.shape[0], ids_BT.shape[1])
        with (
            torch.no_grad(),
            evaluation_mode(model),
            self.listening(shape, layers),
            ending_after(layers[-1].block),
        ):
            self.anatomy.decoder(input_ids=ids_BT.to(input_device(self.anatomy)), use_cache=False)
        return self.results()

    def add(self, of_pass: dict[str, dict[int, Any]]) -> None:
        """Joins what another pass recorded."""
        reducers = {observable.name: observable.reducer for observable in self.observables}
        for name, by_layer in of_pass.items():
            for layer, values in by_layer.items():
                before = self.joined[name].get(layer)
                self.joined[name][layer] = values if before is None else reducers[name].join(before, values)

    def join_processes(self) -> None:
        """Joins what all processes recorded of their sequences, in the order of the processes."""
        if processes.count() > 1:
            shares = processes.gathered((dict(self.joined), self.attention_path))
            self.joined.clear()
            for of_process, path in shares:
                self.add(of_process)
                self.attention_path = self.attention_path or path

    def take_from_rank_0(self) -> None:
        """Takes what rank 0 recorded of the same sequences, so that all go on with the same numbers to the bit: what
        they find decides which weights they gather next."""
        recorded = moved((dict(self.joined), self.attention_path), "cpu")
        joined, self.attention_path = from_rank_0(recorded)
        self.joined = defaultdict(dict, joined)

    def results(self) -> dict[str, dict[int, Any]]:
        """By name and layer, the values over all passes. A reducer may give several, with a suffix to the name:
        `value_variance` and `value_variance_by_channel`."""
        results: dict[str, dict[int, Any]] = defaultdict(dict)
        for observable in self.observables:
            for layer, joined in sorted(self.joined.get(observable.name, {}).items()):
                for suffix, values in observable.reducer.result(joined).items():
                    results[observable.name + suffix][layer] = values
        return dict(results)

    def _at(self, hook_point: HookPoint, layer: int) -> list[Observable]:
        return [o for o in self.observables if o.hook_point is hook_point and self._listens(o, layer)]

    def _hook_points(self, layer: int) -> set[HookPoint]:
        return {o.hook_point for o in self.observables if self._listens(o, layer)}

    def _listens(self, observable: Observable, layer: int) -> bool:
        """Whether an observable is recorded in a layer: in those that it names, where they have its hook point."""
        if observable.layers is not None and layer not in observable.layers:
            return False
        return observable.hook_point in (ENTERING if layer < 0 else hook_points_of(self.anatomy.layers[layer]))

    def _check_complete(self, of_pass: dict[str, dict[int, Any]], layers: Sequence[Layer]) -> None:
        """Raises if a layer recorded nothing: then a module is not where the family table says."""
        # At these, all layers may have nothing: numbers of whole rows if only some keys are recorded, and no norm.
        may_be_empty = (HookPoint.ATTENTION, HookPoint.BEFORE_NORM)
        for observable in self.observables:
            expected = {layer.index for layer in layers if self._listens(observable, layer.index)}
            recorded = of_pass.get(observable.name, {}).keys()
            if recorded and (missing := sorted(expected - recorded)):
                raise RuntimeError(f"Layer {missing[0]} recorded no {observable.name}. {blame(self.anatomy)}")
            if expected and not recorded and observable.hook_point not in may_be_empty:
                raise RuntimeError(f"No layer recorded {observable.name}. {blame(self.anatomy)}")


@dataclass(frozen=True, kw_only=True, repr=False)
class Recording:
    """What one model did on one batch. `recording[name]` is an observable of all layers, on the CPU."""

    model_name: str
    anatomy: Anatomy
    batch: TokenBatch
    attention_path: str
    keys: Tensor
    """[S] recorded key positions."""
    distances: tuple[int, ...]
    observables: tuple[Observable, ...]
    by_layer: dict[str, dict[int, Any]]
    """By name and layer; -1 is the residual stream that enters layer 0."""
    elapsed_s: float
    comparison: PassComparison
    """How the model's own pass and the pass that was read differ."""
    _stacked: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        """The layers' values in one tensor, layers first. In a hybrid, layers without attention have NaN for what is
        read of attention, and counts of 0; layers without a feed-forward likewise."""
        return self._stack(name, least=0)

    def of_attention(self, name: str) -> Tensor:
        """[A, ...] the same of the layers with attention alone (`attention_layers`): all of them but in a hybrid."""
        return self[name][self.attention_layers] if self.anatomy.is_hybrid else self[name]

    def rows(self, name: str) -> Tensor:
        """The same for an observable of the residual stream, with one more row in front: what enters layer 0."""
        return self._stack(name, least=-1)

    def reduced(self, name: str, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        """[L, ...] each layer's values after `reduce`, which runs on their device: moving all values of a long text to
        the CPU would be slow."""
        reduced = {layer: reduce(values) for layer, values in self.at_layers(name).items()}
        return _on_cpu(self._in_layers(reduced, least=0))

    def _stack(self, name: str, least: int) -> Tensor:
        if (name, least) not in self._stacked:
            self._stacked[name, least] = _on_cpu(self._in_layers(self.at_layers(name), least))
        return self._stacked[name, least]

    def _in_layers(self, by_layer: dict[int, Tensor], least: int) -> list[Tensor]:
        recorded = {layer: values for layer, values in by_layer.items() if layer >= least}
        return in_each_layer(self.anatomy, recorded, range(least, self.num_layers))

    def __contains__(self, name: str) -> bool:
        return name in self.by_layer

    def at_layers(self, name: str) -> dict[int, Any]:
        """The values of an observable by layer, on the device where each was recorded."""
        if name not in self.by_layer:
            raise InputError(
                f"{name} was not recorded, only {', '.join(self.by_layer)}. Leave `observables` out, or name it there."
            )
        return self.by_layer[name]

    def __repr__(self) -> str:
        return f"Recording({self.model_name}: {', '.join(self.by_layer)})"

    @property
    def by_position(self) -> dict[str, Tensor]:
        """By name [L, T], the observables that have a value in each layer at each position."""
        everywhere = (o.name for o in self.observables if o.axes == "LT" and o.asks != "positions of interest")
        return {name: self[name] for name in everywhere if name in self}

    @property
    def num_layers(self) -> int:
        return len(self.anatomy.layers)

    @cached_property
    def attention_layers(self) -> list[int]:
        """The layers that have attention."""
        return [layer.index for layer in self.anatomy.attention_layers]

    @property
    def sequence_sink_rate(self) -> Tensor:
        """[B, S] share of all heads, of layers with attention, that count the key as a sink, by sequence."""
        return self["sink_heads"].sum(0) / self.anatomy.num_heads_of_all_layers

    @property
    def sink_rate(self) -> Tensor:
        """[S] mean over sequences, layers and heads."""
        return self.sequence_sink_rate.mean(0)


def in_each_layer(anatomy: Anatomy, by_layer: dict[int, Tensor], layers: Iterable[int]) -> list[Tensor]:
    """The values of the layers in order. Layers of a hybrid that have none get NaN, or 0 for whole numbers."""
    if not anatomy.is_hybrid:
        return [values for _, values in sorted(by_layer.items())]
    example = next(iter(by_layer.values()))
    missing = torch.full_like(example, float("nan") if example.is_floating_point() else 0)
    return [by_layer.get(layer, missing) for layer in layers]


def record(
    loaded: LoadedModel,
    batch: TokenBatch,
    observables: Sequence[Observable],
    *,
    keys: Sequence[int] | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    progress: Progress | None = None,
) -> Recording:
    """The observables of a causal language model on a batch of tokens; `keys` restricts attention to chosen keys."""
    anatomy, sharded = anatomy_of(loaded.model), is_sharded(loaded.model)
    comparison = check_reading(loaded.model, anatomy)
    keys_S = _checked_keys(keys, batch.length, anatomy.context)
    started_at = time.perf_counter()
    if batch.beside:
        check_images(loaded.model, anatomy, batch)
        chunk_tokens = batch.ids.numel()  # pixels are not told apart by sequence, so they cannot be cut
    ids_BT = processes.share(batch.ids)
    chunks = ids_BT.split(max(1, chunk_tokens // batch.length)) if len(ids_BT) else ()  # a process may have no share
    whole = processes.count() == 1 and len(chunks) == 1
    check_chunks(1 if whole else max(2, len(chunks)))  # another process has sequences too, so they are at least 2
    done, several = 0, batch.num_sequences > 1
    num_passes = len(chunks) * (1 if whole else 2)

    def run(selected: Sequence[Observable], survey: SurveyResult | None) -> Recorder:
        nonlocal done
        recorder = Recorder(anatomy, selected, keys=keys_S, survey=survey, several=several, joinable=not whole)
        for chunk in chunks:
            with without_autograd(loaded), evaluation_mode(loaded.model), recorder.listening(tuple(chunk.shape)):
                run_pass(loaded.model, anatomy, chunk, batch.beside)
            check_acted(anatomy.decoder)
            done += 1
            if progress is not None:
                progress(done, num_passes)
        recorder.join_processes()
        if sharded:
            recorder.take_from_rank_0()
        return recorder

    # A pass that sees the whole batch finds both itself, before it needs them.
    needs_survey = any(_needs_positions(o) or o.asks == "averaging law" for o in observables)
    survey = None
    if needs_survey and not whole:
        survey = _survey_result(run(SURVEY, None), keys_S, batch.length)
    recorder = run(observables, survey)
    return Recording(
        model_name=loaded.name,
        anatomy=anatomy,
        batch=batch,
        attention_path=recorder.attention_path,
        keys=torch.arange(batch.length) if keys_S is None else keys_S,
        distances=distances(batch.length),
        observables=tuple(observables),
        by_layer=recorder.results(),
        elapsed_s=time.perf_counter() - started_at,
        comparison=comparison,
    )


def _on_cpu(rows: list[Tensor]) -> Tensor:
    """The rows in one tensor on the CPU, by one transfer unless the model is spread over several devices."""
    alike = len({row.device for row in rows}) == 1
    return torch.stack(rows if alike else [row.cpu() for row in rows]).cpu()


def _needs_several(observable: Observable) -> bool:
    """Whether an observable compares sequences, so that a single sequence has no value."""
    return isinstance(observable.reducer, Moments | Cosine) or observable.asks == "positions of interest"


def _needs_positions(observable: Observable) -> bool:
    """Whether an observable is recorded at the positions of interest."""
    return "P" in observable.axes or observable.asks == "positions of interest"


def _survey_result(survey: Recorder, keys_S: Tensor | None, length: int) -> SurveyResult:
    """What the survey found out about all sequences: the variance of their values, and the positions of interest that
    one pass over the whole batch would pick."""
    results = survey.results()
    received_T: Tensor | None = None
    top_positions = []
    for layer, ratio_T in results["dom_ratio"].items():
        ratio_T = ratio_T.nan_to_num(nan=0.0)
        if layer in results["received"]:
            received_T = with_received(received_T, results["received"][layer][None], keys_S, length)
        top_positions.append(pick_positions(ratio_T, ratio_T if received_T is None else received_T))
    return SurveyResult(results.get("value_variance_by_key", {}), top_positions)


def _checked_keys(keys: Sequence[int] | None, length: int, context: int | None) -> Tensor | None:
    """[S] the chosen keys, sorted; None for all. Refuses keys and lengths that cannot be."""
    check_count("length", length, 2)
    check_context(length, context)
    check_keys(keys, length)
    return None if keys is None else torch.tensor(sorted(set(map(int, keys))), dtype=torch.long)


def without_autograd(loaded: LoadedModel) -> contextlib.AbstractContextManager:
    """Inference mode, or no_grad for a model that its owner may train.

    Inference mode costs less for each operation: on a short text it saves a sixth of our overhead. But tensors that a
    model caches in such a pass (some rotary embeddings are) cannot take part in training later.
    """
    may_be_trained = loaded.source == "given" and any(p.requires_grad for p in loaded.model.parameters())
    return torch.no_grad() if may_be_trained else torch.inference_mode()


class _PassEndedError(Exception):
    """Raised by a hook to end a pass whose later modules are not needed."""


@contextlib.contextmanager
def ending_after(module: nn.Module) -> Iterator[None]:
    """A pass inside ends when the module has run, and gives no result."""

    def end(module, args, output) -> None:
        raise _PassEndedError

    handle = module.register_forward_hook(in_this_thread(end))
    try:
        with contextlib.suppress(_PassEndedError):
            yield
    finally:
        handle.remove()
