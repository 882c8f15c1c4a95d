"""The tables that a trace writes; every column is declared with its meaning, most of them by an observable."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from sinkscope.results.kinds import OF_A_MODEL, Kind
from sinkscope.results.run import Run
from sinkscope.results.tables import Column, Schema
from sinkscope.results.validated import Int, Maybe, Real, Text, refused
from sinkscope.tracing.observables import CHAIN, TABLE_OF_AXES, Observable
from sinkscope.tracing.reducers import Largest

_LAYER = Column("layer", "int", "Layer, counted from 0")
_POSITION = Column("position", "int", "Position in the sequence, counted from 0")
_EXPERT = Column("expert", "int", "Expert of the neuron; -1 is the shared expert; null in a dense layer", nullable=True)


def columns(observable: Observable) -> list[Column]:
    """The columns that an observable fills."""
    found = [Column(observable.column or observable.name, "float", observable.meaning, observable.nullable)]
    place = observable.reducer.place if isinstance(observable.reducer, Largest) else None
    if place == "neuron":
        meaning = "Expert of that neuron; -1 is the shared expert; null in a dense layer"
        found.append(Column(f"{observable.name}_expert", "int", meaning, True))
        found.append(Column(f"{observable.name}_neuron", "int", "Number of that neuron"))
    elif place is not None:
        found.append(Column(f"{observable.name}_{place}", "int", f"Its {place}"))
    return found


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
            "rate", "float", "Sink rate: share of sequences, layers and heads whose mean attention received exceeds 0.3"
        ),
        Column("low", "float", "Lower end of the rate's 95 % bootstrap interval over sequences", nullable=True),
        Column("high", "float", "Upper end of the rate's 95 % bootstrap interval over sequences", nullable=True),
        Column("num_sequences", "int", "Sequences that the rate is a mean over"),
        Column("num_layers", "int", "Layers in which at least 5 % of heads and sequences count the position"),
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
        Column("neuron", "int", "Neuron within the layer or expert"),
        Column("dimension", "int", "Massive dimension that the neuron writes into most"),
        Column("role", "str", "'writes' if it pushes the dimension the way it points, 'erases' if against it"),
        Column("activation", "float", "Mean activation at the position, times the routing weight"),
        Column("write", "float", "Mean write into the dimension at the position"),
        Column("write_share", "float", "Share of the layer's squared write into the massive dimensions there"),
        Column("contrast", "float", "Root mean square write at the position over that at all others"),
        Column(
            "max_over_median",
            "float",
            "Largest over median magnitude of the neuron's output vector; null where the median is 0",
            True,
        ),
        Column("top_share", "float", "Energy share of the top dimension of the output vector"),
        Column("participation_ratio", "float", "(sum w^2)^2 / sum w^4 of the output vector"),
        Column("kurtosis", "float", "Kurtosis of the output vector"),
        Column("layer_top_share", "float", "Median top share over the layer's neurons"),
    ),
)
DIMENSIONS = Schema(
    "dimensions",
    (
        Column("layer", "int", "Layer whose residual it is; -1 is the stream that enters layer 0"),
        _POSITION,
        Column("dimension", "int", "Massive dimension"),
        Column("value", "float", "Mean value over sequences"),
        Column("magnitude", "float", "Mean magnitude over sequences"),
        Column("ratio", "float", "Magnitude over the position's mean magnitude over dimensions"),
        Column("contrast", "float", "Magnitude over that of the same dimension at the other positions"),
    ),
)
HEADS = schema_with(
    Schema(
        "heads",
        (
            _LAYER,
            Column("head", "int", "Query head"),
            Column("position", "int", "Key position: every sink, or the strongest key where there is none"),
            Column("attention_received", "float", "Mean attention received by the key from this head"),
            Column("sink_rate", "float", "Share of sequences in which the head counts the key as a sink"),
            Column(
                "positive_queries",
                "float",
                "Share of later queries with q . k > 0; null where the lock was not measured",
                True,
            ),
            Column(
                "lock_share",
                "float",
                "Share of q . k of later queries gone without the massive dimensions; null where there are none",
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
            "Value variance at position 0 over the later half; null where not applicable",
            True,
        ),
        Column(
            "averaging_law_r_squared",
            "float",
            "Share of log variance by position that the averaging law explains",
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
            "averaging_law_r_squared there: values are averaged before the norm",
            True,
        ),
        Column(
            "kendall_positions",
            "float",
            "Kendall's tau of the standard deviations by position before and after W_O",
            True,
        ),
        Column(
            "kendall_channels",
            "float",
            "Kendall's tau of the channels' standard deviations and the column norms of W_O",
            True,
        ),
        Column("dom_ratio_sink", "float", "DomRatio at the strongest sink; null without a sink", True),
        Column("dom_ratio_elsewhere", "float", "DomRatio, mean over positions that are no sink", True),
        Column("dom_ratio_turned_sink", "float", "DomRatio at the strongest sink in a fixed random basis", True),
        Column("direction_share_sink", "float", "Energy share of one direction across sequences there", True),
        Column("median_magnitude", "float", "Median |h| over the tokens of the effective rank", True),
        Column("massive_activations_sink", "int", "Dimensions over 100 and 1000 medians at the strongest sink", True),
        Column("effective_rank", "float", "Effective rank of up to 1,024 tokens", True),
        Column(
            "effective_rank_without_sink", "float", "The same without the tokens at sinks; null without a sink", True
        ),
        Column("born", "bool", "Whether disparity is born in this layer at a position in focus"),
        Column("erased", "bool", "Whether it is erased here"),
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
            "Mean attention on that key, over at most 256 queries that have one, heads and sequences",
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
            "Share of layers and heads that count the token as a sink of its sequence; null if it was not recorded",
            True,
        ),
        Column(
            "attention_received",
            "float",
            "Attention received, mean over the queries from the token on, layers and heads; null likewise",
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
    """Refuses a table whose rows at a key are not those of every layer and head, one after the other."""
    table, num_layers = run.tables["heads"], run.summary["num_layers"]
    found: dict[int, list[tuple[int, int]]] = {run.strongest: []}
    for position, layer, head in zip(table["position"], table["layer"], table["head"], strict=True):
        found.setdefault(position, []).append((layer, head))
    for position, rows in found.items():
        expected = [(layer, head) for layer in range(num_layers) for head in range(len(rows) // num_layers)]
        if not rows or rows != expected:
            raise refused(run.path / "heads.parquet", f"other rows at position {position} than a layer's heads each")


TRACED = {
    **OF_A_MODEL,
    "sink_rate": Maybe(Real()),
    "keys": Maybe([Int(0, "length")]),
    "writers": Maybe([{"layer": Int(0, "num_layers"), "expert": Maybe(Int()), "neuron": Int()}]),
    "sinks": [{"position": Int(0, "length"), "layers": Maybe([Int(0, "num_layers")])}],
    "birth_layers": [Int(-1, "num_layers")],
    "super_neurons": Maybe([{"layer": Int(0, "num_layers")}]),
    "massive_dimensions": [Int()],
    "token_sinks": Maybe([{"text": Text(), "num_sequences": Int(), "num_with": Int(), "positions": [Int()]}]),
    "variance_ratio": Maybe([Maybe(Real())]),
    "dom_ratio": {"position": Int(0, "length"), "sink": Maybe([Maybe(Real())]), "elsewhere": [Maybe(Real())]},
}
"""The summary of a trace, which that of a study holds too."""
KINDS = (
    Kind(
        name="trace",
        called="a trace",
        schemas=TRACE_TABLES,
        told_by=SINKS.name,
        headline=("sinks", "position", "rate", "low", "high", "num_layers", "mean_attention"),
        page="sinkscope.tracing.page",
        summary=TRACED,
        picture="sinkscope.tracing.picture",
        check=check_heads,
    ),
)
