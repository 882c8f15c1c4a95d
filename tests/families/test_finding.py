"""Models without a row in the table: their parts are found and proven, and what was found is right.

Every causal model of the installed transformers that can be built small is tried, so that a new family is tried by
itself. What was found is compared with the model's own eager attention, and with sums that are made here.
"""

from __future__ import annotations

import functools

import pytest
import torch
from tiny_models import CONFIGURATIONS, roughen, tiny_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sinkscope.errors import InputError
from sinkscope.models.anatomy import Layer, anatomy_of
from sinkscope.models.families import FAMILIES
from sinkscope.models.finding import find_family
from sinkscope.tracing.layer_neurons import LayerNeurons
from sinkscope.tracing.trace import trace

IN_TABLE = {model_type for family in FAMILIES for model_type in family.model_types}
MODEL_TYPES = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - IN_TABLE)

FOUND = {
    *("apertus", "arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "glm", "granite", "nemotron"),
    *("olmo", "olmoe", "persimmon", "phi", "seed_oss", "starcoder2"),
    *("aria_text", "deepseek_v2", "ernie4_5_moe", "flex_olmo", "glm4_moe", "granitemoe", "granitemoeshared"),
    *("dots1", "hunyuan_v1_moe", "llama4_text", "minimax_m2", "minimax_m3_vl_text", "phimoe", "qwen2_moe"),
}
"""Those that must be found, whatever else is."""
REFUSED = {
    "bloom": "does not ask the attention interface",
    "mpt": "does not ask the attention interface",
    "mamba": "no attention over all keys is computed in layer 0, 1, 2, 3",
    "qwen3_next": "no attention over all keys is computed in layer 0, 1, 2",
    "jamba": "no attention over all keys",
    "falcon_h1": "is not what enters it plus what attention and feed-forward give",
    "jetmoe": "no linear layer follows attention",
    "dbrx": "no feed-forward was found",
    "longcat_flash": "has no list of 4 blocks",
    "deepseek_v4": "is no state of [2, 8] tokens",
    "diffllama": "attention is computed 2 times",
    "bert": "no linear layer follows attention",
}
"""Those that cannot be read, and why. What is neither here nor above may be found or refused."""
BASE = dict(
    vocab_size=97,
    intermediate_size=80,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=None,
    bos_token_id=1,
    eos_token_id=2,
    moe_intermediate_size=24,
    num_experts=4,
    num_local_experts=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_positions=256,
)
WIDTHS = dict(hidden_size=64, head_dim=16)
OTHER_NAMES = dict(n_layer=4, n_head=4, n_embd=64, d_model=64, n_layers=4, n_heads=4, rotary_dim=8)
LATENT = dict(
    num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12
)
TRIED = (BASE | WIDTHS, BASE | WIDTHS | OTHER_NAMES, BASE | WIDTHS | LATENT, BASE | OTHER_NAMES | dict(hidden_size=64))
"""What a model's configuration is made of; the first that gives a model that runs is taken."""
LARGEST = 30_000_000
OVERRIDES = {
    "falcon_h1": dict(mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1),
    "granitemoehybrid": dict(mamba_n_heads=8, mamba_d_state=8),
    "bamba": dict(mamba_n_heads=8, mamba_d_state=8),
    "dots1": dict(n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1),
    "dbrx": dict(
        attn_config=dict(kv_n_heads=2, rope_theta=10000.0, clip_qkv=8.0),
        ffn_config=dict(ffn_hidden_size=48, moe_num_experts=4, moe_top_k=2),
    ),
    "longcat_flash": dict(
        **dict(num_layers=2, kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=16),
        **dict(v_head_dim=16, head_dim=8, num_key_value_heads=4, ffn_hidden_size=40, expert_ffn_hidden_size=24),
        **dict(moe_topk=2, zero_expert_num=2),
    ),
}
WEIGHTS_WITHOUT_SINK = {"granite_swa", "granitemoe_swa"}
"""Their eager attention leaves out of the weights it returns what goes to the learned sink."""


@functools.cache
def small_model(model_type: str) -> PreTrainedModel | None:
    """A random model of a type, or None where none of the small configurations fits it."""
    for fields in TRIED:
        try:
            config = AutoConfig.for_model(model_type, **fields | OVERRIDES.get(model_type, {}))
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
            if size > LARGEST:
                continue
            with torch.random.fork_rng(), torch.no_grad():
                torch.manual_seed(0)
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
                roughen(model, 6)
                model(tokens(8), use_cache=False)
        except Exception:  # each library has its own for a number that does not fit
            continue
        return model
    return None


def tokens(length: int = 24) -> Tensor:
    return torch.randint(3, 97, (2, length), generator=torch.Generator().manual_seed(0))


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
    check_attention(model)


def refused_with(call, *arguments) -> str | None:
    """The sentences of a refusal, or None where there is none."""
    try:
        call(*arguments)
    except InputError as error:
        return str(error)
    return None


def check_attention(model: PreTrainedModel) -> None:
    """Attention received equals that of the model's own eager pass, where it gives one."""
    received_LHS = trace(model, tokens()).recording["received"]
    if model.config.model_type in WEIGHTS_WITHOUT_SINK:
        return
    try:
        model.set_attn_implementation("eager")
        with torch.no_grad():
            attentions = model(tokens(), output_attentions=True).attentions
    except (ValueError, TypeError, AttributeError):
        return
    length = tokens().shape[1]
    queries = length - torch.arange(length).double()
    for received_HS, attention_BHTS in zip(received_LHS, attentions, strict=True):
        expected_HS = (attention_BHTS.double()[..., :length].sum(2) / queries).mean(0)
        torch.testing.assert_close(torch.as_tensor(received_HS).double(), expected_HS, rtol=1e-4, atol=1e-5)


def check_sum(model: PreTrainedModel) -> None:
    """What a block adds is what its attention adds and what its neurons write, in float64."""
    anatomy = anatomy_of(model)
    kept: dict[tuple[int, str], Tensor] = {}
    handles = []

    def keep(place: tuple[int, str]):
        def hook(module, args, kwargs, output=None):
            state = args[0] if args else kwargs["hidden_states"]
            state = state if output is None else output[0] if isinstance(output, tuple) else output
            kept[place] = state.double().flatten(0, -2)

        return hook

    def keep_experts(layer: Layer, neurons: LayerNeurons):
        def hook(module, args, output):
            kept[layer.index, "neurons"] = neurons.at(torch.arange(tokens().numel())).double()

        return hook

    for layer in anatomy.layers:
        if layer.post_norm is not None:
            continue
        handles += [
            layer.block.register_forward_pre_hook(keep((layer.index, "entering")), with_kwargs=True),
            layer.attention_exit.register_forward_hook(keep((layer.index, "attended")), with_kwargs=True),
        ]
        if layer.down_projection is not None:
            place = layer.index, "neurons"
            handles.append(layer.down_projection.register_forward_pre_hook(keep(place), with_kwargs=True))
        else:
            neurons = LayerNeurons(layer)
            handles += [*neurons.hooks(), layer.block.register_forward_hook(keep_experts(layer, neurons))]
        handles.append(layer.block.register_forward_hook(keep((layer.index, "leaving")), with_kwargs=True))
    with torch.no_grad():
        model(tokens())
    for handle in handles:
        handle.remove()
    for index in {index for index, _ in kept}:
        layer = anatomy.layers[index]
        vectors = torch.cat([layer.written_vectors(expert) for expert, _ in layer.down_weights()], dim=1)
        written = kept[index, "neurons"] @ vectors.double().T
        bias = getattr(layer.down_projection, "bias", None)
        if bias is not None:
            written = written + bias.detach().double() * layer.feed_forward_scale
        added = layer.attention_scale * kept[index, "attended"] + written
        change = kept[index, "leaving"] - kept[index, "entering"]
        torch.testing.assert_close(change, added, rtol=1e-4, atol=1e-4 * float(change.abs().max()))


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
    "attention added twice": (with_hook, ("self_attn", double), "scale attention and feed-forward by different"),
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
