"""What a trace shows: sinks, where disparity is born and erased, the massive dimensions, and the units that write or
erase them.

No position, layer, dimension or count is assumed; every threshold is in `sinkscope.measures` or here, with its
reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from sinkscope.capture.layer_call import rank_index
from sinkscope.capture.lock import read_lock
from sinkscope.capture.recorder import Recording
from sinkscope.measures.dimension_disparity import (
    MASSIVE_CONTRAST,
    MASSIVE_RATIO,
    effective_ranks,
    massive_dimensions,
    median_magnitude,
    num_massive_activations,
)
from sinkscope.measures.sink_score import SINK_RATE, eligible_positions
from sinkscope.measures.super_neurons import ChannelSparsity, channel_sparsity, write_share
from sinkscope.measures.value_variance import log_r_squared, variance_ratio
from sinkscope.models.anatomy import Layer
from sinkscope.statistics import bootstrap_mean_interval

NEEDED = frozenset(
    {
        *("received", "head_sink_rate", "sink_heads", "dom_ratio", "standing_out", "lock", "largest_write"),
        *("dimension", "dimension_abs", "dimension_total"),
        *("unit_activation", "unit_written", "unit_square", "unit_energy"),
    }
)
"""The observables that findings need."""
SIGNIFICANT_WRITE = 0.1
"""A layer's units are listed if together they move a dimension that is massive before or after the layer by at least
this fraction of its largest value so far. So what starts it counts, however large it grows later."""
LISTED_SHARE = 0.01
"""Units below this share of the squared write are not listed."""
UNKNOWN = -1
"""Stands for the massive dimension of a position that was not kept in full."""
HYSTERESIS = 0.5
"""Disparity counts as erased only when it falls below this fraction of the bounds for birth, so that noise at the
threshold makes no births."""


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


@dataclass(frozen=True)
class SuperNeuron:
    position: int
    layer: int
    expert: int | None
    neuron: int
    dimension: int
    activation: float
    write: float
    """Mean write into the dimension at the position."""
    write_share: float
    contrast: float
    """Root mean square write at the position over that at all others; saturates at about 1,000 sqrt(T)."""
    role: str
    stands: bool
    """Whether the dimension that its layer moves is massive before or after it."""
    sparsity: ChannelSparsity
    layer_top_share: float
    """Median over the layer's units of the energy share of the top dimension."""


