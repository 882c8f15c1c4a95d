"""Chains planted by hand in tiny models, and what is found of them.

Every token's embedding is noise, except in three dimensions: CONSTANT is 1 in all, TRIGGER is set in one special token
only, and MASSIVE is empty. Attention writes nothing and the feed-forward next to nothing, until a test plants a chain.
"""

import pytest
import torch
from tiny_models import tiny_model

from sinkscope.tracing.trace import Trace, trace

B, T = 4, 64
SPECIAL = 5
CONSTANT, TRIGGER, MASSIVE = 0, 3, 9
VALUE = 100.0


def quiet_model(family: str = "llama", *, trigger: float = 2.5, **overrides):
    """A random model of four layers in which nothing stands out."""
    model = tiny_model(family, scale=1.0, num_hidden_layers=4, **overrides)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            elif "q_proj" in name or "k_proj" in name or "o_proj" in name:
                parameter.zero_()
        embedding = model.get_input_embeddings().weight
        embedding.copy_(torch.randn(embedding.shape, generator=generator))
        embedding[:, CONSTANT] = 1.0
        embedding[:, [TRIGGER, MASSIVE]] = 0.0
        embedding[SPECIAL, TRIGGER] = trigger
    return model


def tokens(*positions: int, sequences=slice(None)) -> torch.Tensor:
    """Random tokens, the special one at the positions given and nowhere else."""
    ids = torch.randint(10, 97, (B, T), generator=torch.Generator().manual_seed(1))
    for position in positions:
        ids[sequences, position] = SPECIAL
    return ids


def plant_neuron(model, layer: int, neuron: int, *, trigger: int, value: float, ids: torch.Tensor) -> None:
    """Makes one neuron open for one dimension and write `value` into MASSIVE at the special token."""
    mlp = model.model.layers[layer].mlp
    with torch.no_grad():
        mlp.gate_proj.weight[neuron] = 0.0
        mlp.up_proj.weight[neuron] = 0.0
        mlp.gate_proj.weight[neuron, trigger] = 5.0
        mlp.up_proj.weight[neuron, trigger] = 1.0
        mlp.down_proj.weight[:, neuron] = 0.0
        activation = neurons_of(model, layer, ids)[ids == SPECIAL][:, neuron].mean()
        mlp.down_proj.weight[MASSIVE, neuron] = value / activation


def neurons_of(model, layer: int, ids: torch.Tensor) -> torch.Tensor:
    seen = []
    handle = model.model.layers[layer].mlp.down_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(ids, use_cache=False)
    handle.remove()
    return seen[0]


def written_and_erased(ids: torch.Tensor, *, again: bool = False, **options):
    """Neuron 17 of layer 1 writes, neuron 30 of layer 2 erases, and with `again` neuron 44 of layer 3 writes anew."""
    model = quiet_model(**options)
    plant_neuron(model, 1, 17, trigger=TRIGGER, value=VALUE, ids=ids)
    plant_neuron(model, 2, 30, trigger=MASSIVE, value=-VALUE, ids=ids)
    if again:
        plant_neuron(model, 3, 44, trigger=TRIGGER, value=-VALUE, ids=ids)
    return model


def neurons(found: Trace) -> list[tuple]:
    return [
        (neuron.layer, neuron.expert, neuron.neuron, neuron.dimension, neuron.role)
        for neuron in found.findings.super_neurons
    ]


@pytest.mark.parametrize("position", [0, 6, 41])
def test_a_planted_writer_and_eraser_are_found(position):
    ids = tokens(position)
    found = trace(written_and_erased(ids), ids)
    findings = found.findings
    assert findings.disparity_layers == {position: ([1], [2])}
    assert (findings.appears_in, findings.disappears_in) == ([1], [2])
    assert findings.massive_dimensions == [MASSIVE]
    assert sorted(neurons(found)) == [(1, None, 17, MASSIVE, "writes"), (2, None, 30, MASSIVE, "erases")]
    writer, eraser = sorted(findings.super_neurons, key=lambda neuron: neuron.layer)
    assert writer.position == eraser.position == position
    assert min(writer.write_share, eraser.write_share) > 0.9
    assert writer.write == pytest.approx(VALUE, rel=1e-3)
    assert eraser.write == pytest.approx(-VALUE, rel=1e-3)
    assert min(writer.contrast, eraser.contrast) > 10
    # The planted output vector has one entry; the layer's other neurons are spread out.
    assert float(writer.sparsity.top_share) == pytest.approx(1.0)
    assert float(writer.sparsity.participation_ratio) == pytest.approx(1.0)
    assert writer.layer_top_share < 0.5


