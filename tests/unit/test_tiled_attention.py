"""Tiled attention and its readings against a softmax in float64 that holds the whole square.

Axes: B batch, H query heads, K key-value heads, T query position, S key position, D head size.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from sinkscope.tracing import tiles as module
from sinkscope.tracing.attention import _not_fused
from sinkscope.tracing.attention_rule import SAMPLED_QUERIES, AttentionRule, ReadingRequest, sampled_queries
from sinkscope.tracing.tiles import tiled_attention

# float64 differs from the definition by the order of its sums only. float32 has 24 bits: scores up to about 10 are good
# to 1e-6, the exponential passes that on as a relative error, and sums over 130 keys add little to it.
EXACT = 1e-12
SINGLE = 2e-5
CPU = torch.device("cpu")


def make_inputs(length, *, num_batch=2, num_heads=4, num_kv_heads=2, size=8, value_size=8, dtype=torch.float64, seed=0):
    """Random q, k, v with scores far from equal."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((num_heads, size), (num_kv_heads, size), (num_kv_heads, value_size))
    q, k, v = (
        torch.randn(num_batch, heads, length, d, generator=generator, dtype=torch.float64) for heads, d in shapes
    )
    return (1.5 * q).to(dtype), (1.5 * k).to(dtype), v.to(dtype)


def square_attention(q, k, rule: AttentionRule, *, causal=True) -> np.ndarray:
    """[B, H, T, S] the attention of every query on every key, one query at a time, in float64."""
    q, k = q.double().numpy(), k.double().numpy()
    num_batch, num_heads, length, _ = q.shape
    group = num_heads // k.shape[1]
    attention = np.zeros((num_batch, num_heads, length, length))
    for b in range(num_batch):
        for h in range(num_heads):
            for t in range(length):
                first = 0 if rule.window is None else max(0, t - rule.window + 1)
                seen = range(first, t + 1) if causal else range(length)
                scores = np.array([q[b, h, t] @ k[b, h // group, s] for s in seen]) * rule.scaling
                if rule.softcap is not None:
                    scores = rule.softcap * np.tanh(scores / rule.softcap)
                logits = scores if rule.sink_logits is None else np.append(scores, rule.sink_logits.double().numpy()[h])
                weights = np.exp(logits - logits.max())
                attention[b, h, t, list(seen)] = (weights / weights.sum())[: len(scores)]
                if rule.sigmoid_bias is not None:
                    attention[b, h, t, list(seen)] = 1 / (1 + np.exp(-scores - rule.sigmoid_bias))
    return attention


def expected_readings(q, k, v, rule, request: ReadingRequest, *, causal=True) -> dict[str, np.ndarray]:
    """Every reading by its definition from the square."""
    attention = square_attention(q, k, rule, causal=causal)
    group = q.shape[1] // k.shape[1]
    value = np.repeat(v.double().numpy(), group, axis=1)
    length = attention.shape[-1]
    logarithm = np.log(np.where(attention > 0, attention, 1.0))
    expected = {
        "output": np.einsum("bhts,bhsd->bthd", attention, value),
        "received": attention.sum(2),
        "entropy": -(attention * logarithm).sum(-1),
        "mixing": (attention**2).sum(-1),
        "by_distance": np.zeros((*attention.shape[:2], len(request.distances))),
    }
    for index, d in enumerate(request.distances):
        expected["by_distance"][..., index] = np.mean([attention[:, :, t, t - d] for t in range(d, length)], axis=0)
    if request.key_weights is not None:
        weights = np.repeat(request.key_weights.double().numpy(), group, axis=0)
        expected["weighted_mixing"] = np.einsum("bhts,hs->bht", attention**2, weights)
    if request.own:
        expected["own"] = attention.diagonal(0, -2, -1)
    if request.keys is not None:
        expected["received"] = expected["received"][..., request.keys.numpy()]
    return expected


def assert_equal(found, expected: dict, tolerance: float) -> None:
    for name, values in expected.items():
        actual = getattr(found, name)
        assert actual.shape == values.shape, name
        np.testing.assert_allclose(actual.double().numpy(), values, rtol=tolerance, atol=tolerance, err_msg=name)


def furthest(found, expected: dict, name: str) -> float:
    return float(np.abs(getattr(found, name).double().numpy() - expected[name]).max())


def make_request(length, num_kv_heads=2) -> ReadingRequest:
    weights = torch.rand(num_kv_heads, length, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) * 3
    distances = tuple(d for d in (0, 1, 2, 5, 16, 64, 100) if d < length)
    return ReadingRequest(distances=distances, key_weights=weights, own=True)


RULES = {
    "plain": AttentionRule(scaling=8**-0.5),
    "unscaled": AttentionRule(scaling=1.0),
    "window_1": AttentionRule(scaling=0.4, window=1),
    "window_7": AttentionRule(scaling=0.4, window=7),
    "window_64": AttentionRule(scaling=0.4, window=64),
    "window_65": AttentionRule(scaling=0.4, window=65),
    "window_beyond": AttentionRule(scaling=0.4, window=1000),
    "softcap": AttentionRule(scaling=0.4, softcap=1.5),
    "sinks": AttentionRule(scaling=0.4, sink_logits=torch.tensor([-3.0, 0.5, 4.0, 60.0])),
    "sigmoid": AttentionRule(scaling=0.4, sigmoid_bias=-2.0),
    "sigmoid_window": AttentionRule(scaling=0.4, sigmoid_bias=1.0, window=7, softcap=2.0),
    "all": AttentionRule(scaling=0.4, window=9, softcap=2.0, sink_logits=torch.tensor([1.0, -1.0, 0.0, 2.0])),
}


@pytest.mark.parametrize("length", [1, 63, 64, 65, 130])
@pytest.mark.parametrize("name", RULES)
def test_equals_the_square_in_float64(name, length):
    q, k, v = make_inputs(length)
    rule, request = RULES[name], make_request(length)
    found = tiled_attention(q, k, v, rule, request)
    assert_equal(found, expected_readings(q, k, v, rule, request), EXACT)
    assert found.output.dtype == torch.float64


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 4), (6, 2), (6, 1)])
def test_every_grouping_of_heads(num_heads, num_kv_heads):
    q, k, v = make_inputs(70, num_heads=num_heads, num_kv_heads=num_kv_heads)
    rule, request = RULES["plain"], make_request(70, num_kv_heads)
    assert_equal(tiled_attention(q, k, v, rule, request), expected_readings(q, k, v, rule, request), EXACT)