@dataclass(frozen=True)
class Findings:
    """Everything found in one trace, computed when it is first asked for."""

    recording: Recording
    fallbacks: list[str] = field(default_factory=list)
    """What had to be computed in another way than usual, layer by layer."""

    @cached_property
    def sinks(self) -> list[Sink]:
        """Every sink, strongest first."""
        recording = self.recording
        rates = recording.sequence_sink_rate.double()
        eligible = eligible_positions(recording.batch.length)[recording.keys]
        found = ((rates.mean(0) >= SINK_RATE) & eligible).nonzero().flatten()
        low, high = bootstrap_mean_interval(rates[:, found].numpy()) if len(found) else ([], [])
        sinks = []
        for number, index in enumerate(found.tolist()):
            by_layer = recording["head_sink_rate"][:, :, index].mean(1)
            sinks.append(
                Sink(
                    position=int(recording.keys[index]),
                    rate=float(rates[:, index].mean()),
                    low=float(low[number]),
                    high=float(high[number]),
                    layers=(by_layer >= SINK_RATE).nonzero().flatten().tolist(),
                    mean_attention=float(recording["received"][:, :, index].mean()),
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
        """The positions that the findings on layers, dimensions and units are about, foremost first.

        The sinks, or where there are none the positions with disparity.
        """
        if self.sinks:
            return [sink.position for sink in self.sinks]
        largest: dict[int, float] = {}
        for entry in self.massive:
            largest[entry.position] = max(largest.get(entry.position, 0.0), entry.ratio)
        return sorted(largest, key=lambda position: -largest[position])

    @cached_property
    def births(self) -> dict[int, tuple[list[int], list[int]]]:
        """By focus position: layers in which disparity is born, and in which it is erased; -1 is the stream entering
        layer 0."""
        result = {}
        for position in self.focus:
            births: list[int] = []
            erasures: list[int] = []
            members: set[int] = set()
            for row in range(len(self._positions)):
                massive, still = self._disparity_at(row, position)
                # Between rows that were kept in full and rows that were not, dimensions cannot be matched.
                matched = still if UNKNOWN in members | still else members & still
                alive = massive | (matched if members else set())
                if alive and not members:
                    births.append(row - 1)
                elif members and not alive:
                    erasures.append(row - 1)
                members = alive
            result[position] = (births, erasures)
        return result

    @property
    def birth_layers(self) -> list[int]:
        """Layers in which disparity is born at the foremost position in focus."""
        return self.births[self.focus[0]][0] if self.focus else []

    @property
    def erasure_layers(self) -> list[int]:
        """Layers in which disparity is erased at the foremost position in focus."""
        return self.births[self.focus[0]][1] if self.focus else []

    @cached_property
    def massive_dimensions(self) -> list[int]:
        """Dimensions massive at the foremost position in focus in any layer, largest first."""
        peak: dict[int, float] = {}
        for entry in self.massive:
            if entry.position == self.focus[0]:
                peak[entry.dimension] = max(peak.get(entry.dimension, 0.0), entry.magnitude)
        return sorted(peak, key=lambda dimension: -peak[dimension])

    @cached_property
    def movers(self) -> list[SuperNeuron]:
        """The units that move dimensions which are massive in some layer at a focus position, strongest write first."""
        found = []
        for position in self.focus:
            dimensions = sorted({entry.dimension for entry in self.massive if entry.position == position})
            if dimensions:
                found += self._writers(position, torch.tensor(dimensions))
        return sorted(found, key=lambda unit: -abs(unit.write))

    @property
    def super_neurons(self) -> list[SuperNeuron]:
        """The movers in layers before or after which the dimension is massive."""
        return [unit for unit in self.movers if unit.stands]

    @cached_property
    def variance_ratio(self) -> Tensor | None:
        """[L] position 0 over the later half; None where position 0 has no variance across sequences to speak of."""
        if self.recording.batch.num_sequences < 2 or self.recording.batch.shared_first_token:
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
        ranks = [
            effective_ranks(
                tokens_NE,
                apart_N.to(tokens_NE.device),
                lambda note, layer=layer: self.fallbacks.append(f"layer {layer}: {note}"),
            )
            for layer, tokens_NE in sorted(self.recording.at_layers("rank_tokens").items())
            if layer >= 0
        ]
        return [whole for whole, _ in ranks], [without for _, without in ranks]

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

    def massive_activations(self, layer: int) -> tuple[float, Tensor]:
        """(median magnitude of a layer's tokens, [P] massive activations at the positions recorded in full), from mean
        magnitudes over sequences."""
        median = torch.tensor(float("nan"))
        if "rank_tokens" in self.recording:
            median = median_magnitude(self.recording.at_layers("rank_tokens")[layer]).cpu()
        return float(median), num_massive_activations(self.recording.rows("dimension_abs")[layer + 1], median)

    def slot(self, layer: int, position: int) -> int | None:
        """The index of a position among those that a layer recorded in full; None if it was not."""
        positions = self._positions[layer + 1]
        return positions.index(position) if position in positions else None

    @cached_property
    def _positions(self) -> list[list[int]]:
        """Those positions, by row of the residual stream: the first enters layer 0."""
        return self.recording.rows("standing_out")[:, 0].tolist()

    @cached_property
    def _disparity(self) -> tuple[Tensor, Tensor, Tensor]:
        """(massive or not, ratio, contrast) of every row, position and dimension recorded in full."""
        batch = self.recording.batch
        here = self.recording.rows("dimension_abs")
        total = self.recording.rows("dimension_total")[:, None] / batch.num_sequences
        return massive_dimensions(here, _rest(total, here) / (batch.length - 1))

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

    def _writers(self, position: int, dimensions_M: Tensor) -> list[SuperNeuron]:
        recording = self.recording
        slots = [self.slot(row - 1, position) for row in range(len(self._positions))]
        nothing = torch.zeros(recording.anatomy.width)
        rows = recording.rows("dimension")
        values = [nothing if slot is None else rows[row, slot] for row, slot in enumerate(slots)]
        peak_LM = torch.stack([value_E[dimensions_M].abs() for value_E in values]).cummax(0).values
        massive = {(entry.layer, entry.dimension) for entry in self.massive if entry.position == position}
        massive_LM = torch.tensor(
            [[(row - 1, dimension) in massive for dimension in dimensions_M.tolist()] for row in range(len(values))]
        )
        found = []
        for layer in recording.anatomy.layers:
            if (slot := slots[layer.index + 1]) is None:
                continue
            activation_U, written_U, square_U = (
                recording.at_layers(name)[layer.index][slot].cpu()
                for name in ("unit_activation", "unit_written", "unit_square")
            )
            output_MU = layer.written_rows(dimensions_M).cpu()
            write_MU = output_MU * written_U
            moved_M = write_MU.sum(1).abs() >= SIGNIFICANT_WRITE * peak_LM[layer.index + 1]
            stands_M = massive_LM[layer.index] | massive_LM[layer.index + 1]
            if not bool(moved_M.any()):
                continue
            share_U = write_share(square_U, output_MU)
            listed = share_U.argsort(descending=True)
            listed = listed[share_U[listed] >= LISTED_SHARE]
            if not len(listed):
                continue
            sparsity = channel_sparsity(layer.output_vectors(listed).cpu())
            before, after = values[layer.index], values[layer.index + 1]
            energy_U = recording.at_layers("unit_energy")[layer.index].cpu() / recording.batch.num_sequences
            elsewhere_U = _rest(energy_U, square_U) / (recording.batch.length - 1)
            contrast_U = (square_U / elsewhere_U.clamp(min=torch.finfo(torch.float32).tiny)).sqrt()
            for number, unit in enumerate(listed.tolist()):
                strongest = int(write_MU[:, unit].abs().argmax())
                dimension, write = int(dimensions_M[strongest]), float(write_MU[strongest, unit])
                sides = [float(v[dimension]) for v in (before, after) if v is not None]
                # A unit writes if it pushes the way the larger of the values before and after the layer points, else
                # it erases.
                writes = write * max(sides, key=abs) > 0
                expert, neuron = layer.locate_unit(unit)
                found.append(
                    SuperNeuron(
                        position=position,
                        layer=layer.index,
                        expert=expert,
                        neuron=neuron,
                        dimension=dimension,
                        activation=float(activation_U[unit]),
                        write=write,
                        write_share=float(share_U[unit]),
                        contrast=float(contrast_U[unit]),
                        role="writes" if writes else "erases",
                        stands=bool((moved_M & stands_M).any()),
                        sparsity=ChannelSparsity(*(value[number] for value in sparsity)),
                        layer_top_share=self._layer_top_share(layer),
                    )
                )
        return found

    def _layer_top_share(self, layer: Layer) -> float:
        """The median over a layer's units of the top dimension's share; units that write nothing have none."""
        if layer.index not in self._layer_top_shares:
            gain_E = layer.write_gain()[:, None]
            shares = [_top_shares(weight_EF * gain_E.to(weight_EF)) for _, weight_EF in layer.down_weights()]
            self._layer_top_shares[layer.index] = float(torch.cat(shares).nanmedian())
        return self._layer_top_shares[layer.index]

    @cached_property
    def _layer_top_shares(self) -> dict[int, float]:
        return {}


def _rest(total: Tensor, here: Tensor) -> Tensor:
    """total - here, but at least what float32 can resolve, so that a ratio to it saturates and never jumps."""
    return torch.maximum(total - here, 2.0**-20 * total)


def _top_shares(output_EF: Tensor) -> Tensor:
    energy = output_EF.float().square()
    return (energy.amax(0) / energy.sum(0)).cpu()
