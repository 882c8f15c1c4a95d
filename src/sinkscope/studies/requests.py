"""Interventions asked for in words, such as `amplify 10:4` or `ablate 2:90`, and what stands in for each as a control.

The control changes as much as the intervention and leaves out what the chain says matters: a mask hides the token from
itself instead of all others, amplification scales the whole aggregation, units are matched random ones. Where nothing
of the kind exists, the control is the untouched model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sinkscope.arguments import whole_numbers
from sinkscope.errors import InputError
from sinkscope.interventions.aggregation_edit import AggregationEdit
from sinkscope.interventions.dimension_edit import clamp, set_dimensions
from sinkscope.interventions.intervention import Intervention
from sinkscope.interventions.mask_edit import edit_mask, mask_to_self
from sinkscope.interventions.neuron_edit import ablate_neurons, densify_neurons, transplant_neurons
from sinkscope.models.anatomy import Anatomy, Unit
from sinkscope.models.loading import LoadedModel
from sinkscope.models.token_batches import TokenBatch
from sinkscope.studies.minimal_set import matched_units

AGGREGATION = {
    "amplify": "amplify_variance",
    "scale_norm": "scale_norm",
    "shift_mean": "shift_mean",
    "swap_deviation": "swap_deviation",
    "random_direction": "random_direction",
    "equalise": "equalise_variance",
}
MASKS = ("mask_to_self", "block", "allow")
BY_LAYER, BY_HEAD = (*MASKS, *AGGREGATION, "zero_dimension"), (*MASKS, *AGGREGATION)
"""What --layers and --heads choose for."""
NOTHING = "nothing"
"""The control where there is none of the kind: the untouched model."""
ABLATION = {"ablate": "zero", "ablate_mean": "mean", "ablate_resample": "resample"}
FORMS = {
    "mask_to_self": "POSITION, such as 10",
    "block": "QUERY:KEYS, such as 10:0-4",
    "allow": "QUERY:KEYS, such as 0:0-63",
    **dict.fromkeys(
        ("amplify", "scale_norm", "shift_mean", "swap_deviation", "random_direction"), "POSITION:FACTOR, such as 10:4"
    ),
    "equalise": "POSITION, such as 0",
    **dict.fromkeys((*ABLATION, "densify"), "LAYER:NEURON or LAYER:EXPERT:NEURON, such as 2:90"),
    "transplant": "LAYER:NEURON@SOURCE:TARGET, such as 2:90@0:10",
    "zero_dimension": "DIMENSION@POSITION, such as 447@0",
    "clamp_neuron": "LAYER:NEURON@POSITION, such as 2:90@10",
    "clamp_dimension": "DIMENSION@POSITION, such as 447@10",
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What interventions are made with."""

    loaded: LoadedModel
    anatomy: Anatomy
    batch: TokenBatch
    calibration: TokenBatch
    last_layer: int
    """The birth of disparity: aggregation edits act up to it unless layers are given."""
    excluded: Sequence[Unit]
    """Units that a control must not take."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One kind of intervention with everything it is asked to act on."""

    kind: str
    values: tuple[tuple, ...]
    layers: tuple[int, ...] | None
    heads: tuple[int, ...] | None

    def positions(self) -> list[int]:
        """The positions that it acts on."""
        if self.kind in BY_HEAD:
            return [value[0] for value in self.values]
        if self.kind == "transplant":
            return [target for _, _, target in self.values]
        return [value[1] for value in self.values] if "dimension" in self.kind or "clamp" in self.kind else []

    @property
    def control_is(self) -> str:
        """What stands in for it, in words."""
        if self.kind == "mask_to_self":
            return "the token is hidden from itself"
        if self.kind in AGGREGATION and self.kind not in ("scale_norm", "equalise"):
            return "its whole aggregation is scaled by the factor"
        if self.kind in (*ABLATION, "densify", "transplant"):
            return "as many random units, matched in size"
        return NOTHING

    def make(self, setting: Setting, *, control: bool) -> list[Any]:
        """The interventions, or what stands in for them."""
        model = setting.loaded
        if control and self.control_is == NOTHING:
            return []
        if self.kind in MASKS:
            return [self._mask(model, value, control) for value in self.values]
        if self.kind in AGGREGATION:
            return [self._aggregation(setting, value, control) for value in self.values]
        if self.kind in (*ABLATION, "densify", "transplant"):
            return self._units(setting, control)
        if self.kind == "zero_dimension":
            return [
                set_dimensions(model, [dimension], positions=position, layers=self.layers)
                for dimension, position in self.values
            ]
        return [
            clamp(model, setting.batch, neurons=[value], positions=position)
            if self.kind == "clamp_neuron"
            else clamp(model, setting.batch, dimensions=[value], positions=position)
            for value, position in self.values
        ]

    def _mask(self, model: LoadedModel, value: tuple, control: bool) -> Intervention:
        where = {"layers": self.layers, "heads": self.heads}
        if self.kind == "mask_to_self":
            position = value[0]
            return (
                edit_mask(model, position, "block", position, **where)
                if control
                else mask_to_self(model, position, **where)
            )
        return edit_mask(model, value[0], self.kind, value[1], **where)  # type: ignore[arg-type]

    def _aggregation(self, setting: Setting, value: tuple, control: bool) -> Intervention:
        position, factor = value if len(value) > 1 else (*value, 1.0)
        formula = "scale_norm" if control else AGGREGATION[self.kind]
        layers = self.layers if self.layers is not None else range(setting.last_layer + 1)
        return AggregationEdit(
            setting.loaded,
            formula,
            position,
            factor,
            calibration=setting.calibration,
            layers=layers,
            heads=self.heads,
        )

    def _units(self, setting: Setting, control: bool) -> list[Intervention]:
        units = [value[0] for value in self.values]
        if self.kind != "transplant":
            units = list(dict.fromkeys(units))  # named twice is removed once, and so is its control
        if control:
            units = matched_units(setting.anatomy, units, setting.excluded, seed=0)
        if self.kind == "transplant":
            return [
                transplant_neurons(setting.loaded, [unit], source, target)
                for unit, (_, source, target) in zip(units, self.values, strict=False)
            ]
        if self.kind == "densify":
            return [densify_neurons(setting.loaded, units)]
        mode: Any = ABLATION[self.kind]
        return [ablate_neurons(setting.loaded, units, mode, calibration=setting.calibration)]


