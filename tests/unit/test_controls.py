"""The controls of a study: random sets as active at the sink as what they are compared with, and changes written
elsewhere."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from planted_models import planted_chain
from tiny_models import CONFIGURATIONS, PARTS, tiny_model

from sinkscope.interventions.neurons import NUM_NEAREST, ablate_neurons, matched_neurons, nearest
from sinkscope.interventions.plan import Plan
from sinkscope.models.anatomy import Neuron, anatomy_of
from sinkscope.models.loading import load
from sinkscope.studies.claims import CLAIMS
from sinkscope.studies.conditions import MAX_NEURONS, NUM_RANDOM_SETS, Condition
from sinkscope.studies.controls import (
    Activity,
    direction_writers,
    draw_controls,
    few_of_each_layer,
    read_activity,
)
from sinkscope.studies.judging import judge
from sinkscope.studies.study import study
from sinkscope.tracing.replay import read_neurons

IDS = torch.randint(3, 97, (3, 20), generator=torch.Generator().manual_seed(0))
PLAN = Plan(
    sink=4,
    targets=(),
    last_layer=0,
    appears_in=(),
    layers_with_disparity=(0, 2),
    dimensions=(5, 9),
    super_neurons=(),
    candidates=(),
)


@pytest.mark.parametrize("family", [name for name in CONFIGURATIONS if name not in ("mixtral", "gpt_oss")])
def test_activity_equals_what_hooks_see(family):
    """Of dense neurons: |activation| times the norm of what each adds to the stream at the sink, averaged."""
    model = tiny_model(family)
    anatomy, states, written = anatomy_of(model), {}, {}
    handles = []
    for layer, block in enumerate(model.get_submodule(PARTS[family]["blocks"])):
        handles.append(
            block.register_forward_hook(
                lambda _, args, out, layer=layer: states.update(
                    {layer: (out[0] if isinstance(out, tuple) else out)[:, PLAN.sink].double().abs().mean(0)}
                )
            )
        )
        if anatomy.layers[layer].down_projection is None:
            continue
        down, post = block.get_submodule(PARTS[family]["down"]), anatomy.layers[layer].post_norm

        def keep(_, args, out, layer=layer, down=down, post=post):
            values = args[0].view(3, 20, -1)[:, PLAN.sink].double()
            weight = (down.weight.T if type(down).__name__ == "Conv1D" else down.weight).detach().double()
            if post is not None:  # what one neuron adds behind the norm: its vector through the norm's linear part
                state = out.view(3, 20, -1)[:, PLAN.sink].double()
                behind = post(state.float()).double() / state
                norms = (behind[:, :, None] * weight).norm(dim=1)
            else:
                norms = weight.norm(dim=0)
            written[layer] = (values.abs() * norms).mean(0)

        handles.append(down.register_forward_hook(keep))
    found = read_activity(anatomy, model, IDS, PLAN)
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(found.magnitude_E.double(), (states[0] + states[2]) / 2, rtol=1e-4, atol=1e-5)
    assert written
    for layer, expected in written.items():
        torch.testing.assert_close(found.writes[layer, None].double(), expected, rtol=1e-3, atol=1e-5)
    other = read_activity(anatomy, model, IDS, replace(PLAN, sink=5))  # control
    assert not torch.allclose(other.magnitude_E, found.magnitude_E, rtol=1e-2)


def test_the_activity_of_an_expert_counts_with_its_routing():
    model = tiny_model("mixtral")
    anatomy = anatomy_of(model)
    found = read_activity(anatomy, model, IDS, PLAN)
    routed = {}
    experts: Any = anatomy.layers[1].experts
    handle = experts.register_forward_pre_hook(
        lambda _, args, kwargs: routed.update(experts=[*args, *kwargs.values()][1]), with_kwargs=True
    )
    with torch.no_grad():
        model(IDS)
    handle.remove()
    used = set(routed["experts"].view(3, 20, -1)[:, PLAN.sink].flatten().tolist())
    assert len(used) > 0
    for expert in range(4):
        assert bool((found.writes[1, expert] > 0).any()) == (expert in used)


def test_the_nearest_in_ratio_are_drawn_and_those_that_are_taken_are_not():
    sizes = torch.cat([torch.tensor([100.0, 90.0, 120.0, 95.0]), torch.full((60,), 1.0), torch.zeros(3)])
    drawn = {nearest(sizes, 0, [0], torch.Generator().manual_seed(seed))[0] for seed in range(300)}
    assert {1, 2, 3} < drawn
    assert len(drawn) == NUM_NEAREST
    assert drawn.isdisjoint({0, 64, 65, 66})  # the silent ones are farthest away
    assert nearest(sizes[:4], 0, [0, 1, 2, 3], torch.Generator()) == []
    assert nearest(sizes[:4], 0, [0, 1, 3], torch.Generator()) == [2]


def test_neurons_are_matched_in_what_they_write_at_the_sink_not_in_norm_alone():
    model = tiny_model("llama", intermediate_size=400)
    anatomy = anatomy_of(model)
    activity = read_activity(anatomy, model, IDS, PLAN)
    write_F = activity.writes[1, None]
    strongest = Neuron(1, None, int(write_F.argmax()))
    by_norm = [matched_neurons(anatomy, [strongest], (), seed=seed)[0] for seed in range(40)]
    by_write = [matched_neurons(anatomy, [strongest], (), seed=seed, sizes=activity.writes)[0] for seed in range(40)]
    assert min(write_F[u.neuron] for u in by_write) >= write_F.sort(descending=True).values[NUM_NEAREST]
    assert strongest not in by_write
    # The control: neurons of the same norm are as silent as any.
    assert sum(activity.of([u]) for u in by_norm) < 0.5 * sum(activity.of([u]) for u in by_write)


def test_writers_are_ranked_over_all_layers_before_the_sink_and_candidates_are_few_of_each():
    """Of 400 neurons of a layer 2 can be super neurons. Layer 1 has four that write along the direction, layer 0 one,
    and layer 2 is behind the first head with the sink."""
    model = tiny_model("llama", intermediate_size=400)
    anatomy = anatomy_of(model)
    direction_E = torch.zeros(48)
    direction_E[3] = 1.0
    along = {0: {7: 5.0}, 1: {1: 4.0, 2: -6.0, 3: 3.0, 4: 2.0}, 2: {9: 100.0}}
    writes = {}
    with torch.no_grad():
        for layer, neurons in along.items():
            weight_EF: Any = model.model.layers[layer].mlp.down_proj.weight
            weight_EF.zero_()
            weight_EF[5] = 1.0  # the others write elsewhere, however much
            write_F = torch.full((400,), 50.0)
            for neuron, write in neurons.items():
                weight_EF[:, neuron] = write / abs(write) * direction_E
                write_F[neuron] = abs(write)
            writes[layer, None] = write_F
    activity = Activity(writes=writes, magnitude_E=torch.ones(48), directions={}, written={1: direction_E})
    found = direction_writers(activity, anatomy, replace(PLAN, sink_heads=((2, 0),)))
    first = [(1, None, 2), (0, None, 7), (1, None, 1), (1, None, 3), (1, None, 4)]
    assert found[:5] == tuple(Neuron(*neuron) for neuron in first)
    assert len(found) == 2 * MAX_NEURONS
    assert all(neuron.layer < 2 for neuron in found)
    few = few_of_each_layer(found, anatomy)
    assert [neuron for neuron in few if neuron in found[:5]] == [found[n] for n in (0, 1, 2)]
    assert len(few) == 4
    assert direction_writers(activity, anatomy, replace(PLAN, sink_heads=((0, 0),))) == ()  # nothing comes before it


def test_sets_leave_out_what_they_stand_beside_and_know_their_level():
    anatomy = anatomy_of(tiny_model("llama"))
    write_F = torch.ones(80)
    write_F[:3] = torch.tensor([30.0, 20.0, 10.0])
    magnitude_E = torch.ones(48)
    magnitude_E[5], magnitude_E[9], magnitude_E[7] = 100.0, 50.0, 60.0
    activity = Activity(
        writes={(layer, None): write_F for layer in range(3)}, magnitude_E=magnitude_E, directions={}, written={}
    )
    neurons, minimal = (Neuron(1, None, 0),), (Neuron(1, None, 0), Neuron(2, None, 1))
    plan = replace(PLAN, super_neurons=neurons, candidates=(Neuron(1, None, 1),))
    found = draw_controls(activity, anatomy, plan, minimal)
    acted_on = {*neurons, *minimal, *plan.candidates}
    assert len(found.sets) == len(found.set_levels) == NUM_RANDOM_SETS
    assert all(len(drawn) == 2 and acted_on.isdisjoint(drawn) for drawn in found.sets)
    for drawn, level in zip(found.sets, found.set_levels, strict=True):
        assert level == pytest.approx(activity.of(drawn) / 50)
    assert set(found.dimensions).isdisjoint({5, 9})
    assert len(set(found.dimensions)) == 2
    assert draw_controls(activity, anatomy, PLAN, ()).sets == ()


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("how", ["turn", "permute"])
def test_a_change_written_elsewhere_is_as_large_and_leaves_the_neurons(family, how):
    """By hooks on the feed-forward: what it adds is minus the activations times the other vectors."""
    model = tiny_model(family)
    anatomy, layer = anatomy_of(model), 1
    group = (layer, None if family == "llama" else 2)
    neurons = [Neuron(*group, 3), Neuron(*group, 9)]
    change = ablate_neurons(model, neurons).elsewhere(how, 0)
    own_En = anatomy.layers[layer].group_weight(group[1])[:, [3, 9]].float()
    other_En = change.written[group]
    torch.testing.assert_close(other_En.T @ other_En, own_En.T @ own_En, rtol=1e-4, atol=1e-6)
    assert (torch.nn.functional.cosine_similarity(other_En, own_En, dim=0).abs() < 0.9).all()
    if how == "permute":
        assert torch.equal(other_En.sort(0).values, own_En.sort(0).values)
    written = []
    handle = model.model.layers[layer].mlp.register_forward_hook(lambda _, args, out: written.append(out))
    with torch.no_grad():
        values_BTn = read_neurons(anatomy, model, IDS, {group: (3, 9)})[group]
        written.clear()
        model(IDS)
        with change:
            written.clear()
            model(IDS)
            changed = written[-1]
            kept_BTn = read_neurons(anatomy, model, IDS, {group: (3, 9)})[group]
        model(IDS)
    handle.remove()
    assert torch.equal(kept_BTn, values_BTn)
    assert float(values_BTn.abs().max()) > 0
    torch.testing.assert_close(changed - written[-1], -(values_BTn @ other_En.T), rtol=1e-3, atol=1e-6)


def test_a_control_that_does_as_much_as_the_neurons_would_be_seen():
    """In the planted chain it ends no sink at position 0 and makes none elsewhere; where it does, its claim falls."""
    model, _ = planted_chain(0)
    data = study(load(model), num_sequences=16, length=32).data
    judged = judge([(CLAIMS[name], CLAIMS[name].numbers(data)) for name in NEURONS], 16, num_targets=3, largest=0.5)
    assert [each.verdict for each in judged] == ["holds", "holds"]
    assert judged[0].control > 0.75
    assert judged[1].control < 0.01
    results = dict(data.results)
    for how in ("turn", "permute"):
        for number in (None, 1, 2):
            results[Condition(f"ablate_{how}", 0, number=number)] = results[data.removal]
        for target in data.plan.targets:
            results[Condition(f"transplant_{how}", target)] = results[Condition("transplant_super_neurons", target)]
    data = replace(data, results=results)
    judged = judge([(CLAIMS[name], CLAIMS[name].numbers(data)) for name in NEURONS], 16, num_targets=3, largest=0.5)
    assert [each.verdict for each in judged] == ["does not hold", "does not hold"]


NEURONS = ("neurons_necessary", "super_neurons_sufficient")
