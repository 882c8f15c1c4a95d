"""The tables of training runs side by side; every column is declared with its meaning."""

from __future__ import annotations

from pydantic import BaseModel

from sinkscope.results.kinds import Kind
from sinkscope.results.tables import Column, Schema
from sinkscope.results.validated import Name

RATIOS = ("tokens_ratio", "seconds_ratio")
_RUN = (
    Column("variant", "str", "attention variant, and the settings in which the run differs from the baseline"),
    Column("seed", "int", "seed of the weights and of the order of the data"),
)
TRAINING_RUNS = Schema(
    "training_runs",
    (
        *_RUN,
        Column("run", "str", "name of the run folder"),
        Column("tokens", "int", "training tokens seen"),
        Column("elapsed_s", "float", "seconds of the whole run"),
        Column("tokens_per_second", "float", "median over updates"),
        Column("validation_loss", "float", "loss on held-out text at the last evaluation"),
        Column(
            "target_loss",
            "float",
            "the baseline's final validation loss with the same seed, or its mean if it lacks the seed",
        ),
        Column("is_paired", "bool", "whether the baseline has a run of the same seed"),
        Column("tokens_to_target", "float", "tokens at which the validation loss first reached the target"),
        Column("seconds_to_target", "float", "seconds until then, with evaluation, probes and compilation"),
        Column("bound", "str", "> if the target was never reached, < if the first evaluation was below it, else empty"),
        Column(
            "tokens_ratio", "float", "tokens to the target, divided by the baseline's; only a bound if `bound` is set"
        ),
        Column(
            "seconds_ratio",
            "float",
            "the same in seconds; empty if the runs were made on different machines",
            nullable=True,
        ),
    ),
    is_listed=True,
)
LOSSES = Schema(
    "losses",
    (
        *_RUN,
        Column("step", "int", "updates done"),
        Column("tokens", "int", "training tokens seen"),
        Column("elapsed_s", "float", "seconds since the run began, with evaluation, probes and compilation"),
        Column("validation_loss", "float", "mean loss on held-out text"),
    ),
)
OBSERVABLES = Schema(
    "observables",
    (
        *_RUN,
        Column("batch", "str", "what was probed: random tokens or held-out text"),
        Column("step", "int", "updates done"),
        Column("tokens", "int", "training tokens seen"),
        Column("quantity", "str", "name of the observable"),
        Column("mean", "float", "mean over layers; empty where no layer has it", nullable=True),
        Column("largest", "float", "largest over layers; empty where no layer has it", nullable=True),
    ),
)
BIRTHS = Schema(
    "births",
    (
        *_RUN,
        Column("batch", "str", "what was probed: random tokens or held-out text"),
        Column("link", "str", "link of the chain"),
        Column("threshold", "float", "value that its observable must reach and keep"),
        Column(
            "step",
            "int",
            "first probe from which it stays above the threshold; empty: it did not appear",
            nullable=True,
        ),
        Column("tokens", "int", "training tokens seen at that probe", nullable=True),
        Column(
            "step_before",
            "int",
            "last probe below the threshold; empty: above it from the first probe on",
            nullable=True,
        ),
        Column(
            "layer", "int", "layer with the largest value when it appeared; empty for the whole model", nullable=True
        ),
        Column("largest", "float", "largest value in the run", nullable=True),
    ),
    is_listed=True,
)
VARIANTS = Schema(
    "variants",
    (
        _RUN[0],
        Column("quantity", "str", "quantity: ratios to the baseline, all others at the end of training"),
        Column("num_seeds", "int", "seeds in the mean; for ratios, only those that the baseline has too"),
        Column("mean", "float", "mean over seeds, geometric for ratios", nullable=True),
        Column("low", "float", "lower end of the 95 % interval over seeds; empty with one seed", nullable=True),
        Column("high", "float", "upper end of that interval", nullable=True),
        Column(
            "bound",
            "str",
            "> or < if the ratio of a seed is only a bound, and so the mean too",
            choices=("", "<", ">"),
        ),
        Column("num_reached", "int", "seeds that reached the baseline's loss; for ratios only", nullable=True),
        Column("difference", "float", "mean difference to the baseline's run of the same seed", nullable=True),
        Column("difference_low", "float", "lower end of its 95 % interval", nullable=True),
        Column("difference_high", "float", "upper end of that interval", nullable=True),
        Column("num_pairs", "int", "seeds that the variant and the baseline both have"),
    ),
    is_listed=True,
)
COMPARISON_TABLES = (VARIANTS, TRAINING_RUNS, BIRTHS, LOSSES, OBSERVABLES)


class Summary(BaseModel):
    baseline: Name
    notes: list[str]


KINDS = (
    Kind(
        name="training",
        called="a training run",
        schemas=COMPARISON_TABLES,
        told_by=VARIANTS.name,
        headline=("variants", "variant", "quantity", "num_seeds", "mean", "low", "high"),
        page="sinkscope.pretrain.page",
        main_figures=("loss-tokens", "sink-rate", "dom-ratio"),
        summary=Summary,
        sized_by=None,
        load="sinkscope.pretrain.saved",
    ),
)
