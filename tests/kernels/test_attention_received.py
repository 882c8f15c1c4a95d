"""The second pass over q k^T against its definition in float64, with controls that must fail.

Axes: B batch, H query heads, K key-value heads, T query position, S key position, D head size.
"""

import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from sinkscope.errors import InputError
from sinkscope.kernels import attention_received as module
from sinkscope.kernels.attention_received import Blocks, attention_received, attention_received_plain, received_by_keys

# The definition gets the same rounded inputs, so only float32 arithmetic differs. Scores here reach about 8, 12 in base
# 2, and carry 12 * 2^-24 = 7e-7 after scaling and again after subtracting the log-sum-exp. An exponential turns that
# absolute error into a relative one, about 1e-6; three TF32 products (22 bits) on a GPU make it 4e-6. Sums of positive
# terms keep it: 3e-5 leaves a factor of 8. A row that attends to one key has an entropy near zero, from the difference
# of two numbers of that size: 4e-6 is then the absolute error.
TOLERANCE = dict(rtol=3e-5, atol=1e-5)
SMALL_BLOCKS = Blocks(16, 32, 4, 1, None)  # many key blocks and an unmasked interior within a few dozen tokens


class Case(NamedTuple):
    length: int
    num_heads: int = 2
    num_key_heads: int = 2
    head_size: int = 16
    dtype: torch.dtype = torch.float32
    window: int | None = None
    sink: bool = False
    batch: int = 1
    blocks: Blocks | None = None


CASES = {
    "one token": Case(1),
    "shorter than a block": Case(17),
    "odd length, bfloat16": Case(67, dtype=torch.bfloat16, head_size=64),
    "two key blocks, bfloat16": Case(130, dtype=torch.bfloat16, head_size=64, num_key_heads=1),
    "interior and ragged end": Case(130, blocks=SMALL_BLOCKS, batch=2),
    "interior ends on a block": Case(128, blocks=SMALL_BLOCKS, dtype=torch.float16),
    "groups of three": Case(67, num_heads=6, num_key_heads=2, blocks=SMALL_BLOCKS),
    "head size 96": Case(67, head_size=96, dtype=torch.bfloat16),
    "head size 192": Case(67, head_size=192, num_heads=1, num_key_heads=1),
    "head size 80, float16": Case(33, head_size=80, dtype=torch.float16),
    "window inside a block": Case(67, window=5, blocks=SMALL_BLOCKS),
    "window over blocks": Case(130, window=70, blocks=SMALL_BLOCKS),
    "window of one": Case(17, window=1),
    "window longer than the text": Case(67, window=500, blocks=SMALL_BLOCKS),
    "learned sink": Case(67, sink=True, blocks=SMALL_BLOCKS),
    "everything at once": Case(130, 4, 2, 64, torch.bfloat16, 40, True, 2, SMALL_BLOCKS),
}


