"""A probe's numbers against plain definitions in float64, and that probing leaves no trace in the model."""

import itertools
from dataclasses import replace

import pytest
import torch

from sinkscope.errors import InputError
from sinkscope.measures.dimension_disparity import effective_rank
from sinkscope.pretrain.decoder import Decoder, rotated
from sinkscope.pretrain.presets import decoder_config, preset
from sinkscope.pretrain.probes import QUANTITIES, SinkProbe, probe, random_batch

LENGTH, NUM_SEQUENCES = 20, 6


def decoder(scale):
    model = Decoder(decoder_config(preset("tiny"))).double()
    with torch.no_grad():
        for block in model.blocks:
            block.self_attn.q_proj.weight *= scale
            block.self_attn.k_proj.weight *= scale
    return model.train()


@pytest.fixture(scope="module")
def model():
    """A decoder with queries and keys so large that attention is far from even: on a short text, heads have sinks."""
    return decoder(20)


@pytest.fixture(scope="module")
def batch(model):
    return random_batch(model, length=LENGTH, num_sequences=NUM_SEQUENCES, seed=1)


def activations(model, ids):
    """By layer: attention [B, H, T, S], states, aggregation, neurons and residual [B, T, ...]."""
    kept, handles = [{} for _ in model.blocks], []

    def keep_input(entry, name):
        return lambda module, args: entry.__setitem__(name, args[0])

    def keep_output(entry, name, part):
        return lambda module, args, output: entry.__setitem__(name, output if part is None else output[part])

    for entry, block in zip(kept, model.blocks, strict=True):
        inputs = {"state": block.self_attn, "aggregation": block.self_attn.o_proj, "neurons": block.mlp.down_proj}
        handles += [part.register_forward_pre_hook(keep_input(entry, name)) for name, part in inputs.items()]
        handles.append(block.self_attn.register_forward_hook(keep_output(entry, "attention", 1)))
        handles.append(block.register_forward_hook(keep_output(entry, "residual", None)))
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            model(ids, use_cache=False)
    finally:
        model.set_attn_implementation(before)
        for handle in handles:
            handle.remove()
    return kept


