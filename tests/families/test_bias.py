"""The contraction of every family against a plain float64 pass, and what each control does to each family.

Where the stream between attention and feed-forward can be read is written down here a second time.
Axes: N sequences, T positions, E width.
"""

import contextlib

import numpy as np
import pytest
import torch
from tiny_models import CONFIGURATIONS, PARTS, tiny_model

from sinkscope.errors import InputError
from sinkscope.initial_bias import measurement as bias_measurement
from sinkscope.initial_bias.contraction import curve_positions
from sinkscope.initial_bias.controls import CONTROLS, under_control
from sinkscope.initial_bias.measurement import measure_bias
from sinkscope.models.given_ids import given_batch
from sinkscope.models.loading import load

N, T = 18, 20
VARIANTS = {
    **{family: (family, {}) for family in CONFIGURATIONS},
    "falcon in sequence": ("falcon", dict(new_decoder_architecture=False, multi_query=True, parallel_attn=False)),
    "gpt_neox in sequence": ("gpt_neox", dict(use_parallel_residual=False)),
}
READS_BETWEEN = {
    **dict.fromkeys(CONFIGURATIONS, "post_attention_layernorm"),
    **dict.fromkeys(("gemma2", "gemma3"), "pre_feedforward_layernorm"),
    **dict.fromkeys(("olmo2", "olmo3"), "mlp"),
    "gpt2": "ln_2",
    "opt": "final_layer_norm",
    "falcon in sequence": "post_attention_layernorm",
    "gpt_neox in sequence": "post_attention_layernorm",
}
"""The module that the stream between attention and feed-forward enters; parallel blocks have none."""
PARALLEL = ("falcon", "gpt_neox")
REFUSED = {("gpt_oss", "tanh_activation"), ("opt", "odd_feed_forward")}


def models(name):
    family, overrides = VARIANTS[name]
    return family, load(tiny_model(family, dtype=torch.float64, **overrides))


def tokens(loaded, seed: int = 0, num_sequences: int = N):
    generator = torch.Generator().manual_seed(seed)
    return given_batch(torch.randint(3, 97, (num_sequences, T), generator=generator), model=loaded.model)


