"""The tables of training runs side by side; every column is declared with its meaning."""

from __future__ import annotations

from sinkscope.results.kinds import Kind
from sinkscope.results.tables import Column, Schema
from sinkscope.results.validated import NAME, Text

RATIOS = ("tokens_ratio", "seconds_ratio")
_RUN = (
    Column("variant", "str", "attention variant, with the settings in which it differs from the baseline"),
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
        Column("validation_loss", "float", "at the last evaluation"),
        Column("target_loss", "float", "the baseline's last validation loss: of the same seed, else its mean"),
        Column("is_paired", "bool", "whether the baseline has a run of the same seed"),
        Column("tokens_to_target", "float", "tokens at which the validation loss first reached the target"),
        Column("seconds_to_target", "float", "seconds until then, everything included"),
        Column(
            "bound", "str", "empty; > where the target was never reached, < where the first evaluation was below it"
        ),
        Column("tokens_ratio", "float", "tokens to the target over the baseline's; a bound where `bound` says so"),
        Column("seconds_ratio", "float", "the same in seconds; empty where machines differ", nullable=True),
    ),
    is_listed=True,
)
LOSSES = Schema(
    "losses",
    (
        *_RUN,
        Column("step", "int", "updates done"),
        Column("tokens", "int", "training tokens seen"),
        Column("elapsed_s", "float", "seconds since the run began, everything included"),
        Column("validation_loss", "float", "mean loss on held-out text"),
    ),
)
OBSERVABLES = Schema(
    "observables",
    (
        *_RUN,
        Column("batch", "str", "what was read: random tokens or held-out text"),
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
        Column("batch", "str", "what was read: random tokens or held-out text"),
        Column("link", "str", "link of the chain"),
        Column("threshold", "float", "what its observable must reach, and keep"),
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
        Column("quantity", "str", "what was measured; ratios are to the baseline, all else at the end of training"),
        Column("num_seeds", "int", "runs in the mean; for ratios, those paired with the baseline by seed"),
        Column("mean", "float", "mean over seeds; of ratios the geometric one", nullable=True),
        Column("low", "float", "low end of the 95 % interval over seeds; empty with one seed", nullable=True),
        Column("high", "float", "high end", nullable=True),
        Column(
            "bound",
            "str",
            "> or < where a seed's ratio is only a bound, so that the mean is one too",
            choices=("", "<", ">"),
        ),
        Column("num_reached", "int", "seeds that reached the baseline's loss; empty but for ratios", nullable=True),
        Column("difference", "float", "mean difference to the baseline's run of the same seed", nullable=True),
        Column("difference_low", "float", "low end of its 95 % interval", nullable=True),
        Column("difference_high", "float", "high end", nullable=True),
        Column("num_pairs", "int", "seeds that both have"),
    ),
    is_listed=True,
)
COMPARISON_TABLES = (VARIANTS, TRAINING_RUNS, BIRTHS, LOSSES, OBSERVABLES)


KINDS = (
    Kind(
        name="training",
        called="a training run",
        schemas=COMPARISON_TABLES,
        told_by=VARIANTS.name,
        headline=("variants", "variant", "quantity", "num_seeds", "mean", "low", "high"),
        page="sinkscope.pretrain.page",
        main_figures=("loss-tokens", "sink-rate", "dom-ratio"),
        summary={"baseline": NAME, "notes": [Text()]},
        sized_by=None,
        load="sinkscope.pretrain.saved",
    ),
)
