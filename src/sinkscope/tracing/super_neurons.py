"""The neurons that write or erase the massive dimensions of a position, and how sparse their output vectors are.

Axes: L layers, M massive dimensions, U neurons of a layer, E width, F neurons of one expert.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from sinkscope.measures.super_neurons import ChannelSparsity, channel_sparsity, write_share
from sinkscope.models.anatomy import Layer
from sinkscope.tracing.recorder import Recording

SIGNIFICANT_WRITE = 0.1
"""A layer's neurons are listed if together they change a massive dimension by at least this fraction of its largest
value so far. So what starts it counts, however large it grows later."""
LISTED_SHARE = 0.01
"""Neurons with less than this share of their layer's squared write are not listed."""


@dataclass(frozen=True)
class SuperNeuron:
    """A neuron that writes or erases a massive dimension at a position."""

    position: int
    layer: int
    expert: int | None
    neuron: int
    dimension: int
    """The massive dimension that it writes into most."""
    activation: float
    """Mean over sequences at the position, times the routing weight."""
    write: float
    """Mean write into the dimension at the position."""
    write_share: float
    """Share of the layer's squared write into the massive dimensions there."""
    contrast: float
    """Root mean square write at the position over that at all others; saturates at about 1,000 sqrt(T)."""
    role: str
    """`writes` if its write has the sign of the dimension's value, else `erases`."""
    stands: bool
    """Whether a dimension that its layer changes is massive right before or after the layer."""
    sparsity: ChannelSparsity
    layer_top_share: float
    """Median over the layer's neurons of the energy share of the top dimension."""


MassiveAtPosition = tuple[Sequence[int | None], Collection[tuple[int, int]]]
"""Of one position: its slot among the positions of interest, by row of the residual stream (the first row enters layer
0; None if it is not among them), and the (layer, dimension) pairs in which it is massive."""


def neurons_that_move(recording: Recording, positions: Mapping[int, MassiveAtPosition]) -> list[SuperNeuron]:
    """The neurons that write or erase the massive dimensions of some positions, strongest write first."""
    top_share = cache(lambda layer: _median_top_share(recording.anatomy.layers[layer]))
    neurons: list[SuperNeuron] = []
    for position, (slots, massive) in positions.items():
        if massive:
            neurons += _at_position(recording, position, slots, massive, top_share)
    return sorted(neurons, key=lambda neuron: -abs(neuron.write))


def _at_position(
    recording: Recording,
    position: int,
    slots: Sequence[int | None],
    massive: Collection[tuple[int, int]],
    top_share: Callable[[int], float],
) -> list[SuperNeuron]:
    dimensions_M = torch.tensor(sorted({dimension for _, dimension in massive}))
    nothing = torch.zeros(recording.anatomy.width)
    rows = recording.rows("dimension")
    values = [nothing if slot is None else rows[row, slot] for row, slot in enumerate(slots)]
    peak_LM = torch.stack([value_E[dimensions_M].abs() for value_E in values]).cummax(0).values
    # A row is the residual stream that leaves layer row - 1.
    massive_LM = torch.zeros(len(values), len(dimensions_M), dtype=torch.bool)
    for row in range(len(values)):
        for column, dimension in enumerate(dimensions_M.tolist()):
            massive_LM[row, column] = (row - 1, dimension) in massive
    neurons = []
    for layer in recording.anatomy.feed_forward_layers:
        if (slot := slots[layer.index + 1]) is None:
            continue
        activation_U, written_U, square_U = (
            recording.at_layers(name)[layer.index][slot].cpu()
            for name in ("neuron_activation", "neuron_written", "neuron_square")
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
        energy_U = recording.at_layers("neuron_energy")[layer.index].cpu() / recording.batch.num_sequences
        elsewhere_U = rest_of(energy_U, square_U) / (recording.batch.length - 1)
        contrast_U = (square_U / elsewhere_U.clamp(min=torch.finfo(torch.float32).tiny)).sqrt()
        places = layer.locate_neurons(listed)
        for number, (index, (expert, neuron)) in enumerate(zip(listed.tolist(), places, strict=True)):
            strongest = int(write_MU[:, index].abs().argmax())
            dimension, write = int(dimensions_M[strongest]), float(write_MU[strongest, index])
            sides = [float(v[dimension]) for v in (before, after) if v is not None]
            # It writes if its sign is that of the larger of the values before and after the layer, else it erases.
            writes = write * max(sides, key=abs) > 0
            neurons.append(
                SuperNeuron(
                    position=position,
                    layer=layer.index,
                    expert=expert,
                    neuron=neuron,
                    dimension=dimension,
                    activation=float(activation_U[index]),
                    write=write,
                    write_share=float(share_U[index]),
                    contrast=float(contrast_U[index]),
                    role="writes" if writes else "erases",
                    stands=bool((moved_M & stands_M).any()),
                    sparsity=ChannelSparsity(*(value[number] for value in sparsity)),
                    layer_top_share=top_share(layer.index),
                )
            )
    return neurons


def _median_top_share(layer: Layer) -> float:
    """Median over a layer's neurons of the top dimension's share of energy; neurons that write nothing have none."""
    gain_E = layer.write_gain()[:, None]
    shares = [_top_shares(weight_EF * gain_E.to(weight_EF)) for _, weight_EF in layer.down_weights()]
    return float(torch.cat(shares).nanmedian())


def rest_of(total: Tensor, here: Tensor) -> Tensor:
    """total - here, but at least what float32 can resolve of the total, so that a ratio to it saturates and does not
    jump with rounding."""
    return torch.maximum(total - here, 2.0**-20 * total)


def _top_shares(output_EF: Tensor) -> Tensor:
    """[F] energy share of the top dimension of each output vector; NaN for a vector of zeros."""
    energy = output_EF.float().square()
    return (energy.amax(0) / energy.sum(0)).cpu()
