"""The tables that a trace writes; every column is declared with its meaning, most of them by an observable."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated

from pydantic import BaseModel, Field

from sinkscope.results.kinds import Kind, Layer, OfAModel, Position, below
from sinkscope.results.run import Run
from sinkscope.results.tables import Column, Schema
from sinkscope.results.validated import Whole, refused
from sinkscope.tracing.observables import CHAIN, TABLE_OF_AXES, Observable
from sinkscope.tracing.reducers import Largest

_LAYER = Column("layer", "int", "Layer, counted from 0")
_POSITION = Column("position", "int", "Position in the sequence, counted from 0")
_EXPERT = Column("expert", "int", "Expert of the neuron; -1 is the shared expert; null in a dense layer", nullable=True)


def columns(observable: Observable) -> list[Column]:
    """The columns that an observable fills."""
    filled = [Column(observable.column or observable.name, "float", observable.meaning, observable.nullable)]
    place = observable.reducer.place if isinstance(observable.reducer, Largest) else None
    if place == "neuron":
        meaning = "Expert of that neuron; -1 is the shared expert; null in a dense layer"
        filled.append(Column(f"{observable.name}_expert", "int", meaning, True))
        meaning = "That neuron, counted from 0 within its layer or expert"
        filled.append(Column(f"{observable.name}_neuron", "int", meaning, observable.nullable))
    elif place is not None:
        filled.append(Column(f"{observable.name}_{place}", "int", f"The {place} of that value, counted from 0"))
    return filled


def schema_with(schema: Schema, observables: Iterable[Observable]) -> Schema:
    """The schema with the columns of those observables that fill this table."""
    declared = {column.name: column for column in schema.columns}
    for observable in observables:
        if TABLE_OF_AXES.get(observable.axes) == schema.name:
            declared |= {column.name: column for column in columns(observable)}
    return replace(schema, columns=tuple(declared.values()))


SINKS = Schema(
    "sinks",
    (
        _POSITION,
        Column(
            "rate",
            "float",
            "Sink rate: share of sequences, layers and heads that give this key more than 0.3 of their attention",
        ),
        Column("low", "float", "Lower end of the rate's 95 % bootstrap interval over sequences", nullable=True),
        Column("high", "float", "Upper end of the rate's 95 % bootstrap interval over sequences", nullable=True),
        Column("num_sequences", "int", "How many sequences the rate is a mean over"),
        Column("in_sequences", "int", "In how many of them the position is a sink"),
        Column("rate_there", "float", "Sink rate in those alone", nullable=True),
        Column(
            "certainty",
            "str",
            "'sink'; 'in some' if it is one in fewer than half of the sequences; 'maybe' if the interval holds 5 %",
        ),
        Column(
            "num_layers",
            "int",
            "How many layers have at least 5 % of heads and sequences that count the position as a sink",
        ),
        Column("first_layer", "int", "First such layer", nullable=True),
        Column("last_layer", "int", "Last such layer", nullable=True),
        Column("mean_attention", "float", "Attention received, mean over sequences, layers and heads"),
    ),
)
POSITIONS = schema_with(
    Schema(
        "positions",
        (
            _LAYER,
            _POSITION,
            Column(
                "attention_received",
                "float",
                "Mean attention received, over heads and sequences; null if the key was not recorded",
                True,
            ),
            Column(
                "sink_rate",
                "float",
                "Share of heads and sequences that count the key as a sink; null if the key was not recorded",
                True,
            ),
        ),
        ordered_by="position",
    ),
    CHAIN,
)
NEURONS = Schema(
    "neurons",
    (
        _POSITION,
        _LAYER,
        _EXPERT,
        Column("neuron", "int", "Neuron, counted from 0 within its layer or expert"),
        Column("dimension", "int", "Massive dimension that the neuron writes into most"),
        Column("role", "str", "'writes' if its write has the sign of the dimension's value, 'erases' if the opposite"),
        Column(
            "activation", "float", "Mean activation at the position, times the routing weight in a mixture of experts"
        ),
        Column("write", "float", "Mean write into the dimension at the position"),
        Column("write_share", "float", "Share of the layer's squared write into the massive dimensions there"),
        Column("contrast", "float", "Root mean square write at the position, over that at all other positions"),
        Column(
            "max_over_median",
            "float",
            "Largest over median magnitude of the entries of the neuron's output vector; null if the median is 0",
            True,
        ),
        Column("top_share", "float", "Energy share of the top dimension of the output vector"),
        Column("participation_ratio", "float", "(sum w^2)^2 / sum w^4 of the output vector"),
        Column("kurtosis", "float", "Kurtosis of the output vector"),
        Column("layer_top_share", "float", "Median of top_share over all neurons of the layer"),
    ),
)
DIMENSIONS = Schema(
    "dimensions",
    (
        Column("layer", "int", "Layer that the residual stream leaves; -1 is the stream that enters layer 0"),
        _POSITION,
        Column("dimension", "int", "Massive dimension"),
        Column("value", "float", "Mean value over sequences"),
        Column("magnitude", "float", "Mean magnitude over sequences"),
        Column("ratio", "float", "Magnitude over the mean magnitude of all dimensions at the position"),
        Column("contrast", "float", "Magnitude over that of the same dimension at the other positions"),
        Column(
            "appears", "bool", "Whether it becomes massive in this layer, or at least half of its ratio is new there"
        ),
    ),
)
HEADS = schema_with(
    Schema(
        "heads",
        (
            _LAYER,
            Column("head", "int", "Query head"),
            Column("position", "int", "Key position: each sink or, without a sink, the key with the largest sink rate"),
            Column("attention_received", "float", "Mean attention received by the key from this head"),
            Column("sink_rate", "float", "Share of sequences in which the head counts the key as a sink"),
            Column(
                "positive_queries",
                "float",
                "Share of later queries with q . k > 0; null if the lock was not measured at the position",
                True,
            ),
            Column(
                "lock_share",
                "float",
                "Share of q . k of later queries that is lost without the massive dimensions; null if there are none",
                True,
            ),
        ),
    ),
    CHAIN,
)
LAYERS = Schema(
    "layers",
    (
        _LAYER,
        Column(
            "variance_ratio",
            "float",
            "Value variance at position 0 over its mean over the later half of positions; null if position 0 has none",
            True,
        ),
        Column(
            "averaging_law_r_squared",
            "float",
            "R^2 of the averaging law: the share of the log variance by position that it explains",
            True,
        ),
        Column(
            "variance_ratio_before_norm",
            "float",
            "variance_ratio before the norm on the aggregation; null without one",
            True,
        ),
        Column(
            "averaging_law_r_squared_before_norm",
            "float",
            "averaging_law_r_squared before that norm, where values are averaged",
            True,
        ),
        Column(
            "kendall_positions",
            "float",
            "Kendall's tau between variances by position before and after the output projection",
            True,
        ),
        Column(
            "kendall_channels",
            "float",
            "Kendall's tau between variances of channels and column norms of the output projection",
            True,
        ),
        Column("dom_ratio_sink", "float", "DomRatio at the strongest sink; null without a sink", True),
        Column("dom_ratio_elsewhere", "float", "DomRatio, mean over positions that are no sink", True),
        Column("dom_ratio_turned_sink", "float", "DomRatio at the strongest sink in a fixed random basis", True),
        Column(
            "direction_share_sink",
            "float",
            "direction_share at the strongest sink",
            True,
        ),
        Column(
            "median_magnitude", "float", "Median |h| over the tokens that the effective rank is computed from", True
        ),
        Column(
            "massive_activations_sink",
            "int",
            "Dimensions at the strongest sink with |h| above 100 and above 1,000 times the median",
            True,
        ),
        Column("effective_rank", "float", "Effective rank of up to 1,024 tokens", True),
        Column(
            "effective_rank_without_sink", "float", "The same without the tokens at sinks; null without a sink", True
        ),
        Column(
            "born",
            "bool",
            "Whether disparity that carries the sink appears in this layer, at the strongest sink or else where it is "
            "largest",
        ),
        Column("erased", "bool", "Whether it disappears in this layer there"),
    ),
    ordered_by="layer",
)
DISTANCES = Schema(
    "distances",
    (
        _LAYER,
        Column("distance", "int", "How far back the key lies"),
        Column(
            "attention",
            "float",
            "Mean attention on that key, over at most 256 queries, heads and sequences; null without attention",
            True,
        ),
    ),
    ordered_by="distance",
)
_TOKEN = (
    Column("sequence", "int", "Sequence of the batch, counted from 0"),
    _POSITION,
    Column("id", "int", "Token id"),
    Column("text", "str", "The token as the tokenizer writes it; its id without a tokenizer"),
)
TOKENS = Schema(
    "tokens",
    (
        *_TOKEN,
        Column(
            "sink_rate",
            "float",
            "Share of layers and heads that count the token as a sink of its sequence; null if not recorded",
            True,
        ),
        Column(
            "attention_received",
            "float",
            "Attention received, mean over the queries from the token on, layers and heads; null if not recorded",
            True,
        ),
    ),
    of_texts=True,
)
SEQUENCE_SINKS = Schema(
    "sequence_sinks",
    (
        *_TOKEN,
        Column("rate", "float", "Share of layers and heads that count the token as a sink of its sequence"),
        Column("mean_attention", "float", "Attention received, mean over the queries from it on, layers and heads"),
    ),
    of_texts=True,
)


TRACE_TABLES = (SINKS, POSITIONS, NEURONS, DIMENSIONS, HEADS, LAYERS, DISTANCES, TOKENS, SEQUENCE_SINKS)


def check_heads(run: Run) -> None:
    """Refuses a table `heads` that does not have one row for each head of each layer with attention, in order, at each
    position: pages turn it into a map."""
    table = run.tables["heads"]
    layers = sorted(set(table["layer"]))
    by_position: dict[int, list[tuple[int, int]]] = {run.strongest: []}
    for position, layer, head in zip(table["position"], table["layer"], table["head"], strict=True):
        by_position.setdefault(position, []).append((layer, head))
    for position, rows in by_position.items():
        num_heads = len(rows) // max(1, len(layers))
        if not rows or rows != [(layer, head) for layer in layers for head in range(num_heads)]:
            raise refused(run.path / "heads.parquet", f"other rows at position {position} than a layer's heads each")


class SinkOfSummary(BaseModel):
    position: Position
    layers: list[Layer] | None = None


class InLayer(BaseModel):
    layer: Layer


class Writer(InLayer):
    expert: Whole | None = None
    neuron: Whole


class TokenSink(BaseModel):
    text: str
    num_sequences: Whole
    num_with: Whole
    positions: list[Whole]


class DomRatios(BaseModel):
    position: Position
    sink: list[float | None] | None = None
    elsewhere: list[float | None]


class TraceSummary(OfAModel):
    """The checked entries of a trace's summary. Those of a study's summary include them."""

    attention_layers: Annotated[list[Layer], Field(min_length=1)] | None = None
    """Of a hybrid: the layers that have attention."""
    sink_rate: float | None = None
    keys: list[Position] | None = None
    writers: list[Writer] | None = None
    sinks: list[SinkOfSummary]
    birth_layers: list[Annotated[int, Field(ge=-1), below("num_layers")]]
    super_neurons: list[InLayer] | None = None
    massive_dimensions: list[Whole]
    token_sinks: list[TokenSink] | None = None
    variance_ratio: list[float | None] | None = None
    dom_ratio: DomRatios


CHAIN_PANELS = ("variance", "writes", "output-vectors", "dom-ratio", "received")
"""The figures of the chain, from left to right."""
KINDS = (
    Kind(
        name="trace",
        called="a trace",
        schemas=TRACE_TABLES,
        told_by=SINKS.name,
        headline=("sinks", "position", "rate", "low", "high", "num_layers", "mean_attention"),
        page="sinkscope.tracing.page",
        summary=TraceSummary,
        main_figures=CHAIN_PANELS,
        is_pictured=True,
        check=check_heads,
    ),
)
