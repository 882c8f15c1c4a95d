"""Disparity in any basis, output vectors that point elsewhere, and the lock: each against a plain definition."""

import numpy as np
import pytest
import torch
from planted_models import planted_chain, random_tokens
from tiny_models import tiny_model

from sinkscope.errors import InputError
from sinkscope.interventions.neurons import densify_neurons
from sinkscope.interventions.plan import Plan
from sinkscope.measures.dimension_disparity import direction_share, dom_ratio, dom_ratio_turned
from sinkscope.models.anatomy import Neuron, anatomy_of
from sinkscope.studies.causal_claims import what_it_is
from sinkscope.studies.controls import read_activity
from sinkscope.studies.judging import gone
from sinkscope.studies.link_values import read_link_values
from sinkscope.tracing.trace import trace

IDS = torch.randint(3, 97, (20, 20), generator=torch.Generator().manual_seed(0))


def states(model, ids, layer: int) -> torch.Tensor:
    """[B, T, E] what leaves a block."""
    kept = []
    hook = (
        anatomy_of(model)
        .layers[layer]
        .block.register_forward_hook(lambda _, args, out: kept.append(out[0] if isinstance(out, tuple) else out))
    )
    with torch.no_grad():
        model(ids)
    hook.remove()
    return kept[0]


def test_the_share_of_a_direction_by_hand():
    # Energies 9 and 1 along two orthogonal directions, in a turned basis too.
    x = torch.tensor([[3.0, 0.0, 0.0], [0.0, 1.0, 0.0]], dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).Q
    assert float(direction_share(x)) == pytest.approx(0.9)
    assert float(direction_share(x @ turn)) == pytest.approx(0.9)
    assert float(direction_share(torch.tensor([[1.0, 2.0], [-2.0, -4.0]]))) == pytest.approx(1.0)
    assert torch.isnan(direction_share(torch.zeros(3, 4)))


def test_the_turned_basis_hides_a_coordinate():
    width = 48
    coordinates = torch.eye(width, dtype=torch.float64)
    assert float(dom_ratio(coordinates).min()) == pytest.approx(width)
    assert float(dom_ratio_turned(5 * coordinates).max()) < 3
    dense = torch.randn(4, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.all(dom_ratio_turned(dense) < 6)  # control: it makes no coordinate of what has none


def test_a_trace_has_both_at_positions_that_stand_out_whatever_the_chunks():
    model = tiny_model("llama")
    whole, chunked = (trace(model, IDS, chunk_tokens=tokens).recording for tokens in (1 << 17, 60))
    for layer in range(3):
        x_BTE = states(model, IDS, layer).double()
        expected = direction_share(x_BTE[:16].transpose(0, 1))  # the first 16 sequences of 20
        ratio = dom_ratio_turned(x_BTE).mean(0)
        seen = whole["direction_share"][layer].isfinite()
        assert set(range(4)) <= set(seen.nonzero().flatten().tolist())
        np.testing.assert_allclose(whole["direction_share"][layer][seen], expected[seen], rtol=1e-4)
        np.testing.assert_allclose(whole["dom_ratio_turned"][layer][seen], ratio[seen], rtol=1e-4)
        all_sequences = direction_share(x_BTE.transpose(0, 1))  # control
        assert not np.allclose(whole["direction_share"][layer][seen], all_sequences[seen], rtol=1e-3)
    for name in ("direction_share", "dom_ratio_turned"):
        np.testing.assert_allclose(chunked[name], whole[name], rtol=1e-4)
    alone = trace(model, IDS[:1])
    assert "direction_share" not in alone.recording
    for name in ("direction_share", "dom_ratio_turned"):  # the columns of every trace, here empty
        assert np.isnan(alone.tables["positions"][name]).all()
    named = trace(model, IDS, observables=["direction_share"], chunk_tokens=60).recording  # by itself, with a survey
    assert torch.equal(named["direction_share"].isfinite(), chunked["direction_share"].isfinite())


def test_the_planted_sink_is_one_direction_in_every_basis():
    model, facts = planted_chain(0)
    layers = trace(model, random_tokens(facts, num_sequences=16, length=32)).tables["layers"]
    assert layers["direction_share_sink"][3] > 0.9
    assert layers["dom_ratio_sink"][3] > 10 > 2 * layers["dom_ratio_turned_sink"][3]
    assert layers["direction_share_sink"][0] < 0.8  # control: before its birth


def test_vectors_that_point_elsewhere_keep_their_norms():
    model = tiny_model("llama")
    neurons = [Neuron(0, None, 3), Neuron(0, None, 7), Neuron(2, None, 5)]
    weights = [model.model.layers[layer].mlp.down_proj.weight for layer in (0, 2)]
    with torch.no_grad():
        weights[0][:, 3], weights[0][:, 7] = 0.01, 0.02
        weights[0][11, 3], weights[0][11, 7], weights[1][20, 5] = 4.0, -3.0, 9.0
    before = torch.stack([weights[0][:, 3], weights[0][:, 7], weights[1][:, 5]]).detach().double()

    def after(**options) -> torch.Tensor:
        change = densify_neurons(model, neurons, **options).change
        return before + torch.cat([change[0, None].T, change[2, None].T]).double()

    for mode in ("spread", "move", "turn"):
        torch.testing.assert_close(after(mode=mode).norm(dim=1), before.norm(dim=1), rtol=1e-5, atol=0)
    moved = after(mode="move", avoid=range(40))
    places = moved.abs().argmax(1).tolist()
    assert (moved.abs() > 1e-4).sum(1).tolist() == [1, 1, 1]
    assert places[0] == places[1] != places[2]  # what wrote one dimension writes one dimension
    assert min(places) >= 40
    assert [float(row[place].sign()) for row, place in zip(moved, places, strict=True)] == [1, -1, 1]
    turned = after(mode="turn")
    torch.testing.assert_close(turned @ turned.T, before @ before.T, rtol=1e-4, atol=1e-4)  # angles stay
    assert float(dom_ratio(turned).max()) < 6 < float(dom_ratio(before).min())
    assert not torch.allclose(turned, after(mode="turn", seed=1), atol=0.1)
    with pytest.raises(InputError, match=r"'fold'\. Choose one of spread, move, turn"):
        densify_neurons(model, neurons, mode="fold")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spread", "moved", "turned", "basis", "found"),
    [
        ([0.01, 0.2], [0.9, 0.3], [0.02, 0.0], 1.0, "the sink needs sparse vectors"),
        (
            [0.01, 0.4],
            [0.9, 0.9],
            [0.0, 0.0],
            1.0,
            "the sink does not need sparse vectors: what is left depends on the draw",
        ),
        (
            [0.0, 0.01],
            [0.9, 0.1],
            [0.0, 0.0],
            1.0,
            "the sink does not need sparse vectors: what is left depends on the draw",
        ),
        (
            [0.01, 0.4],
            [0.0, 0.02],
            [0.02, 0.0],
            1.0,
            "the sink needs the coordinate that keys read, not sparse vectors; left",
        ),
        (
            [0.01, 0.0],
            [0.0, 0.02],
            [0.02, 0.0],
            "why",
            "the sink needs the coordinate that keys read, not sparse vectors; left",
        ),
        ([0.9, 0.8], [0.9, 0.9], [0.9, 1.0], 1.0, "the sink needs neither sparse vectors nor their direction"),
    ],
)
def test_what_the_sink_needs_is_said(spread, moved, turned, basis, found):
    said = what_it_is(spread, moved, turned, basis, "coordinate")
    assert said.startswith(found)
    assert said.endswith(
        "the residual basis cannot be rotated (why)" if basis == "why" else "in a rotated residual basis 100.0%"
    )


