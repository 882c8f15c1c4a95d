"""Small random models of any causal family of transformers, and a sum that each of them must keep."""

from __future__ import annotations

import functools

import torch
from tiny_models import roughen
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from sinkscope.errors import InputError
from sinkscope.models.anatomy import Layer, anatomy_of
from sinkscope.tracing.layer_neurons import LayerNeurons
from sinkscope.tracing.trace import trace

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
EVERY_OTHER = dict(layer_types=["linear_attention", "full_attention"] * 2)
OVERRIDES = {
    "falcon_h1": dict(mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1),
    "lfm2": dict(layer_types=["conv", "full_attention"] * 2),
    "granitemoehybrid": dict(mamba_n_heads=8, mamba_d_state=8, layer_types=["mamba", "attention"] * 2),
    "bamba": dict(mamba_n_heads=8, mamba_d_state=8, attn_layer_indices=[1, 3]),
    "nemotron_h": dict(layers_block_type=["mamba", "mlp", "attention", "mlp"]),
    "qwen3_next": EVERY_OTHER,
    "qwen3_5_text": EVERY_OTHER,
    "olmo_hybrid": EVERY_OTHER,
    "kimi_linear": EVERY_OTHER,
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


def refused_with(call, *arguments) -> str | None:
    """The sentences of a refusal, or None where there is none."""
    try:
        call(*arguments)
    except InputError as error:
        return str(error)
    return None


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

    checked = [layer for layer in anatomy.layers if layer.post_norm is None]
    for layer in checked:
        handles.append(layer.block.register_forward_pre_hook(keep((layer.index, "entering")), with_kwargs=True))
        for number, (part, _) in enumerate(layer.mixing_exits):
            handles.append(part.register_forward_hook(keep((layer.index, f"mixed {number}")), with_kwargs=True))
        if layer.down_projection is not None:
            place = layer.index, "neurons"
            handles.append(layer.down_projection.register_forward_pre_hook(keep(place), with_kwargs=True))
        elif layer.experts is not None:
            neurons = LayerNeurons(layer)
            handles += [*neurons.hooks(), layer.block.register_forward_hook(keep_experts(layer, neurons))]
        handles.append(layer.block.register_forward_hook(keep((layer.index, "leaving")), with_kwargs=True))
    with torch.no_grad():
        model(tokens())
    for handle in handles:
        handle.remove()
    for layer in checked:
        change = kept[layer.index, "leaving"] - kept[layer.index, "entering"]
        added = torch.zeros_like(change)
        for number, (_, scale) in enumerate(layer.mixing_exits):
            added += scale * kept[layer.index, f"mixed {number}"]
        if layer.has_feed_forward:
            vectors = torch.cat([layer.written_vectors(expert) for expert, _ in layer.down_weights()], dim=1)
            added += kept[layer.index, "neurons"] @ vectors.double().T
            bias = getattr(layer.down_projection, "bias", None)
            added += 0 if bias is None else bias.detach().double() * layer.feed_forward_scale
        torch.testing.assert_close(change, added, rtol=1e-4, atol=1e-4 * float(change.abs().max()))


def check_attention(model: PreTrainedModel, ids: Tensor) -> None:
    """Attention received equals that of the model's own eager pass, wherever it gives one; layers without have none."""
    anatomy, received_LHS = anatomy_of(model), trace(model, ids).recording["received"]
    seen: dict[int, Tensor] = {}

    def keep(layer: int):
        def hook(module, args, output) -> None:
            if isinstance(output, tuple) and isinstance(output[1], Tensor) and output[1].ndim == 4:
                seen[layer] = output[1]

        return hook

    handles = [layer.attention.register_forward_hook(keep(layer.index)) for layer in anatomy.attention_layers]
    try:
        model.set_attn_implementation("eager")
        with torch.no_grad():
            model(ids, output_attentions=True)
    except (ValueError, TypeError, AttributeError):
        return
    finally:
        for handle in handles:
            handle.remove()
    length = ids.shape[1]
    queries = length - torch.arange(length).double()
    for layer, received_HS in zip(anatomy.layers, received_LHS, strict=True):
        assert layer.has_attention or received_HS.isnan().all()
        if layer.index in seen and model.config.model_type not in WEIGHTS_WITHOUT_SINK:
            expected_HS = (seen[layer.index].double()[..., :length].sum(2) / queries).mean(0)
            torch.testing.assert_close(received_HS.double(), expected_HS, rtol=1e-4, atol=1e-5)
