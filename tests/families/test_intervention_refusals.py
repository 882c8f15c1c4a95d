"""Interventions on nothing change no bit, every way out of an intervention leaves the model as it was, and what cannot
be honoured is refused with what is allowed."""

import contextlib
import functools

import pytest
import torch
from tiny_models import CONFIGURATIONS, tiny_model

from sinkscope.errors import InputError
from sinkscope.interventions.aggregation import (
    ChangeAggregation,
    amplify_variance,
    equalise_variance,
    random_direction,
    scale_norm,
    shift_mean,
    swap_deviation,
)
from sinkscope.interventions.base import Intervention, Place, together
from sinkscope.interventions.mask import edit_mask, mask_to_self
from sinkscope.interventions.neurons import ablate_neurons, densify_neurons, transplant_neurons
from sinkscope.interventions.residual import clamp, set_dimensions
from sinkscope.models.anatomy import SHARED_EXPERT, Neuron, anatomy_of
from sinkscope.models.given_ids import given_batch
from sinkscope.models.loading import LoadedModel, load
from sinkscope.tracing.replay import Replay
from sinkscope.tracing.trace import trace

B, T = 3, 24
IDS = torch.randint(3, 97, (B, T), generator=torch.Generator().manual_seed(0))
CALIBRATION = given_batch(torch.randint(3, 97, (64, T), generator=torch.Generator().manual_seed(1)))

model_of = functools.cache(tiny_model)


@torch.no_grad()
def logits(model, ids=IDS):
    return model(ids).logits


