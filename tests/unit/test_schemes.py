"""Schemes against compressed-tensors' own quantised modules, and caches against values worked by hand and plain
definitions, each with a control; 24 bits change nothing.

Axes: N texts, T positions, E inputs, O outputs, S keys, K key-value heads, D head size.
"""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from compressed_tensors.utils.match import is_match
from tiny_models import tiny_model
from torch import Tensor, nn

from sinkscope.audits import damage as damage_file
from sinkscope.audits.damage import compare, damage, losses, scheme_losses
from sinkscope.audits.formats import CACHES, CONTROL_CACHE, rounded_input
from sinkscope.audits.schemes import (
    FUSED,
    Scheme,
    cache_scheme,
    entering_rows,
    fused_groups,
    linear_layers,
    linear_scheme,
)
from sinkscope.audits.static_scales import (
    largest_magnitudes,
    least_error_range,
    least_error_ranges,
    scheme_ranges,
)
from sinkscope.errors import InputError
from sinkscope.pretrain.decoder import Decoder
from sinkscope.pretrain.presets import decoder_config, preset

LENGTH = 20
BLOCKS = dict(hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=4, head_dim=32)
"""A size that groups of 128 and blocks of 32 divide."""
PRESETS = ("W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "W4A16", "W4A16_ASYM", "W8A16", "NVFP4", "NVFP4A16", "MXFP4")


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def ids_NT():
    return torch.randint(97, (3, LENGTH), generator=torch.Generator().manual_seed(0))


def logits(model, ids_NT: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids_NT, use_cache=False).logits


def ranges_of(scheme: Scheme, model, ids_NT: Tensor):
    largest = largest_magnitudes(model, ids_NT)
    return scheme_ranges(scheme, model, largest, lambda: least_error_ranges(model, ids_NT))


def own_modules(name: str, ids_NT: Tensor) -> tuple[nn.Module, dict[str, float]]:
    """The model with compressed-tensors' own modules, their scales those of the smallest and largest values; and the
    largest input of each."""
    model, read = tiny_model("llama", **BLOCKS), {}
    layers = linear_layers(model)
    with entering_rows(model, layers, lambda layer, x: read.setdefault(layer, []).append(x)):
        logits(model, ids_NT)
    largest_of = {name: max(x.abs().max() for x in inputs) for name, inputs in read.items()}
    groups = {"group": preset_name_to_scheme(name, ["Linear"])}
    config = QuantizationConfig(config_groups=groups, ignore=["lm_head"], quantization_status="frozen")
    apply_quantization_config(model, config, show_progress=False)
    for layer_name, layer in layers.items():
        args, weight = layer.quantization_scheme.weights, layer.weight.detach()
        parts = {
            "tensor": lambda w: w.reshape(-1),
            "channel": lambda w: w[:, None, :],
            "group": lambda w, size=args.group_size: w.reshape(w.shape[0], -1, size),
            "block": lambda w: w.reshape(w.shape[0] // 128, 128, -1, 128).transpose(1, 2).flatten(2),
        }[args.strategy.removeprefix("tensor_")](weight)
        scales = [parts.amin(-1), parts.amax(-1), args]
        if args.strategy == "tensor_group":
            layer.weight_global_scale.data = generate_gparam(weight.min(), weight.max())
            scales.append(layer.weight_global_scale)
        scale, zero = calculate_qparams(*scales)
        layer.weight_scale.data, layer.weight_zero_point.data = scale, zero.to(layer.weight_zero_point.dtype)
        inputs, largest = layer.quantization_scheme.input_activations, largest_of[layer_name]
        if inputs is not None and inputs.dynamic == "local":
            layer.input_global_scale.data = generate_gparam(-largest, largest)
        if inputs is not None and not inputs.dynamic:
            layer.input_scale.data, _ = calculate_qparams(-largest, largest, inputs)
    return model, largest_of


@pytest.mark.parametrize("name", PRESETS)
def test_a_scheme_is_what_compressed_tensors_own_modules_do_to_the_bit(name, ids_NT):
    model, scheme = tiny_model("llama", **BLOCKS), linear_scheme(name)
    (own, ranges), plain = own_modules(name, ids_NT), logits(model, ids_NT)
    expected = logits(own, ids_NT)
    with scheme.on(model, ranges=ranges):
        assert torch.equal(logits(model, ids_NT), expected)
    assert not torch.equal(expected, plain), "the control"
    assert torch.equal(logits(model, ids_NT), plain), "left as it was"
    with scheme.control().on(model, ranges=ranges_of(scheme.control(), model, ids_NT)):
        torch.testing.assert_close(logits(model, ids_NT), plain, rtol=1e-3, atol=1e-4)


def test_one_dynamic_scale_is_a_text_s_own():
    args, x_BTE = linear_scheme("W8A8_TENSOR").groups[0].input_activations, torch.tensor([[[1.0, 0.004]], [[100.0, 1]]])
    expected = [[[1.0, 0.0039]], [[100.0, 0.784]]]  # steps of 1 / 127.5 and 100 / 127.5
    torch.testing.assert_close(rounded_input(args, x_BTE), torch.tensor(expected), rtol=1e-2, atol=5e-3)
    together = rounded_input(args, x_BTE.reshape(1, 2, 2))
    assert together[0, 0, 1] == 0, "the control: one scale for both"


def in_steps(values: list[float], levels: list[float]) -> list[float]:
    """Each value's nearest level."""
    return [min(levels, key=lambda level, value=value: abs(level - value)) for value in values]


FP8_LEVELS = sorted(
    sign * value
    for sign in (-1, 1)
    for value in [*(m / 8 * 2**-6 for m in range(8)), *((1 + m / 8) * 2**e for e in range(-6, 9) for m in range(8))]
    if value <= 448
)
FP4_LEVELS = [sign * value for sign in (-1, 1) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]


def plain_cache(name: str, x_SD: list[list[list[float]]]) -> list[list[list[float]]]:
    """Of one text [heads][tokens][D], number by number; keys and values alike but for KIVI, whose axis is D here."""
    largest = [max(abs(value) for row in head for value in row) for head in x_SD]
    rounded = []
    for number, head in enumerate(x_SD):
        end = largest[number] if name == "fp8-per-head" else max(largest)
        rows = []
        for row in head:
            if name.startswith("fp8"):
                step = end / 448
                rows.append([step * value for value in in_steps([value / step for value in row], FP8_LEVELS)])
            elif name == "int8":
                step = end / 127.5
                rows.append([step * max(-128, min(127, round(value / step))) for value in row])
            elif name == "nvfp4":
                parts = []
                for start in range(0, len(row), 16):
                    part, overall = row[start : start + 16], end / (448 * 6)
                    (scale,) = in_steps([max(map(abs, part)) / 6 / overall], FP8_LEVELS)
                    step = scale * overall
                    parts += [step * value for value in in_steps([value / step for value in part], FP4_LEVELS)]
                rows.append(parts)
            else:
                parts = []
                for start in range(0, len(row), 32):
                    part = row[start : start + 32]
                    if name == "q8_0":
                        step = max(map(abs, part)) / 127
                        levels = [round(value / step) for value in part]
                        parts += [level * float(np.float16(step)) for level in levels]
                    elif name == "q4_0":
                        step = max(part, key=abs) / -8
                        levels = [min(15, math.floor(value / step + 8.5)) - 8 for value in part]
                        parts += [level * float(np.float16(step)) for level in levels]
                    else:
                        low, high = min(part), max(part)
                        step = (high - low) / (2 ** int(name[-1]) - 1)
                        parts += [low + step * round((value - low) / step) for value in part]
                rows.append(parts)
        rounded.append(rows)
    return rounded


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_is_its_definition_number_by_number(name):
    x_BKSD = torch.randn(1, 2, 5, 32, generator=torch.Generator().manual_seed(0))
    x_BKSD[0, 1] *= 3
    x_BKSD[0, 0, 2, 5] = 20
    largest_K = x_BKSD[0].abs().amax((1, 2))
    expected = torch.tensor(plain_cache(name, x_BKSD[0].tolist()))[None]
    values = CACHES[name].value(x_BKSD, largest_K)
    torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-5)
    if name.startswith("kivi"):
        keys = CACHES[name].key(x_BKSD.transpose(2, 3), largest_K).transpose(2, 3)
        torch.testing.assert_close(keys, expected, rtol=1e-4, atol=1e-5)
    assert (values - x_BKSD).abs().max() > 1e-3, "the control"
    wide = CONTROL_CACHE.value(x_BKSD, largest_K)
    torch.testing.assert_close(wide, x_BKSD, rtol=1e-4, atol=1e-5)


def test_caches_by_hand():
    """A block of 32 with 1.27 at most, a -8 and zeros: one step of 0.01 of q8_0, steps of 1 of q4_0."""
    x_BKSD = torch.zeros(1, 1, 2, 32)
    x_BKSD[0, 0, 0, :3] = torch.tensor([1.27, 0.014, -0.006])
    x_BKSD[0, 0, 1, :3] = torch.tensor([-8.0, 7.9, 0.6])
    by_8, by_4 = (CACHES[name].key(x_BKSD, torch.ones(1))[0, 0] for name in ("q8_0", "q4_0"))
    torch.testing.assert_close(by_8[0, :3], torch.tensor([1.27, 0.01, -0.01]), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(by_4[1, :3], torch.tensor([-8.0, 7.0, 1.0]))
    # 448 as the largest of a calibration leaves steps of 1 in 8 to 16 and of 32 in 256 to 448, and clips what is above.
    x_BKSD[0, 0, 0, :4] = torch.tensor([9.4, 300.0, 600.0, 0.3])
    by_fp8 = CACHES["fp8"].key(x_BKSD, torch.tensor([448.0]))[0, 0, 0, :4]
    torch.testing.assert_close(by_fp8, torch.tensor([9.0, 288.0, 448.0, 0.3125]))


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_a_cache_fails_by_a_bias_of_the_keys(name, ids_NT):
    """A large bias in one channel of the keys takes the steps from all others (int8), or is itself rounded, otherwise
    at each position since it is rotated (fp8)."""
    damages = {}
    for bias in (0.0, 300.0):
        model = tiny_model("qwen2", scale=3.0)
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.data.zero_()
            layer.self_attn.k_proj.bias.data[0] = bias
        model.lm_head.weight.data *= 4
        scheme, plain_NT = cache_scheme(name), losses(model, ids_NT)
        rounded_NT = scheme_losses(model, scheme, ids_NT, ranges=ranges_of(scheme, model, ids_NT))
        damages[bias] = np.abs(rounded_NT - plain_NT).mean()
    assert damages[300.0] > 0.02
    assert damages[300.0] > 3 * damages[0.0], "the control: no bias"


def test_a_configuration_is_read_and_its_modules_are_rounded_alone(tmp_path, ids_NT):
    model = tiny_model("llama", **BLOCKS)
    groups = {
        "attention": {"targets": ["re:.*q_proj"], "weights": {"num_bits": 4, "strategy": "channel"}},
        "others": {"targets": ["Linear"], "weights": {"num_bits": 8, "group_size": 64, "strategy": "group"}},
    }
    config = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["re:.*layers.0.*"]}
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text(json.dumps({"quantization_config": config}))
    scheme = linear_scheme(str(tmp_path / "checkpoint"))
    bits = {name: group.weights.num_bits for name, group in scheme.arguments(model).items()}
    assert bits == {
        name: 4 if name.endswith("q_proj") else 8 for name in linear_layers(model) if ".layers.0." not in name
    }
    with scheme.on(model):
        weight = model.model.layers[1].self_attn.q_proj.weight
        assert all(len(row.unique()) <= 16 for row in weight)
    assert all(len(row.unique()) > 16 for row in model.model.layers[1].self_attn.q_proj.weight), "the control"
    other = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "gptq.json").write_text(json.dumps(other))
    with pytest.raises(InputError, match="its quantisation is gptq"):
        linear_scheme(str(tmp_path / "gptq.json"))
    for content, message in (("[", "cannot be read"), ('{"config_groups": {"a": 3}}', "cannot be read")):
        (tmp_path / "broken.json").write_text(content)
        with pytest.raises(InputError, match=message):
            linear_scheme(str(tmp_path / "broken.json"))
    cached = config | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    (tmp_path / "cached.json").write_text(json.dumps(cached))
    with pytest.raises(InputError, match="give the cache with --cache"):
        linear_scheme(str(tmp_path / "cached.json"))


