"""study(model): decides link by link whether the chain holds in a model, by interventions with their controls.

There are three sets of sequences, which share none. The choosing set fixes the plan and the minimal set, the
calibration set the means; the judging set decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from sinkscope import processes
from sinkscope.arguments import STUDY_LENGTH, STUDY_SEQUENCES, check_study
from sinkscope.errors import InputError
from sinkscope.interventions.calibration import MIN_CALIBRATION
from sinkscope.interventions.plan import Plan, make_plan
from sinkscope.measures.sink_score import MIN_SINK_RATE, are_sinks
from sinkscope.models.anatomy import Neuron, anatomy_of, check_every_layer
from sinkscope.models.loaded import LoadedModel, ModelLike
from sinkscope.models.loading import load
from sinkscope.models.rotation import RotationError, rotate
from sinkscope.models.token_batches import TokenBatch, batch_with_others
from sinkscope.pages.text import percent
from sinkscope.progress import Progress
from sinkscope.results.parts import Parts
from sinkscope.results.result import Result
from sinkscope.results.run_folder import RunFolder
from sinkscope.results.tables import Schema
from sinkscope.studies.answer import answer, cause, counts
from sinkscope.studies.checks import unless_marked
from sinkscope.studies.claims import CLAIMS
from sinkscope.studies.condition_result import STORED, ConditionResult, reduced
from sinkscope.studies.condition_runner import ConditionRunner
from sinkscope.studies.conditions import MAX_NEURONS, TURNED_BASIS, Condition
from sinkscope.studies.controls import (
    Activity,
    direction_writers,
    draw_controls,
    few_of_each_layer,
    read_activity,
)
from sinkscope.studies.fresh import fresh_deviation
from sinkscope.studies.judging import CAUSAL, Claim, ClaimNumbers, Empty, Judgement, judge
from sinkscope.studies.link_values import read_link_values
from sinkscope.studies.mechanism import decisive_claims, mechanism_of, rules
from sinkscope.studies.minimal_set import find_minimal_set, find_writers
from sinkscope.studies.purpose import Purpose, read_purpose
from sinkscope.studies.schemas import STUDY_TABLES
from sinkscope.studies.study_data import StudyData
from sinkscope.studies.tables import study_tables, text_tables
from sinkscope.studies.texts import CODE, PROSE, text_batches
from sinkscope.tracing.receipt import Receipt, described
from sinkscope.tracing.replay import Replay
from sinkscope.tracing.single_reader import evaluation_mode
from sinkscope.tracing.trace import Trace, trace

NUM_CHOOSING = 32
MOST_OF_SHIPPED = 64
"""Most judging sequences that the shipped text is cut into."""
NO_SINK = "there is no sink to explain"
UNPLANNED = "the choosing sequences, on which interventions are planned, show no sink"


@dataclass(frozen=True, kw_only=True, repr=False)
class Study(Result):
    """What was found, as tables, as a summary and in a sentence."""

    kind = "study"
    loaded: LoadedModel
    trace: Trace
    """Of the baseline on the judging sequences."""
    data: StudyData
    judgements: list[Judgement]
    on_text: Study | None = None
    """The decisive claims on text, where the others are judged on random tokens."""
    purpose: Purpose | None = None
    """What the sink is for, on text."""

    @property
    def plan(self) -> Plan:
        return self.data.plan

    @property
    def receipt(self) -> Receipt | None:
        """That of the baseline's trace, with every condition that was run and the layers in which it acted."""
        if self.trace.receipt is None:
            return None
        results = self.data.results.items()
        conditions = [{"name": condition.part, "layers": list(each.acted_in)} for condition, each in results]
        return replace(self.trace.receipt, interventions=tuple(conditions))

    @property
    def minimal_set(self) -> tuple[Neuron, ...]:
        return self.data.minimal

    @property
    def writers(self) -> tuple[Neuron, ...]:
        """Where there is no minimal set: the neurons along the sink's direction whose removal was judged."""
        return self.data.writers

    @cached_property
    def tables(self) -> dict[str, Mapping]:
        """Columns by table, those of the trace too."""
        studied = study_tables(self.trace, self.data, self.judgements)
        on_text = text_tables(self.on_text.judgements if self.on_text else [], self.purpose)
        return {**self.trace.tables, **studied, **on_text}

    @property
    def schemas(self) -> tuple[Schema, ...]:
        return (*self.trace.schemas, *STUDY_TABLES)

    @cached_property
    def summary(self) -> dict:
        return {
            **self.trace.summary,
            **described(self.receipt),
            "verdict": self.verdict,
            "mechanism": self.mechanism,
            "cause": cause(self.judgements, self.data) if self.judgements[0].verdict == "holds" else None,
            "rules": rules(),
            "counts": self.counts,
            "claims": _listed_claims(self.judgements),
            "text": self.on_text and self.on_text.as_kind_of_tokens(),
            "purpose": self.purpose and self.purpose.summary(),
            "minimal_set": _listed(self.minimal_set),
            "sink_without_minimal_set": self.went if self.minimal_set else None,
            "writers": _listed(self.writers),
            "sink_without_writers": self.went if self.writers else None,
        }

    def as_kind_of_tokens(self) -> dict:
        """What the summary says of the claims on another kind of tokens."""
        return {
            "tokens": self.trace.summary["tokens"],
            "source": self.trace.recording.batch.source,
            "mechanism": self.mechanism,
            "claims": _listed_claims(self.judgements),
        }

    @cached_property
    def went(self) -> str | None:
        """Where the sink went when the minimal set, or the writers, were removed: gone, weaker, or shifted to another
        position."""
        removed = self.data.results.get(self.data.removal)
        if removed is None:
            return None
        before_S, after_S = self.data.baseline.rate_BS.mean(0), removed.rate_BS.mean(0)
        new = are_sinks(torch.from_numpy(after_S)).numpy() & (before_S < MIN_SINK_RATE)
        if new.any():
            position = int(np.where(new, after_S, -1).argmax())
            return f"shifted to position {position} ({after_S[position]:.1%})"
        at_sink = after_S[self.plan.sink]
        return "gone" if at_sink < MIN_SINK_RATE else f"weaker ({at_sink:.1%})"

    @property
    def verdict(self) -> str:
        """What a reader takes home: is there a sink, and what makes it."""
        sink = self.judgements[0]
        position, rate = self.plan.sink, sink.effect or 0.0  # of that position, as it was judged
        if sink.verdict != "holds":
            needed = f"the {percent(MIN_SINK_RATE)} that a sink needs"
            compared = f"the interval contains {needed}" if sink.verdict == "undecided" else f"less than {needed}"
            strongest = f"position {position}, the strongest in the choosing sequences"
            text = f"There is no sink to explain: {strongest}, is a sink for {rate:.1%} of heads ({compared})."
        else:
            text = answer(self.judgements, self.data, self.went)
        more = [] if self.on_text is None else [self._compared_with(self.on_text)]
        more += [] if self.purpose is None else [self.purpose.in_words()]
        return " ".join(filter(None, [text, *more])) + self.trace.beginnings

    def _compared_with(self, text: Study) -> str:
        """What text says of the mechanism, beside random tokens."""
        if text.mechanism == self.mechanism:
            return "Text says the same."
        sink = text.judgements[0]
        if sink.verdict == "holds":
            return f"On text it is told otherwise. {cause(text.judgements, text.data)}"
        rate = f"position {text.plan.sink} is the strongest, a sink for {sink.effect or 0.0:.1%} of heads"
        return f"On text it is told otherwise: there {rate}."

    @property
    def mechanism(self) -> str:
        """token, position, no_averaging, variance, undecided or no_sink, by the rules of `mechanism`."""
        return mechanism_of({judgement.id: judgement.verdict for judgement in self.judgements})

    @property
    def counts(self) -> str:
        """How many claims hold; empty where there is no sink that they could explain."""
        return counts(self.judgements) if self.judgements[0].verdict == "holds" else ""

    @property
    def story(self) -> str:
        return f"{self.verdict}\n\n{self.counts}".rstrip()

    def write(self, folder: RunFolder) -> None:
        """Writes the summary, every table and the calibration means into an open run folder."""
        from safetensors.numpy import save_file

        super().write(folder)
        means = {name: mean for o in self.data.results.values() for name, mean in o.means.items()}
        if means:
            save_file(means, folder.path / "calibration.safetensors")