# The lock


def test_the_lock_equals_keys_made_by_hand():
    """A Llama key is the rotated projection of the state: without a direction of the state, by the same rotation."""
    model = tiny_model("llama")
    anatomy = anatomy_of(model)
    plan = Plan(
        sink=2,
        targets=(7,),
        last_layer=0,
        appears_in=(),
        layers_with_disparity=(1,),
        dimensions=(),
        super_neurons=(),
        candidates=(),
        sink_heads=((1, 3), (2, 0)),
    )
    directions = read_activity(anatomy, model, IDS, plan).directions
    found = read_link_values(anatomy, model, IDS, plan, directions).lock_BQ3N
    assert found.shape == (20, 2, 3, 2)
    for number, (layer, head) in enumerate(plan.sink_heads):
        attention, seen = anatomy.layers[layer].attention, {}
        hook = attention.register_forward_pre_hook(
            lambda _, a, kwargs, seen=seen: seen.update(kwargs), with_kwargs=True
        )
        with torch.no_grad():
            model(IDS)
            hook.remove()
            state = seen["hidden_states"]
            top = torch.linalg.svd(state[:, 2].double()).Vh[0].float()
            cos, sin = seen["position_embeddings"]
            query = rotated(attention.q_proj(state).unflatten(-1, (4, 12))[:, :, head], cos, sin)
            for place, position in enumerate((2, 7)):
                largest = torch.eye(len(top))[top.abs().argmax()]
                without = [state - (state @ part)[..., None] * part for part in (top, largest)]
                for kind, x in enumerate((state, *without)):
                    key = rotated(attention.k_proj(x).unflatten(-1, (2, 12))[:, :, head // 2], cos, sin)
                    own, *later = (query[:, position:] * key[:, [position]]).sum(2).T
                    expected = torch.stack(later).sum(0)
                    np.testing.assert_allclose(found[:, place, kind, number], expected, rtol=1e-3, atol=1e-2)
                    # Control: with the query at the key itself it is another number.
                    assert not np.allclose(found[:, place, kind, number], expected + own, rtol=1e-3, atol=1e-2)


def keep_arguments(seen, module, args, kwargs):
    seen.update(kwargs)


def rotated(x, cos, sin):
    return x * cos + torch.cat([-x[..., 6:], x[..., :6]], -1) * sin


def test_what_is_gone_by_hand():
    # Two heads, 4 and -1: of the first three quarters are gone, of the second half.
    assert gone(np.array([[4.0, -1.0], [1.0, -0.5]])) == pytest.approx((3 + 0.5) / 5)
    assert gone(np.array([[4.0, -1.0], [4.0, -1.0]])) == 0
    assert gone(np.array([[4.0], [8.0]])) == -1
