"""RMSNorm on CPU."""

import pytest
import torch
import torch.nn.functional as F

from torchtitan.models.norm import RMSNorm


@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.bfloat16, 3e-3), (torch.float32, 1e-6), (torch.float64, 1e-14)], ids=str
)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_norm_and_its_gradients_are_torchs(offset: float, dtype: torch.dtype, error: float) -> None:
    torch.manual_seed(0)
    norm = RMSNorm(48, 1e-3, offset).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x, grad = (torch.randn(3, 7, 48, dtype=dtype) for _ in range(2))
    x[1] = 0
    before = x.clone()
    leaves = [x.requires_grad_(), norm.weight]
    actual = [norm(x), *torch.autograd.grad(norm(x), leaves, grad)]
    assert torch.equal(x, before)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    out = F.rms_norm(exact[0], (48,), exact[1] + offset, 1e-3)
    right = [out, *torch.autograd.grad(out, exact, grad.double())]
    for mine, expected in zip(actual, right, strict=True):
        assert mine.dtype == dtype
        assert (mine.double() - expected).norm() < error * expected.norm()
