"""The light reading of one batch under many conditions: against a trace, against the model's own loss, and a pass that
begins at a later layer against a whole one."""

import functools

import numpy as np
import pytest
import torch
from tiny_models import CONFIGURATIONS, PARTS, tiny_model

from sinkscope.errors import InputError
from sinkscope.interventions.aggregation import AGGREGATION, SetAggregation, amplify_variance, mean_aggregations
from sinkscope.interventions.base import Place, together
from sinkscope.interventions.mask import mask_to_self
from sinkscope.interventions.neurons import ablate_neurons, densify_neurons
from sinkscope.interventions.residual import clamp, set_dimensions
from sinkscope.models.anatomy import SHARED_EXPERT, Neuron, anatomy_of
from sinkscope.models.given_ids import given_batch
from sinkscope.models.loading import load
from sinkscope.tracing import layer_call
from sinkscope.tracing import replay as replay_module
from sinkscope.tracing.replay import BY_SEQUENCE, ConditionReading, Replay, next_token_loss, read_condition
from sinkscope.tracing.trace import trace

B, T = 3, 30
IDS = torch.randint(3, 97, (B, T), generator=torch.Generator().manual_seed(0))
CALIBRATION = given_batch(torch.randint(3, 97, (64, T), generator=torch.Generator().manual_seed(1)))
DIMENSIONS = (19, 7)

every_family = pytest.mark.parametrize("family", CONFIGURATIONS)


@functools.cache
def model_of(family: str):
    return tiny_model(family)


def last_neurons(model) -> list[Neuron]:
    """Neurons of every group of the last two layers, out of order."""
    layers = anatomy_of(model).layers[-2:]
    return [
        Neuron(layer.index, expert, neuron)
        for layer in layers
        for expert, _ in layer.down_weights()
        for neuron in (9, 3)
    ]


@functools.cache
def replay_of(family: str) -> Replay:
    model = model_of(family)
    layers = range(len(anatomy_of(model).layers))
    return Replay(anatomy_of(model), model, IDS, last_neurons(model), DIMENSIONS, restarts=layers, loss=True)


def conditions(family: str) -> list:
    """Interventions that act from the last layer but one, of every kind."""
    model = model_of(family)
    last = [len(anatomy_of(model).layers) - 2, len(anatomy_of(model).layers) - 1]
    neurons = last_neurons(model)
    return [
        mask_to_self(model, 10, layers=last),
        amplify_variance(model, 5, 3.0, calibration=CALIBRATION, layers=last),
        ablate_neurons(model, neurons[:2], positions=[0, 7]),
        densify_neurons(model, neurons[-2:]),
        set_dimensions(model, [4], layers=last, positions=8),
        clamp(model, IDS, neurons=neurons[2:], positions=10),
    ]


