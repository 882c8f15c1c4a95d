"""The ladder's arms: what each does to the value aggregation, and that the fused model is the package's."""

from __future__ import annotations

import pytest
import torch
from arms import ARMS, FIRST_LAMBDA, AllHeadsNorm, HeadNorm, Scale, build, fuse

from sinkscope.attention.variants import AttentionShape

SHAPE = AttentionShape(width=12, num_heads=3, num_key_value_heads=3, head_size=4, length=8, eps=1e-6)


def left(variant: Scale, o_BTHD: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(0)
    return variant.leave(o_BTHD, empty, (empty, empty)).unflatten(-1, (3, 4))


def test_each_arm_does_what_its_line_says():
    o_BTHD = torch.randn(2, 5, 3, 4) * torch.tensor([1.0, 2.0, 4.0])[:, None]
    by_head, together, scaled = (left(arm(SHAPE), o_BTHD) for arm in (HeadNorm, AllHeadsNorm, Scale))
    torch.testing.assert_close(by_head.square().mean(-1).sqrt(), torch.full((2, 5, 3), FIRST_LAMBDA), rtol=1e-4, atol=0)
    torch.testing.assert_close(
        together.square().mean((-2, -1)).sqrt(), torch.full((2, 5), FIRST_LAMBDA), rtol=1e-4, atol=0
    )
    assert not torch.allclose(together, by_head, rtol=0.1)
    torch.testing.assert_close(scaled, o_BTHD * FIRST_LAMBDA)


@pytest.mark.parametrize("arm", ARMS)
def test_the_fused_model_is_the_packages(arm):
    model = build(arm, "tiny", 1)
    tokens = torch.randint(4096, (2, 16))
    start = model.hidden_states(tokens)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "offsets")):
                assert not parameter.any()
                parameter.normal_(std=0.1)
            if name.endswith("lambdas"):
                assert (parameter == FIRST_LAMBDA).all()
    plain = model.hidden_states(tokens)
    assert not torch.allclose(start, plain, atol=1e-2)
    fuse(model)
    torch.testing.assert_close(model.hidden_states(tokens), plain, rtol=1e-4, atol=1e-5)


def test_arms_of_one_seed_begin_alike():
    first, second = (dict(build(arm, "tiny", 3).named_parameters()) for arm in ("softmax", "head_gate"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = dict(build("softmax", "tiny", 4).named_parameters())
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