@pytest.mark.parametrize("name", VARIANTS)
def test_contraction_equals_a_plain_pass(name, monkeypatch):
    monkeypatch.setattr(bias_measurement, "CHUNK_TOKENS", 7 * T)  # chunks of 7, 7 and 4 sequences
    family, loaded = models(name)
    batch = tokens(loaded)
    found = measure_bias(loaded, batch).contraction
    sites, values = plain_pass(name, family, loaded.model, batch.ids)
    assert len(sites) == len(found.inter_SN)
    for site, states_NTE in enumerate(sites):
        unit = states_NTE / states_NTE.norm(dim=-1, keepdim=True)
        last = unit[:, -1] @ unit[:, -1].T
        assert found.inter_SN[site].mean() == pytest.approx(mean_off_diagonal(last), abs=1e-12)
        intra = [mean_off_diagonal(sequence @ sequence.T) for sequence in unit]
        assert found.intra_SN[site] == pytest.approx(np.array(intra), abs=1e-12)
        assert found.mean_state_SE[site] == pytest.approx(unit[:, -1].mean(0).numpy(), abs=1e-12)
        if site % 2 == 0:
            curve = [mean_off_diagonal(unit[:, t] @ unit[:, t].T) for t in range(T)]
            assert found.inter_by_position[site // 2] == pytest.approx(np.array(curve), abs=1e-12)
    for layer, aggregation in enumerate(values):
        assert found.value_variance[layer] == pytest.approx(aggregation.var(0).mean(-1).numpy(), rel=1e-9)


def plain_pass(name, family, model, ids):
    """(states [N, T, E] at every site, aggregation by layer), each kept whole."""
    blocks, kept = model.get_submodule(PARTS[family]["blocks"]), {}

    def keep(key):
        return lambda module, args, kwargs, *_: kept.__setitem__(
            key, (args[0] if args else kwargs["hidden_states"]).clone()
        )

    with contextlib.ExitStack() as stack, torch.no_grad():
        for index, block in enumerate(blocks):
            output = block.get_submodule(PARTS[family]["output"])
            hooks = [
                block.register_forward_pre_hook(keep(("in", index)), with_kwargs=True),
                output.register_forward_pre_hook(keep(("o", index)), with_kwargs=True),
                block.register_forward_hook(
                    lambda m, a, out, i=index: kept.__setitem__(("out", i), first(out).clone())
                ),
            ]
            if name in PARALLEL:
                hook = output.register_forward_hook(lambda m, a, out, i=index: kept.__setitem__(("a", i), out.clone()))
                hooks.append(hook)
            else:
                between = block.get_submodule(READS_BETWEEN[name])
                hooks.append(between.register_forward_pre_hook(keep(("mid", index)), with_kwargs=True))
            for hook in hooks:
                stack.callback(hook.remove)
        model(ids, use_cache=False)
    sites = [kept["in", 0]]
    for index in range(len(blocks)):
        mid = kept["in", index] + kept["a", index] if name in PARALLEL else kept["mid", index]
        sites += [mid.view(N, T, -1), kept["out", index]]
    return sites, [kept["o", index].view(N, T, -1) for index in range(len(blocks))]


def first(output):
    return output[0] if isinstance(output, tuple) else output


def mean_off_diagonal(gram):
    count = len(gram)
    return float((gram.sum() - gram.diagonal().sum()) / (count * (count - 1)))


def logits(model, ids):
    with torch.no_grad():
        return model(ids, use_cache=False).logits[:, -1]


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_control_does_what_it_says_and_leaves_no_trace(name, control):
    family, loaded = models(name)
    model, batch = loaded.model, tokens(loaded)
    before = logits(model, batch.ids)
    if (name, control) in REFUSED:
        with pytest.raises(InputError, match=f"In {family} "), under_control(control, loaded, tokens(loaded, seed=1)):
            pass
    else:
        with under_control(control, loaded, tokens(loaded, seed=1)):
            changed = logits(model, batch.ids)
            CHECKS[control](name, family, loaded, batch, changed)
        assert (changed - before).abs().max() > 1e-6, "a control that changes nothing is none"
    assert torch.equal(logits(model, batch.ids), before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def no_attention(name, family, loaded, batch, changed):
    """The last position answers to its own token alone."""
    other = batch.ids.clone()
    other[:, :-1] = other[:, :-1].roll(1, 0)
    assert torch.allclose(logits(loaded.model, other), changed, atol=1e-12)


def no_feed_forward(name, family, loaded, batch, changed):
    """Other feed-forward weights give the same answer."""
    blocks = loaded.model.get_submodule(PARTS[family]["blocks"])
    chosen = [
        parameter
        for block in blocks
        for path, parameter in block.named_parameters()
        if path.startswith(("mlp.", "fc1", "fc2"))
    ]
    assert chosen
    with torch.no_grad():
        for parameter in chosen:
            parameter.mul_(0.5)
        again = logits(loaded.model, batch.ids)
        for parameter in chosen:
            parameter.mul_(2)
    assert torch.equal(again, changed)


def odd_feed_forward(name, family, loaded, batch, changed):
    block = loaded.model.get_submodule(PARTS[family]["blocks"])[0]
    x = torch.randn(2, 3, loaded.model.config.hidden_size, dtype=torch.float64)
    with torch.no_grad():
        assert torch.allclose(first(block.mlp(-x)), -first(block.mlp(x)), atol=1e-12)
        plain = block.mlp.forward
        assert not torch.allclose(first(plain(-x)), -first(plain(x)), atol=1e-3), "the feed-forward itself is not odd"


def tanh_activation(name, family, loaded, batch, changed):
    """Every activation that ran gave tanh of its input, and every layer has one."""
    blocks, seen = loaded.model.get_submodule(PARTS[family]["blocks"]), []
    with contextlib.ExitStack() as stack:
        for index, block in enumerate(blocks):
            for path, module in block.named_modules():
                if path.rpartition(".")[2] in ("act", "act_fn", "activation_fn"):

                    def keep(module, args, output, index=index):
                        seen.append(index)
                        assert torch.equal(output, args[0].tanh())

                    stack.callback(module.register_forward_hook(keep).remove)
        logits(loaded.model, batch.ids)
    assert set(seen) == set(range(len(blocks)))


def redrawn_embeddings(name, family, loaded, batch, changed):
    weight = loaded.model.get_input_embeddings().weight.detach()
    original = tiny_model(family, dtype=torch.float64, **VARIANTS[name][1]).get_input_embeddings().weight.detach()
    assert float(weight.std() / original.std()) == pytest.approx(1, abs=0.05)
    assert abs(float(torch.corrcoef(torch.stack([weight.flatten(), original.flatten()]))[0, 1])) < 0.06


def calibrated_variance(name, family, loaded, batch, changed):
    """On the sequences it was calibrated on, the variance of every position is that of the first."""
    calibration = tokens(loaded, seed=1)
    variance = measure_bias(loaded, calibration).contraction.value_variance
    assert variance / variance[:, :1] == pytest.approx(1, rel=1e-9)
    untouched = load(tiny_model(family, dtype=torch.float64, **VARIANTS[name][1]))
    plain = measure_bias(untouched, calibration).contraction.value_variance
    # Learned sinks take from position 0, so there its variance may be the smallest.
    assert abs(np.log(plain[0, 0] / plain[0, T // 2 :].mean())) > 0.25, "without calibration it is not flat"


CHECKS = {
    "no_attention": no_attention,
    "no_feed_forward": no_feed_forward,
    "odd_feed_forward": odd_feed_forward,
    "tanh_activation": tanh_activation,
    "redrawn_embeddings": redrawn_embeddings,
    "calibrated_variance": calibrated_variance,
}


def test_the_odd_part_of_gelu_is_half_the_identity():
    """GPT-2 without biases: gelu(x) - gelu(-x) = x, so its odd feed-forward is a linear one."""
    model = tiny_model("gpt2", dtype=torch.float64)
    loaded = load(model)
    with torch.no_grad():
        for block in model.transformer.h:
            block.mlp.c_fc.bias.zero_()
            block.mlp.c_proj.bias.zero_()
    batch = tokens(loaded)
    with under_control("odd_feed_forward", loaded, batch):
        odd = logits(model, batch.ids)
    for block in model.transformer.h:
        block.mlp.act = torch.nn.Identity()
        block.mlp.c_proj.weight.data /= 2
    assert torch.allclose(odd, logits(model, batch.ids), atol=1e-10)


def test_curves_of_long_sequences_keep_the_first_and_the_last_position():
    assert curve_positions(64).tolist() == list(range(64))
    positions = curve_positions(1000).tolist()
    assert positions[:4] == [0, 1, 2, 3]
    assert positions[-1] == 999
    assert len(set(positions)) == len(positions) <= 64


def test_control_a_part_that_stays_silent_is_an_error():
    loaded = load(tiny_model("llama"))
    layer = loaded.model.model.layers[1]
    # The second layer's attention is carried out by a module that the family's row does not name.
    layer.self_attn.o_proj.forward, real = None, layer.self_attn.o_proj.forward
    layer.self_attn.o_proj.__class__ = type("Silent", (torch.nn.Linear,), {"__call__": lambda self, x: real(x)})
    with pytest.raises(RuntimeError, match="Check the entry llama"):
        measure_bias(loaded, tokens(loaded))
