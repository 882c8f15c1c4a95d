"""The decoder: against transformers' Llama and Qwen3, its initial weights, saving, generation, tracing, refusals."""

import json
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import sinkscope
from sinkscope.attention.variants import VARIANTS, LearnedSink
from sinkscope.errors import InputError
from sinkscope.models.anatomy import anatomy_of
from sinkscope.pretrain.checkpoints import export
from sinkscope.pretrain.decoder import FEED_FORWARD_VARIANTS, BoundedLinear, Decoder
from sinkscope.pretrain.presets import PRESETS, decoder_config, preset

TINY = dict(
    vocab_size=97,
    hidden_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=80,
    max_position_embeddings=64,
)


def tokens(length=33) -> Tensor:
    return torch.randint(0, 97, (2, length), generator=torch.Generator().manual_seed(0))


def decoder(variant="softmax", *, scale=8.0, **fields) -> Decoder:
    """A decoder whose attention is far from uniform and whose gains are away from their neutral values."""
    model = Decoder(decoder_config(TINY | fields | {"attention_variant": variant})).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(scale)
            else:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def logits(model) -> Tensor:
    with torch.no_grad():
        return model(tokens()).logits


ARCHITECTURES = [("softmax", "LlamaForCausalLM"), ("qk_norm", "Qwen3ForCausalLM")]


@pytest.mark.parametrize("fields", [{}, {"tie_word_embeddings": False, "rope_theta": 500.0, "hidden_size": 52}])
@pytest.mark.parametrize(("variant", "architecture"), ARCHITECTURES)
def test_exports_compute_the_same(variant, architecture, fields, tmp_path):
    model = decoder(variant, **fields)
    assert export(model, tmp_path) == architecture
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(theirs).__name__ == architecture
    torch.testing.assert_close(logits(theirs), logits(model), rtol=1e-4, atol=1e-4)
    other = decoder(variant, **fields | {"rope_theta": 123.0})
    assert (logits(theirs) - logits(other)).abs().max() > 0.1  # the control


def test_exports_load_without_the_package_and_others_do_not(tmp_path):
    for variant in ("softmax", "qk_norm", "gate"):
        export(decoder(variant), tmp_path / variant)
    program = (
        "import sys; from transformers import AutoModelForCausalLM as A\n"
        f"folders = [{str(tmp_path)!r} + '/' + name for name in ('softmax', 'qk_norm')]\n"
        "names = [type(A.from_pretrained(folder)).__name__ for folder in folders]\n"
        f"assert names == {[name for _, name in ARCHITECTURES]}\n"
        "assert 'sinkscope' not in sys.modules; print('loaded', flush=True)\n"
        f"A.from_pretrained({str(tmp_path / 'gate')!r})"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout.strip() == "loaded"
    assert run.returncode != 0
    assert "sinkscope_decoder" in run.stderr


@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_and_loaded_by_the_auto_class(variant, tmp_path):
    options = {"per_head": True, "offset": True} if variant.startswith("head_norm") else {}
    model = decoder(variant, variant_options=options, feed_forward_variant="bounded_swiglu")
    assert export(model, tmp_path) == "Decoder"
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path).eval()), logits(model))
    loaded = sinkscope.load(tmp_path)
    assert torch.equal(logits(loaded.model), logits(model))