def assert_same_bits(found: ConditionReading, expected: ConditionReading) -> None:
    for name in (*BY_SEQUENCE, "dimensions_LBTM"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert found.activations.keys() == expected.activations.keys()
    for group, values in found.activations.items():
        assert torch.equal(values, expected.activations[group]), group
    assert found.loss_B is not None
    assert torch.equal(found.loss_B, expected.loss_B)


@every_family
def test_a_pass_from_a_later_layer_equals_a_whole_one_to_the_bit(family):
    replay, interventions = replay_of(family), conditions(family)
    num_layers = len(replay.anatomy.layers)
    *alone, held = interventions
    for some in (*([intervention] for intervention in alone), [alone[0], held]):
        with together(some) as first_layer:
            assert first_layer >= num_layers - 2
            later, whole = replay.read(first_layer, loss=True), replay._read(None, loss=True)
            assert_same_bits(later, whole)
        assert not torch.equal(later.residual_norm_LBT, replay.baseline.residual_norm_LBT)
    with held:  # values held while nothing changes them
        assert_same_bits(replay.read(held.first_layer, loss=True), replay.baseline)
    with together(alone[:2]) as first_layer:
        assert_same_bits(replay.read(first_layer, loss=True), replay._read(None, loss=True))
        # Control: begun a layer too late it is another reading.
        late = replay.read(num_layers - 1, loss=True)
        assert not torch.equal(late.received_LBS, replay.read(num_layers - 2).received_LBS)
    assert_same_bits(replay.read(0, loss=True), replay.baseline)


@every_family
def test_feed_forwards_from_a_later_position_give_the_same_reading(family):
    model, seen = model_of(family), []
    neurons = last_neurons(model)
    replay = Replay(anatomy_of(model), model, IDS, neurons, DIMENSIONS, keep_writes=True)
    edits = [mask_to_self(model, 10), set_dimensions(model, [4], layers=[0], positions=8)]
    with together(edits) as first_layer:
        whole, later, too_late = (replay.read(first_layer, position) for position in (0, 8, 11))
    edited = ablate_neurons(model, neurons, positions=9)
    with together([*edits, edited]) as first_layer:
        both = [replay.read(first_layer, position, changed_neurons=edited.place.layers) for position in (0, 8)]
    assert not all(torch.equal(both[0].activations[group], whole.activations[group]) for group in whole.activations)
    for one, other in ((later, whole), both):
        for name in (*BY_SEQUENCE, "dimensions_LBTM"):
            torch.testing.assert_close(getattr(one, name), getattr(other, name), equal_nan=True)
        torch.testing.assert_close(one.activations, other.activations)
    if not replay._cache.writes:  # a feed-forward that is no module of its own, or gives more than what it writes
        return
    assert not torch.equal(too_late.residual_norm_LBT, whole.residual_norm_LBT)
    feed_forward = replay.anatomy.layers[0].feed_forward
    handle = feed_forward.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    try:
        replay.read(0)
    finally:
        handle.remove()
    assert seen == [IDS.shape[1]]  # the hooks are gone


@every_family
def test_layers_before_the_restart_are_not_run(family):
    replay, calls = replay_of(family), []
    num_layers = len(replay.anatomy.layers)
    blocks = model_of(family).get_submodule(PARTS[family]["blocks"])
    handles = [
        block.register_forward_hook(lambda *_, layer=layer: calls.append(layer)) for layer, block in enumerate(blocks)
    ]
    before = replay.num_layer_passes
    try:
        on = mask_to_self(model_of(family), 10, layers=[num_layers - 1])
        calls.clear()  # the short passes of the receipt
        with on:
            replay.read(on.first_layer, loss=True)
            assert calls == [num_layers - 1]
        replay.read(1)
        assert calls[1:] == list(range(1, num_layers))
        assert replay.read(None) is replay.baseline
        assert len(calls) == num_layers
    finally:
        for handle in handles:
            handle.remove()
    assert replay.num_layer_passes - before == len(calls)


def test_without_a_kept_layer_the_pass_begins_at_the_one_before():
    model = model_of("gemma3")
    replay = Replay(anatomy_of(model), model, IDS, restarts=(3,))
    assert replay.num_layer_passes == 6
    for first_layer, num_run in ((0, 6), (2, 6), (3, 3), (5, 3)):
        before = replay.num_layer_passes
        with mask_to_self(model, 10, layers=[first_layer]):
            found = replay.read(first_layer)
            assert replay.num_layer_passes - before == num_run
            assert torch.equal(found.received_LBS, replay._read(None, loss=False).received_LBS)


def test_moments_are_read_in_the_first_layers_that_are_asked_for():
    model = model_of("gemma3")
    whole, short = (Replay(anatomy_of(model), model, IDS, restarts=(3,), moment_layers=number) for number in (None, 2))
    for first_layer in (0, 3):
        with mask_to_self(model, 10, layers=[first_layer, 4]):
            squares_LBS2T = whole.read(first_layer).squares_LBS2T
            assert torch.equal(short.read(first_layer).squares_LBS2T, squares_LBS2T[:2])
        assert not torch.equal(squares_LBS2T, whole.baseline.squares_LBS2T)


@every_family
@pytest.mark.parametrize("condition", ["untouched", "masked", "all"])
def test_readings_equal_a_trace(family, condition, monkeypatch):
    """At a threshold that many heads pass: random models have few sinks at 0.3."""
    model, replay = model_of(family), replay_of(family)
    monkeypatch.setattr(layer_call, "RECEIVED_THRESHOLD", 0.05)
    interventions = {"untouched": [], "masked": [mask_to_self(model, 10)], "all": conditions(family)}[condition]
    with together(interventions):
        found = replay._read(None, loss=False)
        reading = trace(model, IDS, effective_rank=False).recording
    np.testing.assert_allclose(found.rate_BS, reading.sequence_sink_rate, rtol=1e-6)
    assert found.rate_BS.shape == (B, T)
    assert 0.05 < float(found.rate_BS.mean()) < 0.95
    for name, values in (
        ("received", (found.received_LBS.mean(1), reading["received"].mean(1))),
        ("entropy", (found.entropy_LBT.mean(1), reading["entropy"])),
        ("mixing", (found.mixing_LBT.mean(1), reading["mixing"])),
        ("dom_ratio", (found.dom_ratio_LBT.mean(1), reading["dom_ratio"])),
    ):
        np.testing.assert_allclose(*values, rtol=1e-4, atol=1e-6, err_msg=name)
    channels = anatomy_of(model).layers[0].aggregation_channel_norms().shape[0]
    energy = found.aggregation_norm_LBT.square().mean(1) / channels
    np.testing.assert_allclose(energy, reading["second_moment"], rtol=1e-4)
    if condition != "untouched":  # control
        assert float((found.received_LBS - replay.baseline.received_LBS).abs().max()) > 1e-3


@every_family
def test_values_equal_those_that_hooks_see(family):
    """Norms, dimensions, and dense neurons in the order in which they were asked for."""
    model, leaving, entering = model_of(family), [], {}
    handles = []
    for layer, block in enumerate(model.get_submodule(PARTS[family]["blocks"])):
        handles.append(
            block.register_forward_hook(
                lambda _, args, out: leaving.append((out[0] if isinstance(out, tuple) else out).double())
            )
        )
        shared = getattr(getattr(block, "mlp", None), "shared_experts", None)
        dense = not hasattr(getattr(block, "mlp", None), "experts")
        down = block.get_submodule(PARTS[family]["down"]) if dense else getattr(shared, "down_proj", None)
        if down is not None:
            key = (layer, None if dense else SHARED_EXPERT)
            handles.append(
                down.register_forward_pre_hook(
                    lambda _, args, key=key: entering.update({key: args[0].view(B, T, -1).clone()})
                )
            )
    neurons = last_neurons(model)
    found = read_condition(None, model, IDS, neurons=neurons, dimensions=DIMENSIONS)
    for handle in handles:
        handle.remove()
    stream = torch.stack(leaving)
    np.testing.assert_allclose(found.residual_norm_LBT, stream.norm(dim=-1), rtol=1e-5)
    np.testing.assert_allclose(found.dimension_values([7, 19]), stream[..., [7, 19]], rtol=1e-6)
    np.testing.assert_allclose(found.dimensions_LBTM, stream[..., list(DIMENSIONS)], rtol=1e-6)
    for neuron in neurons:
        values = found.neuron_values(neuron)
        assert values.shape == (B, T)
        if (neuron.layer, neuron.expert) in entering:
            assert torch.equal(values, entering[neuron.layer, neuron.expert][..., neuron.neuron])
        else:  # a routed expert: not every token goes there
            assert 0 < float((values != 0).float().mean()) < 1
    group = (neurons[0].layer, neurons[0].expert)
    assert torch.equal(found.group_values(group, [9, 3])[..., 0], found.neuron_values(neurons[0]))
    assert not torch.equal(found.neuron_values(neurons[0]), found.neuron_values(neurons[1]))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_other_tokens_and_shifted_positions_are_read_as_the_model_reads_them(family):
    """Control: positions that are learned, as in gpt2, make another reading; rotary ones differ by rounding."""
    model, replay = model_of(family), replay_of(family)
    others = IDS.flip(1)
    fresh = Replay(anatomy_of(model), model, others, last_neurons(model), DIMENSIONS)
    found = replay.read_tokens(others)
    for name in (*BY_SEQUENCE, "dimensions_LBTM"):
        assert torch.equal(getattr(found, name), getattr(fresh.baseline, name)), name
    shifted = replay.read_tokens(IDS, position_ids=torch.arange(T)[None] + 7).residual_norm_LBT
    states = []
    handle = (
        anatomy_of(model)
        .layers[-1]
        .block.register_forward_hook(
            lambda _, args, out: states.append((out[0] if isinstance(out, tuple) else out).norm(dim=-1))
        )
    )
    with torch.no_grad():
        model(IDS, position_ids=torch.arange(7, T + 7)[None])
    handle.remove()
    torch.testing.assert_close(shifted[-1], states[0])
    moved = (shifted / replay.baseline.residual_norm_LBT - 1).abs().max()
    assert moved > 0.01 if family == "gpt2" else moved < 1e-3


def test_an_aggregation_is_set_to_the_mean_that_a_mask_gives():
    """By hooks before the output projection: the mean with the mask on, then that in every sequence."""
    model = model_of("llama")
    projection = model.model.layers[1].self_attn.o_proj
    mask, place = mask_to_self(model, 10), Place(on=AGGREGATION, layers=(0, 1), positions=(10,))
    means = mean_aggregations(model, CALIBRATION, place, [mask])
    entering = []
    for on, ids in ((mask, CALIBRATION.ids), (SetAggregation(model, 10, means), IDS)):
        with on, torch.no_grad():  # hooked behind the intervention
            handle = projection.register_forward_pre_hook(lambda _, args: entering.append(args[0][:, 10]))
            model(ids)
            handle.remove()
    under_mask, at_mean = entering[-2:]
    torch.testing.assert_close(means[1], under_mask.mean(0))
    torch.testing.assert_close(at_mean, means[1].expand(B, -1))
    assert not torch.allclose(under_mask[:B], at_mean, rtol=0.1)


# The loss


def own_loss(model, ids) -> list[float]:
    with torch.no_grad():
        return [float(model(row[None], labels=row[None]).loss) for row in ids]


@every_family
def test_loss_equals_the_models_own(family):
    model, replay = model_of(family), replay_of(family)
    np.testing.assert_allclose(replay.baseline.loss_B, own_loss(model, IDS), rtol=1e-4)
    with mask_to_self(model, 10) as on:
        found = replay.read(on.first_layer, loss=True).loss_B
        np.testing.assert_allclose(found, own_loss(model, IDS), rtol=1e-4)
    assert not np.allclose(found, replay.baseline.loss_B, rtol=1e-3)
    # Control: the loss of the same sequences in another order.
    assert not np.allclose(replay.baseline.loss_B.flip(0), own_loss(model, IDS), rtol=1e-3)
    assert replay.read(0).loss_B is None


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("gemma2", dict(final_logit_softcapping=3.0)),
        ("gemma3", dict(final_logit_softcapping=2.0)),
        ("opt", dict(word_embed_proj_dim=24)),
        ("llama", dict(tie_word_embeddings=True)),
    ],
)
def test_loss_of_heads_out_of_the_ordinary(family, overrides):
    model = tiny_model(family, **overrides)
    found = Replay(anatomy_of(model), model, IDS, loss=True).baseline.loss_B
    np.testing.assert_allclose(found, own_loss(model, IDS), rtol=1e-4)


