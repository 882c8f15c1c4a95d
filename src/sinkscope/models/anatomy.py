"""Where a model keeps its modules (`Anatomy`), found through its family's row in `families`.

Numbers (heads, head size, width) are read from the configuration or the module, never inferred from shapes. A family
that is missing raises an error that names the row to add.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from sinkscope.arguments import neuron_of_text
from sinkscope.attention.head_norm import HeadRMSNorm
from sinkscope.errors import InputError
from sinkscope.models.experts import expert_outputs, is_experts
from sinkscope.models.families import FAMILIES, Family
from sinkscope.models.finding import find_family
from sinkscope.models.loaded import Model, bare_model, without_head
from sinkscope.models.sharded import unsharded, whole
from sinkscope.models.weights import held

AnyModule = Any
"""A module of a user's model. Which attributes it has depends on the family, so no narrower type fits."""
SHARED_EXPERT = -1
"""The expert number under which the neurons of a shared expert are listed."""
DENSE = -2
"""Stands for "no expert" where a tensor needs a number."""


class Neuron(NamedTuple):
    """One feed-forward neuron of a model, numbered within its expert.

    `expert` is None in a dense layer and SHARED_EXPERT for a shared one.
    """

    layer: int
    expert: int | None
    neuron: int

    def __str__(self) -> str:
        return ":".join(str(part) for part in self if part is not None)


Group = tuple[int, int | None]
"""Neurons are grouped by (layer, expert)."""


class Placed(Protocol):
    """Anything with a layer, an expert and a neuron, such as a super neuron of a trace."""

    @property
    def layer(self) -> int: ...
    @property
    def expert(self) -> int | None: ...
    @property
    def neuron(self) -> int: ...


NeuronLike = Neuron | Placed | tuple[int, int] | tuple[int, int | None, int] | str
"""A neuron as users name it: (5, 148), (5, 2, 148) with an expert, "5:148", or a super neuron of a trace."""


def as_neuron(given: NeuronLike) -> Neuron:
    """The neuron that is named; refuses what names none."""
    try:
        if isinstance(given, str):
            return Neuron(*neuron_of_text(given))
        if isinstance(given, tuple):
            layer, *expert, neuron = given
            (expert,) = expert or (None,)
            return Neuron(int(layer), None if expert is None else int(expert), int(neuron))
        return Neuron(given.layer, given.expert, given.neuron)
    except (ValueError, TypeError, AttributeError):
        raise InputError(
            f"{reprlib.repr(given)} names no neuron. Give (layer, neuron), (layer, expert, neuron), '5:148' or a super "
            "neuron of a trace."
        ) from None