def test_what_is_found_matches_what_the_model_computes():
    ids = tokens(6)
    model = written_and_erased(ids)
    found = trace(model, ids).findings
    writer = next(neuron for neuron in found.super_neurons if neuron.layer == 1)
    at_position = neurons_of(model, 1, ids)[:, 6, 17]
    assert writer.activation == pytest.approx(float(at_position.mean()), rel=1e-5)
    others = [t for t in range(T) if t != 6]
    entry = next(entry for entry in found.massive if entry.layer == 1)
    assert (entry.position, entry.dimension) == (6, MASSIVE)
    assert entry.value == pytest.approx(VALUE, rel=1e-3)
    assert [entry.layer for entry in found.massive] == [1]
    with torch.no_grad():
        hidden = model(ids, use_cache=False, output_hidden_states=True).hidden_states[2]
    magnitude = hidden.abs().mean(0)
    assert entry.magnitude == pytest.approx(float(magnitude[6, MASSIVE]), rel=1e-5)
    assert entry.ratio == pytest.approx(float(magnitude[6, MASSIVE] / magnitude[6].mean()), rel=1e-4)
    assert entry.contrast == pytest.approx(float(magnitude[6, MASSIVE] / magnitude[others, MASSIVE].mean()), rel=1e-4)


def contrast_of_writer(noise: float) -> tuple[float, float]:
    """(found, true) contrast of the planted writer, the trigger's dimension holding noise in every other token."""
    ids = tokens(6)
    model = quiet_model()
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        trigger = embedding[SPECIAL, TRIGGER].clone()
        embedding[:, TRIGGER] = noise * torch.randn(len(embedding), generator=torch.Generator().manual_seed(2))
        embedding[SPECIAL, TRIGGER] = trigger
    plant_neuron(model, 1, 17, trigger=TRIGGER, value=VALUE, ids=ids)
    square_BT = neurons_of(model, 1, ids)[..., 17].double() ** 2
    others = [t for t in range(T) if t != 6]
    true = float((square_BT[:, 6].mean() / square_BT[:, others].mean()).sqrt())
    (writer,) = trace(model, ids).findings.super_neurons
    return writer.contrast, true


def test_contrast_is_the_root_mean_square_at_the_position_over_that_at_all_others():
    found, true = contrast_of_writer(noise=0.3)
    assert 10 < true < 1000
    assert found == pytest.approx(true, rel=1e-3)


def test_contrast_of_a_neuron_that_is_all_but_silent_elsewhere():
    found, true = contrast_of_writer(noise=0.0)
    assert true > 1e5
    # What is left of a float32 sum says no more: the contrast saturates at about 1,000 sqrt(T), and never jumps beyond.
    assert 1e3 < found < true


def test_disparity_can_be_born_again():
    ids = tokens(0)
    found = trace(written_and_erased(ids, again=True), ids)
    assert found.findings.disparity_layers == {0: ([1, 3], [2])}
    # The third writes the other way; that is no erasure, since nothing was left to erase.
    assert sorted(neurons(found)) == [
        (1, None, 17, MASSIVE, "writes"),
        (2, None, 30, MASSIVE, "erases"),
        (3, None, 44, MASSIVE, "writes"),
    ]


def test_another_dimension_that_was_never_massive_does_not_keep_disparity_alive():
    """The trigger, 5 times the mean and in this token alone, is half of what counts: neither birth nor survival."""
    ids = tokens(0)
    found = trace(written_and_erased(ids, trigger=4.5), ids).findings
    assert found.massive_dimensions == [MASSIVE]
    assert found.disparity_layers == {0: ([1], [2])}


