"""The kinds of interventions that can be asked for in words, such as `amplify 10:4` or `ablate 2:90`.

`KINDS` is the one table of them, and a new kind is one entry, a `Kind`. What follows the name comes from it alone:

- `form`, `example`, `does`, `read`: how it is written, its help on the command line, and its parser. `acts_at`,
  `second` and `names_neuron` say what each of the parsed values is.
- `make`: makes the interventions, context managers of `mask`, `aggregation`, `matching`, `neurons` and `residual`.
- `check`: a function of `checks`, which says what must have come about where it acts; None for kinds that
  set neurons or dimensions to a value, which cannot miss it. The condition of a study that does the same names the
  same function.
- `control`, `control_is`: makes what stands in its place under the control, and says it in words. A control changes as
  much as the intervention and leaves out what the chain says matters: a mask hides the token from itself instead of all
  others, amplification shifts the mean and leaves the variance, as in a study, and other interventions on the
  aggregation scale it whole; neurons are matched random ones. Where nothing of the kind exists, it is the baseline. One
  that moves elsewhere leaves out what any other of them acts on: `Setting.free_positions`, `Setting.neurons`. Where no
  position is free it makes nothing, and is reported as nothing.

torch is imported only when something is made, since the command line reads the table for its help.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sinkscope.arguments import neuron_of_text, whole_numbers
from sinkscope.interventions import checks

if TYPE_CHECKING:
    from sinkscope.models.anatomy import Anatomy, Neuron
    from sinkscope.models.loaded import LoadedModel
    from sinkscope.models.token_batches import TokenBatch

NOTHING = "nothing"
"""The control where there is none of the kind: the baseline."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What interventions are made with."""

    loaded: LoadedModel
    anatomy: Anatomy
    batch: TokenBatch
    calibration: TokenBatch
    last_layer: int
    """The layer in which disparity appears: interventions on the aggregation act up to it unless layers are chosen."""
    excluded: Sequence[Neuron]
    """Neurons of the chain, which a control must not take."""
    positions: Sequence[int] = ()
    """The positions that any of the interventions acts on."""
    neurons: Sequence[Neuron] = ()
    """The neurons that any of them acts on."""

    @property
    def early_layers(self) -> list[int]:
        """The layers with attention up to `last_layer`; where a hybrid has none so early, the first one."""
        with_attention = [layer.index for layer in self.anatomy.attention_layers]
        return [layer for layer in with_attention if layer <= self.last_layer] or with_attention[:1]

    @property
    def free_positions(self) -> list[int]:
        """Positions that no intervention acts on: a control that moves elsewhere takes one of these."""
        return [position for position in range(self.batch.length) if position not in self.positions]


Make = Callable[[Setting, Sequence[tuple], dict[str, Any]], Sequence[Any]]
"""(setting, the parsed values, the layers and heads chosen, if any) -> interventions, in the order of the values."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of intervention."""

    form: str
    """How it is written, such as POSITION:FACTOR."""
    example: str
    does: str
    """What follows the form in the option's help."""
    read: Callable[[str], tuple]
    """Parses the text of one of them; ValueError if it cannot."""
    make: Make
    check: checks.Check | None = None
    """What must have come about where one acts, for a kind that acts at positions and makes one intervention for each
    value."""
    control: Make | None = None
    control_is: str = NOTHING
    """The control in words."""
    acts_at: Callable[[tuple], int] | None = None
    """The position that one acts on; None where it acts on all."""
    second: str | None = None
    """What the second of its parsed values is to a check: factor or keys."""
    names_neuron: bool = False
    """Whether the first of its parsed values is a neuron."""
    takes: tuple[str, ...] = ()
    """Which of layers and heads can be chosen."""

    @property
    def help(self) -> str:
        return f"{self.form}{self.does}."


# How each form is parsed


def _position(text: str) -> tuple:
    return (int(text),)


def _query_keys(text: str) -> tuple:
    query, keys = text.split(":")
    return int(query), tuple(whole_numbers(keys))


def _position_factor(text: str) -> tuple:
    position, factor = text.split(":")
    return int(position), float(factor)


def _neuron(text: str) -> tuple:
    return (neuron_of_text(text),)


def _placed(item: Callable[[str], Any], *, num_places: int) -> Callable[[str], tuple]:
    """Reads ITEM@POSITION or, with two places, ITEM@SOURCE:TARGET."""

    def read(text: str) -> tuple:
        name, places = text.split("@")
        positions = [int(position) for position in places.split(":")]
        if len(positions) != num_places:
            raise ValueError(text)
        return item(name), *positions

    return read


# What each kind makes


def _mask_to_self(setting, values, where):
    from sinkscope.interventions.mask import mask_to_self

    return [mask_to_self(setting.loaded, position, **where) for (position,) in values]