def as_neurons(given: NeuronLike | Iterable[NeuronLike]) -> list[Neuron]:
    """One neuron or several, as a list."""
    is_one = isinstance(given, str) or not isinstance(given, Iterable)
    is_tuple = isinstance(given, tuple) and given and all(isinstance(part, int | None) for part in given)
    return [as_neuron(given)] if is_one or is_tuple else [as_neuron(neuron) for neuron in given]  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The modules of one block, None for those that it lacks.

    Its feed-forward has either `down_projection` or `experts`; a shared expert comes with experts. In a hybrid a layer
    may have a mixer (a state-space model, linear attention, a convolution) in place of attention or beside it, and may
    lack the feed-forward.
    """

    index: int
    block: AnyModule
    attention: AnyModule
    output_projection: AnyModule
    down_projection: AnyModule | None
    experts: AnyModule | None
    shared_down_projection: AnyModule | None
    shared_gate: AnyModule | None
    """A linear layer whose sigmoid multiplies what the shared expert gives; its neurons' activations include it."""
    expert_scale: float
    """What is multiplied with the experts' sum after it; their neurons' activations include it, as routing weights."""
    post_norm: AnyModule | None
    attention_scale: float
    """What is multiplied with the attention's output where it is added to the residual stream."""
    feed_forward_scale: float
    attention_exit: AnyModule
    """The module whose output the attention adds to the residual stream: its output projection, or a norm after it."""
    feed_forward: AnyModule | None
    """The module that maps a normalised state to the feed-forward's output; None where the block itself does it."""
    activations: tuple[AnyModule, ...]
    """The modules of the activation function: of dense neurons, or of experts and shared ones; may be empty."""
    mixer_exit: AnyModule | None = None
    """The module whose output the mixer adds to the residual stream."""
    mixer_scale: float = 1.0

    @property
    def has_attention(self) -> bool:
        return self.attention is not None

    @property
    def has_feed_forward(self) -> bool:
        return self.down_projection is not None or self.experts is not None

    @property
    def mixing_exits(self) -> list[tuple[AnyModule, float]]:
        """(module, scale) of what is added to the residual stream from other tokens: attention, a mixer, or both."""
        exits = [(self.attention_exit, self.attention_scale), (self.mixer_exit, self.mixer_scale)]
        return [(module, scale) for module, scale in exits if module is not None]

    def down_weights(self) -> list[tuple[int | None, Tensor]]:
        """(expert or None, output vectors [E, F]) of every group of neurons, in the order of their indices; none in a
        layer without a feed-forward."""
        if self.down_projection is not None:
            return [(None, projection_weight(self.down_projection))]
        if self.experts is None:
            return []
        groups: list[tuple[int | None, Tensor]] = list(enumerate(expert_outputs(self.experts)))
        if self.shared_down_projection is not None:
            groups.append((SHARED_EXPERT, projection_weight(self.shared_down_projection)))
        return groups

    def group_weight(self, expert: int | None) -> Tensor:
        """[E, F] output vectors of one group of neurons; refuses a group that the layer does not have."""
        groups = dict(self.down_weights())
        if expert not in groups:
            if not groups:
                raise InputError(f"Layer {self.index} has no feed-forward, and so no neurons. Name a layer with one.")
            if self.experts is None:
                raise InputError(
                    f"Layer {self.index} has no experts, so no expert {expert}. Name its neurons as layer:neuron."
                )
            named = "no expert" if expert is None else f"expert {expert}"
            raise InputError(
                f"Layer {self.index} has the experts {', '.join(map(str, groups))}, and {named} was named. Name its "
                "neurons as layer:expert:neuron."
            )
        return groups[expert]

    def written_vectors(self, expert: int | None) -> Tensor:
        """[E, F] float32: what each neuron of a group writes per unit of activation, post-norm gain included."""
        return self.group_weight(expert).float() * self.write_gain()[:, None]

    def written_rows(self, dimensions_M: Tensor) -> Tensor:
        """[M, U] float32: what every neuron writes into some dimensions per unit of activation."""
        rows = [weight[dimensions_M].float() for _, weight in self.down_weights()]
        return torch.cat(rows, dim=1) * self.write_gain()[dimensions_M, None]

    def locate_neuron(self, index: int) -> tuple[int | None, int]:
        """(expert or None, neuron) of the neuron that has this index in the layer, counted over its experts."""
        return self.locate_neurons(torch.tensor([index]))[0]

    def locate_neurons(self, indices: Tensor) -> list[tuple[int | None, int]]:
        """The same for many indices."""
        experts, neurons = (places.tolist() for places in self.neuron_places(indices))
        return [(None if expert == DENSE else expert, neuron) for expert, neuron in zip(experts, neurons, strict=True)]

    def output_vectors(self, indices: Tensor) -> Tensor:
        """[E, n] float32: what each neuron writes into the residual stream per unit of activation, post-norm gain
        included."""
        weights = dict(self.down_weights())
        columns = [weights[expert][:, neuron].float() for expert, neuron in self.locate_neurons(indices)]
        return torch.stack(columns, dim=1) * self.write_gain()[:, None].to(columns[0].device)

    def neuron_index(self, expert: int | None, neuron: int) -> int:
        """The index by which `locate_neurons` finds this neuron."""
        start = 0
        for group, weight in self.down_weights():
            if group == expert:
                return start + neuron
            start += weight.shape[1]
        raise ValueError(f"layer {self.index} has no expert {expert}")

    def neuron_places(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """(expert, neuron) of many indices at once; a dense layer's expert comes as DENSE."""
        groups = self.down_weights()
        # The index at which each group begins, and after the last one the number of neurons.
        starts = torch.tensor([0, *(weight.shape[1] for _, weight in groups)]).cumsum(0)
        group = torch.searchsorted(starts, indices, right=True) - 1
        experts = torch.tensor([DENSE if expert is None else expert for expert, _ in groups])
        return experts[group], indices - starts[group]

    def aggregation_channel_norms(self) -> Tensor:
        """[C] float32: how strongly the output projection reads each channel of the value aggregation."""
        return torch.linalg.vector_norm(self.output_projection_weight().float(), dim=0)

    def output_projection_weight(self) -> Tensor:
        """[E, C] the weight of the output projection, which multiplies the value aggregation."""
        return projection_weight(self.output_projection)

    @property
    def aggregation_norm(self) -> HeadRMSNorm | None:
        """The norm between attention and the output projection, where there is one: the model's own, or inserted."""
        return next((module for module in self.attention.modules() if isinstance(module, HeadRMSNorm)), None)

    @property
    def has_write_gain(self) -> bool:
        """Whether what leaves the down projection is changed before the residual stream gets it."""
        return self.post_norm is not None or self.feed_forward_scale != 1

    def write_gain(self) -> Tensor:
        """[E] float32: what each dimension of the down projection's output is multiplied by on its way into the
        residual stream, apart from what a post-norm divides by."""
        return self.post_norm_gain() * self.feed_forward_scale

    def post_norm_gain(self) -> Tensor:
        """[E] float32: the gain of the post-norm, or ones where there is none.

        It is the norm's output for a vector of ones, since families keep it as `weight` or as `1 + weight`.
        """
        if self.post_norm is None:
            _, weight_EF = self.down_weights()[0]
            return torch.ones(weight_EF.shape[0], device=weight_EF.device)
        parameter = self.post_norm.weight
        # Ones that are sharded as the gain is, or the two could not be multiplied.
        ones = torch.ones_like(held(self.post_norm, "weight") if parameter.is_meta else parameter)
        return whole(self.post_norm.forward(ones).detach()).float()


@dataclass(frozen=True, kw_only=True, repr=False)
class Anatomy:
    """The modules of one model, and the numbers that its configuration states."""

    family: Family
    decoder: AnyModule
    layers: tuple[Layer, ...]
    num_heads: int
    num_key_value_heads: int
    width: int
    context: int | None
    parallel: bool

    @property
    def attention_layers(self) -> tuple[Layer, ...]:
        """The layers with attention: all but in a hybrid."""
        return tuple(layer for layer in self.layers if layer.has_attention)

    @property
    def feed_forward_layers(self) -> tuple[Layer, ...]:
        """The layers with a feed-forward."""
        return tuple(layer for layer in self.layers if layer.has_feed_forward)

    @property
    def num_heads_of_all_layers(self) -> int:
        return len(self.attention_layers) * self.num_heads

    @property
    def is_hybrid(self) -> bool:
        """Whether some layers lack attention or a feed-forward, or have another mixer."""
        return self.family.parts_of_layers is not None

    def row(self) -> dict:
        """The anatomy in words, for people."""
        num_neurons = [sum(weight.shape[1] for _, weight in layer.down_weights()) for layer in self.layers]
        return {
            "family": self.family.name,
            "num_layers": len(self.layers),
            "layers_with_attention": [layer.index for layer in self.attention_layers],
            "layers_with_another_mixer": [layer.index for layer in self.layers if layer.mixer_exit is not None],
            "num_heads": self.num_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "width": self.width,
            "units_per_layer": num_neurons[0] if len(set(num_neurons)) == 1 else num_neurons,
            "layers_of_experts": [layer.index for layer in self.layers if layer.experts is not None],
            "post_norm": self.family.post_norm,
            "attention_and_feed_forward_in_parallel": self.parallel,
            "attention_scale": self.family.attention_scale,
            "mixer_scale": self.family.mixer_scale,
            "feed_forward_scale": self.family.feed_forward_scale,
            "context": self.context,
            "blocks": f"{type(self.decoder).__name__}.{self.family.blocks}",
            "attention": self.family.attention,
            "output_projection": self.family.output_projection,
            "mixer": self.family.mixer_exit,
            "down_projection": self.family.down_projection,
            "experts": self.family.experts,
            "known_from": "the table of families"
            if self.family in FAMILIES
            else self.family.notes or "sinkscope_anatomy",
        }

    def __repr__(self) -> str:
        return f"Anatomy({', '.join(f'{name}={value!r}' for name, value in self.row().items())})"


def check_every_layer(anatomy: Anatomy, what: str) -> None:
    """Refuses a hybrid for `what`, which needs attention and a feed-forward in every layer and nothing beside them."""
    if not anatomy.is_hybrid:
        return
    differ = [str(i) for i in range(len(anatomy.layers)) if anatomy.family.parts(i) != ("attention", "feed_forward")]
    listed = ", ".join(differ[:8]) + (", ..." if len(differ) > 8 else "")
    raise InputError(
        f"{what} needs attention and a feed-forward in every layer, and no other mixer of tokens. This "
        f"{anatomy.family.name} model is a hybrid: layers {listed} are otherwise. It can be traced, intervened in and "
        "audited."
    )


def checked_neurons(anatomy: Anatomy, neurons: Iterable[NeuronLike]) -> dict[Group, tuple[int, ...]]:
    """Neurons by (layer, expert); refuses neurons that the model does not have."""
    groups: dict[Group, set[int]] = {}
    for layer, expert, neuron in map(as_neuron, neurons):
        if not 0 <= layer < len(anatomy.layers):
            raise InputError(
                f"There is no layer {layer}. Choose from 0 to {len(anatomy.layers) - 1}; `sinkscope models NAME` shows "
                "the layers of a model."
            )
        num_neurons = anatomy.layers[layer].group_weight(expert).shape[1]
        if not 0 <= neuron < num_neurons:
            raise InputError(
                f"There is no neuron {neuron} in layer {layer}. Choose from 0 to {num_neurons - 1}; `sinkscope trace` "
                "lists those that matter."
            )
        groups.setdefault((layer, expert), set()).add(neuron)
    return {place: tuple(sorted(indices)) for place, indices in groups.items()}


def anatomy_of(model: Model) -> Anatomy:
    """The anatomy of a causal language model.

        sinkscope.anatomy_of(model).layers[5].output_projection

    A model may bring its own as the attribute `sinkscope_anatomy`.
    """
    bare: AnyModule = bare_model(model)
    if isinstance(bare, str | Path):
        raise InputError(
            f"A model is needed here, not its name, {reprlib.repr(bare)}. Load it first: model = sinkscope.load(...)."
        )
    anatomy = getattr(bare, "sinkscope_anatomy", None)
    if anatomy is not None:
        return anatomy
    if not hasattr(bare, "config"):
        raise InputError(
            f"This {type(bare).__name__} is not a model of transformers, and has no attribute sinkscope_anatomy. "
            "Give it one, as examples/own_gpt.py does."
        )
    return describe(_family_of(bare), bare)


def describe(family: Family, model: AnyModule) -> Anatomy:
    """The anatomy of a model read through a family's row."""
    config = model.config.get_text_config()
    reason = family.unsupported(config)
    if reason is not None:
        raise InputError(
            f"This {family.name} model has {reason}, which sinkscope cannot read. Choose one without it; "
            "`sinkscope models` lists what is supported."
        )
    return described(
        family,
        without_head(model.get_decoder()),
        num_heads=config.num_attention_heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None),
        width=config.hidden_size,
        context=getattr(config, "max_position_embeddings", None),
        parallel=family.parallel(config),
    )