def test_disparity_that_is_not_erased_stays():
    ids = tokens(0)
    model = quiet_model()
    plant_neuron(model, 1, 17, trigger=TRIGGER, value=VALUE, ids=ids)
    found = trace(model, ids)
    assert found.findings.disparity_layers == {0: ([1], [])}
    assert {entry.layer for entry in found.findings.massive} == {1, 2, 3}
    assert neurons(found) == [(1, None, 17, MASSIVE, "writes")]


def test_disparity_of_the_embedding_is_born_before_layer_0():
    ids = tokens(0)
    model = quiet_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[SPECIAL, MASSIVE] = VALUE
    found = trace(model, ids)
    assert found.findings.disparity_layers == {0: ([-1], [])}
    assert neurons(found) == []


def test_two_writers_share_the_write():
    """Two neurons of one layer, 80 and 60 of 100: shares of the squared write 0.64 and 0.36."""
    ids = tokens(0)
    model = quiet_model()
    plant_neuron(model, 1, 17, trigger=TRIGGER, value=80.0, ids=ids)
    plant_neuron(model, 1, 50, trigger=TRIGGER, value=60.0, ids=ids)
    found = trace(model, ids)
    assert neurons(found) == [(1, None, 17, MASSIVE, "writes"), (1, None, 50, MASSIVE, "writes")]
    shares = [neuron.write_share for neuron in found.findings.super_neurons]
    assert shares == pytest.approx([0.64, 0.36], rel=1e-3)


def test_control_with_the_neuron_silenced_nothing_is_found():
    ids = tokens(0)
    model = written_and_erased(ids)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[:, 17] = 0.0
    found = trace(model, ids)
    assert found.findings.disparity_layers == {}
    assert found.findings.massive == []
    assert found.findings.massive_dimensions == []
    assert found.findings.super_neurons == []
    assert found.story.startswith("No sink")
    assert "dominate" not in found.story


def test_control_a_dimension_large_in_every_token_marks_none():
    """As large as the planted one, but everywhere: ratio without contrast."""
    model = quiet_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[:, MASSIVE] = VALUE
    found = trace(model, tokens(0))
    assert float(found.recording["dom_ratio"].min()) > 10
    assert found.findings.massive == []


def test_a_planted_writer_among_experts_is_found():
    """Mixtral: the special token is routed to expert 2, whose neuron 17 writes."""
    ids = tokens(0)
    model = quiet_model("mixtral")
    mlp = model.model.layers[1].mlp
    with torch.no_grad():
        mlp.gate.weight.zero_()
        mlp.gate.weight[2, TRIGGER] = 5.0
        experts = mlp.experts
        num_neurons = experts.down_proj.shape[-1]
        for row, weight in ((17, 5.0), (num_neurons + 17, 1.0)):  # the gates come first, then the ups
            experts.gate_up_proj[2, row] = 0.0
            experts.gate_up_proj[2, row, TRIGGER] = weight
        experts.down_proj[2, :, 17] = 0.0
        experts.down_proj[2, MASSIVE, 17] = 2.0
    found = trace(model, ids)
    assert neurons(found) == [(1, 2, 17, MASSIVE, "writes")]
    assert found.findings.disparity_layers == {0: ([1], [])}
    written = next(entry.value for entry in found.findings.massive if entry.layer == 1)
    assert found.findings.super_neurons[0].write == pytest.approx(written, rel=1e-2)
    assert found.findings.super_neurons[0].write_share > 0.9
    assert found.summary["super_neurons"][0]["expert"] == 2


def test_a_planted_writer_behind_a_post_norm_is_found():
    """OLMo 2: whatever the neuron's size, the norm makes the token's write sqrt(E) times the gain of its dimension."""
    ids = tokens(0)
    model = quiet_model("olmo2")
    block = model.model.layers[1]
    with torch.no_grad():
        for layer in model.model.layers:
            # The norm would make much of a little, so that nothing but neuron 17 may write here.
            layer.mlp.down_proj.weight[[TRIGGER, MASSIVE]] = 0.0
            layer.post_feedforward_layernorm.weight.fill_(0.1)
        block.mlp.gate_proj.weight[17] = 0.0
        block.mlp.up_proj.weight[17] = 0.0
        block.mlp.gate_proj.weight[17, TRIGGER] = 5.0
        block.mlp.up_proj.weight[17, TRIGGER] = 1.0
        block.mlp.down_proj.weight[:, 17] = 0.0
        block.mlp.down_proj.weight[MASSIVE, 17] = 3.0
        block.post_feedforward_layernorm.weight[MASSIVE] = 20.0
    found = trace(model, ids)
    assert neurons(found) == [(1, None, 17, MASSIVE, "writes")]
    assert found.findings.super_neurons[0].write == pytest.approx(20 * 48**0.5, rel=1e-2)
    # Control: before the norm the neuron writes three times its activation, which is something else.
    activation = found.findings.super_neurons[0].activation
    assert abs(3 * activation / (20 * 48**0.5) - 1) > 0.2


