"""Optimizers by name, with the configured hyperparameters."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from torchtitan.config.training import Optimizer
from torchtitan.errors import ConfigError
from torchtitan.optim.optimizer import build_optimizer, decay_groups, set_learning_rate


def train(make: Callable[[nn.Parameter], torch.optim.Optimizer], steps: int = 3) -> torch.Tensor:
    weight = nn.Parameter(torch.linspace(-1, 1, 5))
    optimizer = make(weight)
    for step in range(steps):
        weight.grad = weight.detach() ** 2 + step
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
@pytest.mark.parametrize(("name", "reference"), [("AdamW", torch.optim.AdamW), ("Adam", torch.optim.Adam)])
def test_update_has_the_hyperparameters_of_the_configuration(
    name: str, reference: type[torch.optim.Optimizer], implementation: str
) -> None:
    config = Optimizer(
        name=name,
        lr=0.1,
        beta1=0.8,
        beta2=0.7,
        eps=0.01,
        weight_decay=0.3,
        implementation=implementation,  # type: ignore[arg-type]
    )
    found = train(lambda weight: build_optimizer([weight], config))
    expected = train(lambda weight: reference([weight], lr=0.1, betas=(0.8, 0.7), eps=0.01, weight_decay=0.3))  # type: ignore[call-arg]
    torch.testing.assert_close(found, expected)
    group = build_optimizer([nn.Parameter(torch.ones(1))], config).param_groups[0]
    assert (group["fused"], group["foreach"]) == (implementation == "fused", implementation == "foreach")


def test_learning_rate_of_the_next_step() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = build_optimizer([weight], Optimizer(weight_decay=0.0))
    set_learning_rate(optimizer, 0.0)
    weight.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(weight.detach(), torch.ones(3))
    set_learning_rate(optimizer, 0.5)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((3,), 0.5))


@pytest.mark.parametrize(
    ("without", "kept"),
    [
        ([], set[str]()),
        (["norms"], {"1.weight", "2.bias"}),
        (["norms", "embeddings"], {"0.weight", "1.weight", "2.bias"}),
    ],
)
@pytest.mark.parametrize("name", ["AdamW", "AdamW8bit"])
def test_what_weight_decay_leaves_alone(name: str, without: list[str], kept: set[str]) -> None:
    model = nn.Sequential(nn.Embedding(4, 8), nn.RMSNorm(8), nn.Linear(8, 8))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0).grad = torch.zeros_like(parameter)
    config = Optimizer(name=name, lr=0.5, weight_decay=0.5, no_weight_decay=without)
    build_optimizer(decay_groups(model, config), config).step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, 1.0 if name in kept else 0.75))


def test_unknown_optimizer() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.name: unknown optimizer 'adamw' \(did you mean AdamW\?\)"):
        build_optimizer([nn.Parameter(torch.ones(1))], Optimizer(name="adamw"))