def state(model) -> dict:
    """What an intervention may change of a model, beside its weights: hooks, mode and attention."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
    hooks = {name: sum(len(getattr(module, name)) for module in model.modules()) for name in names}
    return {**hooks, "training": model.training, "attention": model.config._attn_implementation}


@contextlib.contextmanager
def left_as_it_was(model):
    """Checks that logits, to the bit, hooks and configuration are the same behind the block."""
    before, untouched = logits(model), state(model)
    yield before
    assert state(model) == untouched
    assert torch.equal(logits(model), before)
    # No edit is left in a context variable either: a trace reads no edited row, and a calibration is not refused.
    amplify_variance(model, 1, 2.0, calibration=CALIBRATION, layers=[0])


def first_neurons(model) -> list[Neuron]:
    """Neurons of every group of the first two layers."""
    layers = anatomy_of(model).layers[:2]
    return [Neuron(layer.index, expert, 3) for layer in layers for expert, _ in layer.down_weights()]


def one_of_each(model) -> list:
    """Interventions of every kind that do not conflict."""
    neurons = first_neurons(model)
    return [
        mask_to_self(model, 10),
        amplify_variance(model, 5, 3.0, calibration=CALIBRATION),
        random_direction(model, 6, 3.0, calibration=CALIBRATION, layers=[1]),
        ablate_neurons(model, neurons, positions=7),
        transplant_neurons(model, neurons, 0, 8),
        densify_neurons(model, neurons),
        set_dimensions(model, [7, 19], positions=9),
        clamp(model, IDS, neurons=neurons, dimensions=[7], positions=11),
    ]


# On nothing


def on_nothing(model) -> dict[str, Intervention]:
    calibrated = dict(calibration=CALIBRATION)
    return {
        "amplify by 1": amplify_variance(model, 1, 1.0, **calibrated),
        "scale by 1": scale_norm(model, 2, 1.0, **calibrated),
        "shift by 1": shift_mean(model, 3, 1.0, **calibrated),
        "swap by 1": swap_deviation(model, 4, 1.0, **calibrated),
        "random by 1": random_direction(model, 5, 1.0, **calibrated),
        "amplify no layer": amplify_variance(model, 5, 4.0, **calibrated, layers=[]),
        "equalise no head": equalise_variance(model, 0, **calibrated, heads=[]),
        "amplify no sequence": amplify_variance(model, 5, 4.0, **calibrated, sequences=[]),
        "mask no layer": mask_to_self(model, 5, layers=[]),
        "mask no head": mask_to_self(model, 5, heads=[]),
        "mask no sequence": mask_to_self(model, 5, sequences=[]),
        "mask no query": edit_mask(model, [], "only", [0]),
        "allow no key": edit_mask(model, 5, "allow", []),
        "block no key": edit_mask(model, 5, "block", []),
        "ablate nothing": ablate_neurons(model, []),
        "ablate nothing to its mean": ablate_neurons(model, [], "mean", **calibrated),
        "ablate nowhere": ablate_neurons(model, first_neurons(model), positions=[]),
        "transplant nothing": transplant_neurons(model, [], 0, 5),
        "densify nothing": densify_neurons(model, []),
        "zero no dimension": set_dimensions(model, []),
        "mean of no dimension": set_dimensions(model, [], "mean", **calibrated),
        "transplant no dimension": set_dimensions(model, [], "transplant", source=0),
        "zero nowhere": set_dimensions(model, [3], positions=[]),
    }


@pytest.mark.parametrize("family", CONFIGURATIONS)
def test_interventions_on_nothing_change_no_bit(family):
    model = model_of(family)
    with left_as_it_was(model) as before:
        interventions = on_nothing(model)
        for name, intervention in interventions.items():
            with intervention:
                assert torch.equal(logits(model), before), name
        with together(interventions.values()):  # nor do they conflict
            assert torch.equal(logits(model), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_interventions_on_nothing_change_no_bit_of_another_dtype(dtype):
    model = model_of("llama", dtype=dtype)
    with left_as_it_was(model) as before:
        for name, intervention in on_nothing(model).items():
            with intervention:
                assert torch.equal(logits(model), before), name


def test_what_acts_nowhere_has_no_first_layer():
    model = model_of("llama")
    by_one = {"amplify by 1", "scale by 1", "shift by 1", "swap by 1", "random by 1"}
    for name, intervention in on_nothing(model).items():
        assert intervention.first_layer == (0 if name in by_one else None), name
    assert mask_to_self(model, 5, layers=[2, 1]).first_layer == 1


# Restoring


@pytest.mark.parametrize("family", CONFIGURATIONS)
def test_every_way_out_restores_the_model(family):
    model = model_of(family)
    with left_as_it_was(model) as before:
        interventions = one_of_each(model)
        for intervention in interventions:
            with intervention:
                assert not torch.equal(logits(model), before), intervention  # control: each does act
            assert torch.equal(logits(model), before), intervention
        with together(interventions):
            inside = logits(model)
        with together(interventions):  # once more, each object used again
            assert torch.equal(logits(model), inside)
        with pytest.raises(ValueError, match="inside the block"), together(interventions):
            raise ValueError("inside the block")
        with pytest.raises(InputError, match="set the mask"), together([*interventions, mask_to_self(model, 10)]):
            pytest.fail("the second mask is refused")


def _interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("family", ["llama", "falcon", "deepseek_v3"])
def test_an_interrupt_within_the_pass_restores_the_model(family):
    model = model_of(family)
    with left_as_it_was(model):
        hook = anatomy_of(model).layers[1].output_projection.register_forward_pre_hook(_interrupt)
        with pytest.raises(KeyboardInterrupt), together(one_of_each(model)[:1]):
            logits(model)
        with pytest.raises(KeyboardInterrupt), mask_to_self(model, 10):
            trace(model, IDS)
        # Also while an intervention is being entered: its own pass over the calibration batch ends.
        with pytest.raises(KeyboardInterrupt), amplify_variance(model, 5, 3.0, calibration=CALIBRATION):
            pytest.fail("not entered")
        hook.remove()


class _Failing(Intervention):
    """Fails when half of its hooks are there."""

    def __init__(self, model) -> None:
        super().__init__(model, Place(on="nothing", layers=(0,)))

    def opening(self, stack, acted) -> None:
        stack.callback(self.layers()[0].block.register_forward_pre_hook(lambda *_: None).remove)
        raise OSError("while entering")


def test_an_exception_while_entering_restores_the_model():
    model = model_of("llama")
    with left_as_it_was(model) as before:
        with pytest.raises(OSError, match="while entering"), together([mask_to_self(model, 10), _Failing(model)]):
            pytest.fail("not entered")
        # A clamp of two things whose second is refused: the first must not stay on.
        both = clamp(model, IDS, neurons=first_neurons(model), dimensions=[7])
        with mask_to_self(model, 10):
            masked = logits(model)
            refused = pytest.raises(InputError, match="set the residual stream")
            with set_dimensions(model, [7], layers=[2]), refused, both:
                pytest.fail("not entered")
            assert torch.equal(logits(model), masked)
            with both:  # and it can be entered later
                assert not torch.equal(logits(model), masked)
        assert torch.equal(logits(model), before)


def test_two_models_and_a_loaded_one():
    """What is on for one model is not on for another; a loaded model is as good as its module."""
    one, two = model_of("llama"), model_of("llama", seed=1)
    with left_as_it_was(one), left_as_it_was(two) as before:
        loaded = load(one)
        assert isinstance(loaded, LoadedModel)
        with mask_to_self(loaded, 10):
            assert torch.equal(logits(two), before)
            with mask_to_self(two, 10):
                assert not torch.equal(logits(two), before)
            for make in (
                lambda model: ablate_neurons(model, [Neuron(0, None, 3)], "mean", calibration=CALIBRATION),
                lambda model: set_dimensions(model, [7], "mean", calibration=CALIBRATION),
                lambda model: clamp(model, IDS, norms=True),
                densify_first,
            ):
                with make(loaded):
                    from_loaded = logits(one)
                with make(one):
                    assert torch.equal(logits(one), from_loaded)


def densify_first(model):
    return densify_neurons(model, [Neuron(0, None, 3)])


# Conflicts

CONFLICTS = {
    "mask": (lambda m: mask_to_self(m, 5), lambda m: edit_mask(m, [4, 5], "block", 0)),
    "aggregation": (lambda m: amplify(m, 5), lambda m: scale_norm(m, 5, 2.0, calibration=CALIBRATION, layers=[1])),
    "neurons": (
        lambda m: ablate_neurons(m, [Neuron(1, None, 3)]),
        lambda m: transplant_neurons(m, [Neuron(1, None, 2), Neuron(1, None, 3)], 0, 5),
    ),
    "output vectors": (densify_first, densify_first),
    "residual stream": (
        lambda m: set_dimensions(m, [3]),
        lambda m: clamp(m, IDS, dimensions=[1, 3], positions=5),
    ),
    "norms and dimensions": (lambda m: set_dimensions(m, [3]), lambda m: clamp(m, IDS, norms=True)),
}
COMPOSED = {
    "masks of two positions": (lambda m: mask_to_self(m, 5), lambda m: mask_to_self(m, 6)),
    "masks of two heads": (lambda m: mask_to_self(m, 5, heads=0), lambda m: mask_to_self(m, 5, heads=[1, 2])),
    "masks of two layers": (lambda m: mask_to_self(m, 5, layers=[0]), lambda m: mask_to_self(m, 5, layers=[1, 2])),
    "masks of two sequences": (lambda m: mask_to_self(m, 5, sequences=0), lambda m: mask_to_self(m, 5, sequences=1)),
    "mask and aggregation": (lambda m: mask_to_self(m, 5), lambda m: amplify(m, 5)),
    "aggregations of two positions": (lambda m: amplify(m, 5), lambda m: amplify(m, 6)),
    "two neurons": (
        lambda m: ablate_neurons(m, [Neuron(1, None, 3)]),
        lambda m: transplant_neurons(m, [Neuron(1, None, 2), Neuron(2, None, 3)], 0, 5),
    ),
    "neuron and output vector": (lambda m: ablate_neurons(m, [Neuron(0, None, 3)], positions=4), densify_first),
    "two dimensions": (lambda m: set_dimensions(m, [3]), lambda m: set_dimensions(m, [4])),
}


def amplify(model, position: int) -> ChangeAggregation:
    return amplify_variance(model, position, 3.0, calibration=CALIBRATION)


@pytest.mark.parametrize("name", CONFLICTS)
def test_two_that_set_the_same_thing_are_refused(name):
    model = model_of("llama")
    with left_as_it_was(model):
        first, second = (make(model) for make in CONFLICTS[name])
        for pair in ((first, second), (second, first)):
            with pytest.raises(InputError) as error, together(pair):
                pytest.fail("the second is refused")
            assert f"Both {pair[0].name} and {pair[1].name} set" in str(error.value)
            assert "same place. Leave one of them out, or move it" in str(error.value)


@pytest.mark.parametrize("name", COMPOSED)
def test_two_at_different_places_compose(name):
    model = model_of("llama")
    with left_as_it_was(model):
        first, second = (make(model) for make in COMPOSED[name])
        with together([first, second]):
            both = logits(model)
        with together([second, first]):
            assert torch.allclose(logits(model), both, rtol=0, atol=1e-4 * float(both.abs().max()))
        for one in (first, second):  # control: each adds to the other
            with one:
                assert float((logits(model) - both).abs().max()) > 1e-3 * float(both.abs().max())


# What cannot be honoured

U = Neuron(0, None, 3)
"""In deepseek_v3 layer 0 is dense; layers 1 and 2 hold four experts and a shared one."""
REFUSED = {
    # Positions and sequences of the text, known when the model runs.
    "mask outside": (lambda m: mask_to_self(m, 24), "no position 24", "from 0 to 23"),
    "mask before the text": (lambda m: mask_to_self(m, -1), "no position -1", "the first one is 0"),
    "mask at digits": (lambda m: mask_to_self(m, "10"), "'10' is not a whole number", "such as 10 or [10, 12]"),
    "mask at a fraction": (lambda m: mask_to_self(m, [10.7]), "10.7 is not a whole number", "such as 10 or [10, 12]"),
    "mask at a truth": (lambda m: mask_to_self(m, True), "True is not a whole number", "such as 10 or [10, 12]"),
    "mask at two places": (lambda m: mask_to_self(m, [10, 12]), "one position, not [10, 12]", "Open one for each"),
    "mask nowhere": (lambda m: mask_to_self(m, None), "one position, not None", "Open one for each"),
    "amplify at digits": (lambda m: amplify(m, "10"), "'10' is not a whole number", "such as 10 or [10, 12]"),
    "ablate at digits": (
        lambda m: ablate_neurons(m, [U], positions="10"),
        "'10' is not a whole number",
        "such as 10 or [10, 12]",
    ),
    "ablate in layers of digits": (
        lambda m: mask_to_self(m, 5, layers="12"),
        "'12' is not a whole number",
        "such as 10 or [10, 12]",
    ),
    "key outside": (lambda m: edit_mask(m, 5, "allow", [3, 30]), "no position 30", "from 0 to 23"),
    "key before the text": (lambda m: edit_mask(m, 5, "allow", -1), "no position -1", "from 0 to 23"),
    "mask of no such sequence": (lambda m: mask_to_self(m, 5, sequences=3), "no sequence 3", "from 0 to 2"),
    "amplify outside": (lambda m: amplify(m, 24), "no position 24", "from 0 to 23"),
    "amplify before the text": (lambda m: amplify(m, -2), "no position -2", "the first one is 0"),
    "amplify no such sequence": (
        lambda m: amplify_variance(m, 5, 2.0, calibration=CALIBRATION, sequences=[0, 9]),
        "no sequence 9",
        "from 0 to 2",
    ),
    "ablate outside": (lambda m: ablate_neurons(m, [U], positions=[1, 24]), "no position 24", "from 0 to 23"),
    "ablate an expert outside": (
        lambda m: ablate_neurons(m, [Neuron(1, 2, 3)], positions=24),
        "no position 24",
        "from 0 to 23",
    ),
    "ablate no such sequence": (lambda m: ablate_neurons(m, [U], sequences=3), "no sequence 3", "from 0 to 2"),
    "transplant from outside": (lambda m: transplant_neurons(m, [U], 24, 5), "no position 24", "from 0 to 23"),
    "transplant an expert from outside": (
        lambda m: transplant_neurons(m, [Neuron(1, 2, 3)], 24, 5),
        "no position 24",
        "from 0 to 23",
    ),
    "transplant to outside": (lambda m: transplant_neurons(m, [U], 0, 24), "no position 24", "from 0 to 23"),
    "transplant onto itself": (lambda m: transplant_neurons(m, [U], 5, 5), "two different positions", "5 and 5"),
    "dimensions outside": (lambda m: set_dimensions(m, [3], positions=24), "no position 24", "from 0 to 23"),
    "dimensions of no such sequence": (lambda m: set_dimensions(m, [3], sequences=3), "no sequence 3", "from 0 to 2"),
    "dimensions from outside": (
        lambda m: set_dimensions(m, [3], "transplant", source=24),
        "no position 24",
        "from 0 to 23",
    ),
    "clamp outside": (lambda m: clamp(m, IDS, norms=True, positions=24), "no position 24", "from 0 to 23"),
    # Parts of the model.
    "no such layer": (lambda m: mask_to_self(m, 5, layers=[0, 3]), "no layer 3", "from 0 to 2"),
    "a negative layer": (lambda m: set_dimensions(m, [3], layers=[-1]), "no layer -1", "from 0 to 2"),
    "no such layer to amplify": (
        lambda m: amplify_variance(m, 5, 2.0, calibration=CALIBRATION, layers=[7]),
        "no layer 7",
        "from 0 to 2",
    ),
    "no such head": (lambda m: mask_to_self(m, 5, heads=[0, 4]), "no head 4", "from 0 to 3"),
    "a neuron of no such layer": (lambda m: ablate_neurons(m, [Neuron(3, None, 0)]), "no layer 3", "from 0 to 2"),
    "no such neuron": (lambda m: ablate_neurons(m, [Neuron(0, None, 80)]), "no neuron 80 in layer 0", "from 0 to 79"),
    "no such neuron of an expert": (lambda m: densify_neurons(m, [Neuron(1, 0, 24)]), "no neuron 24", "from 0 to 23"),
    "no such neuron of the shared expert": (
        lambda m: transplant_neurons(m, [Neuron(1, SHARED_EXPERT, 24)], 0, 5),
        "no neuron 24",
        "from 0 to 23",
    ),
    "no such expert": (
        lambda m: ablate_neurons(m, [Neuron(1, 4, 0)]),
        "the experts 0, 1, 2, 3, -1, and expert 4",
        "layer:expert",
    ),
    "an expert of a dense layer": (lambda m: densify_neurons(m, [Neuron(0, 1, 0)]), "no expert 1", "layer:neuron"),
    "a dense neuron among experts": (
        lambda m: ablate_neurons(m, [Neuron(2, None, 0)]),
        "no expert was named",
        "layer:expert",
    ),
    "a clamped neuron that is not there": (
        lambda m: clamp(m, IDS, neurons=[Neuron(0, None, -1)]),
        "no neuron -1 in layer 0",
        "from 0 to 79",
    ),
    "no such dimension": (lambda m: set_dimensions(m, [3, 48]), "no dimension 48", "from 0 to 47"),
    "a negative dimension": (lambda m: set_dimensions(m, [-1]), "no dimension -1", "from 0 to 47"),
    # What an intervention needs.
    "factor not a number": (
        lambda m: amplify_variance(m, 5, float("nan"), calibration=CALIBRATION),
        "factor must be a finite number",
        "nan",
    ),
    "factor without end": (
        lambda m: shift_mean(m, 5, float("-inf"), calibration=CALIBRATION),
        "factor must be a finite number",
        "-inf",
    ),
    "too few to calibrate on": (
        lambda m: amplify_variance(m, 5, 2.0, calibration=given_batch(CALIBRATION.ids[:63])),
        "has 63 sequences",
        "at least 64",
    ),
    "every key hidden": (lambda m: edit_mask(m, 5, "block", range(6)), "no key at all", "at least its own key"),
    "only no key": (lambda m: edit_mask(m, 5, "only", []), "no key at all", "at least its own key"),
    "no such mask": (lambda m: edit_mask(m, 5, "hide", 0), "only, allow, block", "'hide'"),
    "no such ablation": (lambda m: ablate_neurons(m, [U], "none"), "zero, mean, resample", "'none'"),
    "no such setting": (lambda m: set_dimensions(m, [3], "one"), "zero, mean, transplant", "'one'"),
    "a setting to no mean": (lambda m: set_dimensions(m, [3], "mean"), "a `calibration` batch", "'mean'"),
    "a setting from nowhere": (lambda m: set_dimensions(m, [3], "transplant"), "a `source` position", "'transplant'"),
    "a mean of a shorter text": (
        lambda m: set_dimensions(m, [3], "mean", calibration=given_batch(CALIBRATION.ids[:, :20])),
        "texts of 20 tokens",
        "has 24. Calibrate on",
    ),
    "a clamp of nothing": (lambda m: clamp(m, IDS), "something to hold", "`neurons`, `dimensions` or `norms`"),
    "a clamp of one sequence": (lambda m: clamp(m, IDS[:1], neurons=[U]), "a batch of 1 x 24 tokens", "3 x 24"),
    "a clamp of an expert in a shorter text": (
        lambda m: clamp(m, IDS[:, :20], neurons=[Neuron(1, 2, 3)]),
        "a batch of 3 x 20 tokens",
        "3 x 24",
    ),
    "a clamp of the norms of one sequence": (lambda m: clamp(m, IDS[:1], norms=True), "a batch of 1 x 24", "3 x 24"),
    "a clamp of the dimensions of one": (lambda m: clamp(m, IDS[:1], dimensions=[3]), "a batch of 1 x 24", "3 x 24"),
    "a clamp of dimensions and norms": (
        lambda m: clamp(m, IDS, dimensions=[3], norms=True),
        "set the residual stream",
        "Leave one of them out",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused(name):
    make, wrong, advice = REFUSED[name]
    model = model_of("deepseek_v3")
    with left_as_it_was(model):
        with pytest.raises(InputError) as error, make(model):
            logits(model)
        assert wrong in str(error.value)
        assert advice in str(error.value)


def test_a_position_beyond_a_shorter_text_is_refused_when_it_runs():
    """The calibration batch has it, the text has not."""
    model = model_of("llama")
    with (
        left_as_it_was(model),
        amplify(model, 20),
        pytest.raises(InputError, match=r"no position 20\. Choose from 0 to 18"),
    ):
        trace(model, IDS[:, :19])


def test_untouched_values_are_untouched_whatever_is_on():
    """A clamp, a mean and a resample may be made while an intervention is on: what they read is read without it."""
    model = model_of("deepseek_v3")
    neurons = first_neurons(model)
    replay = Replay(anatomy_of(model), model, IDS, neurons, (7,))
    with left_as_it_was(model), together(one_of_each(model)[:4]) as first_layer:
        held = clamp(model, IDS, neurons=neurons, dimensions=[7])
        for group, values in held.clamps[0].held.items():
            assert torch.equal(values, replay.baseline.activations[group])
        assert torch.equal(held.clamps[1].held_LBTM, replay.baseline.dimensions_LBTM)
        # Control: what the model does now is something else.
        assert not torch.equal(replay.read(first_layer).dimensions_LBTM, replay.baseline.dimensions_LBTM)


def test_values_drawn_by_place_in_the_batch_are_not_split_into_chunks():
    """Control: the mean is the same of every sequence."""
    model = tiny_model("llama")
    drawn, mean = (
        ablate_neurons(model, first_neurons(model), mode, calibration=CALIBRATION) for mode in ("resample", "mean")
    )
    with drawn, pytest.raises(InputError, match="ablate_neurons acts on numbered sequences, so the whole batch"):
        trace(model, IDS, chunk_tokens=IDS.shape[1])
    with mean:
        trace(model, IDS, chunk_tokens=IDS.shape[1])