# Sinks


def plant_sink_head(model, layer: int, head: int, reads: int = TRIGGER) -> None:
    """Every query of the head points at the special token's key, through a pair of dimensions that hardly rotates."""
    attention = model.model.layers[layer].self_attn
    slow, size = 5, 12  # of 12 dimensions, 5 and 11 turn by 4.6e-4 per position
    with torch.no_grad():
        attention.q_proj.weight[head * size + slow, CONSTANT] = 30.0
        attention.k_proj.weight[head // 2 * size + slow, reads] = 1.0


@pytest.mark.parametrize("position", [0, 10, 40])
def test_a_planted_sink_is_found_with_its_layer_and_head(position):
    model = quiet_model()
    plant_sink_head(model, 2, 1)
    found = trace(model, tokens(position))
    (sink,) = found.findings.sinks
    assert sink.position == position
    assert sink.layers == [2]
    assert sink.rate == sink.low == sink.high == 1 / 16
    # One head of sixteen attends to it alone, the others spread evenly over what they see.
    even = sum(1 / (t + 1) for t in range(position, T)) / (T - position)
    assert sink.mean_attention == pytest.approx((1 + 15 * even) / 16, rel=1e-4)
    rate = found.recording["head_sink_rate"][:, :, position]
    assert rate.nonzero().tolist() == [[2, 1]]
    assert found.findings.strongest == (position, 1 / 16)
    assert f"Position {position} is a sink" in found.story
    assert [entry["position"] for entry in found.summary["sinks"]] == [position]


def test_a_sink_in_some_sequences_has_an_interval():
    model = quiet_model()
    plant_sink_head(model, 1, 3)
    plant_sink_head(model, 2, 0)
    found = trace(model, tokens(10, sequences=[0, 2]))
    (sink,) = found.findings.sinks
    assert sink.layers == [1, 2]
    assert sink.rate == pytest.approx(1 / 16)  # 2 of 16 heads in half of the sequences
    assert sink.low < sink.rate < sink.high
    assert found.recording.sequence_sink_rate[:, 10].tolist() == [0.125, 0.0, 0.125, 0.0]


def test_two_sinks_are_found():
    """Queries after both split evenly, so that each receives far more than 0.3."""
    model = quiet_model()
    plant_sink_head(model, 2, 1)
    found = trace(model, tokens(10, 20))
    assert sorted(sink.position for sink in found.findings.sinks) == [10, 20]


def test_control_without_its_queries_there_is_no_sink():
    model = quiet_model()
    plant_sink_head(model, 2, 1)
    with torch.no_grad():
        model.model.layers[2].self_attn.q_proj.weight.zero_()
    found = trace(model, tokens(10))
    assert found.findings.sinks == []
    assert found.story.startswith("No sink")


def test_control_a_sink_for_half_as_many_heads_is_none():
    """One head of sixteen in half of the sequences is 3.1 %, and a sink needs 5 %."""
    model = quiet_model()
    plant_sink_head(model, 2, 1)
    found = trace(model, tokens(10, sequences=[0, 2]))
    assert found.findings.strongest[0] == 10
    assert found.findings.strongest[1] == pytest.approx(1 / 32)
    assert found.findings.sinks == []


def test_control_a_key_with_few_later_queries_is_no_sink():
    model = quiet_model()
    plant_sink_head(model, 2, 1)
    assert trace(model, tokens(T - 16)).findings.sinks == []
    assert [sink.position for sink in trace(model, tokens(T - 17)).findings.sinks] == [T - 17]


def test_a_sink_with_a_chain_behind_it_is_told():
    ids = tokens(10)
    model = written_and_erased(ids)
    plant_sink_head(model, 2, 1, reads=MASSIVE)  # between birth and erasure the massive dimension is the key
    found = trace(model, ids)
    assert found.findings.focus == [10]
    assert found.findings.disparity_layers == {10: ([1], [2])}
    assert "Position 10 is a sink" in found.story
    for words in (
        "appearing in layer 1",
        "disappearing in layer 2",
        "Dimension 9",
        "Neuron 17 of layer 1",
        "not tested",
    ):
        assert words in found.story
    summary = found.summary
    assert (summary["birth_layers"], summary["erasure_layers"]) == ([1], [2])
    assert summary["massive_dimensions"] == [MASSIVE]
    at_sink, elsewhere = summary["dom_ratio"]["sink"], summary["dom_ratio"]["elsewhere"]
    assert at_sink[1] > 10 > max(elsewhere)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "gemma3"])
