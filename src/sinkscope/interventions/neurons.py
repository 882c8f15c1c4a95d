"""Interventions on feed-forward neurons, dense and expert alike: ablation, transplant, clamping, and a dense output
vector.

A dense neuron is changed as it enters the down projection. Experts have no module to hook for their neurons, so what
their new values would add to the output is added there; a routed neuron counts with its routing weight, 0 where it was
not routed. Axes: B sequences, T positions, N = B * T tokens, n neurons of one group, E width.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Self, Unpack, get_args

import torch
from torch import Tensor

from sinkscope.arguments import check_choice, check_whole
from sinkscope.errors import InputError
from sinkscope.interventions.base import (
    Acted,
    BatchShape,
    Intervention,
    Model,
    Place,
    TokenPlace,
    as_indices,
    check_held,
    hook_on,
    indices,
)
from sinkscope.interventions.calibration import calibration_of
from sinkscope.models.anatomy import (
    SHARED_EXPERT,
    Anatomy,
    AnyModule,
    Group,
    Layer,
    Neuron,
    NeuronLike,
    anatomy_of,
    as_neurons,
    checked_neurons,
)
from sinkscope.models.experts import added_to
from sinkscope.models.loaded import bare_model
from sinkscope.models.token_batches import TokenBatch
from sinkscope.tracing.block_states import entering
from sinkscope.tracing.layer_neurons import LayerNeurons
from sinkscope.tracing.open_interventions import ExpertChange, changing_experts, check_indices, suspend
from sinkscope.tracing.replay import ConditionReading, read_neurons

Elsewhere = Literal["turn", "permute"]
"""How a change of neurons is written elsewhere."""
NUM_NEAREST = 20
"""How many neurons, or dimensions, a matched one is drawn among."""


class ChangeNeurons(Intervention):
    """New values for some neurons at some tokens."""

    def __init__(
        self,
        model: Model,
        name: str,
        neurons: Iterable[NeuronLike],
        *,
        positions: int | Sequence[int] | None = None,
        sequences: int | Sequence[int] | None = None,
    ) -> None:
        self.name = name
        neurons = as_neurons(neurons)
        self.groups = checked_neurons(anatomy_of(bare_model(model)), neurons)
        self.written: dict[Group, Tensor] = {}
        """By group [E, n]: the vectors along which a change is written, where they are not the neurons' own."""
        super().__init__(
            model,
            Place(
                on="neurons",
                layers=tuple(layer for layer, _ in self.groups),
                positions=as_indices(positions),
                sequences=as_indices(sequences),
                items=frozenset(neurons),
            ),
        )

    @abstractmethod
    def new_values(self, group: Group, current_BTn: Tensor) -> Tensor:
        """The new values of the group's neurons at every token; ignored where the intervention does not act."""

    def elsewhere(self, how: Elsewhere, seed: int) -> Self:
        """The control of the same change: it is written along other vectors of the same norm, and the neurons' own
        activations and writes stay. `turn`: all of them turned by one random rotation; `permute`: their coordinates
        in one random order, none at its place. Both keep the angles between them."""
        before = _output_vectors(self.anatomy, self.groups)
        all_En = torch.cat(list(before.values()), dim=1) if before else torch.empty(self.anatomy.width, 0)
        generator = torch.Generator().manual_seed(seed)
        new_En = _turned(all_En, generator) if how == "turn" else _permuted(all_En, generator)
        self.written = _by_group_of(before, new_En)
        return self

    def opening(self, stack: contextlib.ExitStack, acted: Acted) -> None:
        for group, neurons in self.groups.items():
            layer = self.anatomy.layers[group[0]]
            shape = BatchShape(layer, stack)
            if group[1] in (None, SHARED_EXPERT):
                projection = layer.down_projection if group[1] is None else layer.shared_down_projection
                gate = _SharedGate(layer if group[1] == SHARED_EXPERT else None, stack)
                if self.written:
                    hook = self._added_hook(group, neurons, shape, gate, acted)
                    hook_on(stack, projection, hook, after=True, with_kwargs=True)
                else:
                    hook_on(stack, projection, self._dense_hook(group, neurons, shape, gate, acted))
            else:
                assert group[1] is not None
                assert layer.experts is not None
                hook = self._added_hook(group, neurons, shape, _SharedGate(None, stack), acted)
                hook_on(stack, layer.experts, hook, after=True, with_kwargs=True)
                if self.written:  # the activations stay
                    continue
                values = self._expert_values(group, shape)
                change = ExpertChange(expert=group[1], neurons=neurons, new_values=values)
                stack.enter_context(changing_experts(layer.index, layer.experts, change))

    def _dense_hook(self, group: Group, neurons: tuple[int, ...], shape: BatchShape, gate: _SharedGate, acted: Acted):
        def hook(module, args):
            acted(group[0])
            all_BTF = shape.unflatten(args[0], self.place).clone()
            chosen = indices(neurons, all_BTF.device)
            raw_BTn = all_BTF[..., chosen]
            if gate.value is None:
                all_BTF[..., chosen] = self._changed(group, raw_BTn)
            else:
                gate_BT1 = shape.unflatten(gate.value, self.place)
                gated_BTn = raw_BTn * gate_BT1
                all_BTF[..., chosen] = raw_BTn + (self._changed(group, gated_BTn) - gated_BTn) / gate_BT1
            return (all_BTF.reshape(args[0].shape), *args[1:])

        return hook

    def _expert_values(self, group: Group, shape: BatchShape):
        def new_values(current_Nn: Tensor) -> Tensor:
            return self._changed(group, shape.unflatten(current_Nn, self.place)).flatten(0, 1)

        return new_values

    def _added_hook(self, group: Group, neurons: tuple[int, ...], shape: BatchShape, gate: _SharedGate, acted: Acted):
        """Adds what the change writes to what the neurons wrote."""
        layer, expert = self.anatomy.layers[group[0]], group[1]
        is_routed = expert not in (None, SHARED_EXPERT)

        def hook(module, args, kwargs, output):
            acted(layer.index)
            chosen = torch.tensor(neurons, device=output.device)
            layer_neurons = LayerNeurons(layer) if is_routed else None
            if layer_neurons is not None:
                with suspend():  # what the experts made of the token, before any intervention
                    layer_neurons.keep_routed(module, args, kwargs)
                    current_BTn = shape.unflatten(layer_neurons.values(expert, chosen), self.place)
            else:
                current_BTn = shape.unflatten(args[0][..., chosen].float(), self.place)
                if gate.value is not None:
                    current_BTn = current_BTn * shape.unflatten(gate.value, self.place)
            change_Nn = (self._changed(group, current_BTn) - current_BTn).flatten(0, 1)
            vectors_En = self.written[group] if self.written else layer.group_weight(expert)[:, chosen]
            if layer_neurons is None:
                if gate.value is not None:
                    change_Nn = change_Nn / gate.value.reshape(-1, 1)
                added_NE = change_Nn @ vectors_En.to(change_Nn).T
                return output + added_NE.view_as(output).to(output.dtype)
            assert layer_neurons.routed is not None
            assert expert is not None
            added_NE = change_Nn @ vectors_En.to(change_Nn).T / layer.expert_scale
            return added_to(output, layer_neurons.routed, expert, added_NE)

        return hook

    def _changed(self, group: Group, current_BTn: Tensor) -> Tensor:
        new_BTn = self.new_values(group, current_BTn).to(current_BTn.dtype)
        acts_BT = torch.zeros(current_BTn.shape[:2], dtype=torch.bool, device=current_BTn.device)
        rows = torch.arange(len(acts_BT), device=acts_BT.device)[indices(self.place.sequences, acts_BT.device)]
        columns = torch.arange(acts_BT.shape[1], device=acts_BT.device)[indices(self.place.positions, acts_BT.device)]
        acts_BT[rows[:, None], columns] = True
        return torch.where(acts_BT[..., None], new_BTn, current_BTn)