def parsed(asked: Mapping[str, Sequence[str]], *, layers: str | None, heads: str | None) -> list[Request]:
    """The requests in words, as requests; refuses what cannot be read."""
    if not asked:
        raise InputError(
            expected="at least one intervention",
            found="none",
            next_step="Give one, such as --mask-to-self 10; 'sinkscope intervene --help' lists them",
        )
    for option, chosen, kinds in (("layers", layers, BY_LAYER), ("heads", heads, BY_HEAD)):
        if chosen is not None and not set(kinds) & set(asked):
            raise InputError(
                expected=f"an intervention that --{option} can choose {option} for: {_options(kinds)}",
                found=_options(asked),
                next_step=f"Leave --{option} out",
            )
    chosen_layers = None if layers is None else tuple(_read(layers, "layers", "numbers such as 0-2", whole_numbers))
    chosen_heads = None if heads is None else tuple(_read(heads, "heads", "numbers such as 0,3", whole_numbers))
    return [
        Request(
            kind=kind,
            values=tuple(_read(text, kind, FORMS[kind], lambda t, k=kind: _value(k, t)) for text in texts),
            layers=chosen_layers,
            heads=chosen_heads,
        )
        for kind, texts in asked.items()
    ]


def _read(text: str, option: str, form: str, reader: Any) -> Any:
    try:
        return reader(text)
    except ValueError:
        raise InputError(
            expected=f"{_options([option])} as {form}",
            found=f"'{text}'",
            next_step="Write it in that form, several by repeating the option; 'sinkscope intervene --help' shows all",
        ) from None


def _value(kind: str, text: str) -> tuple:
    if kind in ("mask_to_self", "equalise"):
        return (int(text),)
    if kind in ("block", "allow"):
        query, keys = text.split(":")
        return int(query), whole_numbers(keys)
    if kind in AGGREGATION:
        position, factor = text.split(":")
        return int(position), float(factor)
    if kind in (*ABLATION, "densify"):
        return (_unit(text),)
    if kind == "transplant":
        unit, places = text.split("@")
        source, target = places.split(":")
        return _unit(unit), int(source), int(target)
    item, position = text.split("@")
    return (_unit(item) if kind == "clamp_neuron" else int(item)), int(position)


def _unit(text: str) -> Unit:
    numbers = [int(part) for part in text.split(":")]
    if len(numbers) == 2:
        return Unit(numbers[0], None, numbers[1])
    layer, expert, neuron = numbers
    return Unit(layer, expert, neuron)


def _options(kinds: Iterable[str]) -> str:
    return ", ".join(f"--{kind.replace('_', '-')}" for kind in kinds)