class Inputs(NamedTuple):
    query: Tensor
    key: Tensor
    log_sum_exp: Tensor
    attention: Tensor  # [B, H, T, S] in float64, by softmax; rows of a model with learned sinks sum to less than one
    options: dict

    @property
    def qkl(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.log_sum_exp


def inputs_of(case: Case, device: torch.device) -> Inputs:
    generator = torch.Generator().manual_seed(case.length)
    shape = (case.batch, case.length, case.head_size)
    query = torch.randn(shape[0], case.num_heads, *shape[1:], generator=generator) * 1.5
    key = torch.randn(shape[0], case.num_key_heads, *shape[1:], generator=generator) * 1.5
    query, key = query.to(device, case.dtype), key.to(device, case.dtype)
    scaling = case.head_size**-0.5
    groups = key.double().repeat_interleave(case.num_heads // case.num_key_heads, dim=1)
    score = query.double() @ groups.mT * scaling
    position = torch.arange(case.length, device=device)
    hidden = (position[:, None] < position) | (position[:, None] - position >= (case.window or case.length))
    score = score.masked_fill(hidden, -torch.inf)
    if case.sink:
        score = torch.cat([score, score.new_full((*score.shape[:3], 1), 1.0)], dim=-1)
    attention = score.softmax(-1)[..., : case.length]
    options = dict(scaling=scaling, window=case.window)
    return Inputs(query, key, score.logsumexp(-1).float(), attention, options)


def largest_error(found: Tensor, expected: Tensor) -> float:
    return (found.double() - expected.double()).abs().max().item()


@pytest.mark.parametrize("name", CASES)
def test_kernel_matches_definition(name: str, device: torch.device) -> None:
    case = CASES[name]
    inputs = inputs_of(case, device)
    weights = torch.rand(case.batch, case.num_heads, case.length, device=device)
    found = attention_received(*inputs.qkl, key_weights_BHS=weights, _blocks=case.blocks, **inputs.options)
    expected = attention_received_plain(*inputs.qkl, key_weights_BHS=weights, **inputs.options)
    for field, a, b in zip(found._fields, found, expected, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, **TOLERANCE, msg=lambda text, field=field: f"{field}: {text}")


@pytest.mark.parametrize("name", ["learned sink", "window over blocks", "groups of three"])
def test_definition_matches_softmax(name: str, device: torch.device) -> None:
    inputs = inputs_of(CASES[name], device)
    weights = torch.rand(inputs.log_sum_exp.shape, device=device)
    found = attention_received_plain(*inputs.qkl, key_weights_BHS=weights, **inputs.options)
    a = inputs.attention
    surprise = torch.where(a > 0, -a.log(), 0)
    expected = (a.sum(2), (a * surprise).sum(-1), a.square().sum(-1), (a.square() * weights[:, :, None]).sum(-1))
    for left, right in zip(found, expected, strict=True):
        # The log-sum-exp was rounded to float32: 6e-8 of about 5, which enters as a relative error.
        torch.testing.assert_close(left, right, rtol=2e-6, atol=2e-6)


def test_control_dropping_the_window_is_seen(device: torch.device) -> None:
    case = CASES["window over blocks"]
    inputs = inputs_of(case, device)
    right = attention_received(*inputs.qkl, _blocks=case.blocks, **inputs.options)
    dropped = attention_received(*inputs.qkl, scaling=inputs.options["scaling"], _blocks=case.blocks)
    for a, b in zip(right[:3], dropped[:3], strict=True):
        assert largest_error(a, b) > 0.05


def test_control_wrong_head_mapping_is_seen(device: torch.device) -> None:
    inputs = inputs_of(CASES["groups of three"], device)
    right = attention_received(*inputs.qkl, **inputs.options)
    flipped = attention_received(inputs.query, inputs.key.flip(1), inputs.log_sum_exp, **inputs.options)
    assert largest_error(right.received_sum, flipped.received_sum) > 0.5


def test_control_log_sum_exp_without_the_sink_is_seen(device: torch.device) -> None:
    inputs = inputs_of(CASES["learned sink"], device)
    without = inputs_of(CASES["learned sink"]._replace(sink=False), device)
    right = attention_received(*inputs.qkl, **inputs.options).received_sum
    wrong = attention_received(inputs.query, inputs.key, without.log_sum_exp, **inputs.options).received_sum
    assert right.sum() < wrong.sum() - 1  # without a sink every row sums to one, with it to less


def test_columns_are_deterministic(device: torch.device) -> None:
    inputs = inputs_of(CASES["everything at once"], device)
    first, again = (attention_received(*inputs.qkl, **inputs.options) for _ in range(2))
    assert torch.equal(first.received_sum, again.received_sum)  # no atomics touch the columns
    assert first.weighted_mixing is None


def test_strides_are_honoured(device: torch.device) -> None:
    case = Case(67, num_heads=4, num_key_heads=2, batch=2)
    inputs = inputs_of(case, device)
    query = inputs.query.transpose(1, 2).contiguous().transpose(1, 2)
    key = torch.cat([inputs.key, inputs.key], dim=-1)[..., : case.head_size]
    lse = inputs.log_sum_exp.mT.contiguous().mT
    assert not any(tensor.is_contiguous() for tensor in (query, key, lse))
    weights = torch.rand(case.length, device=device).expand(2, 4, case.length)
    found = attention_received(query, key, lse, key_weights_BHS=weights, _blocks=SMALL_BLOCKS, **inputs.options)
    expected = attention_received_plain(*inputs.qkl, key_weights_BHS=weights, **inputs.options)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, **TOLERANCE)
    chosen = received_by_keys(query, key, lse, torch.tensor([0, 40], device=device), **inputs.options)
    torch.testing.assert_close(chosen, found.received_sum[..., [0, 40]], **TOLERANCE)


@pytest.mark.parametrize("name", ["one token", "head size 96", "window over blocks", "everything at once"])
def test_chosen_keys_match_definition(name: str, device: torch.device) -> None:
    inputs = inputs_of(CASES[name], device)
    last = CASES[name].length - 1
    positions = torch.tensor([0, last, last // 2, last // 2], device=device)
    found = received_by_keys(*inputs.qkl, positions, **inputs.options)
    expected = attention_received_plain(*inputs.qkl, **inputs.options).received_sum[..., positions]
    torch.testing.assert_close(found.double(), expected, **TOLERANCE)


def test_chosen_keys_over_several_strips_and_blocks(device: torch.device) -> None:
    case = Case(600, num_heads=1, num_key_heads=1)  # more queries than one strip holds
    inputs = inputs_of(case, device)
    positions = torch.arange(530, 600, device=device)  # 70 keys, more than one block, all in the second strip
    found = received_by_keys(*inputs.qkl, positions, **inputs.options)
    expected = attention_received_plain(*inputs.qkl, **inputs.options).received_sum
    torch.testing.assert_close(found.double(), expected[..., positions], **TOLERANCE)
    assert largest_error(found, expected[..., positions - 1]) > 0.05  # control: the neighbouring keys differ


def test_a_key_that_does_not_exist_receives_nan(device: torch.device) -> None:
    inputs = inputs_of(Case(17), device)
    found = received_by_keys(*inputs.qkl, torch.tensor([3, 17, -1], device=device), **inputs.options)
    assert found.isnan().any(1).any(0).tolist() == [False, True, True]


def test_empty_batch_and_no_keys(device: torch.device) -> None:
    inputs = inputs_of(Case(17), device)
    nothing = (inputs.query[:0], inputs.key[:0], inputs.log_sum_exp[:0])
    results = attention_received(*nothing, **inputs.options)
    assert [tuple(value.shape) for value in results[:3]] == [(0, 2, 17)] * 3
    positions = torch.tensor([0], device=device)
    assert received_by_keys(*nothing, positions, **inputs.options).shape == (0, 2, 1)
    assert received_by_keys(*inputs.qkl, positions[:0], **inputs.options).shape == (1, 2, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, lse: (q.double(), k.double(), lse), "float64"),
        (lambda q, k, lse: (q[:, :, :-1], k, lse), "self attention"),
        (lambda q, k, lse: (q, k[:, :0], lse), "K dividing H"),
        (lambda q, k, lse: (q, k.half(), lse), "must have one dtype"),
        (lambda q, k, lse: (q, k, lse.double()), "float32 log-sum-exp"),
        (lambda q, k, lse: (q.mT.contiguous().mT, k, lse), "contiguous"),
        (lambda q, k, lse: (q.repeat(1, 1, 1, 32), k.repeat(1, 1, 1, 32), lse), "head size"),
    ],
)
def test_refuses_what_it_cannot_honour(change, message: str, device: torch.device) -> None:
    inputs = inputs_of(Case(17), device)
    with pytest.raises(InputError, match=message):
        attention_received(*change(*inputs.qkl), scaling=1.0)


@pytest.mark.parametrize("options", [dict(window=0), dict(key_weights_BHS=torch.ones(1))])
def test_refuses_options_without_meaning(options: dict, device: torch.device) -> None:
    with pytest.raises(InputError):
        attention_received(*inputs_of(Case(17), device).qkl, scaling=1.0, **options)


def test_says_why_it_cannot_run(device: torch.device) -> None:
    assert module.reason_not_to_run(torch.zeros(1, device=device)) is None
    assert "float64" in (module.reason_not_to_run(torch.zeros(1, dtype=torch.float64, device=device)) or "")


def test_the_kernel_files_import_without_triton() -> None:
    program = """
import sys
sys.modules["triton"] = None
import torch
from sinkscope.errors import InputError
from sinkscope.kernels.attention_received import attention_received, attention_received_plain, reason_not_to_run
from sinkscope.kernels.token_statistics import token_statistics
x = torch.ones(1, 1, 2, 4)
assert reason_not_to_run(x) == "triton is not installed"
attention_received_plain(x, x, x[..., 0], scaling=1.0)
token_statistics(x[0, 0])
received = lambda: attention_received(x, x, x[..., 0], scaling=1.0)
try:
    received()
except InputError as error:
    assert "triton" in str(error)
else:
    raise SystemExit("no error")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
