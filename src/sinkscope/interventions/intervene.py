"""Any combination of interventions: a trace before, a trace under them, and a trace under their control."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sinkscope.arguments import check_sizes
from sinkscope.errors import InputError
from sinkscope.interventions.aggregation import BEFORE_NORM, ChangeAggregation
from sinkscope.interventions.base import Intervention, together
from sinkscope.interventions.calibration import MIN_CALIBRATION
from sinkscope.interventions.check_results import CheckResult, check_result, not_checked, pass_at
from sinkscope.interventions.checks import AtTarget, PassAtTarget
from sinkscope.interventions.kinds import NOTHING, Kind, Setting
from sinkscope.interventions.plan import make_plan
from sinkscope.interventions.schemas import ARMS, MEANS, MOST_POSITIONS, OBSERVABLES
from sinkscope.interventions.specs import InterventionSpec, read_specs
from sinkscope.measures.sink_score import eligible_positions
from sinkscope.models.anatomy import Neuron, anatomy_of
from sinkscope.models.loaded import LoadedModel, ModelLike, bare_model
from sinkscope.models.loading import load
from sinkscope.models.prompts import check_one_length, prompt_batch
from sinkscope.models.token_batches import TokenBatch, batch_with_others
from sinkscope.results.result import Result
from sinkscope.tracing.receipt import described
from sinkscope.tracing.recorder import CHUNK_TOKENS
from sinkscope.tracing.replay import Replay
from sinkscope.tracing.single_reader import evaluation_mode
from sinkscope.tracing.trace import Trace, trace

if TYPE_CHECKING:
    from sinkscope.interventions.specs import ByKind


@dataclass(frozen=True, repr=False)
class InterventionResult(Result):
    """Three traces of one batch."""

    kind = "intervene"
    schemas = (OBSERVABLES, MEANS)
    before: Trace
    after: Trace
    control: Trace
    positions: tuple[int, ...]
    """Positions that the interventions act on."""
    control_is: str
    """The control in words."""
    calibrated_on: str
    """Where the means of interventions come from, in words."""
    checks: tuple[CheckResult, ...] = ()
    """Whether each intervention did what its name says."""

    @cached_property
    def observables(self) -> list[dict[str, Tensor]]:
        """[L, T] by name, of each arm; no sink rate of a key with too few later queries to be one."""
        eligible_T = eligible_positions(self.before.recording.batch.length)
        by_arm = []
        for arm in (self.before, self.after, self.control):
            recording = arm.recording
            sink_rate_LT = recording["head_sink_rate"].mean(1).where(eligible_T, float("nan"))
            received_LT = recording["received"].mean(1)
            by_arm.append({"sink_rate": sink_rate_LT, "received": received_LT, **recording.by_position})
        return by_arm

    @cached_property
    def listed_positions(self) -> list[int]:
        """The positions acted on, and the first sinks before and after."""
        sinks = [sink.position for arm in (self.before, self.after) for sink in arm.findings.sinks[:3]]
        return sorted({*self.positions, *sinks})

    @cached_property
    def tables(self) -> dict[str, Mapping[str, list]]:
        """`observables`: all of them by layer and position, in all three. `means`: over layers, at a few positions."""
        columns: dict[str, list] = {column.name: [] for column in OBSERVABLES.columns}
        means: dict[str, list] = {column.name: [] for column in MEANS.columns}
        values = self.observables
        for quantity in values[0]:
            num_layers, num_positions = values[0][quantity].shape
            columns["quantity"] += [quantity] * (num_layers * num_positions)
            columns["layer"] += [layer for layer in range(num_layers) for _ in range(num_positions)]
            columns["position"] += list(range(num_positions)) * num_layers
            for arm, value in zip(ARMS, values, strict=True):
                columns[arm] += value[quantity].double().flatten().tolist()
            if not quantity.startswith("largest_"):
                means["quantity"] += [quantity] * len(self.listed_positions)
                means["position"] += self.listed_positions
                for arm, value in zip(ARMS, values, strict=True):
                    means[arm] += value[quantity][:, self.listed_positions].double().nanmean(0).tolist()
        return {OBSERVABLES.name: columns, MEANS.name: means}

    @property
    def _texts(self) -> list[dict[str, Any]]:
        """The tokens that the page names, where one text was read and can be written."""
        batch = self.before.recording.batch
        if self.before.tokenizer is None or batch.num_sequences > 1:
            return []
        places = sorted({*range(min(batch.length, MOST_POSITIONS)), *self.listed_positions})
        return [{"position": at, "text": self.before.token_text(int(batch.told_apart[0, at]))} for at in places]

    @property
    def story(self) -> str:
        return f"Before: {self.before.story} After: {self.after.story} Under the control: {self.control.story}"

    @property
    def summary(self) -> dict:
        arms = {arm: getattr(self, arm).summary for arm in ARMS}
        rates = {arm: getattr(self, arm).recording.sink_rate.tolist() for arm in ARMS}
        return {
            "story": self.story,
            "positions": self.positions,
            "control_is": self.control_is,
            "calibrated_on": self.calibrated_on,
            "checks": [asdict(check) for check in self.checks],
            **({"texts": texts} if (texts := self._texts) else {}),
            **arms,
            **described(self.after.receipt),
            "sink_rate_by_position": rates,
        }


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """A batch that interventions are to act on, and what they are made with. The model reads it once without any,
    however many of them are tried."""

    loaded: LoadedModel
    batch: TokenBatch
    calibration: TokenBatch
    """Other sequences, as long, on which interventions are calibrated."""
    observables: Sequence[str] | None = None
    """Names of what a trace records; None for all of the chain."""

    @cached_property
    def trace(self) -> Trace:
        return trace(self.loaded, self.batch, observables=self.observables, effective_rank=False)

    @cached_property
    def setting(self) -> Setting:
        plan = make_plan(self.trace.findings)
        return Setting(
            loaded=self.loaded,
            anatomy=anatomy_of(self.loaded.model),
            batch=self.batch,
            calibration=self.calibration,
            last_layer=plan.last_layer,
            excluded=plan.candidates,
        )

    def make(self, specs: Sequence[InterventionSpec], *, control: bool = False) -> list[Sequence[Intervention]]:
        """The interventions of each spec or, with `control`, those of its control, which knows all specs."""
        positions = _positions(specs)
        if wrong := [position for position in positions if not 0 <= position < self.batch.length]:
            is_prompt = self.batch.kind == "text" and self.batch.source is None
            raise InputError(
                f"There is no position {', '.join(map(str, wrong))}. Choose from 0 to {self.batch.length - 1}, or "
                f"give a {'longer `prompt`' if is_prompt else 'greater `length`'}."
            )
        neurons = [Neuron(*neuron) for spec in specs for neuron in spec.neurons()]
        setting = replace(self.setting, positions=positions, neurons=neurons)
        with evaluation_mode(self.loaded.model):
            return [spec.make(setting, control=control) for spec in specs]

    def under(self, made: Sequence[Sequence[Intervention]]) -> Trace:
        """A trace under interventions that `make` made."""
        interventions = list(itertools.chain.from_iterable(made))
        with together(interventions):
            for intervention in interventions:
                if isinstance(intervention, ChangeAggregation):
                    intervention.check_deviation()
            return trace(self.loaded, self.batch, observables=self.observables, effective_rank=False)

    def check(
        self, specs: Sequence[InterventionSpec], made: Sequence[Sequence[Intervention]]
    ) -> tuple[CheckResult, ...]:
        """Whether each intervention did what its name says, with all of them on."""
        everything = list(itertools.chain.from_iterable(made))
        results = []
        for spec, interventions in zip(specs, made, strict=True):
            names = [f"{spec.name} {text}" for text in spec.texts]
            if spec.kind.check is None:
                results += [not_checked(name, "this kind of intervention has no check") for name in names]
                continue
            for name, value, intervention in zip(names, spec.values, interventions, strict=True):
                results.append(self._check(name, spec.kind, value, intervention, everything))
        return tuple(results)

    def _check(
        self, name: str, kind: Kind, value: tuple, intervention: Intervention, everything: list[Intervention]
    ) -> CheckResult:
        """The result of one check: `value` is what was asked for, `intervention` what was made of it."""
        assert kind.check is not None
        assert kind.acts_at is not None
        place, position = intervention.place, kind.acts_at(value)
        if not place.layers:
            return not_checked(name, "it acts in no layer")
        if place.heads is not None:
            return not_checked(name, "it acts on some heads, and the check reads all of them together")
        others = [other for other in everything if other is not intervention]
        replay = self._replay  # its baseline is read here, while nothing is on

        def pass_under(interventions: list[Intervention]) -> PassAtTarget:
            with together(interventions) as first_layer:
                reading = replay.read(first_layer)
            return pass_at(reading, position, place.layers, before_norm=place.on == BEFORE_NORM)

        at = AtTarget(
            position=position,
            under=pass_under(everything),
            baseline=pass_under([]),
            read_without=(lambda: pass_under(others)) if others else None,
            **({} if kind.second is None else {kind.second: value[1]}),
        )
        try:
            return check_result(name, kind.check(at), place.layers)
        except InputError as refused:  # as where a variance is amplified that another intervention made
            return not_checked(name, f"without it the others cannot act ({str(refused).rstrip('.')})")

    @cached_property
    def _replay(self) -> Replay:
        """Reads by sequence what checks compare: of the batch, or of as many of its first sequences as one pass of a
        trace reads."""
        num_sequences = max(1, CHUNK_TOKENS // self.batch.length)
        return Replay(self.setting.anatomy, bare_model(self.loaded), self.batch.ids[:num_sequences])


def read_prompt(
    loaded: LoadedModel,
    prompt: str | Sequence[str],
    tokens: str = "random",
    *,
    bos: bool | None = None,
    seed: int = 0,
    observables: Sequence[str] | None = None,
) -> Baseline:
    """A text, or several of one length, to intervene on."""
    batch = prompt_batch(loaded, [prompt] if isinstance(prompt, str) else prompt, bos=bos)
    check_one_length(batch, "interventions act on positions")
    calibration = batch_with_others(
        loaded,
        tokens,
        bos=batch.bos,
        length=batch.length,
        num_sequences=MIN_CALIBRATION,
        seed=seed,
        least=(batch.length, MIN_CALIBRATION),
    )
    return Baseline(loaded=loaded, batch=batch, calibration=calibration, observables=observables)


def drawn_batch(
    loaded: LoadedModel, tokens: str, *, bos: bool | None, length: int, num_sequences: int, seed: int
) -> Baseline:
    """A batch as `token_batch` draws it, to intervene on."""
    check_sizes(length=length, num_sequences=num_sequences)
    both = batch_with_others(
        loaded, tokens, bos=bos, length=length, num_sequences=num_sequences, seed=seed, others=MIN_CALIBRATION
    )
    batch, calibration = (replace(both, ids=ids) for ids in both.ids.split([num_sequences, MIN_CALIBRATION]))
    return Baseline(loaded=loaded, batch=batch, calibration=calibration)


def intervene(
    model: ModelLike,
    interventions: ByKind,
    *,
    layers: str | Sequence[int] | None = None,
    heads: str | Sequence[int] | None = None,
    prompt: str | Sequence[str] | None = None,
    tokens: str = "random",
    bos: bool | None = None,
    length: int = 64,
    num_sequences: int = 32,
    seed: int = 0,
) -> InterventionResult:
    """Traces of a batch before, under the interventions, and under a control in their place.

        sinkscope.intervene(model, {"mask_to_self": 10}, prompt="a text of 27 tokens or more").story

    Interventions are written as on the command line, such as {"amplify": ["10:4", "12:4"], "ablate": "5:148"}, where
    a neuron may also be a tuple or a super neuron of a trace; `sinkscope intervene --help` lists the kinds. `layers`
    and `heads` choose where interventions on masks and the aggregation act. The batch is `prompt`, one text or
    several of one length, or drawn as `token_batch` does. What interventions must know of the model comes from 64
    other sequences of that length: with `prompt`, from those that `tokens` names.
    """
    specs = read_specs(interventions, layers=layers, heads=heads)
    if prompt is None:
        baseline = drawn_batch(load(model), tokens, bos=bos, length=length, num_sequences=num_sequences, seed=seed)
    else:
        baseline = read_prompt(load(model), prompt, tokens, bos=bos, seed=seed)
    made, controls = baseline.make(specs), baseline.make(specs, control=True)
    after, control = baseline.under(made), baseline.under(controls)
    calibration = baseline.calibration
    kind = "random tokens" if calibration.kind == "random" else f"tokens of {calibration.source or tokens}"
    return InterventionResult(
        baseline.trace,
        after,
        control,
        positions=_positions(specs),
        control_is="; ".join(map(_control_in_words, specs, controls)),
        calibrated_on=f"{MIN_CALIBRATION} other sequences of {calibration.length} {kind}",
        checks=baseline.check(specs, made),
    )


def _positions(specs: Sequence[InterventionSpec]) -> tuple[int, ...]:
    return tuple(sorted({position for spec in specs for position in spec.positions()}))


def _control_in_words(spec: InterventionSpec, controls: Sequence[Intervention]) -> str:
    """The control of one spec, with the neurons that were drawn for it, and the positions it was moved to."""
    if not controls:
        return f"for {spec.name}, {NOTHING}"
    text = f"for {spec.name}, {spec.kind.control_is}"
    items = {item for control in controls for item in control.place.items or ()}
    if drawn := sorted((item for item in items if isinstance(item, Neuron)), key=str):
        text += f" ({', '.join(map(str, drawn))})"
    positions = {position for control in controls for position in control.place.positions or ()}
    if moved := sorted(positions - set(spec.positions())):
        text += f", at position{'' if len(moved) == 1 else 's'} {', '.join(map(str, moved))}"
    return text