def test_control_heads_grouped_the_other_way_differ():
    # Query heads 0 and 1 share key-value head 0. Were they dealt out in turn, heads 1 and 2 would swap.
    q, k, v = make_inputs(20)
    expected = expected_readings(q[:, [0, 2, 1, 3]], k, v, RULES["plain"], ReadingRequest())
    found = tiled_attention(q, k, v, RULES["plain"], ReadingRequest())
    assert furthest(found, expected, "received") > 0.1


@pytest.mark.parametrize(("size", "value_size"), [(24, 12), (8, 20), (5, 3)])
def test_values_of_another_size_than_keys(size, value_size):
    q, k, v = make_inputs(67, size=size, value_size=value_size)
    rule, request = AttentionRule(scaling=size**-0.5), make_request(67)
    assert_equal(tiled_attention(q, k, v, rule, request), expected_readings(q, k, v, rule, request), EXACT)


@pytest.mark.parametrize("tile_elements", [1, 3 * 2 * 64 * 130])
def test_pairs_in_several_tiles(monkeypatch, tile_elements):
    """Five sequences of two key-value heads, one pair at a time, and three at a time with one left over."""
    monkeypatch.setattr(module, "TILE_ELEMENTS", tile_elements)
    q, k, v = make_inputs(130, num_batch=5)
    rule, request = RULES["all"], make_request(130)
    assert_equal(tiled_attention(q, k, v, rule, request), expected_readings(q, k, v, rule, request), EXACT)