@pytest.mark.parametrize("tokens", [1, 2 * T, 3 * T])
def test_loss_in_portions_is_the_same(tokens, monkeypatch):
    replay = replay_of("llama")
    monkeypatch.setattr(replay_module, "LOSS_TOKENS", tokens)
    hidden = []
    hook = replay.anatomy.layers[-1].block.register_forward_hook(
        lambda _, args, out: hidden.append(out[0] if isinstance(out, tuple) else out)
    )
    with torch.no_grad():
        replay.model(IDS)
    hook.remove()
    found = next_token_loss(replay.anatomy, replay.model, hidden[0], IDS)
    np.testing.assert_allclose(found, own_loss(replay.model, IDS), rtol=1e-5)


# Input, and what is left behind


def test_a_loaded_model_is_as_good_as_its_module():
    model = model_of("llama")
    found = read_condition(None, load(model), IDS, dimensions=(3,))
    assert torch.equal(found.dimensions_LBTM, read_condition(None, model, IDS, dimensions=(3,)).dimensions_LBTM)


def test_a_model_in_training_mode_is_read_without_dropout():
    model = tiny_model("gpt2").train()
    found = Replay(anatomy_of(model), model, IDS, loss=True)
    assert model.training
    with mask_to_self(model, 10, layers=[1]):
        again = [found.read(1).residual_norm_LBT for _ in range(2)]
    assert torch.equal(*again)
    np.testing.assert_allclose(found.baseline.loss_B, own_loss(model.eval(), IDS), rtol=1e-4)


def test_neurons_that_do_not_exist_are_refused():
    model = model_of("deepseek_v3")
    for neuron, expected in (
        (Neuron(0, 1, 0), "Layer 0 has no experts, so no expert 1."),
        (Neuron(1, 4, 0), "the experts 0, 1, 2, 3, -1, and expert 4 was named."),
        (Neuron(3, None, 0), "no layer 3. Choose from 0 to 2"),
        (Neuron(1, SHARED_EXPERT, 24), "no neuron 24 in layer 1. Choose from 0 to 23"),
    ):
        with pytest.raises(InputError) as error:
            read_condition(None, model, IDS, neurons=[neuron])
        assert expected in str(error.value)


def test_a_failing_read_leaves_no_hook_behind():
    model, replay = model_of("llama"), replay_of("llama")

    def hooks():
        return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]

    before, implementation = hooks(), model.config._attn_implementation
    with mask_to_self(model, 99), pytest.raises(InputError, match=r"no position 99\. Choose from 0 to 29"):
        replay.read(0)
    assert hooks() == before
    assert model.config._attn_implementation == implementation
    assert_same_bits(replay.read(0, loss=True), replay.baseline)
