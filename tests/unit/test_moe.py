"""Mixtures of experts against their definition, written as loops over tokens."""

import copy
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from runs import SMALL, into, train_here
from torch import nn

from torchtitan.config import JobConfig
from torchtitan.config.training import MoEKeys as MoEConfig
from torchtitan.config.training import Training
from torchtitan.engine.engine import allocate_shards
from torchtitan.errors import ConfigError
from torchtitan.kernels.exact_gemm import ExactLinear
from torchtitan.kernels.grouped_gemm import grouped_linear
from torchtitan.models.expert_balance import add_router_losses
from torchtitan.models.moe import MoE
from torchtitan.models.sparse_args import MoEArgs

ARGS = MoEArgs(n_experts=6, top_k=2, ffn_dim=8)
DIM = 12


def mixture(args: MoEArgs = ARGS) -> MoE:
    model = MoE(DIM, args)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
    return model


def swiglu(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, w3: torch.Tensor) -> torch.Tensor:
    return (F.silu(x @ w1.T) * (x @ w3.T)) @ w2.T


def by_definition(model: MoE, x: torch.Tensor) -> torch.Tensor:
    """Token by token: the weighted sum of its experts, in the dtype of model and x."""
    args, experts = model.args, model.experts
    rows = []
    for token in x.flatten(0, 1):
        logits = model.router.gate.weight @ token
        scores = logits.softmax(0) if args.score == "softmax" else logits.sigmoid()
        chosen = (scores + model.expert_bias).topk(args.top_k).indices
        total = scores[chosen].sum() if args.normalize else 1.0
        out = torch.zeros_like(token)
        for expert in chosen:
            weights = (layer.weight[expert] for layer in (experts.w1, experts.w2, experts.w3))
            out = out + args.scale * scores[expert] / total * swiglu(token, *weights)
        if model.shared_experts is not None:
            shared = model.shared_experts
            out = out + swiglu(token, shared.w1.weight, shared.w2.weight, shared.w3.weight)
        rows.append(out)
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize(
    "args",
    [
        ARGS,
        replace(ARGS, top_k=1, normalize=False),
        replace(ARGS, score="sigmoid", scale=2.5, n_shared_experts=2),
        replace(ARGS, top_k=6),
    ],
    ids=["softmax", "one expert", "sigmoid, shared", "all experts"],
)
def test_equals_its_definition(args: MoEArgs) -> None:
    """Outputs and every gradient; also with biases, which change only the choice."""
    model, x = mixture(args), torch.randn(2, 9, DIM, generator=torch.Generator().manual_seed(1), requires_grad=True)
    with torch.no_grad():
        model.expert_bias.copy_(torch.linspace(-0.2, 0.2, args.n_experts))
    out_grad = torch.randn(2, 9, DIM, generator=torch.Generator().manual_seed(2))
    exact, wide = copy.deepcopy(model).double(), x.detach().double().requires_grad_()
    actual, expected = model(x), by_definition(exact, wide)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)
    for actual_grad, expected_grad in zip(
        torch.autograd.grad(actual, [x, *model.parameters()], out_grad),
        torch.autograd.grad(expected, [wide, *exact.parameters()], out_grad.double()),
        strict=True,
    ):
        # Sums of terms up to 10 in float32, in an order that depends on the CPU.
        torch.testing.assert_close(actual_grad.double(), expected_grad, rtol=1e-4, atol=1e-5)


def test_no_token_is_dropped_however_uneven_the_load() -> None:
    """All tokens go to the same two experts; the others get no rows, and zero gradients."""
    model, x = mixture(), torch.randn(1, 50, DIM)
    with torch.no_grad():
        model.expert_bias[1:3] = 100.0
    out = model(x)
    torch.testing.assert_close(out, by_definition(model, x), rtol=1e-5, atol=1e-6)
    out.sum().backward()
    assert model.statistics[:-1].tolist() == [0, 50, 50, 0, 0, 0]
    used = model.experts.w1.weight.grad.flatten(1).any(1)
    assert used.tolist() == [False, True, True, False, False, False]


def test_the_same_tokens_give_the_same_bits() -> None:
    """The gradient of a token with several experts is a sum in a fixed order."""
    model, x = mixture(), torch.randn(4, 64, DIM)

    def gradient() -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        model(leaf).square().sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    assert torch.equal(gradient(), gradient())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[3, 0, 4], [0, 0, 0], [0, 5, 0]])