def test_loading_is_enough_and_importing_is_light(tmp_path):
    """Nothing of ours but `load` need be called before a folder of the decoder is read."""
    export(decoder("sigmoid"), tmp_path)
    program = (
        "import sys, sinkscope; print('torch' in sys.modules)\n"
        f"print(type(sinkscope.load({str(tmp_path)!r}).model).__name__)"
    )
    run = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert run.stdout.split() == ["False", "Decoder"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_generation_with_a_cache_equals_generation_without(variant):
    model, prompt = decoder(variant), tokens(7)
    with_cache = model.generate(prompt, max_new_tokens=9, do_sample=False)
    without = model.generate(prompt, max_new_tokens=9, do_sample=False, use_cache=False)
    assert torch.equal(with_cache, without)
    assert len(set(with_cache[0, 7:].tolist())) > 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_on_the_left_changes_nothing(variant):
    model, ids = decoder(variant), tokens(20)
    padded = torch.cat([torch.zeros(2, 5, dtype=torch.long), ids], 1)
    mask = (torch.arange(25) >= 5).long().expand(2, -1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        found = model(padded, attention_mask=mask, position_ids=positions).logits[:, 5:]
        expected = model(ids).logits
        assert (model(padded).logits[:, 5:] - expected).abs().max() > 1e-2  # the control
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_token_sees_a_later_one(variant):
    model, ids = decoder(variant), tokens()
    changed = ids.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % 97
    with torch.no_grad():
        a, b = model(ids).logits, model(changed).logits
    torch.testing.assert_close(a[:, :20], b[:, :20], rtol=1e-5, atol=1e-5)
    assert (a[:, 20:] - b[:, 20:]).abs().max() > 0.1
    with torch.no_grad():  # nor does its state depend on how much text follows
        torch.testing.assert_close(model(ids[:, :20]).logits, a[:, :20], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("variant", "feed_forward"),
    [
        *((variant, "swiglu") for variant in VARIANTS),
        *(("softmax", name) for name in FEED_FORWARD_VARIANTS if name != "swiglu"),
    ],
)
def test_traces_equal_the_written_out_attention(variant, feed_forward):
    model = decoder(variant, feed_forward_variant=feed_forward)
    reading = sinkscope.trace(model, tokens()).recording
    model.set_attn_implementation("eager")
    weights = {}
    for layer, block in enumerate(model.blocks):
        block.self_attn.register_forward_hook(lambda _, args, output, i=layer: weights.update({i: output[1]}))
    logits(model)
    received = torch.stack([weights[i].sum(2).mean(0) / torch.arange(33, 0, -1) for i in range(3)])
    torch.testing.assert_close(reading["received"], received, rtol=1e-4, atol=1e-5)
    assert len(set(reading["received"][0, :, 0].tolist())) == 4


def test_anatomy_reads_the_weights_that_act():
    model = decoder("softmax", feed_forward_variant="bounded_swiglu")
    layer = anatomy_of(model).layers[1]
    down = model.blocks[1].mlp.down_proj
    assert torch.equal(layer.down_weights()[0][1], down.weight)
    assert not torch.equal(down.weight, down.raw_weight)


def test_parts_for_training_make_the_whole():
    model, ids = decoder("head_norm"), tokens()
    hidden = model.model.embed_tokens(ids)
    rotation = model.model.rotation(hidden)
    for block in model.blocks:
        hidden = block(hidden, rotation)
    parts = model.final_norm(hidden)
    assert torch.equal(parts, model.hidden_states(ids))
    torch.testing.assert_close(parts @ model.lm_head_weight.T, logits(model))
    loss = model(ids, labels=ids).loss
    expected = -logits(model).double().log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None]).mean()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)


def test_initial_weights_follow_the_table():
    fields = dict(hidden_size=256, num_attention_heads=8, head_dim=None, intermediate_size=512, vocab_size=997)
    options = {"offset": True, "initial_lambda": 0.5}
    config = decoder_config(
        TINY | fields | {"attention_variant": "head_norm_gate", "variant_options": options, "initializer_range": 0.04}
    )
    for name, parameter in Decoder(config).named_parameters():
        if name.endswith("norm.weight") and "head_norm" not in name:
            assert (parameter == 1).all(), name
        elif name.endswith("head_norm.weight"):
            assert (parameter == 0.5).all(), name
        elif name.endswith("offset"):
            assert (parameter == 0).all(), name
        else:
            std = 0.04 / 6**0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.04
            # 65,536 draws or more: the standard deviation is good to 0.3 percent, three of those are 1.
            assert abs(parameter.std().item() / std - 1) < 0.01, name
            assert abs(parameter.mean().item()) < 0.02 * std, name
    assert (
        Decoder(decoder_config(TINY | {"attention_variant": "learned_sink"})).blocks[0].self_attn.variant.sink == 0
    ).all()


class Planted(LearnedSink):
    """As a contributor may write it, upon one that has a parameter already."""

    def __init__(self, shape):
        super().__init__(shape)
        self.sink = torch.nn.Parameter(torch.full((shape.num_heads,), 2.0))
        self.strength = torch.nn.Parameter(torch.ones(shape.num_heads))
        self.mixed = torch.nn.Linear(shape.num_heads, shape.num_heads, bias=False)


def test_a_parameter_of_a_variant_keeps_what_its_class_gave_it(tmp_path, monkeypatch):
    monkeypatch.setitem(VARIANTS, "planted", Planted)
    made = [Decoder(decoder_config(TINY | {"attention_variant": "planted"})) for _ in range(2)]
    variant, again = (model.blocks[0].self_attn.variant for model in made)
    assert (variant.strength == 1).all()
    assert (variant.sink == 2).all()
    assert torch.equal(variant.mixed.weight, again.mixed.weight)  # drawn from the seed, as every Linear
    variant.strength.data.fill_(3)
    made[0].save_pretrained(tmp_path)
    assert (Decoder.from_pretrained(tmp_path).blocks[0].self_attn.variant.strength == 3).all()


