"""What a study found, before it is told."""

from __future__ import annotations

from dataclasses import dataclass

from sinkscope.capture.trace import Trace
from sinkscope.models.anatomy import Unit
from sinkscope.models.loading import LoadedModel
from sinkscope.studies.causal_claims import Measured
from sinkscope.studies.claims import Judgement
from sinkscope.studies.plan import Plan


@dataclass(frozen=True, kw_only=True)
class StudyResult:
    """What was found, and all that a report needs."""

    loaded: LoadedModel
    plan: Plan
    trace: Trace
    """Of the untouched model on the judging sequences."""
    judgements: list[Judgement]
    measured: Measured
    minimal_set: tuple[Unit, ...]
    went: str | None
    """Where the sink went when the minimal set was removed."""
