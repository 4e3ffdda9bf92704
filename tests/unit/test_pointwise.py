"""Norms, gates and rotations on CPU in bfloat16: bit by bit what torch's operations compute."""

from collections.abc import Callable

import pytest
import torch

from torchtitan.kernels import pointwise
from torchtitan.kernels.swiglu import swiglu
from torchtitan.models.norm import rms_norm
from torchtitan.models.rope import apply_rope, rope_table

pytestmark = pytest.mark.usefixtures("two_threads")


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])).bfloat16()


def all_finite_numbers() -> torch.Tensor:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return every[every.isfinite()]


CASES: dict[str, tuple[Callable[..., torch.Tensor], list[torch.Tensor]]] = {
    "every gate": (swiglu, [all_finite_numbers(), numbers(65280)]),
    "gates": (swiglu, [numbers(3, 7, 208), numbers(5, 7, 208)[:3]]),
    "gates of another layout": (swiglu, [numbers(64, 48).T, numbers(48, 64)]),
    "norm": (lambda x, weight: rms_norm(x, weight, 1e-5), [numbers(4, 512, 256), numbers(256)]),
    "rotation": (lambda x: apply_rope(x, rope_table(48, torch.arange(65), 1e4, None)), [numbers(2, 65, 3, 48)]),
}


@pytest.mark.parametrize(("function", "inputs"), CASES.values(), ids=CASES)
def test_results_and_gradients_are_torchs(
    function: Callable[..., torch.Tensor], inputs: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not pointwise.applies_to(*inputs):
        pytest.skip("needs a CPU with AVX2 and a C++ compiler")
    calls: list[str] = []
    run = pointwise.run_kernel
    monkeypatch.setattr(pointwise, "run_kernel", lambda kernel, *rest: (calls.append(kernel), run(kernel, *rest)))

    def results() -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = function(*leaves)
        return [out, *torch.autograd.grad(out, leaves, numbers(*out.shape))]

    own = results()
    assert len(calls) > 1
    monkeypatch.setattr(pointwise, "CLASSES", ())
    for ours, right in zip(own, results(), strict=True):
        assert torch.equal(ours.view(torch.int16), right.view(torch.int16))
