"""The tables that `sinkscope intervene` writes; every column is declared with its meaning."""

from __future__ import annotations

from pydantic import BaseModel

from sinkscope.results.kinds import Kind, SizesOfTokens
from sinkscope.results.run import Run
from sinkscope.results.tables import Column, Schema
from sinkscope.results.validated import Name, Whole, refused

ARMS = ("before", "after", "control")
MOST_POSITIONS = 256
"""Positions that a curve of the page shows."""
_QUANTITY = Column("quantity", "str", "What was measured; as in the table positions of a trace")
_POSITION = Column("position", "int", "Position, counted from 0")
_VALUES = (
    Column("before", "float", "In the baseline", nullable=True),
    Column("after", "float", "Under the interventions", nullable=True),
    Column("control", "float", "Under their control", nullable=True),
)
OBSERVABLES = Schema("observables", (_QUANTITY, Column("layer", "int", "Layer, counted from 0"), _POSITION, *_VALUES))
MEANS = Schema("means", (_QUANTITY, _POSITION, *_VALUES), is_listed=True)
"""Means over layers."""


def check_order(run: Run) -> None:
    """Refuses observables in another order than by quantity, layer and position, in which they are drawn."""
    path, observables, before = run.path / "observables.parquet", run.tables["observables"], run.summary["before"]
    quantities, length = dict.fromkeys(observables["quantity"]), before["tokens"]["length"]
    num_cells = before["num_layers"] * length
    if missing := {"sink_rate", "received", "dom_ratio"} - quantities.keys():
        raise refused(path, f"no {min(missing)}")
    is_whole = len(observables["quantity"]) == num_cells * len(quantities)
    if not is_whole or (
        observables["quantity"] != [quantity for quantity in quantities for _ in range(num_cells)]
        or observables["layer"] != [at // length for at in range(num_cells)] * len(quantities)
        or observables["position"] != list(range(length)) * (before["num_layers"] * len(quantities))
    ):
        raise refused(path, "rows that are not those of every layer and position in order")


class Arm(BaseModel):
    story: str


class Baseline(Arm):
    model: Name
    tokens: SizesOfTokens


class Check(BaseModel):
    intervention: str
    passed: bool | None = None
    text: str


class Token(BaseModel):
    position: Whole
    text: str


class Summary(BaseModel):
    story: str
    before: Baseline
    after: Arm
    control: Arm
    control_is: str
    calibrated_on: str
    checks: list[Check] | None = None
    texts: list[Token] | None = None


KINDS = (
    Kind(
        name="intervene",
        called="a run of sinkscope intervene",
        schemas=(OBSERVABLES, MEANS),
        told_by=MEANS.name,
        headline=("means", "quantity", "position", *ARMS),
        page="sinkscope.interventions.page",
        main_figures=("sink-rate", "received"),
        summary=Summary,
        sized_by="before",
        check=check_order,
    ),
)