def test_initial_weights_are_a_pure_function_of_the_seed():
    def weights(seed, variant="softmax", **fields):
        return dict(Decoder(decoder_config(TINY | fields | {"seed": seed, "attention_variant": variant})).state_dict())

    with torch.random.fork_rng():
        torch.manual_seed(1)
        first, other, gated = weights(0), weights(1), weights(0, "gate")
        torch.manual_seed(2)
        again = weights(0)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(torch.equal(first[name], gated[name]) for name in first)  # variants share what both have
    assert not any(torch.equal(first[name], other[name]) for name in first if "proj" in name)
    assert not torch.equal(
        first["model.layers.0.self_attn.k_proj.weight"], first["model.layers.0.self_attn.v_proj.weight"]
    )


def test_bounded_output_vectors_keep_their_bound_whatever_is_learned():
    down = BoundedLinear(5, 64)
    generator = torch.Generator().manual_seed(0)
    raw = torch.randn(64, 5, generator=generator)
    raw[3, 1] = 1e6  # one massive dimension
    raw[1:, 2] = 0  # one dimension only
    raw[:20, 3] *= 50
    down.raw_weight.data.copy_(raw)
    size = down.weight.detach().abs()
    assert (size.amax(0) <= 4 * size.median(0).values + 1e-6).all()
    share = size.square().amax(0) / size.square().sum(0).clamp(min=1e-30)
    assert (share <= 2 * 16 / 64).all()
    ratio = size.square().sum(0).square() / size.pow(4).sum(0).clamp(min=1e-30)
    assert (ratio[size.any(0)] >= 64 / 32).all()
    assert (down.weight[:, 2] == 0).all()
    assert raw[:, 1].abs().amax() / raw[:, 1].abs().median() > 1e5  # the control: a free matrix has no bound
    x = torch.randn(7, 5, generator=generator)
    torch.testing.assert_close(down(x), x @ down.weight.T)


def test_bounded_output_vectors_have_the_gradient_of_their_differences():
    down = BoundedLinear(3, 9).double()
    down.raw_weight.data.copy_(torch.randn(9, 3, generator=torch.Generator().manual_seed(2)).exp() - 0.5)
    assert (down.weight != down.raw_weight).any()

    def weight(raw):
        return torch.func.functional_call(down, {"raw_weight": raw}, (torch.eye(3, dtype=torch.float64),))

    assert torch.autograd.gradcheck(weight, (down.raw_weight.detach().requires_grad_(),))


def test_presets_have_the_sizes_that_they_are_named_after():
    with torch.device("meta"):
        count = {name: sum(p.numel() for p in Decoder(decoder_config(preset(name))).parameters()) for name in PRESETS}
    assert count["tiny"] < 300_000
    assert round(count["30m"] / 1e6) == 31
    assert round(count["152m"] / 1e6) == 152
    assert round(count["1b"] / 1e8) == 11


def test_says_which_paths_run():
    assert decoder("head_norm").paths() == {"attention": "scaled_dot_product_attention", "head_norm": "torch"}


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"hidden_sizes": 4}, r"has no key 'hidden_sizes'\. Write hidden_size\."),
        ({"hidden_size": 0}, "hidden_size must be a whole number from 1 to 16777216, not 0"),
        ({"hidden_size": "64"}, "not '64'"),
        ({"num_hidden_layers": True}, "not True"),
        ({"head_dim": 0}, "head_dim must be .*, not 0"),
        ({"num_attention_heads": 5, "head_dim": None}, r"5 heads do not divide hidden_size \d+"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must be a divisor of num_attention_heads 4, not 3"),
        ({"head_dim": 15}, "head_dim must be even .*, not 15"),
        ({"rope_theta": "1e4"}, "rope_theta must be a number above 0, not '1e4'"),
        ({"initializer_range": float("nan")}, "initializer_range must be .*, not nan"),
        ({"variant_options": ["per_head"]}, "variant_options must be names with values"),
        ({"attention_variant": "headnorm"}, "cannot be 'headnorm'"),
        ({"feed_forward_variant": "relu"}, "no feed-forward variant 'relu'.*one of swiglu, bounded_swiglu"),
    ],
)
def test_refusals(fields, match):
    with pytest.raises(InputError, match=match):
        Decoder(decoder_config(TINY | fields))


def test_an_unknown_preset_is_refused():
    with pytest.raises(InputError, match=r"no preset '7b'\. Choose one of tiny, 30m, 152m, 1b as `config`"):
        preset("7b")


def test_config_travels_as_json(tmp_path):
    config = decoder_config(TINY | {"attention_variant": "head_norm", "variant_options": {"offset": True}})
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["variant_options"] == {"offset": True}
    assert saved["model_type"] == "sinkscope_decoder"