class _SharedGate:
    """The gate by which a layer multiplies its shared expert: what enters the down projection is the activation over
    it. Nothing without a layer, or for one without a gate."""

    def __init__(self, layer: Layer | None, stack: contextlib.ExitStack) -> None:
        self.value: Tensor | None = None
        if layer is not None and layer.shared_gate is not None:
            self.module: AnyModule = layer.shared_gate
            # The gate reads what the feed-forward reads, and may run only after the shared expert.
            hook_on(stack, layer.feed_forward, self._note, with_kwargs=True)

    def _note(self, module, args, kwargs) -> None:
        gate = self.module.forward(entering(args, kwargs)).sigmoid()
        self.value = gate.clamp(min=torch.finfo(gate.dtype).tiny)


class AblateNeurons(ChangeNeurons):
    """Neurons at zero, at their mean over a calibration batch, or at values drawn from it."""

    def __init__(
        self,
        model: Model,
        neurons: Iterable[NeuronLike],
        mode: str,
        calibration: TokenBatch | Tensor | None,
        **where: Unpack[TokenPlace],
    ) -> None:
        super().__init__(model, "ablate_neurons", neurons, **where)
        self.mode, self.needs = mode, None if mode == "resample" else self.place.positions or ()
        check_choice("mode", mode, ("zero", "mean", "resample"))
        self.seen: dict[Group, Tensor] = {}
        if mode != "zero":
            batch, self.calibrated_on = calibration_of(model, calibration)
            self.seen = read_neurons(self.anatomy, bare_model(model), batch.ids, self.groups)

    @property
    def by_sequence(self) -> bool:
        return super().by_sequence or self.mode == "resample"

    def new_values(self, group: Group, current_BTn: Tensor) -> Tensor:
        if self.mode == "zero":
            return torch.zeros_like(current_BTn)
        seen_Nn = self.seen[group].flatten(0, 1).to(current_BTn)
        if self.mode == "mean":
            return seen_Nn.mean(0).expand_as(current_BTn)
        # The same token of the calibration batch for all neurons of the group: their values belong together.
        generator = torch.Generator().manual_seed(group[0])
        tokens_BT = torch.randint(len(seen_Nn), current_BTn.shape[:2], generator=generator).to(current_BTn.device)
        return seen_Nn[tokens_BT]