def test_what_an_engine_fuses_is_one_group():
    """The rule of vLLM: a fused layer is left out if all of its parts are, and refused if only some are."""
    model = tiny_model("llama")
    groups = fused_groups(list(linear_layers(model)))
    assert groups["model.layers.0.self_attn.qkv_proj"] == [f"model.layers.0.self_attn.{p}_proj" for p in "qkv"]
    assert groups["model.layers.1.mlp.gate_up_proj"] == [f"model.layers.1.mlp.{p}_proj" for p in ("gate", "up")]
    assert groups["model.layers.1.mlp.down_proj"] == ["model.layers.1.mlp.down_proj"]
    for name, modules in groups.items():
        left_out = [is_match(module, model.get_submodule(module), modules) for module in modules]
        assert all(left_out)
        assert name.rpartition(".")[2] in (*FUSED, "o_proj", "down_proj")


def test_bits_are_those_that_are_stored(model):
    assert linear_scheme("W4A16").bits(model) == 4.125
    assert linear_scheme("NVFP4").bits(model) == 4.5
    assert linear_scheme("MXFP4").bits(model) == 4.25
    sizes = linear_scheme("W8A8").sizes(model)
    one = next(iter(sizes))
    assert linear_scheme("W8A8").bits(model, [one]) == pytest.approx(8 + 8 * sizes[one] / sum(sizes.values()))
    assert cache_scheme("q8_0").bits(model) == 8.5
    assert cache_scheme("fp8").bits(model, ["model.layers.0.self_attn"]) == pytest.approx(8 + 8 / 3)


