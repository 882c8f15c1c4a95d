"""Emulated schemes against values worked by hand and plain definitions, each with a control; 16 bits change nothing.

Axes: N texts, T positions, E inputs, O outputs.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor

from sinkscope.audits import damage as damage_file
from sinkscope.audits.damage import damage, losses, scheme_losses
from sinkscope.audits.schemes import (
    SCHEMES,
    Scheme,
    entering_rows,
    largest_over,
    linear_layers,
    quantised,
    rounded_cache,
    rounded_input,
    rounded_weight,
)
from sinkscope.audits.static_scales import least_error_range, least_error_ranges
from sinkscope.errors import InputError
from sinkscope.pretrain.decoder import Decoder
from sinkscope.pretrain.presets import decoder_config, preset

LENGTH = 20


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def ids_NT():
    return torch.randint(97, (3, LENGTH), generator=torch.Generator().manual_seed(0))


def rounded(values: list[float], bits: int, largest: float | None = None) -> list[float]:
    """The definition, number by number: s round(x / s), s the largest magnitude over 2^(bits - 1) - 1, and clipped."""
    levels = 2 ** (bits - 1) - 1
    step = (max(abs(value) for value in values) if largest is None else largest) / levels
    return [step * max(-levels, min(levels, round(value / step))) for value in values]


def logits(model, ids_NT: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids_NT, use_cache=False).logits


def test_rounding_by_hand():
    # Three levels on each side of 0, a third apart: 0.5 is 1.5 steps, of which the even neighbour is 2.
    found = quantised(torch.tensor([[1.0, -0.5, 0.3, 0.1]]), 3, 1.0)
    torch.testing.assert_close(found, torch.tensor([[1.0, -2 / 3, 1 / 3, 0.0]]))
    # A calibration that saw 0.6 at most: steps of 0.2, and larger values are clipped.
    torch.testing.assert_close(quantised(torch.tensor([1.0, -0.5, 0.3]), 3, 0.6), torch.tensor([0.6, -0.4, 0.4]))
    assert quantised(torch.zeros(2, 3), 8, 0.0).tolist() == [[0.0] * 3] * 2
    assert quantised(torch.ones(2, 3, dtype=torch.bfloat16), 8, 1.0).dtype == torch.bfloat16


def test_inputs_by_hand():
    """One text of two tokens; the second is large and can be kept."""
    x_BTE = torch.tensor([[[3.0, 1.4], [30.0, -14.0]]])
    by_token, by_text = (Scheme(name="x", what="activations", bits=3, shared_by=who) for who in ("token", "text"))
    torch.testing.assert_close(rounded_input(by_token, x_BTE), torch.tensor([[[3.0, 1.0], [30.0, -10.0]]]))
    torch.testing.assert_close(rounded_input(by_text, x_BTE), torch.tensor([[[0.0, 0.0], [30.0, -10.0]]]))
    keep_BT = torch.tensor([[False, True]])
    kept = rounded_input(by_text, x_BTE, keep_BT=keep_BT)
    torch.testing.assert_close(kept, torch.tensor([[[3.0, 1.0], [30.0, -14.0]]]))


def test_the_cache_by_hand():
    """Keys share a scale by channel, values by token: two tokens, two channels, one head."""
    scheme = Scheme(name="x", what="cache", bits=3)
    key = torch.tensor([[[[3.0, 0.3], [30.0, 0.1]]]])
    value = torch.tensor([[[[3.0, 1.4], [0.3, 0.1]]]])
    rounded_key, rounded_value = rounded_cache(scheme, key, value)
    torch.testing.assert_close(rounded_key, torch.tensor([[[[0.0, 0.3], [30.0, 0.1]]]]))
    torch.testing.assert_close(rounded_value, torch.tensor([[[[3.0, 1.0], [0.3, 0.1]]]]))
    kept_key, _ = rounded_cache(scheme, key, value, torch.tensor([[False, True]]))
    torch.testing.assert_close(kept_key, torch.tensor([[[[3.0, 0.3], [30.0, 0.1]]]]))


@pytest.mark.parametrize("group", [None, 20])
def test_weights_are_rounded_by_channel_or_group(model, group):
    """48 inputs in groups of 20 leave a group of 8."""
    scheme = Scheme(name="x", what="weights", bits=4, shared_by="group" if group else "channel", group=group or 1)
    raw_OI = linear_layers(model)["model.layers.0.self_attn.q_proj"].weight.detach()
    size = group or raw_OI.shape[1]
    expected = [
        [value for start in range(0, len(row), size) for value in rounded(row[start : start + size], 4)]
        for row in raw_OI.tolist()
    ]
    found = rounded_weight(scheme, raw_OI)
    torch.testing.assert_close(found, torch.tensor(expected))
    assert not torch.allclose(found, raw_OI, atol=1e-3), "the control"


@pytest.mark.parametrize("name", ["activations-8-static", "activations-8-dynamic", "activations-8-token"])
@pytest.mark.parametrize("family", ["llama", "opt"])  # OPT hands its feed-forward all texts of a batch in one row
def test_every_linear_layer_reads_rounded_inputs(ids_NT, name, family):
    model = tiny_model(family)
    scheme, before, after, layers = replace(SCHEMES[name], bits=4), {}, {}, linear_layers(model)
    ranges = {layer: 0.5 * largest for layer, largest in least_error_ranges(model, ids_NT).items()}
    handles = [
        part.register_forward_pre_hook(lambda m, args: before.setdefault(m, args[0])) for part in layers.values()
    ]
    with scheme.on(model, ranges=ranges):
        for part in layers.values():
            handles.append(part.register_forward_pre_hook(lambda m, args: after.setdefault(m, args[0])))
        logits(model, ids_NT)
    for handle in handles:
        handle.remove()
    for layer, part in layers.items():
        for raw_TE, found_TE in zip(before[part].view(3, LENGTH, -1), after[part].view(3, LENGTH, -1), strict=True):
            rows = raw_TE.tolist() if scheme.shared_by == "token" else [raw_TE.flatten().tolist()]
            largest = ranges[layer] if scheme.shared_by == "calibration" else None
            expected = torch.tensor([rounded(row, 4, largest) for row in rows]).view(found_TE.shape)
            torch.testing.assert_close(found_TE, expected, rtol=1e-4, atol=1e-5)
            assert not torch.allclose(found_TE, raw_TE, atol=1e-3), "the control"


def squared_error(x: np.ndarray, bits: int, largest: float) -> float:
    """Of rounding, in float64."""
    levels = 2 ** (bits - 1) - 1
    scale = largest / levels
    return float(((np.clip(np.round(x / scale), -levels, levels) * scale - x) ** 2).sum())


@pytest.mark.parametrize("bits", [4, 16])
def test_a_static_range_is_the_one_of_least_squared_error(ids_NT, bits, monkeypatch):
    monkeypatch.setattr("sinkscope.audits.damage.BATCH_TOKENS", LENGTH)  # a text a pass
    model, read = tiny_model("llama", scale=3.0), {}
    keep_NT = torch.zeros(ids_NT.shape, dtype=torch.bool)
    keep_NT[:, 0] = True
    with entering_rows(model, linear_layers(model), lambda name, x: read.setdefault(name, []).append(x.detach())):
        losses(model, ids_NT)
    steps, shares = np.arange(1, 21) / 20, []
    for spared in (None, keep_NT):
        found = least_error_ranges(model, ids_NT, bits=bits, keep=spared)
        for name, parts in read.items():
            x = torch.cat(parts).double()[:, int(spared is not None) :].numpy()
            least = min(squared_error(x, bits, step * np.abs(x).max()) for step in steps)
            # Magnitudes are known to 2 %, and their errors within a step not at all.
            assert squared_error(x, bits, found[name]) < 1.1 * least
            shares.append(found[name] / np.abs(x).max())
    assert np.median(shares) < 0.95 if bits == 4 else min(shares) >= 1, "few bits clip, and 16 do not"


def test_a_range_by_hand():
    """Of 100 ones and a 20 in 4 bits: 7 steps of 1 to 7 round the ones well and clip 13 off; 20 / 7 loses the ones."""
    magnitude_M = torch.tensor([1.0, 20.0], dtype=torch.float64)
    by_range = {}
    for step in range(1, 21):
        size = step / 7
        ones = 1.0 if size > 2 else size**2 / 12
        by_range[step] = 100 * ones + (20 - step) ** 2 * (step < 20) + (size**2 / 12) * (step == 20)
    best = min(by_range, key=lambda step: by_range[step])
    assert best == 14, "the largest range whose step still tells a one from nothing"
    assert least_error_range(magnitude_M, torch.tensor([100, 1]), 4) == pytest.approx(best)
    assert least_error_range(magnitude_M, torch.tensor([100, 1]), 16) == pytest.approx(20)
    assert least_error_range(magnitude_M, torch.tensor([100, 0]), 16) == pytest.approx(1)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_sixteen_bits_change_nothing_and_two_do(ids_NT, name, family):
    model = tiny_model(family, scale=5.0)
    scheme, plain_NT, ranges = SCHEMES[name], losses(model, ids_NT), least_error_ranges(model, ids_NT, bits=16)
    control_NT = scheme_losses(model, scheme.control(), ids_NT, ranges=ranges)
    # 16 bits leave each number within 1 / 65,534 of the largest; the tiny models make of it 1e-3 of a loss of 5.
    assert np.abs(control_NT - plain_NT).max() < 5e-3
    coarse = replace(scheme, bits=2)
    assert np.abs(scheme_losses(model, coarse, ids_NT, ranges=ranges) - plain_NT).max() > 2e-2
    with pytest.raises(ZeroDivisionError), coarse.on(model, ranges=ranges):
        raise ZeroDivisionError
    assert np.array_equal(losses(model, ids_NT), plain_NT), "left as it was"
    first = scheme.modules(model)[:1]
    one_NT = scheme_losses(model, coarse, ids_NT, modules=first, ranges=ranges)
    assert np.abs(one_NT - plain_NT).max() > 0, "one module is enough to see it"


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
    with SCHEMES["window"].control().on(model):
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
    scheme = replace(SCHEMES["activations-8-dynamic"], bits=3)
    whole = scheme_losses(model, scheme, ids_NT, keep=keep_NT)
    monkeypatch.setattr(damage_file, "BATCH_TOKENS", LENGTH)
    assert scheme_losses(model, scheme, ids_NT, keep=keep_NT) == pytest.approx(whole, rel=1e-4)
    without = scheme_losses(model, scheme, ids_NT)
    assert np.abs(without - whole).max(1)[1] > 1e-2, "the control"
    assert without[[0, 2]] == pytest.approx(whole[[0, 2]], rel=1e-4)


def test_damage_by_hand():
    plain_NT, losses_NT = np.array([[1.0] * 8, [2.0] * 8]), np.array([[1.0] * 4 + [3.0] * 4, [2.0] * 8])
    found = damage(losses_NT, plain_NT)
    assert (found.change, found.by_text) == (0.5, (1.0, 0.0))
    assert found.low == 0.0
    late = damage(losses_NT, plain_NT, replace(SCHEMES["window"], window=4))
    assert late.change == 1.0, "of tokens after the window has dropped keys"


def test_what_cannot_be_emulated_is_refused(model, ids_NT):
    with pytest.raises(InputError, match="has experts in layer 0"):
        linear_layers(tiny_model("mixtral"))
    with pytest.raises(InputError, match="`ranges` of every linear layer"), SCHEMES["activations-8-static"].on(model):
        pass
    with (
        pytest.raises(InputError, match="acts on no module of this model called lm_head"),
        SCHEMES["weights-8-channel"].on(model, ["lm_head"]),
    ):
        pass
    broken = tiny_model("llama")
    broken.model.layers[1].mlp.down_proj.weight.data[0, 0] = torch.inf
    with pytest.raises(InputError, match="Under cache-8 losses are NaN or infinite"):
        scheme_losses(broken, SCHEMES["cache-8"], ids_NT)
    assert largest_over(torch.zeros(1, 2, 3), -1).tolist() == [[[0.0], [0.0]]]


def test_torchao_makes_as_much_noise_where_it_is_installed(ids_NT):
    """Its 8 bits reach from -128 to 127, ours to 127 on both sides: other roundings, noise of the same size."""
    quantization = pytest.importorskip("torchao.quantization")
    model, real = tiny_model("llama", scale=3.0), tiny_model("llama", scale=3.0)
    names = linear_layers(real)
    quantization.quantize_(real, quantization.Int8WeightOnlyConfig(), filter_fn=lambda part, name: name in names)
    noise = []
    for name, layer in linear_layers(model).items():
        weight_OI = layer.weight.detach()
        theirs = real.get_submodule(name).weight.detach().dequantize()  # type: ignore[operator]
        ours = rounded_weight(SCHEMES["weights-8-channel"], weight_OI)
        noise.append([float((rounded_OI - weight_OI).square().sum()) for rounded_OI in (theirs, ours)])
    theirs, ours = np.sum(noise, 0)
    assert theirs == pytest.approx(ours, rel=0.05)
    plain = logits(model, ids_NT)
    with SCHEMES["weights-8-channel"].on(model):
        emulated = (logits(model, ids_NT) - plain).square().mean().sqrt()
    found = (logits(real, ids_NT) - plain).square().mean().sqrt()
    assert float(found) == pytest.approx(float(emulated), rel=0.3)
