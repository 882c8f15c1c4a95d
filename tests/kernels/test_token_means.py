"""DomRatio and mean square of tokens, by both kernels and by torch, against the measures in float64."""

import pytest
import torch

from sinkscope.kernels import token_means as module
from sinkscope.kernels.compiled import runs_in_c
from sinkscope.kernels.token_means import token_dom_ratio, token_mean_square, triton_means
from sinkscope.measures.dimension_disparity import dom_ratio


def of_triton(x, square):
    return triton_means(x, square=square)


def of_c(x, square):
    if x.dtype == torch.float32 and not runs_in_c(x):
        pytest.skip("KERNELS IN C NOT CHECKED: no compiler")
    return (token_mean_square if square else token_dom_ratio)(x)


def of_torch(x, square):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_by_kernel", lambda *_, **__: None)
        return (token_mean_square if square else token_dom_ratio)(x)


@pytest.mark.parametrize("found_by", [of_triton, of_c, of_torch])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (5, 33), (3, 1100)])
def test_equal_the_measures(found_by, dtype, shape, device):
    x_NC = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype) * 7
    ratio_N, square_N = found_by(x_NC, False), found_by(x_NC, True)
    assert ratio_N.dtype == square_N.dtype == torch.float32
    # A sum of up to 1,100 float32 numbers of one sign.
    torch.testing.assert_close(ratio_N.double(), dom_ratio(x_NC.double()), rtol=1e-5, atol=0)
    torch.testing.assert_close(square_N.double(), x_NC.double().square().mean(1), rtol=1e-5, atol=0)
    if shape[1] > 1 and shape[0] > 0:  # of one channel the ratio is 1, whatever it holds
        assert (ratio_N.double() - dom_ratio(x_NC.double().square())).abs().min() > 0.1


def test_rows_may_lie_apart(device):
    whole_NC = torch.randn(6, 80, device=device)
    x_NC = whole_NC[::2, :40]
    for found_by in (of_triton, of_c):
        torch.testing.assert_close(found_by(x_NC, True), x_NC.square().mean(1))
        # Control: rows read as if they lay side by side.
        assert not torch.allclose(found_by(x_NC, True), whole_NC.view(-1)[:120].view(3, 40).square().mean(1))


def test_nan_and_zero_rows_are_nan_as_the_measure_says(device):
    x_NC = torch.tensor([[0.0, 0.0, 0.0], [1.0, float("nan"), 2.0], [1.0, 1.0, 4.0]], device=device)
    for found_by in (of_triton, of_c, of_torch):
        assert found_by(x_NC, False).isnan().tolist() == [True, True, False]
        assert found_by(x_NC, True).isnan().tolist() == [False, True, False]


def test_float64_is_kept():
    x_NC = torch.randn(4, 9, dtype=torch.float64)
    torch.testing.assert_close(token_dom_ratio(x_NC), dom_ratio(x_NC), rtol=1e-14, atol=0)
    torch.testing.assert_close(token_mean_square(x_NC), x_NC.square().mean(1), rtol=1e-14, atol=0)
