"""Norms and sums of columns, by every path, against float64."""

import pytest
import torch

from sinkscope.kernels import channel_sums as module
from sinkscope.kernels.channel_sums import channel_norms, triton_channel_sums
from sinkscope.kernels.compiled import runs_in_c


@pytest.fixture(params=["c", "torch"])
def way(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(module, "runs_in_c", lambda *_: False)
    elif not runs_in_c(torch.zeros(1)):
        pytest.skip("KERNELS IN C NOT CHECKED: no compiler")


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("shape", [(1, 1), (0, 5), (63, 64), (65, 130), (500, 67)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_norms_of_columns(shape, dtype):
    x_NC = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    for given_NC in (x_NC, x_NC.T.contiguous().T, torch.cat([x_NC, x_NC])[: len(x_NC)]):
        found_C, expected_C = channel_norms(given_NC), x_NC.double().square().sum(0).sqrt()
        torch.testing.assert_close(found_C.double(), expected_C, rtol=1e-6, atol=0)
        assert found_C.dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("shape", [(1, 1), (0, 5), (63, 64), (65, 130), (500, 67)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_for_cuda(shape, dtype, device):
    x_NC = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    norms_C, sums_C = (triton_channel_sums(x_NC, norms=norms).double() for norms in (True, False))
    torch.testing.assert_close(norms_C, x_NC.double().square().sum(0).sqrt(), rtol=1e-6, atol=0)
    torch.testing.assert_close(sums_C, x_NC.double().sum(0), rtol=1e-6, atol=1e-5)
    apart_NC = torch.cat([x_NC, x_NC], 1)[:, : shape[1]]
    torch.testing.assert_close(triton_channel_sums(apart_NC, norms=True).double(), norms_C, rtol=1e-6, atol=0)
    if shape[0] > 1:  # control: one row less shows
        assert not torch.allclose(triton_channel_sums(x_NC[1:], norms=True).double(), norms_C, rtol=1e-6, atol=0)