def _mask_but_self(setting, values, where):
    # Position 0 sees itself alone: the mask does nothing there, and without itself it would see no key.
    return _mask("block")(setting, [(position, position) for (position,) in values if position], where)


def _mask(mode: Any) -> Make:
    def make(setting, values, where):
        from sinkscope.interventions.mask import edit_mask

        return [edit_mask(setting.loaded, query, mode, keys, **where) for query, keys in values]

    return make


def _aggregation(formula: str, **side: bool) -> Make:
    def make(setting, values, where):
        from sinkscope.interventions.aggregation import ChangeAggregation

        where = {"layers": setting.early_layers, **side, **where}
        return [
            ChangeAggregation(setting.loaded, formula, *value, calibration=setting.calibration, **where)
            for value in values
        ]

    return make


def _match(*moments: str) -> Make:
    def make(setting, values, where):
        from sinkscope.interventions.matching import BASELINE, match_moments

        where = {
            "layers": setting.early_layers,
            "calibration": setting.calibration,
            **dict.fromkeys(moments, BASELINE),
            **where,
        }
        return [match_moments(setting.loaded, position, **where) for (position,) in values]

    return make


def _shift_mean_alone(**side: bool) -> Make:
    def make(setting, values, where):
        from sinkscope.interventions.matching import BASELINE, ShiftMeanAlone

        where = {"layers": setting.early_layers, "calibration": setting.calibration, **side, **where}
        return [ShiftMeanAlone(setting.loaded, *value, variance=BASELINE, **where) for value in values]

    return make


def _ablate(mode: Any) -> Make:
    def make(setting, values, where):
        from sinkscope.interventions.neurons import ablate_neurons

        # A neuron that is named twice is removed once.
        neurons = dict.fromkeys(neuron for (neuron,) in values)
        return [ablate_neurons(setting.loaded, neurons, mode, calibration=setting.calibration)]

    return make


def _densify(setting, values, where):
    from sinkscope.interventions.neurons import densify_neurons

    return [densify_neurons(setting.loaded, dict.fromkeys(neuron for (neuron,) in values))]


def _transplant(setting, values, where):
    from sinkscope.interventions.neurons import transplant_neurons

    return [transplant_neurons(setting.loaded, [neuron], source, target) for neuron, source, target in values]


def _on_matched_neurons(make: Make) -> Make:
    def control(setting, values, where):
        from sinkscope.interventions.neurons import matched_neurons

        values = list(dict.fromkeys(values))
        excluded = [*setting.excluded, *setting.neurons]
        matched = matched_neurons(setting.anatomy, [neuron for neuron, *_ in values], excluded, seed=0)
        # Where a layer has no other neuron left, there are fewer of them than values.
        return make(setting, [(neuron, *rest) for neuron, (_, *rest) in zip(matched, values, strict=False)], where)

    return control


def _zero_dimension(setting, values, where):
    from sinkscope.interventions.residual import set_dimensions

    return [set_dimensions(setting.loaded, [dimension], positions=at, **where) for dimension, at in values]


def _transplant_dimension(setting, values, where):
    from sinkscope.interventions.residual import set_dimensions

    return [
        set_dimensions(setting.loaded, [dimension], "transplant", source=source, positions=target, **where)
        for dimension, source, target in values
    ]


def _clamp(what: str) -> Make:
    def make(setting, values, where):
        from sinkscope.interventions.residual import clamp

        clamps = []
        for item, position in values:
            items: dict[str, Any] = {what: [item]}
            clamps.append(clamp(setting.loaded, setting.batch, **items, positions=position))
        return clamps

    return make


def _first(value: tuple) -> int:
    return value[0]


def _last(value: tuple) -> int:
    return value[-1]


_ROWS: dict[str, Any] = dict(acts_at=_first, takes=("layers", "heads"))
_KEYED: dict[str, Any] = dict(form="QUERY:KEYS", read=_query_keys, second="keys", **_ROWS)
_PLACED: dict[str, Any] = dict(form="POSITION", example="10", read=_position, **_ROWS)
_DOSED: dict[str, Any] = dict(form="POSITION:FACTOR", example="10:4", read=_position_factor, second="factor", **_ROWS)
_BY_SCALING: dict[str, Any] = dict(
    control=_aggregation("scale_norm"), control_is="its whole aggregation is scaled by the factor"
)
_NEURONS: dict[str, Any] = dict(
    form="LAYER:NEURON or LAYER:EXPERT:NEURON", example="2:90", read=_neuron, names_neuron=True
)


def _by_matched(make: Make) -> dict[str, Any]:
    """A kind that acts on neurons, with its control."""
    return dict(make=make, control=_on_matched_neurons(make), control_is="as many random neurons, matched in size")


