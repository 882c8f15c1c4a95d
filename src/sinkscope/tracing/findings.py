"""What a trace shows: sinks, the layers where disparity appears and disappears, the massive dimensions, and the neurons
that write or erase them.

No position, layer, dimension or count is assumed. Every threshold is in `sinkscope.measures` or here, with its reason.
Axes: L layers, T positions, S recorded keys, H heads, P positions of interest, E width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from sinkscope.measures.dimension_disparity import (
    effective_ranks,
    massive_dimensions,
    median_magnitude,
    num_massive_activations,
)
from sinkscope.measures.sink_score import MIN_SINK_RATE, are_sinks, eligible_positions
from sinkscope.measures.value_variance import log_r_squared, variance_ratio
from sinkscope.models.anatomy import Neuron
from sinkscope.statistics import bootstrap_mean_interval
from sinkscope.tracing.disparity import UNKNOWN, Change, Row, carrying, changes_of, layers_before, layers_of, row_of
from sinkscope.tracing.layer_call import rank_index
from sinkscope.tracing.lock import read_lock
from sinkscope.tracing.recorder import Recording
from sinkscope.tracing.removal import NamedNeuron, named_neurons
from sinkscope.tracing.super_neurons import MassiveAtPosition, SuperNeuron, neurons_that_move, rest_of

NEEDED = frozenset(
    {
        *("received", "head_sink_rate", "sink_heads", "dom_ratio", "positions_of_interest", "lock", "largest_write"),
        *("dimension", "dimension_abs", "dimension_total"),
        *("neuron_activation", "neuron_written", "neuron_square", "neuron_energy"),
    }
)
"""The observables that findings need."""


@dataclass(frozen=True)
class Sink:
    """A position that is a sink, on average over sequences."""

    position: int
    rate: float
    """Sink rate: share of sequences, layers and heads that count the position as a sink."""
    low: float
    high: float
    """Ends of the rate's 95 % bootstrap interval over sequences."""
    layers: list[int]
    """Layers in which at least 5 % of heads and sequences count the position as a sink."""
    mean_attention: float
    """Attention received, mean over sequences, layers and heads."""
    sequences: tuple[int, ...]
    """The sequences in which the position is a sink, by the same rule."""
    rate_there: float
    """Sink rate in those alone."""

    def certainty(self, num_sequences: int) -> str:
        """`sink`; `in some` where it is one in fewer than half of the sequences, so that the mean describes neither
        these nor the others; `maybe` where the rate's interval holds what a sink needs."""
        if 2 * len(self.sequences) < num_sequences:
            return "in some"
        return "maybe" if self.low < MIN_SINK_RATE else "sink"


@dataclass(frozen=True)
class MassiveDimension:
    """A dimension that is massive at one position of the residual stream after one layer."""

    layer: int
    """-1 is the residual stream that enters layer 0."""
    position: int
    dimension: int
    value: float
    """Mean over sequences."""
    magnitude: float
    """Mean of the absolute value over sequences."""
    ratio: float
    """Magnitude over the mean magnitude of all dimensions at the position."""
    contrast: float
    """Magnitude over that of the same dimension at the other positions."""