def described(
    family: Family,
    decoder: AnyModule,
    *,
    num_heads: int,
    width: int,
    num_key_value_heads: int | None = None,
    context: int | None = None,
    parallel: bool = False,
) -> Anatomy:
    """The anatomy of any decoder read through a row: for a model of your own, to be its `sinkscope_anatomy`."""
    layers = tuple(_layer(family, index, block) for index, block in enumerate(decoder.get_submodule(family.blocks)))
    if not layers:
        raise InputError("This model has no layers. Check their number in config.json.")
    return Anatomy(
        family=family,
        decoder=decoder,
        layers=layers,
        num_heads=num_heads,
        num_key_value_heads=num_key_value_heads or num_heads,
        width=width,
        context=context,
        parallel=parallel,
    )


def _family_of(model: AnyModule) -> Family:
    """The row of the table, or what a short pass finds."""
    model_type = model.config.get_text_config().model_type
    row = next((family for family in FAMILIES if model_type in family.model_types), None)
    if row is not None:
        return row
    with unsharded(model):
        return find_family(model)


def _layer(family: Family, index: int, block: AnyModule) -> Layer:
    """The modules of a block, by the paths of its family; refuses projections that adapters have changed."""
    parts = family.parts(index)
    has_feed_forward = "feed_forward" in parts
    experts = _submodule(block, family.experts) if has_feed_forward else None
    if hasattr(experts, "base_layer"):
        raise _not_plain(index, experts)
    if experts is not None and not is_experts(experts):
        raise InputError(
            f"The experts of layer {index} ({type(experts).__name__}) lack gate_up_proj, down_proj or a gate. Use "
            "transformers 5.17 or newer, which keeps experts as 3-D parameters."
        )
    attention = output_projection = attention_exit = down_projection = None
    if "attention" in parts:
        attention = attrgetter(family.attention)(block)
        output_projection = attrgetter(family.output_projection)(block)
        attention_exit = _submodule(block, family.post_attention_norm) or output_projection
    if has_feed_forward and experts is None:
        down_projection = attrgetter(family.down_projection)(block)
    shared_down_projection = _submodule(block, family.shared_down_projection) if experts is not None else None
    for projection in (output_projection, down_projection, shared_down_projection):
        if projection is not None and not _is_plain(projection):
            raise _not_plain(index, projection)
    activations = (_submodule(block, path) for path in family.activations) if has_feed_forward else ()
    return Layer(
        index=index,
        block=block,
        attention=attention,
        output_projection=output_projection,
        down_projection=down_projection,
        experts=experts,
        shared_down_projection=shared_down_projection,
        shared_gate=_submodule(block, family.shared_gate),
        expert_scale=family.expert_scale,
        post_norm=_submodule(block, family.post_norm) if has_feed_forward else None,
        attention_scale=family.attention_scale,
        feed_forward_scale=family.feed_forward_scale,
        attention_exit=attention_exit,
        feed_forward=_submodule(block, family.feed_forward) if has_feed_forward else None,
        activations=tuple(part for part in activations if part is not None),
        mixer_exit=_submodule(block, family.mixer_exit) if "mixer" in parts else None,
        mixer_scale=family.mixer_scale,
    )


