"""Each attention variant against its formula, written out here once more in float64: output and every gradient.

Axes: B batch, T query position, S key position, H query heads, K key-value heads, D head size, E width.
"""

import math

import pytest
import torch
from torch import Tensor

from sinkscope.attention.variants import VARIANTS, AttentionShape, build_variant
from sinkscope.errors import InputError

SHAPE = AttentionShape(width=24, num_heads=4, num_key_value_heads=2, head_size=8, length=600, eps=1e-6)
OPTIONS = {
    "head_norm": dict(per_head=True, offset=True, initial_lambda=0.5),
    "head_norm_gate": dict(initial_lambda=2.0),
}
NORMED = ("head_norm", "first_norm", "head_norm_gate")
# float64 differs by the order of its sums only. float32 is good to 1e-6 of the largest value and sums over 300 keys
# and 600 rows add little to it. In bf16 scores, weights and output are rounded to 2^-8 each.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 0.06}


def made(name: str, dtype: torch.dtype):
    """The variant with random parameters away from their neutral values."""
    variant = build_variant(name, SHAPE, OPTIONS.get(name, {})).to(dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in variant.parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator).to(dtype))
    return variant


def inputs(length: int, dtype: torch.dtype, seed=0) -> list[Tensor]:
    """q [B, T, H, D], k and v [B, T, K, D] as the projections leave them, x [B, T, E]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((4, 8), (2, 8), (2, 8), (24,))
    return [(1.3 * torch.randn(2, length, *shape, generator=generator)).bfloat16().to(dtype) for shape in shapes]


def rms_normed(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * gain


def formula(name: str, parameters: dict[str, Tensor], q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """[B, T, H * D] by the formula of the variant, with its square of weights."""
    if name == "qk_norm":
        q, k = rms_normed(q, parameters["q_norm.weight"]), rms_normed(k, parameters["k_norm.weight"])
    if name == "value_norm":
        v = rms_normed(v, parameters["v_norm.weight"])
    k, v = (torch.stack([part[:, :, head // 2] for head in range(4)], 2) for part in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(8)
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if name == "sigmoid":
        weights = seen / (1 + torch.exp(-scores) * 600)
    else:
        sink = {"softmax_one": torch.zeros(4), "learned_sink": parameters.get("sink")}.get(name)
        terms = torch.exp(scores) * seen
        weights = terms / (terms.sum(-1, keepdim=True) + (0 if sink is None else torch.exp(sink)[:, None, None]))
    o = torch.einsum("bhts,bshd->bthd", weights, v)
    if name.startswith("head_norm"):
        o = rms_normed(o, parameters["head_norm.weight"]) + parameters.get("head_norm.offset", 0)
    if name == "first_norm":
        o = torch.cat([rms_normed(o[:, :1], parameters["head_norm.weight"]), o[:, 1:]], 1)
    if name == "scale":
        o = o * parameters["scale.weight"]
    if name == "equal_variance":  # what a fresh model keeps: no mean, equal variances, until the batch has told it more
        first, later = o[:, 0].detach(), o[:, -(o.shape[1] // 2) :].detach()
        if o.shape[1] > 1:
            mean, shrink = first.mean(0), (later.var(0).mean() / first.var(0).mean()).sqrt().clamp(max=1)
            o = torch.cat([(mean + shrink * (o[:, 0] - mean))[:, None], o[:, 1:]], 1)
    if name == "head_gate":
        o = o * torch.sigmoid(x @ parameters["gate_proj.weight"].T).unsqueeze(-1)
    if name in ("gate", "head_norm_gate"):
        o = o * torch.sigmoid(x @ parameters["gate_proj.weight"].T).view(o.shape)
    return o.flatten(2)


def run(variant, q, k, v, x, *, plain=False) -> Tensor:
    q, k, v = (part.transpose(1, 2) for part in variant.prepare(q, k, v))
    o = variant.attend_plain(q, k, v, None)[0] if plain else variant.attend(q, k, v, None)
    angles = torch.arange(x.shape[1])[None, :, None] * 10000.0 ** (-torch.arange(4) / 4)
    return variant.leave(o, x, (angles.cos(), angles.sin()))


def with_gradients(function, leaves: list[Tensor]) -> list[Tensor]:
    y = function()
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(y.dtype)
    return [y, *torch.autograd.grad(y, leaves, dy, allow_unused=True, materialize_grads=True)]


def largest_error(name: str, length: int, dtype: torch.dtype, *, of: str | None = None, plain=False) -> float:
    """Of the variant's output and all its gradients, relative to the largest entry of each, against a formula."""
    variant, arguments = made(name, dtype), [part.requires_grad_() for part in inputs(length, dtype)]
    found = with_gradients(lambda: run(variant, *arguments, plain=plain), [*arguments, *variant.parameters()])
    wide = [part.detach().double().requires_grad_() for part in arguments]
    parameters = {key: value.detach().double().requires_grad_() for key, value in variant.named_parameters()}
    right = with_gradients(lambda: formula(of or name, parameters, *wide), [*wide, *parameters.values()])
    # A lone key has weight 1 whatever its score, so some gradients are zero up to rounding.
    return max(
        ((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-3)).item() for a, b in zip(found, right, strict=True)
    )


@pytest.mark.parametrize("length", [1, 7, 300])  # 300: more than one run of queries of the sigmoid
@pytest.mark.parametrize("name", VARIANTS)
def test_the_definition_equals_the_formula(name, length):
    assert largest_error(name, length, torch.float64, plain=True) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", VARIANTS)
