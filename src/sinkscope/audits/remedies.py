"""What can be done about the damage of a scheme. Each remedy has a control, which must recover less.

A remedy is a class: how it changes the way a model is used (`apply`), and its control. `audit` measures it under each
scheme that needs one, `remedy` alone and together with others; both by `Evaluation.losses`.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from sinkscope.audits.evaluation import Evaluation, ModelSetup
from sinkscope.audits.schemes import Scheme, fused_groups
from sinkscope.errors import InputError
from sinkscope.interventions.neurons import matched_neurons
from sinkscope.models.anatomy import NeuronLike, anatomy_of, checked_neurons
from sinkscope.models.loaded import Model, bare_model
from sinkscope.models.rotation import rotate


class Remedy(ABC):
    """One thing to do, and its control."""

    name: str
    control_is: str
    is_loaded: bool = False
    """Whether engines load what it needs; the others are experiments."""

    def is_for(self, scheme: Scheme) -> bool:
        """Whether an audit tries it against a scheme."""
        return False

    def acts_on(self, scheme: Scheme) -> bool:
        """Whether it can change the damage of a scheme at all."""
        return True

    @abstractmethod
    def apply(self, evaluation: Evaluation, schemes: Sequence[Scheme], to: ModelSetup) -> ModelSetup | str:
        """`to` with this remedy against these schemes; where there is nothing that it could act on, the reason."""

    @abstractmethod
    def control(self, evaluation: Evaluation, schemes: Sequence[Scheme]) -> ModelSetup:
        """The control, of the model as it is."""

    def what(self, evaluation: Evaluation, scheme: Scheme) -> str:
        """What is done, for the advice of an audit."""
        raise NotImplementedError


class KeepTokens(Remedy):
    name = "keep tokens"
    control_is = "as many random positions"

    def is_for(self, scheme):
        return scheme.what in ("cache", "window") and not scheme.keeps_sinks

    def apply(self, evaluation, schemes, to):
        if not evaluation.is_sink.any():
            return "no token of these texts is a sink"
        return replace(to, tokens_in_16_bits=evaluation.is_sink)

    def control(self, evaluation, schemes):
        return ModelSetup(model=evaluation.model, tokens_in_16_bits=evaluation.random_tokens)

    def what(self, evaluation, scheme):
        count = float(evaluation.is_sink.sum(1).double().mean())
        where = "in the window" if scheme.what == "window" else "in 16 bits"
        return f"the sink tokens of each text, {count:.1f} on average, stay {where}"


class Exempt(Remedy):
    name = "leave modules in 16 bits"
    control_is = "random groups of as many weights"
    is_loaded = True

    def is_for(self, scheme):
        return scheme.what in ("linear", "cache")

    def apply(self, evaluation, schemes, to):
        modules = evaluation.of(to.model).worst_modules(*schemes)
        return replace(to, modules_in_16_bits=modules) if modules else "no group of modules fits the budget"

    def control(self, evaluation, schemes):
        """Random groups, as many weights as the worst ones or the last group more."""
        worst, sizes = evaluation.worst_groups(*schemes), schemes[0].sizes(evaluation.model)
        enough = sum(sizes[module] for modules in worst.values() for module in modules)
        groups = fused_groups(schemes[0].modules(evaluation.model))
        others = [modules for name, modules in groups.items() if name not in worst]
        chosen: list[str] = []
        for index in torch.randperm(len(others), generator=torch.Generator().manual_seed(evaluation.seed)):
            if sum(sizes[module] for module in chosen) >= enough:
                break
            chosen += others[index]
        return ModelSetup(model=evaluation.model, modules_in_16_bits=tuple(chosen))

    def what(self, evaluation, scheme):
        model, groups = evaluation.model, evaluation.worst_groups(scheme)
        if scheme.what == "cache":
            return f"the cache of {', '.join(groups)}"
        prediction = evaluation.prediction
        guilty: list[str] = []  # the others are there because an engine fuses them
        for modules in groups.values():
            whole = prediction.damage(scheme, modules)
            guilty += [module for module in modules if prediction.damage(scheme, [module]) >= whole / 10]
        plain, with_guilty = scheme.bits(model), scheme.bits(model, guilty)
        with_groups = scheme.bits(model, [module for modules in groups.values() for module in modules])
        return (
            f"{', '.join(groups)}: {with_groups - plain:.2f} bits a weight more, of which "
            f"{with_groups - with_guilty:.2f} for modules that are fused with a guilty one"
        )


class Prefixed(Remedy):
    name = "prefix"
    control_is = "the cache of as many tokens that are no sinks"

    def is_for(self, scheme):
        return scheme.what == "linear" and scheme.shares_a_scale()

    def apply(self, evaluation, schemes, to):
        prefix = evaluation.of(to.model).prefix
        return replace(to, prefix=prefix) if prefix.ids else prefix.why_none

    def control(self, evaluation, schemes):
        return ModelSetup(model=evaluation.model, prefix=evaluation.other_prefix)

    def what(self, evaluation, scheme):
        return f"the cache of tokens {list(evaluation.prefix.ids)} before every text"


class Rotate(Remedy):
    name = "rotate"
    control_is = "norm gains folded in, the basis as it was"
    is_loaded = True

    def is_for(self, scheme):
        return scheme.what == "linear"

    def apply(self, evaluation, schemes, to):
        return replace(to, model=rotate(to.model, seed=evaluation.seed))

    def control(self, evaluation, schemes):
        width = evaluation.model.get_input_embeddings().weight.shape[1]
        basis = torch.eye(width, dtype=torch.float64)
        return ModelSetup(model=rotate(evaluation.model, basis, seed=evaluation.seed))

    def what(self, evaluation, scheme):
        return "the residual stream in a random orthogonal basis, norm gains folded in"


class Unplug(Remedy):
    name = "unplug"
    control_is = "as many random neurons unplugged"

    def apply(self, evaluation, schemes, to):
        neurons = evaluation.super_neurons
        if not neurons:
            return "no super neuron writes a sink"
        return replace(to, model=unplug(to.model, neurons), neurons=neurons)

    def control(self, evaluation, schemes):
        others = matched_neurons(anatomy_of(evaluation.model), evaluation.super_neurons, (), seed=evaluation.seed)
        return ModelSetup(model=unplug(evaluation.model, others))


class Scales(Remedy):
    name = "scales"
    control_is = "the same changes of range in other modules"

    def acts_on(self, scheme):
        return scheme.what == "linear" and scheme.needs_ranges()

    def apply(self, evaluation, schemes, to):
        is_alone = to.model is evaluation.model and to.prefix is None and not to.modules_in_16_bits
        by_error, better = evaluation.better_ranges if is_alone else evaluation.better_ranges_of(to)
        if better == by_error:
            return "the usual scales, of the least squared error, do as well"
        return replace(to, ranges=better)

    def control(self, evaluation, schemes):
        by_error, better = evaluation.better_ranges
        names = list(by_error)
        order = torch.randperm(len(names), generator=torch.Generator().manual_seed(evaluation.seed)).tolist()
        shares = [better[names[number]] / by_error[names[number]] for number in order]
        ranges = {name: share * by_error[name] for name, share in zip(names, shares, strict=True)}
        return ModelSetup(model=evaluation.model, ranges=ranges)


@torch.no_grad()
def unplug(model: Model, neurons: Iterable[NeuronLike]) -> Any:
    """A copy of the model in which these neurons write nothing; it saves and loads as a plain model of its family.

    What a neuron writes into the residual stream is its column of the down projection; there it becomes zero.
    """
    unplugged = copy.deepcopy(bare_model(model))
    anatomy = anatomy_of(unplugged)
    for (layer, expert), indices in checked_neurons(anatomy, neurons).items():
        weight_EF = anatomy.layers[layer].group_weight(expert)
        weight_EF[:, list(indices)] = 0
        # A module that computes its weights gives a new tensor each time, so what was set in it is lost.
        if not torch.equal(anatomy.layers[layer].group_weight(expert), weight_EF):
            raise InputError(
                f"The down projection of layer {layer} computes its weights, so they cannot be set. Take the neurons "
                "out with `ablate_neurons`."
            )
    return unplugged


EXEMPT, PREFIX, ROTATE = Exempt(), Prefixed(), Rotate()
TRIED_BY_AUDIT: tuple[Remedy, ...] = (EXEMPT, ROTATE, PREFIX, KeepTokens())
"""What engines load first, then experiments."""
BY_OPTION: dict[str, Remedy] = {
    "unplug": Unplug(),
    "rotate": ROTATE,
    "prefix": PREFIX,
    "exempt": EXEMPT,
    "scales": Scales(),
}
"""Those that `remedy` can do, in the order in which they are put together. The first change the weights, and what
follows is found for the changed model; a model that cannot be rotated is refused before the searches, which take
minutes."""
