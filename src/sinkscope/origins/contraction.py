"""Reads how far the residual stream gathers along one direction, layer by layer and part by part, while a model runs.

A site is a place in the residual stream: 0 enters the first layer, 2 l + 1 lies behind the attention of layer l and
2 l + 2 behind its feed-forward. Where both read the same input (parallel blocks), the site between them is the input
plus what attention adds. Of each site the last position's states are kept, and of all others only sums.

Axes: S sites, N sequences, T positions, P positions of the curves, E width, C channels of the value aggregation.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from sinkscope.capture.block_calls import entering, leaving
from sinkscope.capture.layer_statistics import wide
from sinkscope.capture.overflow import check_finite
from sinkscope.capture.sole_reader import in_this_thread
from sinkscope.measures.contraction import pairwise_cosine, principal, split_half_cosine
from sinkscope.measures.directional_collapse import cosine_from_sum
from sinkscope.models.anatomy import Anatomy, Layer

NUM_CURVE_POSITIONS = 64
"""Positions of the curves in longer sequences, closer together where the variance falls fastest."""


@dataclass(frozen=True)
class Contraction:
    """The contraction of one model on one batch. Inter is between sequences at the last position, intra between the
    positions of a sequence; both come as one value a sequence, whose mean is the mean cosine over pairs."""

    inter_SN: np.ndarray
    intra_SN: np.ndarray
    alignment_S: np.ndarray
    """|cosine| of the mean state with the top principal direction, of unit states at the last position."""
    top_share_S: np.ndarray
    """Share of that direction in the energy."""
    split_half_S: np.ndarray
    mean_state_SE: np.ndarray
    """The mean of the unit states at the last position."""
    positions_P: np.ndarray
    inter_by_position: np.ndarray
    """[L + 1, P] mean cosine between sequences in the stream that enters layer 0 and behind each layer."""
    value_variance: np.ndarray
    """[L, P] variance across sequences of the value aggregation, averaged over channels."""


class ContractionReader:
    """Gathers over any number of passes; `result` gives what all of them together say."""

    def __init__(self, anatomy: Anatomy, length: int) -> None:
        self.anatomy, self.length = anatomy, length
        self.positions_P = curve_positions(length)
        self.num_sequences = 0
        self._last: dict[int, list[Tensor]] = defaultdict(list)
        self._intra: dict[int, list[Tensor]] = defaultdict(list)
        self._largest_T: dict[int, Tensor] = {}
        """Largest magnitude of any sequence at each position."""
        self._unit_sums: dict[int, tuple[Tensor, Tensor]] = {}
        """Sum over sequences of the unit states [P, E], and how many there are [P]: a state of zeros is none."""
        self._value_sums: dict[int, tuple[Tensor, Tensor]] = {}
        """Sums over sequences of the aggregation [P, C] and of its squares [P]."""
        self._num_channels: dict[int, int] = {}

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Reads every pass that runs while it is open."""
        with contextlib.ExitStack() as stack:
            first = self.anatomy.layers[0].block
            enter = in_this_thread(self._enter_first)
            stack.callback(first.register_forward_pre_hook(enter, with_kwargs=True).remove)
            for layer in self.anatomy.layers:
                aggregate, leave = (
                    in_this_thread(self._aggregation(layer.index)),
                    in_this_thread(self._leave(layer.index)),
                )
                stack.callback(layer.output_projection.register_forward_pre_hook(aggregate).remove)
                between_parts(layer, stack, self._site_reader(2 * layer.index + 1))
                stack.callback(layer.block.register_forward_hook(leave).remove)
            yield

    def _enter_first(self, module, args, kwargs) -> None:
        state_BTE = entering(args, kwargs)
        self.num_sequences += len(state_BTE)
        self._read(0, state_BTE)

    def _site_reader(self, site: int) -> Callable[[Tensor], None]:
        return lambda state_BTE: self._read(site, state_BTE)

    def _leave(self, layer: int):
        return lambda module, args, output: self._read(2 * layer + 2, leaving(output))

    def _read(self, site: int, state_BTE: Tensor) -> None:
        unit_BTE = nn.functional.normalize(state_BTE.to(wide(state_BTE)), dim=-1)
        self._last[site].append(unit_BTE[:, -1].cpu())
        one_BT = (unit_BTE != 0).any(-1)
        self._intra[site].append(cosine_from_sum(unit_BTE.sum(1).double(), one_BT.sum(1)).cpu())
        if site % 2 == 0:
            largest_T, before = state_BTE.abs().amax((0, 2)).float().cpu(), self._largest_T.get(site)
            self._largest_T[site] = largest_T if before is None else torch.maximum(before, largest_T)
            total_PE, count_P = self._unit_sums.get(site, (0, 0))
            total_PE = total_PE + unit_BTE[:, self.positions_P].sum(0).double()
            self._unit_sums[site] = total_PE, count_P + one_BT[:, self.positions_P].sum(0)

    def _aggregation(self, layer: int):
        def hook(module, args) -> None:
            values_BPC = args[0].reshape(-1, self.length, args[0].shape[-1])[:, self.positions_P].double()
            total, square = self._value_sums.get(layer, (0, 0))
            self._value_sums[layer] = total + values_BPC.sum(0), square + values_BPC.square().sum((0, 2))
            self._num_channels[layer] = values_BPC.shape[-1]

        return hook

    def result(self) -> Contraction:
        """What was read; a part that reported nothing, or not in every pass, is an error."""
        num_layers, count = len(self.anatomy.layers), self.num_sequences
        last = {site: torch.cat(rows) for site, rows in sorted(self._last.items())}
        whole = [site for site, rows in last.items() if len(rows) == count]
        if whole != list(range(2 * num_layers + 1)) or len(self._value_sums) != num_layers:
            raise RuntimeError(f"a part reported nothing: the row of family {self.anatomy.family.name} is wrong")
        largest = [self._largest_T[2 * index] for index in range(num_layers + 1)]
        check_finite(self.anatomy.decoder, torch.stack(largest), first_layer=-1)
        directions = [principal(rows) for rows in last.values()]
        curves = [cosine_from_sum(*self._unit_sums[2 * index]).cpu() for index in range(num_layers + 1)]
        variances = []
        for layer, (total_PC, square_P) in sorted(self._value_sums.items()):
            deviations_P = square_P - total_PC.square().sum(-1) / count
            variances.append(deviations_P.clamp(min=0) / (count - 1) / self._num_channels[layer])
        return Contraction(
            inter_SN=np.stack([pairwise_cosine(rows).numpy() for rows in last.values()]),
            intra_SN=np.stack([torch.cat(self._intra[site]).numpy() for site in last]),
            alignment_S=np.array([direction.alignment for direction in directions]),
            top_share_S=np.array([direction.share for direction in directions]),
            split_half_S=np.array([split_half_cosine(rows) for rows in last.values()]),
            mean_state_SE=np.stack([rows.double().mean(0).numpy() for rows in last.values()]),
            positions_P=self.positions_P.numpy(),
            inter_by_position=torch.stack(curves).numpy(),
            value_variance=torch.stack([row.cpu() for row in variances]).numpy(),
        )


def between_parts(layer: Layer, stack: contextlib.ExitStack, found: Callable[[Tensor], None]) -> None:
    """Calls `found` with the residual stream [B, T, E] behind the layer's attention, until the stack is closed."""
    entered: list[Tensor] = []

    def enter(module, args, kwargs) -> None:
        entered[:] = [entering(args, kwargs)]

    def leave_attention(module, args, output) -> None:
        state_BTE = entered.pop()
        found(state_BTE + leaving(output).reshape(state_BTE.shape))

    stack.callback(layer.block.register_forward_pre_hook(in_this_thread(enter), with_kwargs=True).remove)
    stack.callback(layer.attention_exit.register_forward_hook(in_this_thread(leave_attention)).remove)


def curve_positions(length: int) -> Tensor:
    """[P] every position of a short sequence; of a longer one the first, the last, and others evenly in log."""
    if length <= NUM_CURVE_POSITIONS:
        return torch.arange(length)
    return torch.logspace(0, np.log10(length), NUM_CURVE_POSITIONS, dtype=torch.float64).round().long().unique() - 1
