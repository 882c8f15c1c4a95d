"""What a trace shows: sinks, where disparity appears and disappears, the massive dimensions, and the neurons that write
or erase them.

No position, layer, dimension or count is assumed; every threshold is in `sinkscope.measures` or here, with its
reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from sinkscope.measures.dimension_disparity import (
    MASSIVE_CONTRAST,
    MASSIVE_RATIO,
    effective_ranks,
    massive_dimensions,
    median_magnitude,
    num_massive_activations,
)
from sinkscope.measures.sink_score import MIN_SINK_RATE, are_sinks, eligible_positions
from sinkscope.measures.value_variance import log_r_squared, variance_ratio
from sinkscope.models.anatomy import Neuron
from sinkscope.statistics import bootstrap_mean_interval
from sinkscope.tracing.layer_call import rank_index
from sinkscope.tracing.lock import read_lock
from sinkscope.tracing.recorder import Recording
from sinkscope.tracing.super_neurons import SuperNeuron, neurons_that_move, rest_of

NEEDED = frozenset(
    {
        *("received", "head_sink_rate", "sink_heads", "dom_ratio", "positions_of_interest", "lock", "largest_write"),
        *("dimension", "dimension_abs", "dimension_total"),
        *("neuron_activation", "neuron_written", "neuron_square", "neuron_energy"),
    }
)
"""The observables that findings need."""
UNKNOWN = -1
"""Stands for the massive dimension of a position that was not kept in full."""
HYSTERESIS = 0.5
"""Disparity has disappeared only when it falls below this fraction of the bounds at which it appears, so that noise at
the threshold does not make it appear twice."""


@dataclass(frozen=True)
class Sink:
    position: int
    rate: float
    low: float
    high: float
    """Bootstrap interval of the rate over sequences, at 95 %."""
    layers: list[int]
    """Layers in which at least 5 % of heads and sequences count the position."""
    mean_attention: float


@dataclass(frozen=True)
class MassiveDimension:
    layer: int
    """-1 is the residual stream that enters layer 0."""
    position: int
    dimension: int
    value: float
    magnitude: float
    ratio: float
    contrast: float


@dataclass(frozen=True, repr=False)
class Findings:
    """Everything found in one trace, computed when it is first asked for."""

    recording: Recording
    fallbacks: dict[int, str] = field(default_factory=dict)
    """What had to be computed in another way than usual, by layer."""

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
        rates = recording.sequence_sink_rate.double()
        found = are_sinks(rates.mean(0), recording.batch.length, recording.keys).nonzero().flatten()
        low, high = bootstrap_mean_interval(rates[:, found].numpy()) if len(found) else ([], [])
        rate_LN = recording.reduced("head_sink_rate", lambda rate_HS: rate_HS[:, found].mean(0))
        received_LN = recording.reduced("received", lambda received_HS: received_HS[:, found].mean(0))
        sinks = []
        for number, index in enumerate(found.tolist()):
            sinks.append(
                Sink(
                    position=int(recording.keys[index]),
                    rate=float(rates[:, index].mean()),
                    low=float(low[number]),
                    high=float(high[number]),
                    layers=(rate_LN[:, number] >= MIN_SINK_RATE).nonzero().flatten().tolist(),
                    mean_attention=float(received_LN[:, number].mean()),
                )
            )
        return sorted(sinks, key=lambda sink: -sink.rate)

    @cached_property
    def strongest(self) -> tuple[int, float]:
        """(position, sink rate) of the key with the largest rate among those with enough later queries, sink or not."""
        return self._foremost(self.recording.sink_rate)

    @cached_property
    def most_attended(self) -> tuple[int, float]:
        """(position, sink rate) of the key among them that receives most attention, over all layers and heads."""
        return self._foremost(self.recording["received"].mean((0, 1)))

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
        found = []
        for row, slot, dimension in massive.nonzero().tolist():
            positions = self._positions[row]
            if positions.index(positions[slot]) < slot:  # several signals may have pointed at one position
                continue
            at = row, slot, dimension
            found.append(
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
        return found

    @cached_property
    def focus(self) -> list[int]:
        """The positions that the findings on layers, dimensions and neurons are about, foremost first.

        The sinks, or where there are none the positions with disparity.
        """
        if self.sinks:
            return [sink.position for sink in self.sinks]
        largest: dict[int, float] = {}
        for entry in self.massive:
            largest[entry.position] = max(largest.get(entry.position, 0.0), entry.ratio)
        return sorted(largest, key=lambda position: -largest[position])

    @cached_property
    def disparity_layers(self) -> dict[int, tuple[list[int], list[int]]]:
        """By focus position: layers in which disparity appears, and in which it disappears; -1 is the stream entering
        layer 0."""
        result = {}
        for position in self.focus:
            appears_in: list[int] = []
            disappears_in: list[int] = []
            members: set[int] = set()
            for row in range(len(self._positions)):
                massive, still = self._disparity_at(row, position)
                # Between rows that were kept in full and rows that were not, dimensions cannot be matched.
                matched = still if UNKNOWN in members | still else members & still
                alive = massive | (matched if members else set())
                if alive and not members:
                    appears_in.append(row - 1)
                elif members and not alive:
                    disappears_in.append(row - 1)
                members = alive
            result[position] = (appears_in, disappears_in)
        return result

    @property
    def appears_in(self) -> list[int]:
        """Layers in which disparity appears at the foremost position in focus."""
        return self.disparity_layers[self.focus[0]][0] if self.focus else []

    @property
    def disappears_in(self) -> list[int]:
        """Layers in which disparity disappears at the foremost position in focus."""
        return self.disparity_layers[self.focus[0]][1] if self.focus else []

    @property
    def massive_dimensions(self) -> list[int]:
        """Dimensions massive at the foremost position in focus in any layer, largest first."""
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
        """The neurons that move dimensions which are massive in some layer at a focus position, strongest first."""
        return neurons_that_move(
            self.recording,
            {
                position: (
                    [self.slot(row - 1, position) for row in range(len(self._positions))],
                    {(entry.layer, entry.dimension) for entry in self.massive if entry.position == position},
                )
                for position in self.focus
            },
        )

    @property
    def super_neurons(self) -> list[SuperNeuron]:
        """Those in layers before or after which the dimension is massive."""
        return [neuron for neuron in self.moving_neurons if neuron.stands]

    @cached_property
    def variance_ratio(self) -> Tensor | None:
        """[L] position 0 over the later half; None where position 0 has no variance across sequences to speak of, or
        none was recorded."""
        batch = self.recording.batch
        if batch.num_sequences < 2 or batch.shared_first_token or "value_variance" not in self.recording:
            return None
        return variance_ratio(self.recording["value_variance"])

    @cached_property
    def before_norm(self) -> tuple[Tensor | None, Tensor | None]:
        """`variance_ratio` and `averaging_law_r_squared` before the norm on the aggregation; None also without one."""
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
        """[L] how much of log variance by position the averaging law explains; None as for `variance_ratio`."""
        if self.variance_ratio is None or "averaging_law" not in self.recording:
            return None
        return log_r_squared(self.recording["value_variance"], self.recording["averaging_law"])

    @cached_property
    def effective_ranks(self) -> tuple[list[float] | None, list[float] | None]:
        """([L] effective rank, [L] without the tokens at sinks); None where it was not asked for, or there is no
        sink."""
        if "rank_tokens" not in self.recording:
            return None, None
        sinks = [sink.position for sink in self.sinks]
        ranks, without = self.effective_ranks_apart_from(sinks)
        return ranks, without if sinks else None

    def effective_ranks_apart_from(self, positions: Sequence[int]) -> tuple[list[float], list[float]]:
        """([L] effective rank of each layer's tokens, [L] without those at some positions)."""
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
        """[L, C] norm of the vector that each channel of the aggregation is projected on."""
        return torch.stack([layer.aggregation_channel_norms().cpu() for layer in self.recording.anatomy.layers])

    @cached_property
    def lock(self) -> tuple[Tensor, Tensor]:
        """([L, H, Q] positive queries, [L, H, Q] lock share) at `lock_positions`; see `read_lock`."""
        return read_lock(self.recording.anatomy, list(self.recording.at_layers("lock").values()))

    @cached_property
    def lock_positions(self) -> Tensor:
        """[L, Q] positions that the lock was measured at."""
        return torch.stack([rows.positions_Q.cpu() for rows in self.recording.at_layers("lock").values()])

    def dom_ratio_at(self, position: int) -> tuple[Tensor, Tensor]:
        """([L] DomRatio at a position, [L] its mean over positions that are no sink)."""
        ratio_LT = self.recording["dom_ratio"]
        elsewhere = torch.ones(ratio_LT.shape[1], dtype=torch.bool)
        elsewhere[[position, *(sink.position for sink in self.sinks)]] = False
        return ratio_LT[:, position], ratio_LT[:, elsewhere].nanmean(1)

    @cached_property
    def median_magnitudes(self) -> Tensor:
        """[L] median magnitude of each layer's tokens; NaN where they were not recorded."""
        if "rank_tokens" not in self.recording:
            return torch.full((self.recording.num_layers,), float("nan"))
        by_layer = self.recording.at_layers("rank_tokens")
        medians = [median_magnitude(by_layer[layer]) for layer in range(self.recording.num_layers)]
        return torch.stack([median.cpu() for median in medians])

    @cached_property
    def massive_activations(self) -> Tensor:
        """[L, P] massive activations at the positions recorded in full, from mean magnitudes over sequences."""
        return num_massive_activations(self.recording["dimension_abs"], self.median_magnitudes[:, None, None])

    def activation(self, position: int, neuron: Neuron) -> float | None:
        """Of any neuron, mean over sequences; None where the position was not recorded in full."""
        if (slot := self.slot(neuron.layer, position)) is None:
            return None
        index = self.recording.anatomy.layers[neuron.layer].neuron_index(neuron.expert, neuron.neuron)
        return float(self.recording.at_layers("neuron_activation")[neuron.layer][slot, index])

    def dimension(self, position: int, layer: int, dimension: int) -> tuple[float, float] | None:
        """(value, ratio to the mean) of any dimension after a layer; None where the position was not recorded in
        full."""
        if (slot := self.slot(layer, position)) is None:
            return None
        at = layer + 1, slot, dimension
        return float(self.recording.rows("dimension")[at]), float(self._disparity[1][at])

    def slot(self, layer: int, position: int) -> int | None:
        """The index of a position among those that a layer recorded in full; None if it was not."""
        positions = self._positions[layer + 1]
        return positions.index(position) if position in positions else None

    @cached_property
    def _positions(self) -> list[list[int]]:
        """Those positions, by row of the residual stream: the first enters layer 0."""
        return self.recording.rows("positions_of_interest")[:, 0].tolist()

    @cached_property
    def _disparity(self) -> tuple[Tensor, Tensor, Tensor]:
        """(massive or not, ratio, contrast) of every row, position and dimension recorded in full."""
        batch = self.recording.batch
        here = self.recording.rows("dimension_abs")
        total = self.recording.rows("dimension_total")[:, None] / batch.num_sequences
        return massive_dimensions(here, rest_of(total, here) / (batch.length - 1))

    def _disparity_at(self, row: int, position: int) -> tuple[set[int], set[int]]:
        """(massive dimensions, dimensions large enough to count as still there) of a position after a layer.

        Where the position was not kept in full, its DomRatio stands for an unknown dimension, by the same bounds.
        """
        slot = self.slot(row - 1, position)
        if slot is not None:
            massive, ratio, contrast = (values[row, slot] for values in self._disparity)
        else:
            ratio_T = self.recording["dom_ratio"][row - 1] if row else torch.ones(position + 1)
            ratio, contrast = ratio_T[position][None], (ratio_T[position] / ratio_T.nanmedian())[None]
            massive = (ratio >= MASSIVE_RATIO) & (contrast >= MASSIVE_CONTRAST)
        still = (ratio >= HYSTERESIS * MASSIVE_RATIO) & (contrast >= HYSTERESIS * MASSIVE_CONTRAST)
        found = (set(mask.nonzero().flatten().tolist()) for mask in (massive, still))
        return tuple(found) if slot is not None else tuple({UNKNOWN} if dimensions else set() for dimensions in found)  # type: ignore[return-value]


def _side_by_side(
    of_layer: Callable[[int, Tensor], tuple[float, float]], by_layer: Sequence[tuple[int, Tensor]]
) -> list[tuple[float, float]]:
    """What each layer gives, in order. An eigenvalue problem shares its work badly, so on a CPU each of torch's threads
    takes a layer; a GPU has nothing to gain."""
    num_threads = torch.get_num_threads()
    if num_threads == 1 or any(tokens_NE.is_cuda for _, tokens_NE in by_layer):
        return [of_layer(*layer) for layer in by_layer]
    try:
        with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(lambda layer: of_layer(*layer), by_layer))
    finally:
        torch.set_num_threads(num_threads)  # what a worker sets is also the default of threads to come
