"""muP: what changes with width and depth, and that it is what the papers say."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from torchtitan.config.training import Optimizer, OptimizerGroup
from torchtitan.errors import ConfigError
from torchtitan.models import MODELS
from torchtitan.models.init import init_weights
from torchtitan.models.llama.args import LlamaArgs
from torchtitan.models.llama.model import Llama
from torchtitan.models.parametrization import ParameterScaling, mup
from torchtitan.optim.optimizer import build_optimizer
from torchtitan.protocols import Decoder

BASE = LlamaArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=64, vocab_size=100)
# Twice the width, in as many heads, which so get wider; four times the depth.
LARGE = replace(BASE, dim=64, n_layers=8, ffn_dim=128)
LR, EPS = 0.01, 1e-4  # an eps as large as gradients


def on_meta(args: Any, build: Callable[[Any], Decoder] = Llama) -> Decoder:
    with torch.device("meta"):
        return build(args)


@pytest.mark.parametrize(
    "family", ["llama3", "qwen3", "qwen3_moe", "olmo3", "glm4_moe", "afmoe", "deepseek_v3", "gpt_oss"]
)
@pytest.mark.parametrize("tied", [False, True])
def test_nothing_changes_at_the_sizes_of_the_base(family: str, tied: bool) -> None:
    spec = MODELS.get(family)
    args = replace(spec.flavor("debugmodel").with_vocab_size(100), tied_embeddings=tied)
    scalings = mup(on_meta(args, spec.build), on_meta(args, spec.build))
    assert set(scalings.values()) == {ParameterScaling()}


def test_norms_at_the_end_of_branches_carry_the_depth() -> None:
    """The matrix before such a norm has no scale of its own."""
    spec = MODELS.get("olmo3")
    base: Any = spec.flavor("debugmodel").with_vocab_size(100)
    large = replace(base, dim=4 * base.dim, n_heads=4 * base.n_heads, n_layers=4 * base.n_layers)
    scalings = mup(on_meta(large, spec.build), on_meta(base, spec.build))
    for norm in ("attention_post_norm", "ffn_post_norm"):
        factors = scalings[f"layers.0.{norm}.weight"]
        assert (factors.init, factors.adamw, factors.eps) == pytest.approx((1 / 2, 1 / 4, 1 / 4))
    for layer in ("attention.wq", "attention.wo", "feed_forward.w1"):
        factors = scalings[f"layers.0.{layer}.weight"]
        assert (factors.init, factors.adamw, factors.eps) == pytest.approx((1, 1 / 4 / 2, 1 / 4 / 2)), layer


def test_scaled_embeddings_start_at_the_scale_of_the_norms() -> None:
    """The root of the width, which multiplies them, is part of the model; its growth is in the factors."""
    spec = MODELS.get("afmoe")
    base: Any = spec.flavor("debugmodel").with_vocab_size(100)
    models = on_meta(replace(base, dim=4 * base.dim, n_heads=4 * base.n_heads), spec.build), on_meta(base, spec.build)
    factors = mup(*models)["tok_embeddings.weight"]
    std = models[0].init_std("tok_embeddings.weight")
    assert std is not None and std * factors.init * (4 * base.dim) ** 0.5 == pytest.approx(1)
    assert (factors.adamw, factors.eps) == pytest.approx((1 / 2, 1 / 2))


def test_factors_of_each_kind_of_parameter() -> None:
    spec = MODELS.get("qwen3_moe")
    base: Any = spec.flavor("debugmodel").with_vocab_size(100)
    moe = replace(base.moe, ffn_dim=2 * base.moe.ffn_dim)
    large = replace(base, dim=4 * base.dim, n_heads=4 * base.n_heads, n_layers=4 * base.n_layers, moe=moe)
    scalings = mup(on_meta(large, spec.build), on_meta(base, spec.build))
    # Of initial values, relative to the standard: nothing where it is 1 / sqrt(fan-in); AdamW's learning rate; its eps.
    expected = {
        "tok_embeddings.weight": (1, 1, 1 / 4),
        "layers.0.attention.wq.weight": (1, 1 / 4 / 2, 1 / 4 / 2),
        "layers.0.attention.wo.weight": (1 / 2, 1 / 4 / 4, 1 / 4),
        "layers.0.attention.q_norm.weight": (1, 1 / 2, 1 / 4 / 2),
        "layers.0.attention_norm.weight": (1, 1 / 2, 1 / 4 / 2),
        "layers.0.moe.router.gate.weight": (1 / 2, 1 / 4 / 2, 1 / 4 / 2),
        "layers.0.moe.experts.w1.weight": (1, 1 / 4 / 2, 1 / 4 / 2),
        "layers.0.moe.experts.w2.weight": (1 / 2, 1 / 2 / 4, 1 / 4),
        # Of 24 layers, the ninth starts like the third of the base's six.
        "layers.8.moe.experts.w2.weight": (1 / 2 * 3**0.5, 1 / 2 / 4, 1 / 4),
        "norm.weight": (1, 1, 1 / 4),
        "output.weight": (1 / 4, 1 / 4, 1),
    }
    for name, factors in expected.items():
        assert (scalings[name].init, scalings[name].adamw, scalings[name].eps) == pytest.approx(factors), name
    # Muon's update is as large as AdamW's, but its spectral norm grows with the root of the width.
    assert scalings["layers.0.attention.wq.weight"].muon == pytest.approx(1 / 2 / 2)
    assert scalings["layers.0.attention.wo.weight"].muon == pytest.approx(1 / 2 / 4)
    # 768 x 1024 instead of 384 x 256, and the depth
    size = ((768 / 1024 / 1024) / (384 / 256 / 384)) ** 0.5
    assert scalings["layers.0.moe.experts.w1.weight"].muon == pytest.approx(size / 2)


class Multiplied(nn.Module):
    """A layer, and a factor on what it returns."""

    def __init__(self, layer: nn.Module | None, factor: float) -> None:
        super().__init__()
        assert layer is not None
        self.layer, self.factor = layer, factor

    def forward(self, *inputs: Any) -> Any:
        return self.layer(*inputs) * self.factor


def textbook(tied: bool) -> tuple[Decoder, torch.optim.Optimizer]:
    """`LARGE` with the multipliers, initial values, learning rates, eps and decay of arXiv 2505.01618, table 1, for
    alpha = 1/2, and attention logits that are divided by head_dim."""
    width, depth = 2, 4
    model, base = (Llama(replace(args, tied_embeddings=tied)) for args in (LARGE, BASE))
    stds, groups = {}, []
    for name, parameter in model.named_parameters():
        in_block, hidden = name.startswith("layers."), name.startswith("layers.") and parameter.ndim > 1
        layer = int(name.split(".")[1]) if in_block else 0
        like = name.replace(f"layers.{layer}.", f"layers.{layer // depth}.")
        std = base.init_std(like)
        stds[name] = std and std * (width**-0.5 if hidden else 1)
        lr = LR * (1 / width if hidden else 1) * (depth**-0.5 if in_block else 1)
        decay = 0.1 * LR / lr if parameter.ndim > 1 else 0.0
        eps = EPS / width * (depth**-0.5 if in_block else 1)
        groups.append({"params": [parameter], "lr": lr, "eps": eps, "weight_decay": decay})
    init_weights(model, stds.__getitem__, seed=0)
    model.norm = Multiplied(model.norm, 1 / width)
    block: Any
    for block in model.layers.values():
        block.attention.wq = Multiplied(block.attention.wq, (8 / 16) ** 0.5)
        block.attention = Multiplied(block.attention, depth**-0.5)
        block.feed_forward = Multiplied(block.feed_forward, depth**-0.5)
    return model, torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))


def ours(args: LlamaArgs, base: LlamaArgs, name: str = "AdamW") -> tuple[Decoder, torch.optim.Optimizer]:
    model = Llama(args)
    scalings = mup(model, on_meta(base))
    init_weights(model, model.init_std, 0, lambda name: scalings[name].init)
    config = Optimizer(name=name, lr=LR, eps=EPS, weight_decay=0.1)
    return model, build_optimizer(model, config, dtype=torch.float32, scalings=scalings)


def losses(model: Decoder, optimizer: torch.optim.Optimizer, steps: int = 10) -> torch.Tensor:
    tokens = torch.randint(0, 100, (4, 33), generator=torch.Generator().manual_seed(0))
    history = []
    for _ in range(steps):
        loss = model(tokens[:, :-1], tokens[:, 1:]) / (4 * 32)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.detach())
    return torch.stack(history)


@pytest.mark.parametrize("tied", [False, True])
def test_trains_like_a_model_with_multipliers(tied: bool) -> None:
    args, base = (replace(sizes, tied_embeddings=tied) for sizes in (LARGE, BASE))
    expected, actual = losses(*textbook(tied)), losses(*ours(args, base))
    assert expected[-1] < expected[0] - 0.1
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=0)


def test_settings_of_a_group_are_those_at_the_sizes_of_the_base() -> None:
    """And lr x weight_decay stays, so that a step takes the same fraction off a weight at every size."""
    model = on_meta(LARGE)
    group = OptimizerGroup(["attention.wk"], lr=0.4, weight_decay=0.5)
    config = Optimizer(lr=0.1, weight_decay=0.2, group=[group])
    optimizer = build_optimizer(model, config, scalings=mup(model, on_meta(BASE)))
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    settings = {name: groups[parameter] for name, parameter in model.named_parameters()}
    wk, w1 = settings["layers.0.attention.wk.weight"], settings["layers.0.feed_forward.w1.weight"]
    assert (wk["lr"], w1["lr"]) == pytest.approx((0.4 / 4, 0.1 / 4))
    assert (wk["weight_decay"], w1["weight_decay"]) == pytest.approx((4 * 0.5, 4 * 0.2))


def test_a_base_without_the_parts_of_the_model() -> None:
    spec = MODELS.get("qwen3_moe")
    sparse = on_meta(spec.flavor("debugmodel").with_vocab_size(100), spec.build)
    with pytest.raises(ConfigError, match=r"mup_base_flavor: this flavor has no layers\.0\.attention\.q_norm\.weight"):
        mup(sparse, on_meta(BASE))


def activations(model: Decoder) -> dict[str, torch.Tensor]:
    outputs: dict[str, torch.Tensor] = {}
    hooks = [
        module.register_forward_hook(lambda module, inputs, out, name=name: outputs.update({name: out}))
        for name, module in model.layers["1"].named_children()
    ]
    with torch.no_grad():
        outputs["logits"] = model(torch.arange(100).view(4, 25))
    for hook in hooks:
        hook.remove()
    return outputs


def changes(width: int, base: int, optimizer: str) -> dict[str, float]:
    """Mean absolute changes of activations in a few steps."""
    args, like = (
        replace(BASE, dim=dim, n_heads=dim // 16, n_kv_heads=dim // 16, ffn_dim=2 * dim) for dim in (width, base)
    )
    model, stepper = ours(args, like, optimizer)
    before = activations(model)
    losses(model, stepper, steps=4)
    return {name: float((after - before[name]).abs().mean()) for name, after in activations(model).items()}


@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
def test_training_changes_activations_equally_at_every_width(optimizer: str) -> None:
    """The coordinate check. A model that is its own base is a standard one."""
    widths = (32, 64, 128, 256)
    standard = [changes(width, width, optimizer) for width in widths]
    scaled = [changes(width, 32, optimizer) for width in widths]
    for name in ("feed_forward", "attention_norm", "logits"):
        assert standard[-1][name] > 2 * standard[0][name], name
    for name in ("feed_forward", "attention_norm"):
        assert 0.6 * scaled[0][name] < scaled[-1][name] < 1.2 * scaled[0][name], name
    # A part of the logits comes from the initial output layer, and vanishes with the width.
    assert 0.4 * scaled[0]["logits"] < scaled[-1]["logits"] < 1.2 * scaled[0]["logits"]
