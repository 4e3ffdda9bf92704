"""Initial weights: a function of the seed and the parameter's name."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from torchtitan.models import MODELS
from torchtitan.models.init import init_weights
from torchtitan.models.llama.args import LlamaArgs
from torchtitan.models.llama.model import Llama
from torchtitan.models.moe import reset_buffers

ARGS = LlamaArgs(dim=128, n_layers=3, n_heads=4, n_kv_heads=4, ffn_dim=256, vocab_size=500)


def weights(args: LlamaArgs = ARGS, seed: int = 0) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = Llama(args)
    model.to_empty(device="cpu")
    init_weights(model, model.init_std, seed)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_seed_decides_the_weights_whatever_the_state_of_torch() -> None:
    torch.manual_seed(1)
    first = weights()
    torch.manual_seed(2)
    before = torch.get_rng_state()
    again = weights()
    assert torch.equal(torch.get_rng_state(), before)  # it does not use torch's own generator
    assert all(torch.equal(first[name], again[name]) for name in first)
    other = weights(seed=1)
    assert all(not torch.equal(first[name], other[name]) for name in first if "norm" not in name)


def test_every_parameter_has_numbers_of_its_own() -> None:
    drawn = [weight.flatten()[:1000] for name, weight in weights().items() if "norm" not in name]
    for index, left in enumerate(drawn):
        for right in drawn[:index]:
            assert torch.corrcoef(torch.stack([left, right]))[0, 1].abs() < 0.2


def test_a_weight_does_not_depend_on_the_other_parameters() -> None:
    """So that a pipeline stage, or a model of different depth, starts from the same layers."""
    deep, shallow = weights(), weights(replace(ARGS, n_layers=1))
    assert all(torch.equal(deep[name], weight) for name, weight in shallow.items())


@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("tok_embeddings.weight", 1.0),
        ("output.weight", 0.02),
        ("layers.0.attention.wq.weight", 128**-0.5),
        ("layers.2.feed_forward.w3.weight", 128**-0.5),
        ("layers.0.attention.wo.weight", (2 * 128) ** -0.5),
        ("layers.2.feed_forward.w2.weight", (6 * 256) ** -0.5),
    ],
)
def test_standard_deviations(name: str, std: float) -> None:
    weight = weights()[name]
    assert weight.std().item() == pytest.approx(std, rel=0.03)  # truncation at three sigma costs 1.3%
    assert weight.mean().abs() < 0.05 * std
    assert 2.5 * std < weight.abs().max() <= 3 * std


def test_norms_start_at_one_and_a_tied_embedding_small() -> None:
    tied = weights(replace(ARGS, tied_embeddings=True))
    assert all((weight == 1).all() for name, weight in tied.items() if "norm" in name)
    assert tied["tok_embeddings.weight"].std().item() == pytest.approx(0.02, rel=0.03)


def test_wrappers_do_not_change_the_weights() -> None:
    def initial(wrap: bool) -> torch.Tensor:
        block = nn.Linear(8, 8, bias=False)
        model = nn.Sequential(checkpoint_wrapper(block) if wrap else block)
        init_weights(model, lambda name: 0.02, seed=0)
        return block.weight.detach()

    assert torch.equal(initial(True), initial(False))


def test_first_loss_equals_a_uniform_guess() -> None:
    model = Llama(ARGS)
    init_weights(model, model.init_std, seed=0)
    tokens = torch.randint(500, (2, 64), generator=torch.Generator().manual_seed(0))
    loss = model(tokens, tokens.roll(-1, 1)) / tokens.numel()
    assert loss.item() == pytest.approx(torch.tensor(500.0).log().item(), abs=0.1)


@pytest.mark.parametrize("name", ["qwen3_moe", "more experts, scaled"])
def test_a_layer_of_experts_starts_with_the_output_of_a_dense_layer(name: str) -> None:
    """In size: the weighted sum over a token's experts is as large as the sum of a dense layer."""
    dense, sparse = (MODELS.get(family).flavor("debugmodel") for family in ("qwen3", "qwen3_moe"))
    if name != "qwen3_moe":
        moe = replace(sparse.moe, top_k=4, ffn_dim=192, score="sigmoid", scale=1.5)
        sparse = replace(sparse, moe=moe)
    sizes = []
    x = torch.randn(2, 64, dense.dim, generator=torch.Generator().manual_seed(0))
    for family, args in (("qwen3", dense), ("qwen3_moe", sparse)):
        with torch.device("meta"):
            model = MODELS.get(family).build(replace(args, vocab_size=500))
        model.to_empty(device="cpu")
        init_weights(model, model.init_std, 0)
        reset_buffers(model)
        block: Any = model.layers["2"]
        with torch.no_grad():
            sizes.append(float((block.feed_forward if family == "qwen3" else block.moe)(x).std()))
    assert sizes[1] == pytest.approx(sizes[0], rel=0.15)
