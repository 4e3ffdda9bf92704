"""Muon in one process: its orthogonalization, its update, its options."""

from typing import Any

import pytest
import torch
from torch import nn

from torchtitan.config.training import Optimizer, OptimizerGroup
from torchtitan.engine.engine import optimizer_step
from torchtitan.errors import ConfigError
from torchtitan.optim.muon import RMS, Muon
from torchtitan.optim.optimizer import build_optimizer
from torchtitan.optim.orthogonalize import flops, orthogonalize, polynomials
from torchtitan.optim.parameters import check_groups
from torchtitan.optim.skip_step import Skip

SHAPES = [(24, 16), (16, 24), (16, 16), (48, 16)]


def weights(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter((0.1 * torch.randn(shape, generator=generator)).to(dtype)) for shape in SHAPES]


def train(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: int = 4) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_become_about_one(shape: tuple[int, int]) -> None:
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    for steps, low, high in ((polynomials(5), 0.65, 1.25), (polynomials(8, polar_express=True), 0.999, 1.001)):
        values = torch.linalg.svdvals(orthogonalize(matrices, steps))
        assert low < values.min() and values.max() < high
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    assert relative(orthogonalize(matrices, polynomials(8, polar_express=True)), u @ v) < 1e-3
    assert torch.equal(orthogonalize(torch.zeros(1, *shape), polynomials(5)), torch.zeros(1, *shape))


def test_error_of_bfloat16() -> None:
    """About 1% of an update, whatever the size: as docs/muon.md says."""
    for shape in ((256, 256), (256, 768), (1024, 256)):
        matrices = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
        exact = orthogonalize(matrices, polynomials(5))
        assert 0.001 < relative(orthogonalize(matrices.bfloat16(), polynomials(5)), exact) < 0.03


def test_it_is_torchs_muon_to_the_rounding_of_its_iteration() -> None:
    mine, torchs = weights(), weights()
    options = {"lr": 0.02, "weight_decay": 0.5, "momentum": 0.9}
    train(Muon(mine, **options), mine)  # type: ignore[arg-type]
    train(torch.optim.Muon(torchs, **options, adjust_lr_fn="match_rms_adamw"), torchs)  # type: ignore[arg-type]
    for weight, expected, start in zip(mine, torchs, weights(), strict=True):
        assert relative(weight - start, expected - start) < 0.03


@pytest.mark.parametrize("nesterov", [True, False])
def test_the_update_as_written(nesterov: bool) -> None:
    trained, weight = weights()[:1], weights()[0].detach().clone()
    train(Muon(trained, lr=0.02, weight_decay=0.5, nesterov=nesterov, dtype=torch.float32), trained, steps=3)
    generator, momentum = torch.Generator().manual_seed(1), torch.zeros_like(weight)
    for _ in range(3):
        grad = torch.randn(weight.shape, generator=generator)
        momentum = 0.95 * momentum + 0.05 * grad
        direction = 0.05 * grad + 0.95 * momentum if nesterov else momentum
        update = orthogonalize(direction[None], polynomials(5))[0]
        weight = weight - 0.02 * 0.5 * weight - 0.02 * 0.2 * 24**0.5 * update
    torch.testing.assert_close(trained[0].detach(), weight)


def test_normuons_update_as_written() -> None:
    """arXiv 2510.05491, algorithm 1: rows are divided by a moving average of their mean squares; then the update gets
    the size of an orthogonal matrix's."""
    trained, weight = weights()[:1], weights()[0].detach().clone()
    train(Muon(trained, lr=0.02, weight_decay=0.5, beta2=0.9, row_normalization=True, dtype=torch.float32), trained)
    generator, momentum = torch.Generator().manual_seed(1), torch.zeros_like(weight)
    mean_squares = torch.zeros(len(weight), 1)
    for _ in range(4):
        grad = torch.randn(weight.shape, generator=generator)
        momentum = 0.95 * momentum + 0.05 * grad
        update = orthogonalize((0.05 * grad + 0.95 * momentum)[None], polynomials(5))[0]
        mean_squares = 0.9 * mean_squares + 0.1 * update.square().mean(1, keepdim=True)
        update = update / mean_squares.sqrt()
        weight = weight - 0.02 * 0.5 * weight - 0.02 * 0.2 * update / update.square().mean().sqrt()
    torch.testing.assert_close(trained[0].detach(), weight, rtol=1e-4, atol=1e-6)


def test_a_stack_is_as_many_matrices() -> None:
    stack = nn.Parameter(torch.randn(3, 8, 12, generator=torch.Generator().manual_seed(0)))
    matrices = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    grads = torch.randn(3, 8, 12, generator=torch.Generator().manual_seed(1))
    stack.grad = grads
    for matrix, grad in zip(matrices, grads, strict=True):
        matrix.grad = grad
    for parameters in ([stack], matrices):
        Muon(parameters, lr=0.1, row_normalization=True).step()
    torch.testing.assert_close(stack.detach(), torch.stack([matrix.detach() for matrix in matrices]))