def study(
    model: ModelLike | None = None,
    *,
    tokens: str = "random",
    bos: bool | None = None,
    length: int = 64,
    num_sequences: int = 32,
    seed: int = 0,
    text: str | Path | None = None,
    parts: Parts | None = None,
    progress: Progress | None = None,
) -> Study:
    """Whether the chain holds in a model, link by link: verdicts by interventions with controls.

        sinkscope.study("reference:softmax").report("study.html")

    Claims are judged on `num_sequences` sequences of `length` tokens, as `token_batch` makes them; 96 others choose
    what is tested and calibrate it. Beside random tokens the claims that decide the mechanism are judged on text too,
    of the file `text` or one that ships with the package. `parts` keeps finished conditions for an interrupted run.
    """
    loaded = load(model)
    check_every_layer(anatomy_of(loaded.model), "A study")
    check_study(length, num_sequences)
    if not (hasattr(loaded.model, "config") and hasattr(loaded.model, "get_output_embeddings")):
        raise InputError(
            f"{type(loaded.model).__name__} has no `config` or `get_output_embeddings`, but a study draws a model of "
            "transformers afresh and reads its losses. Use `trace`, also inside the interventions, one by one."
        )
    others = (NUM_CHOOSING, MIN_CALIBRATION)
    whole = batch_with_others(
        loaded,
        tokens,
        bos=bos,
        length=length,
        num_sequences=num_sequences,
        seed=seed,
        others=sum(others),
        least=(STUDY_LENGTH, STUDY_SEQUENCES),
    )
    judging, choosing, calibration = (replace(whole, ids=ids) for ids in whole.ids.split([num_sequences, *others]))
    parts = parts or Parts(None, {})
    batches = None
    if whole.kind == "random" and loaded.tokenizer is not None:
        batches = _text_batches(loaded, text, bos=bos, length=length, num_sequences=num_sequences)
    elif text is not None:
        raise InputError("`text` is read beside random tokens, by a model with a tokenizer. Give tokens='text:FILE'.")
    with evaluation_mode(loaded.model):
        result = _Run(loaded, judging, choosing, calibration, parts, progress).study()
        if batches is None:
            return result
        (judging, choosing, calibration), code = batches
        on_text = _Run(loaded, judging, choosing, calibration, parts.within("text"), progress, beside=result).study()
        purpose = None
        if on_text.judgements[0].verdict == "holds":
            kinds = {"text": (judging, calibration), "code": code}
            purpose = read_purpose(loaded, on_text.data, kinds, parts)
        return replace(result, on_text=on_text, purpose=purpose)


