"""The tables that `sinkscope intervene` writes; every column is declared with its meaning."""

from __future__ import annotations

from sinkscope.results.kinds import SIZES, Kind
from sinkscope.results.run import Run
from sinkscope.results.tables import Column, Schema
from sinkscope.results.validated import NAME, Int, Maybe, Text, refused

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


KINDS = (
    Kind(
        name="intervene",
        called="a run of sinkscope intervene",
        schemas=(OBSERVABLES, MEANS),
        told_by=MEANS.name,
        headline=("means", "quantity", "position", *ARMS),
        page="sinkscope.interventions.page",
        main_figures=("sink-rate", "received"),
        summary={
            "story": Text(),
            "before": {"model": NAME, "tokens": SIZES, "story": Text()},
            "after": {"story": Text()},
            "control": {"story": Text()},
            "control_is": Text(),
            "calibrated_on": Text(),
            "checks": Maybe([{"intervention": Text(), "passed": Maybe(bool), "text": Text()}]),
            "texts": Maybe([{"position": Int(), "text": Text()}]),
        },
        sized_by="before",
        check=check_order,
    ),
)