def test_row_normalization_keeps_the_size_of_updates_and_evens_their_rows() -> None:
    """NorMuon: with the first update each row has the same root mean square."""
    trained, start = weights(), weights()
    train(Muon(trained, lr=0.1, weight_decay=0.0, row_normalization=True, dtype=torch.float32), trained, steps=1)
    for weight, before in zip(trained, start, strict=True):
        rows = (weight - before).square().mean(1).sqrt()
        torch.testing.assert_close(rows, torch.full_like(rows, 0.1 * RMS), rtol=1e-4, atol=0)


@pytest.mark.parametrize("row_normalization", [False, True])
def test_a_skipped_step_changes_nothing(row_normalization: bool) -> None:
    """Whether the host knows, or the device alone does."""
    trained, undisturbed = weights(), weights()
    optimizer = Muon(trained, lr=0.1, row_normalization=row_normalization)
    train(optimizer, trained, steps=1)
    train(Muon(undisturbed, lr=0.1, row_normalization=row_normalization), undisturbed, steps=1)
    before = {key: value.clone() for state in optimizer.state.values() for key, value in state.items()}
    for fused in (False, True):
        optimizer.defaults["fused"] = fused
        for parameter in trained:
            parameter.grad = torch.full_like(parameter, float("nan"))
        optimizer_step(optimizer, Skip(torch.ones(())))
    after = {key: value for state in optimizer.state.values() for key, value in state.items()}
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert all(torch.equal(left, right) for left, right in zip(trained, undisturbed, strict=True))


def test_bytes_of_the_state() -> None:
    """One moment: half of AdamW's."""
    weight = nn.Parameter(torch.ones(64, 256))
    for optimizer, size in (
        (Muon([weight], lr=0.1), 4.0),
        (Muon([weight], lr=0.1, state_dtype=torch.bfloat16), 2.0),
        (Muon([weight], lr=0.1, quantization="8bit"), 1 + 4 / 128),
    ):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert sum(tensor.nbytes for tensor in optimizer.state[weight].values()) - 4 == 64 * 256 * size


@pytest.mark.parametrize("name", ["bfloat16", "8bit"])
def test_smaller_momenta_train_alike(name: str) -> None:
    start, exact, smaller = (
        [nn.Parameter(torch.randn(64, 128, generator=torch.Generator().manual_seed(0)))] for _ in range(3)
    )
    train(Muon(exact, lr=0.1, dtype=torch.float32), exact)
    options: dict[str, Any] = {"quantization": "8bit"} if name == "8bit" else {"state_dtype": torch.bfloat16}
    train(Muon(smaller, lr=0.1, dtype=torch.float32, **options), smaller)
    assert 0 < relative(smaller[0] - start[0], exact[0] - start[0]) < 0.05


def model() -> nn.Module:
    block = nn.ModuleDict({"w": nn.Linear(8, 8), "norm": nn.RMSNorm(8)})
    return nn.ModuleDict(
        {"tok_embeddings": nn.Embedding(4, 8), "layers": nn.ModuleDict({"0": block}), "output": nn.Linear(8, 4)}
    )


def test_muon_takes_the_matrices_of_blocks_unless_a_group_says_otherwise() -> None:
    def of_muon(config: Optimizer) -> set[str]:
        them = model()
        muon, adamw = build_optimizer(them, config).optimizers  # type: ignore[attr-defined]
        assert isinstance(muon, Muon) and isinstance(adamw, torch.optim.AdamW)
        names = {parameter: name for name, parameter in them.named_parameters()}
        assert len(muon.parameters()) + sum(len(group["params"]) for group in adamw.param_groups) == len(names)
        return {names[parameter] for parameter in muon.parameters()}

    assert of_muon(Optimizer(name="Muon")) == {"layers.0.w.weight"}
    groups = [OptimizerGroup(["output.weight"], algorithm="Muon", beta2=0.7, weight_decay=0.3)]
    assert of_muon(Optimizer(name="Muon", group=groups)) == {"layers.0.w.weight", "output.weight"}


def test_a_muon_group_with_vectors() -> None:
    config = Optimizer(name="Muon", group=[OptimizerGroup(["layers"], algorithm="Muon")])
    with pytest.raises(ConfigError, match=r"group\]\] 1: Muon updates matrices, but layers.0.w.bias is a vector \(2"):
        check_groups(model(), config)
    config = Optimizer(name="Muon", group=[*config.group, OptimizerGroup(["bias", "norm"], algorithm="AdamW")])
    check_groups(model(), config)


def test_flops_of_an_orthogonalization() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        orthogonalize(torch.ones(1, 24, 16), polynomials(5))
    assert counter.get_total_flops() == flops(24, 16, 5) == flops(16, 24, 5)
