"""The tables that `sinkscope bias` writes; every column is declared with its meaning.

A value's interval is at 95 %, over `n` seeds or sequences as `over` says; null where there are too few of them.
"""

from __future__ import annotations

from pydantic import BaseModel

from sinkscope.results.kinds import Kind, OfAModel
from sinkscope.results.tables import Column, Schema

QUANTITIES = {
    "prediction_ratio": "how often the preferred token is the most likely one, divided by chance",
    "probability_ratio": "mean probability of the preferred token, divided by its uniform share",
    "entropy": "entropy of the histogram of most likely tokens, in nats",
    "entropy_deficit": "how far that entropy lies below that of uniform predictions, in nats",
    "inter_cosine": "mean cosine between sequences after the last layer",
    "intra_cosine": "mean cosine between positions after the last layer",
}
"""Each quantity in words."""

_SEED = Column("seed", "int", "Seed of the weights; null for a model that had weights already", nullable=True)
_OVER = Column("over", "str", "What the interval is over: seeds or sequences")
_N = Column("n", "int", "How many seeds or sequences the number is made of")
_QUANTITY = Column("quantity", "str", "Name of the quantity; docs/born_biased.md defines each")
_LAYER = Column("layer", "int", "Layer, counted from 0; -1 is the stream that enters layer 0")
_PART = Column(
    "part",
    "str",
    "Where in the layer: after attention or feed_forward; embeddings for layer -1",
    choices=("embeddings", "attention", "feed_forward"),
)


def _value(name: str, meaning: str) -> tuple[Column, Column, Column]:
    """A value with the ends of its interval."""
    return (
        Column(name, "float", meaning, nullable=True),
        Column(f"{name}_low", "float", "Lower end of its interval", nullable=True),
        Column(f"{name}_high", "float", "Upper end of its interval", nullable=True),
    )


BIAS = Schema(
    "bias",
    (
        _SEED,
        _QUANTITY,
        *_value("value", "Mean over the sequences of a seed; over all seeds where `over` is seeds"),
        _OVER,
        _N,
    ),
    is_listed=True,
    never_empty=True,
)
PREFERRED_TOKENS = Schema(
    "preferred_tokens",
    (
        _SEED,
        Column("rank", "int", "Rank among the most probable tokens, from 0"),
        Column("token", "int", "Token id"),
        Column("text", "str", "The token decoded; null without a tokenizer", nullable=True),
        Column("prediction_ratio", "float", "Share of sequences that predict it, times the size of the vocabulary"),
        Column("probability_ratio", "float", "Its mean probability, times the size of the vocabulary"),
    ),
    is_listed=True,
)
CONTRACTION = Schema(
    "contraction",
    (
        _LAYER,
        _PART,
        *_value("inter", "Mean cosine between sequences at the last position"),
        *_value("inter_added", "What attention, or the feed-forward, adds to it"),
        *_value("intra", "Mean cosine between the positions of a sequence"),
        *_value("intra_added", "What attention, or the feed-forward, adds to it"),
        Column("alignment", "float", "|cosine| of the mean state with the top principal direction"),
        Column("top_share", "float", "Share of the states' energy in that direction"),
        Column("split_half", "float", "Cosine of the mean states of two halves of the sequences"),
        Column(
            "between_seeds",
            "float",
            "Mean cosine between the mean states of two seeds; null for one seed",
            nullable=True,
        ),
        _OVER,
        _N,
    ),
    is_listed=True,
    never_empty=True,
)
CONTRACTION_POSITIONS = Schema(
    "contraction_positions",
    (
        _LAYER,
        Column("position", "int", "Position, counted from 0"),
        *_value("inter", "Mean cosine between sequences after the layer; the interval is over seeds, null for one"),
        *_value("value_variance", "Variance of the value aggregation across sequences; null for layer -1"),
        _N,
    ),
    is_listed=True,
    never_empty=True,
)
CONTROLS = Schema(
    "controls",
    (
        Column("control", "str", "Name of the control: what was changed in the model"),
        _QUANTITY,
        Column("value", "float", "The quantity under the control", nullable=True),
        *_value("difference", "Value under the control minus that of the baseline, paired by seed or sequence"),
        _OVER,
        _N,
    ),
    is_listed=True,
)
PERSISTENCE = Schema(
    "persistence",
    (
        Column("checkpoint", "str", "Name of the checkpoint"),
        Column("step", "int", "Its step, if its name says it", nullable=True),
        *_value(
            "correlation", "Rank correlation of its mean next-token probabilities with those of the initial weights"
        ),
        Column(
            "ceiling",
            "float",
            "Rank correlation of the initial weights with themselves on other sequences: the most to expect",
        ),
        Column(
            "other_seeds",
            "float",
            "Mean correlation with the initial weights of other seeds; null without any",
            nullable=True,
        ),
        Column("mean_state_cosine", "float", "Cosine of its mean last state with that of the initial weights"),
        *_value("prediction_ratio", "As in the table bias"),
        *_value("probability_ratio", "As in the table bias"),
        *_value("entropy_deficit", "As in the table bias"),
        *_value("inter_cosine", "As in the table bias"),
        _N,
    ),
    is_listed=True,
)
BIAS_TABLES = (BIAS, PREFERRED_TOKENS, CONTRACTION, CONTRACTION_POSITIONS, CONTROLS, PERSISTENCE)


class Control(BaseModel):
    refused: str | None = None
    """Why it could not be made."""


class Summary(OfAModel):
    controls: dict[str, Control]


KINDS = (
    Kind(
        name="bias",
        called="a run of sinkscope bias",
        schemas=BIAS_TABLES,
        told_by=BIAS.name,
        headline=("bias", "quantity", "over", "value", "value_low", "value_high"),
        page="sinkscope.initial_bias.page",
        summary=Summary,
    ),
)