def expected_layers(model, ids):
    """(the key told about, its rate, every quantity by layer) by the definitions, with attention held whole."""
    kept = activations(model, ids)
    queries = torch.arange(LENGTH)
    alpha = torch.stack(
        [torch.stack([entry["attention"][:, :, key:, key].mean(-1) for key in range(LENGTH)], -1) for entry in kept]
    )  # [L, B, H, S]
    rate = (alpha > 0.3).double().mean((0, 1, 2))
    # The strongest sink; without one the key that receives most attention.
    weight = rate if (rate[queries < LENGTH - 16] >= 0.05).any() else alpha.mean((0, 1, 2))
    position = int(torch.where(queries < LENGTH - 16, weight, -1.0).argmax())
    result: dict[str, list] = {name: [] for name in QUANTITIES}
    pairs = list(itertools.combinations(range(NUM_SEQUENCES), 2))
    sinks = {key for key in range(LENGTH - 16) if rate[key] >= 0.05} | {position}
    others = [t for t in range(LENGTH) if t not in sinks]
    for layer, entry in enumerate(kept):
        variance = entry["aggregation"].var(0, correction=1).mean(-1)
        result["variance_ratio"].append(variance[0] / variance[LENGTH // 2 :].mean())
        weight = model.blocks[layer].mlp.down_proj.weight
        write = (entry["neurons"].abs() * weight.norm(dim=0)).amax(0)  # [T, F], over sequences
        largest = write.amax(-1)
        result["write_contrast"].append(largest[position] / largest[queries != position].median())
        vector = weight[:, write[position].argmax()]
        result["top_share"].append(vector.square().max() / vector.square().sum())
        ratio = (entry["residual"].abs().amax(-1) / entry["residual"].abs().mean(-1)).mean(0)
        result["dom_ratio"].append(ratio[position])
        result["dom_ratio_elsewhere"].append(ratio[others].mean())
        result["largest_residual"].append(entry["residual"].abs().max())
        result["effective_rank"].append(torch.tensor(effective_rank(entry["residual"].flatten(0, 1)[:1024])))
        states = torch.nn.functional.normalize(entry["state"][:, position], dim=-1)
        result["cosine"].append(torch.stack([states[i] @ states[j] for i, j in pairs]).mean())
        result["sink_rate"].append((alpha[layer, :, :, position] > 0.3).double().mean())
        result["attention"].append(alpha[layer, :, :, position].mean())
    return position, rate, {name: torch.stack(values).tolist() if values else [] for name, values in result.items()}


def largest_logit(model, ids):
    """Of any query and any key up to it."""
    largest, length = [], ids.shape[1]

    def keep(module, args):
        def heads(projection):
            return projection(args[0]).unflatten(-1, (-1, module.head_size))

        queries, keys = (rotated(heads(part), args[1]) for part in (module.q_proj, module.k_proj))
        keys = keys.repeat_interleave(queries.shape[2] // keys.shape[2], dim=2)
        logits = torch.einsum("bthd,bshd->bhts", queries, keys) / module.head_size**0.5
        largest.append(float(logits.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf).max()))

    handles = [block.self_attn.register_forward_pre_hook(keep) for block in model.blocks]
    with torch.no_grad():
        model(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return max(largest)


@pytest.mark.parametrize("scale", [20, 10])
def test_every_quantity_is_its_definition(scale, batch):
    model = decoder(scale)
    position, rate, expected = expected_layers(model, batch.ids)
    found = probe(model, batch)
    strongest = int(rate[: LENGTH - 16].argmax())
    # The control: with a scale of 10 there is no sink, and the key with the largest rate is another.
    assert (found.whole["num_sinks"] > 0, strongest == position) == ((True, True) if scale == 20 else (False, False))
    assert found.whole["sink_position"] == position
    assert found.whole["sink_rate"] == pytest.approx(float(rate[position]))
    assert found.whole["sink_rate"] > 0, "the control: there is something to find"
    assert found.whole["disparity"] == pytest.approx(max(expected["dom_ratio"]), rel=1e-4)
    assert found.whole["largest_activation"] == pytest.approx(max(expected["largest_residual"]), rel=1e-4)
    assert found.whole["largest_logit"] == pytest.approx(largest_logit(model, batch.ids), rel=1e-4)
    assert set(found.layers) == set(QUANTITIES)
    for name, values in expected.items():
        if name == "positive_queries":  # read at few positions, by code that has tests of its own
            continue
        assert found.layers[name] == pytest.approx(values, rel=1e-4, abs=1e-6), name


def test_control_another_batch_has_other_numbers(model, batch):
    _, _, expected = expected_layers(model, batch.ids.flip(0).roll(1, dims=1))
    found = probe(model, batch)
    assert found.layers["dom_ratio"] != pytest.approx(expected["dom_ratio"], rel=1e-4)


def test_no_rate_is_told_where_no_key_can_be_judged(model, batch):
    """17 tokens, of which one key has 16 later queries, are the control."""
    for length, is_judged in ((16, False), (17, True)):
        result = probe(model, batch.ids[:, :length])
        rates = [result.whole["sink_rate"], *result.layers["sink_rate"]]
        assert [rate is not None for rate in rates] == [is_judged] * len(rates)
        assert None not in result.layers["attention"]


def test_a_sink_probe_takes_no_sequences_in_which_nothing_can_be_judged(batch):
    with pytest.raises(InputError, match=r"more than 16 tokens in a sequence, not 16\. Raise `length`"):
        SinkProbe(print, length=16)
    short = replace(batch, ids=batch.ids[:, :16])
    with pytest.raises(InputError, match=r"not 16\. Give longer sequences as `batch`"):
        SinkProbe(print, batch=short)
    SinkProbe(print, length=17)
    SinkProbe(print, batch=batch)


def test_a_probe_leaves_the_model_as_it_was(model, batch):
    def state():
        hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
        modes = [module.training for module in model.modules()]
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        return hooks, modes, model.config._attn_implementation, torch.get_rng_state().tolist(), weights

    *before, weights_before = state()
    probe(model, batch)
    *after, weights_after = state()
    assert after == before
    assert all(torch.equal(a, b) for a, b in zip(weights_before, weights_after, strict=True))