class TransplantNeurons(ChangeNeurons):
    """Neurons at one position take the values they have at another, sequence by sequence."""

    def __init__(
        self,
        model: Model,
        neurons: Iterable[NeuronLike],
        source: int,
        target: int,
        *,
        sequences: int | Sequence[int] | None = None,
    ) -> None:
        super().__init__(model, "transplant_neurons", neurons, positions=target, sequences=sequences)
        check_whole("source", source)
        self.source, self.needs = source, (source, target)
        if source < 0 or source == target:
            raise InputError(
                f"A transplant needs two different positions, counted from 0, not {source} and {target}. Choose others."
            )

    def new_values(self, group: Group, current_BTn: Tensor) -> Tensor:
        check_indices("position", (self.source,), current_BTn.shape[1])
        return current_BTn[:, self.source, None].expand_as(current_BTn)


class ClampNeurons(ChangeNeurons):
    """Neurons held at the values they have in a baseline reading of the same batch."""

    holds_a_batch = True

    def __init__(
        self, model: Model, neurons: Iterable[NeuronLike], baseline: ConditionReading, **where: Unpack[TokenPlace]
    ) -> None:
        super().__init__(model, "clamp", neurons, **where)
        self.held = {group: baseline.group_values(group, indices) for group, indices in self.groups.items()}

    def new_values(self, group: Group, current_BTn: Tensor) -> Tensor:
        check_held(self.held[group], current_BTn)
        return self.held[group].to(current_BTn)


Mode = Literal["spread", "move", "turn"]