def squared_error(x: np.ndarray, bits: int, largest: float) -> float:
    """Of rounding, in float64."""
    scale = largest / (2**bits - 1) * 2
    levels = 2 ** (bits - 1)
    return float(((np.clip(np.round(x / scale), -levels, levels - 1) * scale - x) ** 2).sum())


@pytest.mark.parametrize("bits", [4, 16])
def test_a_static_range_is_the_one_of_least_squared_error(ids_NT, bits, monkeypatch):
    monkeypatch.setattr("sinkscope.audits.damage.BATCH_TOKENS", LENGTH)  # a text a pass
    model, read = tiny_model("llama", scale=3.0), {}
    with entering_rows(model, linear_layers(model), lambda name, x: read.setdefault(name, []).append(x.detach())):
        losses(model, ids_NT)
    steps, shares = np.arange(1, 21) / 20, []
    found, largest = least_error_ranges(model, ids_NT, bits=bits), largest_magnitudes(model, ids_NT)
    for name, parts in read.items():
        x = torch.cat(parts).double().numpy()
        assert largest[name] == pytest.approx(np.abs(x).max(), rel=1e-6)
        least = min(squared_error(x, bits, step * np.abs(x).max()) for step in steps)
        # Magnitudes are known to 2 %, and their errors within a step not at all.
        assert squared_error(x, bits, found[name]) < 1.1 * least
        shares.append(found[name] / np.abs(x).max())
    assert np.median(shares) < 0.95 if bits == 4 else min(shares) >= 1, "few bits clip, and 16 do not"
    static = linear_scheme("W8A8_STATIC")
    for scheme in (static, linear_scheme("FP8"), static.control()):
        ranges = scheme_ranges(scheme, model, largest, lambda: found)
        expected = {static.name: found, "FP8": largest}.get(scheme.name)
        assert all(ranges[name] == (expected[name] if expected else 4 * largest[name]) for name in found)