def _submodule(block: AnyModule, path: str | None) -> AnyModule | None:
    """The submodule at a path, or None where the path is absent (a dense layer among layers of experts)."""
    if path is None:
        return None
    for name in path.split("."):
        block = getattr(block, name, None)
        if block is None:
            return None
    return block


def _is_plain(projection: AnyModule) -> bool:
    """Whether a module multiplies by one weight and does nothing else, such as scale the result.

    A PEFT adapter of low rank adds to that weight and is included. A class that is no Linear says that it multiplies by
    a weight alone by the attribute `acts_by_weight_alone`.
    """
    if getattr(projection, "acts_by_weight_alone", False):
        return True
    if _is_low_rank_adapter(projection):
        return _is_plain(projection.get_base_layer())
    parameters = {name for name, _ in projection.named_parameters(recurse=False)}
    return is_linear(projection) and parameters <= {"weight", "bias"}


def is_linear(part: AnyModule) -> bool:
    """Whether a module is a Linear or a Conv1D of GPT-2."""
    return isinstance(part, nn.Linear) or is_transposed(part)


def is_transposed(part: AnyModule) -> bool:
    """Whether a module is a Conv1D of GPT-2, which keeps its weight as [in, out]."""
    return type(part).__name__ == "Conv1D"


def _not_plain(index: int, module: AnyModule) -> InputError:
    """The refusal of a projection or of experts that an adapter or a quantisation has replaced."""
    names = ", ".join(name for name, _ in module.named_parameters())
    return InputError(
        f"Layer {index} has a {type(module).__name__} with {names or 'no parameters'}, not a plain projection. "
        "Merge an adapter first (model = model.merge_and_unload()); load quantised weights in full precision."
    )