KINDS: dict[str, Kind] = {
    "mask_to_self": Kind(
        does=" that may attend only to itself",
        make=_mask_to_self,
        check=checks.attends_only_to_itself,
        control=_mask_but_self,
        control_is="the token is hidden from itself",
        **_PLACED,
    ),
    "block": Kind(
        example="10:0-4",
        does=" that may no longer be attended to, such as 10:0-4",
        make=_mask("block"),
        check=checks.not_the_named_keys,
        **_KEYED,
    ),
    "allow": Kind(
        example="0:0-63", does=" that may be attended to, later keys too, such as 0:0-63", make=_mask("allow"), **_KEYED
    ),
    "only": Kind(
        example="10:9",
        does=" that alone may be attended to, such as 10:9",
        make=_mask("only"),
        check=checks.only_the_named_keys,
        **_KEYED,
    ),
    "amplify": Kind(
        does=", variance amplification",
        make=_aggregation("amplify_variance"),
        check=checks.variance_scaled,
        control=_shift_mean_alone(),
        control_is="its mean is shifted as far and its variance stays",
        **_DOSED,
    ),
    "amplify_before_norm": Kind(
        does=", the same before the norm on the aggregation, in models that have one",
        make=_aggregation("amplify_variance", before_norm=True),
        check=checks.variance_scaled,
        control=_shift_mean_alone(before_norm=True),
        control_is="its mean is shifted as far before the norm and its variance stays",
        **_DOSED,
    ),
    "scale_norm": Kind(
        does=", scales the whole aggregation",
        make=_aggregation("scale_norm"),
        check=checks.energy_scaled,
        **_DOSED,
    ),
    "shift_mean": Kind(
        does=", adds 1 - factor times the mean",
        make=_aggregation("shift_mean"),
        check=checks.variance_kept_at_first,
        **_DOSED,
        **_BY_SCALING,
    ),
    "swap_deviation": Kind(
        does=", with another sequence's deviation", make=_aggregation("swap_deviation"), **_DOSED, **_BY_SCALING
    ),
    "random_direction": Kind(
        does=", along a random direction", make=_aggregation("random_direction"), **_DOSED, **_BY_SCALING
    ),
    "equalise": Kind(
        does=" whose variance is brought down to that of later ones",
        make=_aggregation("equalise_variance"),
        check=checks.variance_of_later,
        **_PLACED,
    ),
    "match_variance": Kind(
        does=" whose variance is brought to its level in the baseline",
        make=_match("variance"),
        check=checks.variance_kept,
        **_PLACED,
    ),
    "match_energy": Kind(
        does=" whose energy is brought to its level in the baseline",
        make=_match("energy"),
        check=checks.energy_kept,
        **_PLACED,
    ),
    "match_moments": Kind(
        does=" whose variance and energy are brought to their baseline levels",
        make=_match("variance", "energy"),
        check=checks.both_kept,
        **_PLACED,
    ),
    "ablate": Kind(does=", set to zero", **_NEURONS, **_by_matched(_ablate("zero"))),
    "ablate_mean": Kind(does=", set to its mean", **_NEURONS, **_by_matched(_ablate("mean"))),
    "ablate_resample": Kind(does=", set to values of other tokens", **_NEURONS, **_by_matched(_ablate("resample"))),
    "densify": Kind(does=", whose output vector is spread over all dimensions", **_NEURONS, **_by_matched(_densify)),
    "transplant": Kind(
        form="LAYER:NEURON@SOURCE:TARGET",
        example="2:90@0:10",
        does=", its activation written at the target too",
        read=_placed(neuron_of_text, num_places=2),
        acts_at=_last,
        names_neuron=True,
        **_by_matched(_transplant),
    ),
    "zero_dimension": Kind(
        form="DIMENSION@POSITION",
        example="447@0",
        does=" of the residual stream, set to zero",
        read=_placed(int, num_places=1),
        make=_zero_dimension,
        acts_at=_last,
        takes=("layers",),
    ),
    "transplant_dimension": Kind(
        form="DIMENSION@SOURCE:TARGET",
        example="447@0:10",
        does=" of the residual stream, its values written at the target too",
        read=_placed(int, num_places=2),
        make=_transplant_dimension,
        acts_at=_last,
        takes=("layers",),
    ),
    "clamp_neuron": Kind(
        form="LAYER:NEURON@POSITION",
        example="2:90@10",
        does=" held at its baseline values",
        read=_placed(neuron_of_text, num_places=1),
        make=_clamp("neurons"),
        acts_at=_last,
        names_neuron=True,
    ),
    "clamp_dimension": Kind(
        form="DIMENSION@POSITION",
        example="447@10",
        does=" held at its baseline values",
        read=_placed(int, num_places=1),
        make=_clamp("dimensions"),
        acts_at=_last,
    ),
}
