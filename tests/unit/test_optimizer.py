"""Optimizers by name, with the configured hyperparameters."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import all_equal
from torch import nn

from torchtitan.config import ConfigManager, to_toml
from torchtitan.config.training import Optimizer, OptimizerGroup
from torchtitan.engine.engine import optimizer_step
from torchtitan.errors import ConfigError
from torchtitan.optim.combined import optimizers_in
from torchtitan.optim.low_bit import LowBitOptimizer
from torchtitan.optim.optimizer import build_optimizer, set_learning_rate
from torchtitan.optim.parameters import check_groups, named_parameters
from torchtitan.optim.skip_step import Skip


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
        no_weight_decay=[],
        implementation=implementation,  # type: ignore[arg-type]
    )
    actual = train(lambda weight: build_optimizer(nn.ParameterList([weight]), config))
    expected = train(lambda weight: reference([weight], lr=0.1, betas=(0.8, 0.7), eps=0.01, weight_decay=0.3))  # type: ignore[call-arg]
    torch.testing.assert_close(actual, expected)
    group = build_optimizer(nn.ParameterList([nn.Parameter(torch.ones(1))]), config).param_groups[0]
    assert (group["fused"], group["foreach"]) == (implementation == "fused", implementation == "foreach")


@pytest.mark.parametrize("on_device", [False, True], ids=["the host knows", "the device alone knows"])
@pytest.mark.parametrize("faults", [1.0, 2.0])
@pytest.mark.parametrize(
    "changes",
    [
        *({"name": name} for name in ("AdamW", "Adam", "AdamW8bit", "AdamW4bit", "AdamWFp8", "Muon8bit")),
        *({"name": "AdamWFp8", "second_moment": stored} for stored in ("v", "v_e5m2", "sqrt_v_e5m2")),
        {"state_dtype": "bfloat16"},
    ],
    ids=str,
)
def test_a_skipped_step_changes_nothing(changes: dict[str, Any], faults: float, on_device: bool) -> None:
    """However many ranks found a fault. torch's fused update takes anything but 1 for a step to make."""
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(64, 64)])}).bfloat16()
    if changes["name" if "name" in changes else "state_dtype"] in ("AdamW", "Adam"):
        model.float()
    optimizer = build_optimizer(model, Optimizer(lr=0.1, implementation="fused", **changes))
    for member in optimizers_in(optimizer):
        if isinstance(member, LowBitOptimizer):
            member.defaults["fused"] = on_device

    def step(gradient: float, skip: float) -> list[torch.Tensor]:
        """Weights and states afterwards."""
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        optimizer_step(optimizer, Skip(torch.tensor(skip)))
        states = [member.state[parameter] for member in optimizers_in(optimizer) for parameter in model.parameters()]
        tensors = [*model.parameters(), *(tensor for state in states for tensor in state.values())]
        return [tensor.detach().clone() for tensor in tensors]

    start = [parameter.detach().clone() for parameter in model.parameters()]
    assert all_equal(start, step(torch.nan, faults)[:2])
    before = step(1.0, 0.0)
    assert not all_equal(start, before[:2])
    assert all_equal(before, step(torch.nan, faults))


def test_learning_rate_of_the_next_step() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = build_optimizer(nn.ParameterList([weight]), Optimizer(weight_decay=0.0))
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
    build_optimizer(model, config).step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, 1.0 if name in kept else 0.75))


def model() -> nn.Module:
    """With a parameter of each role; `w1` is a stack of experts."""
    block = nn.ModuleDict({"attention": nn.Linear(8, 8), "norm": nn.RMSNorm(8), "experts": nn.Module()})
    block["experts"].w1 = nn.Parameter(torch.ones(3, 4, 8))
    layers = nn.ModuleDict({"0": block})
    return nn.ModuleDict({"tok_embeddings": nn.Embedding(4, 8), "layers": layers, "output": nn.Linear(8, 4)})


def test_roles_of_parameters() -> None:
    assert {named.name: named.role for named in named_parameters(model(), Optimizer())} == {
        "tok_embeddings.weight": "embedding",
        "layers.0.attention.weight": "matrix",
        "layers.0.attention.bias": "vector",
        "layers.0.norm.weight": "vector",
        "layers.0.experts.w1": "matrix",
        "output.weight": "output",
        "output.bias": "vector",
    }


GROUPS = """
[optimizer]
lr = 0.1
[[optimizer.group]]
parameters = ["layers.*.attention", "output"]
lr = 0.4
beta2 = 0.5
[[optimizer.group]]
parameters = ["output.weight", "norm"]
lr = 0.2
weight_decay = 0.7
"""


def test_groups_have_their_own_settings(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text(GROUPS)
    config = ConfigManager().parse_args([f"--job.config_file={file}"])
    file.write_text(to_toml(config))
    assert ConfigManager().parse_args([f"--job.config_file={file}"]) == config
    settings = {
        entry.name: (entry.lr, entry.weight_decay, entry.betas) for entry in named_parameters(model(), config.optimizer)
    }
    assert settings == {
        "tok_embeddings.weight": (0.1, 0.1, (0.9, 0.95)),
        "layers.0.attention.weight": (0.4, 0.1, (0.9, 0.5)),
        "layers.0.attention.bias": (0.4, 0.0, (0.9, 0.5)),
        "layers.0.norm.weight": (0.2, 0.7, (0.9, 0.95)),
        "layers.0.experts.w1": (0.1, 0.1, (0.9, 0.95)),
        "output.weight": (0.2, 0.7, (0.9, 0.5)),
        "output.bias": (0.4, 0.0, (0.9, 0.5)),
    }
    optimizer = build_optimizer(model(), config.optimizer)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 7
    assert sorted(group["lr"] for group in optimizer.param_groups) == [0.1, 0.2, 0.2, 0.4, 0.4]
    set_learning_rate(optimizer, 0.05)  # half of optimizer.lr
    assert sorted(group["lr"] for group in optimizer.param_groups) == pytest.approx([0.05, 0.1, 0.1, 0.2, 0.2])


def test_a_glob_that_matches_nothing() -> None:
    config = Optimizer(group=[OptimizerGroup(["norm"]), OptimizerGroup(["layers.*.atention", "output"])])
    with pytest.raises(ConfigError, match=r"group\]\] 2: 'layers.\*.atention' matches no parameter") as error:
        check_groups(model(), config)
    assert len(error.value.problems) == 1


def test_unknown_optimizer() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.name: unknown optimizer 'adamw' \(did you mean AdamW\?\)"):
        build_optimizer(nn.ParameterList([nn.Parameter(torch.ones(1))]), Optimizer(name="adamw"))