def test_a_range_by_hand():
    """Of 100 ones and a 20 in 4 bits: 7.5 steps up to 15 round the ones well and clip 5 off; 20 / 7.5 loses them."""
    magnitude_M = torch.tensor([1.0, 20.0], dtype=torch.float64)
    by_range = {}
    for step in range(1, 21):
        size = step / 7.5
        ones = 1.0 if size > 2 else size**2 / 12
        by_range[step] = 100 * ones + (20 - step) ** 2 * (step < 20) + (size**2 / 12) * (step == 20)
    best = min(by_range, key=lambda step: by_range[step])
    assert best == 15, "the largest range whose step still tells a one from nothing"
    assert least_error_range(magnitude_M, torch.tensor([100, 1]), 4) == pytest.approx(best)
    assert least_error_range(magnitude_M, torch.tensor([100, 1]), 16) == pytest.approx(20)
    assert least_error_range(magnitude_M, torch.tensor([100, 0]), 16) == pytest.approx(1)


@pytest.mark.parametrize("name", ["W8A8_STATIC", "W8A8", "cache-kivi-4", "cache-fp8", "window"])
@pytest.mark.parametrize("family", ["gpt2", "opt", "gemma2"])  # OPT hands its feed-forward all texts in one row
def test_every_family_is_rounded_and_left_as_it_was(ids_NT, name, family):
    model = tiny_model(family, scale=5.0)
    scheme = cache_scheme(name.removeprefix("cache-")) if "-" in name or name == "window" else linear_scheme(name)
    plain_NT = losses(model, ids_NT)
    ranges = {s.name: ranges_of(s, model, ids_NT) for s in (scheme, scheme.control())}
    control_NT = scheme_losses(model, scheme.control(), ids_NT, ranges=ranges[scheme.control().name])
    assert np.abs(control_NT - plain_NT).max() < 2e-3
    assert np.abs(scheme_losses(model, scheme, ids_NT, ranges=ranges[name]) - plain_NT).max() > 1e-3
    with pytest.raises(ZeroDivisionError), scheme.on(model, ranges=ranges[name]):
        raise ZeroDivisionError
    assert np.array_equal(losses(model, ids_NT), plain_NT), "left as it was"
    first = scheme.modules(model)[:1]
    one_NT = scheme_losses(model, scheme, ids_NT, modules=first, ranges=ranges[name])
    assert np.abs(one_NT - plain_NT).max() > 0, "one module is enough to see it"