@pytest.mark.parametrize("length", [1, 15, 64, 130])
@pytest.mark.parametrize("name", RULES)
def test_float32(name, length):
    q, k, v = make_inputs(length, dtype=torch.float32)
    rule, request = RULES[name], make_request(length)
    found = tiled_attention(q, k, v, rule, request)
    assert_equal(found, expected_readings(q, k, v, rule, request), SINGLE)
    assert {found.output.dtype, found.received.dtype, found.entropy.dtype} == {torch.float32}


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (6, 2), (6, 1)])
@pytest.mark.parametrize("name", ["plain", "all"])
def test_float32_of_every_grouping_in_several_tiles(monkeypatch, name, num_heads, num_kv_heads):
    monkeypatch.setattr(module, "TILE_ELEMENTS", 3 * num_heads // num_kv_heads * 32 * 130)
    q, k, v = make_inputs(130, num_batch=5, num_heads=num_heads, num_kv_heads=num_kv_heads, dtype=torch.float32)
    sinks = None if RULES[name].sink_logits is None else torch.linspace(-2, 2, num_heads)
    rule, request = replace(RULES[name], sink_logits=sinks), make_request(130, num_kv_heads)
    assert_equal(tiled_attention(q, k, v, rule, request), expected_readings(q, k, v, rule, request), SINGLE)


@pytest.mark.parametrize("name", ["plain", "window_7", "all"])
@pytest.mark.parametrize("keys", [[], [0], [3, 64, 129], [128, 63, 65]])
def test_float32_of_chosen_keys(name, keys):
    q, k, v = make_inputs(130, dtype=torch.float32)
    request = replace(make_request(130), keys=torch.tensor(keys, dtype=torch.long), key_weights=None)
    expected = expected_readings(q, k, v, RULES[name], request)
    read = {name: expected[name] for name in ("output", "received", "by_distance")}
    assert_equal(tiled_attention(q, k, v, RULES[name], request), read, SINGLE)


@pytest.mark.parametrize("keys", [torch.tensor([0, 10], dtype=torch.int32), torch.arange(16)[::4]])
def test_keys_of_another_type_or_that_lie_apart(keys):
    q, k, v = make_inputs(40, dtype=torch.float32)
    expected = expected_readings(q, k, v, RULES["plain"], ReadingRequest(keys=keys.long()))
    found = tiled_attention(q, k, v, RULES["plain"], ReadingRequest(keys=keys))
    assert_equal(found, {"received": expected["received"]}, SINGLE)


def test_key_weights_of_another_shape():
    q, k, v = make_inputs(40, dtype=torch.float32)
    one_for_all = torch.rand(1, 40, generator=torch.Generator().manual_seed(0))
    found = tiled_attention(q, k, v, RULES["plain"], ReadingRequest(key_weights=one_for_all))
    expected = tiled_attention(q, k, v, RULES["plain"], ReadingRequest(key_weights=one_for_all.repeat(2, 1)))
    assert torch.equal(found.weighted_mixing, expected.weighted_mixing)
    with pytest.raises(RuntimeError, match="expanded size"):
        tiled_attention(q, k, v, RULES["plain"], ReadingRequest(key_weights=torch.rand(2, 10)))


def test_float32_of_a_long_text():
    """Rows longer than what is added up at once, and queries of which some are sampled."""
    length = 1300
    q, k, v = (x.float() for x in make_inputs(length, num_batch=1, num_heads=1, num_kv_heads=1))
    scores = (q.double() @ k.double().mT * 0.4).masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    weights = scores.softmax(-1)
    found = tiled_attention(q, k, v, AttentionRule(scaling=0.4), ReadingRequest(distances=(0, 3)))
    queries = sampled_queries(length, CPU)
    later = queries[queries >= 3]
    by_distance = [weights[..., queries, queries].mean(-1), weights[..., later, later - 3].mean(-1)]
    expected = {
        "received": weights.sum(2),
        "mixing": weights.square().sum(-1),
        "entropy": -(weights * weights.log().nan_to_num(neginf=0)).sum(-1),
        "by_distance": torch.stack(by_distance, -1),
    }
    assert_equal(found, {name: values.numpy() for name, values in expected.items()}, SINGLE)


def test_faint_attention_is_none():
    """e^-60 of a row's largest weight is 0 or next to it, and what is left of the row is not disturbed."""
    q, k, v = torch.ones(1, 1, 40, 1), torch.zeros(1, 1, 40, 1), torch.ones(1, 1, 40, 1)
    k[0, 0, 7] = 60.0
    found = tiled_attention(q, k, v, AttentionRule(scaling=1.0), ReadingRequest(distances=(0,)))
    # The first 7 queries see equal keys; from key 7 on all look at it.
    t = np.arange(1, 8)
    np.testing.assert_allclose(found.entropy[0, 0], [*np.log(t), *[0] * 33], atol=1e-6)
    np.testing.assert_allclose(found.received[0, 0, 7:], [33.0, *[0] * 32], atol=1e-6)


def test_nan_reaches_the_reader():
    q, k, v = make_inputs(40, dtype=torch.float32)
    k[0, 0, 20] = torch.nan
    found = tiled_attention(q, k, v, RULES["plain"], make_request(40))
    assert found.output[0, 20:, 0].isnan().all()
    assert found.entropy[0, 0, 20:].isnan().all()
    assert found.received[0, 0, 5].isnan()
    assert found.output[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_in_float32(dtype):
    """Only the output is rounded to the input's dtype: to half a unit in its last place, 2^-9 for bfloat16."""
    q, k, v = make_inputs(130, dtype=dtype)
    rule, request = RULES["all"], make_request(130)
    found, expected = tiled_attention(q, k, v, rule, request), expected_readings(q, k, v, rule, request)
    output = expected.pop("output")
    assert_equal(found, expected, SINGLE)
    assert found.output.dtype == dtype
    half_unit = torch.finfo(dtype).eps / 2
    np.testing.assert_allclose(found.output.double().numpy(), output, rtol=half_unit * 1.01, atol=SINGLE)
    # Control: weights rounded to the input's dtype on the way would miss the readings' tolerance many times over.
    rounded = torch.from_numpy(square_attention(q, k, rule)).to(dtype).double().sum(2).numpy()
    assert np.abs(rounded - expected["received"]).max() > 10 * SINGLE


@pytest.mark.parametrize("name", ["plain", "window_7", "all"])
@pytest.mark.parametrize("keys", [[0], [0, 10], [3, 64, 129], [129], [128, 63, 65]])
def test_chosen_keys(name, keys):
    q, k, v = make_inputs(130)
    rule = RULES[name]
    request = replace(make_request(130), keys=torch.tensor(keys), key_weights=None)
    found = tiled_attention(q, k, v, rule, request)
    expected = expected_readings(q, k, v, rule, request)
    for unread in ("entropy", "mixing"):
        expected.pop(unread)
        assert getattr(found, unread) is None
    assert found.weighted_mixing is None
    assert_equal(found, expected, EXACT)


def test_non_contiguous_inputs():
    """Models hand over [B, T, H, D] transposed, and one slice of a fused projection."""
    fused = torch.randn(2, 70, 8, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    q, k, v = (part.transpose(1, 2)[..., ::2] for part in fused.split([4, 2, 2], dim=2))
    assert not q.is_contiguous()
    rule, request = RULES["all"], make_request(70)
    found = tiled_attention(q, k, v, rule, request)
    assert_equal(found, expected_readings(q, k, v, rule, request), EXACT)
    contiguous = tiled_attention(q.contiguous(), k.contiguous(), v.contiguous(), rule, request)
    assert torch.equal(found.output, contiguous.output)


def test_inputs_stay_as_they_were():
    q, k, v = make_inputs(70)
    before = [x.clone() for x in (q, k, v)]
    tiled_attention(q, k, v, RULES["all"], make_request(70))
    assert all(torch.equal(a, b) for a, b in zip(before, (q, k, v), strict=True))


def test_empty_batch():
    q, k, v = make_inputs(20, num_batch=0)
    found = tiled_attention(q, k, v, RULES["plain"], make_request(20))
    assert found.output.shape == (0, 20, 4, 8)
    assert found.received.shape == (0, 4, 20)


def test_huge_scores_do_not_overflow():
    q, k, v = make_inputs(70, dtype=torch.float32)
    found = tiled_attention(q * 100, k * 100, v, RULES["plain"], make_request(70))
    for name in ("output", "received", "entropy", "mixing", "weighted_mixing", "by_distance"):
        assert getattr(found, name).isfinite().all(), name
    np.testing.assert_allclose(found.received.sum(-1), np.full((2, 4), 70.0), rtol=1e-5)  # every query spends 1
    assert (found.entropy >= -1e-5).all()


def test_equal_scores_worked_by_hand():
    """Zero queries: query t spreads 1 / (t + 1) evenly; entropy log(t + 1), squares 1 / (t + 1)."""
    q, k, v = make_inputs(66)
    found = tiled_attention(torch.zeros_like(q), k, v, RULES["plain"], ReadingRequest(distances=(0, 3)))
    t = np.arange(1, 67)
    np.testing.assert_allclose(found.entropy[0, 0], np.log(t), atol=1e-12)
    np.testing.assert_allclose(found.mixing[1, 3], 1 / t, atol=1e-12)
    np.testing.assert_allclose(found.received[0, 0, 0], (1 / t).sum(), atol=1e-12)
    np.testing.assert_allclose(found.by_distance[0, 0], [(1 / t).mean(), (1 / t[3:]).mean()], atol=1e-12)
    # A learned sink with logit 0 counts as one more key, which is nobody's.
    sinks = tiled_attention(
        torch.zeros_like(q), k, v, replace(RULES["plain"], sink_logits=torch.zeros(4)), ReadingRequest()
    )
    np.testing.assert_allclose(sinks.received[0, 0].sum(), (t / (t + 1)).sum(), atol=1e-12)
    np.testing.assert_allclose(sinks.entropy[0, 0], t / (t + 1) * np.log(t + 1), atol=1e-12)


def test_sampled_queries():
    most = SAMPLED_QUERIES
    for length in (1, 2, most):
        assert sampled_queries(length, CPU).tolist() == list(range(length))
    many = sampled_queries(5000, CPU)
    assert len(many) == len(set(many.tolist())) == most
    assert many[0] == 0
    assert many[-1] == 4999  # so that every key and every distance has a query
    assert int(many.diff().max()) - int(many.diff().min()) <= 1


def test_distances_of_a_long_text_are_a_mean_over_sampled_queries():
    length = SAMPLED_QUERIES + 50
    q, k, v = make_inputs(length, num_batch=1, num_heads=1, num_kv_heads=1)
    rule = RULES["plain"]
    attention = square_attention(q, k, rule)
    queries = sampled_queries(length, CPU).tolist()
    found = tiled_attention(q, k, v, rule, ReadingRequest(distances=(0, 1, 50, length - 1)))
    for index, d in enumerate((0, 1, 50, length - 1)):
        expected = np.mean([attention[:, :, t, t - d] for t in queries if t >= d], axis=0)
        np.testing.assert_allclose(found.by_distance[..., index], expected, atol=EXACT)
    # Control: all queries give another mean.
    everywhere = attention[:, :, range(length), range(length)].mean(-1)
    assert abs(everywhere - found.by_distance[..., 0].numpy()).max() > 1e-4


CONTROLS = {
    "softcap dropped": ("softcap", {"softcap": None}),
    "softcap of another size": ("softcap", {"softcap": 2.0}),
    "window dropped": ("window_7", {"window": None}),
    "window one longer": ("window_7", {"window": 8}),
    "window one shorter": ("window_7", {"window": 6}),
    "sinks dropped": ("sinks", {"sink_logits": None}),
    "scaling dropped": ("plain", {"scaling": 1.0}),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_control_another_rule_differs_in_float32(control):
    right, change = CONTROLS[control]
    q, k, v = make_inputs(66, dtype=torch.float32)
    request = make_request(66)
    expected = expected_readings(q, k, v, RULES[right], request)
    found = tiled_attention(q, k, v, replace(RULES[right], **change), request)
    for name in ("output", "received", "entropy", "mixing", "weighted_mixing"):
        assert furthest(found, expected, name) > 1e-2, name


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("name", ["output", "received", "entropy", "mixing", "weighted_mixing"])
def test_control_another_rule_differs_in_every_reading(control, name):
    right, change = CONTROLS[control]
    q, k, v = make_inputs(66)
    request = make_request(66)
    expected = expected_readings(q, k, v, RULES[right], request)
    assert furthest(tiled_attention(q, k, v, RULES[right], request), expected, name) < EXACT
    assert furthest(tiled_attention(q, k, v, replace(RULES[right], **change), request), expected, name) > 1e-2


def test_control_without_the_causal_mask_every_reading_differs(monkeypatch):
    q, k, v = make_inputs(66)
    rule, request = RULES["plain"], make_request(66)
    expected = expected_readings(q, k, v, rule, request)
    bidirectional = expected_readings(q, k, v, rule, request, causal=False)
    for name in ("_mask", "_clear_hidden"):
        monkeypatch.setattr(module, name, lambda *_: None)
    found = tiled_attention(q, k, v, rule, request)
    for name in ("output", "received", "entropy", "mixing", "weighted_mixing", "by_distance"):
        assert furthest(found, expected, name) > 1e-2, name
        assert np.abs(bidirectional[name] - expected[name]).max() > 1e-2, name


def test_without_triton_a_gpu_reads_in_tiles(monkeypatch):
    query = torch.randn(1, 2, 16, 8, dtype=torch.bfloat16)
    monkeypatch.setattr("sinkscope.kernels.attention_received.HAS_TRITON", False)
    assert _not_fused(query, AttentionRule(scaling=1.0)) == "triton is not installed"
