"""study(model): decides link by link whether the chain holds in a model, by interventions with their controls.

Three sets of sequences that share none: the choosing ones fix the plan and the minimal set, the calibration ones the
means, and the judging ones decide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from transformers import PreTrainedModel

from sinkscope.arguments import check_study
from sinkscope.capture.recorder import evaluation_mode
from sinkscope.capture.replay import Replay
from sinkscope.capture.trace import trace
from sinkscope.interventions.aggregation import MIN_CALIBRATION
from sinkscope.interventions.base import together
from sinkscope.interventions.neurons import ablate_neurons
from sinkscope.measures.sink_score import LATER_QUERIES, SINK_RATE
from sinkscope.models.anatomy import DENSE, Anatomy, Unit, anatomy_of
from sinkscope.models.loading import LoadedModel, load
from sinkscope.models.token_batches import TokenBatch, token_batch
from sinkscope.results.parts import Parts
from sinkscope.results.run_folder import RunFolder
from sinkscope.studies.causal_claims import Measured, causal_claims
from sinkscope.studies.claims import CLAIMS, QUARTER, Claim, judge
from sinkscope.studies.conditions import Conditions, Outcome, reduced
from sinkscope.studies.evidence import read_evidence
from sinkscope.studies.minimal_set import minimal_set
from sinkscope.studies.plan import Plan, candidate_units, make_plan
from sinkscope.studies.reading_claims import NO_SINK, reading_claims
from sinkscope.studies.study_result import StudyResult
from sinkscope.studies.study_tables import STUDY_TABLES, study_tables
from sinkscope.studies.verdict import verdict_sentence

NUM_CHOOSING = 32
NUM_SEARCHING = 16
"""Choosing sequences that the search for a minimal set runs on."""
SEARCH_TARGETS = (0.8 * QUARTER, QUARTER)
"""What the search asks for, and settles for where no set reaches it: one chosen at the very threshold fails it on
other sequences half of the time."""

UNPLANNED = "the sequences that plan interventions show no sink"

Progress = Callable[[int, int], None]


class Study(StudyResult):
    """What was found, as tables, as a summary and in a sentence."""

    @cached_property
    def tables(self) -> dict[str, Mapping]:
        """Columns by table; those of the trace are in `trace.tables`."""
        return study_tables(self)

    @cached_property
    def summary(self) -> dict:
        claims = [
            {
                "id": j.id,
                "verdict": j.verdict,
                "effect": j.effect,
                "low": j.low,
                "high": j.high,
                "control": j.claim.control,
                "n": j.n,
            }
            for j in self.judgements
        ]
        units = [{"layer": u.layer, "expert": u.expert, "neuron": u.neuron} for u in self.minimal_set]
        return {
            **self.trace.summary,
            "verdict": self.verdict,
            "claims": claims,
            "minimal_set": units,
            "sink_without_minimal_set": self.went,
        }

    @property
    def verdict(self) -> str:
        """The answer in a sentence or two."""
        return verdict_sentence(self.plan, self.judgements, self.minimal_set, self.went)

    def write(self, folder: RunFolder) -> None:
        """Writes the trace's tables, the study's, the summary and the calibration means into an open run folder."""
        from safetensors.numpy import save_file

        self.trace.write(folder)
        folder.write_json("summary.json", self.summary)
        for schema in STUDY_TABLES:
            folder.write_table(schema, self.tables[schema.name])
        means = {name: mean for o in self.measured.outcomes.values() for name, mean in o.means.items()}
        if means:
            save_file(means, folder.path / "calibration.safetensors")


def study(
    model: LoadedModel | PreTrainedModel | str | None = None,
    *,
    tokens: str = "random",
    bos: bool | None = None,
    length: int = 64,
    num_sequences: int = 32,
    seed: int = 0,
    parts: Parts | None = None,
    progress: Progress | None = None,
) -> Study:
    """The study of a model on batches of tokens; `parts` keeps finished conditions for a run that is interrupted."""
    loaded = load(model)
    check_study(length, num_sequences)
    sizes = (num_sequences, NUM_CHOOSING, MIN_CALIBRATION)
    whole = token_batch(loaded, tokens, bos=bos, length=length, num_sequences=sum(sizes), seed=seed)
    judging, choosing, calibration = (replace(whole, ids=ids) for ids in whole.ids.split(list(sizes)))
    with evaluation_mode(loaded.model):
        return _Run(loaded, judging, choosing, calibration, parts or Parts(None, {}), progress).study()


class _Run:
    """One study while it goes."""

    def __init__(
        self,
        loaded: LoadedModel,
        judging: TokenBatch,
        choosing: TokenBatch,
        calibration: TokenBatch,
        parts: Parts,
        progress: Progress | None,
    ) -> None:
        self.loaded, self.judging, self.choosing, self.calibration = loaded, judging, choosing, calibration
        self.anatomy: Anatomy = anatomy_of(loaded.model)
        self.parts, self.progress = parts, progress or (lambda done, total: None)

    def study(self) -> Study:
        chosen = trace(self.loaded, self.choosing, effective_rank=False)
        plan = make_plan(chosen.findings)
        shown = trace(self.loaded, self.judging)
        has_sink = chosen.findings.strongest[1] >= SINK_RATE
        minimal = self._minimal_set(plan) if has_sink else ()
        units = dict.fromkeys((*plan.super_neurons, *minimal))
        replay = Replay(
            self.anatomy,
            self.loaded.model,
            self.judging.ids,
            tuple(units),
            plan.dimensions,
            restarts={unit.layer for unit in (*plan.candidates, *minimal)},
            loss=True,
        )
        evidence = read_evidence(self.anatomy, self.loaded.model, self.judging.ids, plan)
        sink_varies = bool((self.judging.ids[:, plan.sink] != self.judging.ids[0, plan.sink]).any())
        claims = reading_claims(plan, self.anatomy, evidence, replay.untouched, sink_varies=sink_varies)
        measured = Measured(plan, reduced(replay.untouched, plan), {})
        went = None
        if has_sink:
            conditions = Conditions(self.loaded, plan, self.calibration, replay, minimal)
            measured.outcomes.update(self._outcomes(conditions, sink_varies))
            claims += causal_claims(plan, self.anatomy, measured, minimal, sink_varies=sink_varies)
            went = _went(plan, measured) if minimal else None
        else:
            claims += [Claim(id=name, note=UNPLANNED) for name, (link, _) in CLAIMS.items() if link == "causal"]
        judgements = judge(claims, self.judging.num_sequences)
        if judgements[0].verdict != "holds":
            # The sink keeps its verdict: judged anew, alone, it could hold on a page that explains no sink.
            nothing = [Claim(id=name, note=NO_SINK) for name in CLAIMS if name != "sink"]
            judgements = [judgements[0], *judge(nothing, self.judging.num_sequences)]
        return Study(
            loaded=self.loaded,
            plan=plan,
            trace=shown,
            judgements=judgements,
            measured=measured,
            minimal_set=minimal,
            went=went,
        )

    def _outcomes(self, conditions: Conditions, sink_varies: bool) -> dict[str, Outcome]:
        outcomes = {}
        wanted = conditions.all(sink_varies=sink_varies)
        # Over a large vocabulary the loss costs more than all layers: it is read where the first target is acted on.
        with_loss = (conditions.plan.sink, *conditions.plan.targets[:1])
        for number, condition in enumerate(wanted):
            self.progress(number, len(wanted))
            arrays = self.parts.load(condition.key)
            if arrays is None:
                outcome = conditions.run(
                    condition, loss=condition.name != "random_set" and condition.target in with_loss
                )
                self.parts.save(condition.key, outcome.tensors())
            else:
                outcome = Outcome.of_tensors(arrays)
            outcomes[condition.key] = outcome
        self.progress(len(wanted), len(wanted))
        return outcomes

    def _minimal_set(self, plan: Plan) -> tuple[Unit, ...]:
        """Found on choosing sequences; kept as a part, since the search is long."""
        kept = self.parts.load("minimal-set")
        if kept is not None:
            return tuple(Unit(row[0], None if row[1] == DENSE else row[1], row[2]) for row in kept["units"].tolist())
        batch = replace(self.choosing, ids=self.choosing.ids[:NUM_SEARCHING])
        restarts = {unit.layer for unit in plan.candidates}
        replay = Replay(self.anatomy, self.loaded.model, batch.ids, restarts=restarts)
        before = float(replay.untouched.rate_BS[:, plan.sink].mean())

        left: dict[frozenset[Unit], float] = {}

        def remaining(units: Sequence[Unit]) -> float:
            if (removed := frozenset(units)) not in left:
                with together([ablate_neurons(self.loaded, units)]) as first_layer:
                    left[removed] = float(replay.read(first_layer).rate_BS[:, plan.sink].mean()) / before
            return left[removed]

        def more(units: Sequence[Unit]) -> list[Unit]:
            with ablate_neurons(self.loaded, units):
                found = trace(self.loaded, batch, effective_rank=False).findings
            return candidate_units(found, plan.sink)

        units: tuple[Unit, ...] = ()
        for target in SEARCH_TARGETS if before > 0 else ():
            units = units or minimal_set(plan.candidates, remaining, more, target)
        rows = [[unit.layer, DENSE if unit.expert is None else unit.expert, unit.neuron] for unit in units]
        self.parts.save("minimal-set", {"units": np.array(rows, dtype=np.int64).reshape(-1, 3)})
        return units


def _went(plan: Plan, measured: Measured) -> str:
    """gone, weaker, or shifted to another position."""
    before_S = measured.untouched.rate_BS.mean(0)
    after_S = measured.outcome("ablate_minimal_set", plan.sink).rate_BS.mean(0)
    eligible = np.arange(len(after_S)) < len(after_S) - LATER_QUERIES
    new = eligible & (after_S >= SINK_RATE) & (before_S < SINK_RATE)
    if new.any():
        position = int(np.where(new, after_S, -1).argmax())
        return f"shifted to position {position} ({after_S[position]:.1%})"
    return "gone" if after_S[plan.sink] < SINK_RATE else f"weaker ({after_S[plan.sink]:.1%})"
