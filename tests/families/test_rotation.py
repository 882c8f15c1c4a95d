"""The residual basis turned: logits to rounding on every family where it is claimed, and a refusal where it is not."""

import copy
import functools
from typing import Any, cast

import pytest
import torch
from planted_models import planted_chain, random_tokens
from tiny_models import CONFIGURATIONS, tiny_model
from transformers import AutoModelForCausalLM

from sinkscope.errors import InputError
from sinkscope.models.anatomy import anatomy_of
from sinkscope.models.rotation import random_rotation, rotate
from sinkscope.tracing.trace import trace

POST_NORMS = ("gemma2", "gemma3", "olmo2", "olmo3", "glm4")
EXACT = [family for family in CONFIGURATIONS if family not in POST_NORMS]
MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
LAYER_NORMS = ("gpt2", "gpt_neox", "opt", "falcon")
IDS = torch.randint(3, 97, (2, 24), generator=torch.Generator().manual_seed(0))


def double(family: str, **overrides):
    """A tiny model in float64, and without the product over all experts, which knows no float64."""
    model = tiny_model(family, dtype=torch.float64, **overrides)
    if family in MIXTURES:
        model.set_experts_implementation("eager")
    return model


def in_float64(family: str):
    """All of it: the RMS norms of these families work in float32, whatever the model is."""
    model = double(family)
    for part in model.modules():
        if type(part).__name__.endswith("RMSNorm"):
            part.forward = functools.partial(plain_norm, part)
    return model


def plain_norm(norm, x):
    return norm.weight * x / (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def residual(model):
    """What leaves the second block."""
    kept = []
    hook = (
        anatomy_of(model)
        .layers[1]
        .block.register_forward_hook(lambda _, args, out: kept.append(out[0] if isinstance(out, tuple) else out))
    )
    logits(model)
    hook.remove()
    return kept[0]


def distance(found, expected) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("family", EXACT)
def test_the_function_stays_and_every_state_is_turned(family, tmp_path):
    model = double(family)
    before = copy.deepcopy(model.state_dict())
    rotation = random_rotation(anatomy_of(model).width, seed=3, centred=family in LAYER_NORMS)
    turned = rotate(model, rotation)
    assert distance(logits(turned), logits(model)) < 1e-6
    expected = residual(model) @ rotation.T
    assert distance(residual(turned), expected) < 1e-6
    assert distance(residual(turned), residual(model)) > 0.5, "the stream itself must be another"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    turned.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    if family in MIXTURES:
        loaded.set_experts_implementation("eager")
    assert distance(logits(loaded), logits(model)) < 1e-6


@pytest.mark.parametrize("family", EXACT)
def test_all_in_float64_the_logits_agree_to_its_rounding(family):
    """All but routers that work in float32: a rounding there is one of float32 in the weights of experts."""
    model = in_float64(family)
    turned = rotate(model)
    for part in turned.modules():  # a copy keeps the functions of the original
        if "forward" in part.__dict__:
            part.forward = functools.partial(plain_norm, part)
    assert distance(logits(turned), logits(model)) < (
        1e-6 if family in ("mixtral", "qwen3_moe", "deepseek_v3") else 1e-11
    )


@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon"])
def test_tied_embeddings_are_untied(family, tmp_path):
    model = double(family, tie_word_embeddings=True)
    head: Any = model.get_output_embeddings()
    assert head.weight is model.get_input_embeddings().weight
    turned = rotate(model)
    assert model.config.tie_word_embeddings
    assert not turned.config.tie_word_embeddings
    turned.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert distance(logits(loaded), logits(model)) < 1e-6
    assert cast(Any, loaded).get_output_embeddings().weight is not loaded.get_input_embeddings().weight


@pytest.mark.parametrize("family", POST_NORMS)
def test_a_norm_after_a_projection_is_refused(family):
    with pytest.raises(InputError, match="a norm with gains follows the projections of layer 0"):
        rotate(tiny_model(family))


def test_what_cannot_be_turned_is_refused():
    with pytest.raises(InputError, match="a projection brings the embeddings"):
        rotate(tiny_model("opt", word_embed_proj_dim=24))
    model = tiny_model("llama")
    for wrong in (torch.eye(47), 2 * torch.eye(48)):
        with pytest.raises(InputError, match="must be orthogonal and 48 x 48"):
            rotate(model, wrong)
    with pytest.raises(InputError, match="rows must add up to 1"):
        rotate(tiny_model("gpt2"), random_rotation(48, seed=0))
    # A part that is not known: something elementwise on the stream, which only the logits betray.
    model.model.layers[1].register_forward_hook(lambda _, args, out: out.tanh() if torch.is_tensor(out) else out)
    with pytest.raises(InputError, match="the logits change by"):
        rotate(model)


def test_training_mode_and_low_precision_are_kept():
    model = tiny_model("gpt2", dtype=torch.bfloat16).train()
    turned = rotate(model)
    assert turned.training
    assert model.training
    assert {p.dtype for p in turned.parameters()} == {torch.bfloat16}


def test_disparity_by_coordinate_goes_and_the_sink_stays():
    model, facts = planted_chain(0)
    ids = random_tokens(facts, num_sequences=8, length=40)
    before, after = (trace(m, ids, effective_rank=False).recording for m in (model, rotate(model)))
    torch.testing.assert_close(after.sink_rate, before.sink_rate)
    assert before.sink_rate[0] > 0.2
    assert before["dom_ratio"][3, 0] > 10
    assert after["dom_ratio"][3, 0] < 6


def test_a_random_rotation_is_orthogonal_and_drawn_by_its_seed():
    for centred in (False, True):
        first, again, other = (random_rotation(20, seed=seed, centred=centred) for seed in (0, 0, 1))
        torch.testing.assert_close(first @ first.T, torch.eye(20, dtype=torch.float64))
        assert torch.equal(first, again)
        assert not torch.allclose(first, other, atol=0.1)
        assert torch.allclose(first.sum(1), torch.ones(20, dtype=torch.float64)) == centred
