"""Head-wise RMSNorm against its definition in float64: outputs and every gradient, by both paths, with controls.

Axes: B batch, T position, H heads, D head size.
"""

import pytest
import torch
from torch import Tensor

from sinkscope.attention.head_norm import HeadRMSNorm
from sinkscope.errors import InputError
from sinkscope.kernels import head_rms_norm as module
from sinkscope.kernels.head_rms_norm import head_rms_norm, head_rms_norm_path, head_rms_norm_plain

PATHS = ("torch", "triton")
# The definition gets the same rounded inputs. In float32 sums of up to 256 channels or 200 tokens are good to a few
# units of 6e-8 each, so 1e-5 of the largest value. In bf16 what is stored is rounded once, to one part in 2^8 at most
# (the interpreter cuts, a device rounds to nearest); gradients of the weight are float32 sums of unrounded terms.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
LAYOUTS = ("BTHD", "BHTD", "sliced", "channels apart")


def heads(shape, layout: str, dtype: torch.dtype, device) -> Tensor:
    """[B, T, H, D] random heads of very different size, one row of zeros among them, in one of several layouts."""
    generator = torch.Generator().manual_seed(sum(shape))
    num_batch, length, num_heads, size = shape
    x_BTHD = torch.randn(shape, generator=generator) * torch.logspace(-2, 2, length)[None, :, None, None]
    x_BTHD[:, length // 2, num_heads // 2] = 0
    x_BTHD = x_BTHD.to(device, dtype)
    if layout == "BHTD":
        return x_BTHD.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "sliced":  # as values cut out of a fused projection
        wide = torch.full((num_batch, length, num_heads, size + 3), torch.nan, dtype=dtype, device=device)
        wide[..., 1 : size + 1] = x_BTHD
        return wide[..., 1 : size + 1]
    if layout == "channels apart":
        return x_BTHD.transpose(2, 3).contiguous().transpose(2, 3)
    return x_BTHD


def parameters(shape, per_head: bool, offset: bool, device) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    size = shape[2:] if per_head else shape[3:]
    weight = torch.randn(size, generator=generator).to(device)
    return weight, torch.randn(size, generator=generator).to(device) if offset else None


def outputs_and_gradients(function, x: Tensor, weight: Tensor, offset: Tensor | None, **options) -> list[Tensor]:
    """The output and the gradients of x, weight and offset for one fixed gradient of the output."""
    leaves = [leaf.detach().requires_grad_() for leaf in (x, weight, offset) if leaf is not None]
    y_BTC = function(*leaves, **options)
    generator = torch.Generator().manual_seed(2)
    dy_BTC = torch.randn(y_BTC.shape, generator=generator).bfloat16().to(y_BTC.device, y_BTC.dtype)
    return [y_BTC, *torch.autograd.grad(y_BTC, leaves, dy_BTC)]


def definition(x: Tensor, weight: Tensor, offset: Tensor | None) -> list[Tensor]:
    wide = [None if leaf is None else leaf.detach().double() for leaf in (x, weight, offset)]
    return outputs_and_gradients(head_rms_norm_plain, *wide)


def largest_error(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest error of any tensor, rows of x taken one by one: their gradients differ in size by 1e4."""
    errors = []
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert a.isfinite().all()
        scale = b.abs().amax(-1, keepdim=True) if b.dim() == 4 else b.abs().amax()
        errors.append(((a.double() - b).abs() / scale.clamp(min=1e-30)).max().item())
    return max(errors)


SHAPES = [(2, 7, 3, 32), (1, 130, 2, 64), (2, 5, 4, 128), (1, 3, 1, 256)]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*((shape, torch.float32) for shape in SHAPES), (SHAPES[0], torch.bfloat16), (SHAPES[2], torch.float16)],
)
def test_matches_definition(shape, layout, dtype, path, device) -> None:
    x_BTHD, (weight, offset) = heads(shape, layout, dtype, device), parameters(shape, False, False, device)
    found = outputs_and_gradients(head_rms_norm, x_BTHD, weight, offset, path=path)
    assert largest_error(found, definition(x_BTHD, weight, offset)) < TOLERANCE[dtype]
    assert found[0].is_contiguous()
    assert found[0].dtype == dtype


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("per_head", "offset"), [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("shape", [(2, 3, 5, 17), (1, 1, 1, 1), (3, 67, 2, 100)])
def test_options_and_odd_sizes(shape, per_head, offset, path, device) -> None:
    x_BTHD = heads(shape, "BHTD", torch.float32, device)
    weight, shift = parameters(shape, per_head, offset, device)
    found = outputs_and_gradients(head_rms_norm, x_BTHD, weight, shift, path=path)
    assert largest_error(found, definition(x_BTHD, weight, shift)) < TOLERANCE[torch.float32]


def test_definition_by_hand() -> None:
    x = torch.tensor([3.0, 4.0, 0.0, 0.0], dtype=torch.float64).view(1, 1, 2, 2)
    # Head 0 has mean square 12.5; head 1 is zero and stays so, up to the offset.
    y = head_rms_norm_plain(x, torch.tensor([2.0, 1.0]), torch.tensor([0.0, 0.5]), eps=0.0 + 1e-12).flatten()
    torch.testing.assert_close(y[:2], torch.tensor([6 / 12.5**0.5, 4 / 12.5**0.5 + 0.5], dtype=torch.float64))
    assert y[2:].tolist() == [0.0, 0.5]


def test_the_definition_has_the_gradient_of_its_differences() -> None:
    x = torch.randn(1, 2, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weight, offset = (torch.randn(2, 3, dtype=torch.float64).requires_grad_() for _ in range(2))
    assert torch.autograd.gradcheck(head_rms_norm_plain, (x, weight, offset))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_into_one_graph(path, backend, device) -> None:
    shape = (2, 9, 3, 32)
    x_BTHD, (weight, offset) = heads(shape, "BHTD", torch.bfloat16, device), parameters(shape, True, True, device)

    @torch.compile(backend="inductor" if device.type == "cuda" else backend, fullgraph=True)
    def compiled(x, weight, offset):
        return head_rms_norm(x * 1, weight, offset, path=path)

    found = outputs_and_gradients(compiled, x_BTHD, weight, offset)
    assert largest_error(found, definition(x_BTHD, weight, offset)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_gradient_has_the_layout_of_the_input(layout, path, device) -> None:
    x_BTHD = heads((2, 7, 3, 32), layout, torch.float32, device).requires_grad_()
    weight = torch.ones(32, device=device)
    y_BTC = head_rms_norm(x_BTHD, weight, path=path)
    (dx_BTHD,) = torch.autograd.grad(y_BTC, x_BTHD, torch.ones_like(y_BTC))
    assert dx_BTHD.stride() == x_BTHD.stride()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_gradients_in_the_setting_of_the_trap(path, heads_first, compiled, device) -> None:
    """bf16 autocast on the transposed output of attention: on CUDA (torch 2.11) the gradient of attention's input is
    wrong there, behind torch's own rms_norm and others, where attention leaves heads first. Everything else in bf16
    loses 2^-8 a step over a handful of steps: 5 percent is far above and 170 percent, the error of the trap, far
    below."""

    def loss_gradients(norm, dtype, autocast):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            projection = torch.nn.Linear(64, 3 * 64, bias=False).to(device, dtype)
            out = torch.nn.Linear(64, 64, bias=False).to(device, dtype)
            x = torch.randn(2, 33, 64).to(device, dtype)
            target = torch.randn(2, 33, 64).to(device, dtype)
        weight = torch.linspace(0.5, 1.5, 32).to(device, dtype).requires_grad_()

        def forward(x, weight):
            q, k, v = (part.unflatten(-1, (2, 32)).transpose(1, 2) for part in projection(x).chunk(3, -1))
            if heads_first:
                q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
            o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
            return out(norm(o, weight))

        if compiled and autocast:
            forward = torch.compile(forward, backend="inductor" if device.type == "cuda" else "aot_eager")
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            y = forward(x, weight)
        return torch.autograd.grad((y.to(target.dtype) * target).sum(), [projection.weight, weight])

    def worst(norm) -> float:
        found = loss_gradients(norm, torch.float32, True)
        right = loss_gradients(head_rms_norm_plain, torch.float64, False)
        return max(((a - b).norm() / b.norm()).item() for a, b in zip(found, right, strict=True))

    assert worst(lambda o, weight: head_rms_norm(o, weight, path=path)) < 0.05
    # The control: a backward pass that forgets the norm's own derivative is seen by the same measure.
    scale = lambda o: torch.rsqrt(o.float().square().mean(-1, keepdim=True) + 1e-6).detach()  # noqa: E731
    assert worst(lambda o, weight: (o * scale(o) * weight).flatten(-2)) > 0.2


def test_gradient_of_the_weight_is_the_same_every_time(device) -> None:
    shape = (2, 300, 3, 32)
    x_BTHD, (weight, _) = heads(shape, "BTHD", torch.bfloat16, device), parameters(shape, False, False, device)
    first, again = (outputs_and_gradients(head_rms_norm, x_BTHD, weight, None, path="triton")[2] for _ in range(2))
    assert torch.equal(first, again)


def test_control_forgetting_the_weight_is_seen(device) -> None:
    shape = (2, 7, 3, 32)
    x_BTHD, (weight, _) = heads(shape, "BTHD", torch.float32, device), parameters(shape, False, False, device)
    found = outputs_and_gradients(head_rms_norm, x_BTHD, torch.ones_like(weight), None, path="triton")
    assert largest_error(found, definition(x_BTHD, weight, None)) > 0.1


@pytest.mark.parametrize("path", PATHS)
def test_empty_batch(path, device) -> None:
    x_BTHD = torch.empty(0, 5, 2, 16, device=device, requires_grad=True)
    weight = torch.ones(16, device=device, requires_grad=True)
    y_BTC = head_rms_norm(x_BTHD, weight, path=path)
    assert y_BTC.shape == (0, 5, 32)
    y_BTC.sum().backward()
    assert weight.grad is not None
    assert weight.grad.abs().sum() == 0


def test_operator_keeps_its_promises_to_torch(device) -> None:
    shape = (1, 5, 2, 16)
    x_BTHD = heads(shape, "BHTD", torch.float32, device).requires_grad_()
    weight = torch.ones(16, device=device, requires_grad=True)
    torch.library.opcheck(module._operator, (x_BTHD, weight, None, 1e-6))


def test_says_which_path_runs(monkeypatch, device) -> None:
    x_BTHD = torch.empty(1, 2, 3, 16, device=device)
    assert head_rms_norm_path(x_BTHD) == ("triton" if device.type == "cuda" else "torch")
    assert head_rms_norm_path(x_BTHD.double()) == "torch"
    assert head_rms_norm_path(x_BTHD, "triton") == "triton"
    with pytest.raises(InputError, match="float64"):
        head_rms_norm_path(x_BTHD.double(), "triton")
    monkeypatch.setattr(module, "HAS_TRITON", False)
    with pytest.raises(InputError, match="Triton is missing"):
        head_rms_norm_path(x_BTHD, "triton")


@pytest.mark.parametrize(("x", "weight"), [((2, 3, 4), (4,)), ((1, 2, 3, 4), (3,)), ((1, 2, 3, 4), (2, 4))])
def test_refuses_other_shapes(x, weight) -> None:
    with pytest.raises(InputError, match=r"must be heads \[B, T, H, D\]"):
        head_rms_norm(torch.ones(x), torch.ones(weight))


def test_module_refuses_heads_of_another_shape_and_numbers_that_make_no_norm() -> None:
    norm = HeadRMSNorm(4, 16)
    assert norm(torch.ones(2, 5, 4, 16)).shape == (2, 5, 64), "the control"
    with pytest.raises(InputError, match=r"shape \[\.\.\., 4, 16\], not"):
        norm(torch.ones(2, 5, 3, 16))
    for heads, size, initial_lambda in ((0, 16, 1.0), (4, 0, 1.0), (4, -1, 1.0), (4, 16, float("nan"))):
        with pytest.raises(InputError, match=r"num_heads|head_size|initial_lambda"):
            HeadRMSNorm(heads, size, initial_lambda=initial_lambda)


def test_module_takes_any_leading_axes_and_saves_its_lambda() -> None:
    norm = HeadRMSNorm(3, 4, per_head=True, offset=True, initial_lambda=0.25)
    assert {name: tuple(value.shape) for name, value in norm.state_dict().items()} == dict(weight=(3, 4), offset=(3, 4))
    assert (norm.weight == 0.25).all()
    x = torch.randn(2, 5, 3, 4, generator=torch.Generator().manual_seed(0))
    whole = norm(x)
    assert torch.equal(norm(x[1]), whole[1])
    assert torch.equal(norm(x[1, 2]), whole[1, 2])