def _is_low_rank_adapter(projection: AnyModule) -> bool:
    """Whether a projection has a PEFT adapter whose change of the weight can be read."""
    return hasattr(projection, "get_base_layer") and hasattr(projection, "get_delta_weight")


def idle_adapters(model: AnyModule) -> set[nn.Module]:
    """The factors of PEFT adapters that no pass calls now, because they are disabled, merged or not active."""
    idle: set[nn.Module] = set()
    for part in model.modules():
        if not _is_low_rank_adapter(part):
            continue
        acting = () if part.merged or part.disable_adapters else part.active_adapters
        for factors in (part.lora_A, part.lora_B):
            idle.update(factor for name, factor in factors.items() if name not in acting)
    return idle


def projection_weight(projection: AnyModule) -> Tensor:
    """[out, in] weight of a Linear or a Conv1D, with what active adapters add to it."""
    if not _is_low_rank_adapter(projection):
        weight = held(projection, "weight")
        return weight.T if is_transposed(projection) else weight
    base = projection.get_base_layer()
    weight = held(base, "weight")
    if not projection.merged and not projection.disable_adapters:
        for name in projection.active_adapters:
            if name in projection.lora_A:
                weight = weight + projection.get_delta_weight(name).detach().to(weight)
    return weight.T if is_transposed(base) else weight


def input_device(anatomy: Anatomy) -> torch.device:
    """The device on which a model takes its token ids."""
    return embedding_device(anatomy.decoder)


def embedding_device(model: AnyModule) -> torch.device:
    """The device on which a model, or its decoder, takes its token ids.

    The CPU if accelerate keeps the embeddings elsewhere: its hooks move the ids.
    """
    device = model.get_input_embeddings().weight.device
    return torch.device("cpu") if device.type == "meta" else device