def test_a_scheme_beside_the_baseline_token_by_token(model, ids_NT):
    scheme = linear_scheme("W8A8_STATIC")
    ranges = {name: 0.2 * largest for name, largest in largest_magnitudes(model, ids_NT).items()}
    found = compare(model, scheme, ids_NT, ranges=ranges)
    plain_NTV = logits(model, ids_NT)[:, :-1].double().softmax(-1)
    with scheme.on(model, ranges=ranges):
        other_NTV = logits(model, ids_NT)[:, :-1].double().softmax(-1)
    divergence_NT = (plain_NTV * (plain_NTV / other_NTV).log()).sum(-1)
    assert found.divergence == pytest.approx(divergence_NT.numpy(), rel=1e-3, abs=1e-6)
    assert found.same_top.tolist() == (plain_NTV.argmax(-1) == other_NTV.argmax(-1)).double().tolist()
    assert found.losses == pytest.approx(scheme_losses(model, scheme, ids_NT, ranges=ranges))
    assert found.divergence.min() > 0, "the control: it changes something"


def visible(window: int, kept: set[int]) -> Tensor:
    """[T, T] who sees whom, pair by pair; those that are kept take their place in the window."""
    rows = [[s <= t and (t - s < window - len(kept) or s in kept) for s in range(LENGTH)] for t in range(LENGTH)]
    return torch.tensor(rows)


