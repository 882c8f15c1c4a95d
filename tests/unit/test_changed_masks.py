"""Attention with changed masks against the plain definition: every score, every mask, one softmax, in float64.

Axes: B batch, H query heads, K key-value heads, T query position, S key position, D head size.
"""

import numpy as np
import pytest
import torch

from sinkscope.errors import InputError
from sinkscope.tracing import attention as attention_module
from sinkscope.tracing.attention import read_attention
from sinkscope.tracing.attention_rule import AttentionRule, ReadingRequest
from sinkscope.tracing.open_interventions import MaskChange

B, H, K, T, D = 2, 6, 3, 70, 8
"""Three groups of two heads, and a text longer than one tile of 64 queries."""
DISTANCES = (0, 1, 3, 16, 69)

RULES = {
    "plain": {},
    "window": dict(window=9),
    "soft-cap": dict(softcap=1.5),
    "learned sinks": dict(sink_logits=torch.linspace(-1, 3, H)),
    "all of them": dict(window=20, softcap=2.0, sink_logits=torch.linspace(2, -1, H)),
}
CHANGES = {
    "only": (MaskChange(queries=(10, 65), mode="only", keys=(10,)),),
    "only a later key": (MaskChange(queries=(3,), mode="only", keys=(50, 69), heads=(1, 4), sequences=(1,)),),
    "allow": (MaskChange(queries=(0, 30), mode="allow", keys=tuple(range(40))),),
    "block": (MaskChange(queries=(5, 64, 69), mode="block", keys=(0, 4, 62, 63), heads=(0, 5)),),
    "several": (
        MaskChange(queries=(10,), mode="only", keys=(10,), heads=(0,)),
        MaskChange(queries=(10,), mode="allow", keys=(60,), heads=(1, 2), sequences=(0,)),
        MaskChange(queries=(69,), mode="block", keys=(69, 68)),
    ),
}


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(B, H, T, D, generator=generator, dtype=torch.float64) * 1.5
    key, value = (torch.randn(B, K, T, D, generator=generator, dtype=torch.float64) for _ in range(2))
    return tuple(x.to(dtype) for x in (query, key, value))


def rule_of(name: str, changes=()) -> AttentionRule:
    return AttentionRule(scaling=0.4, **RULES[name], mask_changes=changes)


