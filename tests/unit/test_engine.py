"""What the losses of training and validation are divided by."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import tiny  # noqa: F401  registers its models
import torch
import torch.nn.functional as F
from runs import SMALL, into

from torchtitan.config import ConfigManager
from torchtitan.engine.engine import forward_backward
from torchtitan.engine.forward import evaluate, forward
from torchtitan.models.expert_balance import balance_experts, expert_metrics
from torchtitan.models.moe import mixtures
from torchtitan.parallel.sharded_tensors import local_tensor
from torchtitan.protocols import IGNORE_INDEX
from torchtitan.tools.temporary_trainer import temporary_trainer


def test_the_balance_loss_is_a_mean_over_the_sequences_of_the_global_batch(tmp_path: Path) -> None:
    """Its gradient is that of the coefficient times this mean; and the router's entropy is one of a token."""
    sparse = ("--model.name=sparse", "--model.flavor=narrow", "--moe.balance=loss", "--moe.loss_coefficient=10")
    config = ConfigManager().parse_args([*SMALL, *sparse, into(tmp_path)])
    with temporary_trainer(config) as trainer:
        engine, batches = trainer.engine, trainer.loader.next()
        *_, last = mixtures(engine.model).values()
        router, inputs = last.router, list[torch.Tensor]()
        router.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0].detach()))

        def gradient() -> torch.Tensor:
            for batch in batches:
                forward_backward(engine, batch)
            grad: Any = router.gate.weight.grad
            result = local_tensor(grad).clone()
            engine.model.zero_grad()
            return result

        added = gradient()
        metrics = expert_metrics(balance_experts(engine.model, engine.meshes.mesh, config.moe), 2, engine.meshes.mesh)
        router.balance_loss = None
        x = torch.cat(inputs)  # (sequences, seq_len, dim)
        added -= gradient()
        weight = local_tensor(router.gate.weight).clone().requires_grad_()
        scores = (x @ weight.T).softmax(-1)
        chosen = F.one_hot(scores.topk(2).indices, weight.shape[0]).sum(-2).float()
        losses = (chosen.mean(1) * weight.shape[0] / 2 * scores.mean(1)).sum(-1)
        assert len(batches) == 2 and len(losses) == 4
        expected = torch.autograd.grad(10 * losses.mean(), weight)[0]
        assert (added - expected).norm() < 1e-3 * expected.norm()
    assert metrics is not None
    of_last = torch.special.entr(scores.detach()).sum(-1).mean()
    assert metrics.entropy == pytest.approx(float(of_last), rel=0.05)  # a mean over both layers


def test_z_losses_are_means_over_the_tokens_of_the_global_batch(tmp_path: Path) -> None:
    z_losses = ("--training.z_loss_coefficient=3", "--moe.z_loss_coefficient=2", "--moe.balance=none")
    flags = ("--model.name=sparse", "--model.flavor=narrow", *z_losses, into(tmp_path))
    config = ConfigManager().parse_args([*SMALL, *flags])
    with temporary_trainer(config) as trainer:
        engine, batches = trainer.engine, trainer.loader.next()
        router = [*mixtures(engine.model).values()][-1].router
        layers: dict[str, Any] = {"output": engine.model.output, "router": router.gate}
        inputs = dict[str, list[torch.Tensor]](output=[], router=[])
        layers["output"].register_forward_pre_hook(lambda _, arguments: inputs["output"].append(arguments[0].detach()))
        router.register_forward_pre_hook(lambda _, arguments: inputs["router"].append(arguments[0].detach()))

        def gradients() -> dict[str, torch.Tensor]:
            loss = sum(forward_backward(engine, batch) for batch in batches)
            result = {name: local_tensor(layer.weight.grad).clone() for name, layer in layers.items()}
            engine.model.zero_grad()
            return {**result, "loss": torch.as_tensor(loss)}

        both = gradients()
        router.z_loss = None
        of_output = gradients()
        engine.model.z_loss = None
        none = gradients()
        assert both["loss"] == none["loss"]
        added = {"router": both["router"] - of_output["router"], "output": of_output["output"] - none["output"]}
        for (name, gradient), coefficient in zip(added.items(), (2, 3), strict=True):
            x = torch.cat([part.flatten(0, -2) for part in inputs[name][: len(inputs[name]) // 3]]).double()
            weight = local_tensor(layers[name].weight).double().requires_grad_()
            assert len(x) == 4 * 64
            loss = coefficient * (x @ weight.T).logsumexp(-1).square().mean()
            expected = torch.autograd.grad(loss, weight)[0]
            assert (gradient - expected).norm() < 1e-4 * expected.norm()


def test_biases_of_experts_move_by_the_sign_of_their_load_around_zero(tmp_path: Path) -> None:
    flags = ("--model.name=sparse", "--model.flavor=narrow", "--moe.balance=bias", "--moe.bias_update_speed=0.01")
    config = ConfigManager().parse_args([*SMALL, *flags, into(tmp_path)])
    with temporary_trainer(config) as trainer:
        engine = trainer.engine
        for mixture in mixtures(engine.model).values():
            mixture.statistics.copy_(torch.tensor([50.0, 2, 2, 2, 2, 2, 2, 2, 0]))  # the last is of the entropy
        balance_experts(engine.model, engine.meshes.mesh, config.moe)
        for mixture in mixtures(engine.model).values():
            torch.testing.assert_close(mixture.expert_bias, torch.tensor([-0.0175, *[0.0025] * 7]))
            assert not mixture.statistics.any()


def test_a_validation_loss_is_a_mean_over_what_is_predicted(tmp_path: Path) -> None:
    """As the last batch of a whole set, which is filled up, has fewer labels."""
    config = ConfigManager().parse_args([*SMALL, "--model.name=tiny", "--model.flavor=narrow", into(tmp_path)])
    with temporary_trainer(config) as trainer:
        first, second = trainer.loader.next()
        labels = second.labels.clone()
        labels[0, 5:] = labels[1] = IGNORE_INDEX
        batches = [first, dataclasses.replace(second, labels=labels)]
        with torch.no_grad():
            total = sum(forward(trainer.engine, batch) for batch in batches)
        loss = evaluate(trainer.engine, batches, lambda: False)
        assert loss is not None
        assert loss.item() == pytest.approx(float(total) / (first.labels.numel() + 5), rel=1e-6)