class DensifyNeurons(Intervention):
    """Output vectors of equal norm that point elsewhere; activations stay as they are.

    `spread`: over all dimensions, with random signs. `move`: whole into a single dimension, another for each that leads
    a vector, none of `avoid`. `turn`: all of them by one random rotation, which leaves the angles between them.
    """

    name = "densify_neurons"
    needs = ()

    def __init__(
        self,
        model: Model,
        neurons: Iterable[NeuronLike],
        mode: Mode = "spread",
        *,
        avoid: Sequence[int] = (),
        seed: int = 0,
    ) -> None:
        check_choice("mode", mode, get_args(Mode))
        neurons = as_neurons(neurons)
        self.groups = checked_neurons(anatomy_of(bare_model(model)), neurons)
        place = Place(on="output vectors", layers=tuple(layer for layer, _ in self.groups), items=frozenset(neurons))
        super().__init__(model, place)
        before = _output_vectors(self.anatomy, self.groups)
        if mode == "spread":
            after = {group: _spread(vectors_En, seed + 1_000_003 * group[0]) for group, vectors_En in before.items()}
        else:
            all_En = torch.cat(list(before.values()), dim=1) if before else torch.empty(self.anatomy.width, 0)
            generator = torch.Generator().manual_seed(seed)
            new_En = _moved(all_En, avoid, generator) if mode == "move" else _turned(all_En, generator)
            after = _by_group_of(before, new_En)
        self.change = {group: after[group] - before[group] for group in before}

    def opening(self, stack: contextlib.ExitStack, acted: Acted) -> None:
        for (index, expert), neurons in self.groups.items():
            layer = self.anatomy.layers[index]
            dense = {None: layer.down_projection, SHARED_EXPERT: layer.shared_down_projection}
            is_routed = expert not in dense
            hook = (self._expert_hook if is_routed else self._dense_hook)((index, expert), neurons, acted)
            hook_on(stack, layer.experts if is_routed else dense[expert], hook, after=True, with_kwargs=True)

    def _dense_hook(self, group: Group, neurons: tuple[int, ...], acted: Acted):
        def hook(module, args, kwargs, output):
            acted(group[0])
            values = args[0][..., torch.tensor(neurons, device=output.device)].float()
            return output + (values @ self.change[group].to(values).T).to(output.dtype)

        return hook

    def _expert_hook(self, group: Group, neurons: tuple[int, ...], acted: Acted):
        layer, expert = self.anatomy.layers[group[0]], group[1]

        def hook(module, args, kwargs, output):
            acted(layer.index)
            layer_neurons = LayerNeurons(layer)
            layer_neurons.keep_routed(module, args, kwargs)
            values = layer_neurons.values(expert, torch.tensor(neurons, device=output.device)) / layer.expert_scale
            assert layer_neurons.routed is not None
            assert expert is not None
            return added_to(output, layer_neurons.routed, expert, values @ self.change[group].to(values).T)

        return hook


def _output_vectors(anatomy: Anatomy, groups: Mapping[Group, tuple[int, ...]]) -> dict[Group, Tensor]:
    """By group [E, n] the output vectors of some neurons."""
    return {
        (layer, expert): anatomy.layers[layer].group_weight(expert)[:, list(neurons)].float().cpu()
        for (layer, expert), neurons in groups.items()
    }


def _by_group_of(vectors: Mapping[Group, Tensor], all_En: Tensor) -> dict[Group, Tensor]:
    """Vectors side by side, divided among groups as `vectors` are."""
    sizes = [vectors_En.shape[1] for vectors_En in vectors.values()]
    return dict(zip(vectors, all_En.split(sizes, dim=1), strict=True))


def _permuted(vectors_En: Tensor, generator: torch.Generator) -> Tensor:
    """Each coordinate takes the place of another one: the places form a single circle."""
    order = torch.randperm(len(vectors_En), generator=generator)
    new_En = torch.empty_like(vectors_En)
    new_En[order.roll(1)] = vectors_En[order]
    return new_En