def test_a_random_untrained_model_has_no_sink(family):
    found = trace(tiny_model(family, scale=1.0), tokens())
    assert found.findings.sinks == []
    assert found.story.startswith("No sink")
    assert found.summary["sinks"] == []


def test_many_disparate_positions_have_their_own_births():
    """Ten massive tokens whose ranks change from layer to layer: all are born in layer 1, and none is ever erased."""
    positions = range(20, 30)
    ids = tokens(*positions)
    model = quiet_model()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(20)
            layer.mlp.down_proj.weight[[TRIGGER, MASSIVE]] = 0.0
    plant_neuron(model, 1, 17, trigger=TRIGGER, value=VALUE, ids=ids)
    with torch.no_grad():
        hidden = model(ids, use_cache=False, output_hidden_states=True).hidden_states
    assert all(float(hidden[row][:, positions, MASSIVE].min()) > 0.99 * VALUE for row in (2, 3))
    found = trace(model, ids).findings
    assert found.disparity_layers
    assert set(found.disparity_layers) <= set(positions)
    assert {position: layers for position, layers in found.disparity_layers.items() if layers != ([1], [])} == {}


def test_a_sink_whose_disparity_is_not_the_largest_has_its_chain():
    """Six tokens that are no sinks have a larger massive dimension than the one that is."""
    louder, other_trigger, other_massive = 6, 12, 20
    ids = tokens(40)
    model = quiet_model()
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding[:, [other_trigger, other_massive]] = 0.0
        embedding[louder, other_trigger] = 2.5
        ids[:, 12:18] = louder
        plant_neuron(model, 1, 17, trigger=TRIGGER, value=VALUE, ids=ids)
        mlp = model.model.layers[1].mlp
        mlp.gate_proj.weight[60], mlp.up_proj.weight[60], mlp.down_proj.weight[:, 60] = 0.0, 0.0, 0.0
        mlp.gate_proj.weight[60, other_trigger] = 5.0
        mlp.up_proj.weight[60, other_trigger] = 1.0
        mlp.down_proj.weight[other_massive, 60] = 20.0
    plant_sink_head(model, 2, 1, reads=MASSIVE)
    found = trace(model, ids).findings
    assert [sink.position for sink in found.sinks] == [40]
    assert found.disparity_layers == {40: ([1], [])}
    assert [(neuron.layer, neuron.neuron) for neuron in found.super_neurons if neuron.position == 40] == [(1, 17)]


@pytest.mark.parametrize("is_refused", [False, True])
def test_ranks_are_those_of_one_thread_and_the_number_of_threads_stays(monkeypatch, is_refused):
    findings, before = trace(quiet_model(), tokens(0)).findings, torch.get_num_threads()

    def refuse(*args):
        raise MemoryError

    try:
        torch.set_num_threads(1)
        expected = findings.effective_ranks_apart_from([0])
        assert len(set(expected[0])) == 4  # that a layer took another's place would be seen
        torch.set_num_threads(3)
        if is_refused:
            monkeypatch.setattr("sinkscope.tracing.findings.effective_ranks", refuse)
            with pytest.raises(MemoryError):
                findings.effective_ranks_apart_from([0])
        else:
            assert findings.effective_ranks_apart_from([0]) == tuple(
                pytest.approx(ranks, rel=1e-9) for ranks in expected
            )
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