@dataclass(frozen=True, repr=False)
class Findings:
    """Everything that one trace shows. Each finding is computed when it is first asked for."""

    recording: Recording
    fallbacks: dict[int, str] = field(default_factory=dict)
    """By layer, which computation fell back on a slower way, and why."""

    def __repr__(self) -> str:
        name = self.recording.model_name
        if lacking := sorted(NEEDED - self.recording.by_layer.keys()):
            return f"Findings on {name}: none, without {', '.join(lacking)}"
        sinks = ", ".join(f"position {sink.position} ({sink.rate:.1%} of heads)" for sink in self.sinks[:3])
        more = f" and {len(self.sinks) - 3} more" if len(self.sinks) > 3 else ""
        dimensions = ", ".join(map(str, self.massive_dimensions[:4])) or "none"
        return (
            f"Findings on {name}: sinks: {sinks or 'none'}{more}; massive dimensions: {dimensions}; "
            f"disparity appears in layers {', '.join(map(str, self.appears_in)) or 'none'}"
        )

    @cached_property
    def sinks(self) -> list[Sink]:
        """Every sink, strongest first."""
        recording = self.recording
        rates_BS = recording.sequence_sink_rate.double()
        # [N] where in the recorded keys the sinks are.
        sinks_N = are_sinks(rates_BS.mean(0), recording.batch.length, recording.keys).nonzero().flatten()
        low, high = bootstrap_mean_interval(rates_BS[:, sinks_N].numpy()) if len(sinks_N) else ([], [])
        rate_LN = recording.reduced("head_sink_rate", lambda rate_HS: rate_HS[:, sinks_N].mean(0))
        received_LN = recording.reduced("received", lambda received_HS: received_HS[:, sinks_N].mean(0))
        received_AN = received_LN[recording.attention_layers]
        sinks = []
        for number, index in enumerate(sinks_N.tolist()):
            in_sequences = rates_BS[:, index] >= MIN_SINK_RATE
            sinks.append(
                Sink(
                    position=int(recording.keys[index]),
                    rate=float(rates_BS[:, index].mean()),
                    sequences=tuple(in_sequences.nonzero().flatten().tolist()),
                    rate_there=float(rates_BS[in_sequences, index].mean()),
                    low=float(low[number]),
                    high=float(high[number]),
                    layers=(rate_LN[:, number] >= MIN_SINK_RATE).nonzero().flatten().tolist(),
                    mean_attention=float(received_AN[:, number].mean()),
                )
            )
        return sorted(sinks, key=lambda sink: -sink.rate)

    @cached_property
    def strongest(self) -> tuple[int, float]:
        """(position, sink rate) of the key with the largest sink rate, sink or not, among those with enough later
        queries; the rate is NaN if no key has enough."""
        return self._foremost(self.recording.sink_rate)

    @cached_property
    def most_attended(self) -> tuple[int, float]:
        """(position, sink rate) of the key among them that receives the most attention over all layers and heads."""
        return self._foremost(self.recording.of_attention("received").mean((0, 1)))

    def _foremost(self, weight_S: Tensor) -> tuple[int, float]:
        eligible_S = eligible_positions(self.recording.batch.length)[self.recording.keys]
        if not bool(eligible_S.any()):
            return int(self.recording.keys[0]), float("nan")
        key = int(torch.where(eligible_S, weight_S, -1.0).argmax())
        return int(self.recording.keys[key]), float(self.recording.sink_rate[key])

    @cached_property
    def massive(self) -> list[MassiveDimension]:
        """Every massive dimension at every position that was recorded in full, layer by layer."""
        massive, ratio, contrast = self._disparity
        value, magnitude = self.recording.rows("dimension"), self.recording.rows("dimension_abs")
        dimensions = []
        for row, slot, dimension in massive.nonzero().tolist():
            positions = self._positions[row]
            if positions.index(positions[slot]) < slot:  # a position may be of interest twice: listed already
                continue
            at = row, slot, dimension
            dimensions.append(
                MassiveDimension(
                    layer=row - 1,
                    position=positions[slot],
                    dimension=dimension,
                    value=float(value[at]),
                    magnitude=float(magnitude[at]),
                    ratio=float(ratio[at]),
                    contrast=float(contrast[at]),
                )
            )
        return dimensions

    @cached_property
    def focus(self) -> list[int]:
        """The positions that the findings on layers, dimensions and neurons are about, foremost first: the sinks or, if
        there is none, the positions with massive dimensions."""
        if self.sinks:
            return [sink.position for sink in self.sinks]
        largest_ratio: dict[int, float] = {}
        for entry in self.massive:
            largest_ratio[entry.position] = max(largest_ratio.get(entry.position, 0.0), entry.ratio)
        return sorted(largest_ratio, key=lambda position: -largest_ratio[position])

    @cached_property
    def changes(self) -> dict[int, list[Change]]:
        """By focus position: every massive dimension that appears or disappears there, layer by layer."""
        num_rows = len(self._positions)
        return {position: changes_of(self._row_at(row, position) for row in range(num_rows)) for position in self.focus}

    @cached_property
    def carried_by(self) -> dict[int, list[Change]]:
        """By focus position: the appearances that carry its sink."""
        return {position: carrying(changes, self.head_rate(position)) for position, changes in self.changes.items()}

    @cached_property
    def disparity_layers(self) -> dict[int, tuple[list[int], list[int]]]:
        """By focus position: the layers in which disparity that carries its sink appears, and those in which it
        disappears; -1 stands for the stream that enters layer 0."""
        return {position: layers_of(changes, self.carried_by[position]) for position, changes in self.changes.items()}

    def layers_before(self, position: int) -> range:
        """The layers in which interventions act unless others are chosen; see `disparity.layers_before`."""
        appears_in, _ = self.disparity_layers.get(position, ([], []))
        return layers_before(appears_in, self.head_rate(position), parallel=self.recording.anatomy.parallel)

    def head_rate(self, position: int) -> Tensor:
        """[L] share of each layer's heads and sequences that count a key as a sink; NaN in layers without attention,
        and where the key was not recorded."""
        recording = self.recording
        if position not in recording.keys.tolist():
            return torch.full((recording.num_layers,), float("nan"))
        key = int((recording.keys == position).nonzero()[0])
        return recording.reduced("head_sink_rate", lambda rate_HS: rate_HS[:, key].mean()).float()

    @property
    def appears_in(self) -> list[int]:
        """Layers in which disparity that carries the sink appears, at the foremost position in focus."""
        return self.disparity_layers[self.focus[0]][0] if self.focus else []

    @property
    def disappears_in(self) -> list[int]:
        """Layers in which it disappears there."""
        return self.disparity_layers[self.focus[0]][1] if self.focus else []

    @property
    def massive_dimensions(self) -> list[int]:
        """Dimensions that are massive in any layer at the foremost position in focus, largest first."""
        return self.massive_dimensions_at(self.focus[0]) if self.focus else []

    def massive_dimensions_at(self, position: int) -> list[int]:
        """The same of any position."""
        peak: dict[int, float] = {}
        for entry in self.massive:
            if entry.position == position:
                peak[entry.dimension] = max(peak.get(entry.dimension, 0.0), entry.magnitude)
        return sorted(peak, key=lambda dimension: -peak[dimension])

    @cached_property
    def moving_neurons(self) -> list[SuperNeuron]:
        """The neurons that write or erase dimensions which are massive in some layer at a focus position, strongest
        first."""
        at_positions: dict[int, MassiveAtPosition] = {}
        for position in self.focus:
            slots = [self.slot(row - 1, position) for row in range(len(self._positions))]
            massive = {(entry.layer, entry.dimension) for entry in self.massive if entry.position == position}
            at_positions[position] = slots, massive
        return neurons_that_move(self.recording, at_positions)

    @cached_property
    def named_neurons(self) -> dict[int, tuple[list[NamedNeuron], list[NamedNeuron]]]:
        """By the position of each sink: the neurons that write what carries it, and those that take it away; see
        `sinkscope.tracing.removal`."""
        return {sink.position: self._named_at(sink.position) for sink in self.sinks}

    def _named_at(self, position: int) -> tuple[list[NamedNeuron], list[NamedNeuron]]:
        recording = self.recording
        slots = [self.slot(row - 1, position) for row in range(len(self._positions))]
        values = recording.rows("dimension")

        def value_of(dimension: int) -> Tensor:
            known = [float("nan") if slot is None else values[row, slot, dimension] for row, slot in enumerate(slots)]
            return torch.tensor(known)

        def writes(number: int, dimension: int, least: float) -> list[tuple[int | None, int, float]]:
            layer, slot = recording.anatomy.layers[number], slots[number + 1]
            if slot is None or number not in recording.at_layers("neuron_written"):
                return []
            written_U = recording.at_layers("neuron_written")[number][slot].cpu()
            write_U = layer.written_rows(torch.tensor([dimension])).cpu()[0] * written_U
            large = (write_U.abs() >= least).nonzero().flatten()
            places = layer.locate_neurons(large)
            return [(*place, write) for place, write in zip(places, write_U[large].tolist(), strict=True)]

        carry = [change for change in self.carried_by[position] if change.dimension != UNKNOWN]
        return named_neurons(self.changes[position], carry, value_of, writes)

    @property
    def super_neurons(self) -> list[SuperNeuron]:
        """Those of them in whose layer the dimension is massive, before or after."""
        return [neuron for neuron in self.moving_neurons if neuron.stands]

    @cached_property
    def variance_ratio(self) -> Tensor | None:
        """[L] value variance at position 0 over that at the later half of the positions. None if position 0 has none,
        because all sequences begin with the same token, or if it was not recorded."""
        batch = self.recording.batch
        if batch.num_sequences < 2 or batch.shared_first_token or "value_variance" not in self.recording:
            return None
        return variance_ratio(self.recording["value_variance"])

    @cached_property
    def before_norm(self) -> tuple[Tensor | None, Tensor | None]:
        """`variance_ratio` and `averaging_law_r_squared` before the norm on the aggregation; None without it."""
        if self.variance_ratio is None or "value_variance_before_norm" not in self.recording:
            return None, None
        variance_LT = self.recording["value_variance_before_norm"]
        has_law = "averaging_law" in self.recording
        return (
            variance_ratio(variance_LT),
            log_r_squared(variance_LT, self.recording["averaging_law"]) if has_law else None,
        )

    @cached_property
    def averaging_law_r_squared(self) -> Tensor | None:
        """[L] R^2 of the averaging law: its share of the log variance over positions; None as for `variance_ratio`."""
        if self.variance_ratio is None or "averaging_law" not in self.recording:
            return None
        return log_r_squared(self.recording["value_variance"], self.recording["averaging_law"])

    @cached_property
    def effective_ranks(self) -> tuple[list[float] | None, list[float] | None]:
        """([L] effective rank, [L] the same without the tokens at sinks). None if it was not recorded; the second also
        without a sink."""
        if "rank_tokens" not in self.recording:
            return None, None
        sinks = [sink.position for sink in self.sinks]
        ranks, without = self.effective_ranks_apart_from(sinks)
        return ranks, without if sinks else None

    def effective_ranks_apart_from(self, positions: Sequence[int]) -> tuple[list[float], list[float]]:
        """([L] effective rank of each layer's tokens, [L] the same without the tokens at some positions)."""
        batch = self.recording.batch
        positions_N = rank_index(batch.num_sequences, batch.length, torch.device("cpu")) % batch.length
        apart_N = torch.isin(positions_N, torch.tensor(list(positions)))

        def of_layer(layer: int, tokens_NE: Tensor) -> tuple[float, float]:
            return effective_ranks(
                tokens_NE,
                apart_N.to(tokens_NE.device),
                lambda note: self.fallbacks.update({layer: note}),
            )

        by_layer = sorted(self.recording.at_layers("rank_tokens").items())
        ranks = _side_by_side(of_layer, [(layer, tokens_NE) for layer, tokens_NE in by_layer if layer >= 0])
        return [whole for whole, _ in ranks], [without for _, without in ranks]

    @cached_property
    def output_channel_norms(self) -> Tensor:
        """[A, C] norms of the columns of the output projection, one for each channel of the aggregation, of the layers
        with attention."""
        layers = self.recording.anatomy.attention_layers
        return torch.stack([layer.aggregation_channel_norms().cpu() for layer in layers])

    @cached_property
    def lock(self) -> tuple[Tensor, Tensor]:
        """([A, H, Q] positive queries, [A, H, Q] lock share) at `lock_positions`, of the layers with attention; see
        `read_lock`."""
        return read_lock(self.recording.anatomy, list(self.recording.at_layers("lock").values()))

    @cached_property
    def lock_positions(self) -> Tensor:
        """[A, Q] the positions at which the lock was measured."""
        return torch.stack([rows.positions_Q.cpu() for rows in self.recording.at_layers("lock").values()])

    def dom_ratio_at(self, position: int) -> tuple[Tensor, Tensor]:
        """([L] DomRatio at a position, [L] its mean over positions that are no sink)."""
        ratio_LT = self.recording["dom_ratio"]
        elsewhere = torch.ones(ratio_LT.shape[1], dtype=torch.bool)
        elsewhere[[position, *(sink.position for sink in self.sinks)]] = False
        return ratio_LT[:, position], ratio_LT[:, elsewhere].nanmean(1)

    @cached_property
    def median_magnitudes(self) -> Tensor:
        """[L] median |h| over each layer's tokens; NaN if they were not recorded."""
        if "rank_tokens" not in self.recording:
            return torch.full((self.recording.num_layers,), float("nan"))
        by_layer = self.recording.at_layers("rank_tokens")
        medians = [median_magnitude(by_layer[layer]) for layer in range(self.recording.num_layers)]
        return torch.stack([median.cpu() for median in medians])

    @cached_property
    def massive_activations(self) -> Tensor:
        """[L, P] number of massive activations at the positions of interest, by mean magnitudes over sequences."""
        return num_massive_activations(self.recording["dimension_abs"], self.median_magnitudes[:, None, None])

    def activation(self, position: int, neuron: Neuron) -> float | None:
        """Activation of any neuron, mean over sequences; None if the position was not recorded in full."""
        if (slot := self.slot(neuron.layer, position)) is None:
            return None
        index = self.recording.anatomy.layers[neuron.layer].neuron_index(neuron.expert, neuron.neuron)
        return float(self.recording.at_layers("neuron_activation")[neuron.layer][slot, index])

    def dimension(self, position: int, layer: int, dimension: int) -> tuple[float, float] | None:
        """(value, ratio to the mean) of any dimension after a layer; None if the position was not recorded in full."""
        if (slot := self.slot(layer, position)) is None:
            return None
        at = layer + 1, slot, dimension
        return float(self.recording.rows("dimension")[at]), float(self._disparity[1][at])

    def slot(self, layer: int, position: int) -> int | None:
        """The index of a position among a layer's positions of interest; None if it is not among them."""
        positions = self._positions[layer + 1]
        return positions.index(position) if position in positions else None

    @cached_property
    def _positions(self) -> list[list[int]]:
        """The positions of interest by row of the residual stream, whose first row enters layer 0."""
        return self.recording.rows("positions_of_interest")[:, 0].tolist()

    @cached_property
    def _disparity(self) -> tuple[Tensor, Tensor, Tensor]:
        """(massive or not, ratio, contrast), each [L + 1, P, E], at the positions of interest."""
        batch = self.recording.batch
        here = self.recording.rows("dimension_abs")
        total = self.recording.rows("dimension_total")[:, None] / batch.num_sequences
        return massive_dimensions(here, rest_of(total, here) / (batch.length - 1))

    def _row_at(self, row: int, position: int) -> Row:
        """What stands at a position in a row of the residual stream.

        If the position was not recorded in full there, its DomRatio is judged by the same thresholds, as that of one
        unknown dimension.
        """
        slot = self.slot(row - 1, position)
        if slot is not None:
            _, ratio, contrast = self._disparity
            return row_of(ratio[row, slot], contrast[row, slot], range(ratio.shape[-1]))
        ratio_T = self.recording["dom_ratio"][row - 1] if row else torch.ones(position + 1)
        ratio = ratio_T[position]
        return row_of(ratio[None], (ratio / ratio_T.nanmedian())[None], [UNKNOWN])


def _side_by_side(
    of_layer: Callable[[int, Tensor], tuple[float, float]], by_layer: Sequence[tuple[int, Tensor]]
) -> list[tuple[float, float]]:
    """The result of every layer, in order.

    An eigenvalue problem makes poor use of several threads, so on a CPU each of torch's threads takes a layer. On a GPU
    nothing is gained.
    """
    num_threads = torch.get_num_threads()
    if num_threads == 1 or any(tokens_NE.is_cuda for _, tokens_NE in by_layer):
        return [of_layer(*layer) for layer in by_layer]
    try:
        with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(lambda layer: of_layer(*layer), by_layer))
    finally:
        torch.set_num_threads(num_threads)  # what a worker sets is also the default of threads to come