def _spread(vectors_En: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    signs_En = torch.randint(0, 2, vectors_En.shape, generator=generator).to(vectors_En) * 2 - 1
    return signs_En * torch.linalg.vector_norm(vectors_En, dim=0) / len(vectors_En) ** 0.5


def _moved(vectors_En: Tensor, avoid: Sequence[int], generator: torch.Generator) -> Tensor:
    leading_n = vectors_En.abs().argmax(0)
    taken = {*leading_n.tolist(), *avoid}
    free = [d for d in torch.randperm(len(vectors_En), generator=generator).tolist() if d not in taken]
    others = dict(zip(dict.fromkeys(leading_n.tolist()), free, strict=False))
    new_En = torch.zeros_like(vectors_En)
    for number, leading in enumerate(leading_n.tolist()):
        vector_E = vectors_En[:, number]
        new_En[others[leading], number] = vector_E[leading].sign() * torch.linalg.vector_norm(vector_E)
    return new_En


def _turned(vectors_En: Tensor, generator: torch.Generator) -> Tensor:
    basis, inner = torch.linalg.qr(vectors_En.double())
    random = torch.randn(basis.shape, generator=generator, dtype=torch.float64)
    return (torch.linalg.qr(random).Q @ inner).to(vectors_En.dtype)


def ablate_neurons(
    model: Model,
    neurons: Iterable[NeuronLike],
    mode: Literal["zero", "mean", "resample"] = "zero",
    *,
    calibration: TokenBatch | Tensor | None = None,
    **where: Unpack[TokenPlace],
) -> AblateNeurons:
    """Neurons at zero, at their mean, or at values of other tokens; `where` takes positions and sequences. Without a
    calibration, one of random tokens is drawn for the means and values."""
    return AblateNeurons(model, neurons, mode, calibration, **where)


def densify_neurons(
    model: Model, neurons: Iterable[NeuronLike], mode: Mode = "spread", *, avoid: Sequence[int] = (), seed: int = 0
) -> DensifyNeurons:
    """Each neuron's output vector with its norm spread over all dimensions, moved to another one, or turned; all else
    stays as it was."""
    return DensifyNeurons(model, neurons, mode, avoid=avoid, seed=seed)


def transplant_neurons(
    model: Model,
    neurons: Iterable[NeuronLike],
    source: int,
    target: int,
    *,
    sequences: int | Sequence[int] | None = None,
) -> TransplantNeurons:
    """The neurons' activations at `source` written at `target` too."""
    return TransplantNeurons(model, neurons, source, target, sequences=sequences)


def matched_neurons(
    anatomy: Anatomy,
    neurons: Iterable[NeuronLike],
    excluded: Sequence[Neuron],
    *,
    seed: int,
    sizes: Mapping[Group, Tensor] | None = None,
) -> list[Neuron]:
    """As many other neurons, each of the same layer and expert and among the NUM_NEAREST of nearest size.

    `sizes` are the neurons' by group; left out, they are the norms of output vectors.
    """
    generator = torch.Generator().manual_seed(seed)
    neurons = as_neurons(neurons)
    matched: list[Neuron] = []
    for neuron in neurons:
        if sizes is None:
            weight_EF: Any = anatomy.layers[neuron.layer].group_weight(neuron.expert)
            size_F = torch.linalg.vector_norm(weight_EF.float(), dim=0).cpu()
        else:
            size_F = sizes[neuron.layer, neuron.expert]
        taken = [u.neuron for u in (*neurons, *excluded, *matched) if u[:2] == neuron[:2]]
        matched += [Neuron(neuron.layer, neuron.expert, n) for n in nearest(size_F, neuron.neuron, taken, generator)]
    return matched


def nearest(size_F: Tensor, index: int, taken: Sequence[int], generator: torch.Generator) -> list[int]:
    """One drawn among the NUM_NEAREST of nearest size to `index`, by the log of their ratio; none where all are
    taken."""
    size_F = size_F.clamp(min=torch.finfo(size_F.dtype).tiny)  # what is silent is far from all, and can be drawn
    distance_F = (size_F / size_F[index]).log().abs()
    distance_F[list(taken)] = float("inf")
    pool = distance_F.argsort()[:NUM_NEAREST]
    pool = pool[distance_F[pool].isfinite()]
    return [int(pool[int(torch.randint(len(pool), (1,), generator=generator))])] if len(pool) else []
