"""What a trace records. An Observable says at which hook point of a layer it listens, which value it takes there, how
the values of several sequences are reduced to one, and what the result means.

CHAIN holds every observable of the sink chain. To add a number to a trace, add a record here: tables, pages and
torchrun need no more. Users give their own to `trace(..., observables=[*CHAIN, mine])`.

Axes, the layers first: L layers, B sequences, T positions, S recorded keys, H heads, R distances, E width, C channels,
U neurons, P positions of interest (`LayerCall.positions_of_interest`), N tokens of the effective rank.
This file must not import torch: commands that only read saved runs take the meaning of columns from it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from sinkscope.errors import InputError
from sinkscope.tracing.reducers import Cosine, Largest, Mean, Moments, Reducer, Rows, SelfJoining, TopDirection, Total

RANK_TOKENS = 1024
"""Most tokens of a layer that its effective rank is computed from."""
DIRECTION_SEQUENCES = 16
"""Most sequences that `direction_share` is computed across. Their states at the positions of interest are kept until
all chunks have run: at most 16 x 28 states in each layer, however long the text and the batch."""

TABLE_OF_AXES = {"LT": "positions", "LH": "heads", "L": "layers"}
"""By the axes of an observable, the table that it is a column of."""


class HookPoint(Enum):
    """Where in a layer an observable listens, in the order in which a layer runs. The comments name the attributes of
    LayerCall that an observable may read there."""

    ATTENTION_IN = "attention_in"  # state
    ATTENTION = "attention"  # state, query, key, value, rule, attention
    BEFORE_NORM = "before_norm"  # before_norm; only in models with a norm on the aggregation
    AGGREGATION = "aggregation"  # aggregation, before_norm
    PROJECTED = "projected"  # aggregation, before_norm, projected
    RESIDUAL_MID = "residual_mid"  # residual, after attention (a mixer, or both) and before the feed-forward
    RESIDUAL_OUT = "residual_out"  # residual; also once before layer 0, as layer -1
    NEURONS = "neurons"  # residual, neurons; at the end of the layer, after RESIDUAL_OUT


ENTERING = frozenset({HookPoint.RESIDUAL_OUT})
"""What can be read of the residual stream that enters layer 0."""


def hook_points_of(layer: Any) -> set[HookPoint]:
    """The hook points that a Layer has: layers of a hybrid may lack attention or a feed-forward."""
    points = {HookPoint.RESIDUAL_OUT}
    if layer.has_attention:
        points |= {HookPoint.ATTENTION_IN, HookPoint.ATTENTION}
        points |= {HookPoint.BEFORE_NORM, HookPoint.AGGREGATION, HookPoint.PROJECTED}
    if layer.mixing_exits:
        points.add(HookPoint.RESIDUAL_MID)
    if layer.has_feed_forward:
        points.add(HookPoint.NEURONS)
    return points


@dataclass(frozen=True, kw_only=True)
class Observable:
    """One quantity, recorded in every layer."""

    name: str
    """Its name in a recording and, unless `column` says another, in a table."""
    hook_point: HookPoint
    value: Callable[[Any], Any]
    """Takes a LayerCall and returns what to record of it, in the form that `reducer` takes, sequences first; None to
    record nothing."""
    reducer: Reducer
    """How the values of several sequences become one."""
    axes: str = ""
    """Axes of the result. An observable whose axes are in TABLE_OF_AXES is a column of that table."""
    meaning: str = ""
    """A sentence that documents the column. Every column needs one."""
    column: str = ""
    """The name of the column, if it differs from `name`."""
    nullable: bool = False
    """Whether the column may be null: with one sequence, with chosen keys, or for a state of zeros."""
    asks: Literal["", "distances", "averaging law", "own weights", "positions of interest"] = ""
    """Extra data that this observable needs from the pass. Empty: only attention received."""
    layers: Collection[int] | None = None
    """The layers it listens in; all if None."""


def _heads_and_positions(name: str, meaning: str) -> tuple[Observable, Observable]:
    """Two observables of a number that each query's row of attention has: its mean over heads, a column of `positions`,
    and its mean over queries, a column of `heads`."""

    def over(axis: int) -> Callable[[Any], Any]:
        def mean_over(call: Any) -> Any:
            values_BHT = getattr(call.attention, name)
            return None if values_BHT is None else values_BHT.mean(axis)

        return mean_over

    same: dict[str, Any] = dict(hook_point=HookPoint.ATTENTION, reducer=Mean(), nullable=True)
    return (
        Observable(
            name=name,
            value=over(1),
            axes="LT",
            meaning=f"{meaning} of the query's attention, mean over heads and sequences",
            **same,
        ),
        Observable(
            name=f"{name}_by_head",
            column=name,
            value=over(2),
            axes="LH",
            meaning=f"{meaning} of the head's attention, mean over queries and sequences",
            **same,
        ),
    )


def averaging_law(call: Any) -> Any:
    """[B, T] sum_j a_tj^2 Var(v_j), mean over heads: the variance of the aggregation if values of different keys were
    independent. None if only some keys are recorded."""
    weighted_BHT = call.attention.weighted_mixing
    return None if weighted_BHT is None else weighted_BHT.mean(1)


RECEIVED = Observable(
    name="received",
    hook_point=HookPoint.ATTENTION,
    value=lambda call: call.alpha,
    reducer=Mean(),
    axes="LHS",
    meaning="alpha: attention received, mean over the queries from the key on, and over sequences",
)
VALUE_VARIANCE_BY_KEY = Observable(
    name="value_variance_by_key",
    hook_point=HookPoint.ATTENTION,
    value=lambda call: call.value,
    reducer=Moments(),
    axes="LKS",
    meaning="Variance across sequences of each key's value, mean over channels",
)
DOM_RATIO = Observable(
    name="dom_ratio",
    hook_point=HookPoint.RESIDUAL_OUT,
    value=lambda call: call.dom_ratio,
    reducer=Mean(of_ratios=True),
    axes="LT",
    meaning="max |h| / mean |h| of the residual that leaves the layer, mean over sequences; null, like every ratio, "
    "where all states are zero",
    nullable=True,
)
EFFECTIVE_RANK = Observable(
    name="rank_tokens",
    hook_point=HookPoint.RESIDUAL_OUT,
    value=lambda call: call.rank_tokens,
    reducer=Rows(RANK_TOKENS),
    axes="LNE",
    meaning="The states that the effective rank is computed from",
)
SINK_HEADS = Observable(
    name="sink_heads",
    hook_point=HookPoint.ATTENTION,
    value=lambda call: call.sink_heads,
    reducer=Rows(),
    axes="LBS",
    meaning="How many heads count the key as a sink, by sequence",
)
RECEIVED_BY_SEQUENCE = Observable(
    name="received_by_sequence",
    hook_point=HookPoint.ATTENTION,
    value=lambda call: call.alpha.mean(1),
    reducer=Rows(),
    axes="LBS",
    meaning="alpha: attention received, mean over the queries from the key on, and over heads, by sequence",
)
LOCK = Observable(
    name="lock",
    hook_point=HookPoint.ATTENTION,
    value=lambda call: call.lock_rows,
    reducer=SelfJoining(),
    meaning="The queries, keys and states that the lock is computed from",
)
SURVEY = (RECEIVED, VALUE_VARIANCE_BY_KEY, DOM_RATIO)
"""What must be known of all sequences before a batch can be recorded in chunks: see `record`."""

CHAIN: tuple[Observable, ...] = (
    RECEIVED,
    Observable(
        name="head_sink_rate",
        hook_point=HookPoint.ATTENTION,
        value=lambda call: call.is_sink.float(),
        reducer=Mean(),
        axes="LHS",
        meaning="Share of sequences in which the head counts the key as a sink",
    ),
    SINK_HEADS,
    RECEIVED_BY_SEQUENCE,
    *_heads_and_positions("entropy", "Entropy"),
    *_heads_and_positions("mixing", "sum a^2"),
    Observable(
        name="value_variance",
        hook_point=HookPoint.AGGREGATION,
        value=lambda call: call.aggregation,
        reducer=Moments(),
        axes="LT",
        meaning="Variance across sequences of the value aggregation that enters the output projection, mean over "
        "channels",
        nullable=True,
    ),
    Observable(
        name="value_variance_before_norm",
        hook_point=HookPoint.BEFORE_NORM,
        value=lambda call: call.before_norm,
        reducer=Moments(),
        axes="LT",
        meaning="The same before the norm on the aggregation; null in models without one",
        nullable=True,
    ),
    Observable(
        name="averaging_law",
        hook_point=HookPoint.ATTENTION,
        value=averaging_law,
        reducer=Mean(),
        axes="LT",
        meaning="Variance that averaging independent values would give: sum_j E[a_tj^2] Var(v_j), mean over heads",
        nullable=True,
        asks="averaging law",
    ),
    Observable(
        name="projected_variance",
        hook_point=HookPoint.PROJECTED,
        value=lambda call: call.projected,
        reducer=Moments(),
        axes="LT",
        meaning="Variance across sequences after the output projection, mean over dimensions",
        nullable=True,
    ),
    Observable(
        name="second_moment",
        hook_point=HookPoint.AGGREGATION,
        value=lambda call: call.second_moment,
        reducer=Mean(),
        axes="LT",
        meaning="E[o^2] of the value aggregation, over sequences and channels; null in layers without attention",
        nullable=True,
    ),
    Observable(
        name="cosine",
        hook_point=HookPoint.ATTENTION_IN,
        value=lambda call: call.direction,
        reducer=Cosine(),
        axes="LT",
        meaning="Mean cosine of the state that enters attention over pairs of sequences",
        nullable=True,
    ),
    DOM_RATIO,
    Observable(
        name="direction_share",
        hook_point=HookPoint.RESIDUAL_OUT,
        value=lambda call: (call.rows_of_interest, call.positions_of_interest, call.passing.length),
        reducer=TopDirection(DIRECTION_SEQUENCES),
        axes="LT",
        meaning="Energy share of the top direction of the residual across the first 16 sequences, whatever the basis; "
        "only at positions of interest, null elsewhere and with one sequence",
        nullable=True,
        asks="positions of interest",
    ),
    Observable(
        name="dom_ratio_turned",
        hook_point=HookPoint.RESIDUAL_OUT,
        value=lambda call: call.dom_ratio_turned,
        reducer=Mean(of_ratios=True),
        axes="LT",
        meaning="DomRatio in a fixed random basis, mean over sequences; only at positions of interest",
        nullable=True,
        asks="positions of interest",
    ),
    Observable(
        name="dom_ratio_normed",
        hook_point=HookPoint.ATTENTION_IN,
        value=lambda call: call.state_dom_ratio,
        reducer=Mean(of_ratios=True),
        axes="LT",
        meaning="max |x| / mean |x| of the state that enters attention, mean over sequences",
        nullable=True,
    ),
    Observable(
        name="participation_ratio",
        hook_point=HookPoint.RESIDUAL_OUT,
        value=lambda call: call.tokens.participation_ratio,
        reducer=Mean(of_ratios=True),
        axes="LT",
        meaning="(sum h^2)^2 / sum h^4, mean over sequences",
        nullable=True,
    ),
    Observable(
        name="top_energy_share",
        hook_point=HookPoint.RESIDUAL_OUT,
        value=lambda call: call.tokens.largest.square() / call.tokens.energy,
        reducer=Mean(of_ratios=True),
        axes="LT",
        meaning="Energy share of the largest dimension, mean over sequences",
        nullable=True,
    ),
    Observable(
        name="kurtosis",
        hook_point=HookPoint.RESIDUAL_OUT,
        value=lambda call: call.tokens.kurtosis,
        reducer=Mean(of_ratios=True),
        axes="LT",
        meaning="Kurtosis over dimensions, mean over sequences",
        nullable=True,
    ),
    Observable(
        name="largest_residual",
        hook_point=HookPoint.RESIDUAL_OUT,
        value=lambda call: (call.tokens.largest, call.tokens.largest_at),
        reducer=Largest("dimension"),
        axes="LT",
        meaning="Largest |h| of any sequence",
    ),
    Observable(
        name="largest_write",
        hook_point=HookPoint.NEURONS,
        value=lambda call: (call.writes.largest, call.writes.largest_at),
        reducer=Largest("neuron"),
        axes="LT",
        meaning="Largest |n_j| ||W_down[:, j]|| of any neuron in any sequence; null in layers without a feed-forward",
        nullable=True,
    ),
    Observable(
        name="by_distance",
        hook_point=HookPoint.ATTENTION,
        value=lambda call: call.attention.by_distance,
        reducer=Mean(),
        axes="LHR",
        meaning="Mean attention on the key that lies this far back, over at most 256 queries",
        asks="distances",
    ),
    Observable(
        name="positions_of_interest",
        hook_point=HookPoint.RESIDUAL_OUT,
        value=lambda call: call.positions_of_interest[None],
        reducer=Rows(1),
        axes="LP",
        meaning="The positions that are recorded in full",
    ),
    Observable(
        name="dimension",
        hook_point=HookPoint.RESIDUAL_OUT,
        value=lambda call: call.rows_of_interest,
        reducer=Mean(),
        axes="LPE",
        meaning="Value of each dimension at the positions of interest, mean over sequences",
    ),
    Observable(
        name="dimension_abs",
        hook_point=HookPoint.RESIDUAL_OUT,
        value=lambda call: call.rows_of_interest.abs(),
        reducer=Mean(),
        axes="LPE",
        meaning="Its magnitude, mean over sequences",
    ),
    Observable(
        name="dimension_total",
        hook_point=HookPoint.RESIDUAL_OUT,
        value=lambda call: call.tokens.channel_abs,
        reducer=Total(),
        axes="LE",
        meaning="Magnitude of each dimension, summed over tokens",
    ),
    Observable(
        name="neuron_activation",
        hook_point=HookPoint.NEURONS,
        value=lambda call: call.activations_of_interest,
        reducer=Mean(),
        axes="LPU",
        meaning="Activation of each neuron at the positions of interest, mean over sequences",
    ),
    Observable(
        name="neuron_written",
        hook_point=HookPoint.NEURONS,
        value=lambda call: call.writes_of_interest,
        reducer=Mean(),
        axes="LPU",
        meaning="What the residual stream gets of it: the same, scaled by the post-norm where there is one",
    ),
    Observable(
        name="neuron_square",
        hook_point=HookPoint.NEURONS,
        value=lambda call: call.writes_of_interest.square(),
        reducer=Mean(),
        axes="LPU",
        meaning="The square of what is written, mean over sequences",
    ),
    Observable(
        name="neuron_energy",
        hook_point=HookPoint.NEURONS,
        value=lambda call: call.writes.energy,
        reducer=Total(),
        axes="LU",
        meaning="The square of what is written, summed over tokens",
    ),
    LOCK,
    EFFECTIVE_RANK,
)


def resolved(observables: Iterable[Observable | str] | None) -> tuple[Observable, ...]:
    """The observables that a user names or gives as records; all of the chain for None."""
    if observables is None:
        return CHAIN
    by_name = {observable.name: observable for observable in CHAIN}
    selected: dict[str, Observable] = {}
    for observable in observables:
        if isinstance(observable, str) and observable not in by_name:
            raise InputError(
                f"There is no observable called {observable}. Choose `observables` among {', '.join(by_name)}, or "
                "write an Observable of your own."
            )
        record = by_name[observable] if isinstance(observable, str) else observable
        if selected.setdefault(record.name, record) != record:
            raise InputError(f"There are two observables named {record.name}. Give yours another name.")
        if record.axes in TABLE_OF_AXES and not record.meaning:
            raise InputError(
                f"{record.name} becomes a column of the table {TABLE_OF_AXES[record.axes]} but has no `meaning`. Write "
                "what it is, in a sentence."
            )
    return tuple(selected.values())