def definition(query, key, value, rule, *, keys=None, key_weights=None) -> dict:
    """Every reading from the whole matrix of weights, the mask filled in element by element."""
    query, key, value = (x.double() for x in (query, key, value))
    key, value = (x.repeat_interleave(H // K, dim=1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * rule.scaling
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    seen = torch.zeros(B, H, T, T, dtype=torch.bool)
    for t in range(T):
        for s in range(t + 1):
            seen[:, :, t, s] = rule.window is None or t - s < rule.window
    for change in rule.mask_changes:
        for b in range(B) if change.sequences is None else change.sequences:
            for h in range(H) if change.heads is None else change.heads:
                for t in change.queries:
                    for s in range(T):
                        if change.mode == "only":
                            seen[b, h, t, s] = s in change.keys
                        elif s in change.keys:
                            seen[b, h, t, s] = change.mode == "allow"
    weights = torch.exp(scores.masked_fill(~seen, -torch.inf))
    total = weights.sum(-1, keepdim=True)
    if rule.sink_logits is not None:
        total = total + rule.sink_logits.double().exp().view(1, H, 1, 1)
    a = weights / total
    received = a.tril().sum(2)  # queries from the key on
    found = {
        "output": (a @ value).transpose(1, 2),
        "received": received if keys is None else received[..., keys],
        "by_distance": torch.stack([a.diagonal(-d, -2, -1).mean(-1) for d in DISTANCES], dim=-1),
    }
    if keys is None:
        found |= {"entropy": torch.special.entr(a).sum(-1), "mixing": (a**2).sum(-1), "own": a.diagonal(0, -2, -1)}
    if keys is None and key_weights is not None:
        weights_HS = key_weights.double().repeat_interleave(H // K, dim=0)
        found["weighted_mixing"] = (a**2 * weights_HS[None, :, None]).sum(-1)
    return found


def assert_equal(reading, expected: dict, tolerance: float) -> None:
    for name, values in expected.items():
        found = getattr(reading, name).double()
        np.testing.assert_allclose(
            found, values, rtol=tolerance, atol=tolerance * float(values.abs().max()), err_msg=name
        )


def differs(reading, expected: dict, *names: str) -> bool:
    return all(float((getattr(reading, name) - expected[name]).abs().max()) > 1e-3 for name in names)


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("rule", RULES)
def test_readings_equal_the_definition(rule, changes):
    query, key, value = inputs()
    weights = torch.rand(K, T, generator=torch.Generator().manual_seed(1))
    request = ReadingRequest(distances=DISTANCES, key_weights=weights, own=True)
    expected = definition(query, key, value, rule_of(rule, CHANGES[changes]), key_weights=weights)
    reading, _ = read_attention(query, key, value, rule_of(rule, CHANGES[changes]), request)
    assert reading.output.shape == (B, T, H, D)
    assert_equal(reading, expected, 2e-6)
    # Control: without the changes every reading is another.
    plain, _ = read_attention(query, key, value, rule_of(rule), request)
    assert differs(plain, expected, "output", "entropy", "mixing", "weighted_mixing")
    assert differs(plain, expected, "received") or changes == "only a later key"


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("rule", ["plain", "all of them"])
def test_chosen_keys_equal_the_definition(rule, changes):
    query, key, value = inputs()
    keys = torch.tensor([0, 10, 62, 69])
    expected = definition(query, key, value, rule_of(rule, CHANGES[changes]), keys=keys)
    request = ReadingRequest(distances=DISTANCES, keys=keys)
    reading, _ = read_attention(query, key, value, rule_of(rule, CHANGES[changes]), request)
    assert reading.entropy is None
    assert reading.mixing is None
    assert_equal(reading, expected, 2e-6)


@pytest.mark.parametrize("rule", RULES)
def test_float64_is_read_in_float64(rule):
    query, key, value = inputs(torch.float64)
    request = ReadingRequest(distances=DISTANCES, own=True)
    changed = rule_of(rule, CHANGES["several"])
    reading, _ = read_attention(query, key, value, changed, request)
    assert reading.output.dtype == reading.received.dtype == torch.float64
    assert_equal(reading, definition(query, key, value, changed), 1e-12)


def test_bfloat16_values_keep_their_dtype():
    query, key, value = inputs(torch.bfloat16)
    changed = rule_of("plain", CHANGES["several"])
    reading, _ = read_attention(query, key, value, changed, ReadingRequest(distances=DISTANCES, own=True))
    assert reading.output.dtype == torch.bfloat16
    expected = definition(query, key, value, changed)
    assert_equal(reading, {name: expected[name] for name in ("received", "by_distance", "entropy", "mixing")}, 2e-6)
    np.testing.assert_allclose(reading.output.double(), expected["output"], rtol=2**-8, atol=1e-6)


def test_rows_in_several_portions_equal_those_in_one(monkeypatch):
    query, key, value = inputs()
    changed = rule_of("window", (MaskChange(queries=tuple(range(5, 40)), mode="allow", keys=(0,)),))
    request = ReadingRequest(distances=DISTANCES, own=True)
    monkeypatch.setattr(attention_module, "TILE_ELEMENTS", B * H * T * 4)
    reading, _ = read_attention(query, key, value, changed, request)
    assert_equal(reading, definition(query, key, value, changed), 2e-6)


def test_a_key_receives_at_most_all_attention():
    """What an earlier query is let see of a late key is not part of a mean over the queries from that key on."""
    query, key, value = inputs()
    changed = rule_of("plain", (MaskChange(queries=(0, 1, 2, 3), mode="only", keys=(69,)),))
    reading, _ = read_attention(query, key, value, changed, ReadingRequest())
    assert float(reading.received[..., 69].max()) <= 1
    assert float(reading.mixing[:, :, 0].min()) == 1  # the earlier query does put all its attention there


def test_longer_texts_are_sampled_at_the_same_queries():
    """Attention by distance is a mean over 256 sampled queries: a changed query that is not one of them counts for
    nothing."""
    length = 300
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, length, D, generator=generator) for _ in range(3))
    sampled = set(torch.linspace(0, length - 1, 256).long().tolist())
    inside, outside = (
        next(t for t in range(50, 299) if t in sampled),
        next(t for t in range(50, 299) if t not in sampled),
    )
    request, rows = ReadingRequest(distances=(0, 16)), {}
    for name, changes in {
        "none": (),
        "inside": (MaskChange(queries=(inside,), mode="only", keys=(inside,)),),
        "outside": (MaskChange(queries=(outside,), mode="only", keys=(outside,)),),
    }.items():
        rule = AttentionRule(scaling=0.4, mask_changes=changes)
        rows[name] = read_attention(query, key, value, rule, request)[0].by_distance
    assert torch.equal(rows["outside"], rows["none"])
    change = (rows["inside"] - rows["none"]).double()
    scores = torch.einsum("hd,hsd->hs", query[0, :, inside].double(), key[0, :, : inside + 1].double()) * 0.4
    weights = scores.softmax(-1)
    np.testing.assert_allclose(change[0, :, 0], (1 - weights[:, inside]) / 256, rtol=1e-3)
    num_back = sum(t >= 16 for t in sampled)
    np.testing.assert_allclose(change[0, :, 1], -weights[:, inside - 16] / num_back, rtol=1e-2, atol=1e-8)


@pytest.mark.parametrize(
    ("change", "wrong", "advice"),
    [
        (MaskChange(queries=(T,), mode="only", keys=(0,)), "no position 70", "from 0 to 69"),
        (MaskChange(queries=(5,), mode="only", keys=(0, T + 3)), "no position 73", "from 0 to 69"),
        (MaskChange(queries=(5,), mode="block", keys=(-1,)), "no position -1", "from 0 to 69"),
        (MaskChange(queries=(5,), mode="only", keys=(0,), heads=(H,)), "no head 6", "from 0 to 5"),
        (MaskChange(queries=(5,), mode="only", keys=(0,), sequences=(0, 2)), "no sequence 2", "from 0 to 1"),
        (MaskChange(queries=(5,), mode="only", keys=()), "no key at all", "at least its own key"),
        (MaskChange(queries=(2,), mode="block", keys=(0, 1, 2), heads=(3,)), "no key at all", "at least its own key"),
    ],
)
def test_changes_that_cannot_be_made_are_refused(change, wrong, advice):
    query, key, value = inputs()
    with pytest.raises(InputError) as error:
        read_attention(query, key, value, rule_of("plain", (change,)), ReadingRequest())
    assert wrong in str(error.value)
    assert advice in str(error.value)


def test_the_reading_that_was_corrected_is_left_alone():
    """The corrected reading is a new one: its tensors are not those of the plain reading."""
    query, key, value = inputs()
    request = ReadingRequest(distances=DISTANCES, own=True)
    plain, _ = read_attention(query, key, value, rule_of("plain"), request)
    copies = {name: getattr(plain, name).clone() for name in ("output", "received", "by_distance", "entropy", "mixing")}
    attention_module.with_changed_masks(plain, query, key, value, rule_of("plain", CHANGES["only"]), request)
    for name, before in copies.items():
        assert torch.equal(getattr(plain, name), before), name