def _text_batches(
    loaded: LoadedModel, text: str | Path | None, *, bos: bool | None, length: int, num_sequences: int
) -> tuple[list[TokenBatch], tuple[TokenBatch, TokenBatch]]:
    """(judging, choosing and calibration set of a text, judging and calibration set of code)."""
    count = num_sequences if text else min(num_sequences, MOST_OF_SHIPPED)
    sets = text_batches(loaded, text or PROSE, bos=bos, length=length, counts=(count, NUM_CHOOSING, MIN_CALIBRATION))
    count = min(num_sequences, NUM_CHOOSING)
    judging, calibration = text_batches(loaded, CODE, bos=bos, length=length, counts=(count, STUDY_SEQUENCES))
    return sets, (judging, calibration)


def _listed_claims(judgements: Sequence[Judgement]) -> list[dict]:
    names = ("id", "verdict", "effect", "low", "high", "control", "n")
    return [{name: getattr(judgement, name) for name in names} for judgement in judgements]


def _listed(neurons: Sequence[Neuron]) -> list[dict]:
    return [{"layer": neuron.layer, "expert": neuron.expert, "neuron": neuron.neuron} for neuron in neurons]


def _numbers(claim: Claim, data: StudyData) -> ClaimNumbers | Empty:
    """What a claim is judged on. A condition that did not do what its name says supports nothing."""
    return unless_marked(lambda: claim.numbers(data))