def test_grouped_linear_equals_a_linear_layer_for_each_expert(counts: list[int], dtype: torch.dtype) -> None:
    x = torch.randn(sum(counts), 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(3, 4, 8, dtype=dtype, requires_grad=True)
    out = grouped_linear(x, weight, torch.tensor(counts).cumsum(0).to(torch.int32))
    expected = torch.cat([rows @ matrix.T for rows, matrix in zip(x.split(counts), weight, strict=True)])
    assert torch.equal(out, expected)
    grad = torch.randn_like(out)
    for actual_grad, expected_grad in zip(
        torch.autograd.grad(out, [x, weight], grad), torch.autograd.grad(expected, [x, weight], grad), strict=True
    ):
        assert torch.equal(actual_grad, expected_grad)


def test_statistics_count_each_row_once_even_if_recomputed() -> None:
    from torch.utils.checkpoint import checkpoint

    model, x = mixture(), torch.randn(2, 10, DIM, requires_grad=True)
    with torch.no_grad():
        model(x)  # as in validation
    assert model.statistics.sum() == 0
    out = checkpoint(model, x, use_reentrant=False)
    out.sum().backward()
    assert model.statistics[:-1].sum() == 2 * 10 * ARGS.top_k
    assert 0 < model.statistics[-1] / 20 < torch.tensor(6.0).log()  # the entropy of a token, in nats


def test_a_token_uses_its_experts_alone() -> None:
    """So a model's FLOPs count these."""
    model = mixture()
    of_experts = sum(parameter.numel() for parameter in model.experts.parameters())
    assert model.unused_parameters == of_experts * (ARGS.n_experts - ARGS.top_k) // ARGS.n_experts


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_even_scores_have_the_entropy_of_a_choice_of_all_experts(score: Any) -> None:
    model, x = mixture(replace(ARGS, score=score)), torch.randn(2, 10, DIM)
    with torch.no_grad():
        model.router.gate.weight.zero_()
    model(x).sum().backward()
    assert float(model.statistics[-1]) / 20 == pytest.approx(math.log(ARGS.n_experts))


def test_the_balance_loss_has_the_gradient_of_its_formula() -> None:
    """E / k sum_e (share of the sequence's choices) (mean score), for each sequence; 1 for an even load."""
    model, x = mixture(), torch.randn(3, 20, DIM)
    coefficient, scale, seq_len = 0.5, 0.25, 20
    config = MoEConfig(balance="loss", loss_coefficient=coefficient)
    add_router_losses(model, config, scale / seq_len, seq_len, ())
    actual = torch.autograd.grad((0 * model(x)).sum(), model.router.gate.weight)[0]

    scores = (x @ model.router.gate.weight.T).softmax(-1)
    chosen = F.one_hot(scores.topk(ARGS.top_k).indices, ARGS.n_experts).sum(-2).float()
    shares = chosen.mean(1) * ARGS.n_experts / ARGS.top_k
    loss = (shares * scores.mean(1)).sum()
    assert 1 < float(loss.detach()) / 3 < ARGS.n_experts
    added = torch.autograd.grad(loss, model.router.gate.weight)[0] * coefficient * scale
    torch.testing.assert_close(actual, added, rtol=1e-4, atol=1e-6)


def test_the_z_loss_of_a_router_has_the_gradient_of_its_formula() -> None:
    """The square of logsumexp of a token's logits (ST-MoE), summed over tokens, in float64."""
    model, x = mixture(), torch.randn(3, 20, DIM)
    coefficient, scale = 0.5, 0.25
    add_router_losses(model, MoEConfig(z_loss_coefficient=coefficient), scale, 20, ())
    actual = torch.autograd.grad((0 * model(x)).sum(), model.router.gate.weight)[0]
    weight = model.router.gate.weight.detach().double().requires_grad_()
    loss = (x.double() @ weight.T).exp().sum(-1).log().square().sum()
    expected = torch.autograd.grad(loss, weight)[0] * coefficient * scale
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_routers_gemm_on_tensor_cores_is_as_exact_as_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its result to float32's rounding, its gradients to bfloat16's, as the cast of float32 gradients would be."""
    # torch has this GEMM on GPUs alone.
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype))
    x, weight, grad = torch.randn(64, 32), torch.randn(16, 32), torch.randn(64, 16)
    results = []
    for function in (ExactLinear.apply, lambda x, weight: F.linear(x.float(), weight.float())):
        leaves = [tensor.bfloat16().requires_grad_() for tensor in (x, weight)]
        out = function(*leaves)
        assert out.dtype == torch.float32
        results.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    for actual, expected in zip(*results, strict=True):
        exact = 1e-6 if actual.dtype == torch.float32 else torch.finfo(torch.bfloat16).eps
        torch.testing.assert_close(actual, expected, rtol=exact, atol=exact)


def test_with_parameters_in_host_memory_the_biases_are_on_the_device() -> None:
    """FSDP brings parameters there, but no buffers. Meta stands for the device."""
    with torch.device("meta"):
        model: Any = nn.ModuleDict({"moe": MoE(DIM, ARGS)})
    device: Any = SimpleNamespace(torch_device=torch.device("meta"))
    allocate_shards(model, [model], JobConfig(training=Training(enable_cpu_offload=True)), device)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}


def test_a_model_that_transformers_lacks_is_not_exported_at_the_end(tmp_path: object) -> None:
    """But refused at the start."""
    export = ("--checkpoint.enable_checkpoint", "--checkpoint.last_save_in_hf")
    small = (*SMALL, into(tmp_path), "--training.steps=1", *export)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="transformers has no place for"):
        train_here(*small, "--model.name=qwen3_moe")
    sigmoid = (*small, "--experimental.custom_import=tiny", "--model.name=sparse", "--model.flavor=deep")
    with pytest.raises(ConfigError, match="no sigmoid scores"):
        train_here(*sigmoid, "--moe.balance=loss")