def test_the_fast_path_equals_the_formula(name, dtype):
    assert largest_error(name, 300, dtype) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "softmax"])
def test_control_no_variant_passes_for_plain_softmax(name):
    assert largest_error(name, 64, torch.float64, of="softmax") > 0.1


@pytest.mark.parametrize("name", VARIANTS)
def test_compiles_into_one_graph(name):
    variant, arguments = made(name, torch.float32), inputs(40, torch.float32)
    torch._dynamo.reset()  # one function compiled for many variants would pass the limit of recompilations
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    leaves = list(variant.parameters())
    for a, b in zip(
        with_gradients(lambda: compiled(variant, *[part.requires_grad_() for part in arguments]), arguments + leaves),
        with_gradients(lambda: run(variant, *arguments), arguments + leaves),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_mask_that_hides_keys(name):
    """Left padding: the fast path under a mask equals the definition without the hidden keys."""
    variant, (q, k, v, _) = made(name, torch.float64), inputs(12, torch.float64)
    q, k, v = (part.transpose(1, 2) for part in variant.prepare(q, k, v))
    mask = torch.ones(12, 12, dtype=torch.bool).tril()[None, None].repeat(2, 1, 1, 1)
    mask[..., :5] = False
    mask[..., :5, :5] = torch.eye(5, dtype=torch.bool)
    found = variant.attend(q, k, v, mask)[:, 5:]
    expected = variant.attend_plain(q[:, :, 5:], k[:, :, 5:], v[:, :, 5:], None)[0]
    torch.testing.assert_close(found, expected)
    assert (variant.attend(q, k, v, None)[:, 5:] - expected).abs().max() > 1e-3  # the control


@pytest.mark.parametrize("name", VARIANTS)
def test_one_query_after_a_cache(name):
    variant, (q, k, v, _) = made(name, torch.float64), inputs(12, torch.float64)
    q, k, v = (part.transpose(1, 2) for part in variant.prepare(q, k, v))
    last = variant.attend(q[:, :, -1:], k, v, None)
    torch.testing.assert_close(last, variant.attend(q, k, v, None)[:, -1:])


@pytest.mark.parametrize("name", VARIANTS)
def test_says_which_path_runs(name):
    paths = build_variant(name, SHAPE, {}).paths(torch.empty(0))
    assert set(paths) == {"attention"} | ({"head_norm"} if name in NORMED else set())


def test_equal_variance_follows_training_batches_alone():
    """After two batches it keeps the means of both, and outside training a sequence does not depend on its batch."""
    variant = made("equal_variance", torch.float64)
    seen = []
    for seed in (1, 2):
        q, k, v, x = inputs(8, torch.float64, seed)
        run(variant, q, k, v, x)
        seen.append(variant.attend_plain(*(part.transpose(1, 2) for part in (q, k, v)), None)[0])
    first = torch.stack([o[:, 0].var(0).mean() for o in seen]).mean()
    later = torch.stack([o[:, 4:].var(0).mean() for o in seen]).mean()
    mean = torch.stack([o[:, 0].mean(0) for o in seen]).mean(0)
    assert later < first, "the control: there is something to take away"
    kept = {name: buffer.clone() for name, buffer in variant.named_buffers()}
    torch.testing.assert_close(kept["first.mean"], mean)
    torch.testing.assert_close(kept["first.later_variance"] / kept["first.first_variance"], later / first)
    variant.eval()
    q, k, v, x = inputs(8, torch.float64, 3)
    whole = run(variant, q, k, v, x)
    alone = run(variant, q[:1], k[:1], v[:1], x[:1])
    torch.testing.assert_close(alone, whole[:1])
    o = v[:, 0].repeat_interleave(2, 1)  # position 0 sees itself alone
    torch.testing.assert_close(whole[:, 0], (mean + (later / first).sqrt() * (o - mean)).flatten(1))
    assert all(torch.equal(buffer, kept[name]) for name, buffer in variant.named_buffers())
    with torch.no_grad():
        run(variant.train(), q, k, v, x)  # held-out text is evaluated so
    assert torch.equal(variant.first.mean, kept["first.mean"])
    run(variant, q, k, v, x)
    assert not torch.equal(variant.first.mean, kept["first.mean"]), "the control"


def test_lambda_is_shared_across_heads_by_default():
    assert build_variant("head_norm", SHAPE, {}).head_norm.weight.shape == (8,)
    assert build_variant("head_norm", SHAPE, {}).head_norm.offset is None
    assert build_variant("head_norm", SHAPE, OPTIONS["head_norm"]).head_norm.weight.shape == (4, 8)


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("headnorm", {}, "`variant` cannot be 'headnorm'. Choose one of softmax, head_norm, "),
        ("softmax", {"per_head": True}, r"softmax cannot have per_head = True\. It has no options"),
        ("head_norm", {"perhead": True}, "per_head \\(bool\\), offset \\(bool\\), initial_lambda \\(float\\)"),
        ("head_norm", {"per_head": "yes"}, "cannot have per_head = 'yes'"),
        ("head_norm_gate", {"initial_lambda": "1"}, "cannot have initial_lambda = '1'"),
        ("head_norm", {"offset": 1}, "cannot have offset = 1"),
    ],
)
def test_refusals(name, options, match):
    with pytest.raises(InputError, match=match):
        build_variant(name, SHAPE, options)