class _Run:
    """One study while it runs."""

    def __init__(
        self,
        loaded: LoadedModel,
        judging: TokenBatch,
        choosing: TokenBatch,
        calibration: TokenBatch,
        parts: Parts,
        progress: Progress | None,
        beside: Study | None = None,
    ) -> None:
        """`beside`: the study on other tokens. Then only what decides is judged, and no neurons are searched."""
        self.beside = beside
        self.loaded, self.judging, self.choosing, self.calibration = loaded, judging, choosing, calibration
        self.parts, self.progress = parts, progress or (lambda done, total: None)

    def study(self) -> Study:
        chosen = trace(self.loaded, self.choosing, effective_rank=False)
        plan, has_sink = make_plan(chosen.findings), chosen.findings.strongest[1] >= MIN_SINK_RATE
        baseline_trace = trace(self.loaded, self.judging, effective_rank=self.beside is None)
        anatomy = anatomy_of(self.loaded.model)
        activity = read_activity(anatomy, self.loaded.model, self.choosing.ids, plan)

        def ranked_writers() -> tuple[Neuron, ...]:
            return processes.from_first(lambda: direction_writers(activity, anatomy, plan))

        writers: tuple[Neuron, ...] = ()
        if self.beside is not None and self.beside.plan.sink == plan.sink:
            minimal, writers = self.beside.minimal_set, self.beside.writers
        else:
            ranked = () if plan.candidates else ranked_writers()
            plan = replace(plan, candidates=plan.candidates or few_of_each_layer(ranked, anatomy))
            minimal = find_minimal_set(self.loaded, plan, self.choosing, self.parts) if has_sink else ()
            if has_sink and not minimal:
                ranked = ranked or ranked_writers()
                plan = replace(plan, writers=ranked[:MAX_NEURONS])
                writers = find_writers(self.loaded, plan, self.choosing, self.parts)
        data = self._study_data(plan, activity, minimal, writers, has_sink)
        claims = CLAIMS if self.beside is None else decisive_claims()
        numbers = [
            (claim, Empty(UNPLANNED) if claim.link == CAUSAL and not has_sink else _numbers(claim, data))
            for claim in claims.values()
        ]
        chosen_rate = float(chosen.recording.sequence_sink_rate[:, plan.sink].max())
        judgements = judge(
            numbers,
            self.judging.num_sequences,
            num_targets=max(1, len(plan.targets)),
            largest=max(data.largest_rate, chosen_rate),
        )
        if judgements[0].verdict != "holds":
            # The sink keeps its verdict: judged anew, alone, it could hold on a page that explains no sink.
            nothing = [(claim, Empty(NO_SINK)) for claim in list(claims.values())[1:]]
            judgements = [judgements[0], *judge(nothing, self.judging.num_sequences)]
        return Study(loaded=self.loaded, trace=baseline_trace, data=data, judgements=judgements)

    def _study_data(
        self,
        plan: Plan,
        activity: Activity,
        minimal: tuple[Neuron, ...],
        writers: tuple[Neuron, ...],
        has_sink: bool,
    ) -> StudyData:
        model, ids_BT, anatomy = self.loaded.model, self.judging.ids, anatomy_of(self.loaded.model)
        controls = draw_controls(activity, anatomy, plan, minimal or writers)
        neurons = tuple(dict.fromkeys((*plan.super_neurons, *minimal)))
        dimensions = (*plan.dimensions, *controls.dimensions)
        restarts = {neuron.layer for neuron in (*plan.candidates, *minimal, *writers)}
        replay = Replay(
            anatomy,
            model,
            ids_BT,
            neurons,
            dimensions,
            restarts=restarts,
            keep_writes=True,
            loss=True,
            moment_layers=len(plan.layers),
        )
        link_values = read_link_values(anatomy, model, ids_BT, plan, activity.directions)
        sink_varies = bool((ids_BT[:, plan.sink] != ids_BT[0, plan.sink]).any())
        conditions = ConditionRunner(self.loaded, plan, self.calibration, replay, minimal, writers, controls)
        results = self._results(conditions, sink_varies=sink_varies) if has_sink else {}
        whole = self.beside is None
        not_turned = self._turn_basis(plan, results) if minimal and whole else "there is no minimal set"
        return StudyData(
            plan=plan,
            anatomy=anatomy,
            link_values=link_values,
            reading=replay.baseline,
            baseline=reduced(replay.baseline, plan),
            results=results,
            minimal=minimal,
            writers=writers,
            controls=controls,
            not_turned=not_turned,
            sink_varies=sink_varies,
            tokens_differ=bool((ids_BT[:, plan.sink] != ids_BT[:, -1]).any()),
            fresh_deviation_NLBST=self._fresh_deviation(plan) if has_sink and sink_varies and whole else None,
        )

    def _fresh_deviation(self, plan: Plan) -> np.ndarray | None:
        """Kept as a part: large models take minutes to draw."""

        def tensors() -> dict[str, np.ndarray] | None:
            deviation_NLBST = fresh_deviation(self.loaded, self.judging.ids, len(plan.layers))
            return None if deviation_NLBST is None else {"deviation_NLBST": deviation_NLBST}

        kept = self.parts.kept("fresh", ("deviation_NLBST",), tensors)
        return None if kept is None else kept["deviation_NLBST"]

    def _turn_basis(self, plan: Plan, results: dict[Condition, ConditionResult]) -> str:
        """Adds the result of a copy of the model with its residual basis turned, or says why there is none."""

        def turned() -> dict[str, np.ndarray]:
            model = rotate(self.loaded.model)
            replay = Replay(anatomy_of(model), model, self.judging.ids, plan.super_neurons, loss=True)
            every_layer = tuple(range(len(replay.anatomy.layers)))
            return replace(reduced(replay.baseline, plan), acted_in=every_layer).tensors()

        condition = Condition(TURNED_BASIS, plan.sink)
        try:
            kept = self.parts.kept(condition.part, STORED, turned)
        except RotationError as error:
            return error.reason
        assert kept is not None
        results[condition] = ConditionResult.of_tensors(kept)
        return ""

    def _results(self, conditions: ConditionRunner, *, sink_varies: bool) -> dict[Condition, ConditionResult]:
        """Under torchrun each process runs its share of the conditions."""
        finished = []
        every = conditions.all(sink_varies=sink_varies) if self.beside is None else conditions.decisive()
        own_share = processes.share(every)
        # Over a large vocabulary the loss costs more than all layers: other targets, and cells of the factorial, go
        # without.
        with_loss = (conditions.plan.sink, *conditions.plan.targets[:1])
        for number, condition in enumerate(own_share):
            self.progress(number, len(own_share))
            tensors = self.parts.load(condition.part, STORED)
            if tensors is None:
                loss = condition.target in with_loss and condition.number is None and not condition.levelled
                tensors = conditions.run(condition, loss=loss).tensors()
                self.parts.save(condition.part, tensors)
            finished.append(tensors)
        self.progress(len(own_share), len(own_share))
        gathered = [tensors for share in processes.gathered(finished) for tensors in share]
        results = map(ConditionResult.of_tensors, gathered)
        return dict(zip(every, results, strict=True))