def test_a_window_is_attention_under_that_mask(model, ids_NT):
    """Other tokens are kept in each text."""
    kept, scheme = [set(), {0, 1}, {3}], Scheme(name="x", what="window", window=8)
    keep_NT = torch.tensor([[t in places for t in range(LENGTH)] for places in kept])
    visible_NTT = torch.stack([visible(8, places) for places in kept])
    model.set_attn_implementation("eager")
    mask = torch.zeros(3, 1, LENGTH, LENGTH).masked_fill(~visible_NTT[:, None], torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = model(ids_NT, attention_mask=mask, use_cache=False).logits
    plain = logits(model, ids_NT)
    with scheme.on(model, keep=keep_NT):
        torch.testing.assert_close(logits(model, ids_NT), expected, rtol=1e-4, atol=1e-5)
    assert (expected - plain).abs().amax((1, 2)).min() > 1e-3, "the control"
    assert torch.equal(logits(model, ids_NT), plain), "left as it was"


@pytest.mark.parametrize("variant", ["softmax", "sigmoid", "learned_sink", "softmax_one"])
def test_a_window_of_every_kind_of_attention(variant, ids_NT):
    model = Decoder(decoder_config(preset("tiny") | {"attention_variant": variant})).eval()
    with torch.no_grad():
        for block in model.blocks:  # attention far from even
            block.self_attn.q_proj.weight *= 20
        expected = model(ids_NT, attention_mask=visible(6, set()).expand(3, 1, -1, -1), use_cache=False).logits
    with Scheme(name="x", what="window", window=6).on(model):
        torch.testing.assert_close(logits(model, ids_NT), expected, rtol=1e-4, atol=1e-5)
    with Scheme(name="x", what="window", window=5).on(model):
        assert (logits(model, ids_NT) - expected).abs().max() > 1e-3, "the control"


@pytest.mark.parametrize("family", ["gemma2", "mistral", "gpt_oss", "falcon"])
def test_a_model_keeps_its_own_windows_caps_and_sinks(family, ids_NT):
    """A window of every key leaves the attention as it was."""
    model = tiny_model(family)
    plain = logits(model, ids_NT)
    with cache_scheme("window").control().on(model):
        torch.testing.assert_close(logits(model, ids_NT), plain, rtol=1e-3, atol=1e-3)


def test_losses_are_those_of_the_model(model, ids_NT, monkeypatch):
    with torch.no_grad():
        expected = model(ids_NT, labels=ids_NT).loss
    monkeypatch.setattr(damage_file, "BATCH_TOKENS", 2 * LENGTH)  # two passes
    found = losses(model, ids_NT)
    assert found.shape == (3, LENGTH - 1)
    assert found.mean() == pytest.approx(float(expected), rel=1e-5)


def test_a_kept_token_belongs_to_its_own_text(model, ids_NT, monkeypatch):
    """The same in one pass and in three, where each text must get its own row of the mask."""
    keep_NT = torch.zeros(3, LENGTH, dtype=torch.bool)
    keep_NT[1, 0] = True
    scheme = replace(cache_scheme("window"), window=4)
    whole = scheme_losses(model, scheme, ids_NT, keep=keep_NT)
    monkeypatch.setattr(damage_file, "BATCH_TOKENS", LENGTH)
    assert scheme_losses(model, scheme, ids_NT, keep=keep_NT) == pytest.approx(whole, rel=1e-4)
    without = scheme_losses(model, scheme, ids_NT)
    assert np.abs(without - whole).max(1)[1] > 1e-3, "the control"
    assert without[[0, 2]] == pytest.approx(whole[[0, 2]], rel=1e-4)


def test_damage_by_hand():
    plain_NT, losses_NT = np.array([[1.0] * 8, [2.0] * 8]), np.array([[1.0] * 4 + [3.0] * 4, [2.0] * 8])
    found = damage(losses_NT, plain_NT)
    assert (found.change, found.by_text) == (0.5, (1.0, 0.0))
    assert found.low == 0.0
    late = damage(losses_NT, plain_NT, replace(cache_scheme("window"), window=4))
    assert late.change == 1.0, "of tokens after the window has dropped keys"


def test_what_cannot_be_rounded_is_refused(model, ids_NT):
    with pytest.raises(InputError, match="has experts in layer 0"):
        linear_layers(tiny_model("mixtral"))
    with pytest.raises(InputError, match="from the `ranges` of a calibration"), linear_scheme("FP8").on(model):
        pass
    with (
        pytest.raises(InputError, match="acts on no module of this model called lm_head"),
        linear_scheme("W8A8").on(model, ["lm_head"]),
    ):
        pass
    with pytest.raises(InputError, match="There is no scheme W5"):
        linear_scheme("W5")
    with pytest.raises(InputError, match="no cache format 'fp9'"):
        cache_scheme("fp9")
    assert "no multiple of its group of 128" in linear_scheme("W4A16").why_not(model)
    assert linear_scheme("W4A16").why_not(tiny_model("llama", **BLOCKS)) is None, "the control"
    broken = tiny_model("llama")
    broken.model.layers[1].mlp.down_proj.weight.data[0, 0] = torch.inf
    with pytest.raises(InputError, match="Under cache-kivi-8 losses are NaN or infinite"):
        scheme_losses(broken, cache_scheme("kivi-8"), ids_NT)
