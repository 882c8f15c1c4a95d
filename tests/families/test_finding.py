"""Models without a row in the table: their parts are found and proven, and what was found is right.

Every causal model of the installed transformers that can be built small is tried, so that a new family is tried by
itself. What was found is compared with the model's own eager attention, and with sums that are made here.
"""

from __future__ import annotations

import functools

import pytest
import torch
from small_families import BASE, WIDTHS, check_attention, check_sum, refused_with, small_model, tokens
from tiny_models import CONFIGURATIONS, roughen, tiny_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sinkscope.errors import InputError
from sinkscope.models.anatomy import anatomy_of
from sinkscope.models.families import FAMILIES
from sinkscope.models.finding import find_family
from sinkscope.tracing.trace import trace

IN_TABLE = {model_type for family in FAMILIES for model_type in family.model_types}
MODEL_TYPES = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - IN_TABLE)

FOUND = {
    *("apertus", "arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "glm", "granite", "nemotron"),
    *("aria_text", "deepseek_v2", "ernie4_5_moe", "flex_olmo", "glm4_moe", "granitemoe", "granitemoeshared"),
    *("dots1", "hunyuan_v1_moe", "llama4_text", "minimax_m2", "minimax_m3_vl_text", "phimoe", "qwen2_moe"),
    *("olmo", "olmoe", "persimmon", "phi", "seed_oss", "starcoder2", "afmoe"),
    *("bamba", "falcon_h1", "jamba", "kimi_linear", "lfm2", "nemotron_h", "olmo_hybrid", "qwen3_5_text", "qwen3_next"),
    "granitemoehybrid",
}
"""Those that must be found, whatever else is."""
REFUSED = {
    "bloom": "does not ask the attention interface",
    "mpt": "does not ask the attention interface",
    "gptj": "does not ask the attention interface",
    "codegen": "does not ask the attention interface",
    "xglm": "does not ask the attention interface",
    "mamba": "so it has no attention sink",
    "falcon_mamba": "so it has no attention sink",
    "rwkv": "so it has no attention sink",
    "xlstm": "so it has no attention sink",
    "jetmoe": "no linear layer follows attention",
    "dbrx": "is not what enters it plus what attention",
    "longcat_flash": "has no list of 4 blocks",
    "deepseek_v4": "is no state of [2, 8] tokens",
    "diffllama": "attention is computed 2 times",
    "bert": "no linear layer follows attention",
}
"""Those that cannot be read, and why. What is neither here nor above may be found or refused."""


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_model_of_any_type_is_read_rightly_or_refused(model_type):
    model = small_model(model_type)
    if model is None:
        assert model_type not in FOUND | REFUSED.keys()
        pytest.skip("no small configuration fits")
    refusal = refused_with(anatomy_of, model) or refused_with(trace, model, tokens())
    if refusal:
        assert model_type not in FOUND, refusal
        assert REFUSED.get(model_type, "") in refusal
        assert refusal.endswith(".")
        return
    assert model_type not in REFUSED
    check_sum(model)
    check_attention(model, tokens())


PATHS = (
    *("blocks", "attention", "output_projection", "down_projection", "experts", "shared_down_projection"),
    *("final_norm", "post_norm", "post_attention_norm", "feed_forward"),
)


@pytest.mark.parametrize("family", sorted(CONFIGURATIONS.keys() - {"falcon"}))
def test_what_the_table_says_is_found_too(family):
    model = tiny_model(family)
    row = next(row for row in FAMILIES if row.name == family)
    found = find_family(model)
    assert {path: getattr(found, path) for path in PATHS} == {path: getattr(row, path) for path in PATHS}
    config = model.config.get_text_config()
    assert found.parallel(config) == row.parallel(config)
    assert (found.attention_scale, found.feed_forward_scale) == (1, 1)
    assert set(found.activations) <= set(row.activations)


GRANITE = dict(residual_multiplier=0.22, attention_multiplier=0.1, embedding_multiplier=3.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_multipliers_on_the_residual_stream_are_found(dtype):
    config = AutoConfig.for_model("granite", **BASE, **WIDTHS, **GRANITE)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    layer = anatomy_of(model).layers[1]
    assert (layer.attention_scale, layer.feed_forward_scale) == (0.22, 0.22)
    assert torch.allclose(layer.write_gain(), torch.tensor(0.22))


def test_neurons_write_what_the_residual_stream_gets():
    """A block that multiplies what its feed-forward gives."""
    config = AutoConfig.for_model("granite", **BASE, **WIDTHS, **GRANITE)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    roughen(model, 6)
    check_sum(model)
    plain = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("granite", **BASE, **WIDTHS, **GRANITE | {"residual_multiplier": 1.0})
    ).eval()
    plain.load_state_dict(model.state_dict())
    scaled, unscaled = (trace(each, tokens()).recording["largest_write"][0].max() for each in (model, plain))
    assert scaled < 0.5 * unscaled


# Models that lie


def with_hook(path: str, change, *, on_input: bool = False):
    """A llama in which a part of block 1 gets or gives something else than its module does."""
    model = tiny_model("llama")
    part = model.get_decoder().layers[1].get_submodule(path)
    if on_input:
        part.register_forward_pre_hook(lambda module, args: (change(args[0]), *args[1:]))
    else:
        part.forward = functools.partial(_changed, part.forward, change)
    return model


def _changed(forward, change, *args, **kwargs):
    output = forward(*args, **kwargs)
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


def double(state: Tensor) -> Tensor:
    return 2 * state


LIARS = {
    "a block that scales its residual": (with_hook, ("", lambda state: 1.5 * state), "is not what enters it plus"),
    "attention added twice": (with_hook, ("self_attn", double), "its blocks scale attention by different numbers"),
    "a feed-forward that scales what it gives": (with_hook, ("mlp", double), "changes what its"),
    "permuted heads": (
        with_hook,
        ("self_attn.o_proj", lambda state: state.roll(12, -1)),
        "reads something else than the heads",
    ),
    "a feed-forward that reads something else": (with_hook, ("mlp", double), "reads neither"),
}


@pytest.mark.parametrize("lie", LIARS)
def test_a_model_that_does_something_else_is_refused(lie):
    make, arguments, words = LIARS[lie]
    on_input = words.startswith("reads")
    with pytest.raises(InputError, match=words):
        find_family(make(*arguments, on_input=on_input))


def test_a_model_without_what_finding_needs_is_refused():
    model = tiny_model("llama")
    part = nn.Linear(2, 2)
    part.config = model.config  # type: ignore[assignment]
    with pytest.raises(InputError, match=r"Linear has no get_decoder\(\)"):
        find_family(part)
    part.get_decoder = model.get_decoder  # type: ignore[assignment]
    part.config = PreTrainedConfig()  # type: ignore[assignment]
    with pytest.raises(InputError, match="its configuration has no num_hidden_layers"):
        find_family(part)


def test_control_the_model_that_they_are_made_of_is_found():
    assert find_family(tiny_model("llama")).output_projection == "self_attn.o_proj"


def test_training_mode_and_hooks_are_as_they_were():
    model = tiny_model("llama").train()
    model.get_decoder().layers[0].mlp.eval()
    modes = [module.training for module in model.modules()]
    find_family(model)
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
